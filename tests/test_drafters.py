"""The interface over all drafters: fixed trees, lookup beside a draft, and texts that outgrow the drafter."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import chain
from eagle3_jax.baselines import Lookup, SmallModel
from eagle3_jax.draft import Draft, draft_logits
from eagle3_jax.drafters import Mixed, Plan, propose
from eagle3_jax.engine import prefill
from eagle3_jax.errors import InputError
from eagle3_jax.generate import Structure
from eagle3_jax.requests import Answer, Request, plan_for, warn_beyond
from eagle3_jax.tree import FixedTree, TreeShape, graft
from eagle3_jax.verify import verify_greedy
from tests import tiny
from tests.tiny_decoding import NO_EOS, TOY, answers, install_oracle, oracle, prompts, random_tree, toy, toy_draft

FORM = FixedTree((0, 0, 0, 1, 1, 2, 4, 4, 6))
REQUESTS = [Request(prompt, max_new_tokens=24) for prompt in prompts(5, 64, seed=6)]
texts = lambda found: [answer.token_ids for answer in found]


def proposed(plan: Plan, prompt: tuple[int, ...], drafter: Any) -> Any:
    """What is drafted after a prompt and its first decided token, and that state."""
    structure = Structure(plan=plan)
    state = prefill(toy(), drafter, Request(prompt), NO_EOS, structure=structure, cache_length=128)
    drafted = propose(drafter, state.draft_cache, state.taps, state.tokens, state.count, state.root, plan, None, None)
    return drafted, state


def choices_after(path: list[int], state: Any) -> list[int]:
    """The draft's tokens after a forced path, best first."""
    carry, cache = chain.catch_up(toy_draft(), state.draft_cache, state.taps, state.tokens, state.count)
    out = carry[:, :1]
    past = [chain.Segment(cache.keys[0], cache.values[0], jnp.arange(128)[None, None] < cache.lengths[:, None, None])]
    for step, token in enumerate(path):
        seen, positions = jnp.ones((1, 1, 1), bool), cache.lengths[:, None] + step
        made = draft_step(toy_draft(), out, jnp.asarray([[token]], jnp.int32), positions, seen, past)
        past.append(chain.Segment(made.keys, made.values, seen))
        out = made.carry
    order = np.argsort(-np.asarray(draft_logits(toy_draft(), out)[0, 0]), kind="stable")
    return np.asarray(toy_draft().vocab.d2t)[order].tolist()


draft_step = jax.jit(chain.draft_step)


@pytest.mark.parametrize("shape", [FORM, TreeShape(30, 4, 3)], ids=["fixed", "dynamic"])
def test_a_tree_holds_the_drafts_choices_after_each_path(shape: FixedTree | TreeShape):
    """Every node against the chain that is forced down the path to it: masks, positions and features of all levels."""
    drafted, state = proposed(Plan(shape.depth, shape), prompts(1, 64, seed=8)[0], toy_draft())
    tokens, parents, ranks = (
        values[0].tolist() for values in (drafted.tree.tokens, drafted.tree.parents, drafted.ranks)
    )
    deepest = 0
    for node in range(1, shape.nodes):
        path, parent = [], parents[node]
        while parent:
            path.append(tokens[parent])
            parent = parents[parent]
        assert tokens[node] == choices_after(path[::-1], state)[ranks[node]], node
        deepest = max(deepest, len(path) + 1)
        assert drafted.tree.depths[0, node] == len(path) + 1
    assert deepest == shape.depth


def test_a_fixed_trees_form_follows_from_its_parents():
    drafted, _ = proposed(Plan(FORM.depth, FORM), prompts(1, 64, seed=8)[0], toy_draft())
    np.testing.assert_array_equal(drafted.tree.parents[0], (0, *FORM.parents))
    np.testing.assert_array_equal(drafted.tree.depths[0], FORM.depths)
    np.testing.assert_array_equal(drafted.ranks[0], FORM.ranks)
    assert FORM.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
    assert FORM.ranks == (0, 0, 1, 2, 0, 1, 0, 0, 1, 0)
    assert (FORM.nodes, FORM.depth, FORM.top_k, FORM.width) == (10, 3, 3, 2)


@pytest.mark.parametrize(
    ("drafter", "drafting"),
    [
        (toy_draft(), {"tree": FORM}),
        (Mixed(toy_draft(), Lookup()), {"tree": FORM, "lookup_nodes": 2}),
        (Mixed(toy_draft(), Lookup()), {"tree": TreeShape(13, 3, 3), "lookup_nodes": 5}),
        (Mixed(toy_draft(), Lookup()), {"draft_length": 2, "lookup_nodes": 4}),
    ],
    ids=["fixed", "fixed and lookup", "tree and lookup", "chain and lookup"],
)
def test_none_of_them_changes_the_text(drafter: Any, drafting: dict[str, Any]):
    plain = texts(answers(toy(), None, REQUESTS, batch=5))
    alone = answers(toy(), drafter, REQUESTS, **drafting)
    assert texts(alone) == plain
    together = answers(toy(), drafter, REQUESTS, **drafting, batch=3)
    assert [(a.token_ids, a.accepted) for a in together] == [(a.token_ids, a.accepted) for a in alone]


