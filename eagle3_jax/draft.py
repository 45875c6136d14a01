"""The EAGLE-3 draft: fuse the target's taps, run one decoder layer over [embedding ; feature], predict.

Slot j pairs the feature of position j with the embedding of token j+1 and predicts token j+2 (paper section 3.1).
`draft_step` is the inference path over a cache; `draft_unroll` is training-time test, where the draft's own outputs
replace the target's features. Both call the same layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.attention import Segment, attend, packed_attend
from eagle3_jax.config import DraftConfig
from eagle3_jax.layers import linear, rms_norm, rope_table, rotate, swiglu
from eagle3_jax.params import ParamSpec
from eagle3_jax.sharding import constrain
from eagle3_jax.vocab import DraftVocab


@struct.dataclass
class DraftParams:
    """Trainable parameters, in the order of the computation. Dt is the target's width, A the number of taps.

    Attributes:
      fc: [D, A*Dt], fuses the taps.
      fc_norm: A norms [Dt] on the taps before fusion, or None (EAGLE-3.1).
      input_norm: [A*Dt], norm of all taps together before fusion, or None.
      embed_norm: [D], norm of the token embedding ("input_layernorm" in files).
      feature_norm: [D], norm of the feature ("hidden_norm" in files).
      q, k, v: [heads, H, 2D], from [embedding ; feature].
      o: [D, N, H].
      post_norm, gate, up, down: the feed-forward part.
      norm: [D], before the head.
      lm_head: [C, D].
    """

    fc: jax.Array
    fc_norm: tuple[jax.Array, ...] | None
    input_norm: jax.Array | None
    embed_norm: jax.Array
    feature_norm: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    post_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    norm: jax.Array
    lm_head: jax.Array


@struct.dataclass
class Draft:
    """A draft model.

    Attributes:
      params: what training changes.
      vocab: the draft vocabulary, which belongs to the weights.
      embed: [V, D], frozen; the target's own array where the widths agree.
      config: static description.
    """

    params: DraftParams
    vocab: DraftVocab
    embed: jax.Array
    config: DraftConfig = struct.field(pytree_node=False)


@struct.dataclass
class DraftOutput:
    """What one draft step gives.

    Attributes:
      carry: [B, T, D], fed back as the feature of the next step (before the final norm unless `norm_output`).
      keys: [B, K, H, T] of the new slots, rotated.
      values: [B, K, T, H].
    """

    carry: jax.Array
    keys: jax.Array
    values: jax.Array


def draft_specs(config: DraftConfig) -> DraftParams:
    """The abstract parameter tree, named as the official code and SGLang name the tensors."""
    d, dt, f, n, k, h = (
        config.hidden_size, config.target_hidden_size, config.intermediate_size, config.num_heads,
        config.num_kv_heads, config.head_dim,
    )  # fmt: skip
    taps = len(config.taps)

    # The abstract tree has a ParamSpec where the real one has an array; Any says so to the type checker.
    def matrix(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        inputs = 2 if name == "midlayer.self_attn.o_proj" else 1  # o_proj reads (N, H)
        return ParamSpec(shape, axes, f"{name}.weight", inputs=inputs)

    def norm(name: str, width: int = d) -> Any:
        return ParamSpec((width,), ("norm",), f"{name}.weight", init="ones")

    return DraftParams(
        fc=matrix("fc", (d, taps * dt), ("embed", "features")),
        fc_norm=tuple(norm(f"fc_norm.{index}", dt) for index in range(taps)) if config.fc_norm else None,
        input_norm=norm("input_norm", taps * dt) if config.norm_before_fc else None,
        embed_norm=norm("midlayer.input_layernorm"),
        feature_norm=norm("midlayer.hidden_norm"),
        q=matrix("midlayer.self_attn.q_proj", (n, h, 2 * d), ("heads", "head_dim", "embed")),
        k=matrix("midlayer.self_attn.k_proj", (k, h, 2 * d), ("kv_heads", "head_dim", "embed")),
        v=matrix("midlayer.self_attn.v_proj", (k, h, 2 * d), ("kv_heads", "head_dim", "embed")),
        o=matrix("midlayer.self_attn.o_proj", (d, n, h), ("embed", "heads", "head_dim")),
        post_norm=norm("midlayer.post_attention_layernorm"),
        gate=matrix("midlayer.mlp.gate_proj", (f, d), ("mlp", "embed")),
        up=matrix("midlayer.mlp.up_proj", (f, d), ("mlp", "embed")),
        down=matrix("midlayer.mlp.down_proj", (d, f), ("embed", "mlp")),
        norm=norm("norm"),
        lm_head=matrix("lm_head", (config.draft_vocab_size, d), ("vocab", "embed")),
    )


def fuse(draft: Draft, taps: jax.Array) -> jax.Array:
    """Fuse the tapped states into features: [B, T, A*Dt] -> [B, T, D] (paper section 3.1)."""
    params, config = draft.params, draft.config
    with jax.named_scope("fuse"):
        if params.fc_norm is not None:
            parts = jnp.split(taps, len(config.taps), axis=-1)
            parts = [rms_norm(part, weight, config.rms_norm_eps) for part, weight in zip(parts, params.fc_norm)]
            taps = jnp.concatenate(parts, axis=-1)
        elif params.input_norm is not None:
            taps = rms_norm(taps, params.input_norm, config.rms_norm_eps)
        return constrain(linear(taps, params.fc), "batch", None, None)


def embed_tokens(draft: Draft, tokens: jax.Array) -> jax.Array:
    """Frozen embeddings of target ids: [B, T] -> [B, T, D]."""
    return jax.lax.stop_gradient(jnp.take(draft.embed, tokens, axis=0, mode="clip"))


def _projections(
    draft: Draft, features: jax.Array, tokens: jax.Array, table: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Residual stream [B, T, D], rotated queries [B, T, N, H], rotated keys [B, K, H, T], values [B, K, T, H]."""
    params, eps = draft.params, draft.config.rms_norm_eps
    embeddings = embed_tokens(draft, tokens).astype(features.dtype)
    normed = rms_norm(features, params.feature_norm, eps)
    x = jnp.concatenate([rms_norm(embeddings, params.embed_norm, eps), normed], axis=-1)
    q = rotate(linear(x, params.q), table)
    k = rotate(linear(x, params.k), table).transpose(0, 2, 3, 1)
    v = linear(x, params.v).transpose(0, 2, 1, 3)
    return (normed if draft.config.norm_before_residual else features), q, k, v


