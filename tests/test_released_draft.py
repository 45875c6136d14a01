"""The shipped draft on the real target: the text is plain decoding's, and enough of what it drafts is accepted.

A draft that is wired up wrongly leaves the text right, so only the acceptance shows it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.draft import Draft
from eagle3_jax.metrics import tau
from eagle3_jax.prompts import encode_prompt
from eagle3_jax.requests import Request
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.tree import TreeShape
from tests.tiny_decoding import answers

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "models" / "SmolLM2-135M-Instruct"
DRAFT = ROOT / "checkpoints" / "smollm2-135m-instruct-eagle3"
PROMPTS = (
    "A farmer has 15 sheep and buys 8 more. Then he sells 5. How many sheep does he have?",
    "Write a Python function that checks whether a number is prime.",
    "What are the benefits of drinking water?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Translate into French: good morning, how are you?",
    "Explain in two sentences why the sky is blue.",
    "List five ideas for a birthday party.",
    "Who wrote Romeo and Juliet, and when?",
)


needs_target = pytest.mark.skipif(not TARGET.exists(), reason="`make target` brings the model")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Target, Draft, list[Request], tuple[int, ...]]:
    """The target, the shipped draft, some requests and the target's end-of-sequence ids."""
    tokenizer = load_tokenizer(TARGET)
    target = load_target(TARGET)
    requests = [
        Request(encode_prompt(tokenizer, [{"role": "user", "content": text}], text), max_new_tokens=64)
        for text in PROMPTS
    ]
    return target, load_draft(DRAFT, target), requests, eos_ids(TARGET, tokenizer)


@pytest.mark.smollm2
@needs_target
@pytest.mark.parametrize(
    ("drafting", "accepted"),
    [({"draft_length": 4}, 189 / 98), ({"tree": TreeShape(9, 4, 3)}, 189 / 76)],
    ids=["chain", "tree"],
)
def test_the_shipped_draft_changes_nothing_and_is_accepted(smollm2, drafting: dict, accepted: float):
    target, draft, requests, eos = smollm2
    requests = requests[:3]
    plain = answers(target, None, requests, eos=eos)
    drafted = answers(target, draft, requests, **drafting, eos=eos)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    # What these weights gave when they were released; a change here is a change of the draft's wiring.
    found = tau([len(a.token_ids) for a in drafted], [a.verification_passes for a in drafted])
    assert found == pytest.approx(accepted, rel=0.01)


def variants(target: Target, draft: Draft) -> dict[str, Draft]:
    """The shipped draft, and ways to get it wrong."""
    config = draft.config
    d2t = jnp.flip(draft.vocab.d2t)
    theta = dataclasses.replace(config.rope, theta=123.0)
    noise = jax.random.normal(jax.random.key(0), draft.params.fc.shape, draft.params.fc.dtype)
    return {
        "as it is": draft,
        "flipped map": draft.replace(vocab=draft.vocab.replace(d2t=d2t)),
        "wrong theta": draft.replace(config=dataclasses.replace(config, rope=theta)),
        "wrong taps": draft.replace(config=dataclasses.replace(config, taps=(5, 10, 30))),
        "noise for a fusion": draft.replace(params=draft.params.replace(fc=noise)),
    }


@pytest.mark.full
@pytest.mark.smollm2
@needs_target
@pytest.mark.parametrize("drafting", [{"draft_length": 4}, {"tree": TreeShape(24, 6, 4)}], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["as it is", "flipped map", "wrong theta", "wrong taps", "noise for a fusion"])
def test_nothing_drafted_changes_what_smollm2_says(smollm2, name: str, drafting: dict):
    target, draft, requests, eos = smollm2
    plain = answers(target, None, requests, eos=eos, batch=8)
    found = answers(target, variants(target, draft)[name], requests, eos=eos, **drafting)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
