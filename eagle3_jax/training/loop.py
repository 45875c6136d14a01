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
from jax.sharding import Mesh

from eagle3_jax.checkpoint import fingerprint, load_draft, load_target
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import teacher_forced
from eagle3_jax.params import count_params
from eagle3_jax.sharding import entered, make_mesh, put_batch, replicated, shardings, unsplit
from eagle3_jax.target import Target, target_specs
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training.checkpoint import RunFolder, abstract_state
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
    tap_scales,
)
from eagle3_jax.training.loss import Batch, StepSums
from eagle3_jax.training.packing import Packed, pack
from eagle3_jax.training.start import describe, draft_mark, initial_params, label_head
from eagle3_jax.training.step import Teacher, TrainState, make_eval_step, make_optimizer, make_train_step

logger = logging.getLogger(__name__)

SCALE_ROWS = 16  # rows that the taps' scales are measured on
PROFILED = 3  # updates in a profile


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


def _open_rows(config: TrainConfig, target: Target, taps: tuple[int, ...]) -> tuple[RowSource, int]:
    """The rows, and how many of them are the first source's, from which rows are held out."""
    if not config.features:
        packed = packed_rows(config)
        check_tokens(packed, target.config.vocab_size)
        return Rows(packed), len(packed.tokens)
    mark = fingerprint(target)
    folders = [Path(name) for name in config.features]
    parts = [
        FeatureRows(folder, taps=taps, target_fingerprint=mark, row_length=config.row_length) for folder in folders
    ]
    return Joined(parts), len(parts[0])


def supervised(row: Row, supervise: str) -> Row:
    """The row as it is trained on: its replies, or with "all" every token but the first two of each document.

    The first token's states are an attention sink, hundreds of times larger than all others; a slot that reads them
    would make up most of the gradient.
    """
    if supervise == "replies":
        return row
    return row | {"spans": np.where(row["positions"] > 1, row["documents"], 0).astype(np.int32)}


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


def finite(value: Any) -> Any:
    """The same with null for nan and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
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
    mesh: Mesh | None = None


def _prepare(config: TrainConfig, run: RunFolder, mesh: Mesh | None = None) -> _Setup:
    """Load the target and the rows; make the draft, or take the run's vocabulary when there is a run."""
    folder = Path(config.target)
    target = load_target(folder, mesh=mesh)
    taps = config.taps or target.config.default_taps
    check_taps(taps, target.config.num_layers)
    check_row_length(config.row_length, target.config.context_limit)
    rows, main = _open_rows(config, target, taps)
    # Evaluation is always on rows of the first folder, so that runs with and without further data can be compared.
    first = np.random.default_rng(config.seed).permutation(main)
    held_out = first[: config.held_out_rows]
    train_order = np.concatenate([first[config.held_out_rows :], np.arange(main, len(rows))])
    if train_order.size < config.batch_rows or held_out.size < config.held_out_rows:
        raise InputError(
            expected=f"at least held_out_rows + batch_rows = {config.held_out_rows + config.batch_rows} packed rows, "
            f"and {config.held_out_rows} in the first folder of features",
            found=f"{len(rows)}, and {main}",
            remedy="Give more data, shorter rows (--row_length), or fewer --held_out_rows.",
        )
    online = not config.features
    marks = {"target": fingerprint(target), "rows": rows_mark(rows)}
    if config.init and not (run.exists and run.latest() is not None):
        marks["draft of --init"] = draft_mark(Path(config.init))
    if run.exists:
        run.check_same(config)
        run.check_marks(marks)
        _, draft_config, vocab = run.read()
    else:
        draft_config, vocab = describe(config, target, taps, rows, eos_ids(folder, load_tokenizer(folder)))
        run.start(config, draft_config, vocab, marks)
    if config.init and run.latest() is None:
        # Copies: an update donates the draft's arrays, and a borrowed head would be the target's own.
        params = jax.tree.map(jnp.array, load_draft(Path(config.init), target, jnp.float32).params)
    else:
        scales = np.ones(len(taps))
        if run.latest() is None:
            scales = _measure_scales(config, target, taps, rows, train_order, mesh)
            logger.info("typical RMS of the taps %s: %s", list(taps), shown(scales.tolist()))
        params = initial_params(draft_config, target, vocab, scales, jax.random.key(config.seed))
    head = label_head(target, vocab)
    if mesh is not None:
        specs = draft_specs(draft_config)
        for note in unsplit((target_specs(target.config), specs), mesh):
            logger.info("%s", note)
        places = shardings(specs, mesh)
        params = jax.device_put(params, places)
        vocab = jax.device_put(vocab, replicated(mesh))
        head = jax.device_put(head, places.lm_head)
    draft = Draft(params=params, vocab=vocab, embed=target.params.embed, config=draft_config)
    return _Setup(target, draft, Teacher(label_head=head), rows, train_order, held_out, online, mesh)


