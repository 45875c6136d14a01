"""The update: sums over micro-batches divided once, the optimiser against its formulas written out in numpy, learning
rates against their closed form, and bf16 computation beside fp32.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle3_jax.draft import REMATERIALISE, Draft, DraftParams
from eagle3_jax.errors import InputError
from eagle3_jax.target import Target
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.loss import Batch, find_slots, training_time_test_loss
from eagle3_jax.training.step import Teacher, TrainState, make_optimizer, make_train_step
from tests import tiny

LENGTH, STEPS = 12, 2


def teacher(target: Target, draft: Draft) -> Teacher:
    return Teacher(label_head=target.params.lm_head[np.asarray(draft.vocab.d2t)])


def uneven_batch(draft: Draft, rows: int = 8) -> Batch:
    """Replies of 0 to 9 tokens, so that micro-batches differ in what they supervise and one has nothing."""
    replies = [9, 5, 0, 1, 3, 9, 0, 7][:rows]
    spans = [[0] * (LENGTH - reply) + [1] * reply for reply in replies]
    return tiny.training_batch(draft, np.ones((rows, LENGTH)), spans)


def run(draft: Draft, target: Target, passes: int, updates: int) -> tuple[TrainState, list[Any]]:
    # Plain descent: Adam would blow up rounding in the smallest gradients to whole steps. The first part of the state
    # is the gradient.
    optimizer = optax.chain(optax.trace(0.0), optax.sgd(optax.linear_schedule(0.5, 0.1, 3)))
    step = make_train_step(optimizer, decay=0.8)
    batch = uneven_batch(draft)
    micro = jax.tree.map(lambda array: array.reshape(passes, -1, *array.shape[1:]), batch)
    params = jax.tree.map(jnp.copy, draft.params)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))
    told = []
    for _ in range(updates):
        state, sums, norms = step(state, micro, draft, teacher(target, draft), steps=STEPS)
        told.append((sums, norms, jax.tree.map(np.array, cast(Any, state.opt_state)[0].trace)))
    return state, told


def test_accumulated_micro_batches_equal_one_batch(t0: Target, d0: Draft):
    whole, told = run(d0, t0, passes=1, updates=2)
    parts, told_in_parts = run(d0, t0, passes=4, updates=2)
    for one, other in zip(jax.tree.leaves(told[0][2]), jax.tree.leaves(told_in_parts[0][2]), strict=True):
        assert np.abs(other).max() > 1e-5  # every parameter learns
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params)):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-5)
    # One step of the schedule an update, however many passes it has.
    counts = [int(leaf) for state in (whole, parts) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 0]
    assert counts == [2, 2]
    for one, other in zip(jax.tree.leaves(told), jax.tree.leaves(told_in_parts)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6 * np.abs(other).max())
    moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), whole.params, d0.params)
    assert min(jax.tree.leaves(moved)) > 1e-5


def test_the_optimizer_is_adamw_behind_a_clip_of_the_global_norm():
    betas, decay, rate, clip = (0.8, 0.9), 0.1, [0.3, 0.2, 0.1], 0.5
    optimizer = make_optimizer(
        lambda count: jnp.asarray(rate, jnp.float32)[count], betas=betas, weight_decay=decay, clip=clip
    )
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal(5), "b": rng.standard_normal((2, 3))}
    ours = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), params)
    state = optimizer.init(ours)
    first, second = (jax.tree.map(np.zeros_like, params) for _ in range(2))
    for update, size in enumerate([10.0, 0.01, 3.0]):  # clipped, not clipped, clipped
        gradient = jax.tree.map(lambda array, size=size: size * rng.standard_normal(array.shape), params)
        norm = math.sqrt(sum(float((array**2).sum()) for array in gradient.values()))
        assert (norm > clip) == (size > 1)
        for name, array in gradient.items():
            clipped = array * min(1.0, clip / norm)
            first[name] = betas[0] * first[name] + (1 - betas[0]) * clipped
            second[name] = betas[1] * second[name] + (1 - betas[1]) * clipped**2
            mean = first[name] / (1 - betas[0] ** (update + 1))
            square = second[name] / (1 - betas[1] ** (update + 1))
            params[name] = params[name] - rate[update] * (mean / (np.sqrt(square) + 1e-8) + decay * params[name])
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(
                jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), gradient), state, ours
            )
        ours = optax.apply_updates(ours, changes)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6), ours, params)


def config(**changes: Any) -> TrainConfig:
    return dataclasses.replace(TrainConfig(target="t", output="o", data=("d.jsonl",)), **changes)


@pytest.mark.parametrize(("updates", "warmup"), [(10, 0), (10, 1), (10, 4), (10, 8), (100, 50), (2, 0)])
def test_learning_rates_follow_their_closed_form_and_end_at_the_floor(updates: int, warmup: int):
    peak, floor = 1e-3, 1e-5
    made = config(
        updates=updates, schedule=((updates, 1),), warmup=warmup, learning_rate=peak, final_learning_rate=floor
    )
    made.check()
    schedule = made.learning_rates()
    for update in range(updates):
        if update < warmup:
            start = peak / warmup
            expected = start + (peak - start) * update / warmup
        else:
            turn = math.pi * (update - warmup) / (updates - 1 - warmup)
            expected = floor + (peak - floor) * (1 + math.cos(turn)) / 2
        assert float(schedule(update)) == pytest.approx(expected, rel=1e-4), update
    assert float(schedule(updates - 1)) == pytest.approx(floor, rel=1e-4)


@pytest.mark.parametrize(("updates", "warmup"), [(1, 0), (10, 9)])
def test_learning_rates_are_finite_when_nothing_follows_the_peak(updates: int, warmup: int):
    made = config(updates=updates, schedule=((updates, 1),), warmup=warmup)
    made.check()
    rates = [float(made.learning_rates()(update)) for update in range(updates)]
    assert np.isfinite(rates).all()
    assert rates[-1] == pytest.approx(made.learning_rate)


@pytest.mark.parametrize("warmup", [11, -1])
def test_a_warm_up_longer_than_the_run_is_refused(warmup: int):
    with pytest.raises(InputError, match="warmup: a warm-up no longer than the run of 10"):
        config(updates=10, schedule=((10, 1),), warmup=warmup).check()


@partial(jax.jit, static_argnames=("compute",))
def loss_and_gradient(params: DraftParams, draft: Draft, batch: Batch, head: jax.Array, *, compute: Any) -> Any:
    slots = find_slots(batch.spans, batch.argmax, draft.vocab.t2d, STEPS)

    def loss(params: DraftParams) -> jax.Array:
        model = dataclasses.replace(draft, params=params)
        weights = jnp.full(STEPS, 0.05, jnp.float32)
        return training_time_test_loss(model, batch, head, slots, weights, compute)[0]

    return jax.value_and_grad(loss)(params)


def test_bf16_computation_is_close_to_fp32_and_keeps_gradients_in_fp32(t0: Target):
    draft = tiny.draft(t0, scale=1.0)
    batch, head = uneven_batch(draft, 4), teacher(t0, draft).label_head
    features = lambda dtype: dataclasses.replace(
        batch,
        taps=batch.taps.astype(jnp.bfloat16).astype(dtype),
        hidden=batch.hidden.astype(jnp.bfloat16).astype(dtype),
    )
    wide, wide_gradient = loss_and_gradient(draft.params, draft, features(jnp.float32), head, compute=jnp.float32)
    narrow, gradient = loss_and_gradient(draft.params, draft, features(jnp.bfloat16), head, compute=jnp.bfloat16)
    assert float(narrow) == pytest.approx(float(wide), rel=2e-2)
    assert float(narrow) != float(wide)  # it did compute in bf16
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wide_gradient)):
        assert one.dtype == jnp.float32
        a, b = np.ravel(one), np.ravel(other)
        assert float(a @ b) > 0.99 * float(np.linalg.norm(a) * np.linalg.norm(b)) > 0


def test_what_is_rematerialised_changes_what_is_kept_and_not_the_gradients(t0: Target):
    draft = tiny.draft(t0, scale=1.0)
    batch, head = uneven_batch(draft, 4), teacher(t0, draft).label_head
    slots = find_slots(batch.spans, batch.argmax, draft.vocab.t2d, STEPS)

    def loss(rematerialise: str, params: DraftParams) -> jax.Array:
        model, weights = dataclasses.replace(draft, params=params), jnp.full(STEPS, 0.05, jnp.float32)
        return training_time_test_loss(model, batch, head, slots, weights, rematerialise=rematerialise)[0]

    kept, gradients = {}, {}
    for name in REMATERIALISE:
        pulled = jax.eval_shape(lambda params, name=name: jax.vjp(partial(loss, name), params)[1], draft.params)
        kept[name] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pulled))
        gradients[name] = jax.jit(jax.grad(partial(loss, name)))(draft.params)
    assert kept["nothing"] > 1.5 * kept["activations"] > 1.5 * 1.2 * kept["all"], kept
    for name in ("activations", "all"):
        for one, other in zip(jax.tree.leaves(gradients[name]), jax.tree.leaves(gradients["nothing"]), strict=True):
            assert float(jnp.abs(other).max()) > 0
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * float(jnp.abs(other).max()))
