"""What one round costs, in plain steps: verification of T tokens, a draft step, catching up.

    python -m bench.speed --target models/SmolLM2-135M-Instruct --draft checkpoints/smollm2-135m-instruct-eagle3

All programs take turns in one process; medians are quoted, and ratios to the plain step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle3_jax import runtime
from eagle3_jax.attention import Segment, causal_mask
from eagle3_jax.cache import KVCache, commit, empty_cache
from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.draft import Draft, draft_logits, draft_step
from eagle3_jax.drafters import catch_up
from eagle3_jax.sampling import most_likely
from eagle3_jax.target import Target, target_forward, target_logits

BLOCKS = (1, 2, 3, 4, 5, 6, 8)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("taps",))
def verify_block(
    target: Target, cache: KVCache, tokens: jax.Array, *, taps: tuple[int, ...]
) -> tuple[jax.Array, KVCache]:
    """One target pass over a block of T tokens with its argmax, one token committed."""
    batch, length = tokens.shape
    offsets = jnp.arange(length, dtype=jnp.int32)[None]
    over_cache, over_block = causal_mask(cache.lengths, length, cache.max_length)
    out = target_forward(
        target, tokens, cache.lengths[:, None] + offsets, over_block, taps=taps, cache=cache, cache_mask=over_cache
    )
    path = jnp.broadcast_to(offsets, (batch, length))
    # The length stays where it was, so that every measurement sees the same cache.
    written = commit(cache, out.keys, out.values, path, jnp.full((batch,), length, jnp.int32))
    return most_likely(target_logits(target, out.hidden)), written.replace(lengths=cache.lengths)


@jax.jit
def one_draft_step(draft: Draft, cache: KVCache, carry: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One drafted token: the draft's layer over its cache, its head, the argmax."""
    visible = jnp.arange(cache.max_length)[None, None] < cache.lengths[:, None, None]
    past = [Segment(cache.keys[0], cache.values[0], visible)]
    out = draft_step(draft, carry, token, cache.lengths[:, None], jnp.ones((1, 1, 1), bool), past)
    return out.carry, jnp.take(draft.vocab.d2t, most_likely(draft_logits(draft, out.carry)), mode="clip")


@partial(jax.jit, donate_argnames=("cache",))
def one_catch_up(draft: Draft, cache: KVCache, taps: jax.Array, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
    """Catching up on as many slots as a round can decide."""
    carry, written = catch_up(draft, cache, taps, tokens, jnp.full((1,), tokens.shape[1], jnp.int32))
    return carry, written.replace(lengths=cache.lengths)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--cache", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    print(runtime.start(), file=sys.stderr)
    target = load_target(Path(args.target))
    draft = load_draft(Path(args.draft), target)
    config, shape = target.config, draft.config
    start = jnp.full((1,), args.cache // 2, jnp.int32)
    cache = empty_cache(config.num_layers, 1, config.num_kv_heads, args.cache, config.head_dim).replace(lengths=start)
    # A copy of the counter: two donated caches must not share a buffer.
    draft_cache = empty_cache(1, 1, shape.num_kv_heads, args.cache, shape.head_dim).replace(lengths=start + 0)
    programs: dict[str, Callable[[], object]] = {}

    def verify(length: int) -> None:
        nonlocal cache
        out, cache = verify_block(
            target, cache, jnp.full((1, length), 50, jnp.int32), taps=() if length == 1 else shape.taps
        )
        out.block_until_ready()

    def step() -> None:
        carry = jnp.ones((1, 1, shape.hidden_size), jnp.float32)
        jax.block_until_ready(one_draft_step(draft, draft_cache, carry, jnp.full((1, 1), 50, jnp.int32)))

    def catching_up(length: int) -> None:
        nonlocal draft_cache
        taps = jnp.ones((1, length, len(shape.taps) * shape.target_hidden_size), jnp.float32)
        out, draft_cache = one_catch_up(draft, draft_cache, taps, jnp.full((1, length), 50, jnp.int32))
        out.block_until_ready()

    for length in BLOCKS:
        programs[f"verify({length})"] = partial(verify, length)
    programs["draft step"] = step
    programs["catch-up(6)"] = partial(catching_up, 6)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(args.repeats + 2):
        for name, program in programs.items():
            began = time.perf_counter()
            program()
            if repeat >= 2:
                times[name].append(time.perf_counter() - began)
    plain = statistics.median(times["verify(1)"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:<12}{1e3 * middle:8.2f} ms   {middle / plain:6.3f} plain steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
