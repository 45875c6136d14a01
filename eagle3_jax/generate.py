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
from eagle3_jax.draft import Draft
from eagle3_jax.drafters import catch_up, propose_chain
from eagle3_jax.sampling import Sampling, draw, most_likely, target_distribution, uniforms
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.verify import chain_tree, verify_greedy, verify_sampled

RUNNING, STOP, LENGTH, CONTEXT = 0, 1, 2, 3
FINISH_REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}
PREFILL_BUCKETS = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a compiled round depends on, besides array shapes.

    Attributes:
      draft_length: W, tokens drafted a round; 0 is plain decoding.
      greedy: argmax instead of sampling.
      filters: some row uses top-k or top-p.
      logprobs: also return the target's log-probability of each token.
    """

    draft_length: int = 0
    greedy: bool = True
    filters: bool = False
    logprobs: bool = False


@struct.dataclass
class DecodeState:
    """Everything between two rounds. P = W + 1 is the most tokens a round decides.

    Attributes:
      target_cache: rows of all decided tokens but the last.
      draft_cache: rows of the slots before the last round's; None without a draft.
      taps: [B, P, A*D], tapped states of the tokens that entered the target's cache in the last round.
      tokens: [B, P] int32, the tokens decided in the last round.
      count: [B] int32, how many of them are real; 0 once a row is done.
      root: [B] int32, the last decided token, which the target has not read yet.
      logprobs: [B, P] fp32 of `tokens`; zeros unless the structure asks for them.
      remaining: [B] int32, tokens that may still be decided.
      limit_reason: [B] int32, LENGTH or CONTEXT: what running out of `remaining` means for the row.
      reason: [B] int32, RUNNING or why the row is done.
      passes: [B] int32, verification passes so far.
      accepted: [B] int32, drafts that the last round's verification accepted, before any cut at a stop or limit.
    """

    target_cache: KVCache
    draft_cache: KVCache | None
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
    target: Target, draft: Draft | None, *, batch: int, cache_length: int, structure: Structure
) -> DecodeState:
    """A state of `batch` finished rows, to be filled by `prefill` and `admit`."""
    config = target.config
    dtype = target.params.embed.dtype
    places = structure.draft_length + 1
    width = 0 if draft is None else len(draft.config.taps) * config.hidden_size
    int_row = lambda value: jnp.full((batch,), value, jnp.int32)
    draft_cache = None
    if draft is not None:
        shape = draft.config
        # The draft computes in the dtype of the states that it reads, whatever its weights are kept in.
        draft_cache = empty_cache(1, batch, shape.num_kv_heads, cache_length, shape.head_dim, dtype)
    return DecodeState(
        target_cache=empty_cache(config.num_layers, batch, config.num_kv_heads, cache_length, config.head_dim, dtype),
        draft_cache=draft_cache,
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
    draft: Draft | None,
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
            taps=() if draft is None else draft.config.taps, cache=state.target_cache, cache_mask=over_cache,
        )  # fmt: skip
        target_cache = commit(state.target_cache, out.keys, out.values, path, count)
        draft_cache = state.draft_cache
        if draft is not None and draft_cache is not None:
            _, draft_cache = catch_up(draft, draft_cache, out.taps, following, draft_count)
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


def _choose(logits: jax.Array, sampling: Sampling, position: jax.Array, structure: Structure) -> jax.Array:
    """The target's token at `position` [B] from logits [B, 1, V] -> [B, 1]."""
    if structure.greedy:
        return most_likely(logits)
    probabilities = target_distribution(logits, sampling, filters=structure.filters)
    return draw(probabilities, uniforms(sampling.seed, position[:, None])[2])


@partial(jax.jit, static_argnames=("structure",), donate_argnames=("state",))
def decode_round(
    target: Target, draft: Draft | None, state: DecodeState, sampling: Sampling, eos: jax.Array, *, structure: Structure
) -> DecodeState:
    """One round: catch up, draft W tokens, verify them in one pass, commit what the target keeps.

    Args:
      target, draft: the models; the draft may be None iff `structure.draft_length` is 0.
      state: donated.
      sampling: per-row values.
      eos: [E] int32, padded with -1.
      structure: static.

    Returns:
      The next state; `tokens` and `count` are the tokens decided. Rows that are done do not change.
    """
    width = structure.draft_length
    lengths = state.target_cache.lengths
    offsets = jnp.arange(width + 1, dtype=jnp.int32)[None]
    noise = None if structure.greedy else uniforms(sampling.seed, lengths[:, None] + 1 + offsets)
    draft_cache, distribution, taps = state.draft_cache, None, ()
    block = state.root[:, None]
    if width:
        assert draft is not None
        assert draft_cache is not None
        taps = draft.config.taps
        proposal = propose_chain(
            draft, draft_cache, state.taps, state.tokens, state.count, width,
            None if noise is None else sampling.temperature, None if noise is None else noise[0, :, :width],
        )  # fmt: skip
        draft_cache, distribution = proposal.cache, proposal.distribution
        block = jnp.concatenate([block, proposal.tokens], axis=1)
    tree = chain_tree(block)
    with jax.named_scope("verify"):
        over_cache, over_block = causal_mask(lengths, width + 1, state.target_cache.max_length)
        out = target_forward(
            target,
            block,
            lengths[:, None] + offsets,
            over_block,
            taps=taps,
            cache=state.target_cache,
            cache_mask=over_cache,
        )
        logits = target_logits(target, out.hidden)
        if noise is None:
            verdict = verify_greedy(tree, logits, width)
        else:
            probabilities = target_distribution(logits, sampling, filters=structure.filters)
            accept = jnp.pad(noise[1, :, :width], ((0, 0), (1, 0)))
            if distribution is not None:
                distribution = jnp.pad(distribution, ((0, 0), (1, 0), (0, 0)))
            verdict = verify_sampled(tree, probabilities, distribution, accept, noise[2], width)
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
            draft_cache=draft_cache,
            taps=jnp.take_along_axis(out.taps, verdict.path[..., None], axis=1),
            tokens=verdict.tokens,
            count=kept,
            root=jnp.where(running, root, state.root),
            logprobs=logprobs,
            remaining=state.remaining - kept,
            limit_reason=state.limit_reason,
            reason=jnp.where(running, reason, state.reason),
            passes=state.passes + running.astype(jnp.int32),
            accepted=verdict.accepted,
        )


@partial(jax.jit, donate_argnames=("state",))
def admit(state: DecodeState, row: DecodeState, index: jax.Array) -> DecodeState:
    """Put a freshly prefilled row (a state of batch 1) in place of row `index`."""
    return jax.tree.map(lambda whole, one: whole.at[index].set(one[0]), state, row)
