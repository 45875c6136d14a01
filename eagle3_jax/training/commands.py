"""`eagle3-jax train`, `export`, `eval`, `data regenerate` and `data features`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_draft, load_target, read_target_config, save_draft
from eagle3_jax.commands import tree_shape
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.metrics import conditional_n_alpha, joint_n_alpha, tau
from eagle3_jax.params import abstract_params
from eagle3_jax.prompts import encode_prompt, prompt_messages, read_jsonl, read_lines
from eagle3_jax.requests import Request, check_request, plan_for
from eagle3_jax.tokenizer import decode as decode_text
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training import loop
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig, check_row_length, load_config, override
from eagle3_jax.training.data import encode_file
from eagle3_jax.training.dry_run import measure_memory
from eagle3_jax.training.features import Rows, check_tokens, write_features
from eagle3_jax.training.packing import pack
from eagle3_jax.training.step import TrainState, make_optimizer

logger = logging.getLogger(__name__)

# Real decoding that falls this much short of what teacher forcing promises points to a mismatch between the two.
GAP = 0.2


def _config(args: argparse.Namespace) -> TrainConfig:
    return override(load_config(Path(args.config)), args.fields)


def train(args: argparse.Namespace) -> int:
    """Train a draft; see `eagle3-jax train --help`."""
    config = _config(args)
    config.check()
    print(runtime.start(args.device, "float32", args.cache_dir), file=sys.stderr)
    if config.compute_dtype != "float32":
        print(f"weights and optimiser in float32, activations and products in {config.compute_dtype}", file=sys.stderr)
    if args.dry_run:
        sizes = measure_memory(config)
        for name, size in sizes.items():
            print(f"{name:<10}{size / 2**20:>10.1f} MiB", file=sys.stderr)
        print(json.dumps({"bytes": sizes, "updates": config.updates}))
        return 0
    result = loop.train(config, profile=None if args.profile is None else Path(args.profile))
    summary = {"output": config.output, "updates": result.updates, "held_out": result.evaluation}
    print(json.dumps(loop.finite(summary)))
    return 0 if result.finished else 130


def export(args: argparse.Namespace) -> int:
    """Write a run's draft as a canonical folder."""
    runtime.start(args.device or "cpu", "float32", "")
    run = RunFolder(Path(args.run_folder))
    _, config, vocab = run.read()
    if args.step not in ("best", "latest") and not args.step.isdigit():
        raise InputError(
            expected="--step best, latest or an update number",
            found=args.step,
            remedy="See the run's checkpoints/ folder.",
        )
    step = int(args.step) if args.step.isdigit() else args.step
    params = abstract_params(draft_specs(config))
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    # The optimiser's state has the same form whatever its settings.
    optimizer = make_optimizer(optax.constant_schedule(0.0), betas=(0.9, 0.95), weight_decay=0.0, clip=1.0)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), number, number)
    state = run.restore(state, step)
    run.close()
    # The embedding is the target's, which the folder does not hold.
    draft = Draft(params=state.params, vocab=vocab, embed=jnp.zeros((0, 0)), config=config)
    save_draft(Path(args.destination), draft, dtype=args.dtype, force=args.force)
    print(args.destination)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Teacher-forced acceptance of a chain beside real decoding, with a chain or a tree, on the same rows."""
    tree = tree_shape(args)
    if tree is not None and args.draft_length is not None:
        raise InputError(
            expected="either a chain (--draft-length) or a tree", found="both", remedy="Leave one of them out."
        )
    length = (args.draft_length or 5) if tree is None else tree.depth
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
    folder = Path(args.target)
    tokenizer = load_tokenizer(folder)
    limit = read_target_config(folder).context_limit
    row_length = args.row_length or min(512, limit)
    check_row_length(row_length, limit)
    encoded, report = encode_file(Path(args.data), tokenizer, max_length=row_length)
    logger.info("%s", report)
    encoded = encoded[: args.limit]
    target = load_target(folder, runtime.DTYPES[info.dtype])
    draft = load_draft(Path(args.draft), target)
    packed = pack(encoded, row_length=row_length, seed=0)
    check_tokens(packed, target.config.vocab_size)
    rows = Rows(packed)
    drafting: dict[str, Any] = {"draft_length": length} if tree is None else {"tree": tree}
    plan_for(target.config, draft, **drafting)
    forced = loop.evaluate_rows(target, draft, rows, length)
    requests = []
    for index, document in enumerate(encoded):
        start = int((document.spans > 0).argmax())
        request = Request(tuple(document.tokens[:start].tolist()), max_new_tokens=args.max_new_tokens)
        check_request(request, target.config, f"the prompt of document {index + 1} of {args.data}")
        requests.append(request)
    answers = []
    for event in decode(target, draft, requests, **drafting, eos=eos_ids(folder, tokenizer)):
        if event.answer is not None:
            answers.append(event.answer)
            print(f"\rdecoded {len(answers)}/{len(requests)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    accepted = [count for answer in answers for count in answer.accepted]
    promised = 1 + sum(value or 0.0 for value in forced["joint"])
    real = tau([len(answer.token_ids) for answer in answers], [answer.verification_passes for answer in answers])
    result: dict[str, Any] = {
        "rows": len(encoded),
        "draft_length": length,
        "teacher_forced": forced | {"tau": promised},
        "decoding": {
            "tau": real,
            "joint": joint_n_alpha(accepted, length),
            "conditional": conditional_n_alpha(accepted, length),
        },
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{'':<16}{'tau':>6}  joint acceptance of drafts 1..{length} | conditional")
        for name in ("teacher_forced", "decoding"):
            part = result[name]
            shown = " | ".join(loop.shown(part[key]) for key in ("joint", "conditional"))
            print(f"{name:<16}{part['tau'] or float('nan'):>6.2f}  {shown}")
    if real is not None and (promised - real) / promised > GAP:
        logger.warning(
            "real decoding accepts %.0f %% less than teacher forcing promises. Where answers are not the target's own, "
            "that is expected; otherwise training and decoding disagree (template, taps, alignment).",
            100 * (promised - real) / promised,
        )
    return 0


def features(args: argparse.Namespace) -> int:
    """Write the features of a config's data."""
    config = _config(args)
    # On a CPU too: features are stored in bf16, and this is what the target's own numbers look like in bf16.
    info = runtime.start(args.device, args.dtype or "bfloat16", args.cache_dir)
    print(info, file=sys.stderr)
    config.check()
    folder = Path(config.target)
    limit = read_target_config(folder).context_limit
    check_row_length(config.row_length, limit)
    packed = loop.packed_rows(config)
    target = load_target(folder, runtime.DTYPES[info.dtype])
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        left = (time.perf_counter() - began) / done * (total - done)
        print(f"features: {done}/{total} rows, {left / 60:.1f} min left", file=sys.stderr, flush=True)

    taps = config.taps or target.config.default_taps
    write_features(Path(args.out), packed, target, taps, batch=config.batch_rows, progress=progress)
    print(args.out)
    return 0


