"""What lies on disk: tensors and configs read from model folders; files and folders written whole or not at all.

The reader maps a file and hands out one tensor at a time, bf16 included, without torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from etils import epath

from eagle3_jax.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


class SafetensorsFile:
    """One memory-mapped safetensors file; `self[name]` copies a single tensor out of it."""

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = int.from_bytes(file.read(8), "little") if size >= 8 else -1
            if not 0 < head <= size - 8:
                raise self._truncated(f"a header of {head} bytes in a file of {size} bytes")
            try:
                header = json.loads(file.read(head))
            except ValueError as error:
                raise InputError(
                    expected=f"a safetensors header (JSON) in {path}",
                    found=f"something else ({error})",
                    remedy="The file is damaged or of another format; fetch it again.",
                ) from None
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not isinstance(header, dict):
            raise self._truncated(f"a header that is a {type(header).__name__}")
        header.pop("__metadata__", None)
        self._entries: dict[str, dict[str, Any]] = header
        self._start = 8 + head
        needed = self._start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if needed != size:
            raise self._truncated(f"{size} bytes where its header describes {needed}")
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            if entry["dtype"] in DTYPES and math.prod(entry["shape"]) * self.dtype(name).itemsize != stop - start:
                raise self._truncated(f"{stop - start} bytes for {name} of type {entry['dtype']}, {entry['shape']}")

    def _truncated(self, found: str) -> InputError:
        return InputError(
            expected=f"a complete safetensors file at {self.path}",
            found=found,
            remedy="The download or copy was interrupted; fetch the file again.",
        )

    def keys(self) -> Iterator[str]:
        """Names of the tensors in the file."""
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor.

        Raises:
          InputError: a type this reader does not know, such as fp8.
        """
        code = self._entries[name]["dtype"]
        if code not in DTYPES:
            raise InputError(
                expected=f"tensors of type {', '.join(DTYPES)} in {self.path}",
                found=f"{name} of type {code}",
                remedy="Quantised weights are not supported; use the fp16 or bf16 checkpoint.",
            )
        return np.dtype(DTYPES[code])

    def view(self, name: str) -> np.ndarray:
        """A tensor where the file is mapped: only what is read of it is read from disk."""
        start, stop = self._entries[name]["data_offsets"]
        flat = np.frombuffer(self._map, np.uint8, stop - start, self._start + start)
        return flat.view(self.dtype(name)).reshape(self.shape(name))

    def forget(self, name: str) -> None:
        """Let the system take back the memory in which it keeps a tensor that was read; it can be read again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start, stop = (self._start + offset for offset in self._entries[name]["data_offsets"])
        first = start - start % mmap.PAGESIZE
        if stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def __getitem__(self, name: str) -> np.ndarray:
        # A copy, so that no array depends on the file staying as it is.
        return self.view(name).copy()

    def row(self, name: str, index: int) -> np.ndarray:
        """A copy of `self[name][index]`, index from 0, that reads no more of the file than this."""
        start, stop = self._entries[name]["data_offsets"]
        count, *shape = self.shape(name)
        if not 0 <= index < count:
            raise IndexError(index)
        size = (stop - start) // count
        flat = np.frombuffer(self._map, np.uint8, size, self._start + start + index * size)
        return flat.view(self.dtype(name)).reshape(shape).copy()


def open_tensors(folder: Path) -> dict[str, SafetensorsFile]:
    """Open a folder's safetensors, single or sharded, and map each tensor's name to its file.

    Raises:
      InputError: no such folder, no weights in it, a shard named by the index but absent, a tensor that the index
        places in a shard that does not hold it, a damaged file.
    """
    read_config(folder)
    index = folder / INDEX_FILE
    if index.exists():
        names: dict[str, str] = _read_json(index).get("weight_map", {})
        missing = sorted({shard for shard in names.values() if not (folder / shard).exists()})
        if missing:
            raise InputError(
                expected=f"every shard that {index} names",
                found=f"no {', '.join(missing)}",
                remedy="The download was interrupted; fetch the missing files.",
            )
        shards = {shard: SafetensorsFile(folder / shard) for shard in sorted(set(names.values()))}
        lost = sorted(name for name, shard in names.items() if name not in set(shards[shard].keys()))
        if lost:
            raise InputError(
                expected=f"tensor {lost[0]} in {folder / names[lost[0]]}, as {INDEX_FILE} says",
                found=f"{len(lost)} tensors not in their shard",
                remedy="Index and shards come from different downloads; fetch them again.",
            )
        # A tensor in a shard that the index forgets must not be dropped unseen.
        held = {name: file for file in shards.values() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return held | {name: shards[shard] for name, shard in names.items()}
    single = folder / SINGLE_FILE
    if not single.exists():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".gguf"))
        raise InputError(
            expected=f"{SINGLE_FILE} or {INDEX_FILE} in {folder}",
            found=f"only {', '.join(others)}" if others else "no weights",
            remedy="Targets in .bin or .gguf form are converted by `python -m convert.target`.",
        )
    file = SafetensorsFile(single)
    return dict.fromkeys(file.keys(), file)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(
            expected=f"JSON in {path}",
            found=f"something that does not parse ({error})",
            remedy="The file is damaged; fetch it again.",
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            expected=f"a JSON object in {path}",
            found=type(value).__name__,
            remedy="The file is damaged; fetch it again.",
        )
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder.

    Raises:
      InputError: no folder, no config.json, or not JSON.
    """
    if not folder.is_dir():
        raise InputError(
            expected=f"a model folder at {folder}",
            found="a file" if folder.exists() else "nothing there",
            remedy="Check the path; `make target` brings the demo target.",
        )
    if not (folder / "config.json").exists():
        raise InputError(
            expected=f"config.json in {folder}",
            found=", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder",
            remedy="Pass the folder that holds the model, not its parent; `python -m convert.target` reads GGUF, .bin.",
        )
    return _read_json(folder / "config.json")