def _output(draft: Draft, residual: jax.Array, attended: jax.Array) -> jax.Array:
    """From the attention's output [B, T, N, H] to the carry [B, T, D]."""
    params, eps = draft.params, draft.config.rms_norm_eps
    x = residual + linear(attended, params.o)
    x = x + swiglu(rms_norm(x, params.post_norm, eps), params.gate, params.up, params.down)
    x = rms_norm(x, params.norm, eps) if draft.config.norm_output else x
    return constrain(x, "batch", None, None)


def draft_step(
    draft: Draft,
    features: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    past: Sequence[Segment] = (),
) -> DraftOutput:
    """Run the draft's layer on new slots over what it has cached.

    Args:
      draft: the model.
      features: [B, T, D], fused taps, or the carry of the previous step.
      tokens: [B, T] int32 target ids, one position ahead of the features.
      positions: [B, T] int32, of the features.
      mask: [B, T, T] bool, among the new slots.
      past: segments already cached, with their masks [B, T, S].
    """
    with jax.named_scope("draft_step"):
        table = rope_table(draft.config.rope, draft.config.head_dim, positions)
        residual, q, k, v = _projections(draft, features, tokens, table)
        attended = attend(q, [*past, Segment(k, v, mask)])
        return DraftOutput(carry=_output(draft, residual, attended), keys=k, values=v)


# What of each unrolled step is kept for the backward pass; the rest is computed again.
REMATERIALISE = {
    "nothing": jax.checkpoint_policies.everything_saveable,  # nothing is computed again
    "activations": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the products with weights are kept
    "all": jax.checkpoint_policies.nothing_saveable,
}


def draft_unroll(
    draft: Draft,
    features: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    documents: jax.Array,
    steps: int,
    rematerialise: str = "nothing",
    attention: str = "chunked",
) -> list[jax.Array]:
    """Training-time test: unroll the draft on its own outputs, with the true tokens (paper section 3.2).

    At step s, slot j combines its carry with token j+1+s at position j+s, and attends to the step-0 keys up to j of its
    document and to its own keys of steps 1..s.

    Args:
      draft: the model.
      features: [B, T, D], fused taps.
      tokens: [B, T] int32, the row itself; shifted here.
      positions: [B, T] int32.
      documents: [B, T] int32, 0 for padding.
      steps: how many steps, at least 1.
      rematerialise: a key of REMATERIALISE.
      attention: one of `attention.PACKED`.

    Returns:
      The carry [B, T, D] of each step. The last s+1 slots of step s read past the row and mean nothing.
    """

    def one(draft: Draft, carry: jax.Array, step: int, first: Any, own: list) -> tuple[jax.Array, Any]:
        table = rope_table(draft.config.rope, draft.config.head_dim, positions + step)
        ahead = jnp.roll(tokens, -(1 + step), axis=1)
        residual, q, k, v = _projections(draft, carry, ahead, table)
        keys, values = (k, v) if first is None else first
        own = own if first is None else [*own, (k, v)]
        attended = packed_attend(q, keys, values, documents, own, kind=attention)
        return _output(draft, residual, attended), (k, v)

    if rematerialise != "nothing":
        one = jax.checkpoint(one, policy=REMATERIALISE[rematerialise], static_argnums=(2,))
    carries: list[jax.Array] = []
    own: list[tuple[jax.Array, jax.Array]] = []
    first, carry = None, features
    for step in range(steps):
        with jax.named_scope(f"unroll_{step}"):
            carry, made = one(draft, carry, step, first, own)
            if first is None:
                first = made
            else:
                own.append(made)
            carries.append(carry)
    return carries


def draft_hidden(draft: Draft, carry: jax.Array) -> jax.Array:
    """What the head reads: the normed carry (with `norm_output`, the carry is normed already). [..., D] -> same."""
    if draft.config.norm_output:
        return carry
    return rms_norm(carry, draft.params.norm, draft.config.rms_norm_eps)


def draft_logits(draft: Draft, carry: jax.Array) -> jax.Array:
    """Logits over the draft vocabulary in fp32: [B, T, D] -> [B, T, C]."""
    with jax.named_scope("draft_head"):
        return linear(draft_hidden(draft, carry), draft.params.lm_head, wide=True)
