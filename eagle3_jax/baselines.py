"""Other drafters than EAGLE-3's: a small language model (speculative sampling, the paper's baseline) and prompt lookup.

Both read the decided tokens only, not the target's states. Before it proposes, each extends what it keeps by the
tokens of the last round (`extend_small`, `extend_history`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import History, KVCache, commit
from eagle3_jax.chain import Proposal
from eagle3_jax.sampling import draw, most_likely
from eagle3_jax.target import Target, target_forward, target_logits


@struct.dataclass
class SmallModel:
    """A language model with the target's vocabulary, that drafts by plain decoding (Leviathan et al., 2023)."""

    model: Target


@struct.dataclass
class Lookup:
    """Proposes what followed the last tokens when they stood in the text before (prompt lookup, Saxena 2023).

    Attributes:
      longest: tokens that are compared at most; longer agreement is preferred, then the latest place.
    """

    longest: int = struct.field(pytree_node=False, default=3)


def extend_small(small: SmallModel, cache: KVCache, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, KVCache]:
    """Let the small model read new tokens.

    Args:
      small: the drafter.
      cache: its rows of all earlier tokens.
      tokens: [B, T] int32.
      count: [B] int32, how many of them are real.

    Returns:
      Its hidden states [B, T, D] and the extended cache.
    """
    batch, length = tokens.shape
    offsets = jnp.arange(length, dtype=jnp.int32)[None]
    over_cache, over_block = causal_mask(cache.lengths, length, cache.max_length)
    out = target_forward(
        small.model, tokens, cache.lengths[:, None] + offsets, over_block, cache=cache, cache_mask=over_cache
    )
    path = jnp.broadcast_to(offsets, (batch, length))
    return out.hidden, commit(cache, out.keys, out.values, path, count)


def extend_history(history: History, tokens: jax.Array, count: jax.Array) -> History:
    """Append the first `count` [B] of `tokens` [B, T] to each row."""
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(offsets < count[:, None], history.lengths[:, None] + offsets, history.tokens.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    return History(tokens=history.tokens.at[rows, place].set(tokens, mode="drop"), lengths=history.lengths + count)


def propose_small(
    small: SmallModel,
    cache: KVCache,
    tokens: jax.Array,
    count: jax.Array,
    length: int,
    temperature: jax.Array | None,
    uniforms: jax.Array | None,
) -> Proposal:
    """Read the last round's tokens, then draft `length` more one by one.

    A drafted token is read from a block that begins after the committed rows and is thrown away: every step runs over
    all tokens drafted before it once more, which costs a small model little and keeps its cache clean.

    Args: as `chain.propose_chain`, but for the taps.
    """
    with jax.named_scope("propose_small"):
        hidden, cache = extend_small(small, cache, tokens, count)
        batch = tokens.shape[0]
        last = jnp.maximum(count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)
        chosen, distributions = [], []
        for step in range(length):
            logits = target_logits(small.model, hidden)[:, 0]
            if temperature is None or uniforms is None:
                chosen.append(most_likely(logits))
            else:
                mass = jax.nn.softmax(logits / temperature[:, None], axis=-1)
                chosen.append(draw(mass, uniforms[:, step]))
                distributions.append(mass)
            if step == length - 1:
                break
            block = jnp.stack(chosen, axis=1)
            offsets = jnp.arange(step + 1, dtype=jnp.int32)[None]
            over_cache, over_block = causal_mask(cache.lengths, step + 1, cache.max_length)
            positions = jnp.broadcast_to(cache.lengths[:, None] + offsets, (batch, step + 1))
            out = target_forward(small.model, block, positions, over_block, cache=cache, cache_mask=over_cache)
            hidden = out.hidden[:, -1:]
        return Proposal(
            tokens=jnp.stack(chosen, axis=1),
            distribution=jnp.stack(distributions, axis=1) if distributions else None,
            cache=cache,
        )


def propose_lookup(lookup: Lookup, history: History, tokens: jax.Array, count: jax.Array, length: int) -> Proposal:
    """Append the last round's tokens, then continue the text from where its end was seen before.

    Where the continuation reaches the end of the text it goes round: a repeated phrase is proposed again and again.

    Args:
      lookup: the drafter.
      history: the tokens before the last round's.
      tokens: [B, P] int32, the last round's.
      count: [B] int32, how many of them are real.
      length: W.

    Returns:
      The chain, without a distribution, and the history. Without any agreement the last token is repeated.
    """
    with jax.named_scope("propose_lookup"):
        history = extend_history(history, tokens, count)
        text, known = history.tokens, history.lengths[:, None]
        size = text.shape[1]
        place = jnp.arange(size, dtype=jnp.int32)[None]
        agreed = jnp.zeros_like(text)
        so_far = jnp.ones_like(text, bool)
        for back in range(lookup.longest):
            end = jnp.take_along_axis(text, jnp.maximum(known - 1 - back, 0), axis=1)
            so_far &= (jnp.roll(text, back, axis=1) == end) & (place >= back) & (known - 1 - back >= 0)
            agreed += so_far.astype(jnp.int32)
        before = place < known - 1
        best = jnp.argmax(jnp.where(before & (agreed > 0), agreed * size + place, -1), axis=1)[:, None]
        found = jnp.take_along_axis(jnp.where(before, agreed, 0), best, axis=1) > 0
        start = jnp.where(found, best + 1, jnp.maximum(known - 1, 0)).astype(jnp.int32)
        period = jnp.maximum(known - start, 1)
        ahead = start + jnp.arange(length, dtype=jnp.int32)[None] % period
        return Proposal(tokens=jnp.take_along_axis(text, ahead, axis=1), distribution=None, cache=history)
