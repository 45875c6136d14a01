"""The training-time-test loss: which slots count at each unrolled step, and the sums that loss and metrics are made of.

Slot j at step s combines its feature with token j+1+s; its label is the target's distribution at position j+1+s, which
predicts token j+2+s. Everything that depends on the data alone (which slots count, how many there are) is computed
before the gradient, so that sums over micro-batches and devices are divided by the counts of the whole update.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from eagle3_jax.draft import Draft, draft_hidden, draft_unroll, fuse
from eagle3_jax.training.head import soft_cross_entropy


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised; the default is EAGLE-3's.

    Attributes:
      token_loss: weight of the cross-entropy with the target's distribution.
      feature_loss: weight of a SmoothL1 between the draft's output and the target's final hidden state, mean over the
        width (EAGLE: 1, beside a token loss of 0.1).
      freeze_head: leave the draft's head as it is (EAGLE: the target's).
    """

    token_loss: float = 1.0
    feature_loss: float = 0.0
    freeze_head: bool = False


EAGLE3 = Objective()


@struct.dataclass
class Batch:
    """Packed rows with what the target says about them.

    Attributes:
      tokens: [B, T] int32.
      spans: [B, T] int32, the assistant reply a token belongs to, 0 outside.
      documents: [B, T] int32, from 1, 0 for padding.
      positions: [B, T] int32, restarting in every document.
      taps: [B, T, A*D], tapped states.
      hidden: [B, T, D], after the target's final norm.
      argmax: [B, T] int32, the target's most likely next token over its whole vocabulary.
    """

    tokens: jax.Array
    spans: jax.Array
    documents: jax.Array
    positions: jax.Array
    taps: jax.Array
    hidden: jax.Array
    argmax: jax.Array


@struct.dataclass
class Slots:
    """Which slots count at each step s.

    Attributes:
      assistant: [S, B, T] bool, tokens j+1 ... j+2+s all lie in one assistant span.
      trained: [S, B, T] bool, and the target's argmax at j+1+s is in the draft vocabulary.
    """

    assistant: jax.Array
    trained: jax.Array


@struct.dataclass
class StepSums:
    """Sums over slots, one entry per step; add them up, divide at the end.

    Attributes:
      cross_entropy: of trained slots.
      feature: SmoothL1 of trained slots; 0 without a feature loss.
      trained: number of trained slots.
      slots: number of assistant slots.
      hits: assistant slots whose guess is the target's argmax.
      joint_hits: assistant slots whose guesses up to this step are all right.
      joint_before: assistant slots of this step whose guesses before it are all right.
    """

    cross_entropy: jax.Array
    feature: jax.Array
    trained: jax.Array
    slots: jax.Array
    hits: jax.Array
    joint_hits: jax.Array
    joint_before: jax.Array


def _ahead(values: jax.Array, by: int, fill: int) -> jax.Array:
    """values[:, j + by] at slot j; `fill` past the end of the row."""
    by = min(by, values.shape[1])
    return jnp.pad(values[:, by:], ((0, 0), (0, by)), constant_values=fill)


def find_slots(spans: jax.Array, argmax: jax.Array, t2d: jax.Array, steps: int) -> Slots:
    """Decide which slots count at each step.

    Args:
      spans: [B, T] int32.
      argmax: [B, T] int32.
      t2d: [V] bool, membership in the draft vocabulary.
      steps: S.
    """
    assistant, trained = [], []
    first = _ahead(spans, 1, 0)
    inside = first > 0
    known = jnp.take(t2d, argmax, mode="clip")
    for step in range(steps):
        inside = inside & (_ahead(spans, 2 + step, 0) == first)
        assistant.append(inside)
        trained.append(inside & _ahead(known, 1 + step, 0))
    return Slots(assistant=jnp.stack(assistant), trained=jnp.stack(trained))


