"""Documents packed into rows of one length.

Several documents share a row so that little of it is padding. They stay apart: positions restart, every token knows
its document, and no two replies in a row share a span id.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3_jax.errors import InputError
from eagle3_jax.training.data import Encoded


@dataclass(frozen=True)
class Packed:
    """Rows of equal length, all int32 [R, T].

    Attributes:
      tokens: token ids; 0 in the padding.
      spans: 0 outside replies, else an id of the reply that is unique within its row.
      documents: 1, 2, ... per document of a row; 0 in the padding, which is always at the end of a row.
      positions: 0, 1, ... within each document; 0 in the padding.
    """

    tokens: np.ndarray
    spans: np.ndarray
    documents: np.ndarray
    positions: np.ndarray

    @property
    def efficiency(self) -> float:
        """Share of the slots that hold a token."""
        return float(np.count_nonzero(self.documents) / self.documents.size)

    def __str__(self) -> str:
        rows, length = self.tokens.shape
        documents = int(self.documents.max(axis=1).sum())
        return f"{documents} documents in {rows} rows of {length} tokens, {self.efficiency:.1%} of the slots used."


def pack(encoded: Sequence[Encoded], *, row_length: int, seed: int) -> Packed:
    """Packs whole documents into rows: longest first, each into the fullest row that still has room.

    The same documents and seed give the same rows; the seed decides ties between equal lengths, the order of the
    documents within a row and the order of the rows.

    Raises:
      InputError: there is no document, or one is longer than a row.
    """
    lengths = np.array([document.tokens.size for document in encoded], np.int64)
    if not lengths.size or lengths.max() > row_length:
        raise InputError(
            expected=f"documents of at most row_length = {row_length} tokens",
            found=f"one of {lengths.max()} tokens" if lengths.size else "no document",
            remedy="Cut the documents at the row length (max_length), or take longer rows.",
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(lengths.size)
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free slots, row), sorted
    for document in order.tolist():
        length = int(lengths[document])
        at = bisect_left(room, (length, 0))
        if at == len(room):
            free, row = row_length, len(rows)
            rows.append([])
        else:
            free, row = room.pop(at)
        rows[row].append(document)
        if free > length:
            insort(room, (free - length, row))

    shape = (len(rows), row_length)
    packed = Packed(*(np.zeros(shape, np.int32) for _ in range(4)))
    for r, row in enumerate(rng.permutation(len(rows)).tolist()):
        at = last_span = 0
        for number, index in enumerate(rng.permutation(rows[row]).tolist(), start=1):
            document = encoded[index]
            here = slice(at, at + document.tokens.size)
            packed.tokens[r, here] = document.tokens
            packed.spans[r, here] = np.where(document.spans > 0, document.spans + last_span, 0)
            packed.documents[r, here] = number
            packed.positions[r, here] = np.arange(document.tokens.size)
            last_span = max(last_span, int(packed.spans[r, here].max()))
            at = here.stop
    return packed
