"""The training loop: rows in, a draft out, resumable at any update."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.checkpoint import fingerprint, load_target
from eagle3_jax.config import DraftConfig, RopeConfig
from eagle3_jax.draft import Draft, DraftParams, draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import teacher_forced
from eagle3_jax.params import count_params, init_params
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training.checkpoint import RunFolder, abstract_state
from eagle3_jax.training.config import TrainConfig, check_taps
from eagle3_jax.training.data import encode_file
from eagle3_jax.training.features import (
    FeatureRows,
    Joined,
    Row,
    Rows,
    RowSource,
    check_tokens,
    features_in_loop,
    stack_rows,
    tap_scales,
)
from eagle3_jax.training.loss import Batch, StepSums
from eagle3_jax.training.packing import Packed, pack
from eagle3_jax.training.step import Teacher, TrainState, make_eval_step, make_optimizer, make_train_step
from eagle3_jax.vocab import DraftVocab, most_frequent, vocab_from_ids

logger = logging.getLogger(__name__)

SCALE_ROWS = 16  # rows that the taps' scales are measured on


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      updates: done in all.
      finished: False when it was interrupted; the run can be resumed.
      evaluation: the last held-out metrics.
    """

    updates: int
    finished: bool
    evaluation: dict[str, Any]


def packed_rows(config: TrainConfig) -> Packed:
    """Read the data files, encode them with the target's tokenizer and pack them; reports go to the log.

    Raises:
      InputError: see `training.data.encode_file`.
    """
    tokenizer = load_tokenizer(Path(config.target))
    encoded = []
    for name in config.data:
        documents, report = encode_file(Path(name), tokenizer, max_length=config.row_length)
        logger.info("%s: %s", name, report)
        encoded += documents
    packed = pack(encoded, row_length=config.row_length, seed=config.seed)
    logger.info("%s", packed)
    return packed


def _open_rows(config: TrainConfig, target: Target, taps: tuple[int, ...]) -> RowSource:
    if not config.features:
        packed = packed_rows(config)
        check_tokens(packed, target.config.vocab_size)
        return Rows(packed)
    mark = fingerprint(target)
    folders = [Path(name) for name in config.features]
    return Joined(
        [FeatureRows(folder, taps=taps, target_fingerprint=mark, row_length=config.row_length) for folder in folders]
    )


def choose_vocab(rows: RowSource, size: int, vocab_size: int, always: tuple[int, ...]) -> tuple[DraftVocab, float]:
    """The most frequent supervised tokens, and the share of supervised tokens that they cover."""
    counts = np.zeros(vocab_size, np.int64)
    for index in range(len(rows)):
        row = rows.text(index)
        counts += np.bincount(row["tokens"][row["spans"] > 0], minlength=vocab_size)
    ids = most_frequent(counts, size, always)
    return vocab_from_ids(ids, vocab_size), float(counts[ids].sum() / max(1, counts.sum()))


def label_head(target: Target, vocab: DraftVocab) -> jax.Array:
    """The target's head at the draft vocabulary's tokens: [C, D]."""
    return jnp.take(target.params.lm_head, vocab.d2t, axis=0, mode="clip")


def initial_params(
    config: DraftConfig, target: Target, vocab: DraftVocab, scales: np.ndarray, key: jax.Array
) -> DraftParams:
    """Starting weights: random, but for what the target already knows.

    The head starts as the target's rows of the draft vocabulary, the final norm as the target's. The fusion is drawn so
    that each tap contributes with the same variance and the feature has an RMS of about 1: raw taps differ tenfold in
    scale, and a uniform draw would let the highest drown the others.

    Args:
      config: the draft's.
      target: gives head and norm (when the widths agree).
      vocab: the draft vocabulary.
      scales: [A], typical RMS of each tap.
      key: a PRNG key.
    """
    params = init_params(draft_specs(config), key)
    taps, width = len(config.taps), config.target_hidden_size
    per_tap = np.ones(taps) if config.fc_norm else scales
    unit = jax.random.normal(jax.random.fold_in(key, 1_000), (config.hidden_size, taps, width), jnp.float32)
    factors = (1.0 / (per_tap * np.sqrt(taps * width))).astype(np.float32)
    fused = (unit * factors[None, :, None]).reshape(config.hidden_size, taps * width)
    params = dataclasses.replace(params, fc=fused)
    if config.hidden_size == width:
        # Copies: an update donates the draft's arrays, and the target still needs its own.
        head, norm = (jnp.array(each, jnp.float32) for each in (label_head(target, vocab), target.params.norm))
        params = dataclasses.replace(params, lm_head=head, norm=norm)
    return params


class Interrupt:
    """Turns SIGTERM and the first Ctrl-C into a flag that the loop reads between updates."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch while the context lasts; outside the main thread, where Python cannot, do nothing."""

        def ask(number: int, frame: Any) -> None:
            if self.asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.asked = True

        try:
            before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _sums_to_metrics(sums: StepSums) -> dict[str, Any]:
    host = jax.tree.map(lambda array: np.asarray(array, np.float64).tolist(), sums)
    return teacher_forced(**{field.name: getattr(host, field.name) for field in dataclasses.fields(StepSums)})


