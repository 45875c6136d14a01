"""From logits to a distribution and to a token: the filters against transformers', draws that never leave the support,
and uniforms that depend on a row's seed and a position only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle3_jax.sampling import Sampling, draw, most_likely, target_distribution, uniforms

VOCAB = 50
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

distribution = jax.jit(target_distribution, static_argnames=("filters",))
draw_jit = jax.jit(draw)


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, rows: int = 1) -> Sampling:
    return Sampling(
        temperature=jnp.full((rows,), temperature, jnp.float32),
        top_k=jnp.full((rows,), top_k, jnp.int32),
        top_p=jnp.full((rows,), top_p, jnp.float32),
        seed=jnp.full((rows,), seed, jnp.uint32),
    )


def transformers_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """[N, V] -> [N, V], with the warpers that `generate` would use."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    scores = torch.tensor(logits)
    for warper in warpers:
        scores = warper(torch.zeros(len(logits), 1, dtype=torch.long), scores)
    return scores.softmax(dim=-1).numpy()


def logit_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "distinct": rng.normal(size=(20, VOCAB)).astype(np.float32) * 3,
        # Few distinct values: ties at the k-th token and at the border of the nucleus.
        "tied": rng.integers(-2, 3, (20, VOCAB)).astype(np.float32),
        "all equal": np.zeros((1, VOCAB), np.float32),
    }


@pytest.mark.parametrize("kind", ["distinct", "tied", "all equal"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_filters_keep_what_transformers_keeps(kind: str, temperature: float) -> None:
    logits = logit_rows()[kind]
    for top_p in (1.0, 0.9, 0.1, 1e-6):
        for top_k in (0, 1, 5, VOCAB):
            if kind != "distinct" and top_p in (0.9, 0.1):
                # n equal tokens meet the border exactly when top_p is a multiple of 1/n, and rounding decides there.
                top_p += 0.0031
            expected = transformers_distribution(logits, temperature, top_k, top_p)
            values = sampling(temperature, top_k, top_p)
            found = np.asarray(distribution(logits[None], values, filters=True))[0]
            if kind != "distinct":
                # Which of the tied tokens stay is up to torch's unstable sort; how many, and their mass, is not.
                found, expected = np.sort(found, axis=-1), np.sort(expected, axis=-1)
            np.testing.assert_array_equal(found > 0, expected > 0, err_msg=f"{top_p=} {top_k=}")
            np.testing.assert_allclose(found, expected, atol=2e-7, rtol=2e-5, err_msg=f"{top_p=} {top_k=}")


def test_of_tied_tokens_the_lowest_ids_stay() -> None:
    logits = jnp.asarray([[[1.0, 2.0, 1.0, 2.0, 1.0, -9.0]]])
    kept = lambda top_p: np.flatnonzero(distribution(logits, sampling(top_p=top_p), filters=True)[0, 0]).tolist()
    assert kept(1e-6) == most_likely(logits)[0].tolist() == [1]
    assert kept(0.6) == [1, 3]
    assert kept(0.7) == [0, 1, 3]
    assert kept(0.8) == [0, 1, 2, 3]


def test_a_row_without_filters_is_untouched_by_filters_of_others() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 20000)) * 2, jnp.float32)
    plain = distribution(logits, sampling(rows=2), filters=False)
    mixed = sampling(rows=2).replace(top_k=jnp.asarray([0, 3]), top_p=jnp.asarray([1.0, 0.5], jnp.float32))
    filtered = distribution(logits, mixed, filters=True)
    np.testing.assert_array_equal(np.asarray(filtered[0]), np.asarray(plain[0]))
    assert (np.asarray(filtered[1]) > 0).sum(axis=-1).max() <= 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32)), min_size=37, max_size=37).filter(any),
    st.one_of(st.just(0.0), st.just(BELOW_ONE), st.floats(0, BELOW_ONE, width=32)),
)
def test_a_token_without_mass_is_never_drawn(mass: list[float], uniform: float) -> None:
    token = int(draw_jit(jnp.asarray(mass, jnp.float32), jnp.float32(uniform)))
    assert mass[token] > 0


@pytest.mark.parametrize("vocab", [320, 49152])
def test_a_token_without_mass_is_never_drawn_where_parallel_sums_are_uneven(vocab: int) -> None:
    rng = np.random.default_rng(2)
    mass = (rng.random(vocab) ** 4).astype(np.float32) * (rng.random(vocab) < 0.5)
    mass[[0, -1]] = 0
    cumulative = np.asarray(jax.jit(jnp.cumsum)(jnp.asarray(mass)))
    # Quantiles just below each partial sum, where a rise without mass would be hit.
    quantiles = np.nextafter(cumulative / cumulative[-1], np.float32(0)).astype(np.float32)
    quantiles = np.concatenate([quantiles[np.flatnonzero(mass == 0)][:4000], [0.0, BELOW_ONE]]).astype(np.float32)
    tokens = np.asarray(jax.jit(jax.vmap(draw, in_axes=(None, 0)))(jnp.asarray(mass), jnp.asarray(quantiles)))
    assert (mass[tokens] > 0).all()


def test_draws_are_quantiles() -> None:
    mass = jnp.asarray([0.0, 2.0, 0.0, 1.0, 1.0, 0.0], jnp.float32)
    at = jnp.asarray([0.0, 0.25, 0.4999, 0.5, 0.7499, 0.75, BELOW_ONE], jnp.float32)
    tokens = draw(jnp.broadcast_to(mass, (7, 6)), at)
    assert tokens.tolist() == [1, 1, 1, 3, 3, 4, 4]
    assert tokens.dtype == jnp.int32


def test_most_likely_is_the_first_of_equals() -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [-jnp.inf, -jnp.inf, -5.0, -5.0]])
    assert most_likely(logits).tolist() == [1, 2]


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    positions = jnp.asarray([[7, 8, 9], [9, 7, 100]], jnp.int32)
    both = uniforms(jnp.asarray([42, 42], jnp.uint32), positions)
    assert both.shape == (3, 2, 3)
    assert (both >= 0).all()
    assert (both < 1).all()
    np.testing.assert_array_equal(both[:, 0, 0], both[:, 1, 1])
    np.testing.assert_array_equal(both[:, 0, 2], both[:, 1, 0])
    alone = uniforms(jnp.asarray([42], jnp.uint32), positions[:1])
    np.testing.assert_array_equal(alone[:, 0], both[:, 0])
    other = uniforms(jnp.asarray([43], jnp.uint32), positions[:1])
    assert not jnp.isin(other, both).any()
    # Proposing, accepting and drawing at one position use three different numbers.
    assert len(set(both[:, 0, 0].tolist())) == 3
