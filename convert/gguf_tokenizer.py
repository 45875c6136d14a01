"""The tokenizer inside a GGUF file, rebuilt as tokenizer.json and tokenizer_config.json.

GGUF stores the vocabulary, the merges and only the *name* of the pre-tokenizer. A name that is not known here is
refused: a near miss would split text differently and give other ids without any error.

Source: llama.cpp, src/llama-vocab.cpp (names, defaults) and gguf-py/gguf/constants.py (`Keys.Tokenizer`, `TokenType`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eagle3_jax.errors import InputError

PREFIX = "tokenizer.ggml."
PASS_TOKENIZER = "Pass --tokenizer DIR with the model's own tokenizer files."
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Token types of gguf.TokenType. Unused ids (5) are padding of the vocabulary; byte tokens (6) belong to SentencePiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

# The contraction, word, punctuation and white space rules that the Llama 3 and Qwen 2 tokenizers share; they differ
# in how many digits may stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """What one pre-tokenizer name stands for.

    `ignore_merges`: a piece that is in the vocabulary is taken whole. `add_bos`: the default when the file has no
    `add_bos_token`.
    """

    splitter: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _split_then_bytes(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pre_tokenizers() -> dict[str, PreTokenizer]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    single_digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    llama3 = PreTokenizer(_split_then_bytes("{1,3}"), ignore_merges=True, add_bos=True)
    return {
        "gpt-2": PreTokenizer(byte_level),
        "smollm": PreTokenizer(single_digits),
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": PreTokenizer(_split_then_bytes(""), normalizer=normalizers.NFC()),
    }


def _refuse(expected: str, found: str) -> InputError:
    return InputError(expected=expected, found=found, remedy=PASS_TOKENIZER)


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if PREFIX + key not in metadata:
        raise _refuse(f"the key {PREFIX}{key} in the GGUF file", "none")
    return metadata[PREFIX + key]


def _special_ids(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    """Ids of bos, eos, pad and unk, where the file has them; each inside the vocabulary."""
    keys = {
        "bos": "bos_token_id",
        "eos": "eos_token_id",
        "pad": "padding_token_id",
        "unk": "unknown_token_id",
    }
    ids = {name: int(metadata[PREFIX + key]) for name, key in keys.items() if PREFIX + key in metadata}
    for name, value in ids.items():
        if not 0 <= value < size:
            raise _refuse(f"{PREFIX}{keys[name]} below {size}, the number of tokens", str(value))
    return ids


def _check_supported(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The pre-tokenizer that the metadata names, or InputError for anything this module cannot rebuild."""
    model = _required(metadata, "model")
    if model != "gpt2":
        raise _refuse("a tokenizer of the kind 'gpt2' (byte-level BPE)", f"{PREFIX}model = {model!r}")
    known = _pre_tokenizers()
    name = _required(metadata, "pre")
    if name not in known:
        raise _refuse(f"a pre-tokenizer among {', '.join(sorted(known))}", f"{PREFIX}pre = {name!r}")
    for key in ("add_space_prefix", "add_sep_token"):
        if metadata.get(PREFIX + key):
            raise _refuse(f"{PREFIX}{key} false", "true, which this converter does not rebuild")
    if metadata.get(PREFIX + "precompiled_charsmap"):
        raise _refuse("no text normaliser inside the file", f"{PREFIX}precompiled_charsmap")
    return known[name]


def _checked_vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """Tokens, their types, and the merges as pairs; consistent with one another."""
    tokens: list[str] = _required(metadata, "tokens")
    types: list[int] = _required(metadata, "token_type")
    if len(types) != len(tokens):
        raise _refuse(f"one token type for each of {len(tokens)} tokens", f"{len(types)} types")
    if len(set(tokens)) != len(tokens):
        raise _refuse("each token once in the vocabulary", f"{Counter(tokens).most_common(1)[0][0]!r} more than once")
    odd = sorted(set(types) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED})
    if odd:
        raise _refuse("token types 1 to 5 in a byte-level BPE vocabulary", f"type {odd[0]}")
    vocabulary = set(tokens)
    merges: list[tuple[str, str]] = []
    for text in _required(metadata, "merges"):
        left, _, right = text.partition(" ")
        if not {left, right, left + right} <= vocabulary:
            raise _refuse("merges whose parts and results are tokens", f"the merge {text!r}")
        merges.append((left, right))
    return tokens, types, merges


