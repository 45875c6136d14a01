"""The dynamic tree: against the algorithm in plain Python, node for node, ties included; its mask and positions against
plain passes over its paths; and decoding with it, which may not change the text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import tree as room
from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import commit, empty_cache
from eagle3_jax.draft import Draft, DraftOutput
from eagle3_jax.drafters import Plan
from eagle3_jax.engine import prefill
from eagle3_jax.errors import InputError
from eagle3_jax.generate import Structure
from eagle3_jax.metrics import tau
from eagle3_jax.requests import Request
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.tree import TreeShape, ancestor_mask, propose_tree
from eagle3_jax.verify import Tree
from tests import tiny
from tests.tiny_decoding import NO_EOS, answers, prompts, random_tree, toy, toy_draft

TABLES, STATES = 200, 64
SHAPES = [TreeShape(4, 3, 1), TreeShape(9, 4, 3), TreeShape(24, 6, 4), TreeShape(60, 8, 10), TreeShape(5, 1, 6)]


def follow(state: Any, token: Any) -> Any:
    """The state of a node, from its parent's and its token: what the pretended draft knows of a path."""
    return (state * 31 + token * 7 + 3) % STATES


def reference(each: np.ndarray, d2t: np.ndarray, start: int, root: int, shape: TreeShape) -> list[tuple]:
    """The algorithm by its description, from log-probabilities [states, C]: (token, parent's place, depth, rank) of
    each kept node, root first."""
    k = shape.top_k
    scores: list[np.float32] = []
    states: list[int] = []
    nodes: list[tuple[int, int, int, int]] = []  # token, parent's flat index, depth, rank

    def children(parent: int, state: int, score: np.float32, depth: int) -> list[int]:
        order = sorted(range(each.shape[1]), key=lambda token: (-each[state, token], token))[:k]
        for rank, token in enumerate(order):
            nodes.append((int(d2t[token]), parent, depth, rank))
            scores.append(score + each[state, token])
            states.append(follow(state, int(d2t[token])))
        return list(range(len(nodes) - k, len(nodes)))

    beam = children(-1, start, np.float32(0), 1)
    for depth in range(2, shape.depth + 1):
        fresh = [child for node in beam for child in children(node, states[node], scores[node], depth)]
        beam = sorted(fresh, key=lambda node: (-scores[node], node))[:k]
    chosen = sorted(sorted(range(len(nodes)), key=lambda node: (-scores[node], node))[: shape.nodes - 1])
    place = {flat: index + 1 for index, flat in enumerate(chosen)} | {-1: 0}
    kept = [(nodes[flat][0], place[nodes[flat][1]], nodes[flat][2], nodes[flat][3]) for flat in chosen]
    return [(root, 0, 0, 0), *kept]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_tree_is_that_of_the_algorithm(monkeypatch: pytest.MonkeyPatch, d0: Draft, shape: TreeShape):
    rng = np.random.default_rng(shape.nodes)
    vocab, d2t = d0.config.draft_vocab_size, np.asarray(d0.vocab.d2t)
    # Few distinct values, so that many scores tie; in a third of the tables one token takes (nearly) all.
    tables = rng.integers(0, 3, (TABLES, STATES, vocab)).astype(np.float32)
    tables[::3, :, 5] += 200
    starts, roots = rng.integers(0, STATES, TABLES), rng.integers(0, 320, TABLES)

    def catch_up(draft, cache, taps, tokens, count):
        return taps, cache

    def draft_step(draft, carry, tokens, positions, mask, past):
        state = follow(carry.astype(jnp.int32), tokens[..., None])
        key = jnp.zeros((carry.shape[0], 2, 16, carry.shape[1]))
        return DraftOutput(carry=state.astype(jnp.float32), keys=key, values=key.swapaxes(2, 3))

    values = jnp.asarray(tables)
    each = np.asarray(jax.nn.log_softmax(values))
    monkeypatch.setattr(room, "catch_up", catch_up)
    monkeypatch.setattr(room, "draft_step", draft_step)
    monkeypatch.setattr(
        room, "draft_logits", lambda draft, carry: values[jnp.arange(TABLES)[:, None], carry[..., 0].astype(jnp.int32)]
    )
    grow = jax.jit(lambda cache, taps, root: propose_tree(
        d0, cache, taps, jnp.zeros((TABLES, 1), jnp.int32), jnp.ones(TABLES, jnp.int32), root, shape
    ))  # fmt: skip
    cache = empty_cache(1, TABLES, 2, 4, 16)
    tree, ranks, _ = grow(cache, jnp.asarray(starts, jnp.float32)[:, None, None], jnp.asarray(roots, jnp.int32))
    for row in range(TABLES):
        found = zip(*(np.asarray(part[row]).tolist() for part in (tree.tokens, tree.parents, tree.depths, ranks)))
        assert list(found) == reference(each[row], d2t, int(starts[row]), int(roots[row]), shape), row


def path_to(tree: Tree, node: int) -> list[int]:
    """Nodes from the root to a node."""
    path = [node]
    while path[-1]:
        path.append(int(tree.parents[0, path[-1]]))
    return path[::-1]


