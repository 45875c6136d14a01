"""Requests in, answers out: the host's side of decoding.

The host pads prompts to buckets, admits a waiting request when a row is free, reads back the few integers that each
round decides, and looks for stop strings, which only text can show.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.drafters import Drafter, Plan
from eagle3_jax.errors import InputError
from eagle3_jax.generate import (
    CONTEXT,
    FINISH_REASONS,
    LENGTH,
    PREFILL_BUCKETS,
    RUNNING,
    STOP,
    DecodeState,
    Rounds,
    Structure,
    admit,
    decode_rounds,
    empty_state,
    prefill_chunk,
    widened,
)
from eagle3_jax.requests import (
    Answer,
    Event,
    Request,
    cache_length_for,
    check_request,
    plan_for,
    sampling_of,
    structure_for,
)
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import check_stops, find_stop
from eagle3_jax.tree import FixedTree, TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prefill_buckets(length: int) -> list[int]:
    """Padded lengths of the chunks that a prompt runs in: whole chunks of the largest bucket, then one that fits."""
    whole, rest = divmod(length, PREFILL_BUCKETS[-1])
    last = [next(size for size in PREFILL_BUCKETS if size >= rest)] if rest else []
    return [PREFILL_BUCKETS[-1]] * whole + last


def prefill(
    target: Target,
    draft: Drafter | None,
    request: Request,
    eos: jax.Array,
    *,
    structure: Structure,
    cache_length: int,
) -> DecodeState:
    """Read a prompt into a state of one row and decide its first token.

    The prompt runs in chunks of the largest bucket; the last chunk is padded to the smallest bucket that holds it. It
    is read by the same programs whatever is proposed after it.
    """
    room = target.config.context_limit - len(request.tokens)
    reading = dataclasses.replace(structure, plan=Plan())
    state = empty_state(target, draft, batch=1, cache_length=cache_length, structure=reading)
    row = lambda value: jnp.asarray([value], jnp.int32)
    state = dataclasses.replace(
        state,
        remaining=row(min(request.max_new_tokens, room)),
        limit_reason=row(LENGTH if request.max_new_tokens <= room else CONTEXT),
        reason=row(RUNNING),
    )
    sampling = sampling_of([request])
    prompt = np.asarray(request.tokens, np.int32)
    start = 0
    for bucket in prefill_buckets(prompt.size):
        chunk, after = prompt[start : start + bucket], prompt[start + 1 : start + bucket + 1]
        start += bucket
        final = start >= prompt.size
        tokens, following = np.zeros((2, 1, bucket), np.int32)
        tokens[0, : chunk.size] = chunk
        following[0, : after.size] = after
        state = prefill_chunk(
            target, draft, state, jnp.asarray(tokens), jnp.asarray(following), row(chunk.size), row(after.size),
            sampling, eos, structure=reading,
        )  # fmt: skip
        if not final:
            # A chunk inside the prompt has decided nothing yet.
            state = dataclasses.replace(state, reason=row(RUNNING))
    tokens, logprobs, taps = widened(state.tokens, state.logprobs, state.taps, places=structure.plan.depth + 1)
    return dataclasses.replace(
        state, remaining=state.remaining - state.count, tokens=tokens, logprobs=logprobs, taps=taps
    )


@dataclasses.dataclass
class _Row:
    """The host's record of a request that is being answered."""

    index: int
    request: Request
    began: float
    first: float = 0.0
    ids: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    passes: int = 0
    done: bool = False


def pad_eos(eos: Sequence[int]) -> jax.Array:
    """End-of-sequence ids as an array of fixed length, padded with -1, so that their number never recompiles."""
    length = max(8, len(eos))
    return jnp.asarray(list(eos) + [-1] * (length - len(eos)), jnp.int32)


