"""What one round costs, in plain steps: verification of T tokens, a draft step, catching up on T slots.

    python -m bench.speed --target models/SmolLM2-135M-Instruct --draft checkpoints/smollm2-135m-instruct-eagle3

All programs take turns in one process; medians are quoted, and ratios to the plain step (`eagle3_jax.costs`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from bench.rounds import bandwidth
from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.costs import measure_costs
from eagle3_jax.errors import InputError
from eagle3_jax.tree import TreeShape

SHAPES = (*map(TreeShape.chain, (1, 2, 3, 4, 5, 7)), TreeShape(9, 4, 3), TreeShape(16, 5, 4), TreeShape(24, 6, 4))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="float32", choices=sorted(runtime.DTYPES))
    parser.add_argument("--cache", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    info = runtime.start(dtype=args.dtype)
    print(info, file=sys.stderr)
    target = load_target(Path(args.target), runtime.DTYPES[info.dtype])
    draft = load_draft(Path(args.draft), target)
    costs = measure_costs(target, draft, SHAPES, cache_length=args.cache, repeats=args.repeats)
    # Of the embedding a step reads one row.
    read = jax.tree.leaves((target.params.layers, target.params.norm, target.params.lm_head))
    size = sum(leaf.nbytes for leaf in read)
    bound = size / bandwidth(size, args.repeats)
    share = bound / costs.plain
    print(f"reading {size / 1e6:.0f} MB of weights: {1e3 * bound:.2f} ms; a plain step has {share:.2f} of that speed")
    rows = {"plain": costs.plain}
    rows |= {f"draft step, {nodes} node{'s' * (nodes > 1)}": seconds for nodes, seconds in costs.draft_step.items()}
    rows |= {f"verify({length})": seconds for length, seconds in costs.verify.items()}
    rows |= {f"catch-up({length})": seconds for length, seconds in costs.catch_up.items()}
    for name, seconds in rows.items():
        print(f"{name:<21}{1e3 * seconds:8.2f} ms   {seconds / costs.plain:6.3f} plain steps")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"speed: {error}", file=sys.stderr)
        sys.exit(2)
