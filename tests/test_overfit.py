"""Training and decoding agree on what a slot reads and predicts: a draft that has learnt one text by heart must have
every guess of that text accepted. A label, a token or a position that is off by one in either place shows here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle3_jax.draft import Draft
from eagle3_jax.metrics import tau
from eagle3_jax.requests import Request
from eagle3_jax.target import Target
from eagle3_jax.training.loss import Batch
from eagle3_jax.training.start import label_head
from eagle3_jax.training.step import (
    Teacher,
    TrainState,
    make_eval_step,
    make_optimizer,
    make_train_step,
    target_features,
)
from eagle3_jax.tree import FixedTree, TreeShape
from eagle3_jax.vocab import vocab_from_ids
from tests import tiny
from tests.tiny_decoding import answers

STEPS, TOKENS, UPDATES = 5, 128, 400


@dataclasses.dataclass(frozen=True)
class Overfit:
    target: Target
    draft: Draft
    request: Request
    text: tuple[int, ...]
    accuracy: np.ndarray


@pytest.fixture(scope="module")
def overfit() -> Overfit:
    """A draft trained on one greedy continuation until all its guesses are right."""
    target = tiny.from_hf(tiny.hf_target(0, scale=16.0))
    # Sharper distributions, so that learning the labels soon means learning which token is the most likely.
    target = target.replace(params=target.params.replace(lm_head=target.params.lm_head * 4))
    request = Request(tuple(range(40, 48)), max_new_tokens=TOKENS)
    text = answers(target, None, [request])[0].token_ids
    rng = np.random.default_rng(0)
    others = rng.permutation(np.setdiff1d(np.arange(320), text))
    size = max(96, len(set(text)))
    ids = np.sort(np.concatenate([np.unique(text), others])[:size])
    draft = tiny.draft(target, size=size, scale=1.0).replace(vocab=vocab_from_ids(ids, 320))

    row = np.asarray([[*request.tokens, *text]], np.int32)
    length = row.shape[1]
    documents = jnp.ones((1, length), jnp.int32)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    spans = (np.arange(length) >= len(request.tokens)).astype(np.int32)[None]
    taps, hidden, argmax = target_features(target, jnp.asarray(row), documents, positions, taps=draft.config.taps)
    batch = Batch(jnp.asarray(row), jnp.asarray(spans), documents, positions, taps, hidden, argmax)
    micro = jax.tree.map(lambda values: values[None], batch)
    optimizer = make_optimizer(
        optax.cosine_decay_schedule(3e-3, UPDATES, 0.1), betas=(0.9, 0.95), weight_decay=0.0, clip=0.5
    )
    params = jax.tree.map(jnp.copy, draft.params)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))
    teacher = Teacher(label_head(target, draft.vocab))
    step, evaluate = make_train_step(optimizer, decay=1.0), make_eval_step()
    for update in range(UPDATES):
        state, _, _ = step(state, micro, draft, teacher, steps=STEPS)
        if update % 20 == 19:
            sums = evaluate(draft.replace(params=state.params), batch, teacher, steps=STEPS)
            if bool((sums.hits == sums.slots).all()):
                break
    draft = draft.replace(params=state.params)
    assert int(state.skipped) == 0
    # Every token of the text but the first ones is predicted at each step.
    assert sums.slots.tolist() == [TOKENS - 1 - s for s in range(STEPS)]
    return Overfit(target, draft, request, text, np.asarray(sums.hits / sums.slots))


def test_every_guess_is_right_in_training(overfit: Overfit) -> None:
    assert len(set(overfit.text)) > 20
    assert overfit.accuracy.tolist() == [1.0] * STEPS


@pytest.mark.parametrize("width", [3, 5])
def test_every_draft_is_accepted_in_decoding(overfit: Overfit, width: int) -> None:
    (answer,) = answers(overfit.target, overfit.draft, [overfit.request], draft_length=width)
    assert answer.token_ids == overfit.text
    assert set(answer.accepted) == {width}
    passes = -(-(TOKENS - 1) // (width + 1))
    assert answer.verification_passes == passes
    assert tau([TOKENS], [passes]) == (TOKENS - 1) / passes


@pytest.mark.parametrize("shape", [TreeShape(8, 3, 3), FixedTree((0, 0, 1, 1, 3))], ids=["dynamic", "fixed"])
def test_every_tree_holds_the_text(overfit: Overfit, shape: TreeShape | FixedTree) -> None:
    """The right path is the most likely one at every level, so the deepest node on it is reached."""
    (answer,) = answers(overfit.target, overfit.draft, [overfit.request], tree=shape)
    assert answer.token_ids == overfit.text
    assert set(answer.accepted) == {3}
