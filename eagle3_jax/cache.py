"""Key/value cache: fixed length, one count of committed rows per sequence, nothing written that was not accepted.

A forward pass returns the keys and values of its new tokens; `commit` writes the accepted ones. So a rejected token
leaves no trace, and there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from eagle3_jax.errors import InputError

# One program is compiled per cache length, and attention costs grow with it: short steps at first, doubling later.
CACHE_BUCKETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


@struct.dataclass
class KVCache:
    """Rotated keys and values of the committed tokens.

    Attributes:
      keys: per layer, [B, K, H, S]: a product with queries reads them along S, several times faster on a CPU.
      values: per layer, [B, K, S, H].
      lengths: [B] int32, committed rows; row i of a sequence holds position i.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    @property
    def max_length(self) -> int:
        """S, the rows that fit."""
        return self.keys[0].shape[3]


@struct.dataclass
class History:
    """The decided tokens of each row, which is all that some drafters keep.

    Attributes:
      tokens: [B, S] int32.
      lengths: [B] int32.
    """

    tokens: jax.Array
    lengths: jax.Array


def empty_cache(
    layers: int, batch: int, num_kv_heads: int, length: int, head_dim: int, dtype: DTypeLike = jnp.float32
) -> KVCache:
    """A cache of zeros with no committed rows, in `dtype`, or in fp32 on a CPU."""
    if jax.default_backend() == "cpu":
        # Scatters into a narrower cache are widened there, the whole cache to and fro at every write.
        dtype = jnp.float32
    return KVCache(
        keys=tuple(jnp.zeros((batch, num_kv_heads, head_dim, length), dtype) for _ in range(layers)),
        values=tuple(jnp.zeros((batch, num_kv_heads, length, head_dim), dtype) for _ in range(layers)),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def commit(
    cache: KVCache,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    path: jax.Array,
    count: jax.Array,
) -> KVCache:
    """Append the first `count` rows of `path` to each sequence.

    Args:
      cache: to be extended; donate it, so that the write happens in place.
      keys: per layer, [B, K, H, T], of the block's tokens.
      values: per layer, [B, K, T, H].
      path: [B, P] int32, which of the block's rows to keep, in order.
      count: [B] int32, how many of the path's rows count; the rest is not written.

    Rows that would fall beyond the cache are dropped by the scatter; the caller sizes the cache so that none does
    (`cache_bucket`).
    """
    batch, places = path.shape
    offsets = jnp.arange(places, dtype=jnp.int32)[None]
    # A row that does not count goes to index S, out of range, where mode="drop" discards it.
    target = jnp.where(offsets < count[:, None], cache.lengths[:, None] + offsets, cache.max_length)
    row = jnp.arange(batch)[:, None]

    def write_keys(buffer: jax.Array, new: jax.Array) -> jax.Array:
        kept = jnp.take_along_axis(new, path[:, None, None, :], axis=3).astype(buffer.dtype)
        return buffer.at[row, :, :, target].set(kept.transpose(0, 3, 1, 2), mode="drop")

    def write_values(buffer: jax.Array, new: jax.Array) -> jax.Array:
        kept = jnp.take_along_axis(new, path[:, None, :, None], axis=2).astype(buffer.dtype)
        return buffer.at[row, :, target].set(kept.transpose(0, 2, 1, 3), mode="drop")

    return KVCache(
        keys=tuple(write_keys(buffer, new) for buffer, new in zip(cache.keys, keys, strict=True)),
        values=tuple(write_values(buffer, new) for buffer, new in zip(cache.values, values, strict=True)),
        lengths=cache.lengths + count,
    )


def cache_bucket(needed: int, limit: int) -> int:
    """Smallest bucket that holds `needed` rows.

    Args:
      needed: prompt + new tokens + draft length + 1.
      limit: the model's context plus a block.

    Returns:
      One of `CACHE_BUCKETS`, or beyond them the next multiple of the largest.

    Raises:
      InputError: `needed` exceeds the largest bucket and the limit.
    """
    for bucket in CACHE_BUCKETS:
        if needed <= bucket:
            return bucket
    if needed <= limit:
        return -(-needed // CACHE_BUCKETS[-1]) * CACHE_BUCKETS[-1]
    raise InputError(
        expected=f"at most {limit} tokens of prompt, answer and draft together",
        found=f"{needed}",
        remedy="Shorten the prompt or --max-new-tokens.",
    )
