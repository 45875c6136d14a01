"""Decoding: prefill, then rounds of catch-up, draft, verify, commit, all of fixed shape.

`decode_round` is the whole method; plain decoding is the round with no draft. The state is a frozen pytree whose
caches are donated from round to round. What is static (`Structure`) decides which program runs; everything else is
traced and never recompiles.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from eagle3_jax.attention import causal_mask
from eagle3_jax.cache import KVCache, commit, empty_cache
from eagle3_jax.drafters import (
    Drafted,
    Drafter,
    DrafterCache,
    Plan,
    empty_cache_of,
    propose,
    reach_of,
    read_prompt,
    taps_of,
)
from eagle3_jax.sampling import Sampling, draw, most_likely, target_distribution, uniforms
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.tree import ancestor_mask
from eagle3_jax.verify import Tree, Verdict, verify_greedy, verify_sampled

RUNNING, STOP, LENGTH, CONTEXT = 0, 1, 2, 3
FINISH_REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}
PREFILL_BUCKETS = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a compiled round depends on, besides array shapes.

    Attributes:
      plan: what is proposed.
      greedy: argmax instead of sampling.
      filters: some row uses top-k or top-p.
      logprobs: also return the target's log-probability of each token.
    """

    plan: Plan = dataclasses.field(default_factory=Plan)
    greedy: bool = True
    filters: bool = False
    logprobs: bool = False


@struct.dataclass
class DecodeState:
    """Everything between two rounds. P, the plan's depth + 1, is the most tokens a round decides.

    Attributes:
      target_cache: rows of all decided tokens but the last.
      draft_cache: what the drafter keeps of the slots before the last round's; None without one.
      taps: [B, P, A*D], tapped states of the tokens that entered the target's cache in the last round.
      tokens: [B, P] int32, the tokens decided in the last round.
      count: [B] int32, how many of them are real; 0 once a row is done.
      root: [B] int32, the last decided token, which the target has not read yet.
      logprobs: [B, P] fp32 of `tokens`; zeros unless the structure asks for them.
      remaining: [B] int32, tokens that may still be decided.
      limit_reason: [B] int32, LENGTH or CONTEXT: what running out of `remaining` means for the row.
      reason: [B] int32, RUNNING or why the row is done.
      passes: [B] int32, verification passes so far.
      accepted: [B] int32, drafts that the last round's verification accepted, before any cut at a stop or limit; -1
        where the text has outgrown the drafter, which was not asked.
    """

    target_cache: KVCache
    draft_cache: DrafterCache | None
    taps: jax.Array
    tokens: jax.Array
    count: jax.Array
    root: jax.Array
    logprobs: jax.Array
    remaining: jax.Array
    limit_reason: jax.Array
    reason: jax.Array
    passes: jax.Array
    accepted: jax.Array


@partial(jax.jit, static_argnames=("batch", "cache_length", "structure"))
def empty_state(
    target: Target, draft: Drafter | None, *, batch: int, cache_length: int, structure: Structure
) -> DecodeState:
    """A state of `batch` finished rows, to be filled by `prefill` and `admit`."""
    config = target.config
    dtype = target.params.embed.dtype
    places = structure.plan.depth + 1
    width = len(taps_of(draft)) * config.hidden_size
    int_row = lambda value: jnp.full((batch,), value, jnp.int32)
    return DecodeState(
        target_cache=empty_cache(config.num_layers, batch, config.num_kv_heads, cache_length, config.head_dim, dtype),
        draft_cache=empty_cache_of(draft, batch, cache_length, dtype),
        taps=jnp.zeros((batch, places, width), dtype),
        tokens=jnp.zeros((batch, places), jnp.int32),
        count=int_row(0),
        root=int_row(0),
        logprobs=jnp.zeros((batch, places), jnp.float32),
        remaining=int_row(0),
        limit_reason=int_row(LENGTH),
        reason=int_row(LENGTH),
        passes=int_row(0),
        accepted=int_row(0),
    )


