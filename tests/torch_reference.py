"""An EAGLE-3 draft in PyTorch, written for tests from the published description and kept as plain as possible: no
cache, every sequence recomputed whole, attention with an explicit mask over explicitly repeated heads.

Tensors are named as in the official checkpoints. Everything runs in float64, so that a difference is the other side's
rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + H/2]) by position * inverse[i]: [B, heads, T, H] with positions [B, T]."""
    angle = positions.to(x.dtype)[:, None, :, None] * inverse
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v: q [B, N, T, H], k and v [B, K, S, H], mask [B, T, S] bool -> [B, N, T, H]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask[:, None], -math.inf).softmax(-1) @ v


def concatenated_mask(mask: Tensor, steps: int) -> Tensor:
    """[mask | diagonal | diagonal ...]: the keys of step 0, then those each slot made itself at steps 1..steps."""
    own = torch.eye(mask.shape[-1], dtype=torch.bool).expand_as(mask)
    return torch.cat([mask, *[own] * steps], -1)


class Reference:
    """The draft.

    Args:
      tensors: weights under the official names; trainable ones get gradients.
      embed: [V, H] token embeddings.
      inverse: [H/2] rotary frequencies.
    """

    def __init__(
        self, tensors: dict[str, Tensor], embed: Tensor, inverse: Tensor, *, heads: int, kv_heads: int, eps: float,
        taps: int, norm_output: bool = False, norm_before_residual: bool = False,
    ):  # fmt: skip
        self.tensors = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
        self.embed, self.inverse = embed.double(), inverse.double()
        self.heads, self.kv_heads, self.eps, self.taps = heads, kv_heads, eps, taps
        self.norm_output, self.norm_before_residual = norm_output, norm_before_residual

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def fuse(self, taps: Tensor) -> Tensor:
        """Low, middle, high (each normed first in EAGLE-3.1) joined (and normed together), then one linear map."""
        parts = list(taps.double().chunk(self.taps, -1))
        if "fc_norm.0.weight" in self.tensors:
            parts = [rms_norm(part, self.weight(f"fc_norm.{i}"), self.eps) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if "input_norm.weight" in self.tensors:
            joined = rms_norm(joined, self.weight("input_norm"), self.eps)
        return joined @ self.weight("fc").T

    def projections(self, feature: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual, and q, k, v [B, heads, T, H] of [embedding ; feature]."""
        embedding = rms_norm(self.embed[tokens], self.weight("midlayer.input_layernorm"), self.eps)
        normed = rms_norm(feature, self.weight("midlayer.hidden_norm"), self.eps)
        x = torch.cat([embedding, normed], -1)

        def heads(name: str, count: int) -> Tensor:
            out = x @ self.weight(f"midlayer.self_attn.{name}_proj").T
            return out.unflatten(-1, (count, -1)).transpose(1, 2)

        q = rotate(heads("q", self.heads), positions, self.inverse)
        k = rotate(heads("k", self.kv_heads), positions, self.inverse)
        return normed if self.norm_before_residual else feature, q, k, heads("v", self.kv_heads)

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """What is fed back, and the logits."""
        x = residual + attended.transpose(1, 2).flatten(-2) @ self.weight("midlayer.self_attn.o_proj").T
        h = rms_norm(x, self.weight("midlayer.post_attention_layernorm"), self.eps)
        gate, up = h @ self.weight("midlayer.mlp.gate_proj").T, h @ self.weight("midlayer.mlp.up_proj").T
        y = x + (gate * torch.sigmoid(gate) * up) @ self.weight("midlayer.mlp.down_proj").T
        normed = rms_norm(y, self.weight("norm"), self.eps)
        return normed if self.norm_output else y, normed @ self.weight("lm_head").T

    def run(self, feature: Tensor, tokens: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """A whole sequence at positions start, start + 1, ...: carries [B, T, H] and logits [B, T, C]."""
        batch, length = tokens.shape
        positions = (start + torch.arange(length)).expand(batch, length)
        residual, q, k, v = self.projections(feature, tokens, positions)
        causal = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, length, length)
        return self.finish(residual, explicit_attention(q, k, v, causal))

    def unroll(
        self, feature: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, steps: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Training-time test: carries and logits by step. At step s slot j sees token j + 1 + s, s positions on."""
        results, keys, values = [], [], []
        for step in range(steps):
            ahead = tokens.roll(-(1 + step), 1)
            residual, q, k, v = self.projections(feature, ahead, positions + step)
            keys.append(k)
            values.append(v)
            every = concatenated_mask(mask, step)
            feature, logits = self.finish(
                residual, explicit_attention(q, torch.cat(keys, 2), torch.cat(values, 2), every)
            )
            results.append((feature, logits))
        return results
