"""Safetensors in and out: a HuggingFace LLaMA folder, and the canonical draft folder.

Every tensor of a model is loaded or derived by a named rule, and every tensor of a file is used or known to be
redundant; anything else fails and names the tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

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
from eagle3_jax.files import (
    FLOATS,
    SINGLE_FILE,
    SafetensorsFile,
    check_destination,
    new_folder,
    open_tensors,
    read_config,
)
from eagle3_jax.params import ParamSpec, is_spec
from eagle3_jax.sharding import place, replicated, shardings
from eagle3_jax.target import Target, TargetLayer, stack_specs, target_specs
from eagle3_jax.vocab import DraftVocab, vocab_from_offsets, vocab_offsets

logger = logging.getLogger(__name__)


def _check_tree(
    specs: Any,
    files: Mapping[str, SafetensorsFile],
    where: Path,
    derived: Mapping[str, str],
    decides: Mapping[str, str] = MappingProxyType({}),
) -> set[str]:
    """The names of an abstract tree's tensors, each of which is there in the right form.

    `derived` maps tensors that may be absent to the rule that replaces them, `decides` tensors to the key of the config
    that their shape follows from.
    """
    problems = []
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
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
    return {spec.name for spec in leaves}


def _load_tree(
    specs: Any,
    files: Mapping[str, SafetensorsFile],
    dtype: DTypeLike,
    mesh: Mesh | None,
    *,
    stacked: bool = False,
) -> Any:
    """Load every spec's tensor, None where there is none; on a mesh each process reads what its devices hold.

    `stacked` joins the layers of a target.
    """

    def load(spec: ParamSpec) -> jax.Array | None:
        if spec.name not in files:
            return None
        if mesh is None:
            return _forgotten(jnp.asarray(files[spec.name][spec.name].reshape(spec.shape), dtype), files, spec)
        whole = files[spec.name].view(spec.name).reshape(spec.shape)
        # `astype` copies, so that no array depends on the file staying as it is.
        read = lambda part: whole[part].astype(jnp.dtype(dtype))
        return _forgotten(jax.make_array_from_callback(spec.shape, shardings(spec, mesh), read), files, spec)

    def load_stack(spec: ParamSpec, *layers: ParamSpec) -> jax.Array:
        """One parameter of all layers, as `spec` describes it."""
        whole = [files[one.name].view(one.name).reshape(one.shape) for one in layers]

        def read(part: Any) -> np.ndarray:
            chosen = whole[part[0]]
            joined = np.empty((len(chosen), *chosen[0][part[1:]].shape), jnp.dtype(dtype))
            for index, array in enumerate(chosen):
                joined[index] = array[part[1:]]
            return joined

        if mesh is None:
            return _forgotten(jnp.asarray(read((slice(None),))), files, *layers)
        return _forgotten(jax.make_array_from_callback(spec.shape, shardings(spec, mesh), read), files, *layers)

    if not stacked:
        return jax.tree.map(load, specs, is_leaf=is_spec)
    layers = jax.tree.map(load_stack, stack_specs(specs.layers), *specs.layers, is_leaf=is_spec)
    rest = jax.tree.map(load, dataclasses.replace(specs, layers=()), is_leaf=is_spec)
    return dataclasses.replace(rest, layers=layers)


def _forgotten(array: jax.Array, files: Mapping[str, SafetensorsFile], *specs: ParamSpec) -> jax.Array:
    """The array. What its files' maps hold goes, or a load would need the checkpoint in memory beside the model."""
    array.block_until_ready()
    for spec in specs:
        files[spec.name].forget(spec.name)
    return array


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


