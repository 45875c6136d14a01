"""Acceptance: the greedy walk against plain Python on random trees, and sampled acceptance against the target's exact
probabilities, by integrating the compiled routine over its uniforms cell by cell."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.sampling import Sampling, target_distribution
from eagle3_jax.tree import graft
from eagle3_jax.verify import Tree, Verdict, chain_tree, verify_greedy, verify_sampled

NODES, SMALL = 8, 4
greedy = jax.jit(verify_greedy, static_argnames=("max_depth",))
sampled = jax.jit(verify_sampled, static_argnames=("max_depth",))


def tree_of(tokens: list[int], parents: list[int]) -> Tree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Tree(*(jnp.asarray([values], jnp.int32) for values in (tokens, parents, depths)))


def walk(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[list[int], list[int]]:
    """The path and the decided tokens, as a person would find them."""
    path = [0]
    while True:
        wanted = choices[path[-1]]
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == wanted]
        if not children:
            return path, [tokens[n] for n in path[1:]] + [wanted]
        path.append(children[0])


def check_verdict(verdict: Verdict, path: list[int], decided: list[int]) -> None:
    accepted, places = len(path) - 1, verdict.path.shape[1]
    assert verdict.accepted.tolist() == [accepted]
    assert verdict.path[0].tolist() == path + [0] * (places - len(path))
    assert verdict.tokens[0].tolist() == decided + [0] * (places - len(decided))


@st.composite
def random_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    chain = draw(st.booleans())
    parents = [0] + [n - 1 if chain else draw(st.integers(0, n - 1)) for n in range(1, NODES)]
    tokens = draw(st.lists(st.integers(0, SMALL - 1), min_size=NODES, max_size=NODES))
    choices = draw(st.lists(st.integers(0, SMALL - 1), min_size=NODES, max_size=NODES))
    if draw(st.booleans()):
        # Let the target follow some branch, so that deep paths occur.
        for node in range(NODES - 1, 0, -1):
            choices[parents[node]] = tokens[node]
    return tokens, parents, choices


@settings(max_examples=300, deadline=None)
@given(random_trees())
def test_greedy_walk_equals_plain_python(case: tuple[list[int], list[int], list[int]]) -> None:
    tokens, parents, choices = case
    logits = jax.nn.one_hot(jnp.asarray([choices]), SMALL)
    verdict = greedy(tree_of(tokens, parents), logits, max_depth=NODES - 1)
    check_verdict(verdict, *walk(tokens, parents, choices))


def test_matches_after_the_first_miss_do_not_count() -> None:
    target = jax.nn.one_hot(jnp.asarray([[1, 2, 3, 1, 2]]), SMALL)
    proposed = [0, 1, 3, 3, 1]  # against 1, 2, 3, 1: matches [1, 0, 1, 1]
    verdict = greedy(chain_tree(jnp.asarray([proposed], jnp.int32)), target, max_depth=4)
    check_verdict(verdict, [0, 1], [1, 2])


def midpoints(cells: int) -> np.ndarray:
    return (np.arange(cells) + 0.5) / cells


def grid(*cells: int) -> np.ndarray:
    """[cells product, len(cells)] fp32, the midpoints of a grid over the unit cube."""
    axes = np.meshgrid(*(midpoints(count) for count in cells), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=-1).astype(np.float32)


def emitted(tree: Tree, p: np.ndarray, q: np.ndarray | None, accept: np.ndarray, last: np.ndarray, depth: int):
    """Run one tree [1, M] under many uniforms: accept [R, M-1], last [R]. Returns accepted [R] and tokens [R, P]."""
    rows = len(accept)
    whole = lambda values: jnp.broadcast_to(jnp.asarray(values), (rows, *np.shape(values)[1:]))
    verdict = sampled(
        jax.tree.map(whole, tree),
        whole(p.astype(np.float32)),
        None if q is None else whole(q.astype(np.float32)),
        jnp.pad(jnp.asarray(accept), ((0, 0), (1, 0))),
        jnp.broadcast_to(jnp.asarray(last)[:, None], (rows, depth + 1)),
        max_depth=depth,
    )
    return np.asarray(verdict.accepted), np.asarray(verdict.tokens)


def common(numbers: list[int]) -> int:
    return math.lcm(*(max(1, number) for number in numbers))


def random_masses(rng: np.random.Generator, vocab: int, units: int) -> np.ndarray:
    """[V] integers that add up to `units`."""
    return rng.multinomial(units, rng.dirichlet(np.ones(vocab)))


@pytest.mark.parametrize("seed", range(4))
def test_sampled_chain_of_one_reproduces_the_target_exactly(seed: int) -> None:
    vocab, units = 4, 16
    rng = np.random.default_rng(seed)
    p0, q = random_masses(rng, vocab, units), random_masses(rng, vocab, units)
    after = random_masses(rng, vocab, units)
    if seed == 0:
        p0 = q.copy()  # nothing is left over: rejection has probability 0
    left = int(np.maximum(p0 - q, 0).sum())
    cells = grid(common(q.tolist()), common([left, units]))
    first, second = np.zeros(vocab), np.zeros(vocab)
    for token in np.flatnonzero(q):
        p = np.stack([p0, after])[None] / units
        dense = np.stack([q, q])[None] / units
        tree = chain_tree(jnp.asarray([[0, token]], jnp.int32))
        accepted, tokens = emitted(tree, p, dense, cells[:, :1], cells[:, 1], 1)
        weight = q[token] / units / len(cells)
        np.add.at(first, tokens[:, 0], weight)
        np.add.at(second, tokens[accepted == 1, 1], weight)
    np.testing.assert_allclose(first, p0 / units, atol=1e-6)
    # An accepted proposal is followed by a token of the fresh distribution.
    np.testing.assert_allclose(second, np.minimum(p0, q).sum() / units * after / units, atol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_chain_of_two_reproduces_the_joint_exactly(seed: int) -> None:
    vocab, units = 3, 8
    rng = np.random.default_rng(seed)
    p0, q0 = random_masses(rng, vocab, units), random_masses(rng, vocab, units)
    p1, q1 = (np.stack([random_masses(rng, vocab, units) for _ in range(vocab)]) for _ in range(2))
    p2 = np.stack([random_masses(rng, vocab, units) for _ in range(vocab)])
    rests = [int(np.maximum(p0 - q0, 0).sum()), *np.maximum(p1 - q1, 0).sum(axis=-1).tolist()]
    cells = grid(common(q0.tolist()), common(q1.ravel().tolist()), common([*rests, units]))
    single, pair = np.zeros(vocab), np.zeros((vocab, vocab))
    triple = np.zeros((vocab, vocab, vocab))
    for x, y in np.ndindex(vocab, vocab):
        weight = q0[x] * q1[x, y] / units**2 / len(cells)
        if not weight:
            continue
        p = np.stack([p0, p1[x], p2[y]])[None] / units
        dense = np.stack([q0, q0, q1[x]])[None] / units
        accepted, tokens = emitted(
            chain_tree(jnp.asarray([[0, x, y]], jnp.int32)), p, dense, cells[:, :2], cells[:, 2], 2
        )
        np.add.at(single, tokens[:, 0], weight)
        more = accepted >= 1
        np.add.at(pair, (tokens[more, 0], tokens[more, 1]), weight)
        most = accepted == 2
        np.add.at(triple, tuple(tokens[most].T), weight)
    np.testing.assert_allclose(single, p0 / units, atol=1e-6)
    keep = np.minimum(p0, q0) / units
    np.testing.assert_allclose(pair, keep[:, None] * p1 / units, atol=1e-6)
    both = keep[:, None] * np.minimum(p1, q1) / units
    np.testing.assert_allclose(triple, both[..., None] * p2[None] / units, atol=1e-6)


TREES = {
    # tokens, parents, and the target's masses after each node (a list for every node), in units of 1/8.
    "three siblings, two grandchildren": (
        [0, 0, 1, 2, 3, 0],
        [0, 0, 0, 0, 1, 2],
        [[4, 2, 1, 1], [1, 1, 2, 4], [4, 0, 4, 0], [2, 2, 2, 2], [0, 8, 0, 0], [1, 2, 1, 4]],
    ),
    "a sibling that the target rules out": (
        [0, 1, 0, 2],
        [0, 0, 0, 0],
        [[4, 0, 2, 2], [2, 2, 2, 2], [8, 0, 0, 0], [0, 0, 4, 4]],
    ),
    "the same token twice": ([0, 1, 1, 2], [0, 0, 0, 0], [[2, 4, 1, 1], [2, 2, 2, 2], [8, 0, 0, 0], [0, 0, 4, 4]]),
    "all that the target allows": ([0, 1, 2], [0, 0, 0], [[0, 4, 4, 0], [2, 2, 2, 2], [8, 0, 0, 0]]),
    "awkward fractions": ([0, 3, 1, 1], [0, 0, 1, 0], [[1, 2, 0, 5], [4, 2, 1, 1], [2, 2, 2, 2], [0, 2, 6, 0]]),
}


def exact_tree(tokens: list[int], parents: list[int], masses: list[list[int]]) -> dict[tuple[int, ...], Fraction]:
    """Probability of every block that the walk can decide."""
    result: dict[tuple[int, ...], Fraction] = {}
    children = lambda node: [n for n in range(1, len(tokens)) if parents[n] == node]

    def visit(node: int, decided: tuple[int, ...], weight: Fraction) -> None:
        left = {token: Fraction(mass, 8) for token, mass in enumerate(masses[node])}
        for child in children(node):
            share = left[tokens[child]]
            if share:
                visit(child, (*decided, tokens[child]), weight * share)
            left[tokens[child]] = Fraction(0)
        for token, mass in left.items():
            if mass:
                block = (*decided, token)
                result[block] = result.get(block, Fraction(0)) + weight * mass

    visit(0, (), Fraction(1))
    return result


def denominators(tokens: list[int], parents: list[int], masses: list[list[int]], node: int) -> list[int]:
    """What is left of a node's mass before each of its children, and after the last."""
    left, totals = list(masses[node]), [sum(masses[node])]
    for child in range(1, len(tokens)):
        if parents[child] == node:
            left[tokens[child]] = 0
            totals.append(sum(left))
    return totals


