"""Checkpoints of a training run, through orbax: whole or absent, latest and best kept, resumed exactly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from eagle3_jax.config import DraftConfig
from eagle3_jax.errors import InputError
from eagle3_jax.files import in_cloud, replace_file
from eagle3_jax.processes import first
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.step import TrainState
from eagle3_jax.vocab import DraftVocab, vocab_from_ids

RUN_FILE = "run.json"
_README = """A training run of eagle3_jax.

- run.json: config, draft config, draft vocabulary, marks of what was read
- metrics.jsonl: one object per logged update, and held-out metrics
- checkpoints/N: the state after N updates, optimiser included; needed to resume, not to decode

The draft that engines load: `eagle3-jax export {folder} DST`.
"""
# A run may be resumed with other values of these; every other field decides what the numbers would have been, beyond
# their rounding.
_FREE_FIELDS = (
    "output", "eval_every", "save_every", "log_every", "keep", "decoded_prompts", "writers", "rematerialise",
    "attention", "mesh", "slices",
)  # fmt: skip


class RunFolder:
    """A run's folder: `run.json` (config, draft config, draft vocabulary), `metrics.jsonl`, `checkpoints/`."""

    def __init__(self, folder: Path, *, keep: int = 2, writes: bool = False):
        """Open the folder; `writes` is for a process that trains, which also clears what a killed save left."""
        self.folder = folder
        self._manager: ocp.CheckpointManager | None = None
        self._keep = keep
        self._writes = writes

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / RUN_FILE).exists()

    @property
    def metrics(self) -> Path:
        """The JSONL log."""
        return self.folder / "metrics.jsonl"

    @property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, made when first needed."""
        if self._manager is None:
            best = policies.BestN(get_metric_fn=_joint, n=1, keep_checkpoints_without_metrics=False)
            self._manager = ocp.CheckpointManager(
                self.folder / "checkpoints" if in_cloud(self.folder) else (self.folder / "checkpoints").absolute(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(self._keep), best]),
                    best_fn=_joint,
                    cleanup_tmp_directories=self._writes,
                ),
            )
        return self._manager

    def start(self, config: TrainConfig, draft: DraftConfig, vocab: DraftVocab, marks: Mapping[str, str]) -> None:
        """Record what the run is, before its first update; `marks` name the contents of what it reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {
            "config": dataclasses.asdict(config),
            "draft": draft.to_hf(),
            "draft_vocab": np.asarray(vocab.d2t).tolist(),
            "marks": dict(marks),
        }
        replace_file(self.folder / RUN_FILE, lambda part: part.write_text(json.dumps(record) + "\n", encoding="utf-8"))
        readme = self.folder / "README.md"
        replace_file(readme, lambda part: part.write_text(_README.format(folder=self.folder), encoding="utf-8"))

    def read(self) -> tuple[dict[str, Any], DraftConfig, DraftVocab]:
        """The run's config (as JSON), draft config and draft vocabulary.

        Raises:
          InputError: no run in the folder.
        """
        path = self.folder / RUN_FILE
        if not path.exists():
            raise InputError(
                expected=f"a training run at {self.folder}, with {RUN_FILE}",
                found="nothing there" if not self.folder.exists() else "a folder without it",
                remedy="Pass the output folder of `eagle3-jax train`.",
            )
        record = json.loads(path.read_text(encoding="utf-8"))
        draft = DraftConfig.from_hf(record["draft"], str(path))
        return record["config"], draft, vocab_from_ids(np.asarray(record["draft_vocab"]), draft.vocab_size, str(path))

    def check_same(self, config: TrainConfig) -> None:
        """Refuse to continue a run under a config that would have led elsewhere.

        Raises:
          InputError: naming the fields that differ.
        """
        given = json.loads(json.dumps(dataclasses.asdict(config)))
        # A run that was started before a field existed has its default.
        defaults = {
            field.name: json.loads(json.dumps(field.default))
            for field in dataclasses.fields(TrainConfig)
            if field.default is not dataclasses.MISSING
        }
        recorded = defaults | self.read()[0]
        differing = [name for name in given if name not in _FREE_FIELDS and recorded.get(name) != given[name]]
        if differing:
            raise InputError(
                expected=f"the config that the run in {self.folder} was started with",
                found="; ".join(f"{name} {given[name]} instead of {recorded.get(name)}" for name in differing),
                remedy="Resume with the same values, or choose another --output.",
            )

    def check_marks(self, marks: Mapping[str, str]) -> None:
        """Refuse to continue a run on other contents under the same names.

        Raises:
          InputError: naming what changed.
        """
        recorded = json.loads((self.folder / RUN_FILE).read_text(encoding="utf-8"))["marks"]
        changed = [name for name, mark in marks.items() if recorded.get(name) != mark]
        if changed:
            raise InputError(
                expected=f"the same {', '.join(changed)} that the run in {self.folder} was started with",
                found="other contents under the same name",
                remedy="Put them back, or choose another --output (--init continues a draft on other data).",
            )

    def save(self, state: TrainState, joint: float | None = None) -> None:
        """Save a state under its update number, in the background; a save that is cut off is never taken for one.

        Args:
          state: to save.
          joint: held-out joint acceptance, summed over the steps, that decides which checkpoint is best; None when it
            was not measured at this update.
        """
        update = int(state.update)
        if update not in self.manager.all_steps():
            self.manager.save(update, args=ocp.args.StandardSave(cast(Any, state)), metrics={"joint": joint})

    def wait(self) -> None:
        """Wait for a save that is under way."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def trim_log(self, update: int) -> None:
        """Drop what the log says about updates after this one: a killed run is about to do them again."""
        if not first() or not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            # The last line of a killed process may be half a line.
            if line.endswith("}\n") and json.loads(line)["update"] <= update:
                kept.append(line)
        replace_file(self.metrics, lambda part: part.write_text("".join(kept), encoding="utf-8"))

    def latest(self) -> int | None:
        """Update number of the newest whole checkpoint."""
        return self.manager.latest_step()

    def restore(self, abstract: TrainState, step: int | str = "latest") -> TrainState:
        """Read a state.

        Args:
          abstract: a tree of `jax.ShapeDtypeStruct`; a leaf without a place comes to the default device, wherever it
            was saved.
          step: an update number, "latest", or "best" (the latest where no held-out rows were measured).

        Raises:
          InputError: no such checkpoint.
        """
        steps = self.manager.all_steps()
        named = {"latest": self.manager.latest_step(), "best": self.manager.best_step()}
        chosen = named.get(step) if isinstance(step, str) else step
        if chosen is None or chosen not in steps:
            raise InputError(
                expected=f"checkpoint {step} in {self.folder}",
                found=f"updates {', '.join(map(str, sorted(steps)))}" if steps else "no whole checkpoint",
                remedy="Choose one of these, or train further.",
            )
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or here), abstract
        )
        return cast(TrainState, self.manager.restore(chosen, args=ocp.args.StandardRestore(cast(Any, placed))))

    def close(self) -> None:
        """Wait for a save that is under way; release orbax's threads."""
        if self._manager is not None:
            self.wait()
            self._manager.close()
            self._manager = None


def _joint(metrics: dict[str, float | None]) -> float:
    """What orbax ranks checkpoints by; those that were not measured come before all others."""
    return -1.0 if metrics["joint"] is None else metrics["joint"]


def abstract_state(state: TrainState) -> TrainState:
    """Shapes, types and places of a state, to restore into."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), state)
