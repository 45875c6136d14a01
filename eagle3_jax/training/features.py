"""The target's features of packed rows: computed once to disk, or in the training loop.

A features folder holds the rows themselves and, for each of their tokens, the tapped states and the final hidden state
in bf16 and the target's argmax, so that training needs neither the target's layers nor the data files. Rows are read
through a memory map, in any order.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from eagle3_jax.checkpoint import fingerprint
from eagle3_jax.errors import InputError
from eagle3_jax.files import SafetensorsFile, replace_file
from eagle3_jax.target import Target
from eagle3_jax.training.config import check_taps
from eagle3_jax.training.packing import Packed
from eagle3_jax.training.step import target_features

logger = logging.getLogger(__name__)

META_FILE = "features.json"
ROWS_FILE = "rows.safetensors"
SHARD_ROWS = 128
ROW_ARRAYS = ("tokens", "spans", "documents", "positions")
Row = dict[str, np.ndarray]


class RowSource(Protocol):
    """Rows by number: dictionaries of arrays with one leading axis [T]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...

    def text(self, index: int, /) -> Row:
        """The row's `ROW_ARRAYS` alone, without reading its features."""
        ...


def rows_mark(rows: RowSource) -> str:
    """A short name for the rows, without their features: equal for equal rows in the same order."""
    digest = hashlib.sha256()
    for index in range(len(rows)):
        row = rows.text(index)
        for name in ROW_ARRAYS:
            digest.update(np.ascontiguousarray(row[name], np.int32).tobytes())
    return digest.hexdigest()[:16]


def check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    """Refuse rows whose tokens are not the target's.

    Raises:
      InputError: a token id that is not below `vocab_size`; a gather would take another one in silence.
    """
    if tokens.size and tokens.max() >= vocab_size:
        raise InputError(
            expected=f"token ids below the target's vocabulary size {vocab_size}",
            found=f"token id {tokens.max()}",
            remedy="Encode the data with the tokenizer of this target.",
        )


def _shard(index: int) -> str:
    return f"features-{index:05d}.safetensors"


