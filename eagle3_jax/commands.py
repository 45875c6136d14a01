"""`eagle3-jax generate` and `eagle3-jax bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from pathlib import Path

from jax.typing import DTypeLike

from eagle3_jax import bench as benchmark
from eagle3_jax import runtime
from eagle3_jax.baselines import Lookup, SmallModel
from eagle3_jax.checkpoint import load_draft, load_target, read_target_config
from eagle3_jax.draft import Draft
from eagle3_jax.drafters import Drafter, Mixed
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.files import at, read_config
from eagle3_jax.metrics import tau
from eagle3_jax.prompts import encode_prompt, read_jsonl, read_prompt
from eagle3_jax.report import Method, render
from eagle3_jax.requests import Answer, Request, check_request, plan_for, warn_beyond
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import TextStream, check_stops, eos_ids, load_tokenizer
from eagle3_jax.tokenizer import decode as decode_text
from eagle3_jax.tree import FixedTree, TreeShape

logger = logging.getLogger(__name__)

DRAFT_LENGTH = 4  # tokens drafted a round, unless said otherwise

# Below this acceptance, over this many rounds, a draft is most likely wired up wrongly.
DEAD_DRAFT_ACCEPTED, DEAD_DRAFT_ROUNDS = 0.1, 50


def generate(args: argparse.Namespace) -> int:
    """Answer prompts; see `eagle3-jax generate --help`."""
    method = args.method or (_kind(Path(args.draft)) if args.draft else "plain")
    if (method in ("eagle3", "sps")) != bool(args.draft) or (args.draft and method != _kind(Path(args.draft))):
        raise InputError(
            expected="as --draft an EAGLE-3 draft for --method eagle3 and a small model for sps, none for plain and "
            "lookup",
            found=f"--method {method} {f'and --draft {args.draft}' if args.draft else 'without --draft'}",
            remedy="Leave --method out: a draft's kind is read from its config.",
        )
    tree = tree_shape(args)
    chain, lookup = args.draft_length is not None, args.lookup_nodes is not None
    for given, needed, found in (
        (
            (chain or tree is not None) and method == "plain",
            "--draft or --method lookup with what is to be drafted",
            "neither",
        ),
        (tree is not None and method != "eagle3", "an EAGLE-3 draft with a tree", f"--method {method}"),
        (lookup and method != "eagle3", "an EAGLE-3 draft with --lookup-nodes", f"--method {method}"),
        (chain and tree is not None, "either a chain (--draft-length) or a tree", "both"),
        (args.logprobs and not args.json, "--json with --logprobs", "--logprobs alone"),
        (args.stream and args.json, "either --stream, which prints text, or --json", "both"),
        (args.stream and args.batch > 1, "one row at a time with --stream", f"--batch {args.batch}"),
    ):
        if given:
            raise InputError(expected=needed, found=found, remedy="Leave out what does not go together.")
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
    runtime.check_attention(info, args.attention)
    folder = Path(args.target)
    # Everything about the prompts is checked before the weights are read.
    config = read_target_config(folder)
    tokenizer = load_tokenizer(folder)
    rows = [{"prompt": args.prompt}] if args.prompt is not None else read_jsonl(at(args.prompts))
    stops = check_stops(tokenizer, args.stop)
    requests = []
    for index, row in enumerate(rows):
        where = "--prompt" if args.prompt is not None else f"row {index + 1} of {args.prompts}"
        asked = read_prompt(row, where)
        ids = encode_prompt(
            tokenizer, asked.messages, where, tools=asked.tools, raw=args.raw, options=dict(args.template)
        )
        request = Request(
            tokens=ids, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
            top_p=args.top_p, seed=args.seed + index, stop=stops,
        )  # fmt: skip
        check_request(request, config, where)
        requests.append(request)
    dtype = runtime.DTYPES[info.dtype]
    target = dataclasses.replace(load_target(folder, dtype), attention=args.attention)
    draft: Drafter | None = Lookup() if method == "lookup" else None
    if args.draft:
        draft = load_drafter(Path(args.draft), target, dtype)
    if args.lookup_nodes is not None and isinstance(draft, Draft):
        draft = Mixed(draft, Lookup())
    drafting = {
        "draft_length": 0 if draft is None or tree is not None else args.draft_length or DRAFT_LENGTH,
        "tree": tree,
        "lookup_nodes": args.lookup_nodes or 0,
    }
    plan_for(config, draft, **drafting)
    warn_beyond(draft, requests, config)
    print(f"compiling (once per shape; {runtime.kept()})", file=sys.stderr)
    ends = () if args.ignore_eos else eos_ids(folder, tokenizer)
    streams = {index: TextStream(tokenizer, stops) for index in range(len(requests))}
    answers: list[Answer] = []
    texts: dict[int, str] = {}  # finished before an earlier prompt's
    shown = 0
    began = time.perf_counter()
    for event in decode(
        target, draft, requests, **drafting, batch=args.batch,
        rounds=1 if args.stream else None, eos=ends, tokenizer=tokenizer, logprobs=args.logprobs,
    ):  # fmt: skip
        if args.stream:
            print(streams[event.index].push(event.token_ids), end="", flush=True)
        if event.answer is None:
            continue
        answers.append(event.answer)
        if args.json:
            print(json.dumps(_record(event.answer, decode_text(tokenizer, event.answer.token_ids), args)), flush=True)
        elif args.stream:
            print(streams[event.index].finish(), flush=True)
        else:
            text = event.answer.stopped_text
            texts[event.index] = decode_text(tokenizer, event.answer.token_ids) if text is None else text
            while shown in texts:
                print(texts.pop(shown), flush=True)
                shown += 1
    _summary(answers, isinstance(draft, Draft | Mixed), time.perf_counter() - began)
    return 0


def _kind(folder: Path) -> str:
    """eagle3 or sps, as the folder's config says."""
    return "eagle3" if "draft_vocab_size" in read_config(folder) else "sps"


