"""The draft against an independent PyTorch reference, at inference and in training-time test, and the two against each
other. Compared are the logits and the hidden state that is fed back, at every step and at positions above 0: a wrong
residual, norm or rotary layout agrees at the first step or at position 0 and fails only later."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3_jax.attention import Segment, attend, causal_mask, packed_attend
from eagle3_jax.cache import KVCache, commit, empty_cache
from eagle3_jax.draft import (
    Draft,
    draft_hidden,
    draft_logits,
    draft_specs,
    draft_step,
    draft_unroll,
    embed_tokens,
    fuse,
)
from eagle3_jax.params import is_spec
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target
from tests import tiny
from tests.torch_reference import Reference, concatenated_mask, explicit_attention

LLAMA3 = RopeConfig(
    theta=10000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
)

VARIANTS: dict[str, dict[str, Any]] = {
    "classic": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "every_norm": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "speculators": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "one_key_value_head": {"num_kv_heads": 1},
    "every_head_its_own": {"num_kv_heads": 4},
    "head_dim": {"head_dim": 32},
    "own_width": {"hidden_size": 48, "head_dim": 16, "fc_norm": True},
    "four_taps": {"taps": (1, 2, 4, 8)},
    "theta": {"rope": RopeConfig(theta=1e6)},
    "llama3": {"rope": LLAMA3},
    "eps": {"rms_norm_eps": 1e-2},
}
STEPS = 5
LENGTH = 9  # one length for nearly all tests, so that each operation is compiled once
CACHE = 16


def tensors(draft: Draft, params: Any) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, under their names and shapes in files."""
    specs = jax.tree.leaves(draft_specs(draft.config), is_leaf=is_spec)
    return {
        spec.name: np.asarray(leaf).reshape(spec.file_shape)
        for spec, leaf in zip(specs, jax.tree.leaves(params), strict=True)
    }


def reference(draft: Draft) -> Reference:
    config = draft.config
    exponent = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    inverse = config.rope.theta**-exponent
    if config.rope.kind == "llama3":
        hf = LlamaConfig(
            hidden_size=config.head_dim, num_attention_heads=1, rope_parameters=config.rope.to_hf()["rope_scaling"]
            | {"rope_theta": config.rope.theta}, max_position_embeddings=512,
        )  # fmt: skip
        inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))
    return Reference(
        {name: torch.tensor(array) for name, array in tensors(draft, draft.params).items()},
        torch.tensor(np.asarray(draft.embed)), inverse, heads=config.num_heads, kv_heads=config.num_kv_heads,
        eps=config.rms_norm_eps, taps=len(config.taps), norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual,
    )  # fmt: skip


def inputs(draft: Draft, length: int = LENGTH, batch: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Taps [B, T, A*D], of unequal scale as real ones are, and target ids [B, T + STEPS]."""
    rng = np.random.default_rng(4)
    width = draft.config.target_hidden_size
    taps = [scale * rng.standard_normal((batch, length, width)) for scale in (0.5, 1.0, 3.0, 2.0)]
    tokens = rng.integers(3, draft.config.vocab_size, (batch, length + STEPS))
    return np.concatenate(taps[: len(draft.config.taps)], -1).astype(np.float32), tokens


def assert_close(ours: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Largest difference, as a share of the largest value."""
    ours = np.asarray(ours)
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else np.asarray(expected)
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= tolerance * np.abs(expected).max()


def one_document(batch: int, length: int) -> jax.Array:
    return jnp.ones((batch, length), jnp.int32)


def positions(batch: int, length: int, start: int | jax.Array = 0) -> jax.Array:
    return jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), (batch, length))


# Most variants share every shape, so the inference path runs operation by operation, each compiled once for all; the
# longer unrolled path is cheaper to compile whole.
unroll_ = jax.jit(draft_unroll, static_argnames="steps")


def cached_step(
    draft: Draft, features: jax.Array, tokens: jax.Array, start: jax.Array, cache: KVCache, kept: jax.Array
) -> tuple[jax.Array, jax.Array, KVCache]:
    """One pass over new slots at positions from `start`, of which `kept` are committed: carry, logits, cache."""
    batch, length = tokens.shape
    over_cache, over_block = causal_mask(cache.lengths, length, cache.max_length)
    past = [Segment(cache.keys[0], cache.values[0], over_cache)]
    out = draft_step(draft, features, tokens, positions(batch, length, start), over_block, past)
    count = jnp.broadcast_to(kept, (batch,))
    cache = commit(cache, [out.keys], [out.values], positions(batch, length), count)
    return out.carry, draft_logits(draft, out.carry), cache


