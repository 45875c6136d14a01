"""The target against transformers: logits for every kind of config, the tapped states layer by layer, and the cache.
Weights of the random models are large enough that a wrong rotation, mask or bias moves the logits visibly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import commit, empty_cache
from eagle3_jax.checkpoint import fingerprint, fingerprint_of, load_target
from eagle3_jax.target import Target, TargetLayer, TargetOutput, target_forward, target_logits
from tests import tiny

SMOLLM2 = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct"

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "tied_biases_head_dim": {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32,
    },
    "head_dim": {"head_dim": 32},
    "every_head_its_own": {"num_key_value_heads": 4},
    "eps": {"rms_norm_eps": 1e-2},
    **{f"rope_{name}": {"rope_parameters": rule} for name, rule in ROPES.items()},
}  # fmt: skip


def hf_target(**changes: Any) -> LlamaForCausalLM:
    # A projection this wide keeps the logits of order 1, where 1e-4 is a few units of fp32 rounding over 8 layers.
    return tiny.hf_target(scale=2.0, **changes)


# One length for nearly all tests, so that each operation is compiled once.
def prompt(length: int = 64, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(7).integers(3, tiny.T0["vocab_size"], (batch, length))


def forward(target: Target, tokens: np.ndarray, taps: tuple[int, ...] = ()) -> TargetOutput:
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    return target_forward(target, jnp.asarray(tokens, jnp.int32), positions, mask, taps=taps)


def logits(target: Target, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(target_logits(target, forward(target, tokens).hidden))


def hf_logits(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str):
    model = hf_target(**CASES[name])
    tokens = prompt()
    expected = hf_logits(model, tokens)
    assert np.abs(logits(tiny.from_hf(model), tokens) - expected).max() < 1e-4
    assert expected.std() > 0.2


@pytest.mark.full
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers_for_every_combination(tied: bool, bias: bool, head_dim: int, rope: str):
    model = hf_target(
        tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, head_dim=head_dim, rope_parameters=ROPES[rope]
    )
    tokens = prompt()
    assert np.abs(logits(tiny.from_hf(model), tokens) - hf_logits(model, tokens)).max() < 1e-4


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ({"rope_parameters": ROPES["llama3"]}, {}),
        ({"rope_parameters": ROPES["linear"]}, {}),
        ({"rope_parameters": ROPES["yarn"]}, {}),
        ({"rope_parameters": ROPES["theta"]}, {}),
        ({"rms_norm_eps": 1e-2}, {}),
    ],
)
def test_the_comparison_would_notice_a_setting_that_is_ignored(changed: dict[str, Any], plain: dict[str, Any]):
    tokens = prompt()
    ours = logits(tiny.from_hf(hf_target(**plain)), tokens)
    assert np.abs(ours - hf_logits(hf_target(**changed), tokens)).max() > 1e-2


def test_every_bias_vector_moves_the_logits():
    target = tiny.from_hf(hf_target(attention_bias=True, mlp_bias=True))
    tokens = prompt()
    whole = logits(target, tokens)
    first, *others = target.params.layers
    # A bias on all keys adds the same to every score of a query when nothing is rotated, but not after rotation.
    for name in ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias"):
        bias = getattr(first, name)
        without = first.replace(**{name: jnp.zeros_like(bias)})
        params = target.params.replace(layers=(without, *others))
        assert np.abs(logits(target.replace(params=params), tokens) - whole).max() > 1e-3, name


def test_tied_head_is_the_embedding_array_itself():
    target = tiny.from_hf(hf_target(tie_word_embeddings=True))
    np.testing.assert_array_equal(target.params.lm_head, target.params.embed)


def relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def test_taps_are_the_states_entering_each_layer_and_leaving_the_last():
    model = hf_target()
    last = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    tokens = prompt()
    with torch.no_grad():
        states = [state.numpy() for state in model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states]
    handle.remove()
    # transformers norms the last entry, so the state leaving the last layer is the one the hook caught.
    expected = [*states[:-1], last[0].numpy()]
    count = model.config.num_hidden_layers
    taps = forward(tiny.from_hf(model), tokens, tuple(range(count + 2))).taps
    *ours, normed = np.split(np.asarray(taps), count + 2, axis=-1)
    # One further: after the final norm, which is what HuggingFace calls the last hidden state.
    assert relative(normed, states[-1]) < 1e-4
    for index in range(count + 1):
        assert relative(ours[index], expected[index]) < 1e-4, index
        assert relative(ours[index], expected[(index + 1) % (count + 1)]) > 0.05, index
    assert relative(ours[-1], states[-1]) > 0.05


def test_taps_are_joined_in_the_order_named(t0: Target):
    tokens = prompt()
    joined = forward(t0, tokens, (2, 4, 8)).taps
    for place, tap in enumerate((2, 4, 8)):
        np.testing.assert_array_equal(joined[..., 64 * place : 64 * (place + 1)], forward(t0, tokens, (tap,)).taps)
    assert forward(t0, tokens).taps.shape == (2, 64, 0)


def in_blocks(
    target: Target, tokens: np.ndarray, blocks: list[int], cache_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and taps of the same tokens fed in blocks through the cache."""
    config, batch = target.config, tokens.shape[0]
    cache = empty_cache(config.num_layers, batch, config.num_kv_heads, cache_length, config.head_dim)

    @jax.jit
    def step(cache, block):
        positions = cache.lengths[:, None] + jnp.arange(block.shape[1], dtype=jnp.int32)[None]
        over_cache, over_block = causal_mask(cache.lengths, block.shape[1], cache.max_length)
        out = target_forward(target, block, positions, over_block, taps=(1, 3), cache=cache, cache_mask=over_cache)
        path = jnp.broadcast_to(jnp.arange(block.shape[1], dtype=jnp.int32), block.shape)
        kept = jnp.full((batch,), block.shape[1], jnp.int32)
        return commit(cache, out.keys, out.values, path, kept), target_logits(target, out.hidden), out.taps

    parts, start = [], 0
    for size in blocks:
        cache, *part = step(cache, jnp.asarray(tokens[:, start : start + size], jnp.int32))
        parts.append(part)
        start += size
    assert start == tokens.shape[1]
    np.testing.assert_array_equal(cache.lengths, start)
    scores, taps = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return scores, taps