def decode(
    target: Target,
    draft: Drafter | None,
    requests: Sequence[Request],
    *,
    draft_length: int = 0,
    tree: TreeShape | FixedTree | None = None,
    lookup_nodes: int = 0,
    batch: int = 1,
    rounds: int | None = None,
    ahead: int | None = None,
    eos: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    logprobs: bool = False,
) -> Iterator[Event]:
    """Answer requests, `batch` at a time; a waiting one takes the place of a row that is done.

    Args:
      target: the model.
      draft: who drafts; required iff something is to be drafted.
      requests: all greedy or all sampled.
      draft_length: W, tokens drafted a round in a chain; 0 without `tree` is plain decoding.
      tree: draft a tree instead.
      lookup_nodes: nodes that lookup fills, beside the draft's own; with a `Mixed` drafter only.
      batch: rows decoded together.
      rounds: most rounds of one call, between two looks of the host, which streams, ends rows at stop strings and lets
        waiting requests in; None is 1 on a CPU, where a look costs nothing, and 8 elsewhere.
      ahead: calls that are under way before the host reads what an earlier one decided, so that the device never waits
        for it; None is 0 on a CPU, and 1 elsewhere.
      eos: end-of-sequence ids; empty ignores them.
      tokenizer: needed for stop strings.
      logprobs: also return the target's log-probabilities.

    Yields:
      An `Event` for every request and round that decided tokens, in the order in which they were decided.

    Raises:
      InputError: before anything is computed, for any request that cannot be answered.
    """
    for index, request in enumerate(requests):
        check_request(request, target.config, f"prompt {index}")
        if request.stop and tokenizer is None:
            raise InputError(
                expected=f"a tokenizer, to look for the stop strings of prompt {index}",
                found="none",
                remedy="Pass the target's tokenizer.",
            )
        if tokenizer is not None:
            check_stops(tokenizer, request.stop)
    on_host = jax.default_backend() == "cpu"
    rounds = (1 if on_host else 8) if rounds is None else rounds
    ahead = (0 if on_host else 1) if ahead is None else ahead
    for name, value, least in (("batch", batch, 1), ("rounds", rounds, 1), ("ahead", ahead, 0)):
        if value < least:
            raise InputError(expected=f"{name} of at least {least}", found=str(value), remedy="Correct the value.")
    plan = plan_for(target.config, draft, draft_length=draft_length, tree=tree, lookup_nodes=lookup_nodes)
    if not requests:
        return
    structure = structure_for(requests, plan, logprobs=logprobs)
    cache_length = cache_length_for(requests, target.config, plan.depth)
    batch = min(batch, len(requests))
    ends = pad_eos(eos)
    waiting = list(enumerate(requests))[::-1]
    rows: list[_Row | None] = [None] * batch
    # A single row is its request's own state; several begin free.
    state = None
    if batch > 1:
        state = empty_state(target, draft, batch=batch, cache_length=cache_length, structure=structure)
    # Rows start out free; their sampling values are placeholders until a request takes them.
    held = [requests[0]] * batch
    sampling = sampling_of(held)
    under_way: collections.deque[tuple[Rounds, list[_Row | None]]] = collections.deque()
    while waiting or any(rows):
        for place in range(batch):
            while rows[place] is None and waiting:
                index, request = waiting.pop()
                if state is not None:
                    # What other rows still compute is no part of this row's time.
                    jax.block_until_ready(state.count)
                row = _Row(index, request, time.perf_counter())
                one = prefill(target, draft, request, ends, structure=structure, cache_length=cache_length)
                event = _collect(row, _read(one), 0, tokenizer, logprobs)
                row.first = time.perf_counter() - row.began
                yield event
                if event.answer is None:
                    rows[place] = row
                    held[place] = request
                    state = one if state is None or batch == 1 else admit(state, one, jnp.int32(place))
                    sampling = sampling_of(held)
        if state is None or not any(rows):
            continue
        state, decided = decode_rounds(target, draft, state, sampling, ends, structure=structure, rounds=rounds)
        under_way.append((decided, list(rows)))
        if len(under_way) <= ahead:
            continue
        stopped = np.zeros(batch, bool)
        decided, asked = under_way.popleft()
        for each in _each_round(decided):
            for place, row in enumerate(asked):
                # Calls that were under way when a row ended know nothing of it.
                if row is None or row.done:
                    continue
                row.passes += 1
                event = _collect(row, each, place, tokenizer, logprobs)
                if event.answer is not None:
                    row.done = True
                    rows[place] = None
                    # A row ended by a stop string is still running as far as the device knows.
                    stopped[place] = each.reason[place] == RUNNING
                yield event
        if stopped.any():
            state = dataclasses.replace(state, reason=jnp.where(jnp.asarray(stopped), LENGTH, state.reason))


@dataclasses.dataclass(frozen=True)
class _Decided:
    """What a round (or prefill) decided, on the host; fields as in `DecodeState`."""

    tokens: np.ndarray
    count: np.ndarray
    reason: np.ndarray
    accepted: np.ndarray
    logprobs: np.ndarray


def _read(state: DecodeState) -> _Decided:
    """One transfer for all rows."""
    return _Decided(*jax.device_get((state.tokens, state.count, state.reason, state.accepted, state.logprobs)))


def _each_round(decided: Rounds) -> Iterator[_Decided]:
    """One transfer for all rounds of a call."""
    found = jax.device_get(decided)
    for index in range(int(found.done)):
        yield _Decided(
            found.tokens[index], found.count[index], found.reason[index], found.accepted[index], found.logprobs[index]
        )


def _collect(
    row: _Row, decided: _Decided, place: int, tokenizer: PreTrainedTokenizerBase | None, logprobs: bool
) -> Event:
    """Take a row's part of what was decided; end the row if it is done."""
    count, reason, accepted = (int(values[place]) for values in (decided.count, decided.reason, decided.accepted))
    whole = count == accepted + 1
    before = len(row.ids)
    row.ids += decided.tokens[place, :count].tolist()
    if logprobs:
        row.logprobs += decided.logprobs[place, :count].tolist()
    stopped_text = None
    if row.request.stop and tokenizer is not None:
        hit = find_stop(tokenizer, row.ids, row.request.stop, before)
        if hit is not None:
            kept, stopped_text = hit
            whole = whole and kept == len(row.ids)
            del row.ids[kept:], row.logprobs[kept:]
            reason = STOP
    if row.passes and whole:
        row.accepted.append(accepted)
    fresh = tuple(row.ids[before:])
    if reason == RUNNING:
        return Event(row.index, fresh)
    seconds = time.perf_counter() - row.began
    answer = Answer(
        index=row.index,
        token_ids=tuple(row.ids),
        finish_reason=FINISH_REASONS[reason],
        prompt_tokens=len(row.request.tokens),
        verification_passes=row.passes,
        accepted=tuple(row.accepted),
        logprobs=tuple(row.logprobs),
        seconds=seconds,
        first_token_seconds=row.first or seconds,
        stopped_text=stopped_text,
    )
    return Event(row.index, fresh, answer)
