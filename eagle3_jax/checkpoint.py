"""Safetensors in and out: a HuggingFace LLaMA folder, and the canonical draft folder.

The reader maps a file and hands out one tensor at a time, bf16 included, without torch. Every tensor of a model is
loaded or derived by a named rule, and every tensor of a file is used or known to be redundant; anything else fails
and names the tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.params import ParamSpec, is_spec
from eagle3_jax.sharding import shardings
from eagle3_jax.target import Target, target_specs
from eagle3_jax.vocab import vocab_from_offsets, vocab_offsets

logger = logging.getLogger(__name__)

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


def _load_tree(
    specs: Any,
    files: Mapping[str, SafetensorsFile],
    dtype: DTypeLike,
    where: Path,
    derived: Mapping[str, str],
    decides: Mapping[str, str] = MappingProxyType({}),
    mesh: Mesh | None = None,
) -> tuple[Any, set[str]]:
    """Load every spec's tensor; on a mesh each process reads what its devices hold.

    `derived` maps tensors that may be absent to the rule that replaces them, `decides` tensors to the key of the config
    that their shape follows from.
    """
    problems = []
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    for spec in leaves:
        if spec.name not in files:
            if spec.name not in derived:
                problems.append(f"{spec.name} is absent")
        elif files[spec.name].shape(spec.name) != spec.file_shape:
            why = f", as {decides[spec.name]} says" if spec.name in decides else ""
            problems.append(f"{spec.name} has shape {files[spec.name].shape(spec.name)}, not {spec.file_shape}{why}")
        elif files[spec.name].dtype(spec.name) not in FLOATS:
            problems.append(f"{spec.name} has type {files[spec.name].dtype(spec.name)}, not fp32, fp16 or bf16")
    if problems:
        raise InputError(
            expected=f"the tensors that {where / 'config.json'} describes",
            found="; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""),
            remedy="Weights and config do not belong together, or the folder is of another kind of model.",
        )

    def load(spec: ParamSpec) -> jax.Array | None:
        if spec.name not in files:
            return None
        if mesh is None:
            return jnp.asarray(files[spec.name][spec.name].reshape(spec.shape), dtype)
        whole = files[spec.name].view(spec.name).reshape(spec.shape)
        # `astype` copies, so that no array depends on the file staying as it is.
        return jax.make_array_from_callback(
            spec.shape, shardings(spec, mesh), lambda part: whole[part].astype(jnp.dtype(dtype))
        )

    return jax.tree.unflatten(treedef, [load(spec) for spec in leaves]), {spec.name for spec in leaves}


def _refuse_unread(
    files: Mapping[str, SafetensorsFile], read: set[str], where: Path, known: Callable[[str], bool]
) -> None:
    unread = sorted(name for name in files if name not in read and not known(name))
    if unread:
        draft = any(name.startswith(("midlayer.", "fc.")) for name in unread)
        raise InputError(
            expected=f"only tensors that this reader uses in {where}",
            found=f"also {', '.join(unread[:5])}" + (f" and {len(unread) - 5} more" if len(unread) > 5 else ""),
            remedy="This is an EAGLE-3 draft; pass it as --draft."
            if draft
            else "The checkpoint has parts that would be dropped; its architecture is not the one its config names.",
        )


def read_target_config(folder: Path) -> TargetConfig:
    """The config of a HuggingFace LLaMA folder, without its weights. Raises as `TargetConfig.from_hf`."""
    return TargetConfig.from_hf(read_config(folder), str(folder / "config.json"))


def load_target(folder: Path, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Target:
    """Load a HuggingFace LLaMA folder.

    Args:
      folder: config.json with model.safetensors or shards, in fp32, fp16 or bf16.
      dtype: of the parameters in memory.
      mesh: where to; None is jax's default device.

    Raises:
      InputError: see `open_tensors` and `TargetConfig.from_hf`; a missing, unread or misshapen tensor.
    """
    config = read_target_config(folder)
    files = open_tensors(folder)
    specs = target_specs(config)
    head, embed = specs.lm_head, specs.embed
    assert isinstance(head, ParamSpec)
    assert isinstance(embed, ParamSpec)
    tied = config.tie_word_embeddings
    if tied:
        both = head.name in files and embed.name in files
        if both and not np.array_equal(files[head.name][head.name], files[embed.name][embed.name]):
            logger.warning(
                "%s ties its embeddings but also holds a different %s; the embedding is used, as the config says",
                folder, head.name,
            )  # fmt: skip
        files = {name: file for name, file in files.items() if name != head.name}
    params, read = _load_tree(specs, files, dtype, folder, {head.name: "tied embedding"} if tied else {}, mesh=mesh)
    # Old exports hold the rotary table, which follows from the config.
    _refuse_unread(files, read, folder, lambda name: name.endswith("rotary_emb.inv_freq"))
    if tied:
        params = params.replace(lm_head=params.embed)
    return Target(params=params, config=config)


def fingerprint(target: Target) -> str:
    """A short name for the target's weights: a hash of its norm weights in bf16.

    Norms are small, differ between models that were trained apart, and survive conversion of bf16 weights to any wider
    type; so a draft can tell whether it is used with the target it was trained for. A merged adapter that leaves the
    norms alone is not told apart.
    """
    digest = hashlib.sha256()
    norms = [target.params.norm, *(layer.input_norm for layer in target.params.layers)]
    for norm in norms:
        digest.update(np.asarray(norm).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def load_draft(folder: Path, target: Target, dtype: DTypeLike | None = None) -> Draft:
    """Load a canonical draft folder for a target.

    Args:
      folder: config.json and model.safetensors as `save_draft` writes them.
      target: lends its embedding, and must have the draft's vocabulary, width and taps.
      dtype: of the parameters in memory; the target's by default.

    Raises:
      InputError: missing, unread or misshapen tensors, a draft of another vocabulary or width, an invalid map.
    """
    where = folder / "config.json"
    config = DraftConfig.from_hf(read_config(folder), str(where))
    files = open_tensors(folder)
    for key, ours, theirs in (
        ("vocab_size", config.vocab_size, target.config.vocab_size),
        ("hidden width", config.target_hidden_size, target.config.hidden_size),
    ):
        if ours != theirs:
            raise InputError(
                expected=f"a draft for a target with {key} {theirs}",
                found=f"{key} {ours} in {where}",
                remedy="The draft was made for another target; pass the one it belongs to.",
            )
    if not config.taps:
        config = _guess_taps(config, files, target.config, where)
    if (
        max(config.taps) > target.config.num_layers
        or min(config.taps) < 0
        or list(config.taps) != sorted(set(config.taps))
    ):
        raise InputError(
            expected=f"ascending taps between 0 and {target.config.num_layers}, the target's number of layers",
            found=f"taps {list(config.taps)} in {where}",
            remedy="The draft was made for another target; pass the one it belongs to.",
        )
    if config.target_fingerprint not in (None, fingerprint(target)):
        logger.warning(
            "%s was trained for another target of the same shape (fingerprint %s, this target %s): answers stay right, "
            "but few drafts may be accepted",
            folder, config.target_fingerprint, fingerprint(target),
        )  # fmt: skip
    dtype = target.params.embed.dtype if dtype is None else dtype
    specs, vocab_names = draft_specs(config), {"d2t", "t2d"}
    full = config.draft_vocab_size == config.vocab_size
    own_embed = config.hidden_size != config.target_hidden_size
    derived = {"lm_head.weight": "the target's head"} if full and not own_embed else {}
    decides = {"lm_head.weight": "draft_vocab_size", "fc.weight": "the number of taps"}
    params, read = _load_tree(specs, files, dtype, folder, derived, decides)
    if "d2t" not in files and not full:
        raise InputError(
            expected=f"d2t in {folder}: its vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens",
            found="no such tensor",
            remedy="Without the map the draft's tokens have no meaning; export the draft again.",
        )
    # Over the whole vocabulary the map may be absent, and is the identity: offsets of zero.
    offsets = files["d2t"]["d2t"] if "d2t" in files else np.zeros(config.draft_vocab_size, np.int64)
    if offsets.shape != (config.draft_vocab_size,):
        raise InputError(
            expected=f"d2t with draft_vocab_size = {config.draft_vocab_size} entries in {folder}",
            found=f"shape {offsets.shape}",
            remedy="Weights and config do not belong together.",
        )
    member = files["t2d"]["t2d"] if "t2d" in files else None
    vocab = vocab_from_offsets(offsets, config.vocab_size, member, f"d2t of {folder}")
    if params.lm_head is None:
        logger.warning("%s has no lm_head; its vocabulary is the target's, whose head is used", folder)
        head = target.params.lm_head.astype(dtype)
        params = params.replace(lm_head=head[vocab.d2t] if offsets.any() else head)
    embed = target.params.embed.astype(dtype)
    if own_embed:
        spec = ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), "embed_tokens.weight", inputs=1)
        embed, _ = _load_tree(spec, files, dtype, folder, {})
        vocab_names.add(spec.name)
    _refuse_unread(files, read | vocab_names, folder, lambda name: False)
    return Draft(params=params, vocab=vocab, embed=embed, config=config)


def _guess_taps(
    config: DraftConfig, files: Mapping[str, SafetensorsFile], target: TargetConfig, where: Path
) -> DraftConfig:
    """Without recorded taps, use the paper's three, if the fusion's width is theirs; say so loudly."""
    width = files["fc.weight"].shape("fc.weight")[-1] if "fc.weight" in files else 0
    if width != 3 * config.target_hidden_size:
        raise InputError(
            expected=f"key 'taps' in {where}, the boundaries whose states are fused",
            found=f"none, and a fusion of width {width} that the default three do not explain",
            remedy="Add the boundaries the draft was trained with, as the state entering each layer, counted from 0.",
        )
    logger.warning(
        "%s names no taps: guessing %s, the paper's default; if the draft was trained with others, few drafts will be "
        "accepted. Add the key 'taps' to its config.",
        where, list(target.default_taps),
    )  # fmt: skip
    return dataclasses.replace(config, taps=target.default_taps)


def save_draft(folder: Path, draft: Draft, *, dtype: DTypeLike = jnp.bfloat16, force: bool = False) -> None:
    """Write a canonical draft folder, whole or not at all.

    Args:
      folder: to be created.
      draft: the model.
      dtype: of the weights in the file.
      force: replace an existing model folder.

    Raises:
      InputError: see `check_destination`; a weight is not finite.
    """
    check_destination(folder, None, force=force)
    specs = draft_specs(draft.config)
    tensors: dict[str, np.ndarray] = {}
    for spec, leaf in zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(draft.params), strict=True):
        array = np.asarray(leaf).astype(jnp.dtype(dtype))
        if not np.isfinite(array.astype(np.float32)).all():
            raise InputError(
                expected="finite weights",
                found=f"nan or inf in {spec.name}",
                remedy="The run diverged; export an earlier step.",
            )
        tensors[spec.name] = array.reshape(spec.file_shape)
    tensors["d2t"] = vocab_offsets(draft.vocab)
    tensors["t2d"] = np.asarray(draft.vocab.t2d)
    if draft.config.hidden_size != draft.config.target_hidden_size:
        tensors["embed_tokens.weight"] = np.asarray(draft.embed).astype(jnp.dtype(dtype))
    config = draft.config.to_hf() | {"torch_dtype": jnp.dtype(dtype).name}
    with new_folder(folder, force=force) as part:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, part / SINGLE_FILE, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; a folder is for passing on.
        (part / SINGLE_FILE).chmod((part / "config.json").stat().st_mode)


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


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: `write` fills a file beside it, which then takes its place."""
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
