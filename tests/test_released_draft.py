"""The shipped draft on the real target: the text is plain decoding's, and enough of what it drafts is accepted.

A draft that is wired up wrongly leaves the text right, so only the acceptance shows it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.engine import Request, decode
from eagle3_jax.metrics import tau
from eagle3_jax.prompts import encode_prompt
from eagle3_jax.tokenizer import eos_ids, load_tokenizer

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "models" / "SmolLM2-135M-Instruct"
DRAFT = ROOT / "checkpoints" / "smollm2-135m-instruct-eagle3"
PROMPTS = (
    "A farmer has 15 sheep and buys 8 more. Then he sells 5. How many sheep does he have?",
    "Write a Python function that checks whether a number is prime.",
    "What are the benefits of drinking water?",
)


@pytest.mark.smollm2
@pytest.mark.skipif(not TARGET.exists(), reason="`make target` brings the model")
def test_the_shipped_draft_changes_nothing_and_is_accepted():
    tokenizer = load_tokenizer(TARGET)
    eos = eos_ids(TARGET, tokenizer)
    target = load_target(TARGET)
    draft = load_draft(DRAFT, target)
    requests = [
        Request(encode_prompt(tokenizer, [{"role": "user", "content": text}], text), max_new_tokens=64)
        for text in PROMPTS
    ]
    plain = [event.answer for event in decode(target, None, requests, eos=eos) if event.answer is not None]
    drafted = [
        event.answer for event in decode(target, draft, requests, draft_length=4, eos=eos) if event.answer is not None
    ]
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    accepted = tau([len(a.token_ids) for a in drafted], [a.verification_passes for a in drafted])
    # What these weights gave when they were released; a change here is a change of the draft's wiring.
    assert accepted == pytest.approx(189 / 98, rel=0.01)
