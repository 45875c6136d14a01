"""Rounds on the device: what they decide, where they stop, what they leave in the caches, and the distribution of what
they sample."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.baselines import Lookup, SmallModel
from eagle3_jax.cache import KVCache
from eagle3_jax.drafters import Mixed, Plan
from eagle3_jax.engine import pad_eos, prefill
from eagle3_jax.generate import (
    CONTEXT,
    RUNNING,
    STOP,
    DecodeState,
    Structure,
    admit,
    decode_round,
    decode_rounds,
    empty_state,
    prefill_chunk,
)
from eagle3_jax.metrics import tau
from eagle3_jax.requests import Request, plan_for, sampling_of
from eagle3_jax.sampling import Sampling
from eagle3_jax.target import Target
from eagle3_jax.tree import FixedTree, TreeShape
from tests import tiny
from tests.tiny_decoding import (
    NO_EOS,
    TOY,
    answers,
    chi_square_p,
    decided,
    eight_tokens,
    exact_joint,
    finish,
    install_oracle,
    oracle,
    prompts,
    start,
    toy,
    toy_draft,
)

PROMPT = prompts(1, 64, seed=4)[0]
PLAIN_LENGTH = 24
GROWN, FIXED = Plan(3, TreeShape(8, 3, 3)), Plan(3, FixedTree((0, 0, 1, 1, 2, 4, 4)))
NAMES = ["chain", "tree", "fixed tree"]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """The greedy continuation of PROMPT."""
    return list(answers(toy(), None, [Request(PROMPT, max_new_tokens=PLAIN_LENGTH)])[0].token_ids)


def rows_of(cache: KVCache, row: int = 0) -> np.ndarray:
    """[layers * 2, K, S, H], a copy."""
    return np.stack([np.array(array[row]) for array in (*(k.swapaxes(2, 3) for k in cache.keys), *cache.values)])


def corrupted(text: list[int], wrong: set[int]) -> list[int]:
    """The text with other tokens at some places."""
    return [(token + 1) % 64 if place in wrong else token for place, token in enumerate(text)]


@pytest.mark.parametrize(
    ("matches", "accepted"), [([1, 0, 1, 1], 1), ([0, 1, 1, 1], 0), ([1, 1, 1, 1], 4), ([1, 1, 1, 0], 3)]
)
def test_drafts_after_the_first_wrong_one_do_not_count(
    monkeypatch: pytest.MonkeyPatch, plain: list[int], matches: list[int], accepted: int
) -> None:
    install_oracle(monkeypatch)
    said = corrupted(plain, {place + 1 for place, match in enumerate(matches) if not match})
    draft = oracle(toy_draft(), PROMPT, said)
    state, structure, sampling = start(toy(), draft, Request(PROMPT), Plan(4))
    state = decode_round(toy(), draft, state, sampling, NO_EOS, structure=structure)
    assert int(state.accepted[0]) == accepted
    assert decided(state) == plain[1 : accepted + 2]


@pytest.mark.parametrize("plan", [Plan(6), GROWN, FIXED], ids=NAMES)
@pytest.mark.parametrize("place", range(8))
def test_output_ends_at_the_end_token_wherever_it_falls_in_a_block(
    monkeypatch: pytest.MonkeyPatch, plain: list[int], place: int, plan: Plan
) -> None:
    install_oracle(monkeypatch)
    draft = oracle(toy_draft(), PROMPT, plain)
    end = plain[place]
    state, structure, sampling = start(toy(), draft, Request(PROMPT, max_new_tokens=16), plan, eos=[63, end])
    text = decided(state) + finish(toy(), draft, state, sampling, structure, eos=[63, end])
    assert text == plain[: plain.index(end) + 1]


def test_a_block_cut_at_the_end_token_counts_what_was_emitted(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    install_oracle(monkeypatch)
    draft = oracle(toy_draft(), PROMPT, plain)
    assert plain.index(plain[3]) == 3
    state, structure, sampling = start(toy(), draft, Request(PROMPT), Plan(5), eos=[plain[3]])
    state = decode_round(toy(), draft, state, sampling, pad_eos([plain[3]]), structure=structure)
    assert int(state.accepted[0]) == 5
    assert int(state.count[0]) == 3
    assert int(state.reason[0]) == STOP
    assert tau([1 + 3], [int(state.passes[0])]) == 3.0
    # A row that is done neither decides nor changes anything.
    before = rows_of(state.target_cache)
    lengths, remaining, root = (np.array(x) for x in (state.target_cache.lengths, state.remaining, state.root))
    state = decode_round(toy(), draft, state, sampling, pad_eos([plain[3]]), structure=structure)
    assert int(state.count[0]) == 0
    assert int(state.passes[0]) == 1
    np.testing.assert_array_equal(rows_of(state.target_cache), before)
    for old, new in ((lengths, state.target_cache.lengths), (remaining, state.remaining), (root, state.root)):
        np.testing.assert_array_equal(np.asarray(new), old)


@pytest.mark.parametrize("right", [False, True])
def test_tau_is_one_for_drafts_never_right_and_the_block_for_drafts_always_right(
    monkeypatch: pytest.MonkeyPatch, plain: list[int], right: bool
) -> None:
    install_oracle(monkeypatch)
    width = 4
    said = plain if right else corrupted(plain, set(range(PLAIN_LENGTH)))
    total = 1 + (width + 1) * 4
    (answer,) = answers(
        toy(), oracle(toy_draft(), PROMPT, said), [Request(PROMPT, max_new_tokens=total)], draft_length=width
    )
    assert list(answer.token_ids) == plain[:total]
    assert tau([len(answer.token_ids)], [answer.verification_passes]) == (width + 1 if right else 1.0)
    assert set(answer.accepted) == {width if right else 0}
    assert len(answer.accepted) == answer.verification_passes


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_limit_inside_a_block_cuts_it(monkeypatch: pytest.MonkeyPatch, plain: list[int], limit: int) -> None:
    install_oracle(monkeypatch)
    draft = oracle(toy_draft(), PROMPT, plain)
    (answer,) = answers(toy(), draft, [Request(PROMPT, max_new_tokens=limit)], draft_length=4)
    assert list(answer.token_ids) == plain[:limit]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("drafting", [{"draft_length": 4}, {"tree": GROWN.tree}], ids=NAMES[:2])
@pytest.mark.parametrize("room", [1, 2, 7])
def test_the_context_ends_an_answer_inside_a_block(
    monkeypatch: pytest.MonkeyPatch, room: int, drafting: dict[str, Any]
) -> None:
    install_oracle(monkeypatch)
    limit = toy().config.context_limit
    prompt = prompts(1, 64, seed=1)[0] * limit
    prompt = prompt[: limit - room]
    (expected,) = answers(toy(), None, [Request(prompt, max_new_tokens=room)])
    assert expected.finish_reason == "length"
    draft = oracle(toy_draft(), prompt, expected.token_ids)
    plan = plan_for(toy().config, draft, **drafting)
    state, structure, sampling = start(toy(), draft, Request(prompt, max_new_tokens=room + 5), plan)
    assert int(state.limit_reason[0]) == CONTEXT
    while int(state.reason[0]) == RUNNING:
        state = decode_round(toy(), draft, state, sampling, NO_EOS, structure=structure)
    assert int(state.reason[0]) == CONTEXT
    assert int(state.target_cache.lengths[0]) == limit - 1
    (answer,) = answers(toy(), draft, [Request(prompt, max_new_tokens=room + 5)], **drafting)
    assert answer.finish_reason == "context"
    assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("plan", [Plan(4), GROWN], ids=NAMES[:2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_only_append_to_the_caches(
    monkeypatch: pytest.MonkeyPatch, plain: list[int], temperature: float, plan: Plan
) -> None:
    install_oracle(monkeypatch)
    draft = oracle(toy_draft(), PROMPT, corrupted(plain, {3, 9, 11}))
    request = Request(PROMPT, max_new_tokens=PLAIN_LENGTH, temperature=temperature, seed=5)
    state, structure, sampling = start(toy(), draft, request, plan)
    while int(state.reason[0]) == RUNNING:
        caches = [cache for cache in (state.target_cache, state.draft_cache) if cache is not None]
        before = [(rows_of(cache), int(cache.lengths[0])) for cache in caches]
        state = decode_round(toy(), draft, state, sampling, NO_EOS, structure=structure)
        for (old, length), cache in zip(before, (state.target_cache, state.draft_cache), strict=True):
            new, now = rows_of(cache), int(cache.lengths[0])
            np.testing.assert_array_equal(new[:, :, :length], old[:, :, :length])
            # Nothing that was rejected is written, not even beyond the committed length.
            assert not new[:, :, now:].any()
            assert new[:, :, length:now].any(axis=(0, 1, 3)).all()


@pytest.mark.parametrize("plan", [Plan(4), Plan(4, TreeShape(9, 4, 3))], ids=NAMES[:2])
@pytest.mark.parametrize("length", [56, 61, 62])
def test_rounds_near_the_context_limit_write_nothing_elsewhere(length: int, plan: Plan) -> None:
    """The toy's context is 64 tokens: blocks of 5 levels reach beyond it, and beyond them the cache ends."""
    prompt = tuple(np.random.default_rng(length).integers(0, 64, length).tolist())
    # A draft made for longer texts, which is asked to the end.
    draft = toy_draft()
    draft = draft.replace(config=dataclasses.replace(draft.config, max_position_embeddings=128))
    request = Request(prompt, max_new_tokens=40)
    state, structure, sampling = start(toy(), draft, request, plan, cache_length=64 + 5)
    caches = lambda: [cache for cache in (state.target_cache, state.draft_cache) if cache is not None]
    before = [(rows_of(cache), int(cache.lengths[0])) for cache in caches()]
    while int(state.reason[0]) == RUNNING:
        state = decode_round(toy(), draft, state, sampling, NO_EOS, structure=structure)
    assert int(state.reason[0]) == CONTEXT
    for (old, length_before), cache in zip(before, caches(), strict=True):
        new, now = rows_of(cache), int(cache.lengths[0])
        assert length_before < now < 64
        np.testing.assert_array_equal(new[:, :, :length_before], old[:, :, :length_before])
        assert not new[:, :, now:].any()


