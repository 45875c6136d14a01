"""A plain PyTorch loop of the published training-time-test recipe, for `bench.peers` to measure ours against.

What the official code does (SafeAILab/EAGLE, traineagle3/cnets.py): each unrolled step runs the layer over the whole
row, its queries against the step-0 keys under a causal mask and against the row's own keys of later steps on the
diagonal, then the head over all tokens, and a soft cross-entropy in fp32 over [B, T, C] logits.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from eagle3_jax.config import DraftConfig


class Norm(nn.Module):
    """RMSNorm in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [B, heads, T, H] at positions [B, T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


class PlainDraft(nn.Module):
    """The draft's layer and head, of a config's shape."""

    def __init__(self, config: DraftConfig, embed: torch.Tensor):
        super().__init__()
        d, f, self.config = config.hidden_size, config.intermediate_size, config
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.fc = linear(len(config.taps) * config.target_hidden_size, d)
        self.q, self.k, self.v, self.o = linear(2 * d, heads), linear(2 * d, kv), linear(2 * d, kv), linear(heads, d)
        self.gate, self.up, self.down = linear(d, f), linear(d, f), linear(f, d)
        self.embed_norm, self.feature_norm, self.post_norm, self.norm = (Norm(d, config.rms_norm_eps) for _ in range(4))
        self.head = linear(d, config.draft_vocab_size)
        self.register_buffer("embed", embed)

    def step(self, x: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: list):
        """One unrolled step; `cache` holds the keys and values of the steps before it."""
        config = self.config
        both = torch.cat([self.embed_norm(F.embedding(tokens, self.embed).to(x.dtype)), self.feature_norm(x)], -1)
        split = lambda y: y.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        places = positions + len(cache)
        q = rotate(split(self.q(both)), places, config.rope.theta)
        groups = config.num_heads // config.num_kv_heads
        k = rotate(split(self.k(both)), places, config.rope.theta).repeat_interleave(groups, 1)
        v = split(self.v(both)).repeat_interleave(groups, 1)
        cache.append((k, v))
        scale = config.head_dim**-0.5
        scores = (q @ cache[0][0].transpose(2, 3)).float() * scale + mask
        own = [(q * key).sum(-1, keepdim=True).float() * scale for key, _ in cache[1:]]
        weights = torch.softmax(torch.cat([scores, *own], -1), -1).to(q.dtype)
        length = x.shape[1]
        mixed = weights[..., :length] @ cache[0][1]
        for index, (_, value) in enumerate(cache[1:]):
            mixed = mixed + weights[..., length + index, None] * value
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.post_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def later(values: torch.Tensor) -> torch.Tensor:
    """Shifted by one along the row, with zeros behind."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)


def loss_of(model: PlainDraft, batch: dict[str, torch.Tensor], head: torch.Tensor, known: torch.Tensor, steps: int):
    """The recipe's loss of a batch: sum over steps of 0.8^s times the mean soft cross-entropy."""
    x, tokens = model.fc(batch["taps"]), later(batch["tokens"])
    documents = batch["documents"]
    length = documents.shape[1]
    visible = (documents[:, :, None] == documents[:, None]) & torch.tril(torch.ones(length, length, dtype=torch.bool))
    mask = torch.where(visible, 0.0, -1e30)[:, None]
    inside = later((batch["spans"] > 0) & known[batch["argmax"]])
    with torch.no_grad():
        # Once, as the official code does; later steps shift them.
        label = later((batch["hidden"] @ head.T).float())
    total, cache = 0.0, []
    for step in range(steps):
        x = model.step(x, tokens, batch["positions"], mask, cache)
        logits = model.head(model.norm(x)).float()
        each = -(torch.softmax(label, -1) * F.log_softmax(logits, -1)).sum(-1)
        total = total + 0.8**step * (each * inside).sum() / inside.sum().clamp(min=1)
        tokens, label, inside = later(tokens), later(label), later(inside)
    return total


def main() -> int:
    """Time updates on the arrays that `bench.peers` left in a folder: FOLDER UPDATES BATCH STEPS float32|bfloat16."""
    folder, (updates, batch_rows, steps) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    narrow = sys.argv[5] == "bfloat16"
    dtype = torch.bfloat16 if narrow else torch.float32
    read = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
    config = DraftConfig.from_hf(json.loads((folder / "draft.json").read_text(encoding="utf-8")), "draft.json")
    torch.manual_seed(0)
    model = PlainDraft(config, torch.from_numpy(np.array(read("embed"))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    head, known = torch.from_numpy(np.array(read("head"))).to(dtype), torch.from_numpy(np.array(read("t2d")))
    arrays = {name: read(name) for name in ("tokens", "spans", "documents", "positions", "argmax", "taps", "hidden")}
    seconds, losses = [], []
    for update in range(updates):
        began = time.perf_counter()
        places = [(update * batch_rows + place) % len(arrays["tokens"]) for place in range(batch_rows)]
        batch = {}
        for name, array in arrays.items():
            part = torch.from_numpy(array[places])
            batch[name] = part.view(torch.bfloat16).to(dtype) if name in ("taps", "hidden") else part.long()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = loss_of(model, batch, head, known, steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "losses": losses, "peak_bytes": peak, "attention": "explicit mask"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