@pytest.mark.parametrize("blocks", [[1] * 12, [5, 1, 5, 1]])
def test_prefill_in_one_pass_equals_blocks_through_the_cache_to_its_last_row(blocks: list[int]):
    target = tiny.from_hf(hf_target(num_hidden_layers=3, head_dim=32))
    tokens = prompt(length=12)
    whole = forward(target, tokens, (1, 3))
    # The cache is full after the last block: a write past its end, or one that moves back, would show.
    scores, taps = in_blocks(target, tokens, blocks, cache_length=12)
    assert whole.keys[0].shape == (2, 2, 32, 12)
    np.testing.assert_allclose(scores, target_logits(target, whole.hidden), atol=1e-4)
    np.testing.assert_allclose(taps, whole.taps, atol=1e-4)


def test_a_cache_without_its_mask_is_refused(t0: Target):
    cache = empty_cache(t0.config.num_layers, 1, t0.config.num_kv_heads, 8, t0.config.head_dim)
    block = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="cache_mask"):
        target_forward(t0, block, block, jnp.ones((1, 1, 1), bool), cache=cache)


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.exists(), reason="the demo target is absent: `make target` brings it")
def test_logits_of_the_demo_target_equal_transformers_on_chat_prompts():
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    model = LlamaForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    target = load_target(SMOLLM2)
    for question in ("What is the capital of France?", "Write a haiku about rain.", "Compute 17 * 23, step by step."):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        tokens = np.asarray([ids])
        assert np.abs(logits(target, tokens) - hf_logits(model, tokens)).max() < 2e-3


@pytest.mark.parametrize("tied", [False, True])
def test_stacked_layers_give_what_separate_ones_give(tmp_path: Path, tied: bool):
    """Packed rows through one loop over the layers, loaded as such, against the layers one by one."""
    hf_target(tie_word_embeddings=tied, attention_bias=True).save_pretrained(tmp_path)
    each, stacked = load_target(tmp_path), load_target(tmp_path, layers="stacked")
    assert isinstance(stacked.params.layers, TargetLayer)
    assert fingerprint(each) == fingerprint(stacked) == fingerprint_of(tmp_path)
    for index, layer in enumerate(each.params.layers):
        for one, all_of_them in zip(jax.tree.leaves(layer), jax.tree.leaves(stacked.params.layers), strict=True):
            np.testing.assert_array_equal(all_of_them[index], one)
    tokens = jnp.asarray(prompt(), jnp.int32)
    documents = jnp.where(jnp.arange(tokens.shape[1]) < 20, 1, 2)[None].repeat(2, 0).astype(jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None].repeat(2, 0)
    run = jax.jit(lambda target: target_forward(target, tokens, positions, documents=documents, taps=(0, 3, 8, 9)))
    one, other = run(each), run(stacked)
    np.testing.assert_allclose(other.hidden, one.hidden, atol=1e-5)
    np.testing.assert_allclose(other.taps, one.taps, atol=1e-5 * float(jnp.abs(one.taps).max()))
    # Decoding takes either.
    mask = jnp.tril(jnp.ones((1, 4, 4), bool)).repeat(2, 0)
    block = jax.jit(lambda target: target_forward(target, tokens[:, :4], positions[:, :4], mask))
    np.testing.assert_allclose(block(stacked).keys[-1], block(each).keys[-1], atol=1e-6)
    nothing = load_target(tmp_path, layers="none")
    assert nothing.params.layers == ()
    np.testing.assert_array_equal(nothing.params.lm_head, each.params.lm_head)