@pytest.mark.parametrize("plan", [Plan(4), GROWN, FIXED], ids=NAMES)
@pytest.mark.parametrize("wrong", [set(), {2, 6, 7, 12}])
def test_caches_after_blocks_equal_those_of_a_fresh_prefill(
    monkeypatch: pytest.MonkeyPatch, plain: list[int], wrong: set[int], plan: Plan
) -> None:
    install_oracle(monkeypatch)
    draft = oracle(toy_draft(), PROMPT, corrupted(plain, wrong))
    state, structure, sampling = start(toy(), draft, Request(PROMPT), plan)
    text = [*PROMPT, *decided(state)]
    for _ in range(3):
        state = decode_round(toy(), draft, state, sampling, NO_EOS, structure=structure)
        assert wrong or int(state.accepted[0]) >= 2
        text += decided(state)
        fresh, _, _ = start(toy(), draft, Request(tuple(text)), plan)
        for ours, theirs in ((state.target_cache, fresh.target_cache), (state.draft_cache, fresh.draft_cache)):
            length = int(ours.lengths[0])
            assert length > len(PROMPT) - 1
            found, expected = rows_of(ours)[:, :, :length], rows_of(theirs)[:, :, :length]
            np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    # The draft's cache lags behind by the last block, which the next round writes from true features.
    assert int(state.draft_cache.lengths[0]) == len(text) - 1 - int(state.count[0])


