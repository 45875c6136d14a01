"""The training-time-test loss: soft cross-entropy of every unrolled step, through a head that keeps no logits.

Slot j at step s combines its feature with token j+1+s; its label is the target's distribution at position j+1+s, which
predicts token j+2+s. Everything that depends on the data alone (which slots count, how many there are) is computed
before the gradient, so that sums over micro-batches and devices are divided by the counts of the whole update.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from eagle3_jax.draft import Draft, draft_hidden, draft_unroll, fuse
from eagle3_jax.sampling import most_likely

HEAD_CHUNK = 256  # tokens whose logits, for all unrolled steps, exist at one time


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
      trained: number of trained slots.
      slots: number of assistant slots.
      hits: assistant slots whose guess is the target's argmax.
      joint_hits: assistant slots whose guesses up to this step are all right.
      joint_before: assistant slots of this step whose guesses before it are all right.
    """

    cross_entropy: jax.Array
    trained: jax.Array
    slots: jax.Array
    hits: jax.Array
    joint_hits: jax.Array
    joint_before: jax.Array


def document_mask(documents: jax.Array) -> jax.Array:
    """[B, T] document ids -> [B, T, T] bool: causal, within the same document; padding reads itself."""
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]


def _ahead(values: jax.Array, by: int, fill: int) -> jax.Array:
    """values[:, j + by] at slot j; `fill` past the end of the row."""
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


