"""Requests and answers: lossless against plain decoding and transformers, rows that do not depend on the batch, stops,
limits, refused input, and how many programs are compiled."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from eagle3_jax import engine
from eagle3_jax.attention import causal_mask
from eagle3_jax.draft import Draft
from eagle3_jax.errors import InputError
from eagle3_jax.generate import Structure, admit, decode_rounds, prefill_chunk
from eagle3_jax.metrics import tau
from eagle3_jax.requests import Request
from eagle3_jax.sampling import target_distribution
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.tree import TreeShape
from tests import tiny
from tests.tiny_decoding import TOY, answers, install_oracle, oracle, pair_tokenizer, prompts, toy, toy_draft

WIDTHS = range(1, 7)
BAD = ("d0", "random", "shuffled_map", "wrong_theta", "wrong_taps")


@pytest.fixture(scope="module")
def hf() -> Iterator[LlamaForCausalLM]:
    """T0 in transformers, without an end token. One thread: threads of so small a model only wait for each other."""
    model = tiny.hf_target()
    model.generation_config.eos_token_id = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield model
    torch.set_num_threads(threads)


def hf_texts(model: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Greedy continuations; prompts of one length share a batch, so that none is padded."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for length in {len(prompt) for prompt in prompts}:
        same = [prompt for prompt in prompts if len(prompt) == length]
        ids = torch.tensor(same)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        found |= {prompt: tuple(row[length:].tolist()) for prompt, row in zip(same, out, strict=True)}
    return [found[prompt] for prompt in prompts]


def texts(target: Target, draft: Draft | None, requests: Sequence[Request], **options) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers(target, draft, requests, **options)]


def greedy_requests(count: int, tokens: int, vocab: int = 320, seed: int = 0) -> list[Request]:
    """Requests of five lengths."""
    rng = np.random.default_rng(seed)
    made = [tuple(rng.integers(0, vocab, (1, 3, 8, 17, 24)[index % 5]).tolist()) for index in range(count)]
    return [Request(prompt, max_new_tokens=tokens) for prompt in made]


@pytest.fixture(scope="module")
def lossless_case(t0: Target, hf: LlamaForCausalLM):
    """Requests by size, with the text of plain decoding, which must be that of transformers."""
    cache: dict[tuple[int, int], tuple[list[Request], list[tuple[int, ...]]]] = {}

    def case(count: int, tokens: int) -> tuple[list[Request], list[tuple[int, ...]]]:
        if (count, tokens) not in cache:
            requests = greedy_requests(count, tokens)
            plain = texts(t0, None, requests, batch=count)
            assert plain == hf_texts(hf, [request.tokens for request in requests], tokens)
            cache[count, tokens] = requests, plain
        return cache[count, tokens]

    return case


@pytest.mark.parametrize(("width", "name"), [(1, "wrong_theta"), (4, "random"), (4, "shuffled_map"), (6, "wrong_taps")])
def test_no_draft_changes_the_text(t0: Target, lossless_case, width: int, name: str) -> None:
    requests, plain = lossless_case(5, 32)
    assert texts(t0, tiny.bad_drafts(t0)[name], requests, draft_length=width, batch=5) == plain


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", BAD)
def test_no_draft_changes_the_text_large(t0: Target, lossless_case, width: int, name: str) -> None:
    requests, plain = lossless_case(50, 128)
    assert texts(t0, tiny.bad_drafts(t0)[name], requests, draft_length=width, batch=50) == plain


@pytest.mark.full
@pytest.mark.parametrize("shape", [TreeShape(8, 3, 3), TreeShape(24, 6, 4), TreeShape(60, 8, 10)], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", BAD)
def test_no_tree_changes_the_text_large(t0: Target, lossless_case, shape: TreeShape, batch: int, name: str) -> None:
    requests, plain = lossless_case(50, 128)
    assert texts(t0, tiny.bad_drafts(t0)[name], requests, tree=shape, batch=batch) == plain


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS)
def test_a_draft_that_is_often_right_does_not_change_the_text(
    t0: Target, lossless_case, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    install_oracle(monkeypatch)
    requests, plain = lossless_case(50, 128)
    rng = np.random.default_rng(width)
    for request, text in zip(requests, plain, strict=True):
        said = np.where(rng.random(128) < 0.2, rng.integers(0, 320, 128), text)
        assert texts(t0, oracle(tiny.draft(t0), request.tokens, said), [request], draft_length=width) == [text]


def last_logits(target: Target, tokens: Sequence[int], width: int, at: int) -> np.ndarray:
    """Logits after `tokens`, whose last one stands at place `at` of a block of `width` over the cache of the others."""
    start = len(tokens) - 1 - at
    structure = Structure()
    state = engine.prefill(
        target, None, Request(tuple(tokens[:start])), engine.pad_eos([]), structure=structure, cache_length=128
    )
    block = jnp.asarray([[*tokens[start:], *[0] * (width - 1 - at)]], jnp.int32)
    masks = causal_mask(state.target_cache.lengths, width, 128)
    out = target_forward(
        target, block, start + jnp.arange(width, dtype=jnp.int32)[None], masks[1], cache=state.target_cache,
        cache_mask=masks[0],
    )  # fmt: skip
    return np.asarray(target_logits(target, out.hidden)[0, at])


def test_in_bf16_plain_and_drafted_text_part_at_near_ties_only(t0: Target) -> None:
    width = 5
    narrow = t0.replace(params=jax.tree.map(lambda array: array.astype(jnp.bfloat16), t0.params))
    requests = greedy_requests(48, 64)
    plain = texts(narrow, None, requests, batch=48)
    drafted = texts(narrow, tiny.draft(narrow), requests, draft_length=width - 1, batch=48)
    forks = 0
    for request, one, two in zip(requests, plain, drafted, strict=True):
        if one == two:
            continue
        forks += 1
        place = next(index for index, (a, b) in enumerate(zip(one, two)) if a != b)
        prefix = [*request.tokens, *one[:place]]
        alone = last_logits(narrow, prefix, 1, 0)
        blocks = [last_logits(narrow, prefix, width, at) for at in range(min(width, len(prefix) - 1))]
        second, first = np.sort(alone)[-2:]
        assert {one[place], two[place]} <= set(np.argsort(alone)[-3:].tolist())
        assert first - second <= 2 * max(np.abs(block - alone).max() for block in blocks)
    assert forks < 48


@pytest.mark.parametrize("width", [0, 3])
def test_rows_alone_equal_rows_in_a_batch(width: int) -> None:
    draft = toy_draft() if width else None
    requests = [
        Request(prompt, max_new_tokens=limit, temperature=temperature, seed=seed)
        for prompt, limit, temperature, seed in zip(
            [*prompts(5, 64, seed=3), (7,)], (20, 5, 12, 20, 1, 9), (1.0, 0.7, 1.0, 1.3, 1.0, 1.0), (42, 42, 1, 2, 3, 4)
        )
    ]
    # With what was accepted in each round, which may not depend on the batch either.
    rows = lambda asked, **options: [
        (answer.token_ids, answer.accepted) for answer in answers(toy(), draft, asked, draft_length=width, **options)
    ]
    alone = [rows([request])[0] for request in requests]
    assert [len(text) for text, _ in alone] == [request.max_new_tokens for request in requests]
    assert rows(requests, batch=4) == alone
    assert rows(requests[::-1], batch=4) == alone[::-1]
    # Nor on how many rounds run before the host looks.
    assert rows(requests, batch=4, rounds=5) == alone
    assert rows(requests, batch=4, rounds=2, ahead=2) == alone
    # A row without filters does not see that another row has some.
    mixed = [
        dataclasses.replace(request, top_k=4, top_p=0.9) if n % 2 else request for n, request in enumerate(requests)
    ]
    assert rows(mixed, batch=4)[::2] == alone[::2]


@pytest.mark.full
@pytest.mark.parametrize("drafting", [{"draft_length": 4}, {"tree": TreeShape(24, 6, 4)}], ids=["chain", "tree"])
def test_acceptance_does_not_depend_on_the_batch(t0: Target, drafting: dict) -> None:
    rng = np.random.default_rng(3)
    lengths = (3, 17, 64, 1) * 4
    requests = [Request(tuple(rng.integers(0, 320, length).tolist()), max_new_tokens=48) for length in lengths]
    rows = lambda batch: [
        (answer.token_ids, answer.accepted) for answer in answers(t0, tiny.draft(t0), requests, **drafting, batch=batch)
    ]
    alone = rows(1)
    assert any(sum(accepted) for _, accepted in alone)
    assert rows(4) == alone
    assert rows(16) == alone


def test_the_seed_decides_sampled_text() -> None:
    request = Request(prompts(1, 64)[0], max_new_tokens=12, temperature=1.0)
    seeds = [42, 42, 43, *range(64)]
    found = texts(toy(), None, [dataclasses.replace(request, seed=seed) for seed in seeds], batch=4)
    assert found[0] == found[1] != found[2]
    assert len(set(found[3:])) > 32


@pytest.mark.parametrize("width", [0, 3])
def test_every_setting_of_sampling_decodes_and_stays_inside_its_support(width: int) -> None:
    vocab = TOY["vocab_size"]
    settings = itertools.product((0.0, 0.7, 1.0), (0, 1, 5, vocab), (1.0, 0.9, 0.1, 1e-6))
    requests = [
        Request((n % vocab, 7, 3), max_new_tokens=12, temperature=temperature, top_k=top_k, top_p=top_p, seed=n)
        for n, (temperature, top_k, top_p) in enumerate(settings)
    ]
    # Greedy and sampled requests are decoded in two calls.
    for group in (requests[:16], requests[16:]):
        found = texts(toy(), toy_draft() if width else None, group, draft_length=width, batch=16)
        whole = jnp.asarray([[*request.tokens, *text] for request, text in zip(group, found, strict=True)], jnp.int32)
        rows, length = whole.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (rows, length, length))
        logits = target_logits(toy(), target_forward(toy(), whole, positions, mask).hidden)[:, 2:-1]
        said = np.asarray(whole[:, 3:])
        if group[0].temperature == 0:
            np.testing.assert_array_equal(said, jnp.argmax(logits, -1))
            continue
        allowed = np.asarray(target_distribution(logits, engine.sampling_of(group), filters=True))
        assert (np.take_along_axis(allowed, said[..., None], -1) > 0).all()
        # Some settings leave one token only, others many.
        kept = (allowed > 0).sum(-1)
        assert kept.min() == 1
        assert kept.max() == vocab


def test_a_prompt_in_chunks_equals_a_prompt_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install_oracle(monkeypatch)
    requests = [Request(prompts(1, 64, seed=5)[0] * 9, max_new_tokens=12)]
    requests = [dataclasses.replace(requests[0], tokens=requests[0].tokens[:n]) for n in (1, 7, 8, 9, 16, 17, 31)]
    whole = answers(toy(), toy_draft(), requests, draft_length=3, logprobs=True)
    monkeypatch.setattr(engine, "PREFILL_BUCKETS", (4, 8))
    parts = answers(toy(), toy_draft(), requests, draft_length=3, logprobs=True)
    for one, many in zip(whole, parts, strict=True):
        assert one.token_ids == many.token_ids
        # The draft's cache must be right as well, or other drafts would be accepted.
        assert one.accepted == many.accepted
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-3)


@pytest.mark.parametrize("drafting", [{"draft_length": 3}, {"tree": TreeShape(8, 3, 3)}], ids=["chain", "tree"])
def test_logprobs_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch, drafting: dict) -> None:
    install_oracle(monkeypatch)
    request = Request(prompts(1, 64, seed=6)[0], max_new_tokens=14)
    (text,) = texts(toy(), None, [request])
    said = [*text[:5], 1 + text[5] % 63, *text[6:]]
    (answer,) = answers(toy(), oracle(toy_draft(), request.tokens, said), [request], **drafting, logprobs=True)
    # Some blocks are accepted whole, some in part.
    assert answer.token_ids == text
    assert len(set(answer.accepted)) > 1
    model = tiny.hf_target(0, scale=16.0, **TOY)
    ids = torch.tensor([[*request.tokens, *answer.token_ids]])
    with torch.no_grad():
        every = model(ids).logits[0].log_softmax(-1)
    expected = [float(every[len(request.tokens) - 1 + n, token]) for n, token in enumerate(answer.token_ids)]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-3)
    assert answers(toy(), toy_draft(), [request], **drafting)[0].logprobs == ()


def cut_by_hand(text: Sequence[int], request: Request, eos: Sequence[int]) -> tuple[tuple[int, ...], str, str | None]:
    """Where a plain text ends, token by token: ids, reason, and the text before a stop string."""
    said = ""
    for count, token in enumerate(text, start=1):
        said += f"{'abcdefgh'[token // 8]}{token % 8}"
        found = [(said.find(stop) + len(stop), said.find(stop)) for stop in request.stop if stop in said]
        if found:
            return tuple(text[:count]), "stop", said[: min(found)[1]]
        if token in eos:
            return tuple(text[:count]), "stop", None
        if count == request.max_new_tokens:
            return tuple(text[:count]), "length", None
    raise AssertionError("the text is too short")


@pytest.mark.parametrize("drafting", [{"draft_length": 5}, {"tree": TreeShape(11, 5, 2)}], ids=["chain", "tree"])
def test_a_stop_string_across_two_tokens_of_a_block_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch, drafting: dict
) -> None:
    install_oracle(monkeypatch)
    prompt = prompts(1, 64, seed=4)[0]
    (plain,) = texts(toy(), None, [Request(prompt, max_new_tokens=24)])
    tokenizer = pair_tokenizer()
    for place in range(1, 8):
        stop = tokenizer.decode(plain[place : place + 2])[1:3]
        request = Request(prompt, max_new_tokens=24, stop=(stop,))
        (answer,) = answers(
            toy(), oracle(toy_draft(), prompt, plain), [request], **drafting, tokenizer=tokenizer, logprobs=True
        )
        found = answer.token_ids, answer.finish_reason, answer.stopped_text
        assert found == cut_by_hand(plain, request, ())
        assert len(answer.logprobs) == len(answer.token_ids)
        assert stop not in answer.stopped_text


def test_a_hundred_random_stops_count_what_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    install_oracle(monkeypatch)
    tokenizer = pair_tokenizer()
    rng = np.random.default_rng(0)
    cases = prompts(4, 64, seed=4)
    plain = texts(toy(), None, [Request(prompt, max_new_tokens=24) for prompt in cases], batch=4)
    for number in range(100):
        which = int(rng.integers(4))
        text = plain[which]
        said = np.where(rng.random(24) < 0.1, 0, text)
        written = tokenizer.decode(text)
        stops = [written[at : at + rng.integers(1, 5)] for at in rng.integers(0, 44, rng.integers(0, 3))]
        eos = [int(token) for token in rng.choice(text, rng.integers(0, 2))]
        request = Request(cases[which], max_new_tokens=int(rng.integers(1, 25)), stop=tuple(stops))
        draft = oracle(toy_draft(), cases[which], said)
        (answer,) = answers(
            toy(), draft, [request], draft_length=5, rounds=1 + 2 * (number % 2), ahead=number // 2 % 3, eos=eos,
            tokenizer=tokenizer, logprobs=True,
        )  # fmt: skip
        ids, reason, before = cut_by_hand(text, request, eos)
        assert answer.token_ids == ids
        assert answer.finish_reason == reason
        assert answer.stopped_text == before
        assert len(answer.logprobs) == len(ids)
        # Whole rounds yield what they accepted and one more; only the last may be cut.
        emitted = len(ids) - 1
        whole = sum(answer.accepted) + len(answer.accepted)
        assert answer.verification_passes - len(answer.accepted) in (0, 1)
        assert whole == emitted or (whole < emitted and len(answer.accepted) == answer.verification_passes - 1)
        assert (tau([len(ids)], [answer.verification_passes]) or 1) <= 6


@pytest.mark.parametrize(("rounds", "ahead"), [(1, 0), (8, 1), (3, 2)])
def test_rows_that_end_make_room_for_those_that_wait(rounds: int, ahead: int) -> None:
    tokenizer = pair_tokenizer()
    requests = greedy_requests(9, 24, vocab=64, seed=4)
    plain = texts(toy(), None, requests, batch=1)
    # Some rows end by a stop string, which only the host sees, some at once, some by their limit.
    changed = [
        dataclasses.replace(request, stop=(tokenizer.decode(text[n : n + 1]),) if n % 3 == 1 else ())
        if n % 3
        else dataclasses.replace(request, max_new_tokens=n + 1)
        for n, (request, text) in enumerate(zip(requests, plain, strict=True))
    ]
    found = answers(
        toy(), toy_draft(), changed, draft_length=3, batch=3, rounds=rounds, ahead=ahead, tokenizer=tokenizer
    )
    alone = [answers(toy(), toy_draft(), [request], draft_length=3, tokenizer=tokenizer)[0] for request in changed]
    assert [(a.verification_passes, a.accepted) for a in found] == [(a.verification_passes, a.accepted) for a in alone]
    assert [answer.index for answer in found] == list(range(9))
    for answer, request, text in zip(found, changed, plain, strict=True):
        assert (answer.token_ids, answer.finish_reason, answer.stopped_text) == cut_by_hand(text, request, ())
        assert answer.prompt_tokens == len(request.tokens)


def test_a_prompt_near_the_context_limit(t0: Target, hf: LlamaForCausalLM) -> None:
    prompt = (prompts(1, 320, seed=2, longest=60)[0] * 500)[:500]
    (expected,) = hf_texts(hf, [prompt], 12)
    for draft, drafting in (
        (None, {}),
        (tiny.draft(t0), {"draft_length": 4}),
        (tiny.draft(t0), {"tree": TreeShape(24, 6, 4)}),
    ):
        (answer,) = answers(t0, draft, [Request(prompt, max_new_tokens=40)], **drafting)
        assert answer.token_ids == expected
        assert answer.finish_reason == "context"
        assert answer.prompt_tokens == 500


@pytest.mark.parametrize("length", [64, 65, 70])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(length: int) -> None:
    requests = [Request((1, 2)), Request((1,) * length)]
    with pytest.raises(InputError, match=f"prompt 1 .* context of 64 tokens; found {length} tokens"):
        answers(toy(), toy_draft(), requests, draft_length=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "at least one token in prompt 0"),
        ({"tokens": (1, 64)}, "from 0 to 63 in prompt 0; found 64"),
        ({"tokens": (-1, 5)}, "from 0 to 63 in prompt 0; found -1"),
        ({"max_new_tokens": 0}, "max_new_tokens at least 1; found 0"),
        ({"temperature": -0.5}, "temperature 0 .*found -0.5"),
        ({"temperature": float("nan")}, "temperature 0 .*found nan"),
        ({"temperature": float("inf")}, "temperature 0 .*found inf"),
        ({"temperature": 1e-40}, "temperature 0 .*found 1e-40"),
        ({"top_k": -1}, "top_k from 0 .*found -1"),
        ({"top_p": 0.0}, "top_p above 0 .*found 0.0"),
        ({"top_p": 1.5}, "top_p above 0 .*found 1.5"),
        ({"seed": -1}, "seed from 0 .*found -1"),
        ({"seed": 2**32}, "seed from 0 .*found 4294967296"),
        ({"stop": ("x",)}, "a tokenizer, to look for the stop strings of prompt 0; found none"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        answers(toy(), None, [Request(**({"tokens": (1,)} | changes))])


def test_calls_that_make_no_sense_are_refused() -> None:
    greedy = Request((1,))
    with pytest.raises(InputError, match=r"all greedy .* or all sampled; found both"):
        answers(toy(), None, [greedy, dataclasses.replace(greedy, temperature=1.0)])
    with pytest.raises(InputError, match="found draft_length 3 without a draft"):
        answers(toy(), None, [greedy], draft_length=3)
    with pytest.raises(InputError, match="found draft_length 0 with a draft"):
        answers(toy(), toy_draft(), [greedy])
    with pytest.raises(InputError, match="draft_length of at least 0; found -1"):
        answers(toy(), None, [greedy], draft_length=-1)
    for name in ("batch", "rounds"):
        with pytest.raises(InputError, match=f"{name} of at least 1; found 0"):
            answers(toy(), None, [greedy], **{name: 0})
    with pytest.raises(InputError, match="a chain or a tree"):
        answers(toy(), toy_draft(), [greedy], draft_length=2, tree=TreeShape(4, 2, 2))
    with pytest.raises(InputError, match="stop strings of at least one character"):
        answers(toy(), None, [dataclasses.replace(greedy, stop=("",))], tokenizer=pair_tokenizer())
    assert answers(toy(), None, []) == []


def programs() -> int:
    """Programs compiled so far by the jitted functions of decoding."""
    return sum(function._cache_size() for function in (prefill_chunk, decode_rounds, admit))


@pytest.mark.parametrize("drafting", [{"draft_length": 2}, {"tree": TreeShape(5, 2, 2)}], ids=["chain", "tree"])
def test_programs_are_compiled_per_structure_and_not_per_value(monkeypatch: pytest.MonkeyPatch, drafting: dict) -> None:
    # Prefill buckets of 8 to 64 and cache buckets of 32 and 96 tokens stand for the real ones.
    monkeypatch.setattr(engine, "PREFILL_BUCKETS", (16, 64))
    monkeypatch.setattr("eagle3_jax.requests.cache_bucket", lambda needed, limit: 32 if needed <= 32 else 96)
    requests = [Request((5,) * length, max_new_tokens=4, temperature=1.0) for length in range(1, 41)]

    def serve(**changes) -> None:
        for request in requests:
            answers(toy(), toy_draft(), [dataclasses.replace(request, **changes)], **drafting)

    before = programs()
    serve()
    # Prompts of up to 16 tokens need both caches or one, longer ones the large cache; a round for each cache.
    used = {(16 if n <= 16 else 64, 32 if n + 4 + 3 <= 32 else 96) for n in range(1, 41)}
    structures = len(used) + len({cache for _, cache in used})
    assert programs() - before <= structures
    after = programs()
    # From here on nothing at all is compiled, not even a small operation of the host's.
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    jax.jit(lambda x: x * 3 + 41)(jnp.zeros(17))
    assert compiled
    compiled.clear()
    serve()
    serve(temperature=0.5)
    serve(seed=7)
    serve(max_new_tokens=3)
    for request in requests[:3]:
        for eos in ([], [1], [1, 2, 3]):
            answers(toy(), toy_draft(), [request], **drafting, eos=eos)
    assert programs() == after
    assert not compiled
    # Rows of a batch come and go without a program of their own.
    stopped = [dataclasses.replace(request, stop=("0",)) for request in requests[:4]]
    answers(toy(), toy_draft(), stopped, **drafting, batch=3, tokenizer=pair_tokenizer())
    compiled.clear()
    ended = [dataclasses.replace(request, stop=("0",), temperature=0.3, seed=8) for request in requests[4:12]]
    answers(toy(), toy_draft(), ended, **drafting, batch=3, tokenizer=pair_tokenizer())
    assert not compiled


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("drafting", [{"draft_length": 3}, {"tree": TreeShape(8, 3, 3)}], ids=["chain", "tree"])
def test_memory_does_not_grow_with_the_number_of_generations(drafting: dict) -> None:
    rng = np.random.default_rng(0)
    after = 0
    for index in range(300):
        prompt = tuple(rng.integers(0, 64, rng.integers(1, 40)).tolist())
        request = Request(prompt, max_new_tokens=int(rng.integers(1, 20)))
        answers(toy(), toy_draft(), [request], **drafting)
        if index == 49:
            gc.collect()
            after = resident_bytes()
    gc.collect()
    assert resident_bytes() < 1.05 * after
