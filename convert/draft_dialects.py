"""The forms in which EAGLE-3 drafts are published: how to tell them apart, and what each of them means by its keys.

They hold the same tensors under three prefixes, and disagree on what a tap's number counts, on what `norm_output`
means, and on where a key stands. Sources: the writers' own code, named beside each dialect.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_jax.errors import InputError

IDS = "eagle_aux_hidden_state_layer_ids"
RECORD = "eagle3_jax"  # the key under which our own writers keep what a foreign config has no word for
# Flags that writers put at the top of the config or inside `eagle_config`.
FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


@dataclass(frozen=True)
class Dialect:
    """A form of draft folder.

    Attributes:
      writer: who writes it.
      taps: what a tap's number counts: "input" of a layer, "output" of a layer, or "fixed": always the default three.
    """

    writer: str
    taps: str


DIALECTS = {
    "canonical": Dialect("this library", "input"),
    "official": Dialect("SafeAILab/EAGLE (traineagle3)", "fixed"),
    "specforge": Dialect("SpecForge", "output"),
    "sglang": Dialect("SGLang's form of SpecForge's export", "output"),
    "speculators": Dialect("speculators, vLLM's form", "input"),
    "automodel": Dialect("NeMo Automodel", "fixed"),
    "modelopt": Dialect("Model-Optimizer", "output"),
}
_LEGACY_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
# Copies of the target's tensors that speculators trains against; a draft does not use them.
VERIFIER_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")


def canonical_name(name: str) -> str:
    """The name of a tensor as the official code and our own folders write it."""
    name = name.removeprefix("model.")
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    stem = name.removesuffix(".weight")
    return f"{_LEGACY_NORMS[stem]}.weight" if stem in _LEGACY_NORMS else name


def recognise(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The dialect of a folder, from the keys of its config and the names of its tensors.

    Raises:
      InputError: the folder is no EAGLE-3 draft of one layer, by name where it is something else that is known.
    """
    _refuse_others(config, names)
    if "taps" in config:
        return "canonical"
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return "speculators"
    if any(name.startswith("model.") for name in names):
        return "automodel"
    if any(name.startswith("layers.0.") for name in names):
        # Automodel's serving tools strip the prefix; only Model-Optimizer leaves out t2d.
        return "modelopt" if "eagle_config" in config or "t2d" not in names else "automodel"
    if config.get("architectures") == ["LlamaForCausalLM"] and RECORD not in config:
        return "official"
    return "sglang"


def _refuse_others(config: Mapping[str, Any], names: Collection[str]) -> None:
    def refuse(found: str, remedy: str) -> None:
        raise InputError(expected="an EAGLE-3 draft of one layer", found=found, remedy=remedy)

    plain = {name.removeprefix("model.") for name in names}
    if config.get("speculators_model_type", "eagle3") != "eagle3":
        refuse(f"speculators_model_type {config['speculators_model_type']!r}", "Only eagle3 is supported.")
    if "mask_hidden" in plain:
        refuse(
            "mask_hidden: a draft for parallel drafting (P-EAGLE)", "Only drafts that predict step by step are read."
        )
    if "fc.weight" not in plain and any("self_attn" in name for name in plain):
        refuse("no fc.weight: a target model", "Targets are converted by `python -m convert.target`.")
    layers = {int(found[1]) for name in plain if (found := re.match(r"layers\.(\d+)\.", name))}
    if "fc.weight" in plain and not any(name.endswith("hidden_norm.weight") for name in plain):
        refuse(
            "fc.weight, but no hidden_norm: an EAGLE-1 or EAGLE-2 draft, whose layer reads one fused state",
            "Train an EAGLE-3 draft for this target, or decode with the official code.",
        )
    if layers and layers != {0}:
        refuse(
            f"{len(layers)} layers (layers.{max(layers)} in its tensors)",
            "Drafts of several layers are not supported; no flag makes one of them right.",
        )
    if any("kv_a_proj" in name for name in plain):
        refuse("latent attention (kv_a_proj): a draft of the DeepSeek-V2 kind", "Only LLaMA's attention is supported.")
    if any("q_norm" in name or "k_norm" in name for name in plain):
        refuse("self_attn.q_norm: a draft layer of the Qwen3 kind", "Train the draft with a LLaMA layer.")
    if biases := sorted(name for name in plain if name.endswith(".bias")):
        refuse(f"{biases[0]}: a draft layer with biases", "The layer of EAGLE-3 has none; they cannot be left out.")