def load_drafter(folder: Path, target: Target, dtype: DTypeLike) -> Draft | SmallModel:
    """An EAGLE-3 draft, or a small model that drafts, as the folder's config says."""
    if _kind(folder) == "eagle3":
        return load_draft(folder, target)
    return SmallModel(load_target(folder, dtype))


def tree_shape(args: argparse.Namespace) -> TreeShape | FixedTree | None:
    """The tree that the flags describe, if they do; its numbers are checked against the draft later.

    Raises:
      InputError: flags that do not go together.
    """
    given = {name: getattr(args, f"tree_{name}") for name in ("nodes", "depth", "top_k")}
    absent = [f"--tree-{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if args.tree_parents is not None:
        if len(absent) < len(given):
            raise InputError(
                expected="either a fixed tree (--tree-parents) or a dynamic one",
                found="flags of both",
                remedy="Leave one of them out.",
            )
        return FixedTree(tuple(args.tree_parents))
    if len(absent) == len(given):
        return None
    if absent:
        raise InputError(
            expected="--tree-nodes, --tree-depth and --tree-top-k together",
            found=f"no {', '.join(absent)}",
            remedy="For example --tree-nodes 9 --tree-depth 4 --tree-top-k 3.",
        )
    return TreeShape(**given)


def _record(answer: Answer, text: str, args: argparse.Namespace) -> dict[str, object]:
    record: dict[str, object] = {
        "prompt_index": answer.index,
        "text": text if answer.stopped_text is None else answer.stopped_text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.token_ids),
        "verification_passes": answer.verification_passes,
        "tau": tau([len(answer.token_ids)], [answer.verification_passes]),
        "seconds": round(answer.seconds, 4),
        "first_token_seconds": round(answer.first_token_seconds, 4),
    }
    if args.logprobs:
        record["logprobs"] = list(answer.logprobs)
    return record


def _summary(answers: list[Answer], drafted: bool, seconds: float) -> None:
    """One line on stderr, and a warning when the draft looks dead: its output is right, so nothing else would tell."""
    tokens = [len(answer.token_ids) for answer in answers]
    passes = [answer.verification_passes for answer in answers]
    pooled = tau(tokens, passes)
    shown = "-" if pooled is None else f"{pooled:.2f}"
    print(f"{sum(tokens)} tokens, {sum(passes)} passes, tau {shown}, {seconds:.1f} s", file=sys.stderr)
    # Only rounds that drafted count: beyond what a draft was made for there are none.
    accepted = [count for answer in answers for count in answer.accepted]
    if drafted and len(accepted) >= DEAD_DRAFT_ROUNDS and sum(accepted) < DEAD_DRAFT_ACCEPTED * len(accepted):
        logger.warning(
            "%.2f drafts a round accepted: almost none. Likely causes: the draft was trained for another target; its "
            "taps, rotary base or norm flags differ from how it was trained; its vocabulary map is not its own; the "
            "prompt lacks the chat template it was trained with; or it is untrained.",
            sum(accepted) / len(accepted),
        )


def _pairs(values: list[str], flag: str) -> dict[str, str]:
    """NAME=PATH arguments."""
    pairs = {}
    for value in values:
        name, sign, path = value.partition("=")
        if not (name and sign and path) or name in pairs:
            raise InputError(
                expected=f"{flag} NAME=PATH, each name once",
                found=value,
                remedy=f"For example {flag} gsm8k=gsm8k.jsonl.",
            )
        pairs[name] = path
    return pairs


