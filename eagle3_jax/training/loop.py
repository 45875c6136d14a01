"""The training loop: rows in, a draft out, resumable at any update."""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.files import at
from eagle3_jax.params import count_params
from eagle3_jax.processes import Vote, agreed
from eagle3_jax.requests import Request
from eagle3_jax.sharding import abstract_placed, entered, make_mesh, place, replicated
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training.checkpoint import RunFolder, abstract_state
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.evaluation import (
    chain_length,
    decode_held_out,
    evaluate,
    held_out_prompts,
    metrics_of,
    promised_tau,
    warn_of_gap,
)
from eagle3_jax.training.reporting import Journal, check_writers, open_writers, shown
from eagle3_jax.training.setup import HostRows, batch_of, prepare, read_rows, stack_batches, supervised
from eagle3_jax.training.step import (
    TrainState,
    init_optimizer,
    make_eval_step,
    make_train_step,
    optimizer_of,
    step_options,
)

logger = logging.getLogger(__name__)

PROFILED = 3  # updates in a profile
PREFETCHED = 2  # updates whose rows are read ahead


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


def at_update(opt_state: Any, update: jax.Array) -> Any:
    """The optimiser's state with its schedule at an update.

    Optax counts what was applied; here the schedule goes by the run's own updates, so that the last one has the last
    rate however many were skipped.
    """
    is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)
    # A copy: a donated state must not hold one buffer twice.
    move = lambda node: node._replace(count=update + 0) if is_count(node) else node
    return jax.tree.map(move, opt_state, is_leaf=is_count)


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
    check_writers(config.writers)
    if jax.process_count() > 1 and not config.mesh:
        raise InputError(
            expected=f"a mesh over the {jax.device_count()} devices of {jax.process_count()} processes",
            found="no mesh",
            remedy=f"Add e.g. --mesh '(1,{jax.device_count()},1)'.",
        )
    mesh = make_mesh(config.mesh, slices=config.slices) if config.mesh else None
    with entered(mesh), jax.default_matmul_precision(config.precision):
        training = _Training(config, mesh)
        try:
            return training.run(profile)
        finally:
            # Also when something fails: a save that is under way comes to its end.
            training.folder.close()


