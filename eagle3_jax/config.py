"""Static descriptions of a target and a draft, and the strict reader of HuggingFace configs.

Everything that a jitted function may branch on lives here, in frozen hashable dataclasses. The readers take the
JSON of a `config.json`, in the keys of transformers 4 and 5, and either understand it or refuse it by name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from eagle3_jax.errors import InputError

logger = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
TARGET_MODEL_TYPES = ("llama",)
DEFAULT_ROPE_THETA = 10000.0

# Keys of a HuggingFace LLaMA config that change nothing in the forward pass: bookkeeping, training-time settings,
# and settings of transformers' own generation or parallelism.
_TARGET_KEYS_WITHOUT_EFFECT = frozenset(
    """
    architectures attention_dropout bos_token_id pad_token_id torch_dtype dtype use_cache initializer_range
    transformers_version pretraining_tp _name_or_path _attn_implementation transformers.js_config is_llama_config
    chunk_size_feed_forward output_attentions output_hidden_states return_dict id2label label2id problem_type
    is_encoder_decoder is_decoder add_cross_attention unsloth_version unsloth_fixed model_max_length torchscript
    use_bfloat16 tokenizer_class task_specific_params
    """.split()
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling rule, named as transformers names them.

    `original_max_positions` is the length the model was trained on before scaling (llama3, yarn, dynamic).
    Fields of a rule that `kind` does not use stay None.
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

        Raises:
          InputError: unknown type, unknown key, missing key, or the two places disagreeing.
        """
        nested, place = _rope_rule(config, where)
        thetas = {float(value) for value in (nested.pop("rope_theta", None), config.get("rope_theta")) if value}
        if len(thetas) > 1:
            _refuse_two(f"rotary base (rope_theta) in {where}", " and ".join(map(str, sorted(thetas))))
        if not thetas:
            logger.warning("%s has no rope_theta; the default %g is used", where, DEFAULT_ROPE_THETA)
        theta = thetas.pop() if thetas else DEFAULT_ROPE_THETA
        kind = nested.pop("rope_type")
        if kind not in ROPE_TYPES:
            raise InputError(
                expected=f"{place}.rope_type in {where} to be one of {', '.join(ROPE_TYPES)}",
                found=repr(kind),
                remedy="This rotary embedding is not implemented; use a checkpoint with one of the supported types.",
            )
        max_positions = config.get("max_position_embeddings")
        fields: dict[str, Any] = {"theta": theta, "kind": kind}

        def take(key: str, default: Any = None, required: bool = False) -> Any:
            value = nested.pop(key, None)
            if value is None and required:
                raise InputError(
                    expected=f"{place}.{key} in {where} (rope type {kind})",
                    found="no such key",
                    remedy="Add the value the model was trained with.",
                )
            return default if value is None else value

        if kind != "default":
            fields["factor"] = float(take("factor", required=True))
        if kind in ("llama3", "yarn", "dynamic"):
            original = take("original_max_position_embeddings", max_positions, required=kind == "llama3")
            fields["original_max_positions"] = None if original is None else int(original)
        if kind == "llama3":
            fields["low_freq_factor"] = float(take("low_freq_factor", required=True))
            fields["high_freq_factor"] = float(take("high_freq_factor", required=True))
        if kind == "yarn":
            for key in ("attention_factor", "mscale", "mscale_all_dim"):
                value = take(key)
                fields[key] = None if value is None else float(value)
            fields["beta_fast"] = float(take("beta_fast", 32.0))
            fields["beta_slow"] = float(take("beta_slow", 1.0))
            fields["truncate"] = bool(take("truncate", True))
        # Values left over must be harmless, or the rule would be applied differently from how it was written.
        nested.pop("original_max_position_embeddings", None)
        partial = nested.pop("partial_rotary_factor", None)
        if nested or partial not in (None, 1, 1.0):
            left = sorted(nested) + ([] if partial in (None, 1, 1.0) else ["partial_rotary_factor"])
            raise InputError(
                expected=f"only the keys of rope type {kind} in {where}'s {place}",
                found=f"also {', '.join(left)}",
                remedy="Remove them if they are meant to have no effect; otherwise this variant is not supported.",
            )
        return RopeConfig(**fields)

    def to_hf(self) -> dict[str, Any]:
        """Return `rope_theta` and `rope_scaling` (None if unscaled) in transformers-4 form, as every engine reads."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.original_max_positions is not None:
            scaling["original_max_position_embeddings"] = self.original_max_positions
        names: dict[str, tuple[str, ...]] = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        }
        for name in names.get(self.kind, ()):
            if getattr(self, name) is not None:
                scaling[name] = getattr(self, name)
        return {"rope_theta": self.theta, "rope_scaling": scaling}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape and constants of a LLaMA-family target. Letters of the dimensions are those of docs/how-it-works.md."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def default_taps(self) -> tuple[int, ...]:
        """Boundaries IN(2), IN(L//2), IN(L-3) of the paper's code (the states *entering* those layers)."""
        taps = (2, self.num_layers // 2, self.num_layers - 3)
        if not (0 < taps[0] < taps[1] < taps[2]):
            raise InputError(
                expected="a target with at least 7 layers for the default taps (2, L//2, L-3)",
                found=f"{self.num_layers} layers, which gives {taps}",
                remedy="Name the boundaries yourself: taps=(low, middle, high), ascending, from 0 to the layer count.",
            )
        return taps

    @property
    def context_limit(self) -> int:
        """Longest sequence served, in tokens. Dynamic NTK beyond its original length would re-rotate old keys."""
        if self.rope.kind == "dynamic" and self.rope.original_max_positions is not None:
            return min(self.max_position_embeddings, self.rope.original_max_positions)
        return self.max_position_embeddings

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str = "config.json") -> TargetConfig:
        """Normalise a HuggingFace LLaMA config.

        Args:
          config: parsed JSON.
          where: name of the file in error messages.

        Raises:
          InputError: an unsupported architecture, activation, quantisation or rotary type; a missing key; a draft.
        """
        _refuse_other_models(config, where)
        need = lambda key: _required(config, key, where)
        hidden, heads = int(need("hidden_size")), int(need("num_attention_heads"))
        head_dim = config.get("head_dim")
        result = TargetConfig(
            vocab_size=int(need("vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(need("intermediate_size")),
            num_layers=int(need("num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=hidden // heads if head_dim is None else int(head_dim),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope=RopeConfig.from_hf(config, where),
            max_position_embeddings=int(need("max_position_embeddings")),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
        read = {field.name for field in dataclasses.fields(TargetConfig)} | {
            "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_theta", "rope_scaling",
            "rope_parameters", "model_type", "hidden_act", "eos_token_id", "sliding_window", "rope_interleaved",
            "quantization_config", "partial_rotary_factor", "original_max_position_embeddings",
        }  # fmt: skip
        unread = sorted(set(config) - read - _TARGET_KEYS_WITHOUT_EFFECT)
        if unread:
            logger.warning("%s: keys that this reader does not know have no effect: %s", where, ", ".join(unread))
        _check_heads(result, where)
        return result

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of a HuggingFace LLaMA config (transformers-4 names, read by transformers 5 too)."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "hidden_act": "silu",
            **self.rope.to_hf(),
        }


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Shape and constants of an EAGLE-3 draft: one decoder layer, three (or other) taps, a reduced vocabulary.

    Attributes:
      vocab_size: V, the target's vocabulary.
      draft_vocab_size: C, rows of the draft's head.
      taps: boundaries IN(i) whose states are fused, ascending.
      trained_length: longest position the draft was trained on; None when not known.
      fc_norm: one RMSNorm on each tap before fusion (EAGLE-3.1).
      norm_output: feed back the normed output instead of the raw one (EAGLE-3.1).
      norm_before_residual: the residual stream starts from the normed feature (speculators, vLLM).
      target_fingerprint: identifies the target's weights; see `checkpoint.fingerprint`.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    taps: tuple[int, ...]
    trained_length: int | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    target_fingerprint: str | None = None

    @staticmethod
    def for_target(target: TargetConfig, *, draft_vocab_size: int, **changes: Any) -> DraftConfig:
        """A draft of the target's own layer shape; keyword arguments replace single fields."""
        fields: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            # The official draft is trained with base 10000 and no scaling whatever the target uses.
            "rope": RopeConfig(),
            "max_position_embeddings": target.max_position_embeddings,
        }
        if "taps" not in changes:
            fields["taps"] = target.default_taps
        return DraftConfig(**(fields | changes))

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str = "config.json") -> DraftConfig:
        """Read the config of a canonical draft folder, strictly.

        Raises:
          InputError: missing or unknown keys, more than one layer, or a config that is no draft's.
        """
        if "draft_vocab_size" not in config:
            raise InputError(
                expected=f"the config of an EAGLE-3 draft, with draft_vocab_size, in {where}",
                found=f"architectures {config.get('architectures')} without it",
                remedy="Pass the draft's folder here, and the target's as --target.",
            )
        unread = sorted(set(config) - _DRAFT_KEYS)
        if unread:
            raise InputError(
                expected=f"only keys of the canonical draft folder in {where}",
                found=f"also {', '.join(unread)}",
                remedy="Drafts of other layouts have to be rewritten as a canonical folder first.",
            )
        need = lambda key: _required(config, key, where)
        for key, only in (
            ("num_hidden_layers", 1),
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("tie_word_embeddings", False),
        ):
            if config.get(key, only) != only:
                raise InputError(
                    expected=f"{key} {only!r} in {where}: one SiLU decoder layer without biases, and a head of its own",
                    found=repr(config[key]),
                    remedy="Other kinds of draft are not supported.",
                )
        trained, fingerprint = config.get("trained_length"), config.get("target_fingerprint")
        hidden = int(need("hidden_size"))
        result = DraftConfig(
            vocab_size=int(need("vocab_size")),
            draft_vocab_size=int(need("draft_vocab_size")),
            hidden_size=hidden,
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            intermediate_size=int(need("intermediate_size")),
            num_heads=int(need("num_attention_heads")),
            num_kv_heads=int(need("num_key_value_heads")),
            head_dim=int(need("head_dim")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope=RopeConfig.from_hf(config, where),
            max_position_embeddings=int(need("max_position_embeddings")),
            taps=() if config.get("taps") is None else tuple(int(tap) for tap in config["taps"]),
            trained_length=None if trained is None else int(trained),
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            target_fingerprint=None if fingerprint is None else str(fingerprint),
        )
        _check_heads(result, where)
        return result

    def to_hf(self) -> dict[str, Any]:
        """Return the canonical `config.json`: the interchange profile that every engine reads, and our own keys."""
        result = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "attention_bias": False,
            **self.rope.to_hf(),
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_residual": self.norm_before_residual,
            "taps": list(self.taps),
            "trained_length": self.trained_length,
            "target_fingerprint": self.target_fingerprint,
        }
        # SGLang and the official loader take the mere presence of this key to mean another width.
        if self.target_hidden_size != self.hidden_size:
            result["target_hidden_size"] = self.target_hidden_size
        return result


_DRAFT_KEYS = frozenset(
    """
    architectures model_type num_hidden_layers vocab_size draft_vocab_size hidden_size target_hidden_size
    intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps
    max_position_embeddings tie_word_embeddings attention_bias rope_theta rope_scaling rope_parameters fc_norm
    norm_output norm_before_residual taps trained_length target_fingerprint torch_dtype dtype bos_token_id
    eos_token_id pad_token_id transformers_version
    """.split()
)


def _required(config: Mapping[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise InputError(
            expected=f"key {key!r} in {where}",
            found="no such key" if key not in config else "null",
            remedy="The folder is incomplete or of another kind; fetch its config.json again.",
        )
    return config[key]


def _check_heads(config: TargetConfig | DraftConfig, where: str) -> None:
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise InputError(
            expected="num_attention_heads divisible by num_key_value_heads, and an even head_dim",
            found=f"{config.num_heads}, {config.num_kv_heads} and {config.head_dim} in {where}",
            remedy="Check that the config belongs to the weights.",
        )


def _rope_rule(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The nested rotary settings, with their type under `rope_type`, and the key that holds them.

    Exporters mirror them in both places, under both names of the type; two that disagree are refused, since engines
    differ in which they follow. Two keys that transformers also looks for at the top are moved inside.
    """
    rules: dict[str, dict[str, Any]] = {}
    for place in ("rope_parameters", "rope_scaling"):
        rule = dict(config.get(place) or {})
        if rule:
            kinds = {kind for kind in (rule.pop("type", None), rule.pop("rope_type", None)) if kind is not None}
            if len(kinds) > 1:
                _refuse_two(f"rope type in {where}'s {place}", " and ".join(map(repr, sorted(map(str, kinds)))))
            rules[place] = rule | {"rope_type": kinds.pop() if kinds else "default"}
    if len(rules) == 2:
        new, old = ({key: value for key, value in rule.items() if value is not None} for rule in rules.values())
        if {"rope_theta": old.get("rope_theta"), **new} != {"rope_theta": new.get("rope_theta"), **old}:
            _refuse_two(f"rotary rule in {where}", f"rope_parameters {new} and rope_scaling {old}")
    place = next(iter(rules), "rope_scaling")
    rule = rules.get(place, {"rope_type": "default"})
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        outer, inner = config.get(key), rule.get(key)
        if None not in (outer, inner) and outer != inner:
            _refuse_two(f"{key} in {where}", f"{outer} at the top and {inner} in {place}")
        rule[key] = outer if inner is None else inner
    return rule, place


def _refuse_two(what: str, found: str) -> NoReturn:
    raise InputError(expected=f"one {what}", found=found, remedy="Keep the right one and delete the other.")


def _refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    if "draft_vocab_size" in config:
        raise InputError(
            expected=f"a target model's config in {where}",
            found="draft_vocab_size: this is an EAGLE-3 draft",
            remedy="Pass it as --draft, and the model it drafts for as --target.",
        )
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise InputError(
            expected="unquantised weights (fp32, fp16 or bf16)",
            found=f"quantization_config with quant_method {method!r} in {where}",
            remedy="Use the unquantised checkpoint, or a GGUF through `python -m convert.target`.",
        )
    model_type = config.get("model_type")
    if model_type not in TARGET_MODEL_TYPES:
        raise InputError(
            expected=f"model_type in {where} to be one of {', '.join(TARGET_MODEL_TYPES)}",
            found=repr(model_type),
            remedy="This architecture is not supported as a target.",
        )
    for key, harmless in (
        ("hidden_act", (None, "silu")),
        ("sliding_window", (None,)),
        ("rope_interleaved", (None, False)),
    ):
        if config.get(key) not in harmless:
            raise InputError(
                expected=f"{key} {' or '.join(map(repr, harmless))} in {where}",
                found=repr(config[key]),
                remedy="This variant of LLaMA is not supported.",
            )
