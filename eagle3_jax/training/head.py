"""Soft cross-entropy of all unrolled steps, through a head that keeps no logits and skips what nobody asked for.

Letters: S unrolled steps, M tokens of a micro-batch laid end to end, D model width, C draft vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from eagle3_jax.sampling import most_likely
from eagle3_jax.sharding import batch_axes

HEAD_CHUNK = 256  # tokens whose logits exist at one time


def ceil_div(whole: Any, part: Any) -> Any:
    """whole / part, rounded up; integers or integer arrays."""
    return -(-whole // part)


@jax.custom_vjp
def soft_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    label_hidden: jax.Array,
    label_head: jax.Array,
    weights: jax.Array,
    wanted: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted sum of the cross-entropies of all steps, with the head applied chunk by chunk.

    The label of slot j at step s is the target's distribution at position j + 1 + s, so one pass of the target's head
    over the positions serves all steps. Positions that are neither a wanted slot nor a label of one are moved to the
    end, where no chunk is computed: prompts cost nothing here.

    The weights are known beforehand and the loss is linear in them, so the forward pass can form the gradients with
    respect to `hidden` and `head` while a chunk's logits are there; the backward pass only scales them. No logits are
    kept and none are computed twice.

    Args:
      hidden: [S, M, D], what the draft's head reads.
      head: [C, D], the draft's.
      label_hidden: [M, D], the target's final hidden states of the same tokens.
      label_head: [C, D], the target's head at the draft vocabulary's tokens.
      weights: [S, M] fp32, 0 for slots that are not trained.
      wanted: [S, M] bool, slots whose results are used; a slot wanted at one step is wanted at every earlier one, and
        its label lies in the same row. Every slot of weight above 0 must be among them.

    Returns:
      The weighted sum, the cross-entropy of each slot [S, M], and the draft's guesses [S, M] int32 (draft ids); both
      mean nothing where not wanted. Gradients flow from the first only.
    """
    return _sweep(hidden, head, label_hidden, label_head, weights, wanted, gradients=False)[:3]


