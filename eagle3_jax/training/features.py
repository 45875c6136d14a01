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
from jax.sharding import Mesh
from safetensors.numpy import save_file

from eagle3_jax.checkpoint import fingerprint, weight_not_finite
from eagle3_jax.errors import InputError
from eagle3_jax.files import SafetensorsFile, replace_file
from eagle3_jax.sharding import by_rows, place
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


_SHARDS = "features-*.safetensors"


def _shard(index: int) -> str:
    return f"features-{index:05d}.safetensors"


def checksum(path: Path) -> str:
    """sha256 of a file, as `sha256sum` says it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_features(
    folder: Path,
    packed: Packed,
    target: Target,
    taps: tuple[int, ...],
    *,
    batch: int = 4,
    attention: str = "chunked",
    mesh: Mesh | None = None,
    source: Path | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run the target over packed rows and write their features; continue where an interrupted run stopped.

    Shards that are there already are read once, to compare them with their checksums, and damaged ones are made again.

    Args:
      folder: created if need be.
      packed: the rows.
      target: the model, in the precision to compute in.
      taps: boundaries whose states are stored.
      batch: rows in one forward pass, which must divide over the parts that the mesh splits rows into.
      attention: who computes attention, one of `attention.PACKED`.
      mesh: where the target lies; None for one device.
      source: the target's folder, for messages.
      force: replace the features in the folder, whatever they are of.
      progress: called with the rows done and the rows in all.

    Raises:
      InputError: the folder holds features of other rows, taps or another target; a token or a boundary is not the
        target's; a feature, or a weight of the target's head, is not finite.
    """
    check_taps(taps, target.config.num_layers)
    check_tokens(packed.tokens, target.config.vocab_size)
    # No state shows what is wrong with the head, but every argmax would be.
    if not bool(jnp.isfinite(target.params.lm_head).all()):
        raise _not_finite("", target, source)
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
    path, sums = folder / META_FILE, {}
    if force:
        # First what says that the others are whole.
        for old in (path, folder / ROWS_FILE, *folder.glob(_SHARDS)):
            old.unlink(missing_ok=True)
    if path.exists():
        sums = _check_beginning(folder, meta, rows)
    else:
        _check_empty(folder)
        replace_file(folder / ROWS_FILE, lambda part: save_file(rows, part))
    sums = {ROWS_FILE: checksum(folder / ROWS_FILE)} | {n: s for n, s in sums.items() if n != ROWS_FILE}
    _write_meta(path, meta | {"complete": False, "sha256": sums})
    for index, start in enumerate(range(0, count, SHARD_ROWS)):
        stop, file = min(start + SHARD_ROWS, count), folder / _shard(index)
        name = file.name
        # Without a checksum (by an earlier version, or an interruption before it was noted) a shard counts as it is.
        if file.exists() and name in sums and checksum(file) != sums[name]:
            logger.warning("%s is not as it was written; it is made again", file)
            file.unlink()
        if not file.exists():
            part = {key: array[start:stop] for key, array in rows.items()}
            shard = _compute(part, target, taps, batch, attention, mesh, (start, source))
            replace_file(file, lambda part, shard=shard: save_file(shard, part))
            sums.pop(name, None)
        if name not in sums:
            sums[name] = checksum(file)
            _write_meta(path, meta | {"complete": False, "sha256": sums})
        progress(stop, count)
    _write_meta(path, meta | {"complete": True, "sha256": dict(sorted(sums.items()))})


def _check_beginning(folder: Path, meta: dict[str, Any], rows: Row) -> dict[str, str]:
    """The checksums of a folder that holds the beginning of these very features."""
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
            remedy="Choose another folder, or pass --force to replace what is in this one.",
        )
    return found.get("sha256", {})