def chunk_count(tokens: int, size: int) -> int:
    """Number of equal chunks, of at most `size` tokens, that the tokens make when padded to a multiple of it."""
    return -(-tokens // size)


def _chunk_losses(
    hidden: jax.Array, head: jax.Array, label_hidden: jax.Array, label_head: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits, label distributions and cross-entropy of one chunk.

    Args:
      hidden: [S, c, D].
      head: [C, D].
      label_hidden: [c + S - 1, D], of the positions that the chunk's labels lie at.
      label_head: [C, D].

    Returns:
      log-probabilities [S, c, C], labels [S, c, C], cross-entropy [S, c], guesses [S, c] int32.
    """
    steps, length, _ = hidden.shape
    logits = jnp.einsum("SMD,CD->SMC", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    label_logits = jnp.einsum("MD,CD->MC", label_hidden, label_head, preferred_element_type=jnp.float32)
    every = jax.nn.softmax(label_logits, axis=-1)
    labels = jnp.stack([every[step : step + length] for step in range(steps)])
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    loss = -jnp.sum(labels * log_probabilities, axis=-1)
    return log_probabilities, labels, loss, most_likely(logits)


def _window(label_hidden: jax.Array, start: jax.Array, length: int, steps: int) -> jax.Array:
    """Label rows of a chunk: slot j at step s has its label at j + 1 + s."""
    return jax.lax.dynamic_slice_in_dim(label_hidden, start + 1, length + steps - 1, axis=0)


def soft_cross_entropy(
    hidden: jax.Array, head: jax.Array, label_hidden: jax.Array, label_head: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted sum of the cross-entropies of all steps, with the head applied chunk by chunk.

    The weights are known beforehand and the loss is linear in them, so the forward pass can form the gradients with
    respect to `hidden` and `head` while a chunk's logits are there; the backward pass only scales them. No logits are
    kept and none are computed twice.

    Args:
      hidden: [S, M, D], what the draft's head reads, of M tokens laid end to end.
      head: [C, D], the draft's.
      label_hidden: [M + S + 1, D], the target's final hidden states of the same tokens, padded at the end.
      label_head: [C, D], the target's head at the draft vocabulary's tokens.
      weights: [S, M] fp32, 0 for slots that are not trained.

    Returns:
      The weighted sum, the cross-entropy of each slot [S, M], and the draft's guesses [S, M] int32 (draft ids).
      Gradients flow from the first only.
    """
    tokens = hidden.shape[1]
    extra = -tokens % chunk_count(tokens, HEAD_CHUNK)
    pad = lambda values, axis: jnp.pad(values, [(0, extra if axis == i else 0) for i in range(values.ndim)])
    total, loss, guess = _whole_chunks(pad(hidden, 1), head, pad(label_hidden, 0), label_head, pad(weights, 1))
    return total, loss[:, :tokens], guess[:, :tokens]


@jax.custom_vjp
def _whole_chunks(
    hidden: jax.Array, head: jax.Array, label_hidden: jax.Array, label_head: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`soft_cross_entropy` of tokens that divide into chunks."""
    steps, tokens, _ = hidden.shape
    count = chunk_count(tokens, HEAD_CHUNK)
    length = tokens // count

    def body(total: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        start = index * length
        part = jax.lax.dynamic_slice_in_dim(hidden, start, length, axis=1)
        weight = jax.lax.dynamic_slice_in_dim(weights, start, length, axis=1)
        _, _, loss, guess = _chunk_losses(part, head, _window(label_hidden, start, length, steps), label_head)
        return total + jnp.sum(loss * weight), (loss, guess)

    total, (loss, guess) = jax.lax.scan(body, jnp.float32(0), jnp.arange(count))
    return total, _unchunk(loss), _unchunk(guess)


def _unchunk(values: jax.Array) -> jax.Array:
    """[chunks, S, c, ...] -> [S, M, ...]."""
    moved = jnp.moveaxis(values, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _forward(hidden, head, label_hidden, label_head, weights):
    steps, tokens, _ = hidden.shape
    count = chunk_count(tokens, HEAD_CHUNK)
    length = tokens // count

    def body(carry, index):
        total, head_gradient = carry
        start = index * length
        part = jax.lax.dynamic_slice_in_dim(hidden, start, length, axis=1)
        weight = jax.lax.dynamic_slice_in_dim(weights, start, length, axis=1)
        window = _window(label_hidden, start, length, steps)
        log_probabilities, labels, loss, guess = _chunk_losses(part, head, window, label_head)
        logit_gradient = ((jnp.exp(log_probabilities) - labels) * weight[..., None]).astype(part.dtype)
        hidden_gradient = jnp.einsum(
            "SMC,CD->SMD", logit_gradient, head.astype(part.dtype), preferred_element_type=jnp.float32
        ).astype(part.dtype)
        head_gradient = head_gradient + jnp.einsum(
            "SMC,SMD->CD", logit_gradient, part, preferred_element_type=jnp.float32
        )
        return (total + jnp.sum(loss * weight), head_gradient), (loss, guess, hidden_gradient)

    start = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (total, head_gradient), (loss, guess, hidden_gradient) = jax.lax.scan(body, start, jnp.arange(count))
    return (total, _unchunk(loss), _unchunk(guess)), (_unchunk(hidden_gradient), head_gradient.astype(head.dtype))


def _backward(saved, cotangents):
    hidden_gradient, head_gradient = saved
    scale = cotangents[0]
    return (
        hidden_gradient * scale.astype(hidden_gradient.dtype),
        head_gradient * scale.astype(head_gradient.dtype),
        None,
        None,
        None,
    )


_whole_chunks.defvjp(_forward, _backward)


def training_time_test_loss(
    draft: Draft,
    batch: Batch,
    label_head: jax.Array,
    slots: Slots,
    step_weights: jax.Array,
    compute: DTypeLike = jnp.float32,
) -> tuple[jax.Array, StepSums]:
    """Unroll the draft over a batch and sum its losses.

    Args:
      draft: the model; gradients are taken with respect to `draft.params`.
      batch: rows with the target's features.
      label_head: [C, D], the target's head at the draft vocabulary's tokens.
      slots: from `find_slots`, whose leading axis gives the number of steps.
      step_weights: [S] fp32, 0.8^s divided by the update's number of trained slots at s.
      compute: precision of activations and products; norms, softmaxes, labels and the loss are fp32 throughout.

    Returns:
      The loss, whose sum over the micro-batches of an update is sum_s 0.8^s * mean cross-entropy at s, and the sums
      that metrics are made of.
    """
    steps, rows, length = slots.trained.shape
    mask = document_mask(batch.documents)
    carries = draft_unroll(draft, fuse(draft, batch.taps.astype(compute)), batch.tokens, batch.positions, mask, steps)
    flat = lambda values: values.reshape(steps, rows * length, *values.shape[3:])
    hidden = flat(draft_hidden(draft, jnp.stack(carries)))
    label_hidden = batch.hidden.reshape(rows * length, -1).astype(compute)
    label_hidden = jnp.pad(label_hidden, ((0, steps + 1), (0, 0)))
    weights = jnp.where(flat(slots.trained), step_weights[:, None], 0.0)
    with jax.named_scope("head_and_loss"):
        loss, each, guess = soft_cross_entropy(
            hidden, draft.params.lm_head, label_hidden, label_head.astype(compute), weights
        )
    guessed = jnp.take(draft.vocab.d2t, guess, mode="clip").reshape(steps, rows, length)
    truth = jnp.stack([_ahead(batch.argmax, 1 + step, -1) for step in range(steps)])
    return loss, _sums(each.reshape(steps, rows, length), guessed == truth, slots)


def _sums(cross_entropy: jax.Array, right: jax.Array, slots: Slots) -> StepSums:
    joint = jnp.cumprod(right, axis=0).astype(bool)
    before = jnp.concatenate([jnp.ones_like(joint[:1]), joint[:-1]])
    count = lambda flags: jnp.sum(flags, axis=(1, 2), dtype=jnp.float32)
    return StepSums(
        cross_entropy=jnp.sum(jnp.where(slots.trained, cross_entropy, 0.0), axis=(1, 2)),
        trained=count(slots.trained),
        slots=count(slots.assistant),
        hits=count(slots.assistant & right),
        joint_hits=count(slots.assistant & joint),
        joint_before=count(slots.assistant & before),
    )
