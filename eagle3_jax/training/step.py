"""One optimiser update: gradients summed over micro-batches, divided once, applied unless something is not finite."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from eagle3_jax.draft import Draft, DraftParams, draft_specs
from eagle3_jax.sampling import most_likely
from eagle3_jax.sharding import constrain, constrain_params, replicated, row_parts
from eagle3_jax.target import Target, target_forward
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.head import ceil_div
from eagle3_jax.training.loss import (
    EAGLE3,
    Batch,
    Objective,
    Slots,
    StepSums,
    find_slots,
    training_time_test_loss,
)

ARGMAX_CHUNK = 512  # tokens of a device whose logits over the whole vocabulary exist at one time


@struct.dataclass
class TrainState:
    """What training changes, and all that a resume needs besides the data's position, which follows from `update`.

    Attributes:
      params: the draft's.
      opt_state: optax's.
      update: [] int32, updates done, skipped ones included.
      skipped: [] int32, updates that changed nothing.
    """

    params: DraftParams
    opt_state: Any
    update: jax.Array
    skipped: jax.Array


@struct.dataclass
class Teacher:
    """The frozen parts of the target that training reads besides its features.

    Attributes:
      label_head: [C, D], the target's head at the draft vocabulary's tokens.
    """

    label_head: jax.Array


def make_optimizer(
    schedule: optax.Schedule, *, betas: tuple[float, float], weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=betas[0], b2=betas[1], weight_decay=weight_decay),
    )


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """The optimiser that a config describes."""
    return make_optimizer(
        config.learning_rates(), betas=config.betas, weight_decay=config.weight_decay, clip=config.clip
    )


def step_options(config: TrainConfig) -> dict[str, Any]:
    """What a config says of the update, for `make_train_step`; the same for a run and for its plan."""
    return {
        "decay": config.step_decay, "compute": jnp.dtype(config.compute_dtype), "rematerialise": config.rematerialise,
        "objective": config.objective,
    }  # fmt: skip


def init_optimizer(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh | None) -> Any:
    """The optimiser's first state, each part where its parameter lies; of abstract parameters an abstract one."""
    shapes = jax.eval_shape(optimizer.init, params)
    abstract = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
    if mesh is None:
        return shapes if abstract else optimizer.init(params)
    placed = optax.tree_map_params(
        optimizer,
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        shapes,
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh)),
    )
    if abstract:
        return placed
    return jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, placed))(params)


