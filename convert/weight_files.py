"""Weight files of any HuggingFace-like folder: safetensors or pytorch_model*.bin, single or in shards.

Nothing in a .bin file is executed: torch reads tensors only (`weights_only=True`).
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from convert.llama_folder import DTYPES, SAFETENSORS_DTYPES
from eagle3_jax.errors import InputError

FETCH_AGAIN = "Fetch the folder again and compare its checksums."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, the name of its type, and how to read it."""

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(expected=f"the file {path}", found="none", remedy=FETCH_AGAIN) from error
    except ValueError as error:
        raise InputError(expected=f"JSON in {path}", found=str(error), remedy=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise InputError(
            expected=f"a JSON object in {path}", found=f"a {type(value).__name__}", remedy="Fetch it again."
        )
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's tensors: those of the index, else the one file, else all of the kind.

    safetensors are preferred to .bin files. Empty when there are neither.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if index.is_file():
            return [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        if single.is_file():
            return [single]
        if found := sorted(folder.glob("*.safetensors" if suffix == "safetensors" else "pytorch_model*.bin")):
            return found
    return []


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    names = {short: name for name, short in SAFETENSORS_DTYPES.items()}
    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise InputError(
            expected=f"a whole safetensors file at {path}", found=str(error), remedy=FETCH_AGAIN
        ) from error

    def stored(name: str) -> StoredTensor:
        view = file.get_slice(name)
        dtype = view.get_dtype()
        return StoredTensor(tuple(view.get_shape()), names.get(dtype or "", str(dtype)), lambda: file.get_tensor(name))

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _open_bin(path: Path) -> dict[str, StoredTensor]:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            expected="torch, to read a .bin file",
            found=f"{path} and no torch",
            remedy="Install it: pip install -e '.[torch]', or fetch the model's safetensors files.",
        ) from error
    damaged = (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError)
    try:
        # Files of the format before torch 1.6 are no archives and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except damaged as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            expected=f"a file of tensors, and nothing else, at {path}",
            found=f"one that torch does not read as such ({reason})",
            remedy=FETCH_AGAIN,
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise InputError(
            expected=f"a state dictionary of tensors in {path}",
            found="other objects in it",
            remedy="Save the model's state_dict() alone.",
        )

    def stored(tensor: torch.Tensor) -> StoredTensor:
        def load() -> np.ndarray:
            if tensor.dtype != torch.bfloat16:
                return tensor.contiguous().numpy()
            return tensor.contiguous().view(torch.uint16).numpy().view(DTYPES["bfloat16"])

        return StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), load)

    return {name: stored(tensor) for name, tensor in content.items()}


def open_weights(files: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of some weight files by name, not read yet; InputError for a missing or damaged file."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        if not path.is_file():
            raise InputError(expected=f"the weight file {path}, named by the index", found="none", remedy=FETCH_AGAIN)
        opened = _open_safetensors(path) if path.suffix == ".safetensors" else _open_bin(path)
        if twice := sorted(set(opened) & set(tensors)):
            raise InputError(
                expected="each tensor in one file only",
                found=f"{twice[0]} in {path.name} and in another",
                remedy="Remove the weight files that do not belong to this model.",
            )
        tensors |= opened
    return tensors
