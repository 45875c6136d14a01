"""The text room: prompts, stop ids, streaming and stop strings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import UserDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.errors import InputError
from eagle3_jax.tokenizer import (
    TextStream,
    chat_ids,
    check_stops,
    decode,
    eos_ids,
    find_stop,
    load_tokenizer,
    plain_ids,
    text_ids,
)
from tests.tiny_tokenizers import chatml, llama3, sentencepiece

SMOLLM2 = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
USER = [{"role": "user", "content": "Hello, how are you?"}]
KINDS = {"chatml": chatml(), "llama3": llama3(), "sentencepiece": sentencepiece()}


def test_chat_ids_equal_the_templates_own_tokens_as_a_plain_list():
    tokenizer = KINDS["chatml"]
    ids = chat_ids(tokenizer, USER, add_generation_prompt=True)
    theirs = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    assert ids == theirs
    assert tokenizer.decode(ids).endswith("Hello, how are you?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: UserDict(input_ids=ids)], ids=["list", "mapping"])
def test_chat_ids_do_not_depend_on_what_tokenising_a_template_returns(wrap, monkeypatch):
    """apply_chat_template(tokenize=True) gives a list in transformers 4 and a mapping in 5."""
    tokenizer = chatml()
    expected = chat_ids(tokenizer, USER, add_generation_prompt=True)
    original = tokenizer.apply_chat_template

    def other_version(messages, tokenize=True, **options):
        text = original(messages, tokenize=False, **options)
        return wrap(tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenize else text

    monkeypatch.setattr(tokenizer, "apply_chat_template", other_version)
    assert chat_ids(tokenizer, USER, add_generation_prompt=True) == expected


def test_one_bos_from_the_template_or_from_the_tokenizer_and_never_two():
    tokenizer = KINDS["llama3"]
    bos = tokenizer.bos_token_id
    assert chat_ids(tokenizer, USER, add_generation_prompt=True).count(bos) == 1
    once = text_ids(tokenizer, "Hello")
    assert once.count(bos) == 1
    assert once[0] == bos
    assert text_ids(tokenizer, "<|begin_of_text|>Hello") == once


def test_a_raw_prompt_gets_no_bos_from_a_tokenizer_that_adds_none():
    assert text_ids(KINDS["chatml"], "Hello") == plain_ids(KINDS["chatml"], "Hello")
    with pytest.raises(InputError, match="at least one token"):
        text_ids(KINDS["chatml"], "")


def test_no_chat_template_is_refused_with_the_raw_flag_as_remedy():
    with pytest.raises(InputError, match="--raw"):
        chat_ids(chatml(template=None), USER, add_generation_prompt=True)


def test_messages_that_the_template_refuses_are_named():
    tokenizer = chatml("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"roles user: roles must alternate"):
        chat_ids(tokenizer, USER, add_generation_prompt=True)


def test_eos_ids_are_the_union_of_both_configs_and_the_tokenizer(tmp_path):
    tokenizer = KINDS["chatml"]
    assert eos_ids(tmp_path, tokenizer) == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert eos_ids(tmp_path, tokenizer) == (0, 2, 7, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_ids(tmp_path, tokenizer) == (2, 7, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "<|im_end|>"}))
    with pytest.raises(InputError, match=r"config.json.*found '<\|im_end\|>'"):
        eos_ids(tmp_path, tokenizer)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="JSON object"):
        eos_ids(tmp_path, tokenizer)


def test_a_saved_tokenizer_loads_and_encodes_the_same(tmp_path):
    chatml().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for messages in (USER, [*USER, {"role": "assistant", "content": "héllo 🙂"}]):
        assert chat_ids(loaded, messages, add_generation_prompt=True) == chat_ids(
            KINDS["chatml"], messages, add_generation_prompt=True
        )
    assert decode(loaded, plain_ids(loaded, "kind , is n't . it ?")) == "kind , is n't . it ?"


def test_spaces_are_kept_also_where_the_folder_asks_to_clean_them_up(tmp_path):
    chatml().save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clean_up_tokenization_spaces": True}))
    assert load_tokenizer(tmp_path).clean_up_tokenization_spaces is False


def test_missing_or_broken_tokenizer_files_are_named(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(InputError, match="none of these files"):
        load_tokenizer(tmp_path)
    chatml().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"cut')
    with pytest.raises(InputError, match="readable tokenizer"):
        load_tokenizer(tmp_path)


def run_alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in its own process, since this one may have torch imported, and with a user's environment."""
    root = Path(__file__).parents[1]
    environment = {key: value for key, value in os.environ.items() if key != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, cwd=root, env=environment
    )


