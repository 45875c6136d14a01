"""The EAGLE-3 draft's chain: one token after another.

Before it proposes, the draft catches up: slots that were drafted in the last round are written to its cache again from
the target's true features, so that no approximate row ever stays (the loss of acceptance when they do is well known).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.attention import Segment, causal_mask
from eagle3_jax.cache import History, KVCache, commit
from eagle3_jax.draft import Draft, draft_logits, draft_step, fuse
from eagle3_jax.sampling import draw, most_likely


@struct.dataclass
class Proposal:
    """A drafted chain.

    Attributes:
      tokens: [B, W] int32 target ids.
      distribution: [B, W, V] fp32, what each token was drawn from; None when nothing was drawn.
      cache: what the drafter keeps, after catching up.
    """

    tokens: jax.Array
    distribution: jax.Array | None
    cache: KVCache | History


def catch_up(
    draft: Draft, cache: KVCache, taps: jax.Array, tokens: jax.Array, count: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Extend the draft's cache by slots with true features.

    Args:
      draft: the model.
      cache: rows of all earlier slots.
      taps: [B, P, A*D], the target's tapped states at the new slots.
      tokens: [B, P] int32, the token after each of them.
      count: [B] int32, how many of the P slots are real.

    Returns:
      The carries [B, P, D] and the extended cache.
    """
    batch, places = tokens.shape
    offsets = jnp.arange(places, dtype=jnp.int32)[None]
    over_cache, over_block = causal_mask(cache.lengths, places, cache.max_length)
    past = [Segment(cache.keys[0], cache.values[0], over_cache)]
    positions = cache.lengths[:, None] + offsets
    out = draft_step(draft, fuse(draft, taps), tokens, positions, over_block, past)
    path = jnp.broadcast_to(offsets, (batch, places))
    return out.carry, commit(cache, [out.keys], [out.values], path, count)


def propose_chain(
    draft: Draft,
    cache: KVCache,
    taps: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    length: int,
    temperature: jax.Array | None,
    uniforms: jax.Array | None,
) -> Proposal:
    """Catch up, then draft `length` tokens one after another.

    Args:
      draft, cache, taps, tokens, count: as in `catch_up`; the last real slot starts the chain.
      length: W >= 1.
      temperature: [B], the request's temperature for sampling; None drafts the argmax. Top-k and top-p are not applied
        to the draft's distribution: verification only needs to know what was sampled from.
      uniforms: [B, W] in [0, 1), with a temperature.
    """
    with jax.named_scope("propose"):
        carry, cache = catch_up(draft, cache, taps, tokens, count)
        batch = tokens.shape[0]
        last = jnp.maximum(count - 1, 0)
        carry = jnp.take_along_axis(carry, last[:, None, None], axis=1)
        visible = jnp.arange(cache.max_length)[None, None] < cache.lengths[:, None, None]
        committed = Segment(cache.keys[0], cache.values[0], visible)
        seen = jnp.ones((batch, 1, 1), bool)
        scratch: list[Segment] = []
        chosen, distributions = [], []
        for step in range(length):
            logits = draft_logits(draft, carry)[:, 0]
            if temperature is None or uniforms is None:
                token = jnp.take(draft.vocab.d2t, most_likely(logits), mode="clip")
            else:
                mass = jax.nn.softmax(logits / temperature[:, None], axis=-1)
                full = jnp.zeros((batch, draft.config.vocab_size), jnp.float32)
                full = full.at[:, draft.vocab.d2t].set(mass)
                token = draw(full, uniforms[:, step])
                distributions.append(full)
            chosen.append(token)
            if step == length - 1:
                break
            positions = cache.lengths[:, None] + step
            out = draft_step(draft, carry, token[:, None], positions, seen, [committed, *scratch])
            scratch.append(Segment(out.keys, out.values, seen))
            carry = out.carry
        return Proposal(
            tokens=jnp.stack(chosen, axis=1),
            distribution=jnp.stack(distributions, axis=1) if distributions else None,
            cache=cache,
        )
