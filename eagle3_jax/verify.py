"""Lossless acceptance of a draft tree, greedy and sampled, by one walk.

A tree's nodes are numbered so that parents come before children and siblings stand in the order in which they are
tried. One pass over the nodes then visits exactly the children of the last accepted node, in order: a node whose
parent is not the current node is passed over. A chain is the tree in which every node has one child.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.sampling import draw, most_likely


@struct.dataclass
class Tree:
    """Proposed tokens. Node 0 is the root: the last token decided, not yet in the target's cache.

    Attributes:
      tokens: [B, M] int32 target ids.
      parents: [B, M] int32; the root's is 0 and is not read.
      depths: [B, M] int32, 0 at the root.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array


@struct.dataclass
class Verdict:
    """What the target kept.

    Attributes:
      path: [B, P] int32, node indices from the root to the last accepted node; entries beyond `accepted` repeat 0.
      accepted: [B] int32, accepted proposals (0 to P-1).
      tokens: [B, P] int32, the tokens decided: the accepted proposals, then the target's own token; 0 beyond.
    """

    path: jax.Array
    accepted: jax.Array
    tokens: jax.Array


def chain_tree(tokens: jax.Array) -> Tree:
    """The tree of a chain: [B, M] tokens, the root first."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return Tree(tokens=tokens, parents=jnp.maximum(index - 1, 0), depths=index)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[b, index[b]] for each row."""
    shape = (-1,) + (1,) * (values.ndim - 1)
    return jnp.take_along_axis(values, index.reshape(shape), axis=1)[:, 0]


def _verdict(tree: Tree, path: jax.Array, accepted: jax.Array, own: jax.Array) -> Verdict:
    places = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    proposed = jnp.take_along_axis(tree.tokens, jnp.roll(path, -1, axis=1), axis=1)
    tokens = jnp.where(places < accepted[:, None], proposed, 0)
    tokens = jnp.where(places == accepted[:, None], own[:, None], tokens)
    return Verdict(path=path, accepted=accepted, tokens=tokens)


def verify_greedy(tree: Tree, logits: jax.Array, max_depth: int) -> Verdict:
    """Keep the branch that agrees with the target's argmax.

    Args:
      tree: the proposals.
      logits: [B, M, V] of the target at every node.
      max_depth: deepest level of any tree of this structure; P = max_depth + 1.
    """
    batch, nodes = tree.tokens.shape
    choices = most_likely(logits)
    places = jnp.arange(max_depth + 1, dtype=jnp.int32)[None]

    def visit(node: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        current, accepted, path = carry
        hit = (tree.parents[:, node] == current) & (tree.tokens[:, node] == _at(choices, current))
        accepted = accepted + hit.astype(jnp.int32)
        path = jnp.where(hit[:, None] & (places == accepted[:, None]), node, path)
        return jnp.where(hit, node, current), accepted, path

    start = (jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.zeros((batch, max_depth + 1), jnp.int32))
    current, accepted, path = jax.lax.fori_loop(1, nodes, visit, start)
    return _verdict(tree, path, accepted, _at(choices, current))


def verify_sampled(
    tree: Tree,
    probabilities: jax.Array,
    proposal: jax.Array | None,
    accept_uniforms: jax.Array,
    draw_uniforms: jax.Array,
    max_depth: int,
) -> Verdict:
    """Keep proposals so that the tokens decided are distributed exactly as the target's.

    Child x with proposal mass q(x) is accepted iff u * q(x) < p(x), strictly; otherwise p becomes what is left of it,
    max(0, p - q), and the next sibling is tried against that. When no child is accepted, the target's own token is
    drawn from what is left; at a leaf, from the fresh p there (speculative sampling, paper section 2.1; for
    deterministic proposals q is one-hot, as in the official code, utils.py:375-415).

    Args:
      tree: the proposals.
      probabilities: [B, M, V] the target's distribution after each node, as it would be sampled from.
      proposal: [B, M, V], the distribution that node m was drawn from, the very array; None for deterministic
        proposals (all mass on the node's token).
      accept_uniforms: [B, M] in [0, 1), one per node.
      draw_uniforms: [B, max_depth + 1] in [0, 1), indexed by the depth of the last accepted node.
      max_depth: as in `verify_greedy`.
    """
    batch, nodes = tree.tokens.shape
    rows = jnp.arange(batch)
    places = jnp.arange(max_depth + 1, dtype=jnp.int32)[None]

    def visit(node: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        current, accepted, path, left = carry
        token = tree.tokens[:, node]
        tried = tree.parents[:, node] == current
        # `left` is unnormalised after a rejection; comparing with its sum keeps it exact without dividing.
        total = jnp.sum(left, axis=-1)
        mass = jnp.ones(batch, jnp.float32) if proposal is None else proposal[rows, node, token]
        hit = tried & (accept_uniforms[:, node] * mass * total < left[rows, token])
        accepted = accepted + hit.astype(jnp.int32)
        path = jnp.where(hit[:, None] & (places == accepted[:, None]), node, path)
        if proposal is None:
            rest = left.at[rows, token].set(0.0)
        else:
            rest = jnp.maximum(left - proposal[:, node] * total[:, None], 0.0)
        # Rounding can leave nothing (p equal to q): then p itself is the right distribution to fall back on.
        rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, left)
        left = jnp.where(tried[:, None], rest, left)
        left = jnp.where(hit[:, None], probabilities[:, node], left)
        return jnp.where(hit, node, current), accepted, path, left

    start = (
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, max_depth + 1), jnp.int32),
        probabilities[:, 0],
    )
    _, accepted, path, left = jax.lax.fori_loop(1, nodes, visit, start)
    return _verdict(tree, path, accepted, draw(left, _at(draw_uniforms, accepted)))
