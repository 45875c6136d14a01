"""Properties that hold for any models: decoding never changes the text, batches never change an answer.

`pytest -m property` runs them with many more examples, on the tiny models or on your own:

    pytest -m property --target DIR --draft DIR
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eagle3_jax.baselines import Lookup
from eagle3_jax.cache import commit, empty_cache
from eagle3_jax.draft import Draft
from eagle3_jax.drafters import Mixed
from eagle3_jax.requests import Request
from eagle3_jax.sampling import Sampling, draw, target_distribution
from eagle3_jax.target import Target
from eagle3_jax.tree import FixedTree, TreeShape
from eagle3_jax.verify import verify_greedy
from tests.tiny_decoding import answers as all_answers
from tests.tiny_decoding import random_tree

pytestmark = pytest.mark.property

# Few, since each shape compiles once; what is drawn between them does not.
SHAPES: list[dict[str, Any]] = [
    {"draft_length": 3},
    {"tree": TreeShape(8, 3, 3)},
    {"tree": FixedTree((0, 0, 1, 1))},
    {"tree": TreeShape(9, 2, 3), "lookup_nodes": 3},
    {"draft_length": 2, "lookup_nodes": 2},
    {"draft_length": 3, "alone": True},
]


@st.composite
def forms(draw: st.DrawFn) -> dict[str, Any]:
    """A fixed tree of any form."""
    return {"tree": FixedTree(tuple(draw(st.integers(0, node)) for node in range(draw(st.integers(1, 8)))))}


@st.composite
def cases(
    draw: st.DrawFn, vocab: int, shapes: st.SearchStrategy[dict[str, Any]]
) -> tuple[list[Request], dict[str, Any], int, tuple[int, ...], int, int]:
    """Requests, what is drafted, the batch, end-of-sequence ids, the kind of draft, and where a stop string lies."""
    rows = draw(st.integers(1, 4))
    sampled = draw(st.booleans())
    requests = [
        Request(
            tuple(draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=30))),
            max_new_tokens=draw(st.integers(1, 40)),
            temperature=draw(st.sampled_from([0.5, 1.0])) if sampled else 0.0,
            seed=draw(st.integers(0, 2**32 - 1)),
        )
        for _ in range(rows)
    ]
    eos = tuple(draw(st.lists(st.integers(0, vocab - 1), max_size=4)))
    return requests, draw(shapes), draw(st.sampled_from([1, 3])), eos, draw(st.integers(0, 2)), draw(st.integers(0, 30))


def spoilt(draft: Draft, kind: int) -> Draft:
    """The draft as it is, with a wrong vocabulary map, or with noise for a head."""
    if kind == 1:
        d2t = jnp.flip(draft.vocab.d2t)
        return draft.replace(vocab=draft.vocab.replace(d2t=d2t))
    if kind == 2:
        head = jax.random.normal(jax.random.key(0), draft.params.lm_head.shape, draft.params.lm_head.dtype)
        return draft.replace(params=draft.params.replace(lm_head=head))
    return draft


def check(models: tuple[Target, Draft, PreTrainedTokenizerFast], case: Any) -> None:
    target, draft, tokenizer = models
    requests, drafting, batch, eos, kind, stop = case
    if not requests[0].temperature:
        said = all_answers(target, None, requests[:1])[0].token_ids
        written = tokenizer.decode(said)
        if kind == 2:
            # An end that does come: a token of the first answer.
            eos = (*eos, said[len(said) // 2])
        elif stop + 3 <= len(written):
            # So does a stop string, mostly over two tokens.
            requests[0] = dataclasses.replace(requests[0], stop=(written[stop : stop + 3],))
    answers = partial(all_answers, tokenizer=tokenizer)
    drafter: Any = spoilt(draft, kind)
    if "lookup_nodes" in drafting:
        drafter = Mixed(drafter, Lookup())
    if "alone" in drafting:
        drafter, drafting = Lookup(), {"draft_length": drafting["draft_length"]}
    found = answers(target, drafter, requests, **drafting, batch=batch, eos=eos)
    alone = [answers(target, drafter, [request], **drafting, eos=eos)[0] for request in requests]
    assert [(a.token_ids, a.finish_reason, a.accepted) for a in found] == [
        (a.token_ids, a.finish_reason, a.accepted) for a in alone
    ]
    for request, answer in zip(requests, found):
        assert 1 <= len(answer.token_ids) <= request.max_new_tokens
        assert not set(answer.token_ids[:-1]) & set(eos)
        if answer.finish_reason == "stop":
            assert answer.token_ids[-1] in eos or answer.stopped_text is not None
    if requests[0].temperature == 0:
        ends = lambda found: [(a.token_ids, a.finish_reason, a.stopped_text) for a in found]
        assert ends(found) == ends(answers(target, None, requests, batch=batch, eos=eos))


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@settings(max_examples=8, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(data=st.data())
def test_no_draft_shape_batch_or_limit_changes_a_text(models, data: st.DataObject):
    check(models, data.draw(cases(models[0].config.vocab_size, st.sampled_from(SHAPES))))


@pytest.mark.full
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_no_draft_shape_batch_or_limit_changes_a_text_in_many_cases(models, data: st.DataObject):
    check(models, data.draw(cases(models[0].config.vocab_size, st.sampled_from(SHAPES))))


@pytest.mark.full
@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_no_tree_of_whatever_form_changes_a_text(models, data: st.DataObject):
    check(models, data.draw(cases(models[0].config.vocab_size, forms())))


class WithAndWithoutJit(chex.TestCase):
    """The device's routines keep their promises compiled and not compiled."""

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(range(4))
    def test_a_walk_visits_one_path(self, seed: int):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, 12, 5, 3)
        logits = jnp.asarray(rng.standard_normal((1, 12, 3)), jnp.float32)
        verdict = self.variant(verify_greedy, static_argnums=2)(tree, logits, 5)
        path, accepted = verdict.path[0].tolist(), int(verdict.accepted[0])
        chosen = logits[0].argmax(axis=-1)
        for place in range(accepted):
            assert tree.parents[0, path[place + 1]] == path[place]
            assert tree.tokens[0, path[place + 1]] == chosen[path[place]] == verdict.tokens[0, place]
        assert verdict.tokens[0, accepted] == chosen[path[accepted]]
        children = [n for n in range(1, 12) if tree.parents[0, n] == path[accepted]]
        assert all(tree.tokens[0, node] != chosen[path[accepted]] for node in children)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(range(4))
    def test_what_is_drawn_has_mass(self, seed: int):
        rng = np.random.default_rng(seed)
        logits = jnp.asarray(rng.normal(0, 3, (64, 1, 11)), jnp.float32)
        full = lambda value, dtype: jnp.full((64,), value, dtype)
        sampling = Sampling(
            full(0.8, jnp.float32), full(1 + seed, jnp.int32), full(0.9, jnp.float32), full(0, jnp.uint32)
        )
        mass = self.variant(lambda logits, sampling: target_distribution(logits, sampling, filters=True))(
            logits, sampling
        )
        token = self.variant(draw)(mass[:, 0], jnp.asarray(rng.random(64), jnp.float32))
        assert (mass[jnp.arange(64), 0, token] > 0).all()
        np.testing.assert_allclose(mass.sum(axis=-1), 1, atol=1e-6)
        assert ((mass > 0).sum(axis=-1) <= 1 + seed).all()

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(range(4))
    def test_a_commit_writes_the_path_and_nothing_else(self, seed: int):
        rng = np.random.default_rng(seed)
        cache = empty_cache(1, 2, 1, 8, 3)
        lengths = jnp.asarray(rng.integers(0, 5, 2), jnp.int32)
        old = jnp.asarray(rng.standard_normal((2, 1, 8, 3)), jnp.float32)
        cache = dataclasses.replace(cache, keys=(old.swapaxes(2, 3),), values=(old,), lengths=lengths)
        new = jnp.asarray(rng.standard_normal((2, 1, 4, 3)), jnp.float32)
        path = jnp.asarray(rng.integers(0, 4, (2, 3)), jnp.int32)
        count = jnp.asarray(rng.integers(0, 4, 2), jnp.int32)
        found = self.variant(commit)(cache, [new.swapaxes(2, 3)], [new], path, count)
        for row in range(2):
            expected = np.array(old[row])
            for place in range(int(count[row])):
                expected[:, int(lengths[row]) + place] = new[row, :, int(path[row, place])]
            np.testing.assert_array_equal(found.values[0][row], expected)
            np.testing.assert_array_equal(found.keys[0][row].swapaxes(1, 2), expected)
            assert found.lengths[row] == lengths[row] + count[row]
