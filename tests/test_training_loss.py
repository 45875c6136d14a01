"""The training-time-test loss: the slots against their definition in plain Python, and the whole loss against a slow
float64 reference that loops over slots and steps and shares no code with the library.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.draft import Draft, draft_logits, draft_unroll, fuse
from eagle3_jax.metrics import teacher_forced
from eagle3_jax.target import Target
from eagle3_jax.training.loss import (
    Batch,
    Objective,
    StepSums,
    find_slots,
    training_time_test_loss,
)
from eagle3_jax.training.step import Teacher, TrainState, make_optimizer, make_train_step
from tests import tiny

STEPS = 3
DECAY = 0.8
# Row 0: a document with two replies, the second cut at the document's end; a second document; padding.
# Row 1: one document whose reply is cut at the row's end.
DOCUMENTS = [[1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1] * 16]
SPANS = [[0, 0, 1, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 3, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]


def label_head(target: Target, draft: Draft) -> jax.Array:
    return target.params.lm_head[np.asarray(draft.vocab.d2t)]


def mean_weights(draft: Draft, batch: Batch) -> jax.Array:
    """[STEPS]: what turns sums over trained slots into the loss of an update of this one batch."""
    trained = find_slots(batch.spans, batch.argmax, draft.vocab.t2d, STEPS).trained
    return jnp.asarray([DECAY**s / max(1, int(trained[s].sum())) for s in range(STEPS)], jnp.float32)


def whole_loss(params: Any, draft: Draft, batch: Batch, head: jax.Array, weights: jax.Array) -> Any:
    slots = find_slots(batch.spans, batch.argmax, draft.vocab.t2d, STEPS)
    return training_time_test_loss(dataclasses.replace(draft, params=params), batch, head, slots, weights)


# Without the compiler's optimisations: these programs run once or twice.
FAST = {"xla_backend_optimization_level": 0}
loss_of = jax.jit(whole_loss, compiler_options=FAST)
gradients_of = jax.jit(jax.value_and_grad(whole_loss, has_aux=True), compiler_options=FAST)


@jax.jit
def carries_of(draft: Draft, batch: Batch) -> list[jax.Array]:
    return draft_unroll(draft, fuse(draft, batch.taps), batch.tokens, batch.positions, batch.documents, STEPS)


class Reference:
    """The loss by its definition, one slot and one step after the other, in float64."""

    def __init__(self, draft: Draft, batch: Batch, head: jax.Array):
        wide = lambda tree: jax.tree.map(lambda array: np.asarray(array, np.float64), tree)
        self.config, self.embed, self.head = draft.config, wide(draft.embed), wide(head)
        self.params, self.batch = wide(draft.params), jax.tree.map(np.asarray, batch)
        self.d2t = np.asarray(draft.vocab.d2t).tolist()

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self.config.rms_norm_eps) * weight

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = position * self.config.rope.theta ** (-np.arange(half) / half)
        low, high = x[:, :half], x[:, half:]
        return np.concatenate(
            [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], axis=-1
        )

    def feature(self, row: int, slot: int) -> np.ndarray:
        taps = self.batch.taps[row, slot].astype(np.float64)
        if self.params.fc_norm is not None:
            parts = np.split(taps, len(self.config.taps))
            taps = np.concatenate([self.norm(part, weight) for part, weight in zip(parts, self.params.fc_norm)])
        return self.params.fc @ taps

    def project(self, feature: np.ndarray, token: int, position: int) -> tuple[np.ndarray, ...]:
        p = self.params
        normed = self.norm(feature, p.feature_norm)
        x = np.concatenate([self.norm(self.embed[token], p.embed_norm), normed])
        residual = normed if self.config.norm_before_residual else feature
        return residual, self.rotate(p.q @ x, position), self.rotate(p.k @ x, position), p.v @ x

    def layer(self, residual: np.ndarray, q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> Any:
        p, groups = self.params, self.config.num_heads // self.config.num_kv_heads
        heads = []
        for n in range(self.config.num_heads):
            scores = np.array([q[n] @ key[n // groups] for key in keys]) / np.sqrt(self.config.head_dim)
            weights = np.exp(scores - scores.max())
            heads.append(sum(w * v[n // groups] for w, v in zip(weights / weights.sum(), values)))
        x = residual + np.einsum("DNH,NH->D", p.o, np.stack(heads))
        y = self.norm(x, p.post_norm)
        gate = p.gate @ y
        x = x + p.down @ (gate / (1 + np.exp(-gate)) * (p.up @ y))
        return self.norm(x, p.norm) if self.config.norm_output else x

    def run(self) -> tuple[float, dict[str, list[float]]]:
        b = self.batch
        rows, length = b.tokens.shape
        names = ("cross_entropy", "trained", "slots", "hits", "joint_hits", "joint_before")
        sums = {name: [0.0] * STEPS for name in names}
        for r in range(rows):
            first = {
                i: self.project(self.feature(r, i), b.tokens[r, i + 1], b.positions[r, i]) for i in range(length - 1)
            }
            for j in range(length - 2):
                seen = [first[i] for i in range(j + 1) if b.documents[r, i] == b.documents[r, j]]
                keys, values = [entry[2] for entry in seen], [entry[3] for entry in seen]
                carry, all_right = self.feature(r, j), True
                for s in range(STEPS):
                    reply = b.spans[r, j + 1 : j + 3 + s]
                    if j + 2 + s >= length or reply[0] == 0 or (reply != reply[0]).any():
                        break
                    residual, q, k, v = self.project(carry, b.tokens[r, j + 1 + s], b.positions[r, j] + s)
                    if s:
                        keys, values = [*keys, k], [*values, v]
                    carry = self.layer(residual, q, keys, values)
                    hidden = carry if self.config.norm_output else self.norm(carry, self.params.norm)
                    logits = self.params.lm_head @ hidden
                    label = self.head @ b.hidden[r, j + 1 + s].astype(np.float64)
                    label = np.exp(label - label.max())
                    cross_entropy = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
                    cross_entropy -= label @ logits / label.sum()
                    truth = int(b.argmax[r, j + 1 + s])
                    right = self.d2t[int(logits.argmax())] == truth
                    if truth in self.d2t:
                        sums["cross_entropy"][s] += cross_entropy
                        sums["trained"][s] += 1
                    sums["slots"][s] += 1
                    sums["hits"][s] += right
                    sums["joint_before"][s] += all_right
                    all_right = all_right and right
                    sums["joint_hits"][s] += all_right
        loss = sum(DECAY**s * sums["cross_entropy"][s] / max(sums["trained"][s], 1) for s in range(STEPS))
        return loss, sums


def mixed_batch(draft: Draft) -> Batch:
    """DOCUMENTS and SPANS, with the target's guesses set to the draft's own in two of three places."""
    batch = tiny.training_batch(draft, DOCUMENTS, SPANS)

    guesses = draft_logits(draft, carries_of(draft, batch)[0]).argmax(axis=-1)
    own = np.roll(np.asarray(draft.vocab.d2t)[np.asarray(guesses)], 1, axis=1)
    keep = np.random.default_rng(3).random(own.shape) < 0.67
    return dataclasses.replace(batch, argmax=jnp.asarray(np.where(keep, own, np.asarray(batch.argmax)), jnp.int32))


def check_against_reference(loss: jax.Array, sums: StepSums, reference: Reference) -> dict[str, list[float]]:
    expected, expected_sums = reference.run()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, values in expected_sums.items():
        np.testing.assert_allclose(getattr(sums, name), values, rtol=1e-5, err_msg=name)
    return expected_sums


def test_loss_sums_and_gradients_equal_the_definition(t0: Target, d0: Draft):
    batch, head = mixed_batch(d0), label_head(t0, d0)
    (loss, sums), gradients = gradients_of(d0.params, d0, batch, head, mean_weights(d0, batch))
    reference = Reference(d0, batch, head)
    expected = check_against_reference(loss, sums, reference)
    # The example has what it is meant to have: masked slots, and right and wrong guesses.
    assert expected["slots"] == [3 + 1 + 3 + 7, 2 + 0 + 2 + 6, 1 + 0 + 1 + 5]  # replies of 4, 2, 4 and 8 tokens
    assert 0 < expected["trained"][0] < expected["slots"][0]
    assert 0 < expected["hits"][0] < expected["slots"][0]
    # Gradients: each parameter moved along a random direction, by central differences of the reference.
    wide, structure = jax.tree.flatten(reference.params)
    rng = np.random.default_rng(1)
    for index, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(gradients)):
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [leaf + sign * 1e-5 * direction if i == index else leaf for i, leaf in enumerate(wide)]
            reference.params = jax.tree.unflatten(structure, moved)
            ends.append(reference.run()[0])
        slope = float(np.sum(np.asarray(gradient, np.float64) * direction))
        scale = float(np.linalg.norm(gradient))
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-4 * scale, rel=1e-4), path


def test_loss_equals_the_definition_with_every_switch_of_the_draft(t0: Target):
    draft = tiny.draft(t0, fc_norm=True, norm_output=True, norm_before_residual=True)
    batch, head = mixed_batch(draft), label_head(t0, draft)
    loss, sums = loss_of(draft.params, draft, batch, head, mean_weights(draft, batch))
    check_against_reference(loss, sums, Reference(draft, batch, head))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slots_are_those_of_the_definition(data: st.DataObject):
    rows, length, vocab, steps = 2, 9, 5, 4
    grid = lambda top: st.lists(
        st.lists(st.integers(0, top), min_size=length, max_size=length), min_size=rows, max_size=rows
    )
    spans, argmax = data.draw(grid(2)), data.draw(grid(vocab - 1))
    member = data.draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab))
    slots = find_slots(jnp.asarray(spans), jnp.asarray(argmax), jnp.asarray(member), steps)
    for s in range(steps):
        for r in range(rows):
            for j in range(length):
                reply = [spans[r][i] if i < length else 0 for i in range(j + 1, j + 3 + s)]
                assistant = reply[0] > 0 and all(span == reply[0] for span in reply)
                assert bool(slots.assistant[s, r, j]) == assistant
                assert bool(slots.trained[s, r, j]) == (assistant and member[argmax[r][j + 1 + s]])
        np.testing.assert_array_equal(slots.assistant[s], tiny.assistant_slots(np.asarray(spans), s))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_rows_shorter_than_the_unrolled_steps_have_slots_at_the_first_ones_only(length: int):
    spans = jnp.ones((1, length), jnp.int32)
    slots = find_slots(spans, spans * 0, jnp.ones(1, bool), 7)
    assert slots.assistant.shape == (7, 1, length)
    assert np.asarray(slots.assistant.sum((1, 2))).tolist() == [max(0, length - 2 - s) for s in range(7)]


def test_joint_and_conditional_acceptance_are_told_apart():
    # Ten slots at each step; 8 right at first, 6 of these right again, 7 right at the second step in all.
    told = teacher_forced([20.0, 0.0], [0.0, 0.0], [5.0, 0.0], [10, 10], [8, 7], [8, 6], [10, 8])
    assert told["cross_entropy"] == [4.0, None]
    assert told["accuracy"] == [0.8, 0.7]
    assert told["joint"] == [0.8, 0.6]
    assert told["conditional"] == [0.8, 0.75]


def assert_close(one: Any, other: Any) -> None:
    """Equal to 1e-5 of each leaf's largest value."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_packed_documents_train_as_if_they_were_alone(t0: Target, d0: Draft):
    documents = np.asarray([DOCUMENTS[0], [0] * 16])  # an empty second row, so that both layouts have one shape
    packed = tiny.training_batch(d0, documents, [SPANS[0], [0] * 16])
    start = int(np.argmax(documents[0] == 2))

    def split(values: jax.Array) -> jax.Array:
        """The first document stays; the second moves to the start of the second row."""
        array = np.asarray(values)
        first = (documents[0] == 1).reshape(-1, *[1] * (array.ndim - 2))
        return jnp.asarray(np.stack([np.where(first, array[0], 0), np.roll(np.where(first, 0, array[0]), -start, 0)]))

    results = [
        gradients_of(d0.params, d0, batch, label_head(t0, d0), mean_weights(d0, batch))
        for batch in (packed, jax.tree.map(split, packed))
    ]
    assert_close(*results)