def test_rows_that_are_done_do_not_prolong_the_rounds() -> None:
    """Of a call of 8 rounds, those in which a row was running count: not the free row's, nor those after the end."""
    request = Request(PROMPT, max_new_tokens=4)
    one, structure, _ = start(toy(), None, request, Plan())
    both = admit(empty_state(toy(), None, batch=2, cache_length=128, structure=structure), one, jnp.int32(0))
    _, made = decode_rounds(toy(), None, both, sampling_of([request, request]), NO_EOS, structure=structure, rounds=8)
    assert int(made.done) == 3


def test_the_state_is_consumed_in_place() -> None:
    state, structure, sampling = start(toy(), toy_draft(), Request(PROMPT), Plan(4))
    caches = lambda s: [*s.target_cache.keys, *s.target_cache.values, *s.draft_cache.keys, *s.draft_cache.values]
    old = caches(state)
    pointers = {array.unsafe_buffer_pointer() for array in old}
    state = decode_round(toy(), toy_draft(), state, sampling, NO_EOS, structure=structure)
    assert all(array.is_deleted() for array in old)
    assert {array.unsafe_buffer_pointer() for array in caches(state)} == pointers


SAMPLES, CHUNK = 20_000, 5_000
TOY_PROMPT = (3, 1, 4, 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"plan": Plan(0)},
    "chain": {"plan": Plan(3)},
    "chain, bf16 draft, T=0.7": {"plan": Plan(3), "temperature": 0.7, "bf16": True},
    "chain, all in bf16, T=0.7": {"plan": Plan(3), "temperature": 0.7, "bf16": True, "bf16_target": True},
    "chain, filters": {"plan": Plan(3), "top_k": 6, "top_p": 0.8},
    "oracle": {"plan": Plan(3), "oracle": True},
    "small model": {"plan": Plan(3), "drafter": "small"},
    "lookup": {"plan": Plan(3), "drafter": "lookup"},
    "tree": {"plan": Plan(3, TreeShape(8, 3, 3))},
    "fixed tree": {"plan": Plan(3, FixedTree((0, 0, 0, 1, 1, 2, 4)))},
    "tree and lookup": {"plan": Plan(2, TreeShape(6, 2, 3), 3), "drafter": "mixed"},
    "chain and lookup, T=0.7": {"plan": Plan(2, None, 3), "drafter": "mixed", "temperature": 0.7},
    "tree, filters, T=0.7": {
        "plan": Plan(2, TreeShape(9, 2, 4)),
        "temperature": 0.7,
        "top_k": 6,
        "top_p": 0.9,
    },
}


