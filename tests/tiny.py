"""Tiny models that tests share: a random HuggingFace LLaMA (T0), a random draft for it (D0), and wrong drafts (BAD)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.params import init_params, is_spec
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target, target_specs
from eagle3_jax.training.loss import Batch
from eagle3_jax.vocab import vocab_from_ids

T0: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def hf_target(seed: int = 0, *, scale: float = 4.0, family: str = "llama", **changes: Any) -> LlamaForCausalLM:
    """A random HuggingFace LLaMA, or one of another family, in fp32. Weights are `scale` times the usual, so that
    logits and attention differ enough between tokens for a mistake to show."""
    torch.manual_seed(seed)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = CONFIG_MAPPING[family](**(T0 | rope | changes))
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.2 * torch.randn_like(weight))
            else:
                weight.mul_(scale)
    return model


def from_hf(model: LlamaForCausalLM) -> Target:
    """The same weights as ours, without going through files."""
    config = TargetConfig.from_hf(model.config.to_dict() | {"torch_dtype": None}, "memory")
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    specs = target_specs(config)

    def load(spec):
        if spec.name not in state or (config.tie_word_embeddings and spec.name == "lm_head.weight"):
            return jnp.asarray(state["model.embed_tokens.weight"])
        return jnp.asarray(state[spec.name].reshape(spec.shape).copy())

    return Target(params=jax.tree.map(load, specs, is_leaf=is_spec), config=config)


@functools.cache
def target(seed: int = 0) -> Target:
    """T0 as ours."""
    return from_hf(hf_target(seed))


def draft(target: Target, seed: int = 0, *, size: int = 96, scale: float = 4.0, **changes: Any) -> Draft:
    """A random draft D0. Its vocabulary is a random sorted subset of the target's."""
    config = DraftConfig.for_target(target.config, draft_vocab_size=size, **changes)
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(config.vocab_size, size, replace=False))
    params = init_params(draft_specs(config), jax.random.key(seed))

    def vary(spec, leaf):
        if spec.init == "ones":
            return jnp.asarray(1 + 0.2 * rng.standard_normal(leaf.shape), jnp.float32)
        return leaf * scale

    params = jax.tree.map(vary, draft_specs(config), params, is_leaf=is_spec)
    embed = target.params.embed
    if config.hidden_size != config.target_hidden_size:
        embed = jnp.asarray(rng.standard_normal((config.vocab_size, config.hidden_size)), jnp.float32)
    return Draft(params=params, vocab=vocab_from_ids(ids, config.vocab_size), embed=embed, config=config)


def bad_drafts(target: Target) -> dict[str, Draft]:
    """D0 and what can be wrong with a draft; none may change a single token of the output."""
    good = draft(target)
    rng = np.random.default_rng(5)
    shuffled = vocab_from_ids(rng.permutation(np.asarray(good.vocab.d2t)), target.config.vocab_size)
    return {
        "d0": good,
        "random": draft(target, seed=11),
        "shuffled_map": good.replace(vocab=shuffled),
        "wrong_theta": good.replace(config=dataclasses.replace(good.config, rope=RopeConfig(theta=500000.0))),
        "wrong_taps": good.replace(config=dataclasses.replace(good.config, taps=(0, 3, 8))),
    }


def training_batch(draft: Draft, documents: Any, spans: Any, seed: int = 0) -> Batch:
    """Rows with random tokens and random features of the right shape, for tests of the loss.

    Args:
      draft: gives the widths and the vocabulary, which holds two in three of the target's guesses.
      documents: [B, T], from 1, 0 for padding.
      spans: [B, T], 0 outside replies.
      seed: of the random parts.
    """
    documents, spans = np.asarray(documents, np.int32), np.asarray(spans, np.int32)
    rng = np.random.default_rng(seed)
    config, shape = draft.config, documents.shape
    first = np.concatenate([np.ones((shape[0], 1), bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    index = np.arange(shape[1])
    positions = index - np.maximum.accumulate(np.where(first, index, 0), axis=1)
    known = rng.choice(np.asarray(draft.vocab.d2t), shape)
    features = lambda width: jnp.asarray(rng.standard_normal((*shape, width)), jnp.float32)
    return Batch(
        tokens=jnp.asarray(np.where(documents > 0, rng.integers(0, config.vocab_size, shape), 0), jnp.int32),
        spans=jnp.asarray(spans),
        documents=jnp.asarray(documents),
        positions=jnp.asarray(np.where(documents > 0, positions, 0), jnp.int32),
        taps=features(len(config.taps) * config.target_hidden_size),
        hidden=features(config.target_hidden_size),
        argmax=jnp.asarray(
            np.where(rng.random(shape) < 0.6, known, rng.integers(0, config.vocab_size, shape)), jnp.int32
        ),
    )


def assistant_slots(spans: np.ndarray, step: int) -> np.ndarray:
    """The slots whose guess at a step of the unrolled draft is measured, bool [R, T].

    Slot j reads feature j and token j+1+step and predicts token j+2+step. It counts iff tokens j+1 ... j+2+step all
    exist in the row and lie in one span. A span holds tokens of one document and never its first token, so slot j is
    in that document too.

    Args:
      spans: int [R, T], 0 outside replies, no id shared by two replies of a row.
      step: 0 for the first guess.
    """
    rows, length = spans.shape
    slots = np.zeros((rows, length), bool)
    last = length - 2 - step  # this many slots have all their tokens
    if last > 0:
        first = spans[:, 1 : 1 + last]
        inside = first > 0
        for ahead in range(1, step + 2):
            inside &= spans[:, 1 + ahead : 1 + ahead + last] == first
        slots[:, :last] = inside
    return slots