@pytest.mark.parametrize("edited", [1, 2])
def test_a_document_never_changes_its_neighbour(d0: Draft, edited: int):
    batch = tiny.training_batch(d0, DOCUMENTS, SPANS)
    inside = np.asarray(batch.documents) == edited
    other = tiny.training_batch(d0, DOCUMENTS, SPANS, seed=9)
    changed = jax.tree.map(
        lambda old, new: jnp.where(inside.reshape(*inside.shape, *[1] * (old.ndim - 2)), new, old), batch, other
    )

    for s, (before, after) in enumerate(zip(carries_of(d0, batch), carries_of(d0, changed))):
        documents = np.asarray(batch.documents[0])
        for j in range(documents.size - 1 - s):
            mine = documents[j]
            if mine == documents[j + 1 + s] != 0:
                assert np.array_equal(before[0, j], after[0, j]) == (mine != edited), (s, j)


def test_the_feature_loss_is_a_smooth_l1_to_the_targets_final_hidden_state(t0: Target, d0: Draft):
    batch, head = tiny.training_batch(d0, DOCUMENTS, SPANS), label_head(t0, d0)
    weights = mean_weights(d0, batch)
    slots = find_slots(batch.spans, batch.argmax, d0.vocab.t2d, STEPS)
    objective = Objective(token_loss=0.1, feature_loss=2.0, freeze_head=True)

    def whole(params: Any) -> Any:
        model = dataclasses.replace(d0, params=params)
        return training_time_test_loss(model, batch, head, slots, weights, objective=objective)

    (loss, sums), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True), compiler_options=FAST)(d0.params)
    carries, hidden = carries_of(d0, batch), np.asarray(batch.hidden, np.float64)
    expected = []
    for step, carry in enumerate(carries):
        total = 0.0
        for row, slot in np.argwhere(np.asarray(slots.trained[step])):
            distance = np.abs(np.asarray(carry, np.float64)[row, slot] - hidden[row, slot + 1 + step])
            total += np.where(distance < 1, distance**2 / 2, distance - 0.5).mean()
        expected.append(total)
    np.testing.assert_allclose(sums.feature, expected, rtol=1e-5)
    plain, plain_sums = loss_of(d0.params, d0, batch, head, weights)
    np.testing.assert_allclose(sums.cross_entropy, plain_sums.cross_entropy, rtol=1e-6)
    np.testing.assert_allclose(loss, 0.1 * plain + 2.0 * np.dot(weights, expected), rtol=1e-5)
    # A frozen head has no gradient; what lies before it has both losses'.
    assert not np.any(gradient.lm_head)
    _, of_tokens = gradients_of(d0.params, d0, batch, head, weights)
    assert np.abs(np.asarray(gradient.fc) - 0.1 * np.asarray(of_tokens.fc)).max() > 1e-4
    assert np.any(np.asarray(of_tokens.lm_head))


