"""Training beside other trainers: the same features, the same draft, the same batch, one after the other in turns.

    python -m bench.peers --features runs/features --target models/SmolLM2-135M-Instruct \\
        --draft checkpoints/smollm2-135m-instruct-eagle3 [--speculators PYTHON]

Ours is the trainer itself, data loading included; the others are given the rows that it takes, in its order. They are a
plain PyTorch loop of the published recipe (`bench.peers_torch`, in fp32 and in bf16 autocast) and, with the interpreter
of an environment that has it, `speculators` (`bench.peers_speculators`). Every turn is a process of its own, whose
first updates do not count; printed are medians, tokens a second, and the peak of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import grain
import numpy as np

from eagle3_jax.checkpoint import fingerprint_of, load_draft, load_target
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import FeatureRows

WARM = 2  # updates of each turn that do not count


def main() -> int:
    """Measure and print, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="gives the shape and the draft vocabulary")
    parser.add_argument("--row-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--updates", type=int, default=6, help="of each turn, after those that warm up")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--speculators", metavar="PYTHON", help="interpreter of an environment with speculators")
    parser.add_argument("--only", default="", metavar="TEXT", help="methods whose name has this in it")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.ours:
        return ours(args)
    target = load_target(Path(args.target), layers="none")
    mark = fingerprint_of(Path(args.target))
    draft = load_draft(Path(args.draft), target, mark=mark)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(folder, args, draft, target, mark)
        numbers = [str(args.updates + WARM), str(args.batch), str(args.steps)]
        commands = {
            f"ours, {dtype}": [sys.executable, "-m", "bench.peers", *sys.argv[1:], "--ours", name, "--dtype", dtype]
            for dtype in ("bfloat16", "float32")
        }
        for dtype in ("float32", "bfloat16"):
            commands[f"plain PyTorch, {dtype}"] = [sys.executable, "-m", "bench.peers_torch", name, *numbers, dtype]
        if args.speculators:
            script = str(Path(__file__).with_name("peers_speculators.py"))
            for dtype in ("float32", "bfloat16"):
                tail = [name, *numbers, dtype, args.target, "eager"]
                commands[f"speculators, {dtype}, eager attention"] = [args.speculators, script, *tail]
        commands = {method: command for method, command in commands.items() if args.only in method}
        found: dict[str, list[Any]] = {method: [] for method in commands}
        for turn in range(args.turns):
            for method, command in commands.items():
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{method}: failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                found[method].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"turn {turn + 1}: {method}: {found[method][-1]['seconds']}", file=sys.stderr, flush=True)
    table = {}
    for method, turns in found.items():
        if not turns:
            continue
        seconds = statistics.median(second for turn in turns for second in turn["seconds"][WARM:])
        table[method] = {
            "tokens_per_second": args.batch * args.row_length / seconds,
            "peak_bytes": statistics.median(turn["peak_bytes"] for turn in turns),
        }
    if args.json:
        print(json.dumps(table))
        return 0
    for method, values in table.items():
        base = table.get("ours, float32" if "float32" in method else "ours, bfloat16", values)
        speed, memory = (base[name] / values[name] for name in ("tokens_per_second", "peak_bytes"))
        print(
            f"{method:<45}{values['tokens_per_second']:8.0f} tok/s {values['peak_bytes'] / 2**30:6.2f} GiB   "
            f"ours in that precision: {speed:.2f} x the speed, {memory:.2f} x the memory"
        )
    return 0


def export(folder: Path, args: argparse.Namespace, draft: Any, target: Any, mark: str) -> None:
    """The first rows and what of the target training reads, as files that anybody reads."""
    source = FeatureRows(
        Path(args.features), taps=draft.config.taps, target_fingerprint=mark, row_length=args.row_length
    )
    # As the trainer takes them: all rows, by the seed 0, and nothing held out.
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    taken = grain.MapDataset.source(order).seed(0).shuffle().repeat()
    rows = [source[int(taken[place])] for place in range((args.updates + WARM) * args.batch)]
    for name in rows[0]:
        array = np.stack([row[name] for row in rows])
        np.save(folder / f"{name}.npy", array.view(np.uint16) if name in ("taps", "hidden") else array.astype(np.int32))
    d2t = np.asarray(draft.vocab.d2t)
    head = np.asarray(target.params.lm_head)
    embed, t2d = np.asarray(target.params.embed), np.asarray(draft.vocab.t2d)
    for name, array in {"embed": embed, "head": head[d2t], "d2t": d2t, "t2d": t2d}.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "draft.json").write_text(json.dumps(draft.config.to_hf()), encoding="utf-8")
    (folder / "taps.json").write_text(json.dumps(list(draft.config.taps)), encoding="utf-8")


def ours(args: argparse.Namespace) -> int:
    """The trainer, logged at every update."""
    from eagle3_jax import runtime
    from eagle3_jax.training.loop import train

    runtime.start("cpu", "float32", None)
    updates = args.updates + WARM
    config = TrainConfig(
        target=args.target, output=str(Path(args.ours) / f"run-{np.random.default_rng().integers(1 << 30)}"),
        features=(args.features,), init=args.draft, held_out_rows=0, decoded_prompts=0, row_length=args.row_length,
        batch_rows=args.batch, updates=updates, schedule=((updates, args.steps),), learning_rate=1e-4, warmup=0,
        compute_dtype=args.dtype, log_every=1, save_every=updates + 1,
    )  # fmt: skip
    train(config)
    log = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    ends = [0.0, *(entry["seconds"] for entry in log)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "seconds": [after - before for before, after in pairwise(ends)],
        "losses": [entry["loss"] for entry in log], "peak_bytes": peak, "attention": "chunked",
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
