"""`python -m convert.verify DRAFT --target DIR`: is this draft read as it was meant?

First the arithmetic: what the library computes from DRAFT at drafting steps 1 to 5, on the target's own states,
against the same in NumPy and float64 from the folder AGAINST (DRAFT itself by default; the source of a conversion, for
example). Then the meaning: the draft decodes some prompts. Below 1.1 tokens a pass something was read differently from
how it was trained, and the likely causes are tried out one by one, naming the one that repairs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.command import run
from convert.draft import add_reading
from convert.draft_reader import EMBEDDING, DraftSource, parse_changes, read_draft
from convert.draft_writer import write_draft
from convert.reference import Reference
from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.draft import Draft, draft_logits, draft_step, fuse
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import tau
from eagle3_jax.prompts import encode_prompt, read_jsonl, read_prompt
from eagle3_jax.requests import Request
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target, target_forward
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.vocab import vocab_from_ids, vocab_offsets

STEPS = 5
TOLERANCE = 1e-4  # of the largest value; two fp32 computations of the same layer differ by some 1e-6
LEAST = 1.1  # tokens a pass, below which a draft does not draft
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "List five uses of baking soda, one sentence each.",
    "Write a Python function that reverses a string, and explain it.",
)


def parity(draft: Draft, other: DraftSource, target: Target, tokens: Sequence[int]) -> list[dict[str, float]]:
    """The library's logits and carries against the reference's, the largest difference over the largest value, by step.

    Args:
      draft: as the library loaded it.
      other: the folder that the reference reads.
      target: lends its states and embedding.
      tokens: of a text, at least STEPS + 4; its last ones take the place of drafted tokens.
    """
    ids = np.asarray(tokens, np.int32)
    length, kept = len(ids) - 1, len(ids) - STEPS
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    taps = target_forward(target, jnp.asarray(ids[None, :-1]), positions, causal, taps=draft.config.taps).taps
    own = EMBEDDING in other.tensors
    embed = other.tensors[EMBEDDING].load() if own else np.asarray(target.params.embed)
    weights = {name: tensor.load() for name, tensor in other.tensors.items() if name != EMBEDDING}
    config = dataclasses.replace(other.config, taps=other.config.taps or draft.config.taps)
    expected = Reference(config, weights, embed).steps(np.asarray(taps[0]), ids[1:], kept)
    features = fuse(draft, taps).at[:, kept:].set(0)
    results = []
    for step in range(STEPS):
        # Slots to the right of the last one are padding, which no causal mask lets in.
        carry = draft_step(draft, features, jnp.asarray(ids[None, 1:]), positions, causal).carry
        last = kept + step - 1
        found = (carry[0, last], draft_logits(draft, carry[:, last : last + 1])[0, 0])
        far = [
            float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()) for a, b in zip(found, expected[step])
        ]
        results.append({"step": step + 1, "carry": far[0], "logits": far[1]})
        if last + 1 < length:
            features = features.at[:, last + 1].set(carry[:, last])
    return results


def probe(draft: Draft, target: Target, prompts: Sequence[tuple[int, ...]], new: int, ends: Sequence[int]) -> float:
    """Tokens a pass (tau) of greedy decoding with a chain of STEPS."""
    requests = [Request(tokens=ids, max_new_tokens=new) for ids in prompts]
    answers = [event.answer for event in decode(target, draft, requests, draft_length=STEPS, eos=ends) if event.answer]
    found = tau([len(answer.token_ids) for answer in answers], [answer.verification_passes for answer in answers])
    return 1.0 if found is None else found


def likely_causes(draft: Draft, target: Target) -> Iterator[tuple[str, str, Draft]]:
    """What may have been read otherwise than it was trained: a name, the option that says so, and the draft so read."""
    config, layers = draft.config, target.config.num_layers

    def changed(**changes: Any) -> Draft:
        return dataclasses.replace(draft, config=dataclasses.replace(config, **changes))

    taps = {
        "taps counted as outputs of layers": tuple(tap + 1 for tap in config.taps),
        "taps counted as inputs of layers": tuple(tap - 1 for tap in config.taps),
    }
    if layers > 6 and len(config.taps) == 3:
        taps["the default taps"] = target.config.default_taps
    for ids, name in {ids: name for name, ids in taps.items()}.items():
        if ids != config.taps and ids[0] >= 0 and ids[-1] <= layers:
            yield name, f"--set taps={json.dumps(list(ids))}", changed(taps=ids)
    ropes = {
        "RoPE base 10000 without scaling": RopeConfig(),
        "the target's RoPE": target.config.rope,
        "RoPE without scaling": RopeConfig(theta=config.rope.theta),
    }
    for rope, name in {rope: name for name, rope in ropes.items()}.items():
        if rope != config.rope:
            said = " ".join(f"--set {key}={json.dumps(value)}" for key, value in rope.to_hf().items())
            yield name, said, changed(rope=rope)
    for flag in ("norm_output", "norm_before_residual"):
        other = not getattr(config, flag)
        yield f"{flag} {str(other).lower()}", f"--set {flag}={json.dumps(other)}", changed(**{flag: other})
    offsets = vocab_offsets(draft.vocab)
    if offsets.min() >= 0 and np.unique(offsets).size == offsets.size:
        vocab = vocab_from_ids(offsets, config.vocab_size)
        yield "d2t as absolute ids", "--set d2t=absolute", dataclasses.replace(draft, vocab=vocab)
    if config.own_embedding:
        shared = dataclasses.replace(draft, embed=target.params.embed)
        yield "the target's embedding", "a folder without embed_tokens.weight", shared


def verify(options: argparse.Namespace) -> dict[str, Any]:
    """What both parts found. Raises InputError as `read_draft`, and for prompts that are none."""
    changes = parse_changes(options.changes)
    source = read_draft(options.draft, target=options.target, dialect=options.dialect, changes=changes)
    other = source
    if options.against is not None:
        other = read_draft(options.against, target=options.target)
    for note in source.notes:
        print(f"note: {note}", file=sys.stderr)
    tokenizer = load_tokenizer(options.target)
    rows = [{"prompt": text} for text in PROMPTS]
    if options.prompts is not None:
        rows = read_jsonl(options.prompts)[: options.limit]
    where = str(options.prompts or "the built-in prompts")
    asked = [read_prompt(row, where) for row in rows]
    prompts = [encode_prompt(tokenizer, one.messages, where, tools=one.tools) for one in asked]
    target = load_target(options.target)
    with tempfile.TemporaryDirectory() as folder:
        write_draft(source, Path(folder) / "draft", "canonical", dtype="float32")
        draft = load_draft(Path(folder) / "draft", target)
    text = next((ids for ids in prompts if len(ids) >= STEPS + 4), None)
    if text is None:
        raise InputError(
            expected=f"a prompt of at least {STEPS + 4} tokens", found=f"none in {where}", remedy="Give a longer one."
        )
    result: dict[str, Any] = {"parity": parity(draft, other, target, text[:64])}
    result["equal"] = all(max(step["carry"], step["logits"]) < TOLERANCE for step in result["parity"])
    for step in result["parity"]:
        print(f"step {step['step']}: carry {step['carry']:.1e}, logits {step['logits']:.1e}", file=sys.stderr)
    ends = eos_ids(options.target, tokenizer)
    run = lambda one: probe(one, target, prompts, options.max_new_tokens, ends)
    result["tau"] = run(draft)
    print(f"{result['tau']:.2f} tokens a pass on {len(prompts)} prompts", file=sys.stderr)
    result["repaired_by"] = None
    if result["tau"] < LEAST:
        result["tried"] = []
        for name, said, candidate in likely_causes(draft, target):
            reached = run(candidate)
            result["tried"].append({"cause": name, "say": said, "tau": reached})
            print(f"{reached:.2f} with {name} ({said})", file=sys.stderr)
        best = max(result["tried"], key=lambda one: one["tau"], default=None)
        if best is not None and best["tau"] >= LEAST:
            result["repaired_by"] = best
            print(f"repaired by {best['cause']}: convert again with {best['say']}", file=sys.stderr)
        else:
            print("none of these alone repairs it: another target, or a draft that has learnt nothing", file=sys.stderr)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m convert.verify", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("draft", metavar="DRAFT", type=Path, help="folder of any dialect")
    parser.add_argument("--against", metavar="DIR", type=Path, help="another folder of the same draft")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="jsonl; default: four built in")
    parser.add_argument("--limit", metavar="N", type=int, default=8, help="prompts of the file to use (8)")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=64, help="of each answer (64)")
    add_reading(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; the result as JSON on stdout. 0 right, 1 not, 2 wrong input, 130 interrupted."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        if options.target is None:
            raise InputError(expected="--target", found="none", remedy="Name the folder of the draft's target.")
        runtime.start(None, "float32", "")
        result = verify(options)
        print(json.dumps(result))
        return 0 if result["equal"] and result["tau"] >= LEAST else 1

    return run(command, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