def test_the_gradient_of_a_reply_does_not_depend_on_the_length_of_its_prompt(t0: Target, d0: Draft):
    # With values of zero nothing of the prompt reaches the reply, so only a wrong average could tell prompts apart.
    draft = dataclasses.replace(d0, params=dataclasses.replace(d0.params, v=jnp.zeros_like(d0.params.v)))
    length, found = 216, []
    reply = tiny.training_batch(d0, [[1] * length, [0] * length], [[0] + [1] * 5 + [0] * 210, [0] * length])
    head, optimizer = label_head(t0, draft), optax.trace(decay=0.0)  # its state is the update's gradient
    step = make_train_step(optimizer, decay=DECAY)
    for prompt in (10, 200):
        batch = jax.tree.map(lambda values, prompt=prompt: jnp.roll(values, prompt, axis=1), reply)
        documents = jnp.asarray([[1] * (prompt + 6) + [0] * (210 - prompt), [0] * length], jnp.int32)
        positions = jnp.arange(length, dtype=jnp.int32)[None] * documents
        batch = dataclasses.replace(batch, documents=documents, positions=positions)
        params = jax.tree.map(jnp.copy, draft.params)
        state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))
        micro = jax.tree.map(lambda array: array[None], batch)
        state, _, _ = step(state, micro, draft, Teacher(label_head=head), steps=STEPS)
        taken = state.opt_state.trace
        _, expected = gradients_of(draft.params, draft, batch, head, mean_weights(draft, batch))
        assert_close(taken, expected)
        found.append([getattr(taken, name) for name in ("fc", "o", "gate", "up", "down", "norm", "lm_head")])
    assert_close(*found)


