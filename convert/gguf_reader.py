"""GGUF files of LLaMA and Qwen models: metadata to a HuggingFace config, tensors to HuggingFace names.

The rows of q and k of a LLaMA are interleaved in GGUF (llama.cpp rotates neighbouring pairs); HuggingFace rotates the
two halves of a head. Reading undoes that. Qwen's are stored as they are. Everything is checked from the header; tensors
are made only when they are written.

Source: gguf-py/gguf/constants.py (`Keys.LLM`, `Keys.Rope`), llama.cpp's conversion of LLaMA (`permute`, `rope_freqs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.gguf_tokenizer import PREFIX, build_tokenizer, tokenizer_files
from convert.llama_folder import LlamaSource, SourceTensor, licence_files, tensor_shapes
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import InputError

try:
    import gguf
except ImportError:  # The reader is an extra; everything else in convert/ works without it.
    gguf = None

# Mistral models are written as "llama".
SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
USE_CHECKPOINT = "Convert from the model's HuggingFace checkpoint instead."
# Keys under the architecture that are read, or that do not change what the model computes.
READ_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a HuggingFace LLaMA tensor."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{index}.{LAYER_NAMES[module]}.{kind}"


def half_split_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] from llama.cpp's interleaved order to HuggingFace's two halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata (plain values by key) and tensors (gguf's `ReaderTensor` by name, memory-mapped) of a GGUF file.

    Raises:
      InputError: not GGUF, cut short, one part of a split file, other byte order, or the gguf package is missing.
    """
    if gguf is None:
        raise InputError(
            expected="the gguf package, to read a GGUF file",
            found="no such package",
            remedy="Install it: pip install -e '.[convert]'.",
        )
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise InputError(
            expected=f"a whole GGUF file (version 2 or 3) at {path}",
            found=f"one that cannot be read: it is cut short, damaged or of another kind ({error})",
            remedy="Fetch the file again and compare its checksum.",
        ) from error
    if reader.byte_order != "I":
        raise InputError(
            expected="a little-endian GGUF file",
            found=f"{path}, which is big-endian",
            remedy="Use the little-endian file.",
        )
    if metadata.get("split.count", 1) > 1:
        raise InputError(
            expected="a GGUF file that holds the whole model",
            found=f"part of a file split into {metadata['split.count']}",
            remedy="Join the parts with llama.cpp's `llama-gguf-split --merge`.",
        )
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _key(metadata: Mapping[str, Any], key: str) -> str:
    return f"{metadata['general.architecture']}.{key}"


def _number(metadata: Mapping[str, Any], key: str, default: int | None = None) -> Any:
    """A number of the architecture, required without a default; a list (one value a layer) must agree with itself."""
    name = _key(metadata, key)
    value = metadata.get(name, default)
    if value is None:
        raise InputError(
            expected=f"the key {name} in the GGUF file", found="none", remedy="Fetch a complete GGUF file."
        )
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise InputError(
                expected=f"one {name} for all layers", found=f"different ones: {value}", remedy=USE_CHECKPOINT
            )
        value = value[0]
    return value


def _head_dim(metadata: Mapping[str, Any], width: int, heads: int) -> int:
    """Width of a head: `attention.key_length`, else hidden size over heads; values and RoPE must use all of it."""
    head_dim = metadata.get(_key(metadata, "attention.key_length"))
    if head_dim is None:
        if width % heads:
            raise InputError(
                expected=f"{_key(metadata, 'embedding_length')} that is a multiple of attention.head_count",
                found=f"{width} and {heads}, and no attention.key_length",
                remedy=USE_CHECKPOINT,
            )
        head_dim = width // heads
    for key in (_key(metadata, "attention.value_length"), _key(metadata, "rope.dimension_count")):
        if metadata.get(key, head_dim) != head_dim:
            raise InputError(
                expected=f"{key} equal to the head width {head_dim}", found=str(metadata[key]), remedy=USE_CHECKPOINT
            )
    return head_dim


