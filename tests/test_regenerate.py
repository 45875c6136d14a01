"""`eagle3-jax data regenerate`: several turns, what ends a conversation, interruptions, tools; with a scripted target
for the rules and with the real engine once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle3_jax import cli
from eagle3_jax.checkpoint import load_target
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.prompts import read_conversation
from eagle3_jax.requests import Answer, Event, Request
from eagle3_jax.tokenizer import chat_ids, eos_ids, load_tokenizer
from eagle3_jax.training import regenerate as room
from eagle3_jax.training.data import encode_file
from tests import tiny, tiny_tokenizers

Said = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_target(num_hidden_layers=2, max_position_embeddings=128).save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.TOOLS_TEMPLATE, size=300).save_pretrained(folder)
    # Many tokens end an answer, so that a random model's answers end.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(0, 320, 6))}))
    return folder


@pytest.fixture(autouse=True)
def same_precision() -> Iterator[None]:
    """Commands set jax's precision, which must not leak into other tests."""
    before = jax.config.values["jax_default_matmul_precision"]
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def say(target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Said], list[str]]:
    """Replaces the target by a function from the prompt's text to an answer and how it ended; returns the prompts."""
    tokenizer = load_tokenizer(target)
    monkeypatch.setattr(room, "load_target", lambda *_, **__: None)

    def install(said: Said) -> list[str]:
        seen: list[str] = []

        def answer(_: Any, draft: Any, requests: list[Request], **options: Any) -> Iterator[Event]:
            assert draft is None
            assert 1 <= options["batch"] <= len(requests)
            # Answers end in any order.
            for index, request in reversed(list(enumerate(requests))):
                seen.append(tokenizer.decode(list(request.tokens)))
                text, reason = said(seen[-1])
                ids = tokenizer.encode(text + ("<|im_end|>" if reason == "stop" else ""), add_special_tokens=False)
                yield Event(index, ())
                yield Event(index, tuple(ids), Answer(index, tuple(ids), reason, len(request.tokens), 1, (), (), 1, 1))

        monkeypatch.setattr(room, "decode", answer)
        return seen

    return install


def counted(text: str) -> tuple[str, str]:
    """An answer that says which turn it is and repeats the question."""
    turns = text.split("<|im_start|>user\n")[1:]
    return f"{len(turns)} {turns[-1].split('<|im_end|>')[0]}", "stop"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main(["data", "regenerate", *map(str, arguments), "--cache-dir", ""])
    return code, capsys.readouterr().err


def spoken(row: dict[str, Any]) -> list[str]:
    """All texts of a record in order."""
    return [message["content"] for message in row["messages"]] + [row["response"]]


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": content} for k, content in enumerate(contents)]


def test_every_turn_is_answered_after_the_targets_own_answers(target, say, capsys, tmp_path):
    system = {"role": "system", "content": "be kind"}
    asked = write(
        tmp_path / "asked.jsonl",
        {"id": "a", "turns": ["red", "green", "blue"]},
        {"id": "b", "messages": [system, *messages("one", "FOREIGN", "two", "FOREIGN")], "source": "s"},
        {"id": "c", "prompt": "only"},
    )
    seen, out = say(counted), tmp_path / "out.jsonl"
    code, notes = run(capsys, asked, "--target", target, "--out", out, "--turns", "all", "--batch", 2)
    assert code == 0
    assert "3 conversations with 6 answers" in notes
    rows = read(out)
    assert spoken(rows["a"]) == ["red", "1 red", "green", "2 green", "blue", "3 blue"]
    assert spoken(rows["b"]) == ["be kind", "one", "1 one", "two", "2 two"]
    assert spoken(rows["c"]) == ["only", "1 only"]
    assert [row["finished"] for row in rows.values()] == [True] * 3
    assert rows["b"]["source"] == "s"
    assert rows["a"]["n_tokens"] > rows["c"]["n_tokens"]
    tokenizer = load_tokenizer(target)
    prompts = [chat_ids(tokenizer, rows["a"]["messages"][:n], add_generation_prompt=True) for n in (1, 3, 5)]
    assert {tokenizer.decode(ids) for ids in prompts} <= set(seen)
    assert not any("FOREIGN" in text for text in seen)
    # Training reads every answer as the target's own.
    encoded, report = encode_file(out, tokenizer, max_length=128)
    assert (report.replies, report.left_out) == (6, 0)
    for document, row in zip(encoded, rows.values()):
        texts = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        spans = [document.tokens[document.spans == k].tolist() for k in range(1, int(document.spans.max()) + 1)]
        assert [tokenizer.decode(ids) for ids in spans] == [f"{text}<|im_end|>" for text in [*texts, row["response"]]]