def decode(
    draft: Draft, features: jax.Array, tokens: np.ndarray, steps: int, *, kept: int = LENGTH, start: int = 0
) -> list[tuple[jax.Array, jax.Array]]:
    """Inference: all features at once, then `steps` - 1 steps on the draft's own output, over its cache.

    Args:
      draft: the model.
      features: [B, T, D].
      tokens: [B, at least kept + steps - 1], the token of each slot.
      steps: how many.
      kept: slots that are committed; those after them are padding.
      start: position of the first slot.

    Returns:
      Carries and logits, [B, kept, ...] of the first step and [B, 1, ...] of the others.
    """
    batch, length, _ = features.shape
    config, ids = draft.config, jnp.asarray(tokens, jnp.int32)
    cache = empty_cache(1, batch, config.num_kv_heads, CACHE, config.head_dim)
    carry, logits, cache = cached_step(draft, features, ids[:, :length], jnp.int32(start), cache, jnp.int32(kept))
    results = [(carry[:, :kept], logits[:, :kept])]
    for slot in range(kept, kept + steps - 1):
        feature, token = results[-1][0][:, -1:], ids[:, slot : slot + 1]
        carry, logits, cache = cached_step(draft, feature, token, jnp.int32(start + slot), cache, jnp.int32(1))
        results.append((carry, logits))
    return results


@pytest.fixture(scope="module")
def classic_logits(t0: Target) -> list[np.ndarray]:
    """Logits of the classic draft at each inference step."""
    draft = tiny.draft(t0)
    taps, tokens = inputs(draft)
    return [np.asarray(part) for _, part in decode(draft, fuse(draft, jnp.asarray(taps)), tokens, STEPS, start=11)]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_hidden_state_equal_the_reference_at_every_inference_step(
    t0: Target, classic_logits: list[np.ndarray], name: str
):
    draft = tiny.draft(t0, **VARIANTS[name])
    other, start = reference(draft), 11
    taps, tokens = inputs(draft)
    fused = fuse(draft, jnp.asarray(taps))
    ours = decode(draft, fused, tokens, STEPS, start=start)
    feature = other.fuse(torch.from_numpy(taps))
    assert_close(fused, feature)
    for step in range(STEPS):
        carry, logits = other.run(feature, torch.from_numpy(tokens[:, : LENGTH + step]), start)
        last = slice(None) if step == 0 else slice(-1, None)
        assert_close(ours[step][0], carry[:, last])
        assert_close(ours[step][1], logits[:, last])
        feature = torch.cat([feature, carry[:, -1:]], 1)
    # The comparison would notice a step that is repeated, and a setting that is ignored.
    assert np.abs(np.asarray(ours[2][1]) - np.asarray(ours[1][1])).max() > 0.05
    if name != "classic":
        assert np.abs(np.asarray(ours[1][1]) - classic_logits[1]).max() > 1e-2


def test_what_is_fed_back_is_normed_only_with_norm_output(t0: Target):
    classic, normed = tiny.draft(t0), tiny.draft(t0, norm_output=True)
    taps, tokens = inputs(classic)
    (raw,) = (carry for carry, _ in decode(classic, fuse(classic, jnp.asarray(taps)), tokens, 1))
    (fed,) = (carry for carry, _ in decode(normed, fuse(normed, jnp.asarray(taps)), tokens, 1))
    np.testing.assert_array_equal(draft_hidden(normed, fed), fed)
    np.testing.assert_allclose(draft_hidden(classic, raw), fed, rtol=1e-6)
    assert np.abs(np.asarray(raw) - np.asarray(fed)).max() > 0.1


def test_draft_uses_its_own_embedding_and_head_and_not_the_targets(t0: Target):
    draft = tiny.draft(t0)
    own = draft.replace(embed=jnp.asarray(np.random.default_rng(8).standard_normal(draft.embed.shape), jnp.float32))
    taps, tokens = inputs(own)
    carry, logits = decode(own, fuse(own, jnp.asarray(taps)), tokens, 1)[0]
    other = reference(own)
    expected_carry, expected = other.run(other.fuse(torch.from_numpy(taps)), torch.from_numpy(tokens[:, :LENGTH]))
    assert_close(carry, expected_carry)
    assert_close(logits, expected)
    shared = decode(draft, fuse(draft, jnp.asarray(taps)), tokens, 1)[0][1]
    assert np.abs(np.asarray(logits) - np.asarray(shared)).max() > 0.1


def test_embedding_gets_no_gradient(t0: Target):
    draft = tiny.draft(t0)
    tokens = jnp.ones((1, 3), jnp.int32)
    gradient = jax.grad(lambda embed: embed_tokens(draft.replace(embed=embed), tokens).sum())(draft.embed)
    assert not np.asarray(gradient).any()