def load_target(
    folder: Path, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None, *, layers: str = "each"
) -> Target:
    """Load a HuggingFace LLaMA folder.

    Args:
      folder: config.json with model.safetensors or shards, in fp32, fp16 or bf16.
      dtype: of the parameters in memory.
      mesh: where to; None is jax's default device.
      layers: "each" for decoding; "stacked" for the passes of training (see `TargetParams`); "none" leaves them out:
        embedding, final norm and head are all that a draft needs of its target.

    Raises:
      InputError: see `open_tensors` and `TargetConfig.from_hf`; a missing, unread or misshapen tensor.
    """
    config = read_target_config(folder)
    files = open_tensors(folder)
    specs = target_specs(config)
    if layers == "none":
        inside = {spec.name for spec in jax.tree.leaves(specs.layers, is_leaf=is_spec)}
        specs, files = dataclasses.replace(specs, layers=()), {n: f for n, f in files.items() if n not in inside}
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
    read = _check_tree(specs, files, folder, {head.name: "tied embedding"} if tied else {})
    params = _load_tree(specs, files, dtype, mesh, stacked=layers == "stacked")
    # Old exports hold the rotary table, which follows from the config.
    _refuse_unread(files, read, folder, lambda name: name.endswith("rotary_emb.inv_freq"))
    if tied:
        params = params.replace(lm_head=params.embed)
    return Target(params=params, config=config)


def fingerprint(target: Target) -> str:
    """A short name for the target's weights, as `fingerprint_of` its folder; of a target with its layers."""
    layers = target.params.layers
    norms = list(layers.input_norm) if isinstance(layers, TargetLayer) else [layer.input_norm for layer in layers]
    return _mark([target.params.norm, *norms])


def fingerprint_of(folder: Path) -> str:
    """A short name for the weights in a target's folder: a hash of its norm weights in bf16.

    Norms are small, differ between models that were trained apart, and survive conversion of bf16 weights to any wider
    type; so a draft can tell whether it is used with the target it was trained for. A merged adapter that leaves the
    norms alone is not told apart.
    """
    files, specs = open_tensors(folder), target_specs(read_target_config(folder))
    norms: list[Any] = [specs.norm, *(layer.input_norm for layer in cast(Any, specs.layers))]
    absent = [spec.name for spec in norms if spec.name not in files]
    if absent:
        raise InputError(
            expected=f"the norms of a LLaMA model in {folder}",
            found=f"no {absent[0]}",
            remedy="The folder is of another kind of model, or incomplete.",
        )
    return _mark([files[spec.name][spec.name] for spec in norms])


def weight_not_finite(target: Target, folder: Path | None = None) -> str:
    """The first weight with a nan or inf, by its name in a checkpoint, and with `folder` its file; "" for none."""
    specs, params, layers = target_specs(target.config), target.params, target.params.layers
    pairs: list[tuple[Any, Any]] = [(specs.embed, params.embed)]
    for index, layer in enumerate(cast(Any, specs.layers)):
        own = layers[index] if isinstance(layers, tuple) else jax.tree.map(lambda leaf, n=index: leaf[n], layers)
        pairs += zip(jax.tree.leaves(layer, is_leaf=is_spec), jax.tree.leaves(own), strict=True)
    pairs += [(specs.norm, params.norm), (specs.lm_head, params.lm_head)]
    for spec, array in pairs:
        if not bool(jnp.isfinite(array).all()):
            files = {} if folder is None else open_tensors(folder)
            return f"{spec.name} of {files[spec.name].path}" if spec.name in files else spec.name
    return ""


def _mark(norms: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for norm in norms:
        digest.update(np.asarray(norm).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def read_draft(folder: Path, target: TargetConfig) -> tuple[DraftConfig, DraftVocab]:
    """Shape and vocabulary of a draft folder for a target; no weights are read. Raises as `load_draft`."""
    config, vocab, _ = _open_draft(folder, target)
    return config, vocab


def _embed_spec(config: DraftConfig) -> ParamSpec | None:
    """The embedding of a draft that brings its own; None where the target lends its."""
    if not config.brings_embedding:
        return None
    return ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "embed"), "embed_tokens.weight", inputs=1)


