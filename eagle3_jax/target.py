"""The target: a LLaMA-family decoder as one pure forward pass.

The same function serves prefill, decoding and verification: tokens, positions, an explicit mask and a cache go in;
the final hidden state, the tapped states and the new tokens' keys and values come out. It never writes the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.attention import Segment, attend, packed_attend
from eagle3_jax.cache import KVCache
from eagle3_jax.config import TargetConfig
from eagle3_jax.layers import linear, rms_norm, rope_table, rotate, swiglu
from eagle3_jax.params import ParamSpec, is_spec
from eagle3_jax.sharding import constrain


@struct.dataclass
class TargetLayer:
    """Parameters of one decoder layer; biases and the norms of heads, [H], are None where the config has none."""

    input_norm: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    post_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    q_bias: jax.Array | None = None
    k_bias: jax.Array | None = None
    v_bias: jax.Array | None = None
    o_bias: jax.Array | None = None
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None


@struct.dataclass
class TargetParams:
    """All parameters of a target.

    Attributes:
      embed: [V, D].
      layers: one entry per layer, for decoding (slicing a stack inside a decoding step copies it); or one layer whose
        arrays have all layers in front, [L, ...], for the passes of training, a program as long as one layer.
      norm: [D].
      lm_head: [V, D]; of a tied model, the very array of `embed`.
    """

    embed: jax.Array
    layers: tuple[TargetLayer, ...] | TargetLayer
    norm: jax.Array
    lm_head: jax.Array


@struct.dataclass
class Target:
    """A target model: parameters and their static description.

    Attributes:
      params: the weights.
      config: the architecture.
      attention: who computes attention, one of `attention.BACKENDS`.
    """

    params: TargetParams
    config: TargetConfig = struct.field(pytree_node=False)
    attention: str = struct.field(pytree_node=False, default="einsum")


@struct.dataclass
class TargetOutput:
    """What one forward pass gives.

    Attributes:
      hidden: [B, T, D], after the final norm.
      taps: [B, T, A*D], the states at the tapped boundaries, low to high, without any norm.
      keys: per layer, [B, K, H, T], rotated; none of packed rows through stacked layers.
      values: per layer, [B, K, T, H].
    """

    hidden: jax.Array
    taps: jax.Array
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def target_specs(config: TargetConfig) -> TargetParams:
    """The abstract parameter tree, named as HuggingFace names the tensors."""
    d, f, n, k, h = (
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
    )  # fmt: skip

    def layer(index: int) -> TargetLayer:
        # The abstract tree has a ParamSpec where the real one has an array; Any says so to the type checker.
        def matrix(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
            inputs = 2 if name == "self_attn.o_proj" else 1  # o_proj reads (N, H)
            return ParamSpec(shape, axes, f"model.layers.{index}.{name}.weight", inputs=inputs)

        def norm(name: str, width: int = d) -> Any:
            return ParamSpec((width,), ("norm",), f"model.layers.{index}.{name}.weight", init="ones")

        def bias(name: str, present: bool, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
            return ParamSpec(shape, axes, f"model.layers.{index}.{name}.bias", init="zeros") if present else None

        attn, mlp = config.attention_bias, config.mlp_bias
        return TargetLayer(
            input_norm=norm("input_layernorm"),
            q=matrix("self_attn.q_proj", (n, h, d), ("heads", "head_dim", "embed")),
            k=matrix("self_attn.k_proj", (k, h, d), ("kv_heads", "head_dim", "embed")),
            v=matrix("self_attn.v_proj", (k, h, d), ("kv_heads", "head_dim", "embed")),
            o=matrix("self_attn.o_proj", (d, n, h), ("embed", "heads", "head_dim")),
            post_norm=norm("post_attention_layernorm"),
            gate=matrix("mlp.gate_proj", (f, d), ("mlp", "embed")),
            up=matrix("mlp.up_proj", (f, d), ("mlp", "embed")),
            down=matrix("mlp.down_proj", (d, f), ("embed", "mlp")),
            q_bias=bias("self_attn.q_proj", attn, (n, h), ("heads", "head_dim")),
            k_bias=bias("self_attn.k_proj", attn, (k, h), ("kv_heads", "head_dim")),
            v_bias=bias("self_attn.v_proj", attn, (k, h), ("kv_heads", "head_dim")),
            o_bias=bias("self_attn.o_proj", config.output_bias, (d,), ("norm",)),
            gate_bias=bias("mlp.gate_proj", mlp, (f,), ("mlp",)),
            up_bias=bias("mlp.up_proj", mlp, (f,), ("mlp",)),
            down_bias=bias("mlp.down_proj", mlp, (d,), ("norm",)),
            q_norm=norm("self_attn.q_norm", h) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", h) if config.qk_norm else None,
        )

    embed: Any = ParamSpec((config.vocab_size, d), ("vocab", "embed"), "model.embed_tokens.weight", inputs=1)
    final: Any = ParamSpec((d,), ("norm",), "model.norm.weight", init="ones")
    head: Any = ParamSpec((config.vocab_size, d), ("vocab", "embed"), "lm_head.weight", inputs=1)
    layers = tuple(layer(index) for index in range(config.num_layers))
    return TargetParams(embed=embed, layers=layers, norm=final, lm_head=head)


def stack_specs(layers: tuple[TargetLayer, ...]) -> Any:
    """The abstract layers as one, with all of them in front; `name` is the first one's."""
    stack = lambda spec: dataclasses.replace(spec, shape=(len(layers), *spec.shape), axes=("layers", *spec.axes))
    return jax.tree.map(stack, layers[0], is_leaf=is_spec)