def test_loading_without_torch_works_and_prints_nothing(tmp_path):
    chatml().save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from eagle3_jax.tokenizer import load_tokenizer, chat_ids\n"
        "t = load_tokenizer(Path(sys.argv[1]))\n"
        "print(len(chat_ids(t, [{'role': 'user', 'content': 'hi'}], add_generation_prompt=True)))"
    )
    done = run_alone(code, tmp_path)
    assert int(done.stdout) > 5
    assert done.stderr == ""


def test_loading_does_not_import_torch(tmp_path):
    chatml().save_pretrained(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom eagle3_jax.tokenizer import load_tokenizer\n"
        "load_tokenizer(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    done = run_alone(code, tmp_path)
    assert done.stdout.strip() == "False"


def pieces_of(stream: TextStream, blocks: list[list[int]]) -> list[str]:
    return [*(stream.push(block) for block in blocks), stream.finish()]


@st.composite
def generated(draw):
    """A tokenizer, tokens that are text or arbitrary ids, and a way to cut them into blocks."""
    name = draw(st.sampled_from(sorted(KINDS)))
    tokenizer = KINDS[name]
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            ids += plain_ids(tokenizer, draw(st.text(st.sampled_from("ab cd.é日🙂"), max_size=30)))
        else:
            ids += draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    ids = ids * draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=40)))
    blocks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]
    return tokenizer, ids, blocks


