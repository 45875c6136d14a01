"""The parts that target and draft share, against transformers: rotary frequencies of every rule, rotation, RMSNorm;
and the contraction with its own gradient rule, against plain einsum."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3_jax.layers import contract, linear, rms_norm, rope_frequencies, rope_table, rotate, swiglu
from eagle3_jax.rope import RopeConfig

MAX_POSITIONS = 512
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3_8": LLAMA3 | {"factor": 8.0},
    "llama3_32": LLAMA3 | {"factor": 32.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_betas": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 0.7,
    },
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 256, "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}  # fmt: skip


def hf_config(rule: dict[str, Any], theta: float, head_dim: int) -> LlamaConfig:
    with warnings.catch_warnings():
        # transformers warns where factor x original length is not the maximum; the frequencies do not depend on it.
        warnings.simplefilter("ignore")
        return LlamaConfig(
            hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=MAX_POSITIONS,
            rope_parameters={**rule, "rope_theta": theta},
        )  # fmt: skip


def hf_frequencies(rule: dict[str, Any], theta: float, head_dim: int) -> tuple[np.ndarray, float]:
    config = hf_config(rule, theta, head_dim)
    if rule["rope_type"] == "default":
        embedding = LlamaRotaryEmbedding(config)
        return embedding.inv_freq.numpy(), embedding.attention_scaling
    inverse, factor = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, torch.device("cpu"))
    return inverse.numpy(), factor


def our_rope(rule: dict[str, Any], theta: float) -> RopeConfig:
    return RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": rule, "max_position_embeddings": MAX_POSITIONS}, "")


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", RULES)
def test_frequencies_and_factor_equal_transformers(name: str, theta: float, head_dim: int):
    inverse, factor = rope_frequencies(our_rope(RULES[name], theta), head_dim)
    expected, expected_factor = hf_frequencies(RULES[name], theta, head_dim)
    assert inverse.dtype == np.float32
    np.testing.assert_allclose(inverse, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("default", "dynamic")])
def test_scaled_frequencies_differ_from_the_unscaled_ones(name: str):
    plain, _ = rope_frequencies(our_rope(RULES["default"], 10000.0), 64)
    scaled, _ = rope_frequencies(our_rope(RULES[name], 10000.0), 64)
    assert np.abs(scaled / plain - 1).max() > 0.1


def test_llama3_frequencies_follow_the_factor_of_the_config():
    eight, _ = rope_frequencies(our_rope(RULES["llama3_8"], 10000.0), 64)
    thirty_two, _ = rope_frequencies(our_rope(RULES["llama3_32"], 10000.0), 64)
    assert np.abs(eight / thirty_two - 1).max() > 1


def test_dynamic_equals_transformers_at_every_length_served():
    config = hf_config(RULES["dynamic"], 10000.0, 64)
    inverse, _ = rope_frequencies(our_rope(RULES["dynamic"], 10000.0), 64)
    for length in (1, MAX_POSITIONS // 2, MAX_POSITIONS):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
        np.testing.assert_allclose(inverse, expected.numpy(), rtol=1e-6)
    beyond, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=2 * MAX_POSITIONS)
    assert np.abs(beyond.numpy() / inverse - 1).max() > 0.1


@pytest.mark.parametrize("name", ["default", "llama3_8", "yarn"])
def test_rotation_equals_transformers_at_unequal_positions(name: str):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 4, 16)).astype(np.float32)  # [B, T, heads, H]
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 101, 511, 3]])
    embedding = LlamaRotaryEmbedding(hf_config(RULES[name], 10000.0, 16))
    heads_first = torch.from_numpy(x).transpose(1, 2)
    cos, sin = embedding(heads_first, torch.from_numpy(positions))
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    table = rope_table(our_rope(RULES[name], 10000.0), 16, jnp.asarray(positions, jnp.int32))
    ours = rotate(jnp.asarray(x), table)
    np.testing.assert_allclose(ours, expected.transpose(1, 2).numpy(), atol=5e-5)
    assert np.abs(np.asarray(ours)[:, 1:] - x[:, 1:]).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_equals_transformers(dtype: str):
    rng = np.random.default_rng(1)
    x = (10 * rng.standard_normal((2, 3, 64))).astype(np.float32)
    weight = (1 + 0.2 * rng.standard_normal(64)).astype(np.float32)
    norm = LlamaRMSNorm(64, eps=1e-5).to(getattr(torch, dtype))
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(weight))
        expected = norm(torch.from_numpy(x).to(getattr(torch, dtype))).float().numpy()
    ours = rms_norm(jnp.asarray(x, dtype), jnp.asarray(weight, dtype), 1e-5)
    assert ours.dtype == jnp.dtype(dtype)
    # In bf16 the two may round one of the two products differently: one unit in the last of 8 bits.
    np.testing.assert_allclose(ours.astype(jnp.float32), expected, rtol=1e-6 if dtype == "float32" else 2**-7)


def test_rms_norm_adds_eps_to_the_mean_square():
    ones = jnp.ones((1, 4))
    np.testing.assert_allclose(rms_norm(ones, jnp.ones(4), 3.0), 0.5 * np.ones((1, 4)), rtol=1e-6)


def test_swiglu_equals_its_formula():
    rng = np.random.default_rng(2)
    x, gate, up, down = (rng.standard_normal(shape) for shape in ((2, 3, 8), (16, 8), (16, 8), (8, 16)))
    gated = x @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    ours = swiglu(*(jnp.asarray(part, jnp.float32) for part in (x, gate, up, down)))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


# Every pattern that the models use: linear maps, scores, mixing, per-slot products.
PATTERNS = {
    "BTD,FD->BTF": ((2, 5, 8), (6, 8)),
    "BKGTH,BKHS->BKGTS": ((2, 2, 3, 5, 4), (2, 2, 4, 7)),
    "BKGTS,BKSH->BKGTH": ((2, 2, 3, 5, 7), (2, 2, 7, 4)),
    "BKGTH,BKHT->BKGT": ((2, 2, 3, 5, 4), (2, 2, 4, 5)),
}


def operands(pattern: str, y_dtype: str = "float32", x_dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(3)
    first, second = (rng.standard_normal(shape) for shape in PATTERNS[pattern])
    return jnp.asarray(first, x_dtype), jnp.asarray(second, y_dtype)


def gradients(function: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Value and gradients of a loss with another weight on each output, so that no two can be swapped unseen."""

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        out = function(x, y).astype(jnp.float32)
        return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(x, y)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_contract_and_its_gradients_equal_einsum_in_fp32(pattern: str, wide: bool):
    x, y = operands(pattern)
    value, ours = gradients(lambda x, y: contract(pattern, x, y, wide), x, y)
    expected_value, expected = gradients(lambda x, y: jnp.einsum(pattern, x, y), x, y)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_contract_in_bf16_keeps_the_gradient_of_fp32_weights_in_fp32(pattern: str):
    x, y = operands(pattern, x_dtype="bfloat16")
    _, (x_gradient, y_gradient) = gradients(lambda x, y: contract(pattern, x, y), x, y)
    _, (_, expected) = gradients(lambda x, y: jnp.einsum(pattern, x, y), x.astype(jnp.float32), y)
    assert x_gradient.dtype == jnp.bfloat16
    assert y_gradient.dtype == jnp.float32
    scale = np.abs(expected).max()
    np.testing.assert_allclose(y_gradient, expected, atol=0.01 * scale)
    # Unrounded: a gradient that had passed through bf16 would have its last 16 bits zero.
    assert (np.asarray(y_gradient).view(np.uint32) & 0xFFFF).any()


