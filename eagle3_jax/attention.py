"""Grouped-query attention over explicit segments, and the attention of packed rows and training-time test.

A segment is a run of keys with its own mask: the committed cache, the block being verified, the rows drafted so far
in this round. One softmax runs over all of them, so nothing has to be copied into one buffer first.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, G = N/K, H head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.layers import contract

# Who computes the target's attention: the products below, which run anywhere, or jax.nn.dot_product_attention, whose
# "cudnn" is a fused kernel for NVIDIA GPUs in bf16 or fp16 and whose "xla" is the same call for any device.
BACKENDS = ("einsum", "xla", "cudnn")
# Who computes the attention of packed rows: all queries at once, which is the form that the others are checked against;
# chunks of queries, for any device; or the TPU's kernel.
PACKED = ("reference", "chunked", "splash")
LANES = 128  # what that kernel wants rows and heads to be multiples of
QUERY_CHUNK = 512  # queries of a packed row whose scores exist at one time
MASKED = -1e30  # finite, so that a query with every key masked, as in padding, gives a mean of the values and not NaN


@struct.dataclass
class Segment:
    """Keys and values with the mask that says which query may read which of them.

    Attributes:
      keys: [B, K, H, S], already rotated.
      values: [B, K, S, H].
      mask: [B, T, S] bool, True where the query may attend.
    """

    keys: jax.Array
    values: jax.Array
    mask: jax.Array


def _grouped(queries: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, G, T, H], scaled by 1/sqrt(H)."""
    batch, length, heads, head_dim = queries.shape
    scaled = queries * jnp.asarray(head_dim**-0.5, queries.dtype)
    return scaled.reshape(batch, length, num_kv_heads, heads // num_kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def _ungrouped(out: jax.Array) -> jax.Array:
    """[B, K, G, T, H] -> [B, T, N, H]."""
    batch, kv_heads, groups, length, head_dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, head_dim)


def attend(queries: jax.Array, segments: Sequence[Segment], backend: str = "einsum") -> jax.Array:
    """Softmax attention over the concatenation of the segments; scores and softmax in fp32.

    Args:
      queries: [B, T, N, H], already rotated.
      segments: at least one; every query must be allowed at least one key.
      backend: one of BACKENDS; the others than "einsum" copy all keys and values into one buffer.

    Returns:
      [B, T, N, H] in the queries' dtype.
    """
    with jax.named_scope("attention"):
        if backend != "einsum":
            return _library_attention(queries, segments, backend)
        q = _grouped(queries, segments[0].keys.shape[1])
        scores = []
        for segment in segments:
            # In the cache's precision, which may be above the queries'.
            score = contract("BKGTH,BKHS->BKGTS", q.astype(segment.keys.dtype), segment.keys, True)
            scores.append(jnp.where(segment.mask[:, None, None], score, MASKED))
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        out, start = None, 0
        for segment in segments:
            part = weights[..., start : start + segment.keys.shape[3]].astype(segment.values.dtype)
            start += segment.keys.shape[3]
            mixed = contract("BKGTS,BKSH->BKGTH", part, segment.values, True)
            out = mixed if out is None else out + mixed
        assert out is not None
        return _ungrouped(out.astype(queries.dtype))


def _library_attention(queries: jax.Array, segments: Sequence[Segment], backend: str) -> jax.Array:
    keys = jnp.concatenate([segment.keys for segment in segments], axis=3).transpose(0, 3, 1, 2)
    values = jnp.concatenate([segment.values for segment in segments], axis=2).transpose(0, 2, 1, 3)
    mask = jnp.concatenate([segment.mask for segment in segments], axis=2)[:, None]
    implementation: Any = backend
    out = jax.nn.dot_product_attention(
        queries.astype(keys.dtype), keys, values, mask=mask, implementation=implementation
    )
    return out.astype(queries.dtype)


def splash_fits(length: int, head_dim: int) -> bool:
    """Whether the TPU's kernel takes rows of T tokens and heads of H dimensions."""
    return length % LANES == 0 and head_dim % LANES == 0


def document_mask(documents: jax.Array) -> jax.Array:
    """[B, T] document ids -> [B, T, T] bool: causal, within the same document; padding (0) reads itself."""
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]