def test_a_chain_is_the_fixed_tree_of_one_child_a_level():
    found = answers(toy(), toy_draft(), REQUESTS, tree=FixedTree((0, 1, 2)))
    expected = answers(toy(), toy_draft(), REQUESTS, draft_length=3)
    assert [(a.token_ids, a.accepted) for a in found] == [(a.token_ids, a.accepted) for a in expected]


@pytest.mark.parametrize("seed", range(20))
def test_a_grafted_branch_adds_its_path_and_nothing_else(seed: int):
    """Walks of the grafted tree go as far as the better of the two would."""
    rng = np.random.default_rng(seed)
    tree, length = random_tree(rng, 7, 4, 3), 5
    branch = rng.integers(0, 3, length)
    ranks = jnp.asarray([[tree.parents[0, 1:n].tolist().count(int(tree.parents[0, n])) for n in range(7)]], jnp.int32)
    both, new_ranks = graft(tree, ranks, jnp.asarray(branch[None], jnp.int32))
    parents, tokens = both.parents[0].tolist(), both.tokens[0].tolist()

    def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
        """The paths from the root to every node that hangs from it."""
        at = {0: ()}
        for node in range(1, len(tokens)):
            if parents[node] != node:
                at[node] = (*at[parents[node]], tokens[node])
        return set(at.values())

    own = paths(tree.tokens[0].tolist(), tree.parents[0].tolist())
    assert paths(tokens, parents) == own | {tuple(branch[:n].tolist()) for n in range(length + 1)}
    for node in range(7, 7 + length):
        if parents[node] != node:
            assert both.depths[0, node] == both.depths[0, parents[node]] + 1
            assert new_ranks[0, node] == parents[1:node].count(parents[node])
    # The target that agrees with the branch follows it to its end.
    choices = np.full(7 + length, 9)
    walked, at = 0, 0
    for token in branch:
        children = [n for n in range(1, 7 + length) if parents[n] == at and n != at and tokens[n] == token]
        choices[at] = token
        at, walked = children[0], walked + 1
    verdict = verify_greedy(both, jax.nn.one_hot(jnp.asarray(choices[None]), 10), 7)
    assert int(verdict.accepted[0]) == walked == length


def test_lookup_beside_a_draft_is_accepted_where_the_text_repeats(monkeypatch: pytest.MonkeyPatch):
    """The draft is never right; all that is accepted was looked up, and as much of it as by lookup alone."""
    install_oracle(monkeypatch)
    prompt = (5, 9, 13) * 4
    (plain,) = answers(toy(), None, [Request(prompt, max_new_tokens=20)])
    # The text stood there before, so lookup finds what follows.
    request = Request((*prompt, *plain.token_ids, *prompt)[-44:], max_new_tokens=16)
    (text,) = answers(toy(), None, [request])
    wrong = oracle(toy_draft(), request.tokens, [(token + 1) % 64 for token in text.token_ids])
    alone = answers(toy(), wrong, [request], draft_length=1)[0]
    looked = answers(toy(), Lookup(), [request], draft_length=4)[0]
    both = answers(toy(), Mixed(wrong, Lookup()), [request], draft_length=1, lookup_nodes=4)[0]
    assert alone.token_ids == looked.token_ids == both.token_ids == text.token_ids
    assert set(alone.accepted) == {0}
    assert both.accepted == looked.accepted
    assert sum(looked.accepted) > 0


def short(reach: int) -> Draft:
    draft = toy_draft()
    return draft.replace(config=dataclasses.replace(draft.config, max_position_embeddings=reach))


def check_reach(prompt: tuple[int, ...], answer: Answer, width: int, reach: int) -> None:
    """Rounds draft while the last of W drafts lies within reach, and from there on every pass decides one token."""
    lengths = len(prompt) + np.cumsum([0, *(count + 1 for count in answer.accepted)])
    assert (lengths[:-1] + width <= reach).all()
    assert lengths[-1] + width > reach
    rest = len(answer.token_ids) - 1 - (lengths[-1] - len(prompt))
    assert answer.verification_passes == len(answer.accepted) + rest
    assert rest > 5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafting", [{"draft_length": 3}, {"tree": TreeShape(8, 3, 3)}], ids=["chain", "tree"])