class _Training:
    """One call of `train`."""

    def __init__(self, config: TrainConfig, mesh: Mesh | None):
        self.config, self.folder = config, RunFolder(at(config.output), keep=config.keep, writes=True)
        setup = prepare(config, self.folder, mesh)
        self.setup, compute = setup, jnp.dtype(config.compute_dtype)
        self.schedule = config.learning_rates()
        self.optimizer = optimizer_of(config)
        self.step = make_train_step(self.optimizer, attention=setup.attention, **step_options(config))
        self.eval_step = make_eval_step(compute, setup.attention, config.objective)
        source = grain.MapDataset.source(setup.train_order.tolist()).seed(config.seed).shuffle().repeat()
        self.order, self.per_update = source, config.batch_rows * config.accumulation
        self.model = dataclasses.replace(setup.draft, params=cast(Any, None))  # the state has them
        self.evaluation: dict[str, Any] = {}
        self.norms: list[jax.Array] = []  # gradient norms of the updates that no entry of the log covers yet

    def first_state(self) -> TrainState:
        """New, or as the run was left."""
        params, number, mesh = self.setup.draft.params, jnp.int32(0), self.setup.mesh
        if mesh is not None:
            number = place(np.int32(0), replicated(mesh))
        # Two counters: a donated state must not hold one buffer twice.
        state = TrainState(params=params, opt_state=None, update=number, skipped=number + 0)
        if self.setup.trained is None:
            return dataclasses.replace(state, opt_state=init_optimizer(self.optimizer, params, mesh))
        # Nothing is made that the checkpoint will replace.
        abstract = abstract_placed(draft_specs(self.setup.draft.config), mesh)
        opt_state = init_optimizer(self.optimizer, abstract, mesh)
        state = dataclasses.replace(abstract_state(state), params=abstract, opt_state=opt_state)
        state = self.folder.restore(state, self.setup.trained)
        logger.info("resumed at update %d", int(state.update))
        return state

    def loader(self, first: int) -> grain.DatasetIterator[list[HostRows]]:
        """The rows of every update from `first` on, read by a thread while earlier updates run.

        The position is the number of the update, which the state has, and nothing else need be saved.
        """
        updates = grain.MapDataset.range(self.config.updates).map(self.read)
        # One thread reads in order; more would only split what the disk can give.
        loader = iter(updates.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)))
        loader.set_state({"next_index": first})
        return loader

    def read(self, update: int) -> list[HostRows]:
        """The rows of an update, a micro-batch each, in the order that its number and the seed say."""
        config, first = self.config, update * self.per_update
        seen = lambda place, row: supervised(row, config.supervise)
        micro = []
        for start in range(first, first + self.per_update, config.batch_rows):
            indices = [cast(int, self.order[start + place]) for place in range(config.batch_rows)]
            micro.append(read_rows(self.setup, indices, seen))
        return micro

    def batches(self, rows: list[HostRows]) -> Any:
        """Micro-batches as one."""
        return stack_batches([batch_of(self.setup, each) for each in rows])

    def run(self, profile: Path | None) -> Result:
        """All updates that are left."""
        config, folder = self.config, self.folder
        state = self.first_state()
        first = int(state.update)
        folder.trim_log(first)
        logger.info("%d trainable parameters", count_params(state.params))
        if profile is not None and config.updates - first <= PROFILED:
            logger.warning("no profile: it begins after %d updates, and no more are left", PROFILED)
        interrupt, vote, began, tracing = Interrupt(), Vote(self.setup.mesh), time.perf_counter(), False
        with agreed():
            writers = open_writers(config.writers, folder.folder)
            journal = Journal(folder.metrics, writers, begun=first, updates=config.updates)
        with interrupt.watch(), journal, closing(self.loader(first)) as loader:
            for update in range(first, config.updates):
                steps, last = config.steps_at(update), update + 1 == config.updates
                if profile is not None and update == first + PROFILED:
                    jax.profiler.start_trace(str(profile))
                    tracing = True
                state, sums, norms = self.step(
                    state, self.batches(next(loader)), self.model, self.setup.teacher, steps=steps
                )
                state = dataclasses.replace(state, opt_state=at_update(state.opt_state, state.update))
                if tracing and (update + 1 in (first + 2 * PROFILED, config.updates) or interrupt.asked):
                    jax.block_until_ready(state)
                    jax.profiler.stop_trace()
                    tracing = False
                self.norms.append(norms["gradient_norm"])
                if (update + 1) % config.log_every == 0 or last or update == first:
                    journal.record(*self.entry(state, sums, norms, update, first, steps, began))
                evaluated = config.held_out_rows > 0 and ((update + 1) % config.eval_every == 0 or last)
                if evaluated:
                    journal.record(*self.evaluate(state, update))
                journal.advance()
                # Read once: a signal that comes during the save is answered after the next update.
                stop = vote.any_of(interrupt.asked)
                if (update + 1) % config.save_every == 0 or last or stop:
                    # Only what was measured at this very update may decide which checkpoint is best.
                    joint = sum(value or 0.0 for value in self.evaluation["joint"]) if evaluated else None
                    folder.save(state, joint)
                if stop or last:
                    # While signals are still watched: another one must not cut the save off.
                    folder.wait()
                if stop:
                    return Result(update + 1, last, self.evaluation)
        return Result(config.updates, True, self.evaluation)

    def entry(
        self, state: TrainState, sums: Any, norms: Any, update: int, first: int, steps: int, began: float
    ) -> tuple[dict[str, Any], str]:
        """What the log says of an update, and the progress line."""
        config, metrics = self.config, metrics_of(sums, self.config.objective)
        seconds = time.perf_counter() - began
        applied = bool(norms["applied"])
        learning_rate = float(np.asarray(self.schedule(update)))
        loss = float(norms["loss"])
        gradient_norms = np.asarray([float(norm) for norm in self.norms])
        self.norms.clear()
        rate = (update + 1 - first) * self.per_update * config.row_length / seconds
        entry = {
            "update": update + 1, "steps": steps, "loss": loss if applied else "skipped", **metrics,
            "learning_rate": learning_rate, "gradient_norm": float(norms["gradient_norm"]),
            "clipped": float(np.mean(gradient_norms > config.clip)), "skipped": int(state.skipped),
            "tokens_per_second": rate, "seconds": seconds,
        }  # fmt: skip
        left = seconds / (update + 1 - first) * (config.updates - update - 1)
        line = (
            f"update {update + 1}/{config.updates} steps {steps} loss {loss:.3f} "
            f"joint {shown(metrics['joint'])} conditional {shown(metrics['conditional'])} "
            f"lr {learning_rate:.2e} |g| {entry['gradient_norm']:.2f} {rate:.0f} tok/s left {left / 60:.1f} min"
            + ("" if applied else f" SKIPPED ({int(state.skipped)} so far)")
        )
        return entry, line

    def evaluate(self, state: TrainState, update: int) -> tuple[dict[str, Any], str]:
        """Held-out metrics after an update, teacher-forced beside real decoding."""
        config, setup = self.config, self.setup
        draft = dataclasses.replace(setup.draft, params=state.params)
        found = evaluate(setup, draft, config.max_steps, config.batch_rows, self.eval_step, config.objective)
        line = (
            f"held out at {update + 1}: accuracy {shown(found['accuracy'])} | "
            f"joint {shown(found['joint'])} | conditional {shown(found['conditional'])}"
        )
        if config.decodes:
            length = chain_length(config)
            promised, real = promised_tau(found, length), None
            try:
                real = self._decoded(draft, length)
            except (InputError, jax.errors.JaxRuntimeError) as error:
                # Training matters more: the save that follows must not be lost.
                logger.warning("held-out prompts could not be decoded: %s", str(error).splitlines()[0])
            found |= {"promised_tau": promised, "decoding_tau": real, "draft_length": length}
            line += f" | tau of a chain of {length}: {promised:.2f} promised, {real or float('nan'):.2f} in decoding"
            warn_of_gap(promised, real)
        self.evaluation = found
        return {"update": update + 1, "held_out": found}, line

    @cached_property
    def _asked(self) -> tuple[list[Request], tuple[int, ...]]:
        """Held-out prompts, the same at every evaluation, and the ids that end an answer."""
        folder = Path(self.config.target)
        eos = eos_ids(folder, load_tokenizer(folder))
        return held_out_prompts(self.setup, self.config.decoded_prompts, eos), eos

    def _decoded(self, draft: Draft, length: int) -> float | None:
        requests, eos = self._asked
        return decode_held_out(self.setup, draft, requests, eos, length) if requests else None
