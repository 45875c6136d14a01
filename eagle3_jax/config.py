"""Static descriptions of a target and a draft, and the strict reader of HuggingFace configs.

Everything that a jitted function may branch on lives here, in frozen hashable dataclasses. The readers take the
JSON of a `config.json`, in the keys of transformers 4 and 5, and either understand it or refuse it by name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from eagle3_jax.errors import InputError
from eagle3_jax.rope import RopeConfig

logger = logging.getLogger(__name__)

# The families that a target may be of, by `model_type`: the name of the class in transformers.
TARGET_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",  # LLaMA 1 to 3.3, Vicuna, DeepSeek-R1-Distill-Llama, SmolLM2
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen
    "qwen3": "Qwen3ForCausalLM",  # dense ones
}

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
class TargetConfig:
    """Shape and constants of a LLaMA-family target. Letters of the dimensions are those of docs/how-it-works.md.

    Attributes:
      attention_bias: q, k and v have biases.
      output_bias: so has the attention's output.
      mlp_bias: so have the three feed-forward maps.
      qk_norm: an RMSNorm over each head's queries and keys, before they are rotated (Qwen3).
      sliding_window: tokens that each one may read back, itself included (Mistral); None for all. Sequences end there:
        up to that length it has no effect, and beyond it nothing here applies it.
      model_type: a key of TARGET_MODEL_TYPES.
    """

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
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    model_type: str = "llama"

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
        """Longest sequence served, in tokens.

        Dynamic NTK beyond its original length would re-rotate old keys, and a sliding window would begin to bind.
        """
        limits = [self.max_position_embeddings, self.sliding_window]
        if self.rope.kind == "dynamic":
            limits.append(self.rope.original_max_positions)
        return min(limit for limit in limits if limit is not None)

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str = "config.json") -> TargetConfig:
        """Normalise the HuggingFace config of a family in TARGET_MODEL_TYPES.

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
        family = config["model_type"]
        bias = family == "qwen2" or bool(config.get("attention_bias", False))
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
            attention_bias=bias,
            output_bias=bias and family != "qwen2",
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            sliding_window=int(config["sliding_window"])
            if family == "mistral" and config.get("sliding_window")
            else None,
            model_type=family,
        )
        read = {field.name for field in dataclasses.fields(TargetConfig)} | {
            "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_theta", "rope_scaling",
            "rope_parameters", "model_type", "hidden_act", "eos_token_id", "sliding_window", "rope_interleaved",
            "quantization_config", "partial_rotary_factor", "original_max_position_embeddings", "layer_types",
            "use_sliding_window", "max_window_layers",
        }  # fmt: skip
        unread = sorted(set(config) - read - _TARGET_KEYS_WITHOUT_EFFECT)
        if unread:
            logger.warning("%s: keys that this reader does not know have no effect: %s", where, ", ".join(unread))
        _check_heads(result, where)
        return result

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of a HuggingFace config (transformers-4 names, read by transformers 5 too)."""
        own: dict[str, dict[str, Any]] = {
            "llama": {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias},
            "mistral": {"sliding_window": self.sliding_window},
            "qwen2": {"use_sliding_window": False},
            "qwen3": {"attention_bias": self.attention_bias, "use_sliding_window": False},
        }
        return {
            "architectures": [TARGET_MODEL_TYPES[self.model_type]],
            "model_type": self.model_type,
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
            "hidden_act": "silu",
            **own[self.model_type],
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
      norm_before_fc: one RMSNorm over all taps together before fusion (speculators, vLLM); not with `fc_norm`.
      norm_output: feed back the normed output instead of the raw one (EAGLE-3.1).
      norm_before_residual: the residual stream starts from the normed feature (speculators, vLLM).
      target_fingerprint: identifies the target's weights; see `checkpoint.fingerprint`.
      own_embedding: the draft's token embedding is not the target's, though as wide.
      sliding_window: slots that each one may read back (speculators); nothing here applies it, so drafting ends there.
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
    norm_before_fc: bool = False
    own_embedding: bool = False
    sliding_window: int | None = None

    @property
    def reach(self) -> int:
        """Positions that can be drafted; beyond them tokens are decoded one by one."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @property
    def brings_embedding(self) -> bool:
        """The draft's folder holds its token embedding, since the target's is another one or of another width."""
        return self.own_embedding or self.hidden_size != self.target_hidden_size

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
            norm_before_fc=bool(config.get("norm_before_fc", False)),
            own_embedding=bool(config.get("own_embedding", False)),
            sliding_window=int(config["sliding_window"]) if config.get("sliding_window") else None,
        )
        _check_heads(result, where)
        if result.fc_norm and result.norm_before_fc:
            raise InputError(
                expected=f"one of fc_norm and norm_before_fc in {where}: both norm the taps before they are fused",
                found="both",
                remedy="Keep the one whose weights the folder holds: fc_norm.0.weight or input_norm.weight.",
            )
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
        # Rare ones are left out when they say nothing: engines warn of keys, or stop at them.
        rare = ("norm_before_fc", "own_embedding", "sliding_window")
        result |= {key: getattr(self, key) for key in rare if getattr(self, key)}
        # SGLang and the official loader take the mere presence of this key to mean another width.
        if self.target_hidden_size != self.hidden_size:
            result["target_hidden_size"] = self.target_hidden_size
        return result


_DRAFT_KEYS = frozenset(
    """
    architectures model_type num_hidden_layers vocab_size draft_vocab_size hidden_size target_hidden_size
    intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps
    max_position_embeddings tie_word_embeddings attention_bias rope_theta rope_scaling rope_parameters fc_norm
    norm_output norm_before_residual norm_before_fc own_embedding sliding_window taps trained_length
    target_fingerprint torch_dtype dtype bos_token_id eos_token_id pad_token_id transformers_version
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
    layers = config.get("layer_types")
    if layers and set(layers) != {"full_attention"}:
        raise InputError(
            expected=f"layer_types in {where} to be full_attention throughout",
            found=", ".join(sorted(set(map(str, layers)))),
            remedy="Layers of several kinds are not supported.",
        )
    # Mistral's window bounds the length of sequences. Qwen's keys name one that is off unless use_sliding_window.
    windows = () if model_type in ("mistral", "qwen2", "qwen3") else (("sliding_window", (None,)),)
    for key, harmless in (
        ("hidden_act", (None, "silu")),
        ("use_sliding_window", (None, False)),
        ("rope_interleaved", (None, False)),
        *windows,
    ):
        if config.get(key) not in harmless:
            raise InputError(
                expected=f"{key} {' or '.join(map(repr, harmless))} in {where}",
                found=repr(config[key]),
                remedy=f"This variant of {model_type} is not supported.",
            )