@partial(jax.jit, static_argnames=("taps", "attention"))
def target_features(
    target: Target,
    tokens: jax.Array,
    documents: jax.Array,
    positions: jax.Array,
    *,
    taps: tuple[int, ...],
    attention: str = "chunked",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the target over packed rows.

    Args:
      target: the model.
      tokens, documents, positions: [B, T] int32.
      taps: boundaries to return.
      attention: one of `attention.PACKED`.

    Returns:
      taps [B, T, A*D], final hidden [B, T, D], argmax over the whole vocabulary [B, T] int32 (taken in chunks of
      tokens, so that no [B, T, V] array exists).
    """
    out = target_forward(target, tokens, positions, documents=documents, packed=attention, taps=taps)
    rows, length, width = out.hidden.shape
    # Chunks of columns, not of rows, which a mesh splits.
    chunks = min(length, ceil_div(rows * length, ARGMAX_CHUNK * row_parts(rows)))
    # Gathered once, and not for every chunk.
    head = constrain(target.params.lm_head, "vocab", None)
    padded = jnp.pad(out.hidden, ((0, 0), (0, -length % chunks), (0, 0)))
    parts = jnp.moveaxis(padded.reshape(rows, chunks, -1, width), 1, 0)

    def argmax(part: jax.Array) -> jax.Array:
        part = constrain(part, "batch", None, None)
        logits = jnp.einsum("BMD,VD->BMV", part, head, preferred_element_type=jnp.float32)
        return most_likely(logits)

    return out.taps, out.hidden, jnp.moveaxis(jax.lax.map(argmax, parts), 0, 1).reshape(rows, -1)[:, :length]


def make_train_step(
    optimizer: optax.GradientTransformation,
    *,
    decay: float,
    compute: DTypeLike = jnp.float32,
    rematerialise: str = "nothing",
    attention: str = "chunked",
    objective: Objective = EAGLE3,
):
    """Build the jitted update.

    Args:
      optimizer: from `make_optimizer`.
      decay: weight of step s is decay^s.
      compute: precision of activations and products; parameters stay in theirs (fp32 masters).
      rematerialise: what of each unrolled step is computed again in the backward pass, as in `draft_unroll`.
      attention: one of `attention.PACKED`.
      objective: what is minimised.

    Returns:
      step(state, batches, model, teacher, steps) -> (state, sums, norms), with batches a `Batch` whose arrays have a
      leading micro-batch axis [U, B, T, ...], `model` the draft whose `params` are taken from the state instead, and
      `steps` static. The state is donated.
    """

    def loss_fn(params: DraftParams, model: Draft, batch: Batch, teacher: Teacher, slots: Slots, weights: jax.Array):
        return training_time_test_loss(
            dataclasses.replace(model, params=params),
            batch,
            teacher.label_head,
            slots,
            weights,
            compute,
            rematerialise,
            attention,
            objective,
        )

    @partial(jax.jit, static_argnames=("steps",), donate_argnames=("state",))
    def step(
        state: TrainState, batches: Batch, model: Draft, teacher: Teacher, *, steps: int
    ) -> tuple[TrainState, StepSums, dict[str, jax.Array]]:
        slots = jax.vmap(partial(find_slots, t2d=model.vocab.t2d, steps=steps))(batches.spans, batches.argmax)
        trained = jnp.sum(slots.trained, axis=(0, 2, 3), dtype=jnp.float32)
        powers = jnp.asarray([decay**index for index in range(steps)], jnp.float32)
        weights = powers / jnp.maximum(trained, 1.0)

        def micro(gradient, item):
            batch, slot = item
            (loss, sums), new = jax.value_and_grad(loss_fn, has_aux=True)(
                state.params, model, batch, teacher, slot, weights
            )
            return jax.tree.map(jnp.add, gradient, new), (loss, sums)

        specs = draft_specs(model.config)
        zeros = constrain_params(jax.tree.map(jnp.zeros_like, state.params), specs)
        gradient, (losses, every) = jax.lax.scan(micro, zeros, (batches, slots))
        gradient = constrain_params(gradient, specs)
        # On every device, whose process reads them.
        sums = jax.tree.map(lambda values: constrain(jnp.sum(values, axis=0), None), every)
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(norm) & (trained[0] > 0)
        # optax raises floats to an integer count, which strict dtype promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            changes, opt_state = optimizer.update(gradient, state.opt_state, cast(Any, state.params))
        params = optax.apply_updates(cast(Any, state.params), changes)
        keep = lambda new, old: jax.tree.map(partial(jnp.where, good), new, old)
        state = TrainState(
            params=constrain_params(keep(params, state.params), specs),
            opt_state=keep(opt_state, state.opt_state),
            update=state.update + 1,
            skipped=state.skipped + jnp.where(good, 0, 1).astype(jnp.int32),
        )
        return state, sums, {"loss": jnp.sum(losses), "gradient_norm": norm, "applied": good}

    return step


def make_eval_step(compute: DTypeLike = jnp.float32, attention: str = "chunked", objective: Objective = EAGLE3):
    """Build the jitted evaluation: (model, batch, teacher, steps) -> `StepSums`, teacher-forced."""

    @partial(jax.jit, static_argnames=("steps",))
    def step(model: Draft, batch: Batch, teacher: Teacher, *, steps: int) -> StepSums:
        slots = find_slots(batch.spans, batch.argmax, model.vocab.t2d, steps)
        _, sums = training_time_test_loss(
            model, batch, teacher.label_head, slots, jnp.ones(steps, jnp.float32), compute, attention=attention,
            objective=objective,
        )  # fmt: skip
        return jax.tree.map(lambda values: constrain(values, None), sums)

    return step
