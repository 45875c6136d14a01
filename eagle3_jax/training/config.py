"""What a training run is, as one frozen dataclass; files under configs/ build it, the command line overrides fields."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

from eagle3_jax.attention import PACKED, splash_fits
from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import REMATERIALISE
from eagle3_jax.errors import InputError
from eagle3_jax.training.loss import Objective
from eagle3_jax.training.reporting import WRITERS

# How a phase of the learning rate goes from one rate to another: (start, end, updates) -> rate by step, from 0.
_PHASES: Mapping[str, Callable[[float, float, int], optax.Schedule]] = types.MappingProxyType({
    "linear": optax.linear_schedule,
    "cosine": lambda start, end, updates: lambda step: end
    + (start - end) * optax.cosine_decay_schedule(1.0, updates)(step),
    "constant": lambda start, end, updates: optax.constant_schedule(end),
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
      target: the target's folder.
      target_dtype: float32 or bfloat16, of the target's weights and pass where it runs in the loop.
      output: the run's folder: checkpoints, log, config; local or a cloud's (gs://).
      data: jsonl files, local or a cloud's, whose assistant replies are learnt, when the target runs in the loop.
      features: folders of `eagle3-jax data features`; when given, the target's layers are not run and `data` is unused.
      init: a draft folder to continue from; empty begins with new weights.
      held_out_rows: rows never trained on, for evaluation; of several folders of features, the first one's.
      last_turn_only: of a conversation, supervise the last reply alone.
      template: names and values for the target's chat template, such as (("enable_thinking", False),).
      supervise: replies, as decoding will draft them, or all: every conversation whole, prompts and other models'
        answers included, which makes more of little data, in a first run that a second one on replies continues.
      draft_vocab_size: C.
      vocab: a file of `eagle3-jax data vocab` with the C tokens; empty takes the most frequent ones of the rows.
      taps: boundaries, of which L + 1 is the target's final hidden state, after its last norm; empty means the paper's
        default for the target.
      rope_theta: the draft's own rotary base.
      fc_norm, norm_output, norm_before_residual: see `DraftConfig`.
      row_length: T, tokens of a packed row.
      batch_rows: rows in one forward and backward pass.
      accumulation: passes in one update.
      updates: optimiser updates in all.
      schedule: (updates, unrolled steps) in order; the updates must add up to `updates`.
      token_loss, feature_loss, freeze_head: see `loss.Objective`; with taps=(L + 1,) and few or many steps they span
        EAGLE's family of objectives.
      step_decay: weight of step s is step_decay^s.
      learning_rate: the peak.
      warmup: updates of linear rise.
      final_learning_rate: what the cosine decays to at the last update.
      learning_rate_phases: instead of these three, phases (updates, kind, rate) in order, whose updates add up to
        `updates`: from the rate before it (0 before the first) a phase goes to its own, which its last update has, by
        "linear" or "cosine"; "constant" has it all along. Skipped updates count.
      betas, weight_decay, clip: AdamW's, and the bound on the global gradient norm.
      compute_dtype: float32 or bfloat16, of activations and products; weights and optimiser stay in fp32.
      rematerialise: nothing, activations or all: what of each unrolled step is computed again in the backward pass,
        which saves memory and costs time.
      attention: reference, chunked or splash (see `attention.PACKED`), or auto: splash on TPUs where rows and heads
        allow it, else chunked.
      mesh: sizes of the axes data, fsdp and tensor of the mesh (see `sharding`), within a slice; empty uses one device.
      slices: TPU slices, or nodes, that a slower network joins; each has a copy of the weights.
      seed: of the initial weights and the order of rows.
      eval_every, save_every, log_every: in updates.
      decoded_prompts: held-out prompts that are decoded for real at every evaluation; where fsdp splits the weights, on
        a second copy of them that is split by tensor (see `evaluation`), which `plan` counts.
      writers: tensorboard, wandb: where numbers go besides the run's own log.
      keep: checkpoints kept besides the best.
    """

    target: str
    output: str
    target_dtype: str = "float32"
    data: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    init: str = ""
    last_turn_only: bool = False
    template: tuple[tuple[str, Any], ...] = ()
    supervise: str = "replies"
    held_out_rows: int = 24
    draft_vocab_size: int = 8192
    vocab: str = ""
    taps: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    row_length: int = 512
    batch_rows: int = 4
    accumulation: int = 1
    updates: int = 1000
    schedule: tuple[tuple[int, int], ...] = ((1000, 7),)
    token_loss: float = 1.0
    feature_loss: float = 0.0
    freeze_head: bool = False
    step_decay: float = 0.8
    learning_rate: float = 1e-4
    warmup: int = 50
    final_learning_rate: float = 1e-5
    learning_rate_phases: tuple[tuple[int, str, float], ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    compute_dtype: str = "float32"
    rematerialise: str = "nothing"
    attention: str = "auto"
    mesh: tuple[int, ...] = ()
    slices: int = 1
    seed: int = 0
    eval_every: int = 200
    save_every: int = 200
    log_every: int = 10
    decoded_prompts: int = 4
    writers: tuple[str, ...] = ()
    keep: int = 2

    def check(self) -> None:
        """Refuse what could only fail later, or fail silently.

        Raises:
          InputError: naming the field.
        """
        total = sum(updates for updates, _ in self.schedule)
        self._require(total == self.updates, "schedule", f"phases that add up to updates = {self.updates}", str(total))
        self._require(
            all(updates >= 1 and steps >= 1 for updates, steps in self.schedule),
            "schedule",
            "at least one update and one step in every phase",
            str(self.schedule),
        )
        self._require(
            list(self.taps) == sorted(set(self.taps)) and min(self.taps, default=0) >= 0,
            "taps",
            "ascending boundaries from 0",
            str(self.taps),
        )
        self._require(self.held_out_rows >= 0, "held_out_rows", "0 or more", str(self.held_out_rows))
        for name in ("clip", "rope_theta"):
            value = getattr(self, name)
            self._require(0 < value < math.inf, name, "a finite number above 0", str(value))
        for name in ("learning_rate", "step_decay", "weight_decay", "token_loss", "feature_loss"):
            value = getattr(self, name)
            self._require(0 <= value < math.inf, name, "a finite number, 0 or more", str(value))
        self._require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            "two numbers from 0 to below 1",
            str(self.betas),
        )
        self._require(0 <= self.seed < 2**32, "seed", "from 0 to 4294967295", str(self.seed))
        self._check_learning_rates()
        self._require(
            not (self.freeze_head and self.weight_decay), "weight_decay", "0 where the head is frozen",
            str(self.weight_decay),
        )  # fmt: skip
        for name in ("compute_dtype", "target_dtype"):
            value = getattr(self, name)
            self._require(value in ("float32", "bfloat16"), name, "float32 or bfloat16", value)
        kinds = ("auto", *PACKED)
        self._require(self.attention in kinds, "attention", " or ".join(kinds), self.attention)
        self._require(
            self.rematerialise in REMATERIALISE, "rematerialise", " or ".join(REMATERIALISE), self.rematerialise
        )
        self._require(set(self.writers) <= set(WRITERS), "writers", ", ".join(WRITERS), ", ".join(self.writers))
        self._require(
            self.token_loss > 0 or self.feature_loss > 0, "token_loss", "a loss that is above 0", "no loss at all"
        )
        self._require(self.decoded_prompts >= 0, "decoded_prompts", "0 or more", str(self.decoded_prompts))
        self._require(self.supervise in ("replies", "all"), "supervise", "replies or all", self.supervise)
        self._require(
            (not self.mesh and self.slices == 1) or (len(self.mesh) == 3 and min(self.mesh) >= 1 and self.slices >= 1),
            "mesh",
            "three sizes of at least 1 (data, fsdp, tensor), and slices only with a mesh",
            f"{self.mesh} and {self.slices} slices",
        )
        parts = self.slices * math.prod(self.mesh[:2])
        self._require(
            self.batch_rows % parts == 0,
            "batch_rows",
            f"a multiple of the {parts} parts that slices, data and fsdp split a batch into",
            str(self.batch_rows),
        )
        for name, value in {"target": self.target, "init": self.init, "features": ",".join(self.features)}.items():
            self._require(
                "://" not in value, name, "a local folder: it is read through a memory map (copy or mount it)", value
            )
        self._require(
            not (self.init and self.vocab), "vocab", "none beside --init, whose draft keeps its own", self.vocab
        )
        prepared = [name for name in ("last_turn_only", "template") if self.features and getattr(self, name)]
        self._require(
            not prepared, "features", "no field that `eagle3-jax data features` has decided", ", ".join(prepared)
        )
        self._require(bool(self.data or self.features), "data", "data files, or folders of features", "neither")
        counts = (
            "updates",
            "row_length",
            "batch_rows",
            "accumulation",
            "eval_every",
            "save_every",
            "log_every",
            "keep",
        )
        for name in (*counts, "draft_vocab_size"):
            self._require(getattr(self, name) >= 1, name, "at least 1", str(getattr(self, name)))

    def _check_learning_rates(self) -> None:
        if self.learning_rate_phases:
            total = sum(updates for updates, _, _ in self.learning_rate_phases)
            self._require(
                total == self.updates,
                "learning_rate_phases",
                f"phases that add up to updates = {self.updates}",
                str(total),
            )
            self._require(
                all(
                    updates >= 1 and kind in _PHASES and 0 <= rate < math.inf
                    for updates, kind, rate in self.learning_rate_phases
                ),
                "learning_rate_phases",
                f"(updates, {' or '.join(_PHASES)}, rate): at least one update, and a finite rate of 0 or more",
                str(self.learning_rate_phases),
            )
            return
        self._require(
            0 <= self.warmup <= self.updates,
            "warmup",
            f"a warm-up no longer than the run of {self.updates}",
            str(self.warmup),
        )
        self._require(
            self.learning_rate >= self.final_learning_rate >= 0,
            "final_learning_rate",
            f"between 0 and learning_rate = {self.learning_rate}",
            str(self.final_learning_rate),
        )

    def _require(self, holds: bool, field: str, expected: str, found: str) -> None:
        if not holds:
            raise InputError(expected=f"{field}: {expected}", found=found, remedy=f"Set --{field}.")

    def steps_at(self, update: int) -> int:
        """Unrolled steps of an update, counted from 0."""
        for updates, steps in self.schedule:
            if update < updates:
                return steps
            update -= updates
        return self.schedule[-1][1]

    def learning_rates(self) -> optax.Schedule:
        """Rates by update, counted from 0: the phases, or a linear warm-up from a `warmup`-th of the peak and then a
        cosine that reaches `final_learning_rate` at the last update.

        A run that is no longer than its warm-up ends below the peak, and one of a single update more at it.
        """
        if self.learning_rate_phases:
            made, ends, start = [], [0], 0.0
            for updates, kind, rate in self.learning_rate_phases:
                phase = _PHASES[kind](start, rate, updates)
                made.append(lambda step, phase=phase: phase(step + 1))
                ends.append(ends[-1] + updates)
                start = rate
            return optax.join_schedules(made, ends[1:-1])
        decay = optax.cosine_decay_schedule(
            self.learning_rate,
            max(1, self.updates - 1 - self.warmup),
            alpha=self.final_learning_rate / self.learning_rate if self.learning_rate else 0.0,
        )
        if not self.warmup:
            return decay
        rise = optax.linear_schedule(self.learning_rate / self.warmup, self.learning_rate, self.warmup)
        return optax.join_schedules([rise, decay], [self.warmup])

    def attention_on(self, platform: str, head_dim: int) -> str:
        """Who computes attention there, one of `attention.PACKED`.

        Raises:
          InputError: the TPU's kernel where it cannot run.
        """
        possible = platform == "tpu" and splash_fits(self.row_length, head_dim)
        if self.attention == "auto":
            return "splash" if possible else "chunked"
        self._require(
            self.attention != "splash" or possible,
            "attention",
            "splash on TPUs only, where the row length and the heads' size are multiples of 128",
            f"splash on {platform} with rows of {self.row_length} and heads of {head_dim}",
        )
        return self.attention

    @property
    def precision(self) -> str:
        """jax's precision of matrix products: fp32 means fp32, where both models compute in it."""
        return "highest" if self.compute_dtype == self.target_dtype == "float32" else "default"

    @property
    def decodes(self) -> bool:
        """Whether evaluations decode held-out prompts, for which the target's layers are needed."""
        return self.decoded_prompts > 0 and self.held_out_rows > 0

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        return Objective(self.token_loss, self.feature_loss, self.freeze_head)

    @property
    def max_steps(self) -> int:
        """The most unrolled steps of any phase."""
        return max(steps for _, steps in self.schedule)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Refuse boundaries that a target does not have.

    Raises:
      InputError: not ascending, or not from 0 to the number of layers + 1.
    """
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers + 1:
        raise InputError(
            expected=f"taps: ascending boundaries from 0 to {num_layers}, the target's number of layers, or "
            f"{num_layers + 1} for its final hidden state",
            found=str(taps),
            remedy="Set --taps.",
        )


def check_row_length(row_length: int, limit: int) -> None:
    """Refuse rows that are longer than the target's context.

    Raises:
      InputError: naming both.
    """
    if row_length > limit:
        raise InputError(
            expected=f"row_length: at most the target's context of {limit} tokens",
            found=str(row_length),
            remedy="Set --row_length (eval: --row-length).",
        )


def load_config(path: Path) -> TrainConfig:
    """Run a config file and call its `config()`.

    Raises:
      InputError: no such file, or no function `config` that returns a `TrainConfig`.
    """
    return _call(path, "config", TrainConfig)


def load_shape(path: Path) -> TargetConfig | None:
    """The shape of a config's target, where the file has a function `target_shape()` that says it.

    Raises:
      InputError: it does not return a `TargetConfig`.
    """
    return _call(path, "target_shape", TargetConfig, optional=True)


def _call(path: Path, name: str, kind: type, optional: bool = False) -> Any:
    if not path.is_file() or path.suffix != ".py":
        known = sorted(str(other) for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise InputError(
            expected=f"a config file (Python) at {path}",
            found="another kind of file" if path.is_file() else "nothing there",
            remedy=f"Known ones: {', '.join(known)}." if known else "Configs are Python files under configs/.",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, name, None)
        result = make() if callable(make) else make
    except Exception as error:  # whatever is wrong with it, the file is the user's
        raise InputError(
            expected=f"a config that runs in {path}",
            found=f"{type(error).__name__}: {error}",
            remedy="Correct the file; --debug shows where.",
        ) from error
    if make is None and optional:
        return None
    if not isinstance(result, kind):
        raise InputError(
            expected=f"a function {name}() -> {kind.__name__} in {path}",
            found="none" if make is None else f"{type(result).__name__}",
            remedy="See configs/ for examples.",
        )
    return result


def override(config: TrainConfig, changes: Mapping[str, str]) -> TrainConfig:
    """Replace fields by values given as text on the command line.

    Raises:
      InputError: an unknown field, with the nearest names; a value of another type.
    """
    hints = typing.get_type_hints(TrainConfig)
    values: dict[str, Any] = {}
    for name, text in changes.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            raise InputError(
                expected="the name of a TrainConfig field",
                found=f"--{name}",
                remedy=f"Did you mean --{near[0]}?" if near else f"Fields: {', '.join(hints)}.",
            )
        values[name] = _parse(name, text, hints[name])
    return dataclasses.replace(config, **values)


def _parse(name: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind == tuple[str, ...]:
        return tuple(part for part in text.split(",") if part)
    if kind is bool:
        options = {"true": True, "false": False, "1": True, "0": False}
        if text.lower() in options:
            return options[text.lower()]
        raise _wrong(name, text, "true or false")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise _wrong(name, text, kind) from None
    if not _matches(value, kind):
        raise _wrong(name, text, kind)
    return _widened(value, kind)


def _widened(value: Any, kind: Any) -> Any:
    """Whole numbers as floats where floats are meant."""
    if kind is float:
        return float(value)
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return tuple(map(_widened, value, kinds))
    return value


def _matches(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if typing.get_origin(kind) is not tuple:
        return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    parts: Sequence[Any] = typing.get_args(kind)
    if not isinstance(value, tuple):
        return False
    if len(parts) == 2 and isinstance(parts[1], types.EllipsisType):
        return all(_matches(item, parts[0]) for item in value)
    return len(value) == len(parts) and all(_matches(item, part) for item, part in zip(value, parts))


def _wrong(name: str, text: str, kind: Any) -> InputError:
    return InputError(
        expected=f"--{name} to be {kind.__name__ if isinstance(kind, type) else kind}",
        found=repr(text),
        remedy="Tuples are written as in Python, e.g. '((100,1),(50,7))'.",
    )