def _check_empty(folder: Path) -> None:
    left = sorted(path.name for path in folder.glob(_SHARDS))
    if left:
        raise InputError(
            expected=f"an empty folder, or the beginning of the same features, at {folder}",
            found=f"{left[0]} without {META_FILE}, which says what it holds",
            remedy="Choose another folder, or pass --force to replace what is in this one.",
        )


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    replace_file(path, lambda part: part.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8"))


def _compute(
    rows: Row,
    target: Target,
    taps: tuple[int, ...],
    batch: int,
    attention: str,
    mesh: Mesh | None,
    origin: tuple[int, Path | None],
) -> dict[str, np.ndarray]:
    """The features of a shard's rows; `origin` is the number of the first one and the target's folder."""
    parts: dict[str, list[np.ndarray]] = {"taps": [], "hidden": [], "argmax": []}
    count = rows["tokens"].shape[0]
    for start in range(0, count, batch):
        # A short last batch is filled up with its last row, so that one program serves all.
        index = np.minimum(np.arange(start, start + batch), count - 1)
        given: Any = {name: rows[name][index] for name in ("tokens", "documents", "positions")}
        given = jax.tree.map(jnp.asarray, given) if mesh is None else place(given, by_rows(mesh))
        made = features_in_loop(target, taps, given, attention)
        found = {name: np.asarray(made[name])[: min(batch, count - start)] for name in parts}
        _check_finite(found, target, taps, origin[0] + start, origin[1])
        for name, array in found.items():
            parts[name].append(array if name == "argmax" else array.astype(ml_dtypes.bfloat16))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _check_finite(found: Row, target: Target, taps: tuple[int, ...], first: int, source: Path | None) -> None:
    """Refuse states that are nan or inf, naming the lowest boundary of the first such row."""
    states = np.split(found["taps"], len(taps), axis=-1)
    finite = np.stack([np.isfinite(state).all(axis=(1, 2)) for state in (*states, found["hidden"])])
    if finite.all():
        return
    row = int(np.argmin(finite.all(axis=0)))
    names = [*(f"at the boundary IN({tap})" for tap in taps), "in the final hidden state"]
    raise _not_finite(f"nan or inf {names[int(np.argmin(finite[:, row]))]} of row {first + row}", target, source)


def _not_finite(state: str, target: Target, source: Path | None) -> InputError:
    weight = weight_not_finite(target, source)
    return InputError(
        expected="finite weights of the target, and finite features",
        found="; ".join(filter(None, (state, f"nan or inf in the weight {weight}" if weight else "finite weights"))),
        remedy="Fetch or convert the target again."
        if weight
        else f"States overflow in {target.params.embed.dtype}: run the target in float32 (--dtype).",
    )


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

    A shard is compared with its checksum when its first row is read. Folders may be hundreds of gigabytes, which a run
    would otherwise read before its first update; so the cost, one more pass over what is read, is spread over the first
    epoch, and what is not read costs nothing.

    Raises:
      InputError: no such folder, features that were not finished, or made by another target or for other taps; a file
        of the folder is absent or damaged (of a shard, when a row of it is read).
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
        self._folder, self._sums = folder, dict(meta.get("sha256", {}))
        if not self._sums:
            logger.warning(
                "%s is of an earlier version and has no checksums: damage to its files goes unnoticed", folder
            )
        self._verify(ROWS_FILE)
        rows, *self._shards = [SafetensorsFile(folder / name) for name in names]
        self._rows = {name: rows[name] for name in ROW_ARRAYS}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._count:
            raise IndexError(index)
        number = index // SHARD_ROWS
        self._verify(_shard(number))
        shard = self._shards[number]
        return self.text(index) | {name: shard.row(name, index % SHARD_ROWS) for name in ("taps", "hidden", "argmax")}

    def _verify(self, name: str) -> None:
        """Compare a file with its checksum, the first time that it is needed."""
        wanted = self._sums.get(name)
        if wanted is None:
            return
        found = checksum(self._folder / name)
        if found != wanted:
            again = "--force" if name == ROWS_FILE else "the same folder, which makes damaged files again"
            raise InputError(
                expected=f"{self._folder / name} as it was written, with sha256 {wanted}",
                found=f"sha256 {found}: the file is damaged",
                remedy=f"Run `eagle3-jax data features` with this config and {again}.",
            )
        del self._sums[name]

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