@pytest.mark.parametrize("seed", range(4))
def test_every_node_is_read_as_the_end_of_its_own_path(t0: Target, seed: int):
    """As a round does it, over the cache; and after a path of one tree was kept, with another tree."""
    rng, size = np.random.default_rng(seed), 64
    text = rng.integers(0, 320, 9).tolist()
    run = jax.jit(target_forward, static_argnames=("taps",))
    causal = jnp.tril(jnp.ones((size, size), bool))[None]
    cache = prefill(t0, None, Request(tuple(text)), NO_EOS, structure=Structure(), cache_length=size).target_cache
    for _ in range(2):
        tree = random_tree(rng, 24, 6, 320)
        over_cache, _ = causal_mask(cache.lengths, 24, size)
        positions = cache.lengths[:, None] + tree.depths
        out = run(t0, tree.tokens, positions, ancestor_mask(tree, 6), cache=cache, cache_mask=over_cache)
        whole = np.asarray(target_logits(t0, out.hidden))[0]
        for node in range(24):
            alone = [*text, *tree.tokens[0, np.asarray(path_to(tree, node))].tolist()]
            padded = jnp.asarray([alone + [0] * (size - len(alone))], jnp.int32)
            plain = run(t0, padded, jnp.arange(size, dtype=jnp.int32)[None], causal).hidden
            expected = np.asarray(target_logits(t0, plain))[0, len(alone) - 1]
            np.testing.assert_allclose(whole[node], expected, atol=1e-5 * np.abs(expected).max())
        kept = path_to(tree, int(np.argmax(tree.depths[0])))
        text += tree.tokens[0, np.asarray(kept)].tolist()
        cache = commit(cache, out.keys, out.values, jnp.asarray([kept], jnp.int32), jnp.asarray([len(kept)], jnp.int32))


@pytest.mark.parametrize(("shape", "batch"), [(TreeShape(8, 3, 3), 3), (TreeShape(24, 6, 4), 1)], ids=str)
@pytest.mark.parametrize("name", ["d0", "wrong_taps"])
def test_no_tree_changes_the_text(t0: Target, shape: TreeShape, batch: int, name: str):
    requests = [Request(prompt, max_new_tokens=24) for prompt in prompts(4, 320, seed=2)]
    plain = [answer.token_ids for answer in answers(t0, None, requests, batch=batch)]
    drafted = answers(t0, tiny.bad_drafts(t0)[name], requests, tree=shape, batch=batch)
    assert [answer.token_ids for answer in drafted] == plain


@pytest.mark.parametrize("size", [96, 320])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_nodes_hold_ids_of_the_target(t0: Target, size: int, top_k: int):
    """Whatever the draft's vocabulary: what it reads and what is verified are the target's ids, not its own."""
    draft = tiny.draft(t0, size=size)
    plan = Plan(3, TreeShape(1 + 2 * top_k, 3, top_k))
    state = prefill(t0, draft, Request((3, 5, 7)), NO_EOS, structure=Structure(plan=plan), cache_length=128)
    tree, _, _ = jax.jit(propose_tree, static_argnames=("shape",))(
        draft, state.draft_cache, state.taps, state.tokens, state.count, state.root, shape=plan.tree
    )
    assert set(tree.tokens[0, 1:].tolist()) <= set(np.asarray(draft.vocab.d2t).tolist())
    assert int(tree.tokens[0, 0]) == int(state.root[0])


def test_a_tree_of_one_child_a_level_is_the_greedy_chain():
    requests = [Request(prompt, max_new_tokens=24) for prompt in prompts(4, 64, seed=2)]
    chain = answers(toy(), toy_draft(), requests, draft_length=4)
    tree = answers(toy(), toy_draft(), requests, tree=TreeShape(5, 4, 1))
    strip = lambda found: [(answer.token_ids, answer.accepted) for answer in found]
    assert strip(tree) == strip(chain)


def test_the_right_path_is_found_and_kept():
    """A draft that copies the target but for its head's noise is accepted beyond what a chain of it is."""
    requests = [Request(prompt, max_new_tokens=30) for prompt in prompts(6, 64, seed=5)]
    of = lambda found: tau([len(a.token_ids) for a in found], [a.verification_passes for a in found])
    chain = answers(toy(), toy_draft(), requests, draft_length=3)
    wide = answers(toy(), toy_draft(), requests, tree=TreeShape(40, 3, 8))
    assert of(wide) > of(chain) >= 1
    plain = [answer.token_ids for answer in answers(toy(), None, requests)]
    assert [answer.token_ids for answer in wide] == [answer.token_ids for answer in chain] == plain


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (TreeShape(1, 2, 2), "tree nodes from 2 to 7; found 1"),
        (TreeShape(8, 2, 2), "tree nodes from 2 to 7; found 8"),
        (TreeShape(4, 0, 2), "tree depth from 1; found 0"),
        (TreeShape(60, 4, 41), "tree top-k from 1 to 40; found 41"),
    ],
)
def test_shapes_that_no_tree_has_are_refused(shape: TreeShape, told: str):
    with pytest.raises(InputError) as caught:
        answers(toy(), toy_draft(), [Request((1,))], tree=shape)
    assert told in str(caught.value)