def two_documents(batch: int, length: int, border: int) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """Mask [B, T, T], positions and ids [B, T] of two packed documents; the second starts at `border`."""
    slot = np.arange(length)
    document = slot >= border
    mask = (slot[None] <= slot[:, None]) & (document[None] == document[:, None])
    place = np.where(document, slot - border, slot)
    ids = jnp.broadcast_to(jnp.asarray(1 + document, jnp.int32), (batch, length))
    return np.broadcast_to(mask, (batch, length, length)).copy(), np.broadcast_to(place, (batch, length)).copy(), ids


@pytest.mark.parametrize("chunk", [7, 3])
@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("step", range(4))
def test_training_attention_and_its_gradients_equal_explicit_attention(step: int, documents: int, chunk: int):
    batch, heads, kv_heads, length, head_dim = 2, 4, 2, 7, 8
    rng = np.random.default_rng(step)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q = draw(batch, length, heads, head_dim)
    keys, values = ([draw(batch, kv_heads, length, head_dim) for _ in range(step + 1)] for _ in range(2))
    weight = draw(batch, length, heads, head_dim)
    mask, _, ids = two_documents(batch, length, 4 if documents == 2 else length)

    def loss(q, keys, values):
        keys = [k.swapaxes(2, 3) for k in keys]
        out = packed_attend(q, keys[0], values[0], ids, list(zip(keys[1:], values[1:], strict=True)), chunk=chunk)
        return (out * weight).sum(), out

    as_jax = jax.tree.map(jnp.asarray, (q, keys, values))
    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*as_jax)

    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (q, *keys, *values)]
    q_, keys_, values_ = leaves[0], leaves[1 : step + 2], leaves[step + 2 :]
    every = concatenated_mask(torch.from_numpy(mask), step)
    expected = explicit_attention(q_.transpose(1, 2), torch.cat(keys_, 2), torch.cat(values_, 2), every).transpose(1, 2)
    (expected * torch.from_numpy(weight)).sum().backward()

    assert_close(out, expected)
    for ours, leaf in zip(jax.tree.leaves(gradients), leaves, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.abs().max() > 1e-2
        assert_close(ours, leaf.grad)


def test_training_attention_reads_the_keys_of_earlier_steps():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, first = draw(1, 6, 4, 8), (draw(1, 2, 8, 6), draw(1, 2, 6, 8), jnp.ones((1, 6), jnp.int32))
    own = [(draw(1, 2, 8, 6), draw(1, 2, 6, 8)) for _ in range(2)]
    attention = jax.jit(packed_attend)
    whole = np.asarray(attention(q, *first, own))
    zeroed = attention(q, *first, [(jnp.zeros_like(own[0][0]), own[0][1]), own[1]])
    assert np.abs(whole - np.asarray(zeroed)).max(axis=(0, 2, 3)).min() > 1e-2
    # A slot's own keys are for that slot alone.
    edited = attention(q, *first, [own[0], (own[1][0].at[..., 3].add(1.0), own[1][1])])
    changed = np.abs(whole - np.asarray(edited)).max(axis=(0, 2, 3)) > 1e-6
    np.testing.assert_array_equal(changed, np.arange(6) == 3)


@pytest.mark.parametrize("backend", ["einsum", "xla"])
def test_attention_over_segments_equals_attention_over_their_concatenation(backend: str):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, sizes = draw(2, 3, 4, 8), (5, 2, 3)
    parts = [(draw(2, 2, size, 8), draw(2, 2, size, 8), rng.random((2, 3, size)) < 0.6) for size in sizes]
    parts[-1][2][:, :, 0] = True
    segments = [Segment(*map(jnp.asarray, (k.swapaxes(2, 3), v, mask))) for k, v, mask in parts]
    ours = jax.jit(attend, static_argnums=2)(jnp.asarray(q), segments, backend)
    k, v, mask = (torch.from_numpy(np.concatenate(arrays, 2)) for arrays in zip(*parts, strict=True))
    expected = explicit_attention(torch.from_numpy(q).double().transpose(1, 2), k.double(), v.double(), mask)
    assert_close(ours, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "rematerialise"),
    [("classic", "nothing"), ("classic", "all"), ("every_norm", "activations"), ("own_width", "nothing")],
)
def test_training_time_test_and_its_gradients_equal_the_reference(t0: Target, name: str, rematerialise: str):
    steps, length = 3, LENGTH
    draft = tiny.draft(t0, **VARIANTS[name])
    taps, tokens = inputs(draft)
    tokens = tokens[:, :length]
    mask, place, ids = two_documents(2, length, 5)
    rng = np.random.default_rng(6)
    weights = [rng.standard_normal((2, length, draft.config.draft_vocab_size)).astype(np.float32) for _ in range(steps)]

    def unrolled(params):
        model = draft.replace(params=params)
        carries = draft_unroll(
            model, fuse(model, jnp.asarray(taps)), jnp.asarray(tokens, jnp.int32), jnp.asarray(place, jnp.int32), ids,
            steps, rematerialise,
        )  # fmt: skip
        logits = [draft_logits(model, carry) for carry in carries]
        return sum((part * weight).sum() for part, weight in zip(logits, weights, strict=True)), (carries, logits)

    gradients, (carries, logits) = jax.jit(jax.grad(unrolled, has_aux=True))(draft.params)
    other = reference(draft)
    results = other.unroll(
        other.fuse(torch.from_numpy(taps)), torch.from_numpy(tokens), torch.from_numpy(place), torch.from_numpy(mask),
        steps,
    )  # fmt: skip
    loss = torch.zeros((), dtype=torch.float64)
    for step, (carry, scores) in enumerate(results):
        assert_close(carries[step], carry)
        assert_close(logits[step], scores)
        loss = loss + (scores * torch.from_numpy(weights[step])).sum()
    loss.backward()
    for tensor, ours in tensors(draft, gradients).items():
        expected = other.tensors[tensor].grad
        assert expected is not None
        assert_close(ours, expected, 3e-5)