@pytest.fixture(scope="module")
def update() -> Any:
    optimizer = make_optimizer(optax.constant_schedule(1e-2), betas=(0.9, 0.95), weight_decay=0.1, clip=0.5)
    return optimizer, make_train_step(optimizer, decay=DECAY)


@pytest.mark.parametrize("fault", ["nothing supervised", "nothing in the vocabulary", "nan feature", "none"])
def test_an_update_without_a_usable_gradient_changes_nothing_and_is_counted(
    t0: Target, d0: Draft, update: Any, fault: str
):
    optimizer, step = update
    batch = tiny.training_batch(d0, DOCUMENTS, SPANS)
    if fault == "nothing supervised":
        batch = dataclasses.replace(batch, spans=jnp.zeros_like(batch.spans))
    elif fault == "nothing in the vocabulary":
        outside = int(np.flatnonzero(~np.asarray(d0.vocab.t2d))[0])
        batch = dataclasses.replace(batch, argmax=jnp.full_like(batch.argmax, outside))
    elif fault == "nan feature":
        batch = dataclasses.replace(batch, taps=batch.taps.at[0, 3, 0].set(jnp.nan))
    params = jax.tree.map(jnp.copy, d0.params)
    state = TrainState(params, optimizer.init(params), jnp.int32(4), jnp.int32(1))
    before = jax.tree.map(np.array, state)
    micro = jax.tree.map(lambda array: array[None], batch)
    state, _, norms = step(state, micro, d0, Teacher(label_head=label_head(t0, d0)), steps=2)
    pairs = zip(jax.tree.leaves((before.params, before.opt_state)), jax.tree.leaves((state.params, state.opt_state)))
    same = [np.array_equal(old, new) for old, new in pairs]
    skipped = fault != "none"
    assert all(same) == skipped
    assert bool(norms["applied"]) != skipped
    assert int(state.skipped) == 1 + skipped
    assert int(state.update) == 5
