"""What a run needs before its first update: models, rows, where they lie; and how rows become a batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.checkpoint import fingerprint_of, load_draft, load_target, read_draft
from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import Draft, DraftParams, draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.files import at
from eagle3_jax.processes import agreed, first, on_host, said_by_first
from eagle3_jax.sharding import by_rows, constrain, place, replicated, shardings, unsplit
from eagle3_jax.target import Target, target_specs
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig, check_row_length, check_taps
from eagle3_jax.training.data import encode_file
from eagle3_jax.training.features import (
    FeatureRows,
    Joined,
    Row,
    Rows,
    RowSource,
    check_tokens,
    features_in_loop,
    rows_mark,
    stack_rows,
    tap_rms,
    tap_scales,
)
from eagle3_jax.training.loss import Batch
from eagle3_jax.training.packing import Packed, pack
from eagle3_jax.training.reporting import shown
from eagle3_jax.training.row_files import read_packed, rows_file, write_packed
from eagle3_jax.training.start import describe, draft_mark, initial_params, label_head
from eagle3_jax.training.step import Teacher
from eagle3_jax.vocab import DraftVocab

logger = logging.getLogger(__name__)

SCALE_ROWS = 16  # rows that the taps' scales are measured on


@dataclasses.dataclass
class Setup:
    """Everything a loop needs that does not change from update to update.

    Attributes:
      target: without its layers where nothing runs them.
      draft: as it begins.
      teacher: the target's head at the draft vocabulary.
      rows: all of them.
      train_order, held_out: which are trained on, and which are not.
      online: the target runs in the loop.
      attention: who computes attention, one of `attention.PACKED`.
      trained: the update of the checkpoint that the run goes on from; None for a new one.
      mesh: the devices; None for one.
    """

    target: Target
    draft: Draft
    teacher: Teacher
    rows: RowSource
    train_order: np.ndarray
    held_out: np.ndarray
    online: bool
    attention: str
    trained: int | None = None
    mesh: Mesh | None = None


def packed_rows(config: TrainConfig) -> Packed:
    """Read the data files, encode them with the target's tokenizer and pack them; reports go to the log.

    Raises:
      InputError: see `training.data.encode_file`.
    """
    tokenizer = load_tokenizer(Path(config.target))
    encoded = []
    for name in config.data:
        documents, report = encode_file(
            at(name), tokenizer, max_length=config.row_length, last_turn_only=config.last_turn_only,
            options=dict(config.template),
        )  # fmt: skip
        logger.info("%s: %s", name, report)
        encoded += documents
    packed = pack(encoded, row_length=config.row_length, seed=config.seed)
    logger.info("%s", packed)
    return packed


def _open_rows(
    config: TrainConfig, target: Target, mark: str, taps: tuple[int, ...], packed: Packed | None
) -> tuple[RowSource, int]:
    """The rows, and how many of them are the first source's, from which rows are held out."""
    if packed is not None:
        check_tokens(packed.tokens, target.config.vocab_size)
        return Rows(packed), len(packed.tokens)
    folders = [Path(name) for name in config.features]
    parts = [
        FeatureRows(folder, taps=taps, target_fingerprint=mark, row_length=config.row_length) for folder in folders
    ]
    return Joined(parts), len(parts[0])