def flatten(config: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """The config with the keys of one plain level: what stands in `transformer_layer_config` or `eagle_config` lifted.

    Raises:
      InputError: the two levels disagree, or a setting that changes the computation in a way that is not supported.
    """
    flat = dict(config)
    if dialect == "speculators":
        layer = dict(flat.pop("transformer_layer_config", None) or {})
        kinds = set(layer.pop("layer_types", None) or ["full_attention"])
        window = layer.pop("sliding_window", None)
        top = {key: value for key, value in flat.items() if value is not None and key not in layer}
        flat = layer | top | {"tie_word_embeddings": False}
        flat["sliding_window"] = window if kinds == {"sliding_attention"} else None
        return flat
    nested = dict(flat.pop("eagle_config", None) or {})
    for key, only in (
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
        ("use_aux_hidden_state", True),
        ("parallel_draft_step", 1),
        ("parallel_draft_heads_num_layers", 0),
    ):
        if nested.get(key) not in (None, only):
            raise InputError(
                expected=f"eagle_config.{key} {only!r}",
                found=repr(nested[key]),
                remedy="This variant of the draft's layer is not supported.",
            )
    for level in (flat, nested):
        if "use_aux_norm" in level:  # SGLang's older name
            level.setdefault("fc_norm", level.pop("use_aux_norm"))
    for key in (*FLAGS, IDS):
        if nested.get(key) is not None:
            if flat.get(key) not in (None, nested[key]):
                raise InputError(
                    expected=f"one {key} in the draft's config",
                    found=f"{flat[key]!r} at the top and {nested[key]!r} in eagle_config",
                    remedy="Keep the right one and delete the other.",
                )
            flat[key] = nested[key]
    return flat


def feedback_is_normed(flat: Mapping[str, Any], dialect: str, *, recognised: bool) -> bool:
    """Whether the vector fed back is the normed one, which writers mean by `norm_output`, but SpecForge does not.

    Raises:
      InputError: the key is there and the folder may be SpecForge's or SGLang's, which give it two meanings; or
        SpecForge's false, which leaves out the last norm.
    """
    if dialect == "specforge":
        if flat.get("norm_output", True) is not True:
            raise InputError(
                expected="norm_output true in a config of SpecForge",
                found="false: no norm before the head, which nothing here computes",
                remedy="Train the draft again with the norm.",
            )
        return False
    if dialect == "sglang" and recognised and "norm_output" in flat and RECORD not in flat:
        raise InputError(
            expected="to know who wrote norm_output: SGLang feeds the normed state back, SpecForge's trainer did not",
            found=f"norm_output {flat['norm_output']!r} in a config that either may have written",
            remedy="Pass --dialect specforge if SpecForge made it before its pull request 879, or --dialect sglang.",
        )
    return bool(flat.get("norm_output", False))


def boundaries(flat: Mapping[str, Any], dialect: str, layers: int | None) -> tuple[tuple[int, ...], str]:
    """The taps as the states entering layers, and how they were found; () where the writer's default applies.

    Args:
      flat: the flattened config.
      dialect: a key of DIALECTS.
      layers: of the target; None when it is not known.
    """
    record = flat.get(RECORD) or {}
    if record.get("taps"):
        return tuple(record["taps"]), f"recorded in {RECORD}.taps"
    if dialect == "canonical":
        return tuple(flat.get("taps") or ()), "in taps"
    ids = flat.get(IDS)
    counting = DIALECTS[dialect].taps
    if not ids or counting == "fixed":
        return (), f"the default of {DIALECTS[dialect].writer}: inputs of layers 2, L//2 and L-3"
    ids = tuple(int(one) for one in ids)
    if counting == "output" and layers is not None and max(ids) >= layers:
        return ids, f"{IDS} {list(ids)}, taken for inputs: {max(ids)} is no layer's output"
    if counting == "output":
        return tuple(one + 1 for one in ids), f"{IDS} {list(ids)}, outputs of layers"
    return ids, f"{IDS} {list(ids)}, inputs of layers"