def _finite(value: Any) -> Any:
    """The same with null for nan and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(values: Sequence[float | None]) -> str:
    """Ratios as the progress line prints them."""
    return " ".join("-" if value is None else f"{value:.3f}" for value in values)


@dataclasses.dataclass
class _Setup:
    """Everything a loop needs that does not change from update to update."""

    target: Target
    draft: Draft
    teacher: Teacher
    rows: RowSource
    train_order: np.ndarray
    held_out: np.ndarray
    online: bool


def _prepare(config: TrainConfig, run: RunFolder) -> _Setup:
    """Load the target and the rows; make the draft, or take the run's vocabulary when there is a run."""
    folder = Path(config.target)
    target = load_target(folder)
    taps = config.taps or target.config.default_taps
    check_taps(taps, target.config.num_layers)
    rows = _open_rows(config, target, taps)
    order = np.random.default_rng(config.seed).permutation(len(rows))
    held_out, train_order = order[: config.held_out_rows], order[config.held_out_rows :]
    if train_order.size < config.batch_rows:
        raise InputError(
            expected=f"at least held_out_rows + batch_rows = {config.held_out_rows + config.batch_rows} packed rows",
            found=f"{len(rows)}",
            remedy="Give more data, shorter rows (--row_length), or fewer --held_out_rows.",
        )
    if run.exists:
        run.check_same(config)
        _, draft_config, vocab = run.read()
    else:
        stops = eos_ids(folder, load_tokenizer(folder))
        vocab, coverage = choose_vocab(rows, config.draft_vocab_size, target.config.vocab_size, stops)
        logger.info("draft vocabulary: %d tokens cover %.2f %% of the supervised ones", vocab.size, 100 * coverage)
        draft_config = DraftConfig.for_target(
            target.config,
            draft_vocab_size=config.draft_vocab_size,
            taps=taps,
            rope=RopeConfig(theta=config.rope_theta),
            trained_length=config.row_length,
            fc_norm=config.fc_norm,
            norm_output=config.norm_output,
            norm_before_residual=config.norm_before_residual,
            target_fingerprint=fingerprint(target),
        )
        run.start(config, draft_config, vocab)
    online = not config.features
    sample = [rows[int(index)] for index in train_order[:SCALE_ROWS]]
    stacked = stack_rows(sample)
    if online:
        arrays = {name: jnp.asarray(array) for name, array in stacked.items()}
        stacked = {name: np.asarray(array) for name, array in features_in_loop(target, taps, arrays).items()}
    scales = tap_scales(stacked["taps"], stacked["documents"], len(taps))
    logger.info("typical RMS of the taps %s: %s", list(taps), shown(scales.tolist()))
    params = initial_params(draft_config, target, vocab, scales, jax.random.key(config.seed))
    draft = Draft(params=params, vocab=vocab, embed=target.params.embed, config=draft_config)
    return _Setup(target, draft, Teacher(label_head=label_head(target, vocab)), rows, train_order, held_out, online)


def _batch(setup: _Setup, rows: dict[str, np.ndarray]) -> Batch:
    arrays = {name: jnp.asarray(array) for name, array in rows.items()}
    if setup.online:
        arrays = features_in_loop(setup.target, setup.draft.config.taps, arrays)
    return Batch(**arrays)


def evaluate(setup: _Setup, draft: Draft, steps: int, batch_rows: int, eval_step: Any) -> dict[str, Any]:
    """Teacher-forced metrics on all held-out rows."""
    total: StepSums | None = None
    for start in range(0, len(setup.held_out), batch_rows):
        rows = [setup.rows[int(index)] for index in setup.held_out[start : start + batch_rows]]
        # A short last batch is filled up with rows that nothing counts in, so that one program serves all.
        rows += [rows[0] | {"spans": np.zeros_like(rows[0]["spans"])}] * (batch_rows - len(rows))
        batch = _batch(setup, stack_rows(rows))
        sums = eval_step(draft, batch, setup.teacher, steps=steps)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return {} if total is None else _sums_to_metrics(total)


def evaluate_rows(target: Target, draft: Draft, rows: RowSource, steps: int) -> dict[str, Any]:
    """Teacher-forced metrics of a draft on rows without features, one row at a time."""
    setup = _Setup(
        target=target,
        draft=draft,
        teacher=Teacher(label_head=label_head(target, draft.vocab)),
        rows=rows,
        train_order=np.arange(0),
        held_out=np.arange(len(rows)),
        online=True,
    )
    return evaluate(setup, draft, steps, 1, make_eval_step())