def test_beyond_its_reach_a_drafter_is_not_asked(drafting: dict[str, Any], temperature: float):
    prompt, reach = prompts(1, 64, seed=4, longest=9)[0], 32
    request = Request(prompt, max_new_tokens=50, temperature=temperature, seed=3)
    near = answers(toy(), short(reach), [request], **drafting)[0]
    check_reach(prompt, near, 3, reach)
    if temperature == 0:
        assert near.token_ids == answers(toy(), None, [request])[0].token_ids
    # From there on it is what plain decoding says with the same randomness, which goes by position.
    drafted = 1 + sum(count + 1 for count in near.accepted)
    grown = dataclasses.replace(
        request, tokens=prompt + near.token_ids[:drafted], max_new_tokens=request.max_new_tokens - drafted
    )
    assert answers(toy(), None, [grown])[0].token_ids == near.token_ids[drafted:]
    # A row that is beyond does not keep another one from drafting, nor is it changed by it.
    other = Request(prompts(1, 64, seed=9, longest=5)[0], max_new_tokens=40, temperature=temperature, seed=5)
    alone = answers(toy(), short(reach), [other], **drafting)[0]
    both = answers(toy(), short(reach), [request, other], **drafting, batch=2)
    assert texts(both) == [near.token_ids, alone.token_ids]
    assert [a.accepted for a in both] == [near.accepted, alone.accepted]
    assert [a.verification_passes for a in both] == [near.verification_passes, alone.verification_passes]


def test_up_to_its_reach_a_drafter_is_believed(monkeypatch: pytest.MonkeyPatch):
    install_oracle(monkeypatch)
    prompt, reach = prompts(1, 64, seed=4, longest=9)[0], 32
    request = Request(prompt, max_new_tokens=50)
    text = answers(toy(), None, [request])[0].token_ids
    found = answers(toy(), oracle(short(reach), prompt, text), [request], draft_length=3)[0]
    assert found.token_ids == text
    assert set(found.accepted) == {3}
    check_reach(prompt, found, 3, reach)


def test_a_small_model_of_a_shorter_context_drafts_within_it():
    small = SmallModel(tiny.from_hf(tiny.hf_target(1, **(TOY | {"max_position_embeddings": 24}))))
    plain = texts(answers(toy(), None, REQUESTS))
    assert texts(answers(toy(), small, REQUESTS, draft_length=2)) == plain


def test_texts_that_outgrow_the_draft_are_announced_once(caplog: pytest.LogCaptureFixture):
    long = [Request((1, 2), max_new_tokens=60), Request((1, 2, 3), max_new_tokens=40)]
    with caplog.at_level(logging.WARNING, logger="eagle3_jax"):
        warn_beyond(short(40), long, toy().config)
        warn_beyond(short(512), long, toy().config)
        warn_beyond(None, long, toy().config)
        warn_beyond(Mixed(short(40), Lookup()), long, toy().config)
    assert [record.getMessage() for record in caplog.records] == [
        "up to 62 tokens of prompt and answer, but the draft was made for 40: the text stays right; beyond them it is "
        "decoded in plain steps"
    ] * 2


@pytest.mark.parametrize(
    ("drafter", "drafting", "told"),
    [
        (Mixed(toy_draft(), Lookup()), {"tree": TreeShape(4, 2, 2), "lookup_nodes": 3}, "more tree nodes than the 3"),
        (tiny.draft(tiny.target()), {"draft_length": 2}, "vocabulary of 64 tokens; found 320"),
        (toy_draft(), {"tree": FixedTree((0, 2))}, "as parent of node 2 a node before it, from 0 .* to 1; found 2"),
        (toy_draft(), {"tree": FixedTree(())}, "a tree of at least one node"),
        (toy_draft(), {"tree": FixedTree((0,) * 41)}, "at most 40 children each .*; found 41 children"),
        (toy_draft(), {"draft_length": 2, "lookup_nodes": 2}, "found lookup_nodes 2 and a Draft"),
        (Mixed(toy_draft(), Lookup()), {"draft_length": 2}, "found lookup_nodes 0 and a Mixed"),
        (Mixed(toy_draft(), Lookup()), {"draft_length": 2, "lookup_nodes": -1}, "lookup_nodes of at least 0"),
    ],
)
def test_what_cannot_be_drafted_is_refused(drafter: Any, drafting: dict[str, Any], told: str):
    with pytest.raises(InputError, match=told):
        plan_for(toy().config, drafter, **drafting)


def test_a_plan_that_contradicts_itself_is_none():
    with pytest.raises(ValueError, match="a tree of 3 levels in a plan of draft_length 0"):
        Plan(0, TreeShape(8, 3, 3))
    with pytest.raises(ValueError, match="lookup_nodes 2 with a Draft"):
        proposed(Plan(2, None, 2), (1, 2), toy_draft())
