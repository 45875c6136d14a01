"""The parts that target and draft share: RMSNorm, rotary embedding, SwiGLU.

Letters in shapes: B batch, T query positions, D model width, N query heads, K key/value heads, H head dimension,
F feed-forward width.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.rope import RopeConfig


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis; statistics in fp32, cast back to x's dtype, then scaled (as HuggingFace LLaMA).

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.
    """
    with jax.named_scope("rms_norm"):
        wide = x.astype(jnp.float32)
        scaled = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return scaled.astype(x.dtype) * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)


def contract(subscripts: str, x: jax.Array, y: jax.Array, wide: bool = False) -> jax.Array:
    """Einsum of two operands in x's precision, accumulated in fp32, forward and backward.

    Weights may be kept in a higher precision than x (fp32 masters under bf16 compute): they are cast at use, and their
    gradient comes out in their own precision, unrounded. Automatic differentiation would widen the backward products
    instead, which costs a multiple where bf16 units exist.

    Args:
      subscripts: einsum's, explicit ("BTD,FD->BTF"); every letter stands in two of the three terms.
      x: activations; their dtype is the one computed in.
      y: weights or activations.
      wide: return the fp32 accumulator instead of x's dtype.
    """
    return _contract_with_gradient(subscripts, x, y, wide)


def _contract(subscripts: str, x: jax.Array, y: jax.Array, wide: bool) -> jax.Array:
    out = jnp.einsum(subscripts, x, y.astype(x.dtype), preferred_element_type=jnp.float32)
    return out if wide else out.astype(x.dtype)


def _contract_forward(
    subscripts: str, x: jax.Array, y: jax.Array, wide: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _contract(subscripts, x, y, wide), (x, y)


def _contract_backward(
    subscripts: str, wide: bool, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y = saved
    inputs, out = subscripts.split("->")
    first, second = inputs.split(",")
    narrow = cotangent.astype(x.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    x_gradient = product(f"{out},{second}->{first}", narrow, y.astype(x.dtype))
    y_gradient = product(f"{first},{out}->{second}", x, narrow)
    return x_gradient.astype(x.dtype), y_gradient.astype(y.dtype)


_contract_with_gradient = jax.custom_vjp(_contract, nondiff_argnums=(0, 3))
_contract_with_gradient.defvjp(_contract_forward, _contract_backward)


def linear(x: jax.Array, weight: jax.Array, wide: bool = False) -> jax.Array:
    """A linear map, inputs and outputs possibly split into heads, in a shape that the CPU back end is fast at.

    There, a three-dimensional weight is multiplied ten times slower than the same weight as a matrix, and one in bf16
    by a single row fifteen times slower than by two, since all of it is widened first.

    Args:
      x: [B, T, *inputs].
      weight: [*outputs, *inputs].
      wide: return the fp32 accumulator instead of x's dtype.

    Returns:
      [B, T, *outputs].
    """
    batch, length, *inputs = x.shape
    outputs = weight.shape[: weight.ndim - len(inputs)]
    width = math.prod(inputs)
    flat = x.reshape(batch, length, width)
    if batch * length == 1 and x.dtype.itemsize == 2 and jax.default_backend() == "cpu":
        flat = jnp.pad(flat, ((0, 0), (0, 1), (0, 0)))
    out = contract("BTI,OI->BTO", flat, weight.reshape(math.prod(outputs), width), wide)
    return out[:, :length].reshape(batch, length, *outputs)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """SiLU-gated feed-forward without biases: [B, T, D] with gate, up [F, D] and down [D, F] -> [B, T, D]."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [H/2] in fp32 and the factor on cos and sin, by transformers' rules (modeling_rope_utils).

    "dynamic" equals "default" up to its original length, beyond which `TargetConfig.context_limit` refuses to go.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    assert rope.original_max_positions
    assert rope.low_freq_factor
    assert rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    # Long waves are stretched by the factor, short ones kept, those between are blended.
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    stretched = np.where(wavelength > low, inverse / rope.factor, inverse)
    between = (wavelength <= low) & (wavelength >= high)
    return np.where(between, blended, stretched).astype(np.float32)


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    original = rope.original_max_positions
    assert original

    def dimension(rotations: float) -> float:
        """The (fractional) frequency index that turns `rotations` times over the original length."""
        turns = original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    keep = 1 - np.clip(ramp, 0, 1)
    frequencies = inverse / rope.factor * (1 - keep) + inverse * keep

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    attention = rope.attention_factor
    if attention is None:
        if rope.mscale and rope.mscale_all_dim:
            attention = scale(rope.mscale) / scale(rope.mscale_all_dim)
        else:
            attention = scale(1.0)
    return frequencies.astype(np.float32), float(attention)


def rope_table(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotation at each position.

    Args:
      rope: the rule.
      head_dim: H.
      positions: [B, T] int32.

    Returns:
      cos, sin: [B, T, H/2] fp32.
    """
    inverse, factor = rope_frequencies(rope, head_dim)
    # A product and not an einsum: a matrix unit would round the positions to bf16 or TF32.
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse)[None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate queries or keys in the half-split layout of HuggingFace: dimension i pairs with i + H/2.

    Args:
      x: [B, T, heads, H].
      table: cos and sin, each [B, T, H/2].
    """
    cos, sin = (jnp.expand_dims(part, 2).astype(x.dtype) for part in table)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