def write_features(
    folder: Path,
    packed: Packed,
    target: Target,
    taps: tuple[int, ...],
    *,
    batch: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run the target over packed rows and write their features; continue where an interrupted run stopped.

    Args:
      folder: created if need be.
      packed: the rows.
      target: the model, in the precision to compute in.
      taps: boundaries whose states are stored.
      batch: rows in one forward pass.
      progress: called with the rows done and the rows in all.

    Raises:
      InputError: the folder holds features of other rows, taps or another target; a token or a boundary is not the
        target's; a feature is not finite.
    """
    check_taps(taps, target.config.num_layers)
    check_tokens(packed.tokens, target.config.vocab_size)
    rows = {name: np.ascontiguousarray(getattr(packed, name)) for name in ROW_ARRAYS}
    count, length = rows["tokens"].shape
    meta = {
        "rows": count,
        "row_length": length,
        "taps": list(taps),
        "hidden_size": target.config.hidden_size,
        "dtype": str(target.params.embed.dtype),
        "target_fingerprint": fingerprint(target),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / META_FILE
    if path.exists():
        _check_beginning(folder, meta, rows)
    else:
        _check_empty(folder)
        replace_file(folder / ROWS_FILE, lambda part: save_file(rows, part))
    _write_meta(path, meta | {"complete": False})
    for index, start in enumerate(range(0, count, SHARD_ROWS)):
        stop = min(start + SHARD_ROWS, count)
        if not (folder / _shard(index)).exists():
            shard = _compute({name: array[start:stop] for name, array in rows.items()}, target, taps, batch, start)
            replace_file(folder / _shard(index), lambda part, shard=shard: save_file(shard, part))
        progress(stop, count)
    _write_meta(path, meta | {"complete": True})


def _check_beginning(folder: Path, meta: dict[str, Any], rows: Row) -> None:
    found = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    # Folders of earlier versions do not say the dtype.
    differing = [key for key in meta if found.get(key, meta["dtype"] if key == "dtype" else None) != meta[key]]
    if not differing and not (folder / ROWS_FILE).exists():
        differing = [ROWS_FILE]
    if not differing:
        stored = SafetensorsFile(folder / ROWS_FILE)
        differing = [name for name in ROW_ARRAYS if not np.array_equal(stored[name], rows[name])]
    if differing:
        raise InputError(
            expected=f"an empty folder, or the beginning of the same features, at {folder}",
            found=f"features that differ in {', '.join(differing)}",
            remedy="Choose another folder or delete this one.",
        )


def _check_empty(folder: Path) -> None:
    left = sorted(path.name for path in folder.glob("features-*.safetensors"))
    if left:
        raise InputError(
            expected=f"an empty folder, or the beginning of the same features, at {folder}",
            found=f"{left[0]} without {META_FILE}, which says what it holds",
            remedy="Choose another folder or delete this one.",
        )


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    replace_file(path, lambda part: part.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8"))


def _compute(rows: Row, target: Target, taps: tuple[int, ...], batch: int, first: int) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {"taps": [], "hidden": [], "argmax": []}
    count = rows["tokens"].shape[0]
    for start in range(0, count, batch):
        # A short last batch is filled up with its last row, so that one program serves all.
        index = np.minimum(np.arange(start, start + batch), count - 1)
        arrays = (jnp.asarray(rows[name][index]) for name in ("tokens", "documents", "positions"))
        tapped, hidden, argmax = target_features(target, *arrays, taps=taps)
        keep = min(batch, count - start)
        for name, value in (("taps", tapped), ("hidden", hidden)):
            array = np.asarray(value)[:keep]
            if not np.isfinite(array).all():
                row = first + start + int(np.argmin(np.isfinite(array).all(axis=(1, 2))))
                raise InputError(
                    expected="finite features",
                    found=f"nan or inf in the target's {name} of row {row}",
                    remedy="Check the target's weights; run it in fp32.",
                )
            parts[name].append(array.astype(ml_dtypes.bfloat16))
        parts["argmax"].append(np.asarray(argmax)[:keep])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


class Rows:
    """Packed rows without features: a sequence of dictionaries of [T] arrays."""

    def __init__(self, packed: Packed):
        self._arrays = {name: getattr(packed, name) for name in ROW_ARRAYS}

    def __len__(self) -> int:
        return self._arrays["tokens"].shape[0]

    def __getitem__(self, index: int) -> Row:
        return {name: array[index] for name, array in self._arrays.items()}

    text = __getitem__


class FeatureRows:
    """Rows of a features folder: dictionaries of `tokens`, `spans`, `documents`, `positions`, `argmax` [T] and
    `taps` [T, A*D], `hidden` [T, D] in bf16.

    Raises:
      InputError: no such folder, features that were not finished, or made by another target or for other taps; a file
        of the folder is absent or damaged.
    """

    def __init__(self, folder: Path, *, taps: tuple[int, ...], target_fingerprint: str, row_length: int):
        path = folder / META_FILE
        if not path.exists():
            raise InputError(
                expected=f"a features folder at {folder}, with {META_FILE}",
                found="nothing there" if not folder.exists() else "a folder without it",
                remedy="Write one with `eagle3-jax data features`.",
            )
        meta = json.loads(path.read_text(encoding="utf-8"))
        wanted = {
            "complete": True,
            "taps": list(taps),
            "target_fingerprint": target_fingerprint,
            "row_length": row_length,
        }
        for key, value in wanted.items():
            if meta.get(key) != value:
                raise InputError(
                    expected=f"features with {key} {value} in {folder}",
                    found=f"{meta.get(key)}",
                    remedy="Run `eagle3-jax data features` with this config (it continues unfinished features).",
                )
        self._count = int(meta["rows"])
        names = [ROWS_FILE, *(_shard(index) for index in range(-(-self._count // SHARD_ROWS)))]
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            raise InputError(
                expected=f"{len(names)} safetensors files in {folder}",
                found=f"no {', '.join(absent)}",
                remedy="Run `eagle3-jax data features` with this config again, into another folder if it refuses.",
            )
        rows, *self._shards = [SafetensorsFile(folder / name) for name in names]
        self._rows = {name: rows[name] for name in ROW_ARRAYS}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._count:
            raise IndexError(index)
        shard = self._shards[index // SHARD_ROWS]
        return self.text(index) | {name: shard.row(name, index % SHARD_ROWS) for name in ("taps", "hidden", "argmax")}

    def text(self, index: int) -> Row:
        """The row without its features."""
        return {name: array[index] for name, array in self._rows.items()}


class Joined:
    """Several sources of rows, one after another."""

    def __init__(self, parts: Sequence[RowSource]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[RowSource, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._parts[part], index - (int(self._ends[part - 1]) if part else 0)

    def __getitem__(self, index: int) -> Row:
        part, inside = self._find(index)
        return part[inside]

    def text(self, index: int) -> Row:
        """The row without its features."""
        part, inside = self._find(index)
        return part.text(inside)


def stack_rows(rows: Sequence[Row]) -> Row:
    """Rows of [T, ...] arrays to one of [B, T, ...] arrays."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@partial(jax.jit, static_argnames=("count",))
def tap_rms(taps: jax.Array, *, count: int) -> jax.Array:
    """RMS of each token's state at each tap: [R, T, A*D] -> [R, T, A] fp32."""
    parts = taps.astype(jnp.float32).reshape(*taps.shape[:2], count, -1)
    return jnp.sqrt(jnp.mean(jnp.square(parts), axis=-1))


def tap_scales(rms: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Typical RMS of each tap: rms [R, T, A], documents [R, T] (0 is padding) -> [A] fp32.

    The median, since a few attention-sink tokens are hundreds of times larger than the rest.
    """
    return np.median(rms[documents > 0], axis=0)


def features_in_loop(
    target: Target, taps: tuple[int, ...], rows: dict[str, jax.Array], attention: str = "chunked"
) -> dict[str, jax.Array]:
    """Add the target's features to a micro-batch of rows [B, T]."""
    tapped, hidden, argmax = target_features(
        target, rows["tokens"], rows["documents"], rows["positions"], taps=taps, attention=attention
    )
    return rows | {"taps": tapped, "hidden": hidden, "argmax": argmax}
