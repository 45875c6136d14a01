"""A HuggingFace LLaMA folder as this project writes it: tensor names and shapes, shards, atomic placement.

Readers of foreign formats (`convert.gguf_reader`, `convert.hf_reader`) describe what they found as a `LlamaSource`;
`write_folder` turns that into a folder. Tensors are made one at a time while the file is written, so that the memory
needed is that of the largest tensor and not that of the model.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.files import new_folder
from eagle3_jax.params import is_spec
from eagle3_jax.target import target_specs

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source, under its HuggingFace name; `load` makes the array (float32, float16 or bfloat16)."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


@dataclass(frozen=True)
class LlamaSource:
    """All that a folder is made of, before anything large was read.

    Attributes:
      config: content of config.json, but for torch_dtype.
      generation_config: content of generation_config.json.
      tensors: all of them, in the order in which they are written.
      default_dtype: that of the source's matrices.
      files: other files by name: their content, or a file to copy.
      notes: what the user should know.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: tuple[SourceTensor, ...]
    default_dtype: str
    files: Mapping[str, bytes | Path]
    notes: tuple[str, ...]


def tensor_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape ([out, in]) of every tensor in the files of this model; a tied one has no `lm_head.weight`."""
    specs = jax.tree.leaves(target_specs(config), is_leaf=is_spec)
    shapes = {spec.name: spec.file_shape for spec in specs}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def licence_files(folder: Path) -> dict[str, Path]:
    """Licence and notice files directly in a folder, by name."""
    prefixes = ("license", "licence", "notice", "copying", "use_policy")
    return {p.name: p for p in sorted(folder.iterdir()) if p.is_file() and p.name.lower().startswith(prefixes)}


def cast(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The array in `dtype`; InputError for inf or nan, or a value beyond float16 (which ends at 65504)."""
    with np.errstate(over="ignore"):
        result = array.astype(DTYPES[dtype], copy=False)
    if not np.isfinite(result).all():
        if not np.isfinite(array).all():
            raise InputError(
                expected="finite weights",
                found=f"inf or nan in {name}",
                remedy="The source is damaged; fetch it again.",
            )
        raise InputError(
            expected=f"weights that fit into {dtype}",
            found=f"{name} with magnitudes up to {np.abs(array.astype(np.float32)).max():.6g}",
            remedy="Use --dtype float32 or bfloat16.",
        )
    return result


def plan_shards(tensors: Sequence[SourceTensor], itemsize: int, limit: int) -> list[list[SourceTensor]]:
    """Consecutive groups of at most `limit` bytes each; a tensor larger than that stands alone."""
    shards: list[list[SourceTensor]] = []
    used = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if not shards or used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def _write_shard(path: Path, tensors: Sequence[SourceTensor], dtype: str) -> None:
    """Writes one safetensors file (8 bytes of header length, JSON header, raw little-endian data in order)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + math.prod(tensor.shape) * DTYPES[dtype].itemsize
        header[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # The format wants the data to start at a multiple of eight.
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            array = tensor.load()
            if array.shape != tensor.shape:
                raise RuntimeError(f"{tensor.name}: planned {tensor.shape}, loaded {array.shape}")
            file.write(np.ascontiguousarray(cast(array, dtype, tensor.name)).view(np.uint8).data)


def write_tensors(folder: Path, tensors: Sequence[SourceTensor], dtype: str, limit: int = MAX_SHARD_BYTES) -> None:
    """Writes model.safetensors, or shards of at most `limit` bytes with model.safetensors.index.json."""
    itemsize = DTYPES[dtype].itemsize
    shards = plan_shards(tensors, itemsize, limit)
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", shards[0], dtype)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, dtype)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(math.prod(tensor.shape) for tensor in tensors) * itemsize
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object, keys in the order given."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(
    source: LlamaSource, destination: Path, dtype: str, *, replace: bool = False, limit: int = MAX_SHARD_BYTES
) -> None:
    """Writes the whole folder; when it fails half way, `destination` is as it was.

    Args:
      source: what to write.
      destination: the folder; with `replace` it takes the place of an existing one.
      dtype: of all tensors, a key of `DTYPES`.
      limit: bytes of tensors in one file.

    Raises:
      InputError: a tensor is damaged or does not fit into `dtype`, or the disk does not take the folder.
    """
    try:
        with new_folder(destination, force=replace) as folder:
            write_json(folder / "config.json", source.config | {"torch_dtype": dtype})
            write_json(folder / "generation_config.json", source.generation_config)
            for name, content in source.files.items():
                if isinstance(content, Path):
                    shutil.copyfile(content, folder / name)
                else:
                    (folder / name).write_bytes(content)
            write_tensors(folder, source.tensors, dtype, limit)
    except OSError as error:
        raise InputError(
            expected=f"to write the folder {destination}",
            found=f"the system refused: {error}",
            remedy="Check free space and permissions, or name another destination.",
        ) from error
