"""Attention of packed rows on a TPU: one splash-attention call over the keys of all unrolled steps.

The keys of step 0 and a slot's own keys of later steps are laid end to end, [k0; k1; ...; ks], under a static mask
[causal | diagonal | ... | diagonal]. The kernel skips the blocks that the mask leaves empty, so that a later step costs
little more than the causal part, and its own gradient is right, because one softmax runs over all columns. Documents
are segment ids. `jax.experimental.pallas.ops.tpu.splash_attention` has the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from eagle3_jax.attention import LANES, splash_fits
from eagle3_jax.sharding import batch_axes

BLOCK = 512  # queries and keys in one block


@dataclasses.dataclass(frozen=True)
class UnrollMask(masks.Mask):
    """[causal | diagonal ...]: which of the concatenated keys a slot may read, never held as a whole.

    Attributes:
      length: T.
      steps: 1 + s, how many runs of T keys there are.
    """

    length: int
    steps: int

    @property
    def shape(self) -> tuple[int, int]:
        """[T, (1 + s) T]."""
        return self.length, self.steps * self.length

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(size)[part] for size, part in zip(self.shape, index, strict=True))
        rows, columns = rows[:, None], columns[None]
        return np.where(columns < self.length, rows >= columns, rows == columns % self.length)


def splash_attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    documents: jax.Array,
    own: Sequence[tuple[jax.Array, jax.Array]] = (),
    *,
    interpret: bool = False,
) -> jax.Array:
    """`attention.packed_attend` through the TPU's kernel; on a mesh each device has its own rows and heads.

    Args:
      queries: [B, T, N, H], rotated.
      keys, values: [B, K, H, T] and [B, K, T, H] of step 0.
      documents: [B, T] int32, 0 for padding.
      own: for each step 1..s, keys [B, K, H, T] and values [B, K, T, H].
      interpret: run the kernel's steps as plain jax, on any device and very slowly.

    Returns:
      [B, T, N, H].

    Raises:
      ValueError: T or H are no multiples of `attention.LANES`.
    """
    _, length, heads, head_dim = queries.shape
    if not splash_fits(length, head_dim):
        raise ValueError(f"splash attention needs multiples of {LANES}, not rows of {length} and heads of {head_dim}")
    q = (queries * jnp.asarray(head_dim**-0.5, queries.dtype)).transpose(0, 2, 1, 3)
    k = jnp.concatenate([keys, *(more for more, _ in own)], axis=3).transpose(0, 1, 3, 2)
    v = jnp.concatenate([values, *(more for _, more in own)], axis=2)
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else mesh.shape["tensor"]
    # Heads that cannot be split evenly are computed on every device.
    across = "tensor" if parts > 1 and heads % parts == 0 and keys.shape[1] % parts == 0 else None

    def mine(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array) -> jax.Array:
        call: Any = _kernel(q.shape[1], length, 1 + len(own), interpret)
        segments = kernel.SegmentIds(q=documents, kv=jnp.tile(documents, (1, 1 + len(own))))
        return jax.vmap(lambda q, k, v, segments: call(q=q, k=k, v=v, segment_ids=segments))(q, k, v, segments)

    with jax.named_scope("splash_attention"):
        if not mesh.empty:
            rows = batch_axes(mesh.shape)
            split = PartitionSpec(rows, across)
            mine = jax.shard_map(
                mine, in_specs=(split, split, split, PartitionSpec(rows)), out_specs=split, check_vma=False
            )
        return mine(q, k, v, documents).transpose(0, 2, 1, 3)


def _kernel(heads: int, length: int, steps: int, interpret: bool) -> kernel.SplashAttentionKernel:
    block = next(size for size in range(min(BLOCK, length), 0, -LANES) if length % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = masks.MultiHeadMask([UnrollMask(length, steps)] * heads)
    return kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
