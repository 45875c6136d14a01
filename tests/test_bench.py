"""What a comparison says of answers: forks, ratios over nothing, and what it was measured on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle3_jax import bench
from eagle3_jax.draft import Draft
from eagle3_jax.engine import decode
from eagle3_jax.report import Method, Run, record, render
from eagle3_jax.requests import Answer, Request
from eagle3_jax.runtime import Runtime
from tests.tiny_decoding import prompts, toy, toy_draft

INFO = Runtime(platform="cpu", device="some processor", dtype="float32", precision="highest")


def answer(tokens: tuple[int, ...], passes: int, seconds: float) -> Answer:
    return Answer(
        index=0, token_ids=tokens, finish_reason="length", prompt_tokens=3, verification_passes=passes, accepted=(1,),
        logprobs=(), seconds=seconds, first_token_seconds=1.0,
    )  # fmt: skip


def run(found: list[Answer]) -> Run:
    return Run(found, sum(answer.seconds for answer in found))


def report(plain: list[Answer], *others: tuple[Method, list[Answer]]) -> tuple[dict, list[str]]:
    """The record of the first of the others, and the lines of the report."""
    entries = [
        record("t", one, 0.0, run(found), run(plain)) | dataclasses.asdict(INFO) | {"max_new_tokens": 5}
        for one, found in ((Method("plain"), plain), *others)
    ]
    return entries[1], render(entries).splitlines()


def test_forks_and_speeds_are_those_of_the_answers(d0: Draft):
    plain = [answer((1, 2, 3, 4, 5), 4, 5.0), answer((1, 2, 3, 4, 5), 4, 5.0), answer((7, 8), 1, 2.0)]
    drafted = [answer((1, 2, 3, 4, 5), 2, 3.0), answer((1, 2, 9, 4, 5), 2, 3.0), answer((7,), 0, 1.0)]
    entry, lines = report(plain, (Method("eagle3", "d", d0, 2), drafted))
    assert entry["forks"] == [{"prompt": 1, "token": 2}, {"prompt": 2, "token": 1}]
    assert entry["identical_to_plain"] == 1 / 3
    assert entry["tau"] == 8 / 4
    assert entry["tokens_per_second"] == 8 / 4
    assert entry["speedup"] == 2.0
    assert lines[0].startswith("some processor (cpu), float32, matmul precision highest, at most 5 new tokens")
    assert "| eagle3 d K=2 | 2.00x | 2.00 | 2.00x | - | 2.00 | 2.0 | 33.3% |" in lines


def test_a_ratio_over_nothing_is_no_number(d0: Draft):
    single = [answer((1,), 0, 1.0)]
    entry, lines = report(single, (Method("eagle3", "d", d0, 2), single))
    assert [entry[name] for name in ("tau", "speedup", "tokens_per_second")] == [None, None, None]
    assert "| eagle3 d K=2 | - | - | - | - | - | - | 100.0% |" in lines


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_slower_and_what_is_fastest_are_named(d0: Draft, turned: bool):
    plain = [answer((1, 2, 3, 4, 5), 4, 5.0)]
    fast = Method("eagle3", "d", d0, 2), [answer((1, 2, 3, 4, 5), 2, 3.0)]
    slow = Method("eagle3", "d", d0, 4), [answer((1, 2, 3, 4, 5), 2, 9.0)]
    _, lines = report(plain, *([slow, fast] if turned else [fast, slow]))
    assert "Best of 2 settings of d: eagle3 d K=2, 2.00x." in lines
    assert [line.split("|")[1:3] for line in lines if "(slower)" in line] == [[" eagle3 d K=4 (slower) ", " 0.50x "]]


@pytest.fixture
def compiled_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """How many programs had been compiled at the start of each of bench's calls of `decode`, and now."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    before: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        before.append(len(compiled))
        return decode(*arguments, **options)

    monkeypatch.setattr(bench, "decode", noted)
    return lambda: [*before, len(compiled)]


@pytest.mark.parametrize("batch", [1, 2])
def test_nothing_is_compiled_while_the_clock_runs(compiled_before: Callable[[], list[int]], batch: int):
    method = Method("eagle3", "d", toy_draft(), 3 - batch)
    requests = [Request(prompt, max_new_tokens=9) for prompt in prompts(3, 64, seed=21, longest=40)]
    found = bench.Ours(toy(), method, ())(requests, batch)
    assert [len(one.token_ids) for one in found.answers] == [9, 9, 9]
    # A warm-up, which compiles, and the run.
    start, run_, end = compiled_before()
    assert start < run_ == end


def test_programs_that_were_dropped_are_warmed_up_again(
    compiled_before: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(bench, "drop_programs", lambda: not jax.clear_caches())
    methods = [Method("plain"), Method("eagle3", "d", toy_draft(), 2)]
    records = bench.run_bench(
        toy(), tmp_path, methods, {"t": prompts(2, 64, seed=3)}, temperatures=[1.0], max_new_tokens=6, eos=(),
        out=tmp_path / "out", info=INFO,
    )  # fmt: skip
    assert [record["new_tokens"] for record in records] == [12, 12]
    counts = compiled_before()
    # For two prompts and two methods a warm-up, which compiles, and a run, which does not.
    assert len(counts) == 9
    assert all(counts[i] < counts[i + 1] == counts[i + 2] for i in range(0, 8, 2))