@settings(max_examples=300, deadline=None)
@given(generated())
def test_streamed_pieces_join_to_the_decoded_text(case):
    tokenizer, ids, blocks = case
    for given_blocks in (blocks, [[i] for i in ids]):
        pieces = pieces_of(TextStream(tokenizer), given_blocks)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(generated(), st.lists(st.text(st.sampled_from("ab cd.é日🙂"), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_is_found_at_the_same_token_whatever_the_blocks(case, stops):
    tokenizer, ids, blocks = case
    texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
    first = next((n for n, text in enumerate(texts) if any(stop in text for stop in stops)), None)

    found, seen = None, 0
    for block in blocks:
        found = find_stop(tokenizer, ids[: seen + len(block)], stops, seen)
        if found:
            break
        seen += len(block)
    assert (found[0] if found else None) == first
    if found:
        count, text = found
        ends = [texts[count].find(stop) + len(stop) for stop in stops if stop in texts[count]]
        assert texts[count].startswith(text)
        assert any(texts[count][: min(ends)] == text + stop for stop in stops)
        assert not any(stop in text for stop in stops)
        pieces = pieces_of(TextStream(tokenizer, stops), [[i] for i in ids[:count]])
        assert "".join(pieces) == text


def test_the_stream_shows_text_at_once_and_holds_back_half_a_character():
    tokenizer = KINDS["chatml"]
    stream = TextStream(tokenizer)
    assert stream.push(plain_ids(tokenizer, "fox")) == "fox"
    snowman = plain_ids(tokenizer, "☃")
    assert len(snowman) == 3
    assert [stream.push([i]) for i in snowman] == ["", "", "☃"]
    assert stream.push(snowman[:2]) == ""
    assert stream.finish() == tokenizer.decode(snowman[:2])


def test_the_stream_holds_back_the_beginning_of_a_stop_string_only_while_it_can_still_match():
    tokenizer = KINDS["chatml"]
    stream = TextStream(tokenizer, ["###"])
    one = plain_ids(tokenizer, "#")
    assert [stream.push(one), stream.push(one), stream.push(plain_ids(tokenizer, "a"))] == ["", "", "##a"]
    assert [stream.push(plain_ids(tokenizer, " b##")), stream.push(one), stream.push(one)] == [" b", "", ""]
    assert stream.finish() == ""
    unstopped = TextStream(tokenizer, ["###"])
    assert unstopped.push(plain_ids(tokenizer, "a##")) == "a"
    assert unstopped.finish() == "##"


def test_a_long_stream_stays_exact_and_re_decodes_few_tokens():
    tokenizer = KINDS["sentencepiece"]
    ids = plain_ids(tokenizer, "a cd b. é " * 400)
    longest = 0
    original = tokenizer.decode

    class Spy:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, given_ids, **options):
            nonlocal longest
            longest = max(longest, len(given_ids))
            return original(given_ids, **options)

    pieces = pieces_of(TextStream(Spy()), [[i] for i in ids])
    assert "".join(pieces) == original(ids, skip_special_tokens=True)
    assert longest < 100


def test_many_tokens_without_text_change_neither_the_stream_nor_the_search():
    tokenizer = KINDS["sentencepiece"]
    silent = [tokenizer.eos_token_id] * 70
    ids = plain_ids(tokenizer, "a b " * 40 + "d") + silent + plain_ids(tokenizer, "a b")
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.endswith("d a b")
    assert "".join(pieces_of(TextStream(tokenizer), [[i] for i in ids])) == whole
    count, text = find_stop(tokenizer, ids, ["d a"], 0)
    assert (count, text) == (len(ids) - 1, whole.removesuffix("d a b"))


def test_a_stop_across_a_token_border_is_found_and_an_earlier_part_counts():
    tokenizer = KINDS["chatml"]
    ids = plain_ids(tokenizer, "one two") + plain_ids(tokenizer, "three four")
    assert find_stop(tokenizer, ids, ["twothree"], 0) is not None
    before = len(plain_ids(tokenizer, "one two"))
    count, text = find_stop(tokenizer, ids, ["zzz", "twothree"], before)
    assert text == "one "
    assert before < count < len(ids)
    assert find_stop(tokenizer, ids, ["zzz"], 0) is None
    assert find_stop(tokenizer, ids, [], 0) is None


def test_the_stop_string_complete_first_wins():
    tokenizer = KINDS["chatml"]
    ids = plain_ids(tokenizer, "abcd")
    assert find_stop(tokenizer, ids, ["abcd", "bc"], 0)[1] == "a"
    assert find_stop(tokenizer, ids, ["bc", "abc"], 0)[1] == ""
    one_token = plain_ids(KINDS["sentencepiece"], "bcd")[-1:]
    assert KINDS["sentencepiece"].decode(one_token) == "cd"
    ids = plain_ids(KINDS["sentencepiece"], "bcd")
    assert find_stop(KINDS["sentencepiece"], ids, ["bcd", "c"], 0) == (2, "b")


@pytest.mark.parametrize("stop", ["", "a<|im_end|>"])
def test_stop_strings_that_can_never_match_are_refused(stop):
    with pytest.raises(InputError, match="stop strings"):
        check_stops(KINDS["chatml"], ["fine", stop])
    assert check_stops(KINDS["chatml"], ["fine"]) == ("fine",)


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no models/SmolLM2-135M-Instruct")
def test_smollm2_prompts_begin_with_its_default_system_turn():
    tokenizer = load_tokenizer(SMOLLM2)
    ids = chat_ids(tokenizer, USER, add_generation_prompt=True)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert eos_ids(SMOLLM2, tokenizer) == (2,)
