"""Plain decoding beside EAGLE-3 on a few prompts, live, with a table at the end.

    python -m bench.demo --target models/SmolLM2-135M-Instruct --draft checkpoints/smollm2-135m-instruct-eagle3

Both run the same engine in the same process, after a warm-up that compiles, prompt by prompt in turn, so that whatever
else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.draft import Draft
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import tau, tokens_per_second
from eagle3_jax.prompts import encode_prompt
from eagle3_jax.requests import Answer, Request
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import TextStream, eos_ids, load_tokenizer

PROMPTS = (
    "Janet has 12 apples. She gives 5 to her brother and then buys 7 more. How many apples does she have now?",
    "Write a Python function that returns the factorial of a number.",
    "Give three tips for staying healthy.",
    "Explain why the sky is blue.",
)


def answer(
    target: Target, draft: Draft | None, request: Request, length: int, eos: Sequence[int], stream: TextStream | None
) -> Answer:
    """Answer one request, printing its text as it is decided when a stream is given."""
    for event in decode(target, draft, [request], draft_length=length if draft is not None else 0, eos=eos):
        if stream is not None:
            print(stream.push(event.token_ids), end="", flush=True)
        if event.answer is not None:
            if stream is not None:
                print(stream.finish(), flush=True)
            return event.answer
    raise AssertionError("decoding ended without an answer")


def warm_up(target: Target, draft: Draft | None, request: Request, length: int, eos: Sequence[int]) -> None:
    """Compile the programs that a request will use, by running its prefill and a few rounds."""
    for rounds, _ in enumerate(
        decode(target, draft, [request], draft_length=length if draft is not None else 0, eos=eos)
    ):
        if rounds == 3:
            return


def main() -> int:
    """Run the demonstration; exit code 1 when the two outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--draft-length", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--prompts", type=int, default=len(PROMPTS), choices=range(1, len(PROMPTS) + 1), help="how many prompts"
    )
    args = parser.parse_args()
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens must be at least 2: the first token is not timed")
    # fp32 everywhere: what is shown is that not one token differs.
    print(runtime.start(dtype="float32"), file=sys.stderr)
    folder = Path(args.target)
    tokenizer = load_tokenizer(folder)
    target = load_target(folder)
    draft = load_draft(Path(args.draft), target)
    eos = eos_ids(folder, tokenizer)
    requests = [
        Request(encode_prompt(tokenizer, [{"role": "user", "content": text}], text), max_new_tokens=args.max_new_tokens)
        for text in PROMPTS[: args.prompts]
    ]
    methods = (("plain", None), ("EAGLE-3", draft))
    print("compiling (about a minute the first time, kept for later runs) ...", file=sys.stderr, flush=True)
    for _, model in methods:
        for request in requests:
            warm_up(target, model, request, args.draft_length, eos)
    results: dict[str, list[Answer]] = {name: [] for name, _ in methods}
    for text, request in zip(PROMPTS, requests):
        print(f"\n>>> {text}")
        for name, model in methods:
            print(f"--- {name}")
            results[name].append(answer(target, model, request, args.draft_length, eos, TextStream(tokenizer)))
    return report(results)


def report(results: dict[str, list[Answer]]) -> int:
    """Print the table; 0 when both methods gave the same tokens."""
    speeds = {}
    print(f"\n{'':<10}{'tokens':>8}{'seconds':>9}{'tokens/s':>10}{'tau':>7}{'speedup':>9}")
    for name, answers in results.items():
        tokens = [len(one.token_ids) for one in answers]
        after_first = [one.seconds - one.first_token_seconds for one in answers]
        speeds[name] = tokens_per_second(tokens, after_first) or float("nan")
        mean = tau(tokens, [one.verification_passes for one in answers]) or float("nan")
        speedup = speeds[name] / speeds["plain"]
        print(f"{name:<10}{sum(tokens):>8}{sum(after_first):>9.2f}{speeds[name]:>10.1f}{mean:>7.2f}{speedup:>8.2f}x")
    same = all(a.token_ids == b.token_ids for a, b in zip(results["plain"], results["EAGLE-3"], strict=True))
    print(f"identical: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)
