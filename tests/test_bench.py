"""What a comparison says of answers: forks, ratios over nothing, and what it was measured on."""

from __future__ import annotations

import dataclasses

from eagle3_jax.draft import Draft
from eagle3_jax.report import Method, Run, record, render
from eagle3_jax.requests import Answer
from eagle3_jax.runtime import Runtime

INFO = Runtime(platform="cpu", device="some processor", dtype="float32", precision="highest")


def answer(tokens: tuple[int, ...], passes: int, seconds: float) -> Answer:
    return Answer(
        index=0, token_ids=tokens, finish_reason="length", prompt_tokens=3, verification_passes=passes, accepted=(1,),
        logprobs=(), seconds=seconds, first_token_seconds=1.0,
    )  # fmt: skip


def run(found: list[Answer]) -> Run:
    return Run(found, sum(answer.seconds for answer in found))


def report(method: Method, answers: list[Answer], plain: list[Answer]) -> tuple[dict, list[str]]:
    entries = [
        record("t", one, 0.0, run(found), run(plain)) | dataclasses.asdict(INFO) | {"max_new_tokens": 5}
        for one, found in ((Method("plain"), plain), (method, answers))
    ]
    return entries[1], render(entries).splitlines()


def test_forks_and_speeds_are_those_of_the_answers(d0: Draft):
    plain = [answer((1, 2, 3, 4, 5), 4, 5.0), answer((1, 2, 3, 4, 5), 4, 5.0), answer((7, 8), 1, 2.0)]
    drafted = [answer((1, 2, 3, 4, 5), 2, 3.0), answer((1, 2, 9, 4, 5), 2, 3.0), answer((7,), 0, 1.0)]
    entry, lines = report(Method("eagle3", "d", d0, 2), drafted, plain)
    assert entry["forks"] == [{"prompt": 1, "token": 2}, {"prompt": 2, "token": 1}]
    assert entry["identical_to_plain"] == 1 / 3
    assert entry["tau"] == 8 / 4
    assert entry["tokens_per_second"] == 8 / 4
    assert entry["speedup"] == 2.0
    assert lines[0].startswith("some processor (cpu), float32, matmul precision highest, at most 5 new tokens")
    assert "| eagle3 d K=2 | 2.00x | 2.00 | 2.00x | - | 2.00 | 2.0 | 33.3% |" in lines


def test_a_ratio_over_nothing_is_no_number(d0: Draft):
    single = [answer((1,), 0, 1.0)]
    entry, lines = report(Method("eagle3", "d", d0, 2), single, single)
    assert [entry[name] for name in ("tau", "speedup", "tokens_per_second")] == [None, None, None]
    assert "| eagle3 d K=2 | - | - | - | - | - | - | 100.0% |" in lines
