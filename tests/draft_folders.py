"""Draft folders as each foreign writer lays them out, made from the published description and not by our own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from safetensors.numpy import save_file

from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.params import is_spec

IDS = "eagle_aux_hidden_state_layer_ids"


def official_tensors(draft: Draft) -> dict[str, np.ndarray]:
    """The parameters under the official names, d2t as offsets and t2d."""
    specs = jax.tree.leaves(draft_specs(draft.config), is_leaf=is_spec)
    tensors = {
        spec.name: np.asarray(leaf).reshape(spec.file_shape)
        for spec, leaf in zip(specs, jax.tree.leaves(draft.params), strict=True)
    }
    ids = np.asarray(draft.vocab.d2t, np.int64)
    return tensors | {"d2t": ids - np.arange(ids.size), "t2d": np.asarray(draft.vocab.t2d)}


def layer_config(draft: Draft) -> dict[str, Any]:
    """The keys that all writers share."""
    config = draft.config
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "hidden_act": "silu", "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def rope_keys(draft: Draft) -> dict[str, Any]:
    return draft.config.rope.to_hf()


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, binary: bool = False) -> Path:
    """config.json and one weight file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(
            {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}, folder / "pytorch_model.bin"
        )
    else:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def official(folder: Path, draft: Draft, *, binary: bool = True, **changes: Any) -> Path:
    """SafeAILab/EAGLE: one .bin, no rope_theta, no head_dim, no taps; an embedding only at a width of its own."""
    config = layer_config(draft) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
        "tie_word_embeddings": False, "draft_vocab_size": draft.config.draft_vocab_size,
    }  # fmt: skip
    tensors = official_tensors(draft)
    if draft.config.hidden_size != draft.config.target_hidden_size:
        config["target_hidden_size"] = draft.config.target_hidden_size
        tensors["embed_tokens.weight"] = np.asarray(draft.embed)
    return write(folder, config | changes, tensors, binary=binary)


def specforge(folder: Path, draft: Draft, **changes: Any) -> Path:
    """SpecForge, and SGLang's form of it: midlayer names, taps as outputs of layers inside eagle_config."""
    config = layer_config(draft) | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "draft_vocab_size": draft.config.draft_vocab_size,
        "head_dim": draft.config.head_dim, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eagle_config": {IDS: [tap - 1 for tap in draft.config.taps], "use_aux_hidden_state": True},
        **rope_keys(draft),
    }  # fmt: skip
    if draft.config.rope.kind != "default":
        config["rope_parameters"] = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    if draft.config.fc_norm:
        config["fc_norm"] = True
    return write(folder, config | changes, official_tensors(draft))


def speculators(folder: Path, draft: Draft, **changes: Any) -> Path:
    """speculators: the layer's config nested, layers.0 names, the target's embedding, taps as inputs of layers."""
    own = draft.config
    layer = layer_config(draft) | {
        "model_type": "llama", "head_dim": own.head_dim, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": own.rope.theta},
        "pretraining_tp": 1, "attention_dropout": 0.0,
    }  # fmt: skip
    if own.rope.kind != "default":
        layer["rope_parameters"] = own.rope.to_hf()["rope_scaling"] | {"rope_theta": own.rope.theta}
    if own.sliding_window:
        layer |= {
            "layer_types": ["sliding_attention"],
            "sliding_window": own.sliding_window,
            "use_sliding_window": True,
        }
    config = {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "dtype": "float32",
        "draft_vocab_size": own.draft_vocab_size, IDS: list(own.taps), "embed_requires_grad": False,
        "fc_norm": own.fc_norm, "norm_before_fc": own.norm_before_fc, "norm_output": own.norm_output,
        "norm_before_residual": own.norm_before_residual, "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere"}},
    }  # fmt: skip
    tensors = {name.replace("midlayer.", "layers.0."): array for name, array in official_tensors(draft).items()}
    if own.draft_vocab_size == own.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return write(folder, config | changes, tensors | {"embed_tokens.weight": np.asarray(draft.embed)})


def automodel(folder: Path, draft: Draft, *, served: bool = False, layers: int = 8, **changes: Any) -> Path:
    """NeMo Automodel: all under model., num_hidden_layers and tied embeddings copied from the target, no taps."""
    config = layer_config(draft) | {
        "architectures": ["LlamaEagle3DraftModel"], "model_type": "llama", "num_hidden_layers": layers,
        "draft_vocab_size": draft.config.draft_vocab_size, "target_hidden_size": draft.config.target_hidden_size,
        "head_dim": draft.config.head_dim, "fc_norm": draft.config.fc_norm, "norm_output": draft.config.norm_output,
        "attn_implementation": "sdpa", "parallel_drafting": False, "tie_word_embeddings": True, **rope_keys(draft),
    }  # fmt: skip
    prefix = "" if served else "model."
    tensors = {}
    for name, array in official_tensors(draft).items():
        bare = name in ("lm_head.weight", "d2t", "t2d")
        tensors[name if bare else prefix + name.replace("midlayer.", "layers.0.")] = array
    return write(folder, config | changes, tensors | {f"{prefix}embed_tokens.weight": np.asarray(draft.embed)})


def modelopt(folder: Path, draft: Draft, **changes: Any) -> Path:
    """Model-Optimizer: layers.0 names, no t2d, taps as outputs of layers, a yarn rule that training did not use."""
    config = layer_config(draft) | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": draft.config.head_dim,
        "draft_vocab_size": draft.config.draft_vocab_size, "tie_word_embeddings": False, **rope_keys(draft),
        "eagle_config": {
            IDS: [tap - 1 for tap in draft.config.taps], "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True, "parallel_draft_step": 1,
        },
    }  # fmt: skip
    tensors = {name.replace("midlayer.", "layers.0."): array for name, array in official_tensors(draft).items()}
    del tensors["t2d"]
    return write(folder, config | changes, tensors)