def llama3_divisors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """What llama3 RoPE scaling divides each of head_dim / 2 frequencies by (the content of `rope_freqs.weight`).

    Source: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope_scaling(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` in HuggingFace's words, from the keys or from the tensor `rope_freqs.weight`."""
    # As in llama.cpp, a factor without a type means linear.
    unnamed = "linear" if _key(metadata, "rope.scaling.factor") in metadata else "none"
    kind = metadata.get(_key(metadata, "rope.scaling.type"), unnamed)
    freqs = tensors.get("rope_freqs.weight")
    if kind not in ("none", "linear") or (kind == "linear" and freqs is not None):
        raise InputError(
            expected=f"{_key(metadata, 'rope.scaling.type')} none or linear, or llama3 scaling in rope_freqs.weight",
            found=f"{kind}{'' if freqs is None else ' and rope_freqs.weight together'}",
            remedy=USE_CHECKPOINT,
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(_number(metadata, "rope.scaling.factor"))}
    if freqs is None:
        return None
    divisors = np.asarray(freqs.data, dtype=np.float64).reshape(-1)
    # GGUF keeps the result and not the four numbers behind it. Three of them have never varied; the fourth is the
    # largest divisor. The guess is accepted only when it gives every stored value back.
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if divisors.size * 2 != head_dim or not np.allclose(llama3_divisors(scaling, theta, head_dim), divisors, rtol=1e-4):
        raise InputError(
            expected="rope_freqs.weight made by llama3 scaling (low 1, high 4, original length 8192)",
            found=f"{divisors.size} other values, the largest {divisors.max():.6g}",
            remedy=USE_CHECKPOINT,
        )
    return scaling


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[TargetConfig, list[str]]:
    """The config that the metadata describe, and notes for the user.

    Raises:
      InputError: another architecture, or a key that changes the computation in a way that is not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise InputError(
            expected=f"a GGUF file of a supported architecture: {', '.join(SUPPORTED_ARCHITECTURES)}",
            found=f"general.architecture = {architecture!r}",
            remedy="Use a model of one of these families as target.",
        )
    own = f"{architecture}."
    unknown = sorted(k for k in metadata if k.startswith(own) and k.removeprefix(own) not in READ_KEYS)
    if unknown:
        raise InputError(
            expected=f"a dense {architecture} model, described by the keys that this converter knows",
            found=", ".join(f"{key} = {metadata[key]}" for key in unknown),
            remedy=USE_CHECKPOINT,
        )
    notes: list[str] = []
    width, heads = _number(metadata, "embedding_length"), _number(metadata, "attention.head_count")
    head_dim = _head_dim(metadata, width, heads)
    if _key(metadata, "attention.head_count_kv") not in metadata:
        notes.append(f"no {own}attention.head_count_kv in the file: as many key/value heads as query heads")
    theta = metadata.get(_key(metadata, "rope.freq_base"))
    if theta is None:
        theta = 10000.0
        notes.append(f"no {own}rope.freq_base in the file: RoPE base 10000, the default of GGUF")
    biases = {name for name in ("attn_q", "attn_output", "ffn_gate") if f"blk.0.{name}.bias" in tensors}
    if architecture == "llama" and ("attn_q" in biases) != ("attn_output" in biases):
        raise InputError(
            expected="biases of attention on q, k, v and the output together, as a LLaMA has them",
            found=f"blk.0.{(biases & {'attn_q', 'attn_output'}).pop()}.bias alone",
            remedy=USE_CHECKPOINT,
        )
    config = {
        "model_type": architecture,
        "vocab_size": tensor_shape(tensors, "token_embd.weight")[0],
        "hidden_size": width,
        "intermediate_size": _number(metadata, "feed_forward_length"),
        "num_hidden_layers": _number(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": _number(metadata, "context_length"),
        # The file holds 32-bit floats: 1e-5 comes back as 9.99999974e-06 unless rounded to the digits they hold.
        "rms_norm_eps": float(f"{_number(metadata, 'attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(f"{theta:.7g}"),
        "rope_scaling": _rope_scaling(metadata, tensors, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture != "qwen2" and "attn_q" in biases,
        "mlp_bias": architecture == "llama" and "ffn_gate" in biases,
    }
    return TargetConfig.from_hf(config, "the GGUF file's metadata"), notes


def read_token_ids(metadata: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, int | None], list[int]]:
    """bos, eos and pad ids as config.json names them, and all ids that end a turn; eos must be there.

    Raises:
      InputError: no eos id, or an id outside the vocabulary.
    """
    ids: dict[str, int] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot"), ("eom", "eom")):
        value = metadata.get(f"{PREFIX}{key}_token_id")
        if value is None:
            continue
        if not 0 <= value < vocab_size:
            raise InputError(
                expected=f"{PREFIX}{key}_token_id below {vocab_size}, the rows of token_embd.weight",
                found=str(value),
                remedy="Fetch the file again; its metadata contradict its tensors.",
            )
        ids[name] = int(value)
    if "eos" not in ids:
        raise InputError(expected=f"the key {PREFIX}eos_token_id in the GGUF file", found="none", remedy=USE_CHECKPOINT)
    stops = sorted({ids[name] for name in ("eos", "eot", "eom") if name in ids})
    return {f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")}, stops


def tensor_shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Shape of a tensor in numpy's order (GGUF lists the fastest axis first); InputError when there is none."""
    if name not in tensors:
        raise InputError(
            expected=f"the tensor {name} in the GGUF file", found="none", remedy="Fetch a complete GGUF file."
        )
    return tuple(int(size) for size in reversed(tensors[name].shape))