def _wanted_first(wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An order of the positions [M] int32 with the used ones first, otherwise unchanged, and how many are used.

    Between a wanted slot and its labels every position is the label of an earlier step, hence used too: distances
    within a reply, which is all that the labels' windows rely on, survive the move.
    """
    used = wanted[0]
    for step in range(wanted.shape[0]):
        used = used | jnp.pad(wanted[step], (1 + step, 0))[: used.size]
    return jnp.argsort(~used, stable=True).astype(jnp.int32), jnp.sum(used, dtype=jnp.int32)


def _over(axis: str | None, combine: Any, values: jax.Array) -> jax.Array:
    """Combine what the devices along an axis of the mesh have; nothing without one."""
    return values if axis is None else combine(values, axis)


def _chunk(
    hidden: jax.Array,
    head: jax.Array,
    label_hidden: jax.Array,
    label_head: jax.Array,
    weights: jax.Array | None,
    columns: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """All steps of one chunk of c tokens.

    The steps run one after the other, so that the logits of one of them fit a processor's cache.

    Args:
      hidden: [S, c, D].
      head: [C, D], in hidden's dtype.
      label_hidden: [c + S - 1, D], of the positions that the chunk's labels lie at.
      label_head: [C, D].
      weights: [S, c]; None asks for no gradient.
      columns: the axis of the mesh over which the vocabulary is split, each device holding C of it; or None.

    Returns:
      cross-entropy [S, c], guesses [S, c] int32, weighted gradient of the logits [S, c, C] in hidden's dtype.
    """
    steps, length, _ = hidden.shape
    product = partial(jnp.einsum, "MD,CD->MC", preferred_element_type=jnp.float32)
    largest = lambda values: _over(columns, jax.lax.pmax, jnp.max(values, axis=-1, keepdims=True))
    whole = lambda values: _over(columns, jax.lax.psum, jnp.sum(values, axis=-1, keepdims=True))
    labels = product(label_hidden, label_head)
    labels = jnp.exp(labels - largest(labels))
    labels = labels / whole(labels)

    def one(_: None, item: tuple[jax.Array, jax.Array, jax.Array | None]):
        step, part, weight = item
        logits = product(part, head)
        label = jax.lax.dynamic_slice_in_dim(labels, step, length, axis=0)
        top = largest(logits)
        shifted = logits - top
        total = jnp.log(whole(jnp.exp(shifted)))
        loss = (total - whole(label * shifted))[:, 0]
        guess = most_likely(logits)
        if columns is not None:
            # The lowest id of those that are the largest anywhere.
            guess = guess + jax.lax.axis_index(columns).astype(jnp.int32) * logits.shape[-1]
            mine = jnp.max(logits, axis=-1) == top[:, 0]
            guess = jax.lax.pmin(jnp.where(mine, guess, jnp.iinfo(jnp.int32).max), columns)
        if weight is None:
            return None, (loss, guess, None)
        gradient = (jnp.exp(shifted - total) - label) * weight[:, None]
        return None, (loss, guess, gradient.astype(part.dtype))

    return jax.lax.scan(one, None, (jnp.arange(steps), hidden, weights))[1]


def _sweep(*arrays: jax.Array, gradients: bool) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """`soft_cross_entropy`, and with `gradients` those with respect to `hidden` and `head`.

    On a mesh each device sweeps its own rows, over its own part of the vocabulary: moving tokens between devices to
    pack the wanted ones would cost more than it saves.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _own_sweep(*arrays, gradients=gradients)
    rows, parts = batch_axes(mesh.shape), mesh.shape["tensor"]
    columns = "tensor" if parts > 1 and arrays[1].shape[0] % parts == 0 else None
    by_slot, by_column = PartitionSpec(None, rows), PartitionSpec(columns)
    return jax.shard_map(
        partial(_own_sweep, gradients=gradients, columns=columns, rows=rows),
        in_specs=(by_slot, by_column, PartitionSpec(rows), by_column, by_slot, by_slot),
        out_specs=(PartitionSpec(), by_slot, by_slot, (by_slot, by_column) if gradients else None),
        check_vma=False,
    )(*arrays)


def _own_sweep(
    hidden: jax.Array,
    head: jax.Array,
    label_hidden: jax.Array,
    label_head: jax.Array,
    weights: jax.Array,
    wanted: jax.Array,
    *,
    gradients: bool,
    columns: str | None = None,
    rows: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """The sweep of one device; `columns` as in `_chunk`, `rows` the axes of the mesh that split the tokens."""
    steps, tokens, width = hidden.shape
    # Equal chunks of at most HEAD_CHUNK tokens, the last one padded.
    count = ceil_div(tokens, HEAD_CHUNK)
    length = ceil_div(tokens, count)
    extra = count * length - tokens
    order, used = _wanted_first(wanted)
    back = jnp.argsort(order)

    def gather(values: jax.Array, axis: int, more: int = 0) -> jax.Array:
        """Used positions first, zeros after them: what is not used may hold anything."""
        moved = jnp.take(values, order, axis=axis, mode="clip")
        inside = (jnp.arange(tokens) < used).reshape([-1 if index == axis else 1 for index in range(values.ndim)])
        moved = jnp.where(inside, moved, 0)
        return jnp.pad(moved, [(0, extra + more if index == axis else 0) for index in range(values.ndim)])

    def chunks(values: jax.Array) -> jax.Array:
        """[S, M, ...] -> [chunks, S, c, ...]."""
        return jnp.moveaxis(gather(values, 1).reshape(steps, count, length, *values.shape[2:]), 1, 0)

    def restore(values: jax.Array) -> jax.Array:
        """[chunks, S, c, ...] -> [S, M, ...]."""
        moved = jnp.moveaxis(values, 0, 1).reshape(steps, count * length, *values.shape[3:])
        return jnp.take(moved, back, axis=1, mode="clip")

    parts, shares, labels = chunks(hidden), chunks(weights), gather(label_hidden, 0, steps + 1)
    narrow = head.astype(hidden.dtype)
    # For the head's gradient, laid out so that it is a plain product: the CPU back end is two times slower otherwise.
    across = parts.reshape(count, steps * length, width).transpose(0, 2, 1) if gradients else None

    def body(index: jax.Array, done: tuple) -> tuple:
        window = jax.lax.dynamic_slice_in_dim(labels, index * length + 1, length + steps - 1, axis=0)
        loss, guess, logit_gradient = _chunk(
            parts[index], narrow, window, label_head, shares[index] if gradients else None, columns
        )
        losses, guesses, *rest = done
        done = (losses.at[index].set(loss), guesses.at[index].set(guess))
        if across is None:
            return done
        assert logit_gradient is not None
        flat = logit_gradient.reshape(steps * length, -1)
        hidden_gradient = jnp.einsum("MC,CD->MD", flat, narrow, preferred_element_type=jnp.float32)
        hidden_gradient = _over(columns, jax.lax.psum, hidden_gradient)
        head_gradient = jnp.einsum("DM,MC->DC", across[index], flat, preferred_element_type=jnp.float32)
        mine = hidden_gradient.astype(hidden.dtype).reshape(steps, length, width)
        return (*done, rest[0].at[index].set(mine), rest[1] + head_gradient)

    done = (jnp.zeros(shares.shape, jnp.float32), jnp.zeros(shares.shape, jnp.int32))
    if gradients:
        done += (jnp.zeros_like(parts), jnp.zeros((width, head.shape[0]), jnp.float32))
    done = jax.lax.fori_loop(0, ceil_div(used, length), body, done)
    losses, guesses = restore(done[0]), restore(done[1])
    total = jnp.sum(jnp.where(weights > 0, losses * weights, 0.0))
    if rows:
        total = jax.lax.psum(total, rows)
    if not gradients:
        return total, losses, guesses, None
    head_gradient = done[3].T.astype(head.dtype)
    return total, losses, guesses, (restore(done[2]), jax.lax.psum(head_gradient, rows) if rows else head_gradient)


def _forward(hidden, head, label_hidden, label_head, weights, wanted):
    *out, gradients = _sweep(hidden, head, label_hidden, label_head, weights, wanted, gradients=True)
    return tuple(out), gradients


def _backward(saved, cotangents):
    hidden_gradient, head_gradient = saved
    scale = cotangents[0]
    return (
        hidden_gradient * scale.astype(hidden_gradient.dtype),
        head_gradient * scale.astype(head_gradient.dtype),
        None,
        None,
        None,
        None,
    )


soft_cross_entropy.defvjp(_forward, _backward)
