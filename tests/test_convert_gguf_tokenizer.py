"""The tokenizer rebuilt from GGUF metadata against one spelled out as tokenizer.json."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from convert.gguf_tokenizer import build_tokenizer
from convert.target import convert, main
from eagle3_jax.errors import InputError
from tests.tiny_gguf import PRE_TOKENIZERS, SPECIALS, UNREACHABLE, reference_tokenizer, tokenizer_metadata, write_gguf

STRINGS = [
    "",
    " ",
    "   ",
    "the",
    " the",
    "the  there   then",
    "hello world",
    "hello  hello",
    "1",
    "12 123 1234 12345 1234567",
    "a1b22c333",
    "½ ² ٣٤٥ Ⅷ",
    "we're don't we'll",
    "DON'T I'M Don'T",
    "the\n\n the",
    "\n",
    "\r\n \r\n",
    "\tif x:\n\t\treturn 12\n",
    "trailing   ",
    "你好",
    "你好世界。12 个",
    "日本語のテキスト",
    "한국어 텍스트",
    "café naïve",
    "مرحبا بالعالم",
    "🎉",
    "👩‍👩‍👧‍👦 🇫🇷 ok",
    "!!! ... --- ???",
    "<|im_start|>user\nhello<|im_end|>\n",
    "the<|im_end|><|im_end|> the",
    "<|endoftext|>12",
    "<|im_start>not <|special",
    "<think>then</think>",
    " zebra zebra",
    "http://the.there/then?x=12&y=34#hello",
    "\x00\x7f\u200b\u00a0",
]


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    files, _ = build_tokenizer(metadata, 256)
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@functools.cache
def both(pre: str) -> tuple[Tokenizer, Tokenizer]:
    """The rebuilt tokenizer and the spelled-out one, neither of which adds a bos token."""
    return rebuilt(tokenizer_metadata(pre) | {"tokenizer.ggml.add_bos_token": False}), reference_tokenizer(pre)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_equal_those_of_the_tokenizer_json(pre: str) -> None:
    got, wanted = both(pre)
    for text in STRINGS:
        encoded = got.encode(text)
        assert encoded.ids == wanted.encode(text).ids, text
        assert encoded.offsets == wanted.encode(text).offsets, text
        assert got.decode(encoded.ids, skip_special_tokens=False) == text
        assert got.decode(encoded.ids) == wanted.decode(encoded.ids)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_ids_equal_on_any_text(text: str, pre: str) -> None:
    got, wanted = both(pre)
    assert got.encode(text).ids == wanted.encode(text).ids


def test_the_strings_tell_the_pre_tokenizers_apart() -> None:
    ids = {pre: [reference_tokenizer(pre).encode(text).ids for text in STRINGS] for pre in PRE_TOKENIZERS}
    for one, other in itertools.combinations(ids, 2):
        assert ids[one] != ids[other], (one, other)


def test_only_llama_takes_a_known_word_whole() -> None:
    word = UNREACHABLE.replace("Ġ", " ")
    lengths = {
        pre: len(rebuilt(tokenizer_metadata(pre)).encode(word, add_special_tokens=False)) for pre in PRE_TOKENIZERS
    }
    assert lengths.pop("llama-bpe") == 1
    assert min(lengths.values()) > 1


def test_qwen_composes_characters_first() -> None:
    assert (
        rebuilt(tokenizer_metadata("qwen2")).encode("cafe\u0301").ids == reference_tokenizer("qwen2").encode("café").ids
    )


@pytest.mark.parametrize(
    ("pre", "stated", "bos", "noted"),
    [
        ("smollm", {}, False, False),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, True, False),
        ("llama-bpe", {}, True, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": True}, True, False),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False, False),
    ],
)
def test_bos_is_added_as_the_file_or_the_family_says(pre: str, stated: dict[str, bool], bos: bool, noted: bool) -> None:
    files, notes = build_tokenizer(tokenizer_metadata(pre) | stated, 256)
    ids = Tokenizer.from_str(files["tokenizer.json"].decode()).encode("the there").ids
    assert ids == reference_tokenizer(pre, bos=bos).encode("the there").ids
    assert (ids[0] == 1) == bos
    assert any("add_bos_token" in note for note in notes) == noted


def test_eos_and_pairs_are_framed() -> None:
    stated = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = rebuilt(tokenizer_metadata() | stated)
    plain = rebuilt(tokenizer_metadata())
    one, two = plain.encode("the").ids, plain.encode("12").ids
    assert tokenizer.encode("the").ids == [1, *one, 2]
    pair = tokenizer.encode("the", "12")
    assert pair.ids == [1, *one, 2, 1, *two, 2]
    assert pair.type_ids == [0] * (len(one) + 2) + [1] * (len(two) + 2)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_transformers_reads_the_files(tmp_path: Path, pre: str) -> None:
    metadata = tokenizer_metadata(pre)
    convert(write_gguf(tmp_path / "model.gguf", metadata=metadata), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    wanted = reference_tokenizer(pre, bos=pre == "llama-bpe")
    for text in STRINGS:
        ids = tokenizer.encode(text)
        assert ids == wanted.encode(text).ids, text
        assert tokenizer.decode(ids[pre == "llama-bpe" :]) == text
    assert tokenizer.unk_token_id == 0
    assert tokenizer.model_max_length == 256
    assert (
        tokenizer.decode([1, *tokenizer.encode("the", add_special_tokens=False), 2], skip_special_tokens=True) == "the"
    )
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert rendered == f"{SPECIALS[1]}the{SPECIALS[2]}"


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in tokenizer_metadata().items() if name != f"tokenizer.ggml.{key}"}


def changed(key: str, value: Any) -> dict[str, Any]:
    return tokenizer_metadata() | {f"tokenizer.ggml.{key}": value}


TOKENS, TYPES, MERGES = (tokenizer_metadata()[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (changed("model", "llama"), "'llama'"),
        (changed("pre", "deepseek-llm"), "'deepseek-llm'"),
        (changed("pre", "default"), "gpt-2, llama-bpe, llama-v3, llama3, qwen2, smollm"),
        (without("model"), "tokenizer.ggml.model"),
        (without("pre"), "tokenizer.ggml.pre"),
        (without("tokens"), "tokenizer.ggml.tokens"),
        (without("token_type"), "tokenizer.ggml.token_type"),
        (without("merges"), "tokenizer.ggml.merges"),
        (changed("add_space_prefix", True), "add_space_prefix"),
        (changed("add_sep_token", True), "add_sep_token"),
        (changed("precompiled_charsmap", [1, 2]), "precompiled_charsmap"),
        (changed("token_type", TYPES[:-1]), "319 types"),
        (changed("token_type", [*TYPES[:-1], 6]), "type 6"),
        (changed("tokens", [*TOKENS[:-1], "Ġthe"]), "'Ġthe' more than once"),
        (changed("merges", [*MERGES, "q zz"]), "'q zz'"),
        (changed("merges", ["th"]), "'th'"),
        (changed("bos_token_id", 320), "bos_token_id below 320"),
        (without("bos_token_id") | {"tokenizer.ggml.add_bos_token": True}, "bos_token_id"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_the_way_out(metadata: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match="--tokenizer DIR") as caught:
        build_tokenizer(metadata, 256)
    assert told in str(caught.value)


def test_unknown_tokens_are_special_and_unused_ones_are_kept() -> None:
    tokenizer = rebuilt(changed("token_type", [2, *TYPES[1:-1], 5]))
    assert tokenizer.encode("the<|endoftext|>").ids[-1] == 0
    assert tokenizer.decode([0]) == ""
    assert tokenizer.get_vocab_size() == 320


def test_further_chat_templates_are_left_out_aloud() -> None:
    _, notes = build_tokenizer(tokenizer_metadata() | {"tokenizer.chat_template.tool_use": "x"}, 256)
    assert notes == ["only the default chat template is kept; left out: tokenizer.chat_template.tool_use"]


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": [*TOKENS, "extra"], "tokenizer.ggml.token_type": [*TYPES, 1]}
    with pytest.raises(InputError, match="at most 320 tokens"):
        convert(write_gguf(tmp_path / "model.gguf", metadata=metadata), tmp_path / "out")


def test_a_given_tokenizer_takes_the_place_of_an_unknown_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_gguf(tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": "unheard-of"})
    given = tmp_path / "given"
    given.mkdir()
    command = [str(source), str(tmp_path / "out")]
    assert main(command) == 2
    assert "pass --tokenizer dir" in capsys.readouterr().err.lower()
    assert main([*command, "--tokenizer", str(given / "none")]) == 2
    assert "which is not a folder" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(given)]) == 2
    assert f"none in {given}" in capsys.readouterr().err
    (given / "tokenizer.json").write_text("{")
    assert main([*command, "--tokenizer", str(given)]) == 2
    assert "the tokenizers package reads" in capsys.readouterr().err
    contents = {
        "tokenizer.json": reference_tokenizer("gpt-2").to_str(),
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "x",
    }
    for name, content in (contents | {"weights.bin": "no tokenizer file"}).items():
        (given / name).write_text(content)
    assert main([*command, "--tokenizer", str(given)]) == 0
    written = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert {name: written[name].read_text() for name in contents} == contents
    assert "weights.bin" not in written


def test_a_tokenizer_with_too_many_ids_is_said(tmp_path: Path) -> None:
    tokenizer = reference_tokenizer("smollm")
    tokenizer.add_tokens(["<pad>"])
    (tmp_path / "given").mkdir()
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    done = convert(write_gguf(tmp_path / "model.gguf"), tmp_path / "out", tokenizer=tmp_path / "given")
    assert any("ids up to 320, but the model only 320 rows" in note for note in done.notes)
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"][-1]["content"] == "<pad>"
