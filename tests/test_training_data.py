"""The data room: reading rows, the mask of replies, packing, slots and token counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax import cli
from eagle3_jax.errors import InputError
from eagle3_jax.prompts import encode_prompt
from eagle3_jax.tokenizer import chat_ids, chat_text, load_tokenizer, plain_ids
from eagle3_jax.training.data import Encoded, encode_file, encode_row, find_markers
from eagle3_jax.training.packing import pack
from eagle3_jax.training.rows import FORMS, Row, RowError, read_rows
from tests import tiny
from tests.tiny_tokenizers import CHATML_TEMPLATE, TOOLS_TEMPLATE, chatml, llama3

SMOLLM2 = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
CHATML, LLAMA3 = chatml(), llama3()
# Qwen3 and DeepSeek-R1 style: thoughts are kept in the last turn only; R1 also opens them in the prompt.
THINKING_TEMPLATE = (
    "{% for m in messages %}{% set c = m['content'] %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENED_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].split('</think>')[-1] }}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(*contents: str) -> tuple[dict[str, str], ...]:
    """User and assistant turns in alternation."""
    return tuple({"role": ("user", "assistant")[k % 2], "content": c} for k, c in enumerate(contents))


def encode(tokenizer, row: Row) -> Encoded:
    return encode_row(tokenizer, row, find_markers(tokenizer))


def replies(tokenizer, encoded: Encoded) -> list[str]:
    """Text of each span, with its special tokens."""
    count = int(encoded.spans.max())
    return [tokenizer.decode(encoded.tokens[encoded.spans == k].tolist()) for k in range(1, count + 1)]


# ---------------------------------------------------------------- reading


# Each form that the help and the documentation name, with a row of it and what the row says.
FORM_ROWS = {
    '{"messages": [{"role", "content"}, ...]}': ({"messages": [*turns("q", "a")]}, turns("q", "a")),
    '{"messages": [...], "response": text, "finished": true}': (
        {"messages": [*turns("q", "a", "r")], "response": "b", "finished": False},
        turns("q", "a", "r", "b"),
    ),
    '{"conversations": [{"from": "human", "value": text}, ...]}': (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        turns("q", "a"),
    ),
    '{"prompt": text, "response": text}': ({"prompt": "q", "response": "a"}, turns("q", "a")),
    '{"text": conversation in the target\'s own template}': (
        {"text": chat_text(CHATML, turns("q", "a", "r", "b"), add_generation_prompt=False)},
        turns("q", "a", "r", "b"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_and_its_replies_are_supervised(tmp_path, form):
    given, messages = FORM_ROWS[form]
    path = write(tmp_path / "rows.jsonl", [given] * 3)
    got, report = read_rows(path)
    assert [row.messages for row in got] == [() if "text" in given else messages] * 3
    finished = given.get("finished", True)
    assert [row.finished for row in got] == [finished] * 3
    assert (report.read, report.kept, report.dropped) == (3, 3, {})
    encoded, encoding = encode_file(path, CHATML, max_length=64)
    said = [f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant"]
    if not finished:
        said[-1] = said[-1].removesuffix("<|im_end|>")
    assert [replies(CHATML, document) for document in encoded] == [said] * 3
    assert (encoding.replies, encoding.left_out, encoding.dropped) == (3 * len(said), 0, {})


def test_forms_are_told_where_people_look(capsys):
    """By the help of every command that reads data, and by the documentation; none but those that are tried here."""
    assert set(FORM_ROWS) == set(FORMS)
    flat = lambda text: re.sub(r"\s+", " ", text)
    page = flat((Path(__file__).parents[1] / "docs" / "training-at-scale.md").read_text(encoding="utf-8"))
    assert all(f"`{form}`" in page for form in FORMS)
    for command in ("train", "eval", "data inspect", "data vocab"):
        with pytest.raises(SystemExit):
            cli.build_parser().parse_args([*command.split(), "--help"])
        shown = flat(capsys.readouterr().out)
        assert not [form for form in FORMS if form not in shown], command


def test_mixed_columns_a_bom_blank_lines_and_a_cut_last_line_cost_no_good_row(tmp_path):
    good = [
        {"id": 1, "messages": [*turns("q", "a")], "conversations": None},
        {"id": "two", "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, turns("q", "a")[1]]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q\u2028r"}], "response": "a"},
    ]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in good]
    bad = [b'{"prompt": "\xff", "response": "a"}', b'{"prompt": "\\ud83d", "response": "a"}', b'{"messages": [{"ro']
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([lines[0], b"", *lines[1:], *bad]))
    rows, report = read_rows(path)
    assert [row.id for row in rows] == ["1", "two", "4"]
    assert [row.line for row in rows] == [1, 3, 4]
    assert rows[1].messages == turns("q", "a")
    assert rows[2].messages[1]["content"] == "q\u2028r"
    assert (report.read, report.kept, report.blank) == (6, 3, 1)
    assert report.dropped == {"not UTF-8": (5,), "half a surrogate pair in a text": (6,), "not valid JSON": (7,)}
    assert "6 rows read (1 blank lines skipped), 3 kept, 3 dropped: 1 not UTF-8 (line 5); " in str(report)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "a reply before the first user turn"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no assistant reply"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no assistant reply"),
        ({"messages": [*turns("q", " \n")]}, "empty reply"),
        ({"messages": "q"}, "a conversation that is not a list"),
        ({"messages": ["q"]}, "a message without 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a message with a part that is not text"),
        ({"messages": [{"role": "critic", "content": "1"}]}, "a message from 'critic', which is not supported"),
        (
            {"messages": [{"role": "assistant", "content": "", "reasoning_content": "hm"}]},
            "a message with 'reasoning_content', which is not supported",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "a message without text"),
        ({"messages": [*turns("q", "a")], "tools": "search"}, "'tools' that is not a list of objects"),
        ({"text": "t", "tools": [{}]}, "'tools' beside a text, which has no place for them"),
        ({"messages": [*turns("q", "a")], "response": "b"}, "a response after an assistant turn"),
        ({"prompt": "q", "response": "a", "finished": "no"}, "'finished' is neither true nor false"),
        ({"prompt": "q", "text": "t"}, "several of the keys prompt, text"),
        ({"question": "q"}, "none of the keys of a known form"),
        ({"text": " "}, "empty text"),
        (["q"], "not a JSON object"),
    ],
)
def test_a_bad_row_is_dropped_under_a_reason_with_its_line(tmp_path, row, reason):
    rows, report = read_rows(write(tmp_path / "rows.jsonl", [{"prompt": "q", "response": "a"}, row]))
    assert len(rows) == 1
    assert report.dropped == {reason: (2,)}


def test_only_the_first_lines_of_a_reason_are_printed(tmp_path):
    _, report = read_rows(write(tmp_path / "rows.jsonl", [{"prompt": "q", "response": "a"}, *[{}] * 7]))
    assert str(report).endswith("7 none of the keys of a known form (lines 2, 3, 4, 5, 6, ...).")


def test_a_missing_file_and_a_file_without_a_good_row_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match=r"1 none of the keys of a known form \(line 1\)"):
        read_rows(write(tmp_path / "rows.jsonl", [{}]))


# ---------------------------------------------------------------- the mask


def test_every_reply_is_supervised_with_its_end_of_turn_token_and_nothing_else():
    words = ["one two", "one two three", "one two three four"]
    contents = [text for k, reply in enumerate(words) for text in (f"say {k}", reply)]
    encoded = encode(CHATML, Row(1, "1", messages=turns(*contents)))
    sizes = [len(plain_ids(CHATML, reply)) for reply in words]
    assert replies(CHATML, encoded) == [f"{reply}<|im_end|>" for reply in words]
    assert int(np.count_nonzero(encoded.spans)) == sum(sizes) + 3
    assert CHATML.decode(encoded.tokens.tolist()) == chat_text(
        CHATML, turns(*contents), add_generation_prompt=False
    ).removesuffix("\n")


@pytest.mark.parametrize("tokenizer", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_a_supervised_reply_follows_the_very_tokens_that_decoding_feeds(tokenizer):
    messages = turns("Hello", "I am fine 🙂", "how are you?", "  thank you. ", "and you?")
    encoded = encode(tokenizer, Row(1, "1", messages=messages))
    assert encoded.spans.max() == 2
    for k, reply in ((1, 1), (2, 3)):
        prompt = chat_ids(tokenizer, messages[:reply], add_generation_prompt=True)
        first = int(np.argmax(encoded.spans == k))
        assert encoded.tokens[:first].tolist() == prompt
    assert np.flatnonzero(encoded.spans)[-1] == len(encoded.tokens) - 1
    assert encoded.tokens.tolist().count(LLAMA3.bos_token_id) == (1 if tokenizer is LLAMA3 else 0)


def test_a_reply_that_was_cut_has_no_end_of_turn_token_and_nothing_after_it():
    row = Row(1, "1", messages=turns("Hello", "one two th"), finished=False, generated=True)
    encoded = encode(CHATML, row)
    assert replies(CHATML, encoded) == ["one two th"]
    assert encoded.spans[-1] == 1
    half = Row(1, "1", messages=turns("Hello", "one \N{REPLACEMENT CHARACTER}"), finished=False, generated=True)
    assert replies(CHATML, encode(CHATML, half)) == ["one "]


def test_replies_that_a_later_turn_shows_otherwise_are_left_out_and_counted():
    tokenizer = chatml(THINKING_TEMPLATE)
    rewritten = turns("q", "<think>one</think>two", "r", "<think>three</think>four")
    encoded = encode(tokenizer, Row(1, "1", messages=rewritten))
    assert replies(tokenizer, encoded) == ["<think>three</think>four<|im_end|>"]
    assert encoded.left_out == 1
    assert "<think>one" not in tokenizer.decode(encoded.tokens.tolist())
    kept = encode(tokenizer, Row(1, "1", messages=turns("q", "two", "r", "<think>three</think>four")))
    assert replies(tokenizer, kept) == ["two<|im_end|>", "<think>three</think>four<|im_end|>"]
    assert kept.left_out == 0


def test_thoughts_opened_by_the_prompt_train_on_what_the_target_wrote_and_on_no_other_dialogue():
    tokenizer = chatml(OPENED_TEMPLATE)
    messages = turns("q", "one</think>two")
    encoded = encode(tokenizer, Row(1, "1", messages=messages, generated=True))
    assert replies(tokenizer, encoded) == ["one</think>two<|im_end|>"]
    prompt = chat_ids(tokenizer, messages[:1], add_generation_prompt=True)
    assert encoded.tokens[: len(prompt)].tolist() == prompt
    with pytest.raises(RowError, match="after the generation prompt"):
        encode(tokenizer, Row(1, "1", messages=messages))


def test_a_token_across_the_border_of_prompt_and_reply_is_refused():
    template = CHATML_TEMPLATE.replace("\n", " on")
    tokenizer = chatml(template)
    merged = Row(1, "1", messages=turns("q", "e two"))
    prompt = chat_ids(tokenizer, merged.messages[:1], add_generation_prompt=True)
    whole = chat_ids(tokenizer, merged.messages, add_generation_prompt=False)
    assert whole[: len(prompt)] != prompt  # " on" + "e" is one token
    with pytest.raises(RowError, match="reaches over the border"):
        encode(tokenizer, merged)


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>"])
def test_a_turn_marker_inside_a_reply_is_refused(marker):
    for finished in (True, False):
        with pytest.raises(RowError, match="opens or closes a turn inside a reply"):
            encode(CHATML, Row(1, "1", messages=turns("q", f"one{marker}two"), finished=finished))


def test_a_template_that_refuses_a_row_costs_that_row_only(tmp_path):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML_TEMPLATE
    rows = [{"messages": [*turns("q", "a")]}, {"messages": [{"role": "system", "content": "s"}, *turns("q", "a")]}]
    encoded, report = encode_file(write(tmp_path / "rows.jsonl", rows), chatml(template), max_length=64)
    assert len(encoded) == 1
    assert report.dropped == {"refused by the chat template": (2,)}


def test_a_template_without_an_end_of_turn_token_or_without_replies_is_refused():
    with pytest.raises(InputError, match="token of its own"):
        find_markers(chatml("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"))
    with pytest.raises(InputError, match="does not write the reply"):
        find_markers(chatml("{{ messages[0]['content'] }}<|im_end|>"))


@pytest.mark.parametrize("tokenizer", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_preformatted_text_gives_the_same_tokens_and_spans_as_messages(tokenizer):
    messages = turns("Hello", "I am fine", "how are you?", "thank you")
    text = chat_text(tokenizer, messages, add_generation_prompt=False)
    expected = encode(tokenizer, Row(1, "1", messages=messages))
    variants = [text, text.removeprefix("<|begin_of_text|>")]
    for variant in variants:
        encoded = encode(tokenizer, Row(1, "1", text=variant))
        assert encoded.tokens.tolist() == expected.tokens.tolist()
        assert encoded.spans.tolist() == expected.spans.tolist()
    markers = find_markers(tokenizer)
    cut = encode(tokenizer, Row(1, "1", text=text.rstrip("\n").removesuffix(markers.end_token)))
    assert cut.tokens.tolist() == expected.tokens[:-1].tolist()
    assert cut.spans.tolist() == expected.spans[:-1].tolist()


def test_preformatted_text_with_two_bos_or_an_unclosed_reply_is_refused():
    text = chat_text(LLAMA3, turns("q", "a"), add_generation_prompt=False)
    with pytest.raises(RowError, match="two BOS"):
        encode(LLAMA3, Row(1, "1", text="<|begin_of_text|>" + text))
    unclosed = text.removesuffix("<|eot_id|>") + text.removeprefix("<|begin_of_text|>")
    with pytest.raises(RowError, match="opens or closes a turn inside a reply"):
        encode(LLAMA3, Row(1, "1", text=unclosed))


def test_text_with_another_familys_markers_stops_and_shows_what_the_tokenizer_sees(tmp_path):
    text = chat_text(LLAMA3, turns("Hello", "I am fine"), add_generation_prompt=False)
    path = write(tmp_path / "rows.jsonl", [{"text": text}] * 3)
    with pytest.raises(InputError, match="0 supervised tokens in 3 rows") as caught:
        encode_file(path, CHATML, max_length=64)
    assert "<|start_header_id|>assistant" in caught.value.found
    assert "lines 1, 2, 3" in caught.value.found
    assert "<|im_start|>assistant" in caught.value.expected


def test_a_thousand_good_rows_stay_a_thousand(tmp_path):
    text = chat_text(CHATML, turns("q", "a"), add_generation_prompt=False)
    encoded, report = encode_file(write(tmp_path / "rows.jsonl", [{"text": text}] * 1000), CHATML, max_length=64)
    assert len(encoded) == report.rows == report.read.kept == report.read.read == 1000
    assert "1000 rows read, 1000 kept, 0 dropped" in str(report)


def test_long_rows_are_cut_counted_and_dropped_when_no_supervised_token_is_left(tmp_path):
    rows = [
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "response": "one " * 50},
        {"prompt": "q " * 60, "response": "a"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    encoded, report = encode_file(path, CHATML, max_length=60)
    assert [len(document.tokens) for document in encoded][1] == 60
    assert report.cut == 2
    assert report.dropped == {"without a supervised token in the first 60 tokens": (3,)}
    assert report.tokens == sum(len(document.tokens) for document in encoded)
    assert report.supervised == sum(int((document.spans > 0).sum()) for document in encoded)
    assert "2 rows cut at 60 tokens" in str(report)
    with pytest.raises(InputError, match="max_length"):
        encode_file(path, CHATML, max_length=2)


# ---------------------------------------------------------------- packing


def document(length: int, *spans: tuple[int, int], base: int = 0) -> Encoded:
    mask = np.zeros(length, np.int32)
    for k, (start, end) in enumerate(spans, start=1):
        mask[start:end] = k
    return Encoded(np.arange(base, base + length, dtype=np.int32), mask)


def test_packed_rows_hold_every_document_once_whole_and_apart():
    rng = np.random.default_rng(0)
    documents = []
    for k in range(200):
        length = int(rng.integers(3, 33))
        start = int(rng.integers(1, length))
        documents.append(document(length, (start, length), base=100 * k))
    packed = pack(documents, row_length=32, seed=1)
    found = []
    for tokens, spans, owners, positions in zip(packed.tokens, packed.spans, packed.documents, packed.positions):
        used = int(np.count_nonzero(owners))
        assert not tokens[used:].any()
        assert not spans[used:].any()
        assert not positions[used:].any()
        seen: set[int] = set()
        for number in range(1, owners.max() + 1):
            at = np.flatnonzero(owners == number)
            assert at.tolist() == list(range(at[0], at[-1] + 1))
            assert positions[at].tolist() == list(range(len(at)))
            ids = set(spans[at].tolist()) - {0}
            assert not ids & seen
            seen |= ids
            source = documents[tokens[at[0]] // 100]
            assert tokens[at].tolist() == source.tokens.tolist()
            assert (spans[at] > 0).tolist() == (source.spans > 0).tolist()
            found.append(int(tokens[at[0]]) // 100)
    assert sorted(found) == list(range(200))
    total = sum(d.tokens.size for d in documents)
    assert packed.efficiency == total / packed.tokens.size
    assert packed.efficiency > 0.9
    assert f"200 documents in {len(packed.tokens)} rows of 32 tokens" in str(packed)


def test_packing_is_decided_by_the_seed():
    documents = [document(3 + k % 9, (1, 3), base=20 * k) for k in range(60)]
    first, again, other = (pack(documents, row_length=16, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.tokens, again.tokens)
    shared = [{frozenset((row // 20).tolist()) for row in packed.tokens} for packed in (first, other)]
    assert shared[0] != shared[1]  # other documents share a row, not only the order differs


def test_documents_longer_than_a_row_and_no_documents_are_refused():
    with pytest.raises(InputError, match="one of 9 tokens"):
        pack([document(9, (1, 2))], row_length=8, seed=0)
    with pytest.raises(InputError, match="no document"):
        pack([], row_length=8, seed=0)


def test_a_document_whose_first_token_is_supervised_is_a_fault():
    with pytest.raises(ValueError, match="first token"):
        document(4, (0, 2))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_assistant_slots_match_their_definition(rows, step):
    expected = [
        [
            j + 2 + step < len(row) and row[j + 1] > 0 and len(set(row[j + 1 : j + 3 + step])) == 1
            for j in range(len(row))
        ]
        for row in rows
    ]
    assert tiny.assistant_slots(np.array(rows, np.int32), step).tolist() == expected


def test_no_slot_reaches_from_one_packed_document_into_the_next():
    documents = [document(4, (1, 4), base=10 * k) for k in range(4)]
    packed = pack(documents, row_length=8, seed=0)
    for step, per_document in ((0, 2), (1, 1), (2, 0)):
        slots = tiny.assistant_slots(packed.spans, step)
        assert slots.sum() == 4 * per_document
        rows, at = np.nonzero(slots)
        assert (packed.documents[rows, at] == packed.documents[rows, at + 2 + step]).all()


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no models/SmolLM2-135M-Instruct")
def test_smollm2_rows_begin_with_its_default_system_turn_and_supervise_the_reply():
    tokenizer = load_tokenizer(SMOLLM2)
    encoded = encode(tokenizer, Row(1, "1", messages=turns("Translate 'family' into Italian.", "Famiglia.")))
    assert tokenizer.decode(encoded.tokens.tolist()).startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert replies(tokenizer, encoded) == ["Famiglia.<|im_end|>"]


def test_tools_reach_the_template_and_their_results_are_not_supervised(tmp_path):
    tokenizer = chatml(TOOLS_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "one and one"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "7"},
        {"role": "assistant", "content": "it is two"},
    ]
    (row,), _ = read_rows(write(tmp_path / "rows.jsonl", [{"messages": messages, "tools": tools}]))
    encoded = encode(tokenizer, row)
    whole = [message | {"content": message["content"] or ""} for message in messages]
    text = tokenizer.apply_chat_template(whole, tools=tools, tokenize=False)
    assert tokenizer.decode(encoded.tokens.tolist()) + "\n" == text
    assert '"name": "add"' in text
    assert replies(tokenizer, encoded) == [
        'call {"name": "add", "arguments": {"a": 1}}<|im_end|>', "it is two<|im_end|>",
    ]  # fmt: skip


def test_tools_that_the_template_does_not_show_cost_their_row(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    rows = [
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "response": "a", "tools": [{"name": "add"}]},
        {"messages": [*turns("q"), {"role": "assistant", "content": "a", "tool_calls": [call]}]},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    _, report = encode_file(path, CHATML, max_length=200)
    assert report.dropped == {
        "'tools' that the chat template does not show": (2,), "'tool_calls' that the chat template does not show": (3,),
    }  # fmt: skip
    assert not encode_file(path, chatml(TOOLS_TEMPLATE), max_length=200)[1].dropped


def test_only_the_last_reply_is_supervised_on_demand(tmp_path):
    rows = [{"messages": [*turns("q", "one", "r", "two", "s", "three")]}, {"prompt": "q", "response": "a"}]
    path = write(tmp_path / "rows.jsonl", rows)
    (first, second), report = encode_file(path, CHATML, max_length=200, last_turn_only=True)
    assert replies(CHATML, first) == ["three<|im_end|>"]
    assert replies(CHATML, second) == ["a<|im_end|>"]
    assert "2 replies, 2 replies left out (rewritten in later turns, empty, or not the last)" in str(report)


def test_options_reach_the_template(tmp_path):
    """A target that thinks unless told not to: data must be prepared as it will be served."""
    template = TOOLS_TEMPLATE.replace(
        "assistant\n{% endif %}", "assistant\n{% if enable_thinking is false %}<none>{% endif %}{% endif %}"
    ).replace(
        "{{ m['role'] }}\n",
        "{{ m['role'] }}\n{% if m['role'] == 'assistant' and enable_thinking is false %}<none>{% endif %}",
    )
    path = write(tmp_path / "rows.jsonl", [{"prompt": "q", "response": "a"}])
    (plain,), _ = encode_file(path, chatml(template), max_length=200)
    (blunt,), _ = encode_file(path, chatml(template), max_length=200, options={"enable_thinking": False})
    assert "<none>" not in chatml(template).decode(plain.tokens.tolist())
    text = chatml(template).decode(blunt.tokens.tolist())
    assert text.count("<none>") == 1
    assert replies(chatml(template), blunt) == replies(chatml(template), plain) == ["a<|im_end|>"]


def test_options_of_the_template_reach_prompts():
    template = TOOLS_TEMPLATE.replace(
        "assistant\n{% endif %}", "assistant\n{% if enable_thinking is false %}<none>{% endif %}{% endif %}"
    )
    tokenizer, messages = chatml(template), [{"role": "user", "content": "q"}]
    for options, count in (({}, 0), ({"enable_thinking": False}, 1)):
        ids = encode_prompt(tokenizer, messages, "here", options=options)
        assert tokenizer.decode(list(ids)).count("<none>") == count


def test_arguments_of_tools_reach_the_template_as_objects_and_bad_ones_cost_their_row_only(tmp_path):
    def row(arguments: object) -> dict[str, object]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}

    lines = [
        row('{"a": 1}'),
        row({"a": 1}),
        row("{a"),
        {"messages": [*turns("q"), {"role": "assistant", "tool_calls": "x"}]},
    ]
    path = write(tmp_path / "rows.jsonl", lines)
    encoded, report = encode_file(path, chatml(TOOLS_TEMPLATE), max_length=200)
    assert len(encoded) == 2
    np.testing.assert_array_equal(encoded[0].tokens, encoded[1].tokens)
    assert report.read.dropped == {
        "arguments of a tool that are not JSON": (3,), "'tool_calls' that is not a list of objects": (4,),
    }  # fmt: skip
    # A template that adds texts to objects fails on the row, and on that alone.
    joins = TOOLS_TEMPLATE.replace("{{ call['function'] | tojson }}", "{{ 'a' + call['function']['arguments'] }}")
    plain = write(tmp_path / "plain.jsonl", [lines[1], {"prompt": "q", "response": "a"}])
    encoded, report = encode_file(plain, chatml(joins), max_length=200)
    assert len(encoded) == 1
    assert report.dropped == {"refused by the chat template": (1,)}