def _layer_at(layers: tuple[TargetLayer, ...] | TargetLayer, index: int) -> TargetLayer:
    return layers[index] if isinstance(layers, tuple) else jax.tree.map(lambda stacked: stacked[index], layers)


def _bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.reshape((1, 1, *bias.shape))


def _head_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    return x if weight is None else rms_norm(x, weight, eps)


def _mlp_block(layer: TargetLayer, x: jax.Array) -> jax.Array:
    if layer.gate_bias is None:
        return swiglu(x, layer.gate, layer.up, layer.down)
    gate = _bias(linear(x, layer.gate), layer.gate_bias)
    up = _bias(linear(x, layer.up), layer.up_bias)
    return _bias(linear(jax.nn.silu(gate) * up, layer.down), layer.down_bias)


@partial(jax.jit, static_argnames=("eps", "backend", "packed"))
def _layer(
    layer: TargetLayer,
    x: jax.Array,
    table: tuple[jax.Array, jax.Array],
    segments: Sequence[Segment],
    mask: jax.Array | None,
    documents: jax.Array | None,
    eps: float,
    backend: str,
    packed: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer; jitted so that it is traced once for all layers, which the compiler then inlines."""
    normed = rms_norm(x, layer.input_norm, eps)
    q = _head_norm(_bias(linear(normed, layer.q), layer.q_bias), layer.q_norm, eps)
    k = _head_norm(_bias(linear(normed, layer.k), layer.k_bias), layer.k_norm, eps)
    q, k = rotate(q, table), rotate(k, table).transpose(0, 2, 3, 1)
    v = _bias(linear(normed, layer.v), layer.v_bias).transpose(0, 2, 1, 3)
    if documents is not None:
        mixed = packed_attend(q, k, v, documents, kind=packed)
    else:
        assert mask is not None
        mixed = attend(q, [*segments, Segment(k, v, mask)], backend)
    x = x + _bias(linear(mixed, layer.o), layer.o_bias)
    x = x + _mlp_block(layer, rms_norm(x, layer.post_norm, eps))
    return constrain(x, "batch", None, None), k, v


def target_forward(
    target: Target,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None = None,
    *,
    documents: jax.Array | None = None,
    packed: str = "chunked",
    taps: tuple[int, ...] = (),
    cache: KVCache | None = None,
    cache_mask: jax.Array | None = None,
) -> TargetOutput:
    """Run the target on a block of new tokens.

    Args:
      target: the model.
      tokens: [B, T] int32.
      positions: [B, T] int32; tree nodes of one level share a position.
      mask: [B, T, T] bool, which new token may read which; or
      documents: [B, T] int32 of packed rows, 0 for padding: each token reads its document up to itself.
      packed: who computes the attention of packed rows, one of `attention.PACKED`.
      taps: boundaries IN(i) to return: the state entering layer i, for i = L leaving the last layer, for i = L + 1
        after the final norm.
      cache: committed rows, read only.
      cache_mask: [B, T, S] bool; required with a cache.

    Raises:
      ValueError: one of cache and cache_mask without the other; both or none of mask and documents; documents with a
        cache.
    """
    if (mask is None) == (documents is None) or (documents is not None and cache is not None):
        raise ValueError("either a mask, or documents, which go without a cache")
    if (cache is None) != (cache_mask is None):
        raise ValueError("cache and cache_mask belong together: the mask says which cached rows may be read")
    config, params = target.config, target.params
    table = rope_table(config.rope, config.head_dim, positions)
    with jax.named_scope("embed"):
        # mode="clip": token ids are checked on the host; NaN for a bad one would only hide where it came from.
        x = constrain(jnp.take(params.embed, tokens, axis=0, mode="clip"), "batch", None, None)
    if documents is not None and isinstance(params.layers, TargetLayer):
        return _scan_layers(target, x, table, documents, packed, taps)
    tapped, keys, values = {}, [], []
    for index in range(config.num_layers):
        layer = _layer_at(params.layers, index)
        tapped[index] = x
        with jax.named_scope(f"layer_{index}"):
            past = []
            if cache is not None and cache_mask is not None:
                past = [Segment(cache.keys[index], cache.values[index], cache_mask)]
            x, k, v = _layer(layer, x, table, past, mask, documents, config.rms_norm_eps, target.attention, packed)
            keys.append(k)
            values.append(v)
    hidden = rms_norm(x, params.norm, config.rms_norm_eps)
    tapped |= {config.num_layers: x, config.num_layers + 1: hidden}
    return TargetOutput(
        hidden=hidden,
        taps=jnp.concatenate([tapped[tap] for tap in taps], axis=-1) if taps else x[..., :0],
        keys=tuple(keys),
        values=tuple(values),
    )


def _scan_layers(
    target: Target,
    x: jax.Array,
    table: tuple[jax.Array, jax.Array],
    documents: jax.Array,
    packed: str,
    taps: tuple[int, ...],
) -> TargetOutput:
    """The layers of packed rows as one loop; states are written to their tap as they come by. No keys are returned."""
    config, params = target.config, target.params
    assert isinstance(params.layers, TargetLayer)

    def step(carry: tuple[jax.Array, tuple[jax.Array, ...]], item: tuple[jax.Array, TargetLayer]) -> Any:
        x, kept = carry
        index, layer = item
        kept = tuple(jnp.where(index == tap, x, state) for tap, state in zip(taps, kept))
        x, _, _ = _layer(layer, x, table, [], None, documents, config.rms_norm_eps, target.attention, packed)
        return (x, kept), None

    first = (x, tuple(jnp.zeros_like(x) for _ in taps))
    (x, kept), _ = jax.lax.scan(step, first, (jnp.arange(config.num_layers), params.layers))
    hidden = rms_norm(x, params.norm, config.rms_norm_eps)
    ends = {config.num_layers: x, config.num_layers + 1: hidden}
    states = [ends.get(tap, state) for tap, state in zip(taps, kept)]
    joined = jnp.concatenate(states, axis=-1) if taps else x[..., :0]
    return TargetOutput(hidden=hidden, taps=joined, keys=(), values=())


def target_logits(target: Target, hidden: jax.Array) -> jax.Array:
    """Logits over the vocabulary in fp32: [B, T, D] (after the final norm) -> [B, T, V]."""
    with jax.named_scope("lm_head"):
        return linear(hidden, target.params.lm_head, wide=True)
