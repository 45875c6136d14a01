"""Writes a draft in the form of the engine that is to load it, or refuses what that form cannot say.

The weights stay as they are, bit for bit, unless another type is asked for. What a foreign config has no word for is
kept under the key `eagle3_jax`, so that the way back is exact; the engines pass over it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from convert.draft_dialects import IDS, RECORD
from convert.draft_reader import EMBEDDING, DraftSource
from convert.engines import ENGINES, features, obstacle
from convert.llama_folder import cast
from eagle3_jax.checkpoint import read_target_config
from eagle3_jax.config import TARGET_MODEL_TYPES, DraftConfig, TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.files import SINGLE_FILE, check_destination, new_folder, open_tensors
from eagle3_jax.vocab import vocab_offsets

# Each form, and the engines (by the beginning of their names) of which at least one must load it.
FORMS = {"canonical": "eagle3-jax", "sglang": "SGLang", "vllm": "vLLM", "official": "official EAGLE"}
PROPOSED = 5  # tokens a pass in a config of speculators, which an engine's own setting replaces


def check_form(config: DraftConfig, form: str, target: TargetConfig | None) -> list[str]:
    """Notes on the engines that will not load this form of the draft.

    Raises:
      InputError: none of those that the form is for would.
    """
    default = None if target is None else target.default_taps if target.num_layers > 6 else ()
    found = features(config, default, None if target is None else target.num_layers)
    reasons = {engine.name: obstacle(engine, form, found) for engine in ENGINES}
    meant = [name for name in reasons if name.startswith(FORMS[form])]
    if all(reasons[name] for name in meant):
        raise InputError(
            expected=f"a draft that {FORMS[form]} computes as it was trained",
            found=f"{meant[-1]} {reasons[meant[-1]]}",
            remedy="Keep it as a canonical folder, or train a draft without that.",
        )
    return [f"{name} {reasons[name]}" for name in meant if reasons[name]]


def write_draft(
    source: DraftSource,
    destination: Path,
    form: str,
    *,
    target: Path | None = None,
    verifier: str | None = None,
    dtype: str | None = None,
    force: bool = False,
) -> list[str]:
    """Write a draft; return notes for the user.

    Args:
      source: the draft.
      destination: the folder to make.
      form: a key of FORMS.
      target: the target's folder; every form but "canonical" needs it, to know whether taps are the default ones.
      verifier: the target's name in a config of speculators; its folder by default.
      dtype: of the weights, a key of DTYPES; as they are by default.
      force: replace an existing model folder.

    Raises:
      InputError: the form cannot say what the draft is; the destination may not be written; a weight is not finite.
    """
    check_destination(destination, None, force=force)
    if target is None and form != "canonical":
        raise InputError(
            expected=f"--target with --to {form}: an engine takes its own default taps where the config names none",
            found="no target",
            remedy="Pass the folder of the model that the draft was made for; its config.json and embedding are read.",
        )
    shape = None if target is None else read_target_config(target)
    notes = check_form(source.config, form, shape)
    if shape is not None and source.config.max_position_embeddings < shape.max_position_embeddings and form == "vllm":
        notes.append(
            f"the draft was made for {source.config.max_position_embeddings} positions: let vLLM serve no longer "
            "sequences (--max-model-len), since it reads beyond its rotary table there"
        )
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in source.tensors.items():
        array = tensor.load()
        tensors[name] = cast(array, dtype or array.dtype.name, name)  # refuses what is not finite
    kinds = {array.dtype.name for array in tensors.values()}
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    config = source.config
    if form == "canonical":
        content = config.to_hf()
    elif form == "vllm":
        assert target is not None
        assert shape is not None
        content = _speculators(config, shape, verifier or str(target))
        if EMBEDDING not in tensors:
            tensors[EMBEDDING] = open_tensors(target)["model.embed_tokens.weight"]["model.embed_tokens.weight"]
            tensors[EMBEDDING] = cast(tensors[EMBEDDING], kind, EMBEDDING)
        tensors = {_layered(name): array for name, array in tensors.items()}
    else:
        assert shape is not None
        content = _flat(config, form, shape)
    if config.draft_vocab_size != config.vocab_size or form != "vllm":
        tensors["d2t"] = vocab_offsets(source.vocab)
        tensors["t2d"] = np.asarray(source.vocab.t2d)
    content["torch_dtype"] = kind
    with new_folder(destination, force=force) as part:
        (part / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, part / SINGLE_FILE, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; a folder is for passing on.
        (part / SINGLE_FILE).chmod((part / "config.json").stat().st_mode)
    return notes


def _layered(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1)


def _record(config: DraftConfig) -> dict[str, Any]:
    return {
        "taps": list(config.taps),
        "trained_length": config.trained_length,
        "target_fingerprint": config.target_fingerprint,
    }


def _flat(config: DraftConfig, form: str, target: TargetConfig) -> dict[str, Any]:
    """The config of SGLang or of the official code: one level, taps only where they are not the default."""
    content = {key: value for key, value in config.to_hf().items() if key not in ("taps", *_record(config))}
    for flag in ("fc_norm", "norm_output", "norm_before_residual"):
        if not content[flag]:
            del content[flag]
    if form == "official":
        content["architectures"] = ["LlamaForCausalLM"]
        if content["rope_scaling"] is None:
            del content["rope_scaling"]
        else:  # the official code reads exactly two keys
            content["rope_scaling"] = {"type": config.rope.kind, "factor": config.rope.factor}
    elif config.taps and (target.num_layers <= 6 or config.taps != target.default_taps):
        # SpecForge's convention: the layers whose outputs are read.
        ids = [tap - 1 for tap in config.taps]
        content["eagle_config"] = {IDS: ids, "use_aux_hidden_state": True}
        content["num_aux_hidden_states"] = len(ids)
    return content | {RECORD: _record(config)}


def _speculators(config: DraftConfig, target: TargetConfig, verifier: str) -> dict[str, Any]:
    """The config of speculators 0.9, which vLLM reads: the layer's own config nested, taps as inputs of layers."""
    layer = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **config.rope.to_hf(),
    }
    if config.sliding_window:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": config.sliding_window,
                  "use_sliding_window": True}  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        IDS: list(config.taps) or list(target.default_taps),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": PROPOSED}],
            "verifier": {"name_or_path": verifier, "architectures": [TARGET_MODEL_TYPES[target.model_type]]},
        },
        RECORD: _record(config),
    }
