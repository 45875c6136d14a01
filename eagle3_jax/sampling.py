"""From logits to a distribution, and from a distribution and a uniform number to a token.

Every random decision about the token at position p of a row takes its uniforms from (seed, p) alone. A proposal that
is rejected leaves nothing behind: when position p is decided in a later round, the same uniforms are used for the first
time to decide something that is kept. So the text of a row depends on its seed and prompt only, not on the batch it
ran in, and cutting a block short needs no random state to be rolled back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Sampling:
    """How tokens are chosen, one value per row; changing a value never recompiles.

    Attributes:
      temperature: [B] fp32, above 0 (greedy decoding is a structure of its own and ignores it).
      top_k: [B] int32, keep the k most likely tokens; 0 keeps all.
      top_p: [B] fp32, keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
      seed: [B] uint32.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array


def target_distribution(logits: jax.Array, sampling: Sampling, *, filters: bool) -> jax.Array:
    """The distribution that decoding must reproduce: temperature, then top-k, then top-p, as transformers applies them.

    Args:
      logits: [B, T, V] fp32.
      sampling: per-row values.
      filters: whether any row uses top-k or top-p; static, since sorting the vocabulary is what costs.

    Returns:
      [B, T, V] fp32 probabilities.
    """
    logits = logits / sampling.temperature[:, None, None]
    if filters:
        vocab = logits.shape[-1]
        descending = jnp.sort(logits, axis=-1, descending=True)
        # transformers keeps every token tied with the k-th, and so do we.
        k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
        kth = jnp.take_along_axis(descending, (k - 1)[:, None, None], axis=-1)
        kept = jnp.where(descending >= kth, descending, -jnp.inf)
        mass = jax.nn.softmax(kept, axis=-1)
        # A token stays while the mass of the more likely ones is below top_p; the first always stays. A row that keeps
        # all is told apart by its value, since rounding can make the sum reach 1 too early.
        top_p = sampling.top_p[:, None, None]
        inside = ((jnp.cumsum(mass, axis=-1) - mass) < top_p) | (top_p >= 1)
        inside = (inside | (jnp.arange(vocab)[None, None] == 0)) & (descending >= kth)
        count = jnp.sum(inside, axis=-1, keepdims=True)
        lowest = jnp.take_along_axis(descending, count - 1, axis=-1)
        # Of the tokens tied at the border the lowest ids stay, so that a tiny top_p agrees with greedy decoding;
        # transformers keeps as many, whichever its unstable sort puts last.
        above, tied = logits > lowest, logits == lowest
        room = count - jnp.sum(above, axis=-1, keepdims=True)
        logits = jnp.where(above | (tied & (jnp.cumsum(tied, axis=-1) <= room)), logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1)


def most_likely(logits: jax.Array) -> jax.Array:
    """First index of the largest value: [..., V] -> [...] int32.

    Two plain reductions, which every backend vectorises; a fused argmax is scalar on the CPU and ten times slower.
    """
    vocab = logits.shape[-1]
    top = jnp.max(logits, axis=-1, keepdims=True)
    index = jnp.arange(vocab, dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (vocab,))
    return jnp.minimum(jnp.min(jnp.where(logits == top, index, vocab), axis=-1), vocab - 1)


def draw(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """Token at quantile `uniform` of an unnormalised distribution; never one without mass.

    Args:
      mass: [..., V] fp32, non-negative, with a positive sum.
      uniform: [...] fp32 in [0, 1).

    Returns:
      [...] int32.
    """
    vocab = mass.shape[-1]
    cumulative = jnp.cumsum(mass, axis=-1)
    threshold = (uniform * cumulative[..., -1])[..., None]
    index = jnp.arange(vocab, dtype=jnp.int32).reshape((1,) * (mass.ndim - 1) + (vocab,))
    # A parallel sum rounds differently at each place, so it can rise where there is no mass; the mass itself decides.
    some = mass > 0
    first = jnp.min(jnp.where(some & (cumulative > threshold), index, vocab), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(some, index, 0), axis=-1))


def uniforms(seed: jax.Array, positions: jax.Array, tries: int = 1) -> jax.Array:
    """The uniforms that decide the tokens at some positions.

    Args:
      seed: [B] uint32.
      positions: [B, T] int32, absolute positions of the tokens to be decided.
      tries: most proposals that are tried at one position, one after another.

    Returns:
      [2 + tries, B, T] fp32 in [0, 1): for proposing, for drawing what is left, for accepting each try.
    """

    def one(row_seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(row_seed), position), (2 + tries,), jnp.float32)

    drawn = jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seed, positions)
    return jnp.moveaxis(drawn, -1, 0)