def sample_texts(
    target: Target,
    plan: Plan,
    seed: int,
    *,
    drafter: str,
    bf16: bool,
    use_oracle: bool,
    request: Request,
    batch: int | None,
) -> np.ndarray:
    """[SAMPLES, 3] tokens decided by rounds after TOY_PROMPT, each row with its own seed.

    The rows are one large batch, or many states of `batch` rows.
    """
    draft: Any = None
    if drafter == "small":
        draft = SmallModel(tiny.from_hf(tiny.hf_target(8, scale=4.0, **(TOY | {"vocab_size": 8}))))
    elif drafter == "lookup":
        draft = Lookup()
    elif plan.depth:
        draft = tiny.draft(target, size=5, taps=(0, 1, 3))
        if bf16:
            draft = draft.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), draft.params))
        if use_oracle:
            draft = oracle(draft, TOY_PROMPT, [4, 1, 2, 4])
        if drafter == "mixed":
            draft = Mixed(draft, Lookup())
    filters = request.top_k > 0 or request.top_p < 1
    structure = Structure(plan=plan, greedy=False, filters=filters)
    # The prompt's last token is the root, so that rounds decide every token that is counted.
    head = dataclasses.replace(request, tokens=TOY_PROMPT[:-1], max_new_tokens=4)
    one = prefill(target, draft, head, NO_EOS, structure=structure, cache_length=16)
    last = jnp.full_like(one.root, TOY_PROMPT[-1])
    one = one.replace(root=last, tokens=one.tokens.at[:, 0].set(last))
    texts = np.full((SAMPLES, 3), -1)

    def advance(state: DecodeState, sampling: Sampling) -> DecodeState:
        return decode_round(target, draft, state, sampling, NO_EOS, structure=structure)

    def in_batches(state: DecodeState, sampling: Sampling) -> DecodeState:
        apart = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(-1, batch, *leaf.shape[1:]), tree)
        after = jax.vmap(advance)(apart(state), apart(sampling))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), after)

    step = advance if batch is None else jax.jit(in_batches)
    for at in range(0, SAMPLES, CHUNK):
        state = jax.tree.map(lambda value: jnp.repeat(value, CHUNK, axis=0), one)
        sampling = jax.tree.map(lambda value: jnp.repeat(value, CHUNK, axis=0), sampling_of([request]))
        seeds = np.arange(CHUNK, dtype=np.uint32) + np.uint32(seed * SAMPLES + at)
        sampling = sampling.replace(seed=jnp.asarray(seeds))
        filled = np.zeros(CHUNK, int)
        while filled.min() < 3:
            state = step(state, sampling)
            tokens, count = np.asarray(state.tokens), np.asarray(state.count)
            for place in range(tokens.shape[1]):
                rows = np.flatnonzero(place < count)
                texts[at + rows, filled[rows]] = tokens[rows, place]
                filled[rows] += 1
    return texts