def test_one_turn_unless_more_are_asked_for(target, say, capsys, tmp_path):
    asked = write(tmp_path / "asked.jsonl", {"turns": ["red", "green", "blue"]})
    say(counted)
    for given, answers in (((), 1), (("--turns", 2), 2)):
        out = tmp_path / f"{answers}.jsonl"
        code, notes = run(capsys, asked, "--target", target, "--out", out, *given)
        assert (code, "conversations with" in notes) == (0, answers > 1)
        assert spoken(read(out)["0"]) == ["red", "1 red", "green", "2 green"][: 2 * answers]
    for bad in ("0", "-1", "some", "1.5"):
        code, notes = run(capsys, asked, "--target", target, "--out", tmp_path / "x", "--turns", bad)
        assert (code, "neither all nor a number of at least 1" in notes) == (2, True)


def test_an_interruption_leaves_whole_conversations_and_the_rest_is_asked_again(target, say, capsys, tmp_path):
    asked = write(tmp_path / "asked.jsonl", *({"id": n, "turns": [f"q{n}", f"r{n}"]} for n in range(5)))
    common = (asked, "--target", target, "--turns", "all", "--batch", 2, "--out")
    say(counted)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(capsys, *common, whole)[0] == 0

    def stop(text: str) -> tuple[str, str]:
        if "r2" in text:
            raise KeyboardInterrupt
        return counted(text)

    say(stop)
    assert run(capsys, *common, cut)[0] == 130
    before = read(cut)
    assert sorted(before) == ["3", "4"]  # those whose second answer had ended
    assert before == {name: row for name, row in read(whole).items() if name in before}
    cut.write_text(cut.read_text() + '{"id": "0", "messages": [{"role": "user"')  # a line that was being written
    seen = say(counted)
    code, notes = run(capsys, *common, cut)
    assert (code, "3 prompts to answer, 2 answered before" in notes) == (0, True)
    assert read(cut) == read(whole)
    assert not any("q3" in text or "q4" in text for text in seen)


