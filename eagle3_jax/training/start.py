"""Where a draft begins: its vocabulary and shape, and the weights that it starts from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import DraftParams, draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.files import SINGLE_FILE, at, read_config
from eagle3_jax.params import init_params
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import RowSource
from eagle3_jax.vocab import DraftVocab, most_frequent, vocab_from_ids

logger = logging.getLogger(__name__)


def draft_mark(folder: Path) -> str:
    """A short name for the weights and the vocabulary of a draft folder."""
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise InputError(
            expected=f"a draft folder as --init, with {SINGLE_FILE}",
            found=f"no such file in {folder}",
            remedy="Pass what `eagle3-jax export` wrote.",
        )
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def describe(
    config: TrainConfig,
    target: Target,
    mark: str,
    taps: tuple[int, ...],
    rows: RowSource,
    stops: tuple[int, ...],
    begun: tuple[DraftConfig, DraftVocab] | None = None,
) -> tuple[DraftConfig, DraftVocab]:
    """Shape and vocabulary of the draft that a run trains: new ones, or those of the draft it continues.

    A vocabulary belongs to its weights, so a draft that is continued keeps its own, whatever the rows hold. It
    keeps its taps, rotary embedding and switches too; a field of the config at its default contradicts none of them.

    Args:
      config: the run.
      target: the model, with or without its layers.
      mark: `checkpoint.fingerprint_of` it.
      taps: boundaries that the features come from.
      rows: count the tokens of a new vocabulary.
      stops: end-of-sequence ids, always in a new vocabulary.
      begun: shape and vocabulary of the draft that the run continues, if any.

    Raises:
      InputError: the draft to continue is of another shape than the config says.
    """
    longest = 1 + max(int(rows.text(index)["positions"].max()) for index in range(len(rows)))
    if begun is not None:
        return _continued(config, target, mark, begun, longest)
    vocab, coverage = choose_vocab(rows, config, target.config.vocab_size, stops)
    logger.info("draft vocabulary: %d tokens cover %.2f %% of those in replies", vocab.size, 100 * coverage)
    shape = new_shape(config, target.config, taps)
    return dataclasses.replace(shape, trained_length=longest, target_fingerprint=mark), vocab


def new_shape(config: TrainConfig, target: TargetConfig, taps: tuple[int, ...]) -> DraftConfig:
    """The draft that a run without `init` trains, but for the target's fingerprint and the documents' length."""
    return DraftConfig.for_target(
        target,
        draft_vocab_size=config.draft_vocab_size,
        taps=taps,
        rope=RopeConfig(theta=config.rope_theta),
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual,
    )


def planned_shape(config: TrainConfig, target: TargetConfig) -> DraftConfig:
    """The draft that a run will train, for a plan: as `init` says where that folder is here, else a new one."""
    folder = Path(config.init)
    if not (config.init and folder.exists()):
        return new_shape(config, target, config.taps or target.default_taps)
    shape = DraftConfig.from_hf(read_config(folder), str(folder / "config.json"))
    return shape if shape.taps else dataclasses.replace(shape, taps=config.taps or target.default_taps)


def _continued(
    config: TrainConfig, target: Target, mark: str, begun: tuple[DraftConfig, DraftVocab], longest: int
) -> tuple[DraftConfig, DraftVocab]:
    shape, vocab = begun
    has = {
        "taps": shape.taps,
        "rope_theta": shape.rope.theta,
        "draft_vocab_size": shape.draft_vocab_size,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "norm_before_residual": shape.norm_before_residual,
    }
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    pairs = {name: (getattr(config, name), value) for name, value in has.items()}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != defaults[name]}
    # A run keeps no embedding but the target's, and does not apply a window.
    pairs["hidden width"] = (target.config.hidden_size, shape.hidden_size)
    pairs["own_embedding"] = (False, shape.own_embedding)
    if shape.sliding_window and longest > shape.sliding_window:
        pairs["sliding_window"] = (f"of at least {longest}, the longest document,", shape.sliding_window)
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        raise InputError(
            expected=f"a draft at {config.init} with " + ", ".join(f"{n} {pair[0]}" for n, pair in differing.items()),
            found=", ".join(f"{name} {pair[1]}" for name, pair in differing.items()),
            remedy="Leave out what the draft that is continued decides, or begin without --init.",
        )
    length = max(longest, shape.trained_length or 0)
    return dataclasses.replace(shape, trained_length=length, target_fingerprint=mark), vocab


def choose_vocab(
    rows: RowSource, config: TrainConfig, vocab_size: int, always: tuple[int, ...]
) -> tuple[DraftVocab, float]:
    """The config's own vocabulary or the most frequent tokens of replies, and the share of their tokens that it covers.

    Raises:
      InputError: the file of the vocabulary is no such file, of another target, or of another size.
    """
    counts = np.zeros(vocab_size, np.int64)
    for index in range(len(rows)):
        row = rows.text(index)
        counts += np.bincount(row["tokens"][row["spans"] > 0], minlength=vocab_size)
    if config.vocab:
        ids = read_vocab(at(config.vocab), config.draft_vocab_size, vocab_size)
    else:
        ids = most_frequent(counts, config.draft_vocab_size, always)
    return vocab_from_ids(ids, vocab_size), float(counts[ids].sum() / max(1, counts.sum()))


def read_vocab(path: Path, size: int, vocab_size: int) -> np.ndarray:
    """Ids of a vocabulary that `eagle3-jax data vocab --out` wrote: [C].

    Raises:
      InputError: no such file, another size, another target's vocabulary.
    """
    found = "no such file"
    if path.is_file():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            ids, whole = np.asarray(record["ids"], np.int64), int(record["vocab_size"])
        except (ValueError, KeyError, TypeError):
            found = "something else"
        else:
            if ids.shape == (size,) and whole == vocab_size:
                return ids
            found = f"{ids.size} of {whole} tokens"
    raise InputError(
        expected=f"a draft vocabulary at {path}: {size} of {vocab_size} tokens",
        found=found,
        remedy="Write one with `eagle3-jax data vocab --sizes C --out FILE`, and set --draft_vocab_size to its size.",
    )


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
