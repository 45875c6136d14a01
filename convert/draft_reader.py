"""Reads a draft folder of any dialect: config and headers now, tensors when they are asked for.

What comes out is the canonical draft: our config, tensors under the official names, absolute target ids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.draft_dialects import (
    DIALECTS,
    RECORD,
    VERIFIER_COPIES,
    boundaries,
    canonical_name,
    feedback_is_normed,
    flatten,
    recognise,
)
from convert.llama_folder import DTYPES
from convert.weight_files import StoredTensor, open_weights, read_json, weight_files
from eagle3_jax.checkpoint import fingerprint_of, read_target_config
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.files import open_tensors
from eagle3_jax.params import is_spec
from eagle3_jax.rope import DEFAULT_ROPE_THETA
from eagle3_jax.vocab import DraftVocab, vocab_from_ids, vocab_from_offsets

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class DraftSource:
    """A draft as it was found, under canonical names.

    Attributes:
      dialect: a key of DIALECTS.
      config: the canonical config; `taps` is () where the default of an unknown target applies.
      tensors: the parameters by canonical name, and EMBEDDING if the draft brings its own.
      vocab: the draft vocabulary.
      tap_count: A, from the width of the fusion.
      notes: what the user should know.
    """

    dialect: str
    config: DraftConfig
    tensors: Mapping[str, StoredTensor]
    vocab: DraftVocab
    tap_count: int
    notes: tuple[str, ...]


def read_draft(
    folder: Path, *, target: Path | None = None, dialect: str | None = None, changes: Mapping[str, Any] | None = None
) -> DraftSource:
    """Read a draft.

    Args:
      folder: config.json with safetensors or pytorch_model.bin.
      target: the target's folder: says the default taps and whether an embedding is its own, lends an absent head.
      dialect: a key of DIALECTS; None to recognise it.
      changes: keys of the flattened config to set, for a draft whose config is wrong or silent.

    Raises:
      InputError: no EAGLE-3 draft, a setting that is not supported, tensors that do not fit, a map that is none.
    """
    raw = read_json(folder / "config.json")
    files = weight_files(folder)
    if not files:
        raise InputError(
            expected="model.safetensors or pytorch_model.bin of a draft",
            found=f"neither in {folder}",
            remedy="Name the folder that holds the draft's weights.",
        )
    stored = open_weights(files)
    found = recognise(raw, stored)
    name = dialect or found
    flat = flatten(raw, name) | dict(changes or {})
    notes = [f"{folder} is of the dialect {name}: {DIALECTS[name].writer}"]
    if files[0].suffix == ".safetensors" and any(folder.glob("pytorch_model*.bin")):
        notes.append("the folder has .bin files too, which the official code would prefer; the safetensors were read")
    tensors = _renamed(stored, name, notes)
    shape = None if target is None else read_target_config(target)
    where = str(folder / "config.json")
    config, count = _config(flat, name, tensors, shape, where, recognised=dialect is None, notes=notes)
    if target is not None and config.target_fingerprint is None:
        config = dataclasses.replace(config, target_fingerprint=fingerprint_of(target))
    vocab = _vocabulary(flat, config, tensors, where, notes)
    config, parameters = _parameters(config, count, tensors, vocab, target, where, notes)
    return DraftSource(name, config, parameters, vocab, count, tuple(notes))


def _renamed(stored: Mapping[str, StoredTensor], dialect: str, notes: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if dialect == "speculators" and name in VERIFIER_COPIES:
            notes.append(f"left out {name}: a copy of the target's")
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        new = canonical_name(name)
        if new in tensors:
            raise InputError(
                expected="each tensor of the draft once",
                found=f"{new} under two names, {name} among them",
                remedy="Remove the weight files that do not belong to this draft.",
            )
        tensors[new] = tensor
    return tensors


def _need(flat: Mapping[str, Any], key: str, where: str) -> Any:
    if flat.get(key) is None:
        raise InputError(
            expected=f"key {key!r} in {where}",
            found="no such key" if key not in flat else "null",
            remedy=f"Pass --set {key}=VALUE with the value that the draft was trained with.",
        )
    return flat[key]


def _config(
    flat: dict[str, Any],
    dialect: str,
    tensors: Mapping[str, StoredTensor],
    target: TargetConfig | None,
    where: str,
    *,
    recognised: bool,
    notes: list[str],
) -> tuple[DraftConfig, int]:
    """The canonical config, and the number of taps."""
    hidden = int(_need(flat, "hidden_size", where))
    width = tensors["fc.weight"].shape[-1]
    beside = target.hidden_size if target is not None and (width % hidden or "target_hidden_size" in flat) else hidden
    target_hidden = int(flat.get("target_hidden_size") or beside)
    count, rest = divmod(width, target_hidden)
    if rest or not count:
        raise InputError(
            expected=f"fc.weight whose width is a multiple of the target's hidden size {target_hidden}",
            found=f"width {width} in {where}",
            remedy="Pass --target, or --set target_hidden_size=WIDTH, with the width of the draft's own target.",
        )
    taps, how = boundaries(flat, dialect, None if target is None else target.num_layers)
    if len(taps) == count + 1 and target is not None and taps[-1] == target.num_layers:
        taps, how = taps[:-1], f"{how}; the last one is what the trainer compared with, not an input of the draft"
    if not taps and target is not None:
        taps = target.default_taps
    notes.append(f"taps {list(taps) or 'unknown without --target'}, as states entering layers ({how})")
    if taps and len(taps) != count:
        raise InputError(
            expected=f"{count} taps, as fc.weight of width {width} reads states of width {target_hidden}",
            found=f"{list(taps)} ({how})",
            remedy="Pass --set taps=[..] with the boundaries that the draft was trained with, counted as inputs.",
        )
    size = int(flat.get("draft_vocab_size") or flat.get("vocab_size") or 0)
    if not flat.get("draft_vocab_size"):
        notes.append(f"no draft_vocab_size: the whole vocabulary of {size}, as SGLang and vLLM take it")
    if not (flat.get("rope_theta") or any((flat.get(k) or {}).get("rope_theta") for k in ROPE_PLACES)):
        notes.append(f"no rope_theta: RoPE base {DEFAULT_ROPE_THETA:g}, which every trainer takes then")
    if dialect == "modelopt" and (flat.get("rope_scaling") or {}).get("factor"):
        notes.append(
            "Model-Optimizer writes a yarn rule into exports of drafts that it trained without one: if few drafts are "
            "accepted, try --set rope_scaling=null"
        )
    if int(flat.get("num_hidden_layers") or 1) != 1:
        notes.append(f"num_hidden_layers {flat['num_hidden_layers']} is the target's; the folder holds one layer")
    record = flat.get(RECORD) or {}
    heads = int(_need(flat, "num_attention_heads", where))
    normed = feedback_is_normed(flat, dialect, recognised=recognised)
    trained = record.get("trained_length", flat.get("trained_length"))
    content = {
        "vocab_size": _need(flat, "vocab_size", where),
        "draft_vocab_size": size,
        "hidden_size": hidden,
        "target_hidden_size": target_hidden,
        "intermediate_size": _need(flat, "intermediate_size", where),
        "num_attention_heads": heads,
        "num_key_value_heads": flat.get("num_key_value_heads") or heads,
        "head_dim": flat.get("head_dim") or hidden // heads,
        "hidden_act": flat.get("hidden_act") or "silu",
        "attention_bias": bool(flat.get("attention_bias", False)),
        "rms_norm_eps": _need(flat, "rms_norm_eps", where),
        "max_position_embeddings": _need(flat, "max_position_embeddings", where),
        "norm_output": normed,
        "taps": list(taps) or None,
        "trained_length": trained,
        "target_fingerprint": record.get("target_fingerprint", flat.get("target_fingerprint")),
        **{key: flat[key] for key in ("rope_theta", *ROPE_PLACES) if flat.get(key)},
        **{key: flat.get(key) for key in ("fc_norm", "norm_before_fc", "norm_before_residual", "sliding_window")},
    }
    config = DraftConfig.from_hf(content, where)
    if target is not None:
        for key, ours, theirs in (
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("hidden_size", config.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise InputError(
                    expected=f"a draft for a target with {key} {theirs}, the --target",
                    found=f"{ours} in {where}",
                    remedy="Pass the target that the draft was made for.",
                )
    return config, count


ROPE_PLACES = ("rope_scaling", "rope_parameters")


def _vocabulary(
    flat: Mapping[str, Any], config: DraftConfig, tensors: Mapping[str, StoredTensor], where: str, notes: list[str]
) -> DraftVocab:
    """The map, whichever form the file has it in."""
    size, whole = config.draft_vocab_size, config.vocab_size
    if "d2t" not in tensors:
        if size == whole:
            return vocab_from_ids(np.arange(whole), whole, where)
        raise InputError(
            expected=f"d2t in the draft's weights: its vocabulary has {size} of {whole} tokens",
            found="no such tensor",
            remedy="Without the map the draft's tokens have no meaning; export the draft again.",
        )
    stored = np.asarray(tensors["d2t"].load()).reshape(-1)
    if stored.size != size:
        raise InputError(
            expected=f"d2t with draft_vocab_size = {size} entries, as {where} says",
            found=f"{stored.size}",
            remedy="Weights and config do not belong together.",
        )
    member = np.asarray(tensors["t2d"].load()).reshape(-1) if "t2d" in tensors else None
    form = flat.get("d2t")
    try:
        as_offsets = vocab_from_offsets(stored, whole, member, f"d2t of {where}")
    except InputError:
        if form != "absolute" and not (member is not None and _flags(member, stored)):
            raise
        notes.append("d2t holds absolute target ids, not offsets, as t2d shows" if form is None else "d2t is absolute")
        return vocab_from_ids(stored, whole, f"d2t of {where}")
    if form == "absolute":
        return vocab_from_ids(stored, whole, f"d2t of {where}")
    if member is None:
        notes.append("no t2d: derived from d2t")
        rising = stored.size > 1 and bool((np.diff(stored) > 0).all())
        if rising and form is None:
            raise InputError(
                expected="d2t whose form is clear: offsets of a sorted vocabulary repeat, absolute ids never do",
                found=f"values that only rise ({stored[0]}, {stored[1]}, ...), and no t2d to tell by",
                remedy="Pass --set d2t=absolute or --set d2t=offsets.",
            )
    return as_offsets


def _flags(member: np.ndarray, ids: np.ndarray) -> bool:
    """Whether t2d flags exactly these ids."""
    return bool(
        np.issubdtype(ids.dtype, np.integer)
        and ids.min() >= 0
        and ids.max() < member.size
        and np.array_equal(np.flatnonzero(member), np.unique(ids))
    )


def _parameters(
    config: DraftConfig,
    count: int,
    tensors: Mapping[str, StoredTensor],
    vocab: DraftVocab,
    target: Path | None,
    where: str,
    notes: list[str],
) -> tuple[DraftConfig, dict[str, StoredTensor]]:
    """Every parameter, found or borrowed; every other tensor of the file known to be needless."""
    # The number of taps decides shapes, which ones they are does not.
    specs = jax.tree.leaves(
        draft_specs(dataclasses.replace(config, taps=config.taps or tuple(range(count)))), is_leaf=is_spec
    )
    tensors = dict(tensors)
    if HEAD not in tensors:
        tensors[HEAD] = _borrowed_head(config, vocab, target, notes)
    config = _own_embedding(config, tensors, target, notes)
    problems = []
    for spec in specs:
        tensor = tensors.get(spec.name)
        why = {HEAD: ", as draft_vocab_size says", "fc.weight": ", as the taps say"}.get(spec.name, "")
        if tensor is None:
            problems.append(f"{spec.name} is absent")
        elif tensor.shape != spec.file_shape:
            problems.append(f"{spec.name} has shape {tensor.shape}, not {spec.file_shape}{why}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{spec.name} has type {tensor.dtype}, not one of {', '.join(DTYPES)}")
    known = {spec.name for spec in specs} | {"d2t", "t2d", EMBEDDING}
    for name in sorted(set(tensors) - known):
        flag = {"input_norm": "norm_before_fc", "fc_norm": "fc_norm"}.get(name.split(".")[0])
        problems.append(f"{name} has no use" + (f" while {flag} is not set: --set {flag}=true uses it" if flag else ""))
    if problems:
        raise InputError(
            expected=f"the tensors of the draft that {where} describes",
            found="; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""),
            remedy="Weights and config do not belong together, or the draft's layer is of another kind.",
        )
    kept = {spec.name: tensors[spec.name] for spec in specs}
    if config.brings_embedding:
        kept[EMBEDDING] = tensors[EMBEDDING]
    return config, kept


def _target_tensor(target: Path, name: str) -> StoredTensor:
    files = open_tensors(target)
    if name not in files and name == HEAD:
        name = "model.embed_tokens.weight"  # a tied one
    file = files[name]
    return StoredTensor(file.shape(name), file.dtype(name).name, lambda: file[name])


def _borrowed_head(config: DraftConfig, vocab: DraftVocab, target: Path | None, notes: list[str]) -> StoredTensor:
    if config.draft_vocab_size != config.vocab_size or config.hidden_size != config.target_hidden_size:
        raise InputError(
            expected=f"lm_head.weight [{config.draft_vocab_size}, {config.hidden_size}] in the draft's weights",
            found="no such tensor, and the target's head has another vocabulary or width",
            remedy="Export the draft again with its head: an engine would fill it with noise and accept nothing.",
        )
    if target is None:
        raise InputError(
            expected="--target, to borrow the head that the draft does not have",
            found="a draft of the whole vocabulary without lm_head.weight, and no target",
            remedy="Pass the target's folder.",
        )
    notes.append("no lm_head.weight: the target's head is used, as the vocabulary is whole")
    stored = _target_tensor(target, HEAD)
    order = np.asarray(vocab.d2t)
    return StoredTensor(stored.shape, stored.dtype, lambda: stored.load()[order])


def _own_embedding(
    config: DraftConfig, tensors: Mapping[str, StoredTensor], target: Path | None, notes: list[str]
) -> DraftConfig:
    """Whether the folder's embedding is the target's own (and need not be kept) or another one."""
    other_width = config.hidden_size != config.target_hidden_size
    if EMBEDDING not in tensors:
        if other_width:
            raise InputError(
                expected=f"{EMBEDDING} of width {config.hidden_size}: the target's has {config.target_hidden_size}",
                found="no such tensor in the draft's weights",
                remedy="Export the draft again with its embedding.",
            )
        return config
    shape = (config.vocab_size, config.hidden_size)
    if tensors[EMBEDDING].shape != shape:
        raise InputError(
            expected=f"{EMBEDDING} of shape {shape}",
            found=f"{tensors[EMBEDDING].shape}",
            remedy="Weights and config do not belong together.",
        )
    if other_width:
        return config
    if target is None:
        notes.append(f"{EMBEDDING} is kept: pass --target to see whether it is the target's own")
        return dataclasses.replace(config, own_embedding=True)
    ours, theirs = tensors[EMBEDDING].load(), _target_tensor(target, "model.embed_tokens.weight").load()
    narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
    same = np.array_equal(ours.astype(narrow), theirs.astype(narrow))
    notes.append(
        f"{EMBEDDING} is the target's own; left out" if same else f"{EMBEDDING} differs from the target's; kept"
    )
    return config if same else dataclasses.replace(config, own_embedding=True)


def parse_changes(pairs: list[str]) -> dict[str, Any]:
    """`KEY=JSON` to a mapping; text that is no JSON is itself. InputError for a pair without =."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise InputError(expected="--set KEY=VALUE", found=pair, remedy="For example --set rope_theta=10000.")
        try:
            changes[key] = json.loads(text)
        except ValueError:
            changes[key] = text
    return changes