def _known_ids(paths: Iterable[Path]) -> set[str]:
    rows = (row for path in paths for row in read_jsonl(path))
    return {str(row["id"]) for row in rows if row.get("id") is not None}


def regenerate(args: argparse.Namespace) -> int:
    """Let the target answer prompts, appending each answer as it ends."""
    info = runtime.start(args.device, args.dtype, args.cache_dir)
    print(info, file=sys.stderr)
    out, folder = Path(args.out), Path(args.target)
    rows = read_jsonl(Path(args.prompts))[args.skip :][: args.limit]
    known = _known_ids(map(Path, args.exclude)) | (set() if args.force else _answered(out))
    config = read_target_config(folder)
    tokenizer = load_tokenizer(folder)
    asked: list[tuple[Request, dict[str, Any]]] = []
    answered = too_long = 0
    for index, row in enumerate(rows):
        where = f"row {args.skip + index + 1} of {args.prompts}"
        name = str(args.skip + index if row.get("id") is None else row["id"])
        if name in known:
            answered += 1
            continue
        messages = prompt_messages(row, where)
        # The first question only: later ones were written in answer to somebody else's reply.
        first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        messages = messages[: first + 1]
        ids = encode_prompt(tokenizer, messages, where)
        if args.max_prompt_tokens is not None and len(ids) > args.max_prompt_tokens:
            too_long += 1
            continue
        request = Request(
            tokens=ids, max_new_tokens=args.max_new_tokens,
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed + index,
        )  # fmt: skip
        check_request(request, config, where)
        asked.append((request, {"id": name, "source": row.get("source"), "messages": messages}))
    skipped = f", {too_long} longer than {args.max_prompt_tokens} tokens left out" if too_long else ""
    print(f"{len(asked)} prompts to answer, {answered} answered before{skipped}", file=sys.stderr)
    if not asked:
        return 0
    # Prompts of like length share a short cache; groups are small enough that an interruption loses little.
    asked.sort(key=lambda item: len(item[0].tokens))
    target = load_target(folder, runtime.DTYPES[info.dtype])
    ends = eos_ids(folder, tokenizer)
    began, tokens, done = time.perf_counter(), 0, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    group = max(args.batch * 16, 64)
    starts = list(range(0, len(asked), group))
    # Long and short groups alternate, so that any prefix of the output is a mix.
    starts = [start for pair in zip(starts, reversed(starts)) for start in pair][: len(starts)]
    # Replaced only now, when nothing can be wrong with the input any more.
    with out.open("w" if args.force else "a", encoding="utf-8") as file:
        for start in starts:
            part = asked[start : start + group]
            for event in decode(target, None, [request for request, _ in part], batch=args.batch, eos=ends):
                if event.answer is None:
                    continue
                finished = event.answer.finish_reason == "stop"
                ids = event.answer.token_ids
                record = part[event.index][1] | {
                    "temperature": args.temperature,
                    "response": decode_text(tokenizer, ids[:-1] if finished else ids),
                    "finished": finished,
                    "n_tokens": len(ids),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                done, tokens = done + 1, tokens + len(ids)
                if done % 20 == 0:
                    rate = tokens / (time.perf_counter() - began)
                    print(
                        f"{done}/{len(asked)} answers, {tokens} tokens, {rate:.0f} tok/s", file=sys.stderr, flush=True
                    )
    print(args.out)
    return 0


def _answered(path: Path) -> set[str]:
    """Ids of the answers in a file whose last line an interruption may have left without its end; cuts that line off.

    Raises:
      InputError: another line does not parse; nothing is cut then.
    """
    if not path.exists() or not path.stat().st_size:
        return set()
    content = path.read_bytes()
    whole, broken = content.rfind(b"\n") + 1, len(content)
    if whole < broken:
        try:
            json.loads(content[whole:])
            with path.open("ab") as file:
                file.write(b"\n")
        except ValueError:
            if not whole:
                raise InputError(
                    expected=f"answers, one JSON object a line, at {path}",
                    found="a single line that does not parse",
                    remedy="Choose another --out, or --force to replace the file.",
                ) from None
            whole_lines = read_lines(content[:whole].decode("utf-8"), str(path))
            with path.open("r+b") as file:
                file.truncate(whole)
            return {str(row["id"]) for row in whole_lines if row.get("id") is not None}
    return _known_ids([path])
