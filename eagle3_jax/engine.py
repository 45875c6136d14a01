"""Requests in, answers out: the host's side of decoding.

The host pads prompts to buckets, admits a waiting request when a row is free, reads back the few integers that each
round decides, and looks for stop strings, which only text can show.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.baselines import SmallModel
from eagle3_jax.cache import cache_bucket
from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Draft
from eagle3_jax.drafters import Drafter, Mixed, Plan, reach_of
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
)
from eagle3_jax.sampling import Sampling
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import check_stops, find_stop
from eagle3_jax.tree import FixedTree, TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
      tokens: the prompt's ids.
      max_new_tokens: most tokens decided.
      temperature: 0 is greedy.
      top_k: 0 keeps all tokens.
      top_p: 1 keeps all tokens.
      seed: of this row's randomness, 0 to 2^32 - 1.
      stop: strings that end the answer.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes:
      index: the request's place in the list.
      token_ids: the tokens decided, an end-of-sequence token included.
      finish_reason: stop, length or context.
      prompt_tokens: length of the prompt.
      verification_passes: passes of the target after prefill.
      accepted: drafts accepted in each round that no stop or limit cut short.
      logprobs: of `token_ids`; empty unless asked for.
      seconds: from admission to the last token.
      first_token_seconds: from admission to the first.
      stopped_text: the text before a stop string, if one ended the answer.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    verification_passes: int
    accepted: tuple[int, ...]
    logprobs: tuple[float, ...]
    seconds: float
    first_token_seconds: float
    stopped_text: str | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """Tokens just decided for a request; `answer` is set with the last of them."""

    index: int
    token_ids: tuple[int, ...]
    answer: Answer | None = None


def check_request(request: Request, config: TargetConfig, where: str) -> None:
    """Refuse a request that cannot be answered; `where` names it in messages.

    Raises:
      InputError: an empty prompt, a prompt that leaves no room in the context, an id outside the vocabulary, or a
        sampling value out of range.
    """
    length, limit = len(request.tokens), config.context_limit
    if not length:
        raise InputError(expected=f"at least one token in {where}", found="an empty prompt", remedy="Give some text.")
    if length >= limit:
        raise InputError(
            expected=f"{where} to leave room for an answer in the target's context of {limit} tokens",
            found=f"{length} tokens",
            remedy="Shorten the prompt.",
        )
    if min(request.tokens) < 0 or max(request.tokens) >= config.vocab_size:
        raise InputError(
            expected=f"token ids from 0 to {config.vocab_size - 1} in {where}",
            found=f"{max(request.tokens)}" if min(request.tokens) >= 0 else f"{min(request.tokens)}",
            remedy="The tokenizer is not this target's.",
        )
    for name, holds, rule in (
        ("max_new_tokens", request.max_new_tokens >= 1, "at least 1"),
        # Logits divided by less, or by infinity, leave the range of fp32.
        (
            "temperature",
            request.temperature == 0 or 1e-4 <= request.temperature <= 1e4,
            "0 (greedy) or from 0.0001 to 10000",
        ),
        ("top_k", 0 <= request.top_k < 2**31, "from 0 (all tokens) to 2147483647"),
        ("top_p", 0 < request.top_p <= 1, "above 0 and at most 1"),
        ("seed", 0 <= request.seed < 2**32, "from 0 to 4294967295"),
    ):
        if not holds:
            raise InputError(expected=f"{name} {rule}", found=str(getattr(request, name)), remedy="Correct the value.")


def structure_for(requests: Sequence[Request], plan: Plan, *, logprobs: bool = False) -> Structure:
    """The one structure that serves all requests.

    Raises:
      InputError: greedy and sampled requests mixed.
    """
    greedy = {request.temperature == 0 for request in requests}
    if len(greedy) > 1:
        raise InputError(
            expected="requests that are all greedy (temperature 0) or all sampled",
            found="both",
            remedy="Decode them in two calls.",
        )
    sampled = not greedy.pop()
    filters = sampled and any(request.top_k > 0 or request.top_p < 1 for request in requests)
    return Structure(plan=plan, greedy=not sampled, filters=filters, logprobs=logprobs)


def sampling_of(requests: Sequence[Request]) -> Sampling:
    """Per-row sampling values; a greedy row's temperature is 1, which nothing reads."""
    column = lambda values, dtype: jnp.asarray(np.asarray(list(values), dtype))
    return Sampling(
        temperature=column((request.temperature or 1.0 for request in requests), np.float32),
        top_k=column((request.top_k for request in requests), np.int32),
        top_p=column((request.top_p for request in requests), np.float32),
        seed=column((request.seed for request in requests), np.uint32),
    )