def check_samples(monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], seeds: range) -> None:
    install_oracle(monkeypatch)
    options = dict(setting)
    plan, batch = options.pop("plan"), options.pop("batch", None)
    drafter = options.pop("drafter", "eagle3")
    bf16, bf16_target, use_oracle = (options.pop(name, False) for name in ("bf16", "bf16_target", "oracle"))
    target = eight_tokens()
    if bf16_target:
        target = target.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    request = Request(TOY_PROMPT, **({"temperature": 1.0} | options))
    filters = request.top_k > 0 or request.top_p < 1
    exact = exact_joint(target, TOY_PROMPT, sampling_of([request]), filters=filters)
    for seed in seeds:
        texts = sample_texts(
            target, plan, seed, drafter=drafter, bf16=bf16, use_oracle=use_oracle, request=request, batch=batch
        )
        counts = np.zeros(exact.shape)
        np.add.at(counts, tuple(texts.T), 1)
        assert counts.sum() == SAMPLES
        assert chi_square_p(counts, exact) > 0.001, f"seed {seed}"


@pytest.mark.parametrize("setting", ["chain, all in bf16, T=0.7", "tree"])
def test_sampled_text_follows_the_target(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    check_samples(monkeypatch, SETTINGS[setting], range(1))


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_text_follows_the_target_under_every_setting(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    check_samples(monkeypatch, SETTINGS[setting], range(5))


@pytest.mark.full
@pytest.mark.parametrize("plan", [Plan(3), Plan(3, TreeShape(8, 3, 3))], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_sampled_text_follows_the_target_in_batches(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, temperature: float, batch: int
) -> None:
    check_samples(monkeypatch, {"plan": plan, "temperature": temperature, "batch": batch}, range(5))


def test_the_first_token_follows_the_target() -> None:
    target, rows, bucket = eight_tokens(), 20_000, 8
    structure = Structure(greedy=False)
    state = empty_state(target, None, batch=rows, cache_length=16, structure=structure)
    state = state.replace(remaining=jnp.full((rows,), 5, jnp.int32), reason=jnp.full((rows,), RUNNING, jnp.int32))
    request = Request(TOY_PROMPT, temperature=1.0)
    sampling = jax.tree.map(lambda value: jnp.repeat(value, rows, axis=0), sampling_of([request]))
    sampling = sampling.replace(seed=jnp.arange(rows, dtype=jnp.uint32))
    tokens = np.zeros((rows, bucket), np.int32)
    tokens[:, : len(TOY_PROMPT)] = TOY_PROMPT
    count = jnp.full((rows,), len(TOY_PROMPT), jnp.int32)
    state = prefill_chunk(
        target, None, state, jnp.asarray(tokens), jnp.asarray(tokens), count, count - 1, sampling, NO_EOS,
        structure=structure,
    )  # fmt: skip
    counts = np.bincount(np.asarray(state.root), minlength=8)
    exact = exact_joint(target, TOY_PROMPT, sampling_of([request]), filters=False).sum(axis=(1, 2))
    assert chi_square_p(counts, exact) > 0.001