def _post_processor(tokens: list[str], ids: Mapping[str, int], bos: bool, eos: bool) -> processors.TemplateProcessing:
    used = [name for name, wanted in (("bos", bos), ("eos", eos)) if wanted]
    for name in used:
        if name not in ids:
            raise _refuse(f"{PREFIX}{name}_token_id, since {PREFIX}add_{name}_token is true", "none")

    def template(sequence: str) -> list[str]:
        """One sequence ("A:0" or "B:1") with the wanted ends; the number is its segment id."""
        segment = sequence[-1]
        first = [f"{tokens[ids['bos']]}:{segment}"] if bos else []
        return [*first, f"${sequence}", *([f"{tokens[ids['eos']]}:{segment}"] if eos else [])]

    return processors.TemplateProcessing(
        single=template("A:0"),
        pair=template("A:0") + template("B:1"),
        special_tokens=sorted({(tokens[ids[name]], ids[name]) for name in used}),
    )


def build_tokenizer(metadata: Mapping[str, Any], context_length: int) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer files that the metadata of a GGUF file describe, by name, and notes for the user.

    Args:
      metadata: plain Python values by key (`tokenizer.ggml.*`, `tokenizer.chat_template`).
      context_length: written as `model_max_length`, in tokens.

    Raises:
      InputError: a kind of tokenizer, pre-tokenizer or token type that is not known here, or keys that disagree.
    """
    pre = _check_supported(metadata)
    tokens, types, merges = _checked_vocabulary(metadata)
    ids = _special_ids(metadata, len(tokens))
    notes: list[str] = []

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre.splitter  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    # Added tokens are cut out of the text before anything else; `normalized=False` matches them in the raw text.
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)

    key = PREFIX + "add_bos_token"
    if key not in metadata and pre.add_bos:
        notes.append(f"no {key} in the file: a bos token is added, the default of this pre-tokenizer")
    add_bos, add_eos = bool(metadata.get(key, pre.add_bos)), bool(metadata.get(PREFIX + "add_eos_token", False))
    if add_bos or add_eos:
        post = _post_processor(tokens, ids, add_bos, add_eos)
        tokenizer.post_processor = post  # pyright: ignore[reportAttributeAccessIssue]

    # This class takes tokenizer.json as it is; a model's own class would rebuild parts of it by its own rules.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {f"{name}_token": tokens[index] for name, index in ids.items()}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": context_length}
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        notes.append("the file has no chat template")
    else:
        config["chat_template"] = template
    other = sorted(k for k in metadata if k.startswith("tokenizer.chat_template."))
    if other:
        notes.append(f"only the default chat template is kept; left out: {', '.join(other)}")
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    return files, notes


def tokenizer_files(folder: Path, vocab_size: int) -> tuple[dict[str, Path], list[str]]:
    """The tokenizer files of a HuggingFace folder, by name, and notes for the user.

    Raises:
      InputError: no tokenizer there, or a tokenizer.json that cannot be read.
    """
    found = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(found):
        raise _refuse("tokenizer.json, tokenizer.model or vocab.json among the tokenizer's files", f"none in {folder}")
    if "tokenizer.json" not in found:
        return found, []
    try:
        last = max(Tokenizer.from_file(str(found["tokenizer.json"])).get_vocab().values(), default=-1)
    except Exception as error:  # The tokenizers package raises nothing more precise.
        raise _refuse("a tokenizer.json that the tokenizers package reads", f"{folder}: {error}") from error
    if last < vocab_size:
        return found, []
    return found, [
        f"the tokenizer has ids up to {last}, but the model only {vocab_size} rows: ids beyond cannot be used"
    ]