@pytest.mark.parametrize("name", ["classic", "every_norm", "llama3"])
@pytest.mark.parametrize("slot", [0, 4])
def test_training_and_inference_agree_on_the_same_tokens(t0: Target, name: str, slot: int):
    steps = 4
    draft = tiny.draft(t0, **VARIANTS[name])
    taps, tokens = inputs(draft)
    features, row = fuse(draft, jnp.asarray(taps)), jnp.asarray(tokens[:, :LENGTH], jnp.int32)
    carries = unroll_(draft, features, row, positions(2, LENGTH), one_document(2, LENGTH), steps)
    # The prefix up to the slot, then steps on the draft's own output with the true tokens.
    results = decode(draft, features, tokens[:, 1:], steps, kept=slot + 1)
    for step, (carry, logits) in enumerate(results):
        assert_close(carries[step][:, slot], carry[:, -1])
        assert_close(draft_logits(draft, carries[step])[:, slot], logits[:, -1])


def test_token_fed_at_each_unrolled_step_is_the_true_one_shifted(t0: Target):
    steps, length, edited = 4, LENGTH, 6
    draft = tiny.draft(t0)
    taps, tokens = inputs(draft, length)
    features = fuse(draft, jnp.asarray(taps))

    def unroll(draft: Draft, tokens: np.ndarray) -> list[np.ndarray]:
        ids = jnp.asarray(tokens[:, :length], jnp.int32)
        return [
            np.asarray(c) for c in unroll_(draft, features, ids, positions(2, length), one_document(2, length), steps)
        ]

    plain = unroll(draft, tokens)
    other = tokens.copy()
    other[:, edited] = (other[:, edited] + 1) % draft.config.vocab_size
    for step, (before, after) in enumerate(zip(plain, unroll(draft, other), strict=True)):
        changed = np.abs(before - after).max(axis=(0, 2)) > 1e-6
        # Slot j sees the tokens up to j + 1 + step, and only at the row's end those that the shift wraps around.
        first = edited - 1 - step
        np.testing.assert_array_equal(changed[: length - 1 - step], np.arange(length - 1 - step) >= first)
    # A draft that guesses wrongly everywhere is fed the same tokens.
    wrong = draft.replace(params=draft.params.replace(lm_head=-draft.params.lm_head))
    for before, after in zip(plain, unroll(wrong, tokens), strict=True):
        np.testing.assert_array_equal(before, after)


def test_packed_documents_do_not_see_each_other(t0: Target):
    steps, border = 3, 5
    draft = tiny.draft(t0)
    taps, tokens = inputs(draft)
    _, place, documents = (jnp.asarray(array) for array in two_documents(2, LENGTH, border))

    def unroll(taps: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
        features, ids = fuse(draft, jnp.asarray(taps)), jnp.asarray(tokens[:, :LENGTH], jnp.int32)
        return [np.asarray(carry) for carry in unroll_(draft, features, ids, place.astype(jnp.int32), documents, steps)]

    plain = unroll(taps, tokens)
    for edited, others in ((slice(0, border), (border, LENGTH)), (slice(border, LENGTH), (0, border))):
        other_taps, other_tokens = taps.copy(), tokens.copy()
        other_taps[:, edited] += 1
        other_tokens[:, edited] = (tokens[:, edited] + 1) % draft.config.vocab_size
        for step, (before, after) in enumerate(zip(plain, unroll(other_taps, other_tokens), strict=True)):
            # The last slots of a document read past it; they are not supervised.
            own = slice(others[0], others[1] - 1 - step)
            np.testing.assert_array_equal(before[:, own], after[:, own])
            assert np.abs(before[:, edited] - after[:, edited]).max() > 0.1