def training_time_test_loss(
    draft: Draft,
    batch: Batch,
    label_head: jax.Array,
    slots: Slots,
    step_weights: jax.Array,
    compute: DTypeLike = jnp.float32,
    rematerialise: str = "nothing",
    attention: str = "chunked",
    objective: Objective = EAGLE3,
) -> tuple[jax.Array, StepSums]:
    """Unroll the draft over a batch and sum its losses.

    Args:
      draft: the model; gradients are taken with respect to `draft.params`.
      batch: rows with the target's features.
      label_head: [C, D], the target's head at the draft vocabulary's tokens.
      slots: from `find_slots`, whose leading axis gives the number of steps.
      step_weights: [S] fp32, 0.8^s divided by the update's number of trained slots at s.
      compute: precision of activations and products; norms, softmaxes, labels and the loss are fp32 throughout.
      rematerialise, attention: as in `draft_unroll`.
      objective: what is minimised.

    Returns:
      The loss, whose sum over the micro-batches of an update is sum_s 0.8^s * (mean cross-entropy at s, and what else
      the objective asks for), and the sums that metrics are made of.
    """
    steps, rows, length = slots.trained.shape
    features = fuse(draft, batch.taps.astype(compute))
    carries = draft_unroll(
        draft, features, batch.tokens, batch.positions, batch.documents, steps, rematerialise, attention
    )
    flat = lambda values: values.reshape(steps, rows * length, *values.shape[3:])
    outputs = jnp.stack(carries)
    hidden, head = flat(draft_hidden(draft, outputs)), draft.params.lm_head
    if objective.freeze_head:
        head = jax.lax.stop_gradient(head)
    label_hidden = batch.hidden.reshape(rows * length, -1).astype(compute)
    weights = jnp.where(flat(slots.trained), step_weights[:, None], 0.0)
    with jax.named_scope("head_and_loss"):
        loss, each, guess = soft_cross_entropy(
            hidden, head, label_hidden, label_head.astype(compute), objective.token_loss * weights,
            flat(slots.assistant),
        )  # fmt: skip
    apart = jnp.zeros((steps, rows, length), jnp.float32)
    if objective.feature_loss:
        apart = jnp.stack([_smooth_l1(carry, _later(batch.hidden, 1 + step)) for step, carry in enumerate(carries)])
        loss = loss + objective.feature_loss * jnp.sum(jnp.where(weights > 0, weights * flat(apart), 0.0))
    guessed = jnp.take(draft.vocab.d2t, guess, mode="clip").reshape(steps, rows, length)
    truth = jnp.stack([_ahead(batch.argmax, 1 + step, -1) for step in range(steps)])
    return loss, _sums(each.reshape(steps, rows, length), apart, guessed == truth, slots)


def _later(hidden: jax.Array, by: int) -> jax.Array:
    """hidden[:, j + by] at slot j; zeros past the end of the row."""
    return jnp.pad(hidden[:, by:], ((0, 0), (0, min(by, hidden.shape[1])), (0, 0)))


def _smooth_l1(output: jax.Array, truth: jax.Array) -> jax.Array:
    """Mean over the width of d^2/2 where |d| < 1, else |d| - 1/2: [B, T, D] twice -> [B, T] fp32."""
    distance = jnp.abs(output.astype(jnp.float32) - truth.astype(jnp.float32))
    return jnp.mean(jnp.where(distance < 1, 0.5 * jnp.square(distance), distance - 0.5), axis=-1)


def _sums(cross_entropy: jax.Array, feature: jax.Array, right: jax.Array, slots: Slots) -> StepSums:
    joint = jnp.cumprod(right, axis=0).astype(bool)
    before = jnp.concatenate([jnp.ones_like(joint[:1]), joint[:-1]])
    count = lambda flags: jnp.sum(flags, axis=(1, 2), dtype=jnp.float32)
    return StepSums(
        cross_entropy=jnp.sum(jnp.where(slots.trained, cross_entropy, 0.0), axis=(1, 2)),
        feature=jnp.sum(jnp.where(slots.trained, feature, 0.0), axis=(1, 2)),
        trained=count(slots.trained),
        slots=count(slots.assistant),
        hits=count(slots.assistant & right),
        joint_hits=count(slots.assistant & joint),
        joint_before=count(slots.assistant & before),
    )
