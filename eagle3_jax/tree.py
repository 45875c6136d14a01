"""The draft tree: dynamic, grown level by level with the most promising nodes kept, or of a fixed form.

As EAGLE-2 (arXiv:2406.16858, section 4) and the paper's decoding do it: each level expands the k most likely nodes of
the level before into k children each; a node's score is the draft's log-probability of its whole path; the M - 1 best
of everything that was expanded are verified. Shapes are fixed, so the whole is one part of a jitted round. A fixed tree
(EAGLE, arXiv:2401.15077) always has the same form: each node is the draft's first, second, ... choice after its parent.

Letters: k top_k, W depth, M nodes, C draft vocabulary; P = k + (W - 1) k^2 candidates, numbered level by level, parent
by parent, best child first ("flat index"). A parent's flat index is below its children's.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle3_jax.attention import Segment
from eagle3_jax.cache import KVCache
from eagle3_jax.chain import catch_up
from eagle3_jax.draft import Draft, draft_logits, draft_step
from eagle3_jax.errors import InputError
from eagle3_jax.verify import Tree


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """How a tree grows.

    Attributes:
      nodes: M, nodes that the target verifies, the root among them (the official code's total_token).
      depth: W, drafted levels (one more than the official code's depth).
      top_k: k, nodes expanded in each level and children of each.
    """

    nodes: int
    depth: int
    top_k: int

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """A chain of `length` drafts."""
        return cls(nodes=length + 1, depth=length, top_k=1)

    @property
    def width(self) -> int:
        """Most nodes of a level that the draft reads."""
        return self.top_k

    @property
    def candidates(self) -> int:
        """P."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    def check(self, draft_vocab_size: int) -> None:
        """Refuse a shape that no tree can have.

        Raises:
          InputError: naming the number that is out of range.
        """
        for name, value, least, most in (
            ("tree depth", self.depth, 1, None),
            ("tree top-k", self.top_k, 1, draft_vocab_size),
            ("tree nodes", self.nodes, 2, self.candidates + 1),
        ):
            if value < least or (most is not None and value > most):
                raise InputError(
                    expected=f"{name} from {least}" + ("" if most is None else f" to {most}"),
                    found=str(value),
                    remedy="A tree has at most 1 + k + (depth - 1) k^2 nodes, the root included, and k is at most the "
                    "draft's vocabulary.",
                )


@dataclasses.dataclass(frozen=True)
class FixedTree:
    """A tree of one form.

    Attributes:
      parents: of the nodes 1, 2, ..., each below its child's number; 0 is the root. Of two siblings the first is the
        draft's more likely choice.
    """

    parents: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """M, the root among them."""
        return len(self.parents) + 1

    @property
    def depths(self) -> tuple[int, ...]:
        """Of all nodes, 0 at the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """W, drafted levels."""
        return max(self.depths)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of all nodes, their place among their siblings."""
        return (0, *(self.parents[:index].count(parent) for index, parent in enumerate(self.parents)))

    @property
    def top_k(self) -> int:
        """Most children of a node."""
        return max(self.ranks) + 1

    @property
    def width(self) -> int:
        """Most nodes of a level that the draft reads."""
        depths = [self.depths[node] for node in set(self.parents)]
        return max(depths.count(depth) for depth in depths)

    def check(self, draft_vocab_size: int) -> None:
        """Refuse what is no tree.

        Raises:
          InputError: naming the node.
        """
        for index, parent in enumerate(self.parents):
            if not 0 <= parent <= index:
                raise InputError(
                    expected=f"as parent of node {index + 1} a node before it, from 0 (the root) to {index}",
                    found=str(parent),
                    remedy="Number nodes so that parents come before their children.",
                )
        if not self.parents or self.top_k > draft_vocab_size:
            raise InputError(
                expected=f"a tree of at least one node, with at most {draft_vocab_size} children each (the draft's "
                "vocabulary)",
                found=f"{self.top_k} children" if self.parents else "no node",
                remedy="Correct the list of parents.",
            )


@struct.dataclass
class Candidates:
    """Everything that was expanded, before the choice.

    Attributes:
      tokens: [B, P] int32 target ids.
      scores: [B, P] fp32, log-probability of the path from the root.
      parents: [B, P] int32 flat indices, -1 for the root's children.
    """

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


def best_children(logits: jax.Array, scores: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The k most likely next tokens of each node.

    Args:
      logits: [B, n, C] of the draft at n nodes.
      scores: [B, n], of these nodes.
      top_k: k.

    Returns:
      Draft ids and scores, each [B, n, k], best first; of equals the lower id first.
    """
    each = jax.nn.log_softmax(logits, axis=-1)
    # A draft that gives nan may be slow, but must not break the order of scores that the tree's form rests on.
    values, ids = jax.lax.top_k(jnp.where(jnp.isnan(each), -jnp.inf, each), top_k)
    return ids, scores[..., None] + values


def next_beam(scores: jax.Array, top_k: int) -> jax.Array:
    """Which of the n*k children [B, n, k] are expanded next: indices [B, k] into the flattened children."""
    return jax.lax.top_k(scores.reshape(scores.shape[0], -1), top_k)[1]


def select_nodes(candidates: Candidates, root: jax.Array, shape: TreeShape) -> tuple[Tree, jax.Array]:
    """Keep the best M - 1 candidates.

    A child never scores above its parent, and of equals `top_k` takes the lower index, which is the parent's; so every
    kept node's ancestors are kept (an unstable choice breaks this where a child's log-probability rounds to 0).

    Args:
      candidates: all of them.
      root: [B] int32, the last decided token.
      shape: the tree's.

    Returns:
      The tree, its nodes in order of their flat indices; and each node's rank among its siblings [B, M] int32.
    """
    k = shape.top_k
    _, chosen = jax.lax.top_k(candidates.scores, shape.nodes - 1)
    chosen = jnp.sort(chosen, axis=-1).astype(jnp.int32)
    take = partial(jnp.take_along_axis, indices=chosen, axis=1)
    parents = take(candidates.parents)
    # Each flat index is looked up among the chosen ones; the root stands before them.
    places = jax.vmap(partial(jnp.searchsorted, side="left"))(chosen, parents).astype(jnp.int32) + 1
    places = jnp.where(parents < 0, 0, places)
    flat = np.arange(shape.candidates)
    depths = jnp.asarray(np.where(flat < k, 1, 2 + (flat - k) // k**2), jnp.int32)
    ranks = jnp.asarray(np.where(flat < k, flat, (flat - k) % k), jnp.int32)
    first = lambda values, start: jnp.concatenate([start[:, None], values], axis=1)
    zero = jnp.zeros_like(root)
    tree = Tree(
        tokens=first(take(candidates.tokens), root), parents=first(places, zero), depths=first(depths[chosen], zero)
    )
    return tree, first(ranks[chosen], zero)


def ancestor_mask(tree: Tree, depth: int) -> jax.Array:
    """[B, M, M] bool: node i may read node j, which is i itself or one of its ancestors.

    Args:
      tree: the nodes.
      depth: of the deepest node, or more.
    """
    batch, nodes = tree.parents.shape
    seen = jnp.broadcast_to(jnp.eye(nodes, dtype=bool)[None], (batch, nodes, nodes))
    for _ in range(depth):
        seen = seen | jnp.take_along_axis(seen, tree.parents[:, :, None], axis=1)
    return seen


def propose_tree(
    draft: Draft,
    cache: KVCache,
    taps: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    root: jax.Array,
    shape: TreeShape,
) -> tuple[Tree, jax.Array, KVCache]:
    """Catch up, then grow a tree under the root.

    The draft's own keys and values of tree nodes live in this call only: they come from drafted features.

    Args:
      draft, cache, taps, tokens, count: as in `chain.catch_up`; the last real slot predicts the root's children.
      root: [B] int32, the last decided token.
      shape: the tree's.

    Returns:
      The tree, each node's rank among its siblings [B, M], and the cache after catching up.
    """
    with jax.named_scope("propose_tree"):
        carry, cache = catch_up(draft, cache, taps, tokens, count)
        batch, k = tokens.shape[0], shape.top_k
        last = jnp.maximum(count - 1, 0)
        carry = jnp.take_along_axis(carry, last[:, None, None], axis=1)
        visible = jnp.arange(cache.max_length)[None, None] < cache.lengths[:, None, None]
        committed = Segment(cache.keys[0], cache.values[0], jnp.broadcast_to(visible, (batch, k, cache.max_length)))
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (batch, k, k))
        to_target = lambda ids: jnp.take(draft.vocab.d2t, ids, mode="clip")

        ids, scores = best_children(draft_logits(draft, carry), jnp.zeros((batch, 1), jnp.float32), k)
        found = [Candidates(to_target(ids[:, 0]), scores[:, 0], jnp.full((batch, k), -1, jnp.int32))]
        beam, beam_scores = found[0].tokens, found[0].scores
        flat = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], (batch, k))
        carry = jnp.broadcast_to(carry, (batch, k, carry.shape[-1]))
        scratch: list[Segment] = []
        start = k
        for level in range(1, shape.depth):
            positions = jnp.broadcast_to(cache.lengths[:, None] + level - 1, (batch, k))
            out = draft_step(draft, carry, beam, positions, own, [committed, *scratch])
            ids, scores = best_children(draft_logits(draft, out.carry), beam_scores, k)
            parents = jnp.broadcast_to(flat[..., None], (batch, k, k))
            rows = lambda values: values.reshape(batch, k * k)
            found.append(Candidates(to_target(rows(ids)), rows(scores), rows(parents)))
            if level == shape.depth - 1:
                break
            chosen = next_beam(scores, k)
            parent = (chosen // k).astype(jnp.int32)
            take = partial(jnp.take_along_axis, indices=chosen, axis=1)
            beam, beam_scores, flat = take(found[-1].tokens), take(found[-1].scores), start + chosen.astype(jnp.int32)
            carry = jnp.take_along_axis(out.carry, parent[..., None], axis=1)
            # A node sees what its parent saw, and its parent.
            inherit = partial(jnp.take_along_axis, indices=parent[..., None], axis=1)
            scratch = [dataclasses.replace(segment, mask=inherit(segment.mask)) for segment in scratch]
            scratch.append(Segment(out.keys, out.values, inherit(own)))
            start += k * k
        candidates = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)
        tree, ranks = select_nodes(candidates, root, shape)
        return tree, ranks, cache


def propose_fixed(
    draft: Draft,
    cache: KVCache,
    taps: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    root: jax.Array,
    form: FixedTree,
) -> tuple[Tree, jax.Array, KVCache]:
    """Catch up, then fill a tree of a fixed form under the root; arguments and result as `propose_tree`."""
    with jax.named_scope("propose_fixed"):
        carry, cache = catch_up(draft, cache, taps, tokens, count)
        batch = tokens.shape[0]
        carry = jnp.take_along_axis(carry, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        visible = jnp.arange(cache.max_length)[None, None] < cache.lengths[:, None, None]
        depths, ranks = np.asarray(form.depths), np.asarray(form.ranks)
        parents = np.asarray((0, *form.parents))
        above = np.eye(form.nodes, dtype=bool)  # which node is an ancestor, or the node itself
        for node in range(1, form.nodes):
            above[node] |= above[parents[node]]
        read: list[np.ndarray] = []  # the nodes that the draft has read, by level
        scratch: list[tuple[jax.Array, jax.Array]] = []
        chosen: list[jax.Array] = [root] + [root] * (form.nodes - 1)
        inner = np.asarray([0])
        for level in range(1, form.depth + 1):
            # `carry` stands at the inner nodes of the level before, whose children are chosen now.
            nodes = np.flatnonzero(depths == level)
            _, ids = jax.lax.top_k(draft_logits(draft, carry), int(ranks[nodes].max()) + 1)
            places = np.searchsorted(inner, parents[nodes])
            found = jnp.take(draft.vocab.d2t, ids[:, places, ranks[nodes]], mode="clip")
            for index, node in enumerate(nodes):
                chosen[node] = found[:, index]
            if level == form.depth:
                break
            following = np.asarray([node for node in nodes if node in form.parents])
            carry = carry[:, np.searchsorted(inner, parents[following])]
            inner = following
            fixed = lambda columns, rows=inner: jnp.broadcast_to(
                jnp.asarray(above[np.ix_(rows, columns)])[None], (batch, rows.size, columns.size)
            )
            over_cache = jnp.broadcast_to(visible, (batch, inner.size, cache.max_length))
            past = [Segment(cache.keys[0], cache.values[0], over_cache)]
            past += [Segment(*pair, fixed(columns)) for pair, columns in zip(scratch, read)]
            positions = jnp.broadcast_to(cache.lengths[:, None] + level - 1, (batch, inner.size))
            beam = jnp.stack([chosen[node] for node in inner], axis=1)
            out = draft_step(draft, carry, beam, positions, fixed(inner), past)
            carry = out.carry
            scratch.append((out.keys, out.values))
            read.append(inner)
        whole = lambda values: jnp.broadcast_to(jnp.asarray(values, jnp.int32)[None], (batch, form.nodes))
        return Tree(jnp.stack(chosen, axis=1), whole(parents), whole(depths)), whole(ranks), cache


def graft(tree: Tree, ranks: jax.Array, tokens: jax.Array) -> tuple[Tree, jax.Array]:
    """Add a branch from the root to a tree, following the nodes that are there as far as they agree with it.

    Args:
      tree: M nodes.
      ranks: [B, M], of its nodes.
      tokens: [B, L] int32, the branch.

    Returns:
      The tree and the ranks of M + L nodes. A new node that is not needed is its own parent, so no walk reaches it.
    """
    batch, nodes = tree.tokens.shape
    length = tokens.shape[1]
    grow = lambda values: jnp.pad(values, ((0, 0), (0, length)))
    all_tokens = jnp.concatenate([tree.tokens, tokens], axis=1)
    depths = jnp.concatenate(
        [tree.depths, jnp.broadcast_to(1 + jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)], axis=1
    )
    places = jnp.arange(nodes + length, dtype=jnp.int32)[None]
    # Until its turn comes a new node is its own parent; so is the root, which is nobody's child.
    parents = jnp.where(places < nodes, grow(tree.parents), places)
    ranks = grow(ranks)
    current = jnp.zeros(batch, jnp.int32)
    for step in range(length):
        children = (parents == current[:, None]) & (places != current[:, None])
        same = children & (all_tokens == tokens[:, step, None])
        known = same.any(axis=1)
        there = jnp.argmax(same, axis=1).astype(jnp.int32)
        new = nodes + step
        parents = parents.at[:, new].set(jnp.where(known, new, current))
        ranks = ranks.at[:, new].set(jnp.where(known, 0, children.sum(axis=1).astype(jnp.int32)))
        current = jnp.where(known, there, new)
    return Tree(all_tokens, parents, depths), ranks
