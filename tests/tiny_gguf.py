"""A tiny random LLaMA and a tiny tokenizer, and the GGUF files that llama.cpp's converter would make of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 320, 64, 8, 4, 2, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
UNREACHABLE = "Ġzebra"  # in the vocabulary, but no chain of merges leads to it
CORPUS = (
    "the then there their this that 12 123 1234 12 123 34 567 567 we're we'll I'M don't don't Don'T the\n\n the"
    " café café naïve 你好 你好世界 hello  hello   world\n\tif x:\n\t\treturn\n zebr zebr"
)
# As the files on the hub write them; the library builds its own from the names alone.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]},
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS % r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
            BYTES | {"use_regex": False},
        ],
    },
    "qwen2": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS % r"\p{N}"}, "behavior": "Isolated", "invert": False},
            BYTES | {"use_regex": False},
        ],
    },
}


@functools.cache
def tiny_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary (specials first, as in SmolLM2; 320 entries) and merges, trained so that digits and spaces merge."""
    trained = Tokenizer(models.BPE())
    # The corpus is one piece, so that merges run over spaces and digits, where the pre-tokenizers differ.
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kept = VOCAB - len(SPECIALS) - 2
    trainer = trainers.BpeTrainer(
        vocab_size=kept, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, max_token_length=5
    )
    trained.train_from_iterator([CORPUS] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIALS, *sorted(model["vocab"], key=model["vocab"].get), USER_DEFINED, UNREACHABLE]
    assert len(tokens) == VOCAB
    return {token: index for index, token in enumerate(tokens)}, [(left, right) for left, right in model["merges"]]


def reference_tokenizer(pre: str, *, bos: bool = False) -> Tokenizer:
    """The tokenizer as a tokenizer.json on the hub would spell it."""
    vocabulary, merges = tiny_bpe()
    added = [(token, True) for token in SPECIALS] + [(USER_DEFINED, False)]
    first = [{"SpecialToken": {"id": SPECIALS[1], "type_id": 0}}] if bos else []
    template = {
        "type": "TemplateProcessing",
        "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {SPECIALS[1]: {"id": SPECIALS[1], "ids": [1], "tokens": [SPECIALS[1]]}},
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[token], "content": token, "special": special}
            | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
            for token, special in added
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": template if bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }
    return Tokenizer.from_str(json.dumps(content))


def tokenizer_metadata(pre: str = "smollm") -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file."""
    vocabulary, merges = tiny_bpe()
    kinds = [3 if token in SPECIALS else 4 if token == USER_DEFINED else 1 for token in vocabulary]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(vocabulary),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }


@functools.cache
def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    """A random model; do not change it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # norms of one would hide a norm in the wrong place
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
                assert "norm" in name
    return model


def hf_tensors(tied: bool = True) -> dict[str, np.ndarray]:
    """The model's tensors by their HuggingFace names, float32."""
    tensors = {name: tensor.numpy() for name, tensor in tiny_llama(tied).state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    return tensors


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores those of q and k: row j of the first half, row j of the second half, and so on."""
    size = rows.shape[0] // heads
    order = [head * size + part * size // 2 + j for head in range(heads) for j in range(size // 2) for part in (0, 1)]
    return rows[order]


def gguf_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors under GGUF's names and in GGUF's row order."""
    result = {}
    for name, array in tensors.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        stem = name.removesuffix(".weight").replace("model.layers.", "")
        index, _, module = stem.partition(".")
        stem = f"blk.{index}.{NAMES[module]}" if index.isdigit() else NAMES[stem]
        result[f"{stem}.weight"] = array if heads is None else interleaved(array, heads)
    return result


def model_metadata() -> dict[str, Any]:
    """The model's keys of a GGUF file."""
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.vocab_size": VOCAB,
    }


def write_gguf(
    path: Path,
    *,
    kind: str = "F32",
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Writes a GGUF file: matrices as `kind`, vectors as F32, integers as they are; `metadata` None removes a key."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    for key, value in (model_metadata() | tokenizer_metadata() | dict(metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, array in (gguf_tensors(hf_tensors()) if tensors is None else tensors).items():
        if array.ndim == 1 or array.dtype != np.float32:
            writer.add_tensor(name, array)
        else:
            quantised = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
