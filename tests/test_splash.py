"""The TPU's attention of packed rows, its steps run as plain jax, against all scores at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.attention import packed_attend
from eagle3_jax.errors import InputError
from eagle3_jax.splash import UnrollMask, splash_attend
from eagle3_jax.training.config import TrainConfig

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 128


def inputs(step: int) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(step)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q = draw(1, LENGTH, HEADS, HEAD_DIM)
    runs = [(draw(1, KV_HEADS, HEAD_DIM, LENGTH), draw(1, KV_HEADS, LENGTH, HEAD_DIM)) for _ in range(step + 1)]
    documents = np.ones((1, LENGTH), np.int32)
    documents[:, 100:190], documents[:, 190:] = 2, 0
    return q, runs, jnp.asarray(documents), draw(1, LENGTH, HEADS, HEAD_DIM)


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.full) for step in (0, 1)), 2])
def test_the_kernel_and_its_gradients_equal_all_scores_at_once(step: int):
    q, runs, documents, weight = inputs(step)
    kernel = functools.partial(splash_attend, interpret=True)
    reference = functools.partial(packed_attend, kind="reference")

    def loss(attend: Any, q: Any, runs: Any) -> Any:
        out = attend(q, *runs[0], documents, runs[1:])
        return jnp.sum(out * weight), out

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, attend), argnums=(0, 1), has_aux=True))(q, runs)
        for attend in (kernel, reference)
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(theirs).max()) > 1e-2
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(jnp.abs(theirs).max()), rtol=0)


def test_the_mask_is_causal_then_diagonal():
    mask = UnrollMask(4, 3)
    expected = np.concatenate([np.tril(np.ones((4, 4), bool)), np.eye(4, dtype=bool), np.eye(4, dtype=bool)], axis=1)
    np.testing.assert_array_equal(mask[:, :], expected)
    np.testing.assert_array_equal(mask[2:4, 3:9], expected[2:4, 3:9])
    assert mask.shape == expected.shape


@pytest.mark.parametrize(
    ("platform", "head_dim", "row_length", "attention", "chosen"),
    [
        ("tpu", 128, 2048, "auto", "splash"),
        ("tpu", 64, 2048, "auto", "chunked"),
        ("tpu", 128, 2000, "auto", "chunked"),
        ("gpu", 128, 2048, "auto", "chunked"),
        ("tpu", 128, 2048, "chunked", "chunked"),
        ("tpu", 128, 2048, "splash", "splash"),
        ("gpu", 128, 2048, "splash", None),
        ("tpu", 64, 2048, "splash", None),
    ],
)
def test_the_kernel_is_taken_where_it_can_run(platform, head_dim, row_length, attention, chosen):
    config = TrainConfig(target="", output="", row_length=row_length, attention=attention)
    if chosen is None:
        with pytest.raises(InputError, match=f"splash on {platform} with rows of {row_length} and heads of {head_dim}"):
            config.attention_on(platform, head_dim)
    else:
        assert config.attention_on(platform, head_dim) == chosen


def test_shapes_that_the_kernel_does_not_take_are_a_fault():
    q, runs, documents, _ = inputs(0)
    with pytest.raises(ValueError, match="rows of 200"):
        splash_attend(q[:, :200], runs[0][0][..., :200], runs[0][1][:, :, :200], documents[:, :200], interpret=True)
