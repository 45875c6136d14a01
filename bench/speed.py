"""What one round costs, in plain steps: verification of T tokens, a draft step, catching up on T slots.

    python -m bench.speed --target models/SmolLM2-135M-Instruct --draft checkpoints/smollm2-135m-instruct-eagle3

All programs take turns in one process; medians are quoted, and ratios to the plain step (`eagle3_jax.costs`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.costs import measure_costs
from eagle3_jax.errors import InputError

BLOCKS = (2, 3, 4, 5, 6, 8)


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
    costs = measure_costs(target, draft, BLOCKS, cache_length=args.cache, repeats=args.repeats)
    rows = {"plain": costs.plain, "draft step": costs.draft_step}
    rows |= {f"verify({length})": seconds for length, seconds in costs.verify.items()}
    rows |= {f"catch-up({length})": seconds for length, seconds in costs.catch_up.items()}
    for name, seconds in rows.items():
        print(f"{name:<12}{1e3 * seconds:8.2f} ms   {seconds / costs.plain:6.3f} plain steps")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"speed: {error}", file=sys.stderr)
        sys.exit(2)
