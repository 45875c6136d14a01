"""Drafters that read the text only: what lookup finds, and that neither it nor a small model changes the text."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.baselines import Lookup, SmallModel, propose_lookup
from eagle3_jax.cache import History
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import tau
from eagle3_jax.requests import Request
from eagle3_jax.tree import TreeShape
from tests import tiny
from tests.tiny_decoding import TOY, answers, prompts, toy


def looked_up(text: list[int], longest: int, length: int) -> list[int]:
    """Prompt lookup in plain Python."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        for at in range(len(text) - 2, size - 2, -1):
            if text[at - size + 1 : at + 1] == text[-size:]:
                period = len(text) - at - 1
                return [text[at + 1 + step % period] for step in range(length)]
    return [text[-1]] * length


def test_lookup_continues_the_longest_then_the_latest_agreement():
    rng = np.random.default_rng(0)
    rows, size, places = 300, 24, 4
    lengths, counts = rng.integers(0, size - places, rows), rng.integers(1, places + 1, rows)
    texts = rng.integers(0, 4, (rows, size))
    known = [int(length + count) for length, count in zip(lengths, counts)]
    last = np.stack([np.resize(texts[row, lengths[row] : known[row]], places) for row in range(rows)])
    noise = rng.integers(0, 4, (rows, size))  # what lies beyond the known text must not matter
    history = History(
        tokens=jnp.asarray(np.where(np.arange(size) < lengths[:, None], texts, noise), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
    )
    proposal = propose_lookup(Lookup(), history, jnp.asarray(last, jnp.int32), jnp.asarray(counts, jnp.int32), 5)
    expected = [looked_up(texts[row, : known[row]].tolist(), 3, 5) for row in range(rows)]
    np.testing.assert_array_equal(proposal.tokens, expected)
    np.testing.assert_array_equal(proposal.cache.lengths, known)


def small(seed: int) -> SmallModel:
    return SmallModel(tiny.from_hf(tiny.hf_target(seed, scale=16.0, **(TOY | {"num_hidden_layers": 1}))))


REQUESTS = [Request(prompt, max_new_tokens=20) for prompt in prompts(5, 64, seed=3)]


@pytest.mark.parametrize("drafter", [Lookup(), small(4), SmallModel(toy())], ids=["lookup", "small", "itself"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_does_not_depend_on_who_drafts_or_on_the_batch(drafter: object, temperature: float):
    requests = [Request(r.tokens, r.max_new_tokens, temperature, seed=7) for r in REQUESTS]
    alone = [answers(toy(), drafter, [request], draft_length=3)[0] for request in requests]
    rows = lambda found: [(answer.token_ids, answer.accepted) for answer in found]
    assert rows(answers(toy(), drafter, requests, draft_length=3, batch=3)) == rows(alone)
    if temperature == 0:
        plain = answers(toy(), None, requests, batch=5)
        assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in plain]
    if isinstance(drafter, SmallModel) and drafter.model is toy():
        # Who drafts what the target would say is always right.
        assert all(count == 3 for answer in alone for count in answer.accepted)


def test_lookup_is_right_where_text_repeats():
    loop = Request((5, 9, 13) * 6, max_new_tokens=40)
    (found,) = answers(tiny.target(), Lookup(), [loop], draft_length=4)
    assert (tau([40], [found.verification_passes]) or 0) > 1.2


def test_who_cannot_draft_is_refused():
    other = SmallModel(tiny.from_hf(tiny.hf_target(1, **(TOY | {"vocab_size": 60}))))
    with pytest.raises(InputError, match="the target's vocabulary of 64 tokens; found 60 tokens"):
        answers(toy(), other, REQUESTS[:1], draft_length=2)
    with pytest.raises(InputError, match="an EAGLE-3 draft, which alone grows trees"):
        answers(toy(), Lookup(), REQUESTS[:1], tree=TreeShape(4, 2, 2))