def cache_length_for(requests: Sequence[Request], config: TargetConfig, depth: int) -> int:
    """The cache bucket that holds every request's prompt, answer and one round's tokens, `depth` + 1."""
    block = depth + 1
    needed = max(
        min(len(request.tokens) + request.max_new_tokens, config.context_limit) + block for request in requests
    )
    return cache_bucket(needed, config.context_limit + block)


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

    The prompt runs in chunks of the largest bucket; the last chunk is padded to the smallest bucket that holds it.
    """
    room = target.config.context_limit - len(request.tokens)
    state = empty_state(target, draft, batch=1, cache_length=cache_length, structure=structure)
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
            sampling, eos, structure=structure,
        )  # fmt: skip
        if not final:
            # A chunk inside the prompt has decided nothing yet.
            state = dataclasses.replace(state, reason=row(RUNNING))
    return dataclasses.replace(state, remaining=state.remaining - state.count)


def plan_for(
    target: TargetConfig,
    draft: Drafter | None,
    *,
    draft_length: int = 0,
    tree: TreeShape | FixedTree | None = None,
    lookup_nodes: int = 0,
) -> Plan:
    """What a drafter is to propose in each round.

    Args:
      target: the model's description.
      draft: the drafter.
      draft_length: W of a chain; 0 with a tree, or without a drafter.
      tree: instead of a chain; of an EAGLE-3 draft only.
      lookup_nodes: nodes of the lookup branch; with `Mixed` only.

    Raises:
      InputError: a combination that cannot be, or a drafter for another vocabulary.
    """
    own = draft.draft if isinstance(draft, Mixed) else draft
    for name, value in (("draft_length", draft_length), ("lookup_nodes", lookup_nodes)):
        if value < 0:
            raise InputError(expected=f"{name} of at least 0", found=str(value), remedy="Correct the value.")
    if tree is not None:
        if draft_length:
            raise InputError(
                expected="a chain or a tree",
                found=f"draft_length {draft_length} and a tree",
                remedy="Pass one of them.",
            )
        if own is not None and not isinstance(own, Draft):
            raise InputError(
                expected="an EAGLE-3 draft, which alone grows trees",
                found=f"a {type(own).__name__}",
                remedy="Draft a chain.",
            )
        tree.check(target.vocab_size if own is None else own.config.draft_vocab_size)
        draft_length = tree.depth
    plan = Plan(draft_length=draft_length, tree=tree, lookup_nodes=lookup_nodes)
    if plan.depth >= target.context_limit:
        raise InputError(
            expected=f"a draft_length below the target's context of {target.context_limit} tokens",
            found=str(plan.depth),
            remedy="Chains of 2 to 8 drafts are usual.",
        )
    if (draft_length > 0) != (draft is not None):
        raise InputError(
            expected="a draft exactly when draft_length is above 0 or a tree is given",
            found=f"draft_length {draft_length} {'with' if draft is not None else 'without'} a draft",
            remedy="Pass both or neither.",
        )
    if (lookup_nodes > 0) != isinstance(draft, Mixed):
        raise InputError(
            expected="lookup_nodes above 0 exactly for a draft mixed with lookup",
            found=f"lookup_nodes {lookup_nodes} and {'no draft' if draft is None else f'a {type(draft).__name__}'}",
            remedy="Pass Mixed(draft, Lookup()) and its number of nodes, or neither.",
        )
    if isinstance(draft, SmallModel) and draft.model.config.vocab_size != target.vocab_size:
        raise InputError(
            expected=f"a drafting model with the target's vocabulary of {target.vocab_size} tokens",
            found=f"{draft.model.config.vocab_size} tokens",
            remedy="Take a smaller model of the target's own family.",
        )
    return plan


def warn_beyond(draft: Drafter | None, requests: Sequence[Request], config: TargetConfig) -> None:
    """Say once that texts may grow longer than what the drafter was made for, or trained on."""
    reach = reach_of(draft)
    own = draft.draft if isinstance(draft, Mixed) else draft
    trained = own.config.trained_length if isinstance(own, Draft) else None
    longest = max((len(request.tokens) + request.max_new_tokens for request in requests), default=0)
    longest = min(longest, config.context_limit)
    if reach is not None and longest > reach:
        logger.warning(
            "up to %d tokens of prompt and answer, but the draft was made for %d: the text stays right; beyond them it "
            "is decoded in plain steps", longest, reach,
        )  # fmt: skip
    elif trained is not None and longest > trained:
        logger.warning(
            "up to %d tokens of prompt and answer, but the draft was trained on %d: the text stays right, but fewer "
            "drafts may be accepted beyond them", longest, trained,
        )  # fmt: skip


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
      rounds: most rounds between two looks of the host, which streams, ends rows at stop strings and lets waiting
        requests in; None is 1 on a CPU, where a look costs nothing, and 8 elsewhere.
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
    if rounds is None:
        rounds = 1 if jax.default_backend() == "cpu" else 8
    for name, value in (("batch", batch), ("rounds", rounds)):
        if value < 1:
            raise InputError(expected=f"{name} of at least 1", found=str(value), remedy="Correct the value.")
    plan = plan_for(target.config, draft, draft_length=draft_length, tree=tree, lookup_nodes=lookup_nodes)
    if not requests:
        return
    warn_beyond(draft, requests, target.config)
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
    while waiting or any(rows):
        for place in range(batch):
            while rows[place] is None and waiting:
                index, request = waiting.pop()
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
        stopped = np.zeros(batch, bool)
        for each in _each_round(decided):
            for place, row in enumerate(rows):
                if row is not None:
                    row.passes += 1
                    event = _collect(row, each, place, tokenizer, logprobs)
                    if event.answer is not None:
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