@pytest.mark.parametrize(
    ("said", "row", "expected", "finished", "reason"),
    [
        (lambda text: (counted(text)[0], "length"), {"turns": ["red", "green"]}, ["red", "1 red"], False, "cut short"),
        (
            lambda text: (counted(text)[0], "context" if "green" in text else "stop"),
            {"turns": ["red", "green", "blue"]},
            ["red", "1 red", "green", "2 green"],
            False,
            "cut short",
        ),
        (counted, {"turns": ["red", "green " * 120, "blue"]}, ["red", "1 red"], True, "no room"),
        (
            lambda text: (" " if "green" in text else "1 red", "stop"),
            {"messages": [*messages("red", "x"), {"role": "system", "content": "s"}, *messages("green", "y", "blue")]},
            ["red", "1 red"],
            True,
            "an empty answer",
        ),
        (lambda text: ("", "stop"), {"turns": ["red", "green"]}, ["red", ""], True, "an empty answer"),
        (
            counted,
            {"messages": [*messages("red", "x"), {"role": "tool", "content": "t"}, *messages("green")]},
            ["red", "1 red"],
            True,
            "a result of another model's call",
        ),
    ],
    ids=["cut", "context in turn 2", "prompt of turn 2 too long", "empty", "empty at once", "result of a tool"],
)
def test_what_ends_a_conversation_early(target, say, capsys, tmp_path, said, row, expected, finished, reason):
    say(said)
    asked, out = write(tmp_path / "asked.jsonl", row, {"prompt": "beside"}), tmp_path / "out.jsonl"
    code, notes = run(capsys, asked, "--target", target, "--out", out, "--turns", "all")
    assert code == 0, notes
    found = read(out)["0"]
    assert (spoken(found), found["finished"]) == (expected, finished)
    assert "2 conversations with" in notes
    assert reason in notes.split("ended early")[1]
    if expected[-1]:
        _, report = encode_file(write(tmp_path / "row.jsonl", found), load_tokenizer(target), max_length=128)
        assert (report.replies, report.left_out) == (len(expected) // 2, 0)


def test_long_prompts_are_left_out_and_end_a_conversation(target, say, capsys, tmp_path):
    say(counted)
    asked = write(tmp_path / "asked.jsonl", {"turns": ["a", "b " * 20]}, {"turns": ["b " * 40, "a"]})
    out = tmp_path / "out.jsonl"
    code, notes = run(capsys, asked, "--target", target, "--out", out, "--turns", 2, "--max-prompt-tokens", 40)
    assert (code, "1 longer than 40 tokens left out" in notes) == (0, True)
    assert [spoken(row) for row in read(out).values()] == [["a", "1 a"]]


def test_tools_are_shown_to_the_target_and_kept_for_training(target, say, capsys, tmp_path):
    tools = [{"name": "add", "parameters": {}}]
    seen, out = say(counted), tmp_path / "out.jsonl"
    asked = write(tmp_path / "asked.jsonl", {"turns": ["red", "green"], "tools": tools}, {"turns": ["x", "y"]})
    assert run(capsys, asked, "--target", target, "--out", out, "--turns", "all")[0] == 0
    rows = read(out)
    assert (rows["0"]["tools"], "tools" in rows["1"]) == (tools, False)
    assert sum('"name": "add"' in text for text in seen) == 2
    tokenizer = load_tokenizer(target)
    (document, _), _ = encode_file(out, tokenizer, max_length=128)
    text = tokenizer.decode(document.tokens.tolist())
    assert any(text.startswith(prompt) for prompt in seen)
    assert '"name": "add"' in text


def test_what_cannot_be_asked_is_refused_before_the_target_is_loaded(target, say, capsys, tmp_path, monkeypatch):
    say(counted)
    monkeypatch.setattr(room, "load_target", None)
    template = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    other = tmp_path / "other"
    tiny.hf_target(num_hidden_layers=2).config.save_pretrained(other)
    tiny_tokenizers.chatml(template + tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(other)
    for row, folder, words in (
        ({"turns": ["red", "green"]}, other, "one turn"),
        ({"turns": ["red", " "]}, target, "some text in turn 2 of row 1"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, target, "a user's turn in row 1"),
        ({"turns": ["red " * 200]}, target, "leave room for an answer"),
    ):
        asked, out = write(tmp_path / "asked.jsonl", row), tmp_path / "out.jsonl"
        code, notes = run(capsys, asked, "--target", folder, "--out", out, "--turns", "all")
        assert (code, words in notes, out.exists()) == (2, True, False), notes


def test_more_devices_than_there_are_are_refused(target, say, capsys, tmp_path):
    say(counted)
    asked, count = write(tmp_path / "asked.jsonl", {"prompt": "red"}), jax.device_count()
    code, notes = run(capsys, asked, "--target", target, "--out", tmp_path / "out", "--tensor", count + 1)
    assert (code, f"--tensor of at most the {count} devices" in notes) == (2, True)


def test_questions_of_each_form():
    ask = lambda row, most=None: [
        [message["content"] for message in part] for part in room.questions(read_conversation(row, "row"), "row", most)
    ]
    assert ask({"prompt": "a"}) == [["a"]]
    assert ask({"turns": ["a", "b", "c"]}, 2) == [["a"], ["b"]]
    mixed = [{"role": "system", "content": "s"}, *messages("a", "x", "b"), *messages("c", "y")]
    assert ask({"messages": mixed}) == [["s", "a"], ["b"], ["c"]]
    with pytest.raises(InputError, match="roles system"):
        ask({"messages": mixed[:1]})


def test_the_engines_own_answers_follow_each_other(target, capsys, tmp_path):
    """Each recorded answer is what plain decoding says, by the row's seed, after all that came before."""
    asked = write(tmp_path / "asked.jsonl", *({"turns": [f"{a} one", "two", "red"]} for a in "abcdefgh"))
    out = tmp_path / "out.jsonl"
    common = ("--target", target, "--out", out, "--turns", "all", "--max-new-tokens", 24, "--temperature", 1)
    code, notes = run(capsys, asked, *common)
    assert code == 0, notes
    tokenizer, requests, expected = load_tokenizer(target), [], []
    for row in read(out).values():
        whole = [*row["messages"], {"role": "assistant", "content": row["response"]}]
        for index, message in enumerate(whole):
            if message["role"] == "assistant":
                ids = chat_ids(tokenizer, whole[:index], add_generation_prompt=True)
                requests.append(Request(tuple(ids), max_new_tokens=24, temperature=1.0, seed=int(row["id"])))
                expected.append(message["content"])
    assert len(requests) > 8  # some conversations went on
    ends = eos_ids(target, tokenizer)
    events = decode(load_target(target), None, requests, eos=ends)
    answers = {event.index: event.answer for event in events if event.answer is not None}
    for index, text in enumerate(expected):
        ids = answers[index].token_ids
        assert tokenizer.decode(list(ids[:-1] if ids[-1] in ends else ids), skip_special_tokens=True) == text