def packed_attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    documents: jax.Array,
    own: Sequence[tuple[jax.Array, jax.Array]] = (),
    *,
    kind: str = "chunked",
    chunk: int = QUERY_CHUNK,
) -> jax.Array:
    """Attention of packed rows: causal within each document, and at later steps of training-time test to own keys.

    Slot i at unrolled step s reads the step-0 keys j <= i of its document, and the keys that slot i itself made at
    steps 1..s. The latter are one scalar product each, so the [T, T] mask of explicit attention over the concatenated
    keys never exists (paper section 3.2 and Figure 6; official code, cnets.py:280-310). One softmax runs over all T + s
    columns: merging two partial softmaxes through their log-sum-exp would lose the gradient through it.

    Rows longer than `chunk` are read by so many queries at a time ("chunked"), whose scores are computed again in the
    backward pass: memory grows with T and not with its square. "reference" makes all scores at once; "splash" is
    `splash.splash_attend`.

    Args:
      queries: [B, T, N, H], rotated; of step s at positions i + s.
      keys, values: [B, K, H, T] and [B, K, T, H] of step 0.
      documents: [B, T] int32, 0 for padding.
      own: for each step 1..s, keys [B, K, H, T] and values [B, K, T, H] made at that step.
      kind: one of PACKED.
      chunk: c, queries at a time.

    Returns:
      [B, T, N, H].
    """
    if kind == "splash":
        # Imported here: Pallas takes a while, and only TPUs need it.
        from eagle3_jax.splash import splash_attend

        return splash_attend(queries, keys, values, documents, own)
    with jax.named_scope("packed_attention"):
        q = _grouped(queries, keys.shape[1])
        length = q.shape[3]
        if kind == "reference" or length <= chunk:
            return _ungrouped(_packed(q, keys, values, document_mask(documents), own))
        count = -(-length // chunk)
        extra = count * chunk - length

        def split(array: jax.Array, axis: int) -> jax.Array:
            """The chunks of an axis, in front."""
            padded = jnp.pad(array, [(0, extra if index == axis else 0) for index in range(array.ndim)])
            shape = (*array.shape[:axis], count, chunk, *array.shape[axis + 1 :])
            return jnp.moveaxis(padded.reshape(shape), axis, 0)

        places = jnp.arange(length, dtype=jnp.int32)

        @jax.checkpoint
        def one(item: tuple) -> jax.Array:
            q_part, document, place, own_part = item
            mask = (document[:, :, None] == documents[:, None]) & (place[:, None] >= places[None])[None]
            return _packed(q_part, keys, values, mask, own_part)

        parts = (
            split(q, 3), split(documents, 1), jnp.arange(count * chunk, dtype=jnp.int32).reshape(count, chunk),
            [(split(k, 3), split(v, 2)) for k, v in own],
        )  # fmt: skip
        out = jnp.moveaxis(jax.lax.map(one, parts), 0, 3)
        return _ungrouped(out.reshape(*q.shape[:3], count * chunk, q.shape[4])[:, :, :, :length])


def _packed(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    own: Sequence[tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Queries [B, K, G, t, H] under a mask [B, t, T] over step-0 keys, each with its own keys [B, K, H, t]."""
    scores = contract("BKGTH,BKHS->BKGTS", q, keys, True)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    if own:
        diagonal = [contract("BKGTH,BKHT->BKGT", q, mine, True) for mine, _ in own]
        scores = jnp.concatenate([scores, jnp.stack(diagonal, axis=-1)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    length = keys.shape[3]
    out = contract("BKGTS,BKSH->BKGTH", weights[..., :length], values)
    for index, (_, mine) in enumerate(own):
        out = out + weights[..., length + index, None] * mine[:, :, None]
    return out


def causal_mask(lengths: jax.Array, block: int, cache_length: int) -> tuple[jax.Array, jax.Array]:
    """Masks of a block of new tokens that follows each row's committed prefix.

    Args:
      lengths: [B] committed tokens in the cache.
      block: T, tokens in the block, each reading those before it and itself.
      cache_length: S.

    Returns:
      Mask over the cache [B, T, S] and over the block [B, T, T].
    """
    batch = lengths.shape[0]
    committed = jnp.arange(cache_length)[None, None] < lengths[:, None, None]
    over_cache = jnp.broadcast_to(committed, (batch, block, cache_length))
    over_block = jnp.broadcast_to(jnp.tril(jnp.ones((block, block), bool))[None], (batch, block, block))
    return over_cache, over_block
