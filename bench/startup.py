"""What the compilation cache saves: time to the first token in a first and a second process.

    python -m bench.startup --target models/SmolLM2-135M-Instruct --draft checkpoints/smollm2-135m-instruct-eagle3

Both processes run the same command; the first finds an empty cache. Time to the first token counts from when the
request is taken up, with the weights loaded, and so holds compiling the prefill; the whole process is quoted beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    args = parser.parse_args()
    times = []
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable, "-m", "eagle3_jax.cli", "generate",
            "--target", args.target, "--draft", args.draft, "--prompt", "Why is the sky blue?",
            "--max-new-tokens", "32", "--json", "--cache-dir", cache,
        ]  # fmt: skip
        for name in ("first process", "second process"):
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            whole = time.perf_counter() - began
            if done.returncode:
                print(done.stderr, end="", file=sys.stderr)
                return done.returncode
            answer = json.loads(done.stdout)
            times.append(answer["first_token_seconds"])
            print(
                f"{name}: first token after {times[-1]:.2f} s, answer after {answer['seconds']:.2f} s, "
                f"process {whole:.1f} s"
            )
    print(f"first token {times[0] / times[1]:.1f} times sooner")
    return 0


if __name__ == "__main__":
    sys.exit(main())