def _measure_scales(
    config: TrainConfig,
    target: Target,
    taps: tuple[int, ...],
    rows: RowSource,
    order: np.ndarray,
    mesh: Mesh | None,
) -> np.ndarray:
    """Typical RMS of each tap [A] over the first rows, a batch at a time where the target runs for it."""
    parts = []
    for start in range(0, min(SCALE_ROWS, order.size // config.batch_rows * config.batch_rows), config.batch_rows):
        part = stack_rows([rows[int(index)] for index in order[start : start + config.batch_rows]])
        if not config.features:
            arrays = put_batch({name: jnp.asarray(array) for name, array in part.items()}, mesh)
            part = {name: np.asarray(array) for name, array in features_in_loop(target, taps, arrays).items()}
        parts.append({name: part[name] for name in ("taps", "documents")})
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return tap_scales(whole["taps"], whole["documents"], len(taps))


def _batch(setup: _Setup, rows: dict[str, np.ndarray]) -> Batch:
    arrays = put_batch({name: jnp.asarray(array) for name, array in rows.items()}, setup.mesh)
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


def train(config: TrainConfig, profile: Path | None = None) -> Result:
    """Train a draft; continue the run in `config.output` when there is one.

    The order of rows follows from the seed and the update number alone, and the state holds everything else, so that an
    interrupted run continues bit for bit.

    Args:
      config: the run.
      profile: folder for a trace of `PROFILED` updates of this process, after as many that compile and warm up.

    Raises:
      InputError: see `TrainConfig.check`, the data and the target; an existing run of another config.
    """
    config.check()
    mesh = make_mesh(config.mesh, slices=config.slices) if config.mesh else None
    with entered(mesh):
        return _train(config, profile, mesh)


def _train(config: TrainConfig, profile: Path | None, mesh: Mesh | None) -> Result:
    run = RunFolder(Path(config.output), keep=config.keep, writes=True)
    setup = _prepare(config, run, mesh)
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
    step = make_train_step(optimizer, decay=config.step_decay, compute=compute, rematerialise=config.rematerialise)
    eval_step = make_eval_step(compute)
    source = grain.MapDataset.source(_Ordered(setup.rows, setup.train_order)).seed(config.seed).shuffle().repeat()
    per_update = config.batch_rows * config.accumulation
    model = dataclasses.replace(setup.draft, params=None)  # the state has them
    interrupt, evaluation = Interrupt(), {}
    if profile is not None and config.updates - int(state.update) <= PROFILED:
        logger.warning("no profile: it begins after %d updates, and no more are left", PROFILED)
    began, tokens_done, first = time.perf_counter(), 0, int(state.update)
    tracing = False
    since_entry: list[jax.Array] = []  # gradient norms of the updates that no entry of the log covers yet
    log = run.metrics.open("a", encoding="utf-8")

    def record(entry: dict[str, Any]) -> None:
        log.write(json.dumps(finite(entry), allow_nan=False) + "\n")
        log.flush()

    with interrupt.watch(), log:
        for update in range(first, config.updates):
            steps = config.steps_at(update)
            if profile is not None and update == first + PROFILED:
                jax.profiler.start_trace(str(profile))
                tracing = True
            rows = [
                supervised(cast(Row, source[update * per_update + index]), config.supervise)
                for index in range(per_update)
            ]
            micro = []
            for start in range(0, per_update, config.batch_rows):
                micro.append(_batch(setup, stack_rows(rows[start : start + config.batch_rows])))
            batches = put_batch(jax.tree.map(lambda *arrays: jnp.stack(arrays), *micro), mesh, before=1)
            state, sums, norms = step(state, batches, model, setup.teacher, steps=steps)
            if tracing and (update + 1 in (first + 2 * PROFILED, config.updates) or interrupt.asked):
                jax.block_until_ready(state)
                jax.profiler.stop_trace()
                tracing = False
            tokens_done += per_update * config.row_length
            since_entry.append(norms["gradient_norm"])
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
                    "clipped": float(np.mean(np.asarray(since_entry) > config.clip)), "skipped": int(state.skipped),
                    "tokens_per_second": tokens_done / seconds, "seconds": seconds,
                }  # fmt: skip
                record(entry)
                since_entry.clear()
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
