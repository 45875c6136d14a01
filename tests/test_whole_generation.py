"""A whole generation as one program: the text as round by round, no transfer on the way, no needless compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import generate as room
from eagle3_jax.baselines import Lookup
from eagle3_jax.drafters import Mixed, Plan
from eagle3_jax.engine import pad_eos
from eagle3_jax.generate import FINISH_REASONS, generate
from eagle3_jax.requests import Request, cache_length_for, sampling_of, structure_for
from eagle3_jax.tree import TreeShape
from tests.tiny_decoding import answers, prompts, toy, toy_draft

PLANS: dict[str, tuple[Any, Plan, dict[str, Any]]] = {
    "plain": (None, Plan(), {}),
    "chain": (toy_draft(), Plan(3), {"draft_length": 3}),
    "tree": (toy_draft(), Plan(3, TreeShape(8, 3, 3)), {"tree": TreeShape(8, 3, 3)}),
    "tree and lookup": (
        Mixed(toy_draft(), Lookup()), Plan(2, TreeShape(6, 2, 3), 3), {"tree": TreeShape(9, 2, 3), "lookup_nodes": 3},
    ),
}  # fmt: skip
EOS = tuple(range(3, 64, 8))


def arguments(
    requests: Sequence[Request], plan: Plan, *, bucket: int = 32, size: int = 64, eos: Sequence[int] = EOS
) -> tuple[tuple, dict]:
    """What `generate` takes after the models, on the device."""
    padded = np.zeros((len(requests), bucket), np.int32)
    for row, request in enumerate(requests):
        padded[row, : len(request.tokens)] = request.tokens
    column = lambda values: jnp.asarray(np.asarray(list(values), np.int32))
    traced = (
        jnp.asarray(padded), column(len(request.tokens) for request in requests),
        column(request.max_new_tokens for request in requests), sampling_of(requests), pad_eos(eos),
    )  # fmt: skip
    static = {
        "structure": structure_for(requests, plan, logprobs=True),
        "cache_length": cache_length_for(requests, toy().config, plan.depth),
        "size": size,
    }
    return traced, static


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("plain", 0.0),
        ("tree and lookup", 0.9),
        *(
            pytest.param(name, temperature, marks=pytest.mark.full)
            for name, temperature in (("plain", 0.9), ("chain", 0.0), ("chain", 0.9), ("tree", 0.0), ("tree", 0.9))
        ),
        ("tree and lookup", 0.0),
    ],
)
def test_one_call_is_a_whole_generation(name: str, temperature: float):
    draft, plan, drafting = PLANS[name]
    limits = [1, 40, 23, 64]
    requests = [
        Request(prompt, max_new_tokens=limit, temperature=temperature, seed=row)
        for row, (prompt, limit) in enumerate(zip(prompts(4, 64, seed=12), limits))
    ]
    traced, static = arguments(requests, plan)
    jax.block_until_ready((traced, toy(), draft))
    with jax.transfer_guard("disallow"):
        found = generate(toy(), draft, *traced, **static)
        jax.block_until_ready(found)
    expected = answers(toy(), draft, requests, **drafting, batch=4, eos=EOS, logprobs=True)
    for row, answer in enumerate(expected):
        count = int(found.count[row])
        assert tuple(found.tokens[row, :count].tolist()) == answer.token_ids
        assert not found.tokens[row, count:].any()
        np.testing.assert_allclose(found.logprobs[row, :count], answer.logprobs, atol=1e-4)
        assert FINISH_REASONS[int(found.reason[row])] == answer.finish_reason
        assert int(found.passes[row]) == answer.verification_passes
        assert found.accepted[row].tolist() == np.bincount(answer.accepted, minlength=plan.depth + 1).tolist()
    assert {answer.finish_reason for answer in expected} >= {"length", "stop"}


def test_beyond_the_drafts_reach_it_goes_on_in_plain_steps():
    config = dataclasses.replace(toy_draft().config, max_position_embeddings=20)
    short = toy_draft().replace(config=config)
    requests = [Request(prompt, max_new_tokens=30) for prompt in prompts(2, 64, seed=12, longest=9)]
    traced, static = arguments(requests, Plan(3), eos=())
    found = generate(toy(), short, *traced, **static)
    expected = answers(toy(), short, requests, draft_length=3, batch=2)
    for row, answer in enumerate(expected):
        assert tuple(found.tokens[row, : int(found.count[row])].tolist()) == answer.token_ids
        assert int(found.passes[row]) == answer.verification_passes
        assert found.accepted[row].tolist() == np.bincount(answer.accepted, minlength=4).tolist()
        assert sum(found.accepted[row].tolist()) < answer.verification_passes


def test_values_do_not_recompile():
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(room.generate.__wrapped__, n=2)
    run = jax.jit(traced, static_argnames=("structure", "cache_length", "size"))
    for greedy in (True, False):
        for turn in range(3):
            requests = [
                Request(
                    prompt, max_new_tokens=5 + turn, temperature=0.0 if greedy else 0.5 + turn, top_p=0.5 + turn / 10,
                    top_k=turn, seed=turn,
                )
                for prompt in prompts(3, 64, seed=turn)
            ]  # fmt: skip
            values, static = arguments(requests, Plan(2))
            static["cache_length"] = 128
            run(toy(), toy_draft(), *values, **static)
    with pytest.raises(AssertionError, match="traced > 2 times"):
        run(toy(), toy_draft(), *arguments(requests, Plan(3))[0], **(static | {"size": 32}))


def test_an_answer_fills_the_context_and_no_more():
    prompt = prompts(1, 64, seed=1)[0] * 64
    limit = toy().config.context_limit
    request = Request(prompt[: limit - 5], max_new_tokens=30)
    traced, static = arguments([request], Plan(3), bucket=64)
    found = generate(toy(), toy_draft(), *traced, **static)
    assert int(found.count[0]) == 5
    assert FINISH_REASONS[int(found.reason[0])] == "context"
