"""The draft vocabulary: which target tokens the draft's head can propose.

In memory `d2t` holds absolute target ids; files hold offsets (target id = draft id + offset). The map belongs to the
draft's weights: row c of the head means token d2t[c], so a map is never rebuilt for existing weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle3_jax.errors import InputError


@struct.dataclass
class DraftVocab:
    """The map both ways.

    Attributes:
      d2t: [C] int32, the target id of each draft id.
      t2d: [V] bool, True where the target id is in the draft vocabulary.
    """

    d2t: jax.Array
    t2d: jax.Array

    @property
    def size(self) -> int:
        """C, the draft vocabulary's size."""
        return self.d2t.shape[0]


def vocab_from_ids(ids: np.ndarray, vocab_size: int, where: str = "the draft vocabulary") -> DraftVocab:
    """Build the map from absolute ids, in the order given.

    Raises:
      InputError: an id below 0, an id beyond the target's vocabulary, or a duplicate, each with its own message.
    """
    ids = np.asarray(ids, np.int64)
    remedy = "The map is stored as offsets (target id = draft id + d2t); check which form the file holds."
    if ids.size and ids.min() < 0:
        raise InputError(
            expected=f"target ids from 0 to {vocab_size - 1} in {where}",
            found=f"negative id {ids.min()} at draft id {int(ids.argmin())}",
            remedy=remedy,
        )
    if ids.size and ids.max() >= vocab_size:
        raise InputError(
            expected=f"target ids from 0 to {vocab_size - 1} in {where}",
            found=f"id {ids.max()} at draft id {int(ids.argmax())}, beyond the vocabulary",
            remedy=remedy,
        )
    unique, counts = np.unique(ids, return_counts=True)
    if unique.size != ids.size:
        raise InputError(
            expected=f"each target id once in {where}",
            found=f"a duplicate: id {unique[counts > 1][0]} occurs {counts.max()} times",
            remedy=remedy,
        )
    member = np.zeros(vocab_size, bool)
    member[ids] = True
    return DraftVocab(d2t=jnp.asarray(ids, jnp.int32), t2d=jnp.asarray(member))


def vocab_from_offsets(
    offsets: np.ndarray, vocab_size: int, member: np.ndarray | None = None, where: str = "d2t"
) -> DraftVocab:
    """Build the map from the file's form.

    Args:
      offsets: [C] integers, target id minus draft id.
      vocab_size: V.
      member: [V] bool, the file's t2d, checked against the offsets; None when the file has none.
      where: name of the file in error messages.

    Raises:
      InputError: as `vocab_from_ids`; offsets that are no integers; t2d of another length or naming other tokens than
        d2t.
    """
    offsets = np.asarray(offsets)
    if not np.issubdtype(offsets.dtype, np.integer):
        raise InputError(
            expected=f"integers in {where}",
            found=f"type {offsets.dtype}",
            remedy="The map is damaged or of another kind; export the draft again.",
        )
    offsets = offsets.astype(np.int64)
    vocab = vocab_from_ids(offsets + np.arange(offsets.size), vocab_size, where)
    if member is None:
        return vocab
    member = np.asarray(member).astype(bool)
    if member.shape != (vocab_size,):
        raise InputError(
            expected=f"t2d of shape ({vocab_size},), one flag per target token",
            found=f"shape {member.shape} in {where}",
            remedy="The draft belongs to a target with another vocabulary.",
        )
    if not np.array_equal(member, np.asarray(vocab.t2d)):
        raise InputError(
            expected="t2d to flag exactly the tokens that d2t maps to",
            found=f"{int((member != np.asarray(vocab.t2d)).sum())} differing tokens in {where}"
            + ("; d2t is all zeros, so it maps to the first ids" if not offsets.any() else ""),
            remedy="d2t may hold absolute ids instead of offsets: an offset is the target's id minus the draft's.",
        )
    return vocab


def vocab_offsets(vocab: DraftVocab) -> np.ndarray:
    """[C] int64 offsets, the form that files hold."""
    ids = np.asarray(vocab.d2t, np.int64)
    return ids - np.arange(ids.size)


def most_frequent(counts: np.ndarray, size: int, always: tuple[int, ...] = ()) -> np.ndarray:
    """Choose a draft vocabulary: `always`, then the most frequent supervised tokens, ties by lower id; sorted.

    Args:
      counts: [V] how often each token is supervised.
      size: C.
      always: ids taken whatever their count (end-of-turn tokens).

    Raises:
      InputError: `size` is not between 1 and V; more distinct ids in `always` than fit, or one beyond the vocabulary.
    """
    counts = np.asarray(counts, np.int64)
    if not 0 < size <= counts.size:
        raise InputError(
            expected=f"a draft vocabulary of 1 to {counts.size} tokens",
            found=f"{size}",
            remedy="Choose a size up to the target's vocabulary.",
        )
    kept = sorted(set(always))
    if len(kept) > size or any(not 0 <= token < counts.size for token in kept):
        raise InputError(
            expected=f"at most {size} tokens to keep in any case, from 0 to {counts.size - 1}",
            found=f"{len(kept)}: {', '.join(map(str, kept[:8]))}",
            remedy="Choose a larger draft vocabulary, or fewer tokens.",
        )
    ranked = counts.copy()
    ranked[kept] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])