def _stop(
    tokens: jax.Array, count: jax.Array, state_remaining: jax.Array, limit_reason: jax.Array, eos: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cut a block in token order: at the first end-of-sequence token, and at the row's limit.

    Returns the kept count [B] and the reason [B].
    """
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_eos = (tokens[:, :, None] == eos[None, None]).any(axis=-1) & (places < count[:, None])
    through_eos = jnp.where(is_eos.any(axis=1), jnp.argmax(is_eos, axis=1).astype(jnp.int32) + 1, tokens.shape[1] + 1)
    kept = jnp.minimum(jnp.minimum(count, through_eos), state_remaining)
    reason = jnp.where(kept == state_remaining, limit_reason, RUNNING)
    return kept, jnp.where(kept == through_eos, STOP, reason)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probability of tokens [B, P] under logits [B, P, V]."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


@partial(jax.jit, static_argnames=("structure",), donate_argnames=("state",))
def prefill_chunk(
    target: Target,
    draft: Drafter | None,
    state: DecodeState,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    draft_count: jax.Array,
    sampling: Sampling,
    eos: jax.Array,
    *,
    structure: Structure,
) -> DecodeState:
    """Read a chunk of the prompt; if it is the last, also decide the first token.

    Args:
      target, draft: the models.
      state: a state whose rows have read the chunks before.
      tokens: [B, T] int32, padded.
      following: [B, T] int32, the token after each; the last prompt token's is not known yet.
      count: [B] int32, real tokens of the chunk.
      draft_count: [B] int32, slots whose following token is known: `count`, less one in the last chunk.
      sampling: per-row values.
      eos: [E] int32, end-of-sequence ids, padded with -1.
      structure: static.

    Every chunk decides a token at its end; only the last chunk's means something, and the host starts from there.
    """
    with jax.named_scope("prefill"):
        batch, length = tokens.shape
        lengths = state.target_cache.lengths
        offsets = jnp.arange(length, dtype=jnp.int32)[None]
        path = jnp.broadcast_to(offsets, (batch, length))
        over_cache, over_block = causal_mask(lengths, length, state.target_cache.max_length)
        out = target_forward(
            target, tokens, lengths[:, None] + offsets, over_block,
            taps=taps_of(draft), cache=state.target_cache, cache_mask=over_cache,
        )  # fmt: skip
        target_cache = commit(state.target_cache, out.keys, out.values, path, count)
        draft_cache = read_prompt(draft, state.draft_cache, out.taps, tokens, following, count, draft_count)
        last = (count - 1)[:, None, None]
        logits = target_logits(target, jnp.take_along_axis(out.hidden, last, axis=1))
        first = _choose(logits, sampling, target_cache.lengths, structure)
        taps = jnp.take_along_axis(out.taps, last, axis=1)
        pad = state.tokens.shape[1] - 1
        kept, reason = _stop(first, jnp.ones_like(count), state.remaining, state.limit_reason, eos)
        logprobs = _logprobs(logits, first) if structure.logprobs else jnp.zeros_like(first, jnp.float32)
        return dataclasses.replace(
            state,
            target_cache=target_cache,
            draft_cache=draft_cache,
            taps=jnp.pad(taps, ((0, 0), (0, pad), (0, 0))),
            tokens=jnp.pad(first, ((0, 0), (0, pad))),
            logprobs=jnp.pad(logprobs, ((0, 0), (0, pad))),
            count=kept,
            root=first[:, 0],
            reason=reason,
        )


@partial(jax.jit, static_argnames=("places",))
def widened(*arrays: jax.Array, places: int) -> tuple[jax.Array, ...]:
    """Arrays [B, P, ...] with zeros up to `places`: room for what a round decides."""
    pad = lambda x: jnp.pad(x, [(0, places - x.shape[1] if axis == 1 else 0) for axis in range(x.ndim)])
    return tuple(map(pad, arrays))


def _choose(logits: jax.Array, sampling: Sampling, position: jax.Array, structure: Structure) -> jax.Array:
    """The target's token at `position` [B] from logits [B, 1, V] -> [B, 1]."""
    if structure.greedy:
        return most_likely(logits)
    probabilities = target_distribution(logits, sampling, filters=structure.filters)
    return draw(probabilities, uniforms(sampling.seed, position[:, None])[1])


@partial(jax.jit, static_argnames=("structure",), donate_argnames=("state",))
def decode_round(
    target: Target,
    draft: Drafter | None,
    state: DecodeState,
    sampling: Sampling,
    eos: jax.Array,
    *,
    structure: Structure,
) -> DecodeState:
    """One round: catch up, draft what the plan says, verify it in one pass, commit what the target keeps.

    Rows whose text has grown beyond what the drafter was made for decide one token a round; when all have, the round is
    a plain step.

    Args:
      target, draft: the models; the draft may be None iff nothing is proposed.
      state: donated.
      sampling: per-row values.
      eos: [E] int32, padded with -1.
      structure: static.

    Returns:
      The next state; `tokens` and `count` are the tokens decided. Rows that are done do not change.
    """
    lengths, reach = state.target_cache.lengths, reach_of(draft)

    def drafting(state: DecodeState, within: jax.Array | None) -> DecodeState:
        noise, temperature, proposing = _noise(state, sampling, structure), None, None
        if noise is not None:
            temperature, proposing = sampling.temperature, noise[0, :, :-1]
        drafted = propose(
            draft, state.draft_cache, state.taps, state.tokens, state.count, state.root, structure.plan,
            temperature, proposing,
        )  # fmt: skip
        return _verify_and_commit(target, draft, state, sampling, eos, drafted, noise, within, structure)

    def plain(state: DecodeState) -> DecodeState:
        nothing = propose(
            None, state.draft_cache, state.taps, state.tokens, state.count, state.root, Plan(), None, None
        )
        noise, within = _noise(state, sampling, structure), jnp.zeros_like(state.reason, bool)
        return _verify_and_commit(target, draft, state, sampling, eos, nothing, noise, within, structure)

    # The cache's length is static, so whoever cannot come to the drafter's end does not pay for looking.
    if reach is None or state.target_cache.max_length <= reach:
        return drafting(state, None)
    within = lengths + structure.plan.draft_length <= reach
    useful = (within & (state.reason == RUNNING)).any()
    return jax.lax.cond(useful, lambda state: drafting(state, within), plain, state)


def _noise(state: DecodeState, sampling: Sampling, structure: Structure) -> jax.Array | None:
    """The uniforms [2 + tries, B, P] that decide the tokens at the next P positions."""
    if structure.greedy:
        return None
    offsets = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
    return uniforms(sampling.seed, state.target_cache.lengths[:, None] + 1 + offsets, structure.plan.tries)


def _verify_and_commit(
    target: Target,
    draft: Drafter | None,
    state: DecodeState,
    sampling: Sampling,
    eos: jax.Array,
    drafted: Drafted,
    noise: jax.Array | None,
    within: jax.Array | None,
    structure: Structure,
) -> DecodeState:
    """The second half of a round; proposals of rows that are not `within` the drafter's reach do not count."""
    tree, lengths, depth = drafted.tree, state.target_cache.lengths, state.tokens.shape[1] - 1
    with jax.named_scope("verify"):
        over_cache, _ = causal_mask(lengths, tree.tokens.shape[1], state.target_cache.max_length)
        out = target_forward(
            target,
            tree.tokens,
            lengths[:, None] + tree.depths,
            ancestor_mask(tree, depth),
            taps=taps_of(draft),
            cache=state.target_cache,
            cache_mask=over_cache,
        )
        logits = target_logits(target, out.hidden)
        if within is not None:
            # A node that is its own parent is on no walk from the root.
            alone = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
            tree = dataclasses.replace(tree, parents=jnp.where(within[:, None], tree.parents, alone))
        verdict = _verify(tree, drafted, logits, sampling, noise, depth, structure)
    with jax.named_scope("commit"):
        running = state.reason == RUNNING
        kept, reason = _stop(verdict.tokens, verdict.accepted + 1, state.remaining, state.limit_reason, eos)
        kept = jnp.where(running, kept, 0)
        last = jnp.maximum(kept - 1, 0)[:, None]
        root = jnp.take_along_axis(verdict.tokens, last, axis=1)[:, 0]
        logprobs = state.logprobs
        if structure.logprobs:
            at_path = jnp.take_along_axis(logits, verdict.path[..., None], axis=1)
            logprobs = _logprobs(at_path, verdict.tokens)
        return DecodeState(
            target_cache=commit(state.target_cache, out.keys, out.values, verdict.path, kept),
            draft_cache=drafted.cache,
            taps=jnp.take_along_axis(out.taps, verdict.path[..., None], axis=1),
            tokens=verdict.tokens,
            count=kept,
            root=jnp.where(running, root, state.root),
            logprobs=logprobs,
            remaining=state.remaining - kept,
            limit_reason=state.limit_reason,
            reason=jnp.where(running, reason, state.reason),
            passes=state.passes + running.astype(jnp.int32),
            accepted=verdict.accepted if within is None else jnp.where(within, verdict.accepted, -1),
        )


def _verify(
    tree: Tree,
    drafted: Drafted,
    logits: jax.Array,
    sampling: Sampling,
    noise: jax.Array | None,
    depth: int,
    structure: Structure,
) -> Verdict:
    if noise is None:
        return verify_greedy(tree, logits, depth)
    probabilities = target_distribution(logits, sampling, filters=structure.filters)
    # Node of depth d decides position lengths + d, whose uniforms are at d - 1; the root decides nothing.
    rows = jnp.arange(tree.tokens.shape[0])[:, None]
    accept = noise[2 + drafted.ranks, rows, jnp.maximum(tree.depths - 1, 0)]
    return verify_sampled(tree, probabilities, drafted.distribution, accept, noise[1], depth)


@struct.dataclass
class Rounds:
    """What the rounds of one call decided, in order; R of them at most.

    Attributes:
      done: [] int32, rounds that ran; entries beyond mean nothing.
      tokens, logprobs: [R, B, P], as in `DecodeState` after each round.
      count, reason, accepted: [R, B], likewise.
    """

    done: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    reason: jax.Array
    accepted: jax.Array


_DECIDED = ("tokens", "logprobs", "count", "reason", "accepted")


@partial(jax.jit, static_argnames=("structure", "rounds"), donate_argnames=("state",))
def decode_rounds(
    target: Target,
    draft: Drafter | None,
    state: DecodeState,
    sampling: Sampling,
    eos: jax.Array,
    *,
    structure: Structure,
    rounds: int,
) -> tuple[DecodeState, Rounds]:
    """Up to `rounds` rounds in one program, without the host between them; ends early when every row is done.

    Args: as `decode_round`; `rounds` is static.
    """
    empty = {name: jnp.zeros((rounds, *(old := getattr(state, name)).shape), old.dtype) for name in _DECIDED}

    def running(carry: tuple[jax.Array, DecodeState, dict[str, jax.Array]]) -> jax.Array:
        return (carry[0] < rounds) & (carry[1].reason == RUNNING).any()

    def one(carry: tuple[jax.Array, DecodeState, dict[str, jax.Array]]):
        index, before, decided = carry
        after = decode_round(target, draft, before, sampling, eos, structure=structure)
        decided = {name: values.at[index].set(getattr(after, name)) for name, values in decided.items()}
        return index + 1, after, decided

    done, state, decided = jax.lax.while_loop(running, one, (jnp.int32(0), state, empty))
    return state, Rounds(done=done, **decided)


@partial(jax.jit, donate_argnames=("state",))
def admit(state: DecodeState, row: DecodeState, index: jax.Array) -> DecodeState:
    """Put a freshly prefilled row (a state of batch 1) in place of row `index`."""
    return jax.tree.map(lambda whole, one: whole.at[index].set(one[0]), state, row)


@struct.dataclass
class Generated:
    """What `generate` decided. N is the size of the output.

    Attributes:
      tokens: [B, N] int32; 0 beyond `count`.
      logprobs: [B, N] fp32, as `tokens`; zeros unless the structure asks for them.
      count: [B] int32.
      reason: [B] int32, STOP, LENGTH or CONTEXT.
      passes: [B] int32, verification passes.
      accepted: [B, P] int32, how many rounds, of those that drafted and that no limit cut, accepted 0, 1, ..., P - 1.
    """

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    reason: jax.Array
    passes: jax.Array
    accepted: jax.Array


@partial(jax.jit, static_argnames=("structure", "cache_length", "size"))
def generate(
    target: Target,
    draft: Drafter | None,
    prompts: jax.Array,
    lengths: jax.Array,
    max_new_tokens: jax.Array,
    sampling: Sampling,
    eos: jax.Array,
    *,
    structure: Structure,
    cache_length: int,
    size: int,
) -> Generated:
    """A whole generation as one program: prefill, then rounds until every row is done.

    Args:
      target, draft: as `decode_round`.
      prompts: [B, T] int32, padded at the end; T is a bucket of the caller's choice.
      lengths: [B] int32 of the prompts, at least 1, and below the target's context.
      max_new_tokens: [B] int32, from 1 to `size`.
      sampling: per-row values.
      eos: [E] int32, padded with -1.
      structure: static.
      cache_length: static, at least the longest prompt + its max_new_tokens + the plan's depth + 1.
      size: static, N.
    """
    batch = prompts.shape[0]
    room = target.config.context_limit - lengths
    most = jnp.minimum(max_new_tokens, size)
    state = empty_state(target, draft, batch=batch, cache_length=cache_length, structure=structure)
    state = dataclasses.replace(
        state,
        remaining=jnp.minimum(most, room),
        limit_reason=jnp.where(most <= room, LENGTH, CONTEXT),
        reason=jnp.full((batch,), RUNNING, jnp.int32),
    )
    following = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1)))
    state = prefill_chunk(
        target, draft, state, prompts, following, lengths, lengths - 1, sampling, eos, structure=structure
    )
    state = dataclasses.replace(state, remaining=state.remaining - state.count)
    row = jnp.arange(batch)[:, None]
    place = jnp.arange(structure.plan.depth + 1, dtype=jnp.int32)[None]

    def write(out: Generated, state: DecodeState) -> Generated:
        at = jnp.where(place < state.count[:, None], out.count[:, None] + place, size)
        keep = lambda values, new: values.at[row, at].set(new, mode="drop")
        return dataclasses.replace(
            out,
            tokens=keep(out.tokens, state.tokens),
            logprobs=keep(out.logprobs, state.logprobs),
            count=out.count + state.count,
        )

    def one(carry: tuple[DecodeState, Generated]) -> tuple[DecodeState, Generated]:
        before, out = carry
        state = decode_round(target, draft, before, sampling, eos, structure=structure)
        whole = (state.count > 0) & (state.count == state.accepted + 1)
        accepted = out.accepted.at[row[:, 0], state.accepted].add(whole.astype(jnp.int32))
        return state, write(dataclasses.replace(out, accepted=accepted), state)

    zero = jnp.zeros((batch,), jnp.int32)
    out = Generated(
        tokens=jnp.zeros((batch, size), jnp.int32),
        logprobs=jnp.zeros((batch, size), jnp.float32),
        count=zero,
        reason=zero,
        passes=zero,
        accepted=jnp.zeros((batch, structure.plan.depth + 1), jnp.int32),
    )
    state, out = jax.lax.while_loop(lambda carry: (carry[0].reason == RUNNING).any(), one, (state, write(out, state)))
    return dataclasses.replace(out, reason=state.reason, passes=state.passes)
