"""`eagle3-jax generate` and `eagle3-jax bench`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3_jax import bench as benchmark
from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_draft, load_target, read_target_config
from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Draft
from eagle3_jax.engine import Answer, Request, check_request, decode
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import tau
from eagle3_jax.prompts import encode_prompt, prompt_messages, read_jsonl
from eagle3_jax.tokenizer import TextStream, check_stops, eos_ids, load_tokenizer
from eagle3_jax.tokenizer import decode as decode_text

logger = logging.getLogger(__name__)

DRAFT_LENGTH = 4  # tokens drafted a round, unless said otherwise

# Below this acceptance, over this many passes, a draft is most likely wired up wrongly.
DEAD_DRAFT_TAU, DEAD_DRAFT_PASSES = 1.1, 50


def generate(args: argparse.Namespace) -> int:
    """Answer prompts; see `eagle3-jax generate --help`."""
    method = args.method or ("eagle3" if args.draft else "plain")
    if (method == "eagle3") != bool(args.draft):
        raise InputError(
            expected="--draft with --method eagle3, and no --draft with --method plain",
            found=f"--method {method} {'with' if args.draft else 'without'} --draft",
            remedy="Give both or neither.",
        )
    for given, needed in (
        (args.draft_length is not None and not args.draft, "--draft with --draft-length"),
        (args.logprobs and not args.json, "--json with --logprobs"),
        (args.stream and args.json, "either --stream, which prints text, or --json"),
        (args.stream and args.batch > 1, "one row at a time with --stream"),
    ):
        if given:
            raise InputError(expected=needed, found="flags that do not go together", remedy="Leave one of them out.")
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
    folder = Path(args.target)
    # Everything about the prompts is checked before the weights are read.
    config = read_target_config(folder)
    tokenizer = load_tokenizer(folder)
    rows = [{"prompt": args.prompt}] if args.prompt is not None else read_jsonl(Path(args.prompts))
    stops = check_stops(tokenizer, args.stop)
    requests = []
    for index, row in enumerate(rows):
        where = "--prompt" if args.prompt is not None else f"row {index + 1} of {args.prompts}"
        ids = encode_prompt(tokenizer, prompt_messages(row, where), where, raw=args.raw)
        request = Request(
            tokens=ids, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
            top_p=args.top_p, seed=args.seed + index, stop=stops,
        )  # fmt: skip
        check_request(request, config, where)
        requests.append(request)
    dtype = runtime.DTYPES[info.dtype]
    target = load_target(folder, dtype)
    draft = load_draft(Path(args.draft), target) if args.draft else None
    if draft is not None:
        warn_beyond_training(draft, requests, config)
    print("compiling (once per shape; kept for later runs)", file=sys.stderr)
    ends = () if args.ignore_eos else eos_ids(folder, tokenizer)
    streams = {index: TextStream(tokenizer, stops) for index in range(len(requests))}
    answers: list[Answer] = []
    texts: dict[int, str] = {}  # finished before an earlier prompt's
    shown = 0
    began = time.perf_counter()
    for event in decode(
        target, draft, requests, draft_length=(args.draft_length or DRAFT_LENGTH) if draft is not None else 0,
        batch=args.batch, eos=ends, tokenizer=tokenizer, logprobs=args.logprobs,
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
    _summary(answers, draft is not None, time.perf_counter() - began)
    return 0


def warn_beyond_training(draft: Draft, requests: Sequence[Request], config: TargetConfig) -> None:
    """Say once that texts may grow longer than anything the draft was made for."""
    trained, most = draft.config.trained_length, draft.config.max_position_embeddings
    limit = most if trained is None else min(trained, most)
    longest = max(len(request.tokens) + request.max_new_tokens for request in requests)
    longest = min(longest, config.context_limit)
    if longest > limit:
        logger.warning(
            "up to %d tokens of prompt and answer, but the draft was %s %d: the text stays right, but fewer drafts may "
            "be accepted beyond that", longest, "trained on" if limit == trained else "made for", limit,
        )  # fmt: skip


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
    if drafted and pooled is not None and pooled < DEAD_DRAFT_TAU and sum(passes) >= DEAD_DRAFT_PASSES:
        logger.warning(
            "tau %.2f: almost no draft is accepted. Likely causes: the draft was trained for another target; its taps, "
            "rotary base or norm flags differ from how it was trained; its vocabulary map is not its own; the prompt "
            "lacks the chat template it was trained with; or it is untrained.",
            pooled,
        )


def _pairs(values: list[str], flag: str) -> dict[str, Path]:
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
        pairs[name] = Path(path)
    return pairs


def bench(args: argparse.Namespace) -> int:
    """Compare methods on tasks; see `eagle3-jax bench --help`."""
    drafts, files = _pairs(args.draft, "--draft"), _pairs(args.tasks, "--tasks")
    wanted = args.methods.split(",")
    unknown = sorted(set(wanted) - {"plain", "eagle3", "hf"})
    if unknown or "plain" not in wanted or ("eagle3" in wanted) != bool(drafts):
        raise InputError(
            expected="--methods out of plain, eagle3 and hf, with plain, which all others are compared with, and with "
            "--draft exactly when eagle3 is among them",
            found=f"--methods {args.methods} and {len(drafts)} drafts",
            remedy="For example --methods plain,eagle3 --draft NAME=DIR.",
        )
    for flag, values in (("--draft-length", args.draft_length), ("--temperatures", args.temperatures)):
        if len(set(values)) < len(values):
            raise InputError(expected=f"every value of {flag} once", found=str(values), remedy="Drop the repetition.")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise InputError(expected="a folder as --out", found=f"the file {args.out}", remedy="Choose another name.")
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
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
            prompts.append(encode_prompt(tokenizer, prompt_messages(row, where), where))
            for temperature in args.temperatures:
                request = Request(prompts[-1], max_new_tokens=args.max_new_tokens, temperature=temperature)
                check_request(request, config, where)
        tasks[name] = prompts
    target = load_target(folder, runtime.DTYPES[info.dtype])
    methods = [benchmark.Method("plain")]
    if "hf" in wanted:
        methods.append(benchmark.Method("hf"))
    for name, path in drafts.items():
        draft = load_draft(path, target)
        warn_beyond_training(
            draft,
            [Request(ids, max_new_tokens=args.max_new_tokens) for prompts in tasks.values() for ids in prompts],
            config,
        )
        methods += [benchmark.Method("eagle3", name, draft, length) for length in args.draft_length]
    records = benchmark.run_bench(
        target, folder, methods, tasks, temperatures=args.temperatures, max_new_tokens=args.max_new_tokens,
        eos=eos_ids(folder, tokenizer), out=Path(args.out), info=info,
    )  # fmt: skip
    print(benchmark.render(records))
    return 0