def bench(args: argparse.Namespace) -> int:
    """Compare methods on tasks; see `eagle3-jax bench --help`."""
    drafts = {name: Path(path) for name, path in _pairs(args.draft, "--draft").items()}
    files = {name: at(path) for name, path in _pairs(args.tasks, "--tasks").items()}
    wanted = args.methods.split(",")
    kinds = {_kind(path) for path in drafts.values()}
    known = {"plain", "eagle3", "sps", "lookup", "hf"}
    if set(wanted) - known or "plain" not in wanted or kinds != set(wanted) & {"eagle3", "sps"}:
        raise InputError(
            expected="--methods out of plain, eagle3, sps, lookup and hf, with plain, which all others are compared "
            "with, and a --draft of its kind exactly for eagle3 and sps",
            found=f"--methods {args.methods} and drafts for {', '.join(sorted(kinds)) or 'none'}",
            remedy="For example --methods plain,eagle3 --draft NAME=DIR.",
        )
    tree = tree_shape(args)
    if args.sweep and (tree is not None or args.draft_length or args.lookup_nodes is not None):
        raise InputError(
            expected="either --sweep, which tries a list of chains and trees, or what is to be drafted",
            found="both",
            remedy="Leave one of them out.",
        )
    lengths = args.draft_length or ([] if tree is not None or args.sweep else [DRAFT_LENGTH])
    for flag, values in (
        ("--draft-length", lengths), ("--temperatures", args.temperatures), ("--batch", args.batch),
    ):  # fmt: skip
        if len(set(values)) < len(values):
            raise InputError(expected=f"every value of {flag} once", found=str(values), remedy="Drop the repetition.")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise InputError(expected="a folder as --out", found=f"the file {args.out}", remedy="Choose another name.")
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
    runtime.check_attention(info, args.attention)
    if "hf" in wanted:
        benchmark.check_transformers(info)
    folder = Path(args.target)
    config = read_target_config(folder)
    tokenizer = load_tokenizer(folder)
    tasks: dict[str, list[tuple[int, ...]]] = {}
    for name, path in files.items():
        prompts = []
        for index, row in enumerate(read_jsonl(path)[: args.limit]):
            where = f"row {index + 1} of {path}"
            task, options = read_prompt(row, where), dict(args.template)
            prompts.append(encode_prompt(tokenizer, task.messages, where, tools=task.tools, options=options))
            for temperature in args.temperatures:
                request = Request(prompts[-1], max_new_tokens=args.max_new_tokens, temperature=temperature)
                check_request(request, config, where)
        if len(prompts) < max(args.batch):
            raise InputError(
                expected=f"at least as many prompts in {path} as are decoded together, {max(args.batch)}",
                found=f"{len(prompts)}",
                remedy="Give a larger --limit, more prompts, or a smaller --batch.",
            )
        tasks[name] = prompts
    target = dataclasses.replace(load_target(folder, runtime.DTYPES[info.dtype]), attention=args.attention)
    methods = [Method("plain")]
    if "hf" in wanted:
        methods.append(Method("hf"))
    asked = [Request(ids, max_new_tokens=args.max_new_tokens) for prompts in tasks.values() for ids in prompts]
    for name, path in drafts.items():
        draft: Drafter = load_drafter(path, target, runtime.DTYPES[info.dtype])
        kind, beside = _kind(path), 0
        shapes: list[tuple[int, TreeShape | FixedTree | None]] = [(length, None) for length in lengths]
        if isinstance(draft, Draft):
            if args.sweep:
                shapes = [(one.depth, None) if one.top_k == 1 else (0, one) for one in benchmark.SWEEP]
            elif tree is not None:
                shapes.append((0, tree))
            if args.lookup_nodes is not None:
                draft, beside = Mixed(draft, Lookup()), args.lookup_nodes
        for length, shape in shapes or [(DRAFT_LENGTH, None)]:
            plan_for(config, draft, draft_length=length, tree=shape, lookup_nodes=beside)
            methods.append(Method(kind, name, draft, length, shape, beside))
        warn_beyond(draft, asked, config)
    if "lookup" in wanted:
        methods += [Method("lookup", None, Lookup(), length) for length in lengths or [DRAFT_LENGTH]]
    records = benchmark.run_bench(
        target, folder, methods, tasks, temperatures=args.temperatures, batches=args.batch,
        max_new_tokens=args.max_new_tokens, eos=eos_ids(folder, tokenizer), out=Path(args.out), info=info,
    )  # fmt: skip
    print(render(records))
    return 0