@pytest.mark.parametrize("name", TREES)
def test_sampled_tree_reproduces_the_target_exactly(name: str) -> None:
    tokens, parents, masses = TREES[name]
    totals = [denominators(tokens, parents, masses, node) for node in range(len(tokens))]
    accept = [common(totals[parents[node]]) for node in range(1, len(tokens))]
    cells = grid(*accept, common([number for numbers in totals for number in numbers]))
    tree = tree_of(tokens, parents)
    depth = int(tree.depths.max())
    accepted, blocks = emitted(tree, np.asarray([masses]) / 8, None, cells[:, :-1], cells[:, -1], depth)
    found: dict[tuple[int, ...], float] = {}
    values, counts = np.unique(np.column_stack([accepted, blocks]), axis=0, return_counts=True)
    for (count, *block), number in zip(values.tolist(), counts.tolist()):
        found[tuple(block[: count + 1])] = number / len(cells)
    expected = exact_tree(tokens, parents, masses)
    assert found.keys() == expected.keys()
    for block, probability in expected.items():
        assert found[block] == pytest.approx(float(probability), abs=1e-6), block
    # Whatever the tree, the first token decided follows the target.
    first = np.zeros(4)
    for block, share in found.items():
        first[block[0]] += share
    np.testing.assert_allclose(first, np.asarray(masses[0]) / 8, atol=1e-6)


