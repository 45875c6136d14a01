"""The chunked head against optax on full logits: values, guesses and gradients, however it is cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle3_jax.training import head as head_room
from eagle3_jax.training.head import soft_cross_entropy
from eagle3_jax.training.loss import find_slots

STEPS = 3
# Spans of one row: replies of 5, 2 and 6 tokens, prompts before and between.
REPLIES = [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 0, 3, 3, 3, 3, 3, 3]


def wanted_slots(spans: list[int]) -> np.ndarray:
    """[STEPS, M] bool, by the library's own definition of a supervised slot."""
    row = jnp.asarray([spans], jnp.int32)
    return np.asarray(find_slots(row, row * 0, jnp.ones(1, bool), STEPS).assistant[:, 0])


def plain_loss(labels: jax.Array, label_head: jax.Array, weights: jax.Array, wanted: jax.Array) -> Any:
    """The same by full logits, as a function of hidden and head; nothing at slots that are not wanted."""

    def loss(hidden: jax.Array, head: jax.Array) -> Any:
        logits = jnp.einsum("SMD,CD->SMC", hidden, head)
        shifted = jnp.stack([jnp.roll(labels, -1 - step, axis=0) for step in range(STEPS)])
        truth = jax.nn.softmax(jnp.einsum("SMD,CD->SMC", shifted, label_head))
        each = jnp.where(wanted, optax.softmax_cross_entropy(logits, truth), 0.0)
        return 3.0 * jnp.sum(each * weights), (each, jnp.argmax(logits, -1))

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("chunk", [2, 4, 5, 256])
@pytest.mark.parametrize(
    "spans",
    [REPLIES, REPLIES[::-1], [1] * 19, [0] * 19, [0] * 16 + [1] * 3],
    ids=["some", "back", "all", "none", "end"],
)
def test_the_chunked_head_equals_optax_on_full_logits(monkeypatch: pytest.MonkeyPatch, spans: list[int], chunk: int):
    monkeypatch.setattr(head_room, "HEAD_CHUNK", chunk)
    tokens, wanted = len(spans), wanted_slots(spans)
    rng = np.random.default_rng(tokens)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    hidden, head, label_head, labels = normal(STEPS, tokens, 8), normal(11, 8), normal(11, 8), normal(tokens, 8)
    # Some wanted slots are not trained: their label is outside the draft vocabulary.
    weights = jnp.asarray(rng.random(wanted.shape) * (rng.random(wanted.shape) < 0.7) * wanted, jnp.float32)

    @jax.jit
    def chunked(hidden: jax.Array, head: jax.Array) -> Any:
        loss, each, guess = soft_cross_entropy(hidden, head, labels, label_head, weights, jnp.asarray(wanted))
        return 3.0 * loss, (each, guess)

    (value, (each, guess)), gradients = jax.value_and_grad(chunked, (0, 1), has_aux=True)(hidden, head)
    (expected, (expected_each, expected_guess)), expected_gradients = plain_loss(labels, label_head, weights, wanted)(
        hidden, head
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(chunked(hidden, head)[0], expected, rtol=1e-5)  # without gradients: another program
    np.testing.assert_allclose(np.where(wanted, each, 0), expected_each, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.where(wanted, guess, 0), np.where(wanted, expected_guess, 0))
    for ours, theirs in zip(gradients, expected_gradients):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_positions_that_nobody_asked_for_are_not_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_room, "HEAD_CHUNK", 1)
    wanted = wanted_slots(REPLIES)
    used = wanted[0].copy()
    for step in range(STEPS):
        used[1 + step :] |= wanted[step][: used.size - 1 - step]
    assert 0 < used.sum() < used.size
    hidden = jnp.where(used[None, :, None], jnp.ones((STEPS, used.size, 8)), jnp.nan)
    labels = jnp.where(used[:, None], jnp.ones((used.size, 8)), jnp.nan)
    weights = jnp.asarray(wanted, jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(hidden: jax.Array) -> jax.Array:
        return soft_cross_entropy(hidden, jnp.ones((5, 8)), labels, jnp.ones((5, 8)), weights, jnp.asarray(wanted))[0]

    chunks = []
    compute = head_room._chunk

    def counted(*arguments: Any) -> Any:
        jax.debug.callback(lambda: chunks.append(1))
        return compute(*arguments)

    monkeypatch.setattr(head_room, "_chunk", counted)
    value, gradient = loss(hidden)
    jax.effects_barrier()
    assert len(chunks) == used.sum()
    np.testing.assert_allclose(value, wanted.sum() * np.log(5), rtol=1e-6)
    assert np.isfinite(gradient).all()