def _open_draft(folder: Path, target: TargetConfig) -> tuple[DraftConfig, DraftVocab, Mapping[str, SafetensorsFile]]:
    """Shape, vocabulary and tensors of a draft folder, all of them checked."""
    where = folder / "config.json"
    config = DraftConfig.from_hf(read_config(folder), str(where))
    files = open_tensors(folder)
    for key, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden width", config.target_hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise InputError(
                expected=f"a draft for a target with {key} {theirs}",
                found=f"{key} {ours} in {where}",
                remedy="The draft was made for another target; pass the one it belongs to.",
            )
    if not config.taps:
        config = _guess_taps(config, files, target, where)
    if (
        max(config.taps) > target.num_layers + 1
        or min(config.taps) < 0
        or list(config.taps) != sorted(set(config.taps))
    ):
        raise InputError(
            expected=f"ascending taps between 0 and {target.num_layers}, the target's number of layers (or one "
            "more, its final hidden state)",
            found=f"taps {list(config.taps)} in {where}",
            remedy="The draft was made for another target; pass the one it belongs to.",
        )
    full, embed = config.draft_vocab_size == config.vocab_size, _embed_spec(config)
    same_width = config.hidden_size == config.target_hidden_size
    derived = {"lm_head.weight": "the target's head"} if full and same_width else {}
    decides = {"lm_head.weight": "draft_vocab_size", "fc.weight": "the number of taps"}
    names = _check_tree(draft_specs(config), files, folder, derived, decides)
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
    if embed is not None:
        names |= _check_tree(embed, files, folder, {})
    _refuse_unread(files, names | {"d2t", "t2d"}, folder, lambda name: False)
    return config, vocab, files


def load_draft(
    folder: Path,
    target: Target,
    dtype: DTypeLike | None = None,
    *,
    mark: str | None = None,
    mesh: Mesh | None = None,
) -> Draft:
    """Load a canonical draft folder for a target.

    Args:
      folder: config.json and model.safetensors as `save_draft` writes them.
      target: lends its embedding, and must have the draft's vocabulary, width and taps.
      dtype: of the parameters in memory; the target's by default.
      mark: `fingerprint` of the target, where it is known.
      mesh: where to, and where the target is; None is jax's default device.

    Raises:
      InputError: missing, unread or misshapen tensors, a draft of another vocabulary or width, an invalid map.
    """
    config, vocab, files = _open_draft(folder, target.config)
    mark = mark or fingerprint(target)
    if config.target_fingerprint not in (None, mark):
        logger.warning(
            "%s was trained for another target of the same shape (fingerprint %s, this target %s): answers stay right, "
            "but few drafts may be accepted",
            folder, config.target_fingerprint, mark,
        )  # fmt: skip
    dtype = target.params.embed.dtype if dtype is None else dtype
    params = _load_tree(draft_specs(config), files, dtype, mesh)
    if params.lm_head is None:
        logger.warning("%s has no lm_head; its vocabulary is the target's, whose head is used", folder)
        head, ids = target.params.lm_head.astype(dtype), np.asarray(vocab.d2t)
        if (ids != np.arange(ids.size)).any():
            head = jax.jit(lambda head, ids: head[ids], out_shardings=head.sharding)(head, ids)
        params = params.replace(lm_head=head)
    spec = _embed_spec(config)
    embed = target.params.embed.astype(dtype) if spec is None else _load_tree(spec, files, dtype, mesh)
    if mesh is not None:
        vocab = place(vocab, replicated(mesh))
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
    if draft.config.brings_embedding:
        tensors["embed_tokens.weight"] = np.asarray(draft.embed).astype(jnp.dtype(dtype))
    config = draft.config.to_hf() | {"torch_dtype": jnp.dtype(dtype).name}
    with new_folder(folder, force=force) as part:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, part / SINGLE_FILE, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; a folder is for passing on.
        (part / SINGLE_FILE).chmod((part / "config.json").stat().st_mode)
