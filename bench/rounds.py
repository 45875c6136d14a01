"""What rounds cost at the shape of a large model, with random weights: against the memory's speed, and the host.

    python -m bench.rounds --shape llama-3.1-8b

A plain step has to read all weights once, so its bound is their bytes over the bandwidth that a reduction of a large
array reaches here. A round (a chain of 4, a dynamic tree of 60 nodes) is quoted in plain steps. Each is timed twice: as
many rounds in one program, and as one call a round; the second over the first shows what the host adds between rounds.
Acceptance is that of random weights, none, and does not matter: a round costs the same whatever it accepts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import runtime
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.drafters import Plan
from eagle3_jax.engine import pad_eos, prefill
from eagle3_jax.errors import InputError
from eagle3_jax.generate import DecodeState, Structure, decode_round, decode_rounds
from eagle3_jax.params import is_spec
from eagle3_jax.requests import Request, sampling_of
from eagle3_jax.target import Target, target_specs
from eagle3_jax.tree import TreeShape
from eagle3_jax.vocab import vocab_from_ids

SHAPES: dict[str, dict[str, Any]] = {
    # meta-llama/Llama-3.1-8B-Instruct's config.json, but for the scaling of its rotary embedding.
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "draft_vocab_size": 32000,
    },
    "toy": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "draft_vocab_size": 128,
    },
}  # fmt: skip
PLANS = {
    "plain": Plan(),
    "chain of 4": Plan(4),
    "tree of 60": Plan(8, TreeShape(60, 8, 10)),
}


def random_models(shape: str, dtype: Any) -> tuple[Target, Draft]:
    """A target and a draft of a shape; leaf by leaf, so that no second copy in fp32 is ever held."""
    fields = dict(SHAPES[shape])
    size = fields.pop("draft_vocab_size")
    config = TargetConfig.from_hf(
        fields | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}, shape
    )
    draft_config = DraftConfig.for_target(config, draft_vocab_size=size)

    @partial(jax.jit, static_argnames=("dims",))
    def leaf(key: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, dims, dtype)

    def fill(specs: Any, seed: int) -> Any:
        leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
        made = [
            leaf(jax.random.fold_in(jax.random.key(seed), index), spec.shape)
            if spec.init == "normal"
            else jnp.full(spec.shape, 1 if spec.init == "ones" else 0, dtype)
            for index, spec in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, made)

    target = Target(params=fill(target_specs(config), 0), config=config)
    vocab = vocab_from_ids(np.arange(size), config.vocab_size)
    draft = Draft(
        params=fill(draft_specs(draft_config), 1), vocab=vocab, embed=target.params.embed, config=draft_config
    )
    return target, draft


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds, after one turn that compiles and one that warms up."""
    seconds = []
    for turn in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(run())
        if turn >= 2:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def bandwidth(size: int, repeats: int) -> float:
    """Bytes per second at which this device reads an array of `size` bytes."""
    array = jnp.ones((size // 4,), jnp.float32)
    return array.nbytes / timed(lambda: jnp.sum(array), repeats)


def measure(target: Target, draft: Draft, plan: Plan, args: argparse.Namespace) -> dict[str, float]:
    """Seconds a round: `program` with many rounds in one call, `calls` with one call each."""
    prompt = tuple(np.random.default_rng(0).integers(0, target.config.vocab_size, args.prompt).tolist())
    eos, structure = pad_eos(()), Structure(plan=plan)
    request = Request(prompt, max_new_tokens=args.cache - args.prompt - plan.depth - 1)
    drafter, sampling = (draft if plan.depth else None), sampling_of([request])
    state = prefill(target, drafter, request, eos, structure=structure, cache_length=args.cache)

    def again() -> DecodeState:
        """The state before the first round once more, in the same buffers."""
        lengths = jnp.full_like(state.target_cache.lengths, args.prompt)
        kept = state.draft_cache
        return dataclasses.replace(
            state,
            target_cache=dataclasses.replace(state.target_cache, lengths=lengths),
            draft_cache=None if kept is None else dataclasses.replace(kept, lengths=lengths - 1),
            count=jnp.ones_like(state.count),
            remaining=jnp.full_like(state.remaining, request.max_new_tokens - 1),
            reason=jnp.zeros_like(state.reason),
        )

    def program() -> Any:
        nonlocal state
        state, decided = decode_rounds(target, drafter, again(), sampling, eos, structure=structure, rounds=args.rounds)
        return decided

    def calls() -> Any:
        nonlocal state
        state = again()
        for _ in range(args.rounds):
            state = decode_round(target, drafter, state, sampling, eos, structure=structure)
        return state.tokens

    found = {how: timed(run, args.repeats) / args.rounds for how, run in (("program", program), ("calls", calls))}
    if args.profile:
        with jax.profiler.trace(args.profile):
            jax.block_until_ready(program())
    return found


def main() -> int:
    """Measure and print, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="toy")
    parser.add_argument("--dtype", choices=sorted(runtime.DTYPES), default="bfloat16")
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", metavar="DIR", help="write a jax.profiler trace of the one-program runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # A row may not end in the midst of what is timed.
    most = max(args.rounds * (plan.depth + 1) + plan.depth + 2 for plan in PLANS.values())
    if args.prompt + most > args.cache:
        raise InputError(
            expected=f"--cache of at least {args.prompt + most} for {args.rounds} rounds after {args.prompt} tokens",
            found=str(args.cache),
            remedy="Give a longer --cache or fewer --rounds.",
        )
    info = runtime.start(dtype=args.dtype)
    print(info, file=sys.stderr)
    target, draft = random_models(args.shape, runtime.DTYPES[info.dtype])
    # Of the embedding a step reads one row.
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)) - target.params.embed.nbytes
    speed = bandwidth(min(size, 2**32), args.repeats)
    rounds = {name: measure(target, draft, plan, args) for name, plan in PLANS.items()}
    plain = rounds["plain"]["program"]
    record = {
        "shape": args.shape, **dataclasses.asdict(info), "weight_bytes": size, "bytes_per_second": speed,
        "bound_seconds": size / speed, "share_of_bound": size / speed / plain,
        "rounds": {
            name: seconds | {"plain_steps": seconds["program"] / plain, "host": seconds["calls"] / seconds["program"]}
            for name, seconds in rounds.items()
        },
    }  # fmt: skip
    if args.json:
        print(json.dumps(record))
        return 0
    print(f"{size / 1e9:.2f} GB of weights at {speed / 1e9:.0f} GB/s: bound {1e3 * size / speed:.2f} ms a token")
    print(f"plain step {1e3 * plain:.2f} ms, {record['share_of_bound']:.2f} of the bound's speed")
    for name, values in record["rounds"].items():
        print(
            f"{name:<12}{1e3 * values['program']:9.2f} ms  {values['plain_steps']:6.2f} plain steps  "
            f"{values['host']:5.2f} times that with a call a round"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"rounds: {error}", file=sys.stderr)
        sys.exit(2)