def _split(config: TrainConfig, rows: RowSource, main: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are trained on and which are held out, by the seed."""
    # Evaluation is always on rows of the first folder, so that runs with and without further data can be compared.
    order = np.random.default_rng(config.seed).permutation(main)
    held_out = order[: config.held_out_rows]
    train_order = np.concatenate([order[config.held_out_rows :], np.arange(main, len(rows))])
    if train_order.size < config.batch_rows or held_out.size < config.held_out_rows:
        raise InputError(
            expected=f"at least held_out_rows + batch_rows = {config.held_out_rows + config.batch_rows} packed rows, "
            f"and {config.held_out_rows} in the first folder of features",
            found=f"{len(rows)}, and {main}",
            remedy="Give more data, shorter rows (--row_length), or fewer --held_out_rows.",
        )
    logger.info(
        "%d rows to train on, %d held out; batches run on from one epoch into the next, so that no row is dropped",
        train_order.size, held_out.size,
    )  # fmt: skip
    return train_order, held_out


def prepare(config: TrainConfig, run: RunFolder, mesh: Mesh | None = None) -> Setup:
    """Load the target and the rows; make the draft, or take the run's vocabulary when there is a run.

    Raises:
      InputError: too few rows; see also `load_target`, `packed_rows`, `FeatureRows` and `RunFolder`.
    """
    resumed = bool(said_by_first(run.exists))
    latest = said_by_first(run.latest() or -1) if resumed else -1
    trained = None if latest < 0 else latest
    # What a process may fail at alone comes in stretches, after each of which all agree to go on.
    with agreed():
        folder, online = Path(config.target), not config.features
        layers = "stacked" if online or config.decodes else "none"
        target = load_target(folder, jnp.dtype(config.target_dtype), mesh=mesh, layers=layers)
        mark = fingerprint_of(folder)
        attention = config.attention_on(jax.devices()[0].platform, target.config.head_dim)
        # A checkpoint's own weights come in the place of any that would be read or made here.
        begun = None
        if config.init and trained is None:
            begun = read_draft(Path(config.init), target.config)
        given = run.read()[1] if resumed else None if begun is None else begun[0]
        taps = config.taps or (target.config.default_taps if given is None else given.taps)
        check_taps(taps, target.config.num_layers)
        check_row_length(config.row_length, target.config.context_limit)
        kept = rows_file(config, run.folder) if online else None
        found = read_packed(kept)
        packed = (found or packed_rows(config)) if online else None
        rows, main = _open_rows(config, target, mark, taps, packed)
        train_order, held_out = _split(config, rows, main)
        marks = {"target": mark, "rows": rows_mark(rows)}
    with agreed():
        if begun is not None:
            marks["draft of --init"] = draft_mark(Path(config.init))
        if resumed:
            run.check_same(config)
            run.check_marks(marks)
        elif first():
            stops = eos_ids(folder, load_tokenizer(folder))
            run.start(config, *describe(config, target, mark, taps, rows, stops, begun), marks)
        if first() and kept is not None and packed is not None and found is None:
            write_packed(kept, packed)
    with agreed():
        _, draft_config, vocab = run.read()  # by all of them, so that a folder which they do not share is noticed
    if mesh is not None:
        for note in unsplit((target_specs(target.config), draft_specs(draft_config)), mesh):
            logger.info("%s", note)
        vocab = place(vocab, replicated(mesh))
    setup = Setup(
        target=target, draft=cast(Any, None), teacher=cast(Any, None), rows=rows, train_order=train_order,
        held_out=held_out, online=online, attention=attention, trained=trained, mesh=mesh,
    )  # fmt: skip
    params = _first_params(config, setup, draft_config, vocab, mark) if trained is None else cast(Any, None)
    setup.draft = Draft(params=params, vocab=vocab, embed=target.params.embed, config=draft_config)
    make_head = label_head
    if mesh is not None:
        make_head = jax.jit(label_head, out_shardings=shardings(draft_specs(draft_config), mesh).lm_head)
    setup.teacher = Teacher(label_head=make_head(target, vocab))
    return setup


def _first_params(config: TrainConfig, setup: Setup, draft: DraftConfig, vocab: DraftVocab, mark: str) -> DraftParams:
    """What training begins with: a draft's weights, or new ones; made where they belong."""
    mesh, target = setup.mesh, setup.target
    if config.init:
        # Copies: an update donates the draft's arrays, and a borrowed head would be the target's own.
        params = load_draft(Path(config.init), target, jnp.float32, mark=mark, mesh=mesh).params
        return jax.tree.map(jnp.array, params)
    scales = _measure_scales(config, setup, draft.taps)
    logger.info("typical RMS of the taps %s: %s", list(draft.taps), shown(scales.tolist()))
    make = lambda target, vocab, key: initial_params(draft, target, vocab, scales, key)
    if mesh is not None:
        make = jax.jit(make, out_shardings=shardings(draft_specs(draft), mesh))
    # Of the target, what a draft takes over.
    given = dataclasses.replace(target, params=dataclasses.replace(target.params, layers=()))
    return make(given, vocab, jax.random.key(config.seed))


def _measure_scales(config: TrainConfig, setup: Setup, taps: tuple[int, ...]) -> np.ndarray:
    """Typical RMS of each tap [A] over the first rows, a batch at a time."""
    order, rms, documents = setup.train_order, [], []
    for start in range(0, min(SCALE_ROWS, order.size // config.batch_rows * config.batch_rows), config.batch_rows):
        indices = [int(index) for index in order[start : start + config.batch_rows]]
        batch = batch_of(setup, read_rows(setup, indices), taps)
        rms.append(on_host(tap_rms(batch.taps, count=len(taps))))
        documents.append(on_host(batch.documents))
    return tap_scales(np.concatenate(rms), np.concatenate(documents))


def supervised(row: Row, supervise: str) -> Row:
    """The row as it is trained on: its replies, or with "all" every token but the first two of each document.

    The first token's states are an attention sink, hundreds of times larger than all others; a slot that reads them
    would make up most of the gradient.
    """
    if supervise == "replies":
        return row
    return row | {"spans": np.where(row["positions"] > 1, row["documents"], 0).astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class HostRows:
    """Rows of a batch in memory, stacked: those places [start, stop) of `count` that this process's devices hold."""

    count: int
    parts: Mapping[tuple[int, int], Row]


def read_rows(
    setup: Setup, indices: Sequence[int], change: Callable[[int, Row], Row] = lambda place, row: row
) -> HostRows:
    """Read rows, each process those that its devices hold.

    Args:
      setup: the run.
      indices: of the rows, the same in every process.
      change: what becomes of the row at a place of the batch.
    """
    parts = {(0, len(indices))}
    if setup.mesh is not None:
        where: Any = by_rows(setup.mesh).addressable_devices_indices_map((len(indices),))
        parts = {part.indices(len(indices))[:2] for (part,) in where.values()}
    row = lambda place: change(place, setup.rows[indices[place]])
    return HostRows(len(indices), {part: stack_rows([row(place) for place in range(*part)]) for part in sorted(parts)})


def batch_of(setup: Setup, rows: HostRows, taps: tuple[int, ...] | None = None) -> Batch:
    """Rows on their devices, with their features, from disk or from the target.

    Args:
      setup: the run.
      rows: from `read_rows`.
      taps: boundaries; None takes the draft's.
    """
    arrays: dict[str, jax.Array] = {}
    for name, example in next(iter(rows.parts.values())).items():
        if setup.mesh is None:
            arrays[name] = jnp.asarray(example)
        else:
            held = lambda part, name=name: rows.parts[part[0].indices(rows.count)[:2]][name]
            shape = (rows.count, *example.shape[1:])
            arrays[name] = jax.make_array_from_callback(shape, by_rows(setup.mesh), held)
    if setup.online:
        arrays = features_in_loop(setup.target, taps or setup.draft.config.taps, arrays, setup.attention)
    return Batch(**arrays)


@jax.jit
def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Micro-batches [B, T, ...] to the batch of an update [U, B, T, ...]."""

    def stack(*arrays: jax.Array) -> jax.Array:
        return constrain(jnp.stack(arrays), None, "batch", *[None] * (arrays[0].ndim - 1))

    return jax.tree.map(stack, *batches)