def check_destination(destination: Path, source: Path | None, *, force: bool) -> None:
    """Raises InputError when the destination may not be written: it exists, holds the source, or is no model folder."""
    place = destination.resolve()
    if source is not None and (place == source.resolve() or place in source.resolve().parents):
        raise InputError(
            expected="a destination apart from the source",
            found=f"{destination}, which is or holds the source {source}",
            remedy="Name another destination folder.",
        )
    if not (destination.exists() or destination.is_symlink()):
        return
    if not force:
        raise InputError(
            expected="a destination that does not exist yet",
            found=f"{destination}",
            remedy="Name another folder, or pass --force to replace this one.",
        )
    replaceable = destination.is_dir() and not destination.is_symlink()
    if not (replaceable and ((destination / "config.json").is_file() or not any(destination.iterdir()))):
        raise InputError(
            expected="an empty folder or a model folder (with config.json) to replace under --force",
            found=f"{destination}, which is neither",
            remedy="Remove it yourself or name another destination.",
        )


def at(name: str) -> Path:
    """A local path, or one of a cloud (gs://, s3://), which `etils.epath` reads and writes through fsspec."""
    return cast(Path, epath.Path(name)) if "://" in name else Path(name)


def in_cloud(path: Path) -> bool:
    """Whether a path is a cloud's, where an object is written whole and never added to."""
    return "://" in str(path)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: `write` fills a file beside it, which then takes its place."""
    if in_cloud(path):
        write(path)
        return
    part = path.with_name(f".{path.name}.part")
    write(part)
    os.replace(part, path)


@contextmanager
def new_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """A folder that appears whole: filled beside its place, which it takes when the block ends without an error.

    Raises:
      OSError: the system refuses; without `force` also when the folder has come to exist and is not empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        yield new
        if force and folder.exists():
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