def dequantise(tensor: Any) -> np.ndarray:
    """A GGUF tensor as float32 (float16 stays float16) in its logical shape; InputError for an unsupported type."""
    assert gguf is not None
    if tensor.tensor_type == gguf.GGMLQuantizationType.F16:
        return tensor.data
    try:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise InputError(
            expected="tensors of a type that the gguf package can dequantise",
            found=f"{tensor.name} of type {tensor.tensor_type.name}",
            remedy="Use a file of another quantisation, such as Q8_0, Q4_0 or F16.",
        ) from error


def read_tensors(config: TargetConfig, tensors: Mapping[str, Any]) -> tuple[SourceTensor, ...]:
    """Every tensor of the HuggingFace model, matched to the file's; all of the file's must have a place.

    Raises:
      InputError: a tensor is missing, has another shape or an unsupported type, or is not part of a LLaMA model.
    """
    assert gguf is not None
    shapes = tensor_shapes(config)
    llama = config.model_type == "llama"
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if llama else {}
    for name, shape in shapes.items():
        found = tensor_shape(tensors, gguf_name(name))
        if found != shape:
            raise InputError(
                expected=f"{gguf_name(name)} of shape {shape}",
                found=f"{found}",
                remedy="Fetch the file again; its header contradicts its tensors.",
            )
    spare = sorted(set(tensors) - {gguf_name(name) for name in shapes} - {"rope_freqs.weight"})
    if spare:
        raise InputError(
            expected=f"the tensors of a dense {config.model_type} model",
            found=f"{len(spare)} others, such as {', '.join(spare[:3])}",
            remedy=USE_CHECKPOINT,
        )
    # One row of each type tells whether it can be read at all, before hours of writing.
    for tensor in {t.tensor_type: t for t in tensors.values()}.values():
        dequantise(tensor._replace(data=tensor.data[:1]))

    def plan(name: str, shape: tuple[int, ...]) -> SourceTensor:
        module = name.rsplit(".", 2)[-2]

        def load() -> np.ndarray:
            array = dequantise(tensors[gguf_name(name)])
            return half_split_rows(array, heads[module]) if module in heads else array

        return SourceTensor(name, shape, load)

    return tuple(plan(name, shape) for name, shape in shapes.items())


def _default_dtype(tensors: Mapping[str, Any]) -> str:
    """The type of the matrices where that is a plain one; float32 for quantised or mixed files."""
    kinds = {t.tensor_type.name for t in tensors.values() if len(t.shape) > 1}
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def read_gguf(path: Path, tokenizer: Path | None) -> LlamaSource:
    """Reads a GGUF file: header now, tensors when they are written.

    Args:
      path: the file.
      tokenizer: a folder whose tokenizer files are used instead of the file's own tokenizer, or None.

    Raises:
      InputError: anything that cannot be converted faithfully.
    """
    metadata, tensors = read_header(path)
    config, notes = read_config(metadata, tensors)
    ids, stops = read_token_ids(metadata, config.vocab_size)
    planned = read_tensors(config, tensors)
    files: dict[str, bytes | Path] = {}
    if tokenizer is not None:
        found, more = tokenizer_files(tokenizer, config.vocab_size)
        files |= found
    else:
        count = len(metadata.get(PREFIX + "tokens", ()))
        if count > config.vocab_size:
            raise InputError(
                expected=f"at most {config.vocab_size} tokens, the rows of token_embd.weight",
                found=f"{count}",
                remedy="Pass --tokenizer DIR with the tokenizer that belongs to these weights.",
            )
        built, more = build_tokenizer(metadata, config.max_position_embeddings)
        files |= built
    notes += more
    licences = licence_files(path.parent)
    if not licences:
        stated = metadata.get("general.license")
        notes.append("no licence file beside the source" + (f"; its metadata say {stated}" if stated else ""))
    files |= licences
    generation = {name: value for name, value in ids.items() if value is not None} | {"eos_token_id": stops}
    return LlamaSource(config.to_hf() | ids, generation, planned, _default_dtype(tensors), files, tuple(notes))