def cuts(*places: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints and lengths of the cells that some places cut [0, 1] into."""
    edges = np.unique(np.clip(np.concatenate([[0.0, 1.0], *(np.atleast_1d(place) for place in places)]), 0, 1))
    return (edges[1:] + edges[:-1]) / 2, np.diff(edges)


def quantiles(mass: np.ndarray) -> np.ndarray:
    """Where a draw from an unnormalised distribution changes from one token to the next."""
    return np.cumsum(mass) / mass.sum() if mass.sum() > 0 else np.zeros(0)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["tree", "chain"])
def test_random_distributions_and_candidates_are_reproduced_exactly(filters: dict[str, float], dense: bool) -> None:
    """Real-valued p and q: the cells end where acceptance and draws change, which fp64 arithmetic says.

    The tree tries random candidates under the root, the chain the tokens that q may draw.
    """
    vocab = 5
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sampling = Sampling(
            temperature=jnp.asarray([0.7 + seed / 10]), top_k=jnp.asarray([filters.get("top_k", 0)], jnp.int32),
            top_p=jnp.asarray([filters.get("top_p", 1.0)], jnp.float32), seed=jnp.zeros(1, jnp.uint32),
        )  # fmt: skip
        logits = jnp.asarray(rng.normal(0, 2, (1, 4, vocab)), jnp.float32)
        p = np.asarray(target_distribution(logits, sampling, filters=bool(filters)))
        root, after = p[0, 0].astype(np.float64), p[0, 1].astype(np.float64)
        first, second = np.zeros(vocab), np.zeros((vocab, vocab))

        def add(tree: Tree, p: np.ndarray, q: np.ndarray | None, axes: list, weight: float, totals=(first, second)):
            grids = np.meshgrid(*(middle for middle, _ in axes), indexing="ij")
            volumes = np.prod(np.meshgrid(*(length for _, length in axes), indexing="ij"), axis=0).ravel() * weight
            at = np.stack([grid.ravel() for grid in grids], axis=-1).astype(np.float32)
            accepted, tokens = emitted(tree, p, q, at[:, :-1], at[:, -1], 1)
            np.add.at(totals[0], tokens[:, 0], volumes)
            more = accepted == 1
            np.add.at(totals[1], (tokens[more, 0], tokens[more, 1]), volumes[more])

        if dense:
            q = rng.dirichlet(np.ones(vocab)).astype(np.float32)
            rest = np.maximum(root - q, 0)
            for token in range(vocab):
                tree = chain_tree(jnp.asarray([[0, token]], jnp.int32))
                axes = [cuts(root[token] / q[token]), cuts(quantiles(rest), quantiles(after))]
                add(tree, p[:, :2], np.stack([q, q])[None], axes, float(q[token]))
            candidates = np.minimum(root, q)
        else:
            chosen = rng.permutation(vocab)[:3]
            left, axes = root.copy(), []
            for token in chosen:
                axes.append(cuts(left[token] / left.sum() if left.sum() > 0 else 0.0))
                left[token] = 0
            axes.append(cuts(quantiles(left), quantiles(after)))
            same = np.concatenate([p[:, :1], np.repeat(p[:, 1:2], 3, axis=1)], axis=1)
            add(tree_of([0, *chosen.tolist()], [0, 0, 0, 0]), same, None, axes, 1.0)
            candidates = np.where(np.isin(np.arange(vocab), chosen), root, 0)
        np.testing.assert_allclose(first, root, atol=1e-6)
        np.testing.assert_allclose(second, candidates[:, None] * after, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_branch_beside_a_sampled_chain_keeps_the_distribution(seed: int) -> None:
    """A token drawn from q, and beside it one that is always proposed: grafted as decoding does it, then verified."""
    vocab = 4
    rng = np.random.default_rng(seed)
    p, q, looked = rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab)), int(rng.integers(vocab))
    p, q = p.astype(np.float32), q.astype(np.float32)
    first = np.zeros(vocab)
    for token in range(vocab):
        tree, ranks = graft(
            chain_tree(jnp.asarray([[0, token]], jnp.int32)), jnp.zeros((1, 2), jnp.int32), jnp.asarray([[looked]])
        )
        assert ranks[0].tolist() == [0, 0, int(token != looked)]
        certain = np.eye(vocab, dtype=np.float32)[looked]
        rest = np.maximum(p.astype(np.float64) - q, 0)
        second = rest[looked] / rest.sum() if rest.sum() > 0 else 0.0
        after = rest.copy()
        after[looked] = 0
        axes = [cuts(p[token] / q[token]), cuts(second), cuts(quantiles(rest), quantiles(after), quantiles(p))]
        grids = np.stack([g.ravel() for g in np.meshgrid(*(m for m, _ in axes), indexing="ij")], axis=-1)
        volumes = np.prod(np.meshgrid(*(length for _, length in axes), indexing="ij"), axis=0).ravel() * q[token]
        grids = grids.astype(np.float32)
        masses = np.stack([p] * 3)[None]
        _, tokens = emitted(tree, masses, np.stack([q, q, certain])[None], grids[:, :2], grids[:, 2], 1)
        np.add.at(first, tokens[:, 0], volumes)
    np.testing.assert_allclose(first, p, atol=1e-6)


@pytest.mark.parametrize("dense", [False, True])
def test_a_uniform_of_zero_does_not_accept_what_the_target_rules_out(dense: bool) -> None:
    p = np.asarray([[[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]])
    q = np.asarray([[[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]]) if dense else None
    zero = np.zeros((1, 1), np.float32)
    accepted, tokens = emitted(chain_tree(jnp.asarray([[2, 1]], jnp.int32)), p, q, zero, zero[0], 1)
    assert accepted.tolist() == [0]
    assert tokens[0, 0] == (2 if dense else 0)
    accepted, tokens = emitted(chain_tree(jnp.asarray([[2, 0]], jnp.int32)), p, q, zero, zero[0], 1)
    assert accepted.tolist() == [1]
    assert tokens[0].tolist() == [0, 0]


def test_a_sure_proposal_is_accepted_at_the_largest_uniform() -> None:
    p = np.asarray([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    one = np.full((1, 1), np.nextafter(np.float32(1), np.float32(0)))
    accepted, tokens = emitted(chain_tree(jnp.asarray([[2, 1]], jnp.int32)), p, None, one, one[0], 1)
    assert accepted.tolist() == [1]
    assert tokens[0].tolist() == [1, 2]
