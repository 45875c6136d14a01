"""The draft's arithmetic once more, in NumPy and float64, for `convert.verify` to hold the library's against.

No cache, no compiler: every sequence is computed whole, attention over explicitly repeated heads. It reads tensors
under the official names, as a folder holds them. Source: arXiv:2503.01840, sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eagle3_jax.config import DraftConfig
from eagle3_jax.layers import rope_frequencies


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, angles: np.ndarray, factor: float) -> np.ndarray:
    """[heads, T, H] by [T, H/2]: dimension i pairs with i + H/2."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Reference:
    """A draft.

    Args:
      config: its description.
      tensors: its parameters by official name, any float type.
      embed: [V, D].
    """

    def __init__(self, config: DraftConfig, tensors: Mapping[str, np.ndarray], embed: np.ndarray):
        self.config, self.embed = config, embed
        self.tensors = {name: array.astype(np.float64) for name, array in tensors.items()}

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        return _norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def fuse(self, taps: np.ndarray) -> np.ndarray:
        """[T, A*Dt] -> [T, D]."""
        taps = taps.astype(np.float64)
        if self.config.fc_norm:
            parts = np.split(taps, len(self.config.taps), axis=-1)
            taps = np.concatenate([self._normed(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        if self.config.norm_before_fc:
            taps = self._normed(taps, "input_norm")
        return self._linear(taps, "fc")

    def layer(self, features: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features [T, D] and the token after each, [T], at positions 0 ... T-1: carries [T, D] and logits [T, C]."""
        config, length = self.config, len(tokens)
        embedded = self._normed(self.embed[tokens].astype(np.float64), "midlayer.input_layernorm")
        normed = self._normed(features, "midlayer.hidden_norm")
        both = np.concatenate([embedded, normed], axis=-1)
        inverse, factor = rope_frequencies(config.rope, config.head_dim)
        angles = np.arange(length)[:, None] * inverse.astype(np.float64)

        def heads(name: str, count: int) -> np.ndarray:
            projected = self._linear(both, f"midlayer.self_attn.{name}_proj").reshape(length, count, config.head_dim)
            return np.repeat(projected.transpose(1, 0, 2), config.num_heads // count, axis=0)

        query = _rotate(heads("q", config.num_heads), angles, factor)
        key = _rotate(heads("k", config.num_kv_heads), angles, factor)
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(config.head_dim)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ heads("v", config.num_kv_heads)
        residual = normed if config.norm_before_residual else features
        x = residual + self._linear(mixed.transpose(1, 0, 2).reshape(length, -1), "midlayer.self_attn.o_proj")
        inner = self._normed(x, "midlayer.post_attention_layernorm")
        gate = self._linear(inner, "midlayer.mlp.gate_proj")
        x = x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(inner, "midlayer.mlp.up_proj"),
                             "midlayer.mlp.down_proj")  # fmt: skip
        last = self._normed(x, "norm")
        return last if config.norm_output else x, self._linear(last, "lm_head")

    def steps(self, taps: np.ndarray, tokens: np.ndarray, kept: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Carry [D] and logits [C] of the last slot at each drafting step.

        Args:
          taps: [at least kept, A*Dt], of the committed tokens.
          tokens: [kept + steps - 1], the token after each slot; those from `kept` on are the drafted ones.
          kept: committed slots.
        """
        features, results = self.fuse(taps[:kept]), []
        for length in range(kept, len(tokens) + 1):
            carry, logits = self.layer(features, tokens[:length])
            features = np.concatenate([features, carry[-1:]])
            results.append((carry[-1], logits[-1]))
        return results