def train(config: TrainConfig) -> Result:
    """Train a draft; continue the run in `config.output` when there is one.

    The order of rows follows from the seed and the update number alone, and the state holds everything else, so that an
    interrupted run continues bit for bit.

    Raises:
      InputError: see `TrainConfig.check`, the data and the target; an existing run of another config.
    """
    config.check()
    run = RunFolder(Path(config.output), keep=config.keep, writes=True)
    setup = _prepare(config, run)
    schedule = config.learning_rates()
    optimizer = make_optimizer(schedule, betas=config.betas, weight_decay=config.weight_decay, clip=config.clip)
    state = TrainState(
        params=setup.draft.params,
        opt_state=optimizer.init(cast(Any, setup.draft.params)),
        update=jnp.int32(0),
        skipped=jnp.int32(0),
    )
    if run.latest() is not None:
        state = run.restore(abstract_state(state))
        logger.info("resumed at update %d", int(state.update))
    run.trim_log(int(state.update))
    logger.info("%d trainable parameters", count_params(state.params))
    compute = jnp.dtype(config.compute_dtype)
    step = make_train_step(optimizer, decay=config.step_decay, compute=compute)
    eval_step = make_eval_step(compute)
    source = grain.MapDataset.source(_Ordered(setup.rows, setup.train_order)).seed(config.seed).shuffle().repeat()
    per_update = config.batch_rows * config.accumulation
    model = dataclasses.replace(setup.draft, params=None)  # the state has them
    interrupt, evaluation = Interrupt(), {}
    began, tokens_done, first = time.perf_counter(), 0, int(state.update)
    log = run.metrics.open("a", encoding="utf-8")

    def record(entry: dict[str, Any]) -> None:
        log.write(json.dumps(_finite(entry), allow_nan=False) + "\n")
        log.flush()

    with interrupt.watch(), log:
        for update in range(first, config.updates):
            steps = config.steps_at(update)
            rows = [cast(Row, source[update * per_update + index]) for index in range(per_update)]
            micro = []
            for start in range(0, per_update, config.batch_rows):
                micro.append(_batch(setup, stack_rows(rows[start : start + config.batch_rows])))
            batches = jax.tree.map(lambda *arrays: jnp.stack(arrays), *micro)
            state, sums, norms = step(state, batches, model, setup.teacher, steps=steps)
            tokens_done += per_update * config.row_length
            last = update + 1 == config.updates
            if (update + 1) % config.log_every == 0 or last or update == first:
                metrics = _sums_to_metrics(sums)
                seconds = time.perf_counter() - began
                applied = bool(norms["applied"])
                # The schedule counts the updates that changed something, as optax does.
                learning_rate = float(np.asarray(schedule(int(state.update) - int(state.skipped) - applied)))
                loss = sum(config.step_decay**s * (value or 0.0) for s, value in enumerate(metrics["cross_entropy"]))
                entry = {
                    "update": update + 1, "steps": steps, "loss": loss if applied else "skipped", **metrics,
                    "learning_rate": learning_rate, "gradient_norm": float(norms["gradient_norm"]),
                    "clipped": float(norms["gradient_norm"]) > config.clip, "skipped": int(state.skipped),
                    "tokens_per_second": tokens_done / seconds, "seconds": seconds,
                }  # fmt: skip
                record(entry)
                left = seconds / (update + 1 - first) * (config.updates - update - 1)
                print(
                    f"update {update + 1}/{config.updates} steps {steps} loss {loss:.3f} "
                    f"joint {shown(metrics['joint'])} conditional {shown(metrics['conditional'])} "
                    f"lr {learning_rate:.2e} |g| {entry['gradient_norm']:.2f} "
                    f"{entry['tokens_per_second']:.0f} tok/s left {left / 60:.1f} min"
                    + ("" if applied else f" SKIPPED ({int(state.skipped)} so far)"),
                    file=sys.stderr,
                    flush=True,
                )
            evaluated = config.held_out_rows > 0 and ((update + 1) % config.eval_every == 0 or last)
            if evaluated:
                draft = dataclasses.replace(setup.draft, params=state.params)
                evaluation = evaluate(setup, draft, config.max_steps, config.batch_rows, eval_step)
                record({"update": update + 1, "held_out": evaluation})
                print(
                    f"held out at {update + 1}: accuracy {shown(evaluation['accuracy'])} | "
                    f"joint {shown(evaluation['joint'])} | conditional {shown(evaluation['conditional'])}",
                    file=sys.stderr,
                    flush=True,
                )
            # Read once: a signal that comes during the save is answered after the next update.
            stop = interrupt.asked
            if (update + 1) % config.save_every == 0 or last or stop:
                # Only what was measured at this very update may decide which checkpoint is best.
                run.save(state, sum(value or 0.0 for value in evaluation["joint"]) if evaluated else None)
            if stop:
                run.close()
                return Result(update + 1, last, evaluation)
    run.close()
    return Result(config.updates, True, evaluation)


class _Ordered:
    """Rows by an array of indices."""

    def __init__(self, rows: RowSource, order: np.ndarray):
        self._rows, self._order = rows, order

    def __len__(self) -> int:
        return int(self._order.size)

    def __getitem__(self, index: int) -> Row:
        return self._rows[int(self._order[index])]
