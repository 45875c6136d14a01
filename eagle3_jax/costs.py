"""What the parts of a round cost, in plain steps, and the speedup that follows from them.

    speedup = tau / (verify(M) + W x draft step(k) + catch-up(W + 1))

with all three in units of a plain step; M nodes are verified, W levels drafted from k nodes each. A chain of K drafts
is M = K + 1, W = K, k = 1. What a measured speedup falls short of this is overhead: the host, and whatever else a round
does. The model is pessimistic, so that a measured speedup may also exceed it: it charges W layers of the draft where a
round runs W - 1 (the first level comes out of catching up), a fixed tree's widest level at every depth, and every part
as a program of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from eagle3_jax.attention import Segment, causal_mask
from eagle3_jax.cache import KVCache, commit, empty_cache
from eagle3_jax.chain import catch_up
from eagle3_jax.draft import Draft, draft_logits, draft_step
from eagle3_jax.sampling import most_likely
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.tree import FixedTree, TreeShape, best_children, next_beam


@dataclasses.dataclass(frozen=True)
class Costs:
    """Medians in seconds.

    Attributes:
      plain: a target pass over one token, its head and the write to the cache.
      verify: the same for a block of M tokens with taps, by M.
      draft_step: one drafted level: the draft's layer over its cache, its head, the choice of tokens, by k.
      catch_up: true features into the draft's cache, by how many slots.
    """

    plain: float
    verify: dict[int, float]
    draft_step: dict[int, float]
    catch_up: dict[int, float]

    def speedup(self, tau: float, shape: TreeShape | FixedTree) -> float:
        """What a draft of this tau would bring if a round cost its parts and nothing else."""
        drafting = shape.depth * self.draft_step[shape.width] + self.catch_up[shape.depth + 1]
        return tau * self.plain / (self.verify[shape.nodes] + drafting)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("taps",))
def _verify_block(
    target: Target, cache: KVCache, tokens: jax.Array, *, taps: tuple[int, ...]
) -> tuple[jax.Array, KVCache]:
    batch, length = tokens.shape
    offsets = jnp.arange(length, dtype=jnp.int32)[None]
    over_cache, over_block = causal_mask(cache.lengths, length, cache.max_length)
    out = target_forward(
        target, tokens, cache.lengths[:, None] + offsets, over_block, taps=taps, cache=cache, cache_mask=over_cache
    )
    path = jnp.broadcast_to(offsets, (batch, length))
    written = commit(cache, out.keys, out.values, path, jnp.full((batch,), length, jnp.int32))
    # The length stays where it was, so that every measurement sees the same cache.
    return most_likely(target_logits(target, out.hidden)), dataclasses.replace(written, lengths=cache.lengths)


@jax.jit
def _draft_level(draft: Draft, cache: KVCache, carry: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    width = tokens.shape[1]
    visible = jnp.arange(cache.max_length)[None, None] < cache.lengths[:, None, None]
    past = [Segment(cache.keys[0], cache.values[0], jnp.broadcast_to(visible, (1, width, cache.max_length)))]
    positions = jnp.broadcast_to(cache.lengths[:, None], tokens.shape)
    out = draft_step(draft, carry, tokens, positions, jnp.eye(width, dtype=bool)[None], past)
    logits = draft_logits(draft, out.carry)
    if width == 1:
        return out.carry, jnp.take(draft.vocab.d2t, most_likely(logits), mode="clip")
    children, scores = best_children(logits, jnp.zeros((1, width), jnp.float32), width)
    beam = jnp.take_along_axis(children.reshape(1, -1), next_beam(scores, width), axis=1)
    return out.carry, jnp.take(draft.vocab.d2t, beam, mode="clip")


@partial(jax.jit, donate_argnames=("cache",))
def _catch_up(draft: Draft, cache: KVCache, taps: jax.Array, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
    carry, written = catch_up(draft, cache, taps, tokens, jnp.full((1,), tokens.shape[1], jnp.int32))
    return carry, dataclasses.replace(written, lengths=cache.lengths)


def measure_costs(
    target: Target, draft: Draft, shapes: Sequence[TreeShape | FixedTree], *, cache_length: int = 384, repeats: int = 20
) -> Costs:
    """Time the parts of a round on this machine, one sequence, caches half full.

    All programs take turns, after two untimed turns that compile and warm up.

    Args:
      target, draft: the models.
      shapes: what is to be drafted.
      cache_length: rows of the caches.
      repeats: timed turns.
    """
    config, shape, dtype = target.config, draft.config, target.params.embed.dtype
    start = jnp.full((1,), cache_length // 2, jnp.int32)
    cache = empty_cache(config.num_layers, 1, config.num_kv_heads, cache_length, config.head_dim, dtype)
    draft_cache = empty_cache(1, 1, shape.num_kv_heads, cache_length, shape.head_dim, dtype)
    # A copy of the counter: two donated caches must not share a buffer.
    cache = dataclasses.replace(cache, lengths=start)
    draft_cache = dataclasses.replace(draft_cache, lengths=start + 0)
    width = len(shape.taps) * shape.target_hidden_size
    blocks = sorted({one.nodes for one in shapes})
    widths = sorted({one.width for one in shapes})
    slots = sorted({one.depth + 1 for one in shapes})

    def verify(length: int, taps: tuple[int, ...]) -> None:
        nonlocal cache
        out, cache = _verify_block(target, cache, jnp.ones((1, length), jnp.int32), taps=taps)
        out.block_until_ready()

    def step(nodes: int) -> None:
        carry = jnp.ones((1, nodes, shape.hidden_size), dtype)
        jax.block_until_ready(_draft_level(draft, draft_cache, carry, jnp.ones((1, nodes), jnp.int32)))

    def catching_up(length: int) -> None:
        nonlocal draft_cache
        taps, tokens = jnp.ones((1, length, width), dtype), jnp.ones((1, length), jnp.int32)
        out, draft_cache = _catch_up(draft, draft_cache, taps, tokens)
        out.block_until_ready()

    programs: list[Callable[[], None]] = [partial(verify, 1, ())]
    programs += [partial(step, nodes) for nodes in widths]
    programs += [partial(verify, length, shape.taps) for length in blocks]
    programs += [partial(catching_up, length) for length in slots]
    times: list[list[float]] = [[] for _ in programs]
    for repeat in range(repeats + 2):
        for program, seconds in zip(programs, times):
            began = time.perf_counter()
            program()
            if repeat >= 2:
                seconds.append(time.perf_counter() - began)
    plain, *rest = [statistics.median(seconds) for seconds in times]
    drafted, verified = rest[: len(widths)], rest[len(widths) : len(widths) + len(blocks)]
    return Costs(
        plain=plain,
        verify=dict(zip(blocks, verified, strict=True)),
        draft_step=dict(zip(widths, drafted, strict=True)),
        catch_up=dict(zip(slots, rest[len(widths) + len(blocks) :], strict=True)),
    )