def test_contract_returns_the_operands_precision_or_the_accumulator():
    x, y = operands("BTD,FD->BTF", x_dtype="bfloat16")
    narrow, wide = (contract("BTD,FD->BTF", x, y, wide) for wide in (False, True))
    assert narrow.dtype == jnp.bfloat16
    assert wide.dtype == jnp.float32
    exact = np.einsum("BTD,FD->BTF", np.asarray(x, np.float64), np.asarray(y.astype(jnp.bfloat16), np.float64))
    np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-5)


# Plain, heads as output, heads as input; one row is padded where the precision is narrow.
LINEAR = {
    "BTI,OI->BTO": ((2, 5, 8), (6, 8)),
    "BTI,NHI->BTNH": ((1, 1, 8), (4, 3, 8)),
    "BTNH,ONH->BTO": ((1, 1, 4, 3), (8, 4, 3)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", LINEAR)
def test_linear_equals_einsum_forward_and_backward(pattern: str, dtype: str):
    rng = np.random.default_rng(4)
    x, weight = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in LINEAR[pattern])
    exact = lambda x, w: jnp.einsum(pattern, x.astype(jnp.float32), w.astype(jnp.float32))
    assert linear(x, weight).dtype == x.dtype
    out = linear(x, weight, wide=True)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(x, weight), rtol=1e-5, atol=1e-5)
    _, ours = gradients(linear, x, weight)
    _, expected = gradients(exact, x, weight)
    for mine, theirs in zip(ours, expected, strict=True):
        wide = np.asarray(theirs, np.float32)
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), wide, atol=(1e-5 if dtype == "float32" else 0.02) * np.abs(wide).max()
        )
