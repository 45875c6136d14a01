"""`eagle3-jax train`, `plan`, `export` and `eval`."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from eagle3_jax import processes, runtime
from eagle3_jax.checkpoint import load_draft, load_target, read_target_config, save_draft
from eagle3_jax.commands import tree_shape
from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.files import at
from eagle3_jax.hardware import find_topology
from eagle3_jax.params import abstract_params
from eagle3_jax.plan import make_plan, shown
from eagle3_jax.requests import Request, check_request, plan_for
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training import evaluation, loop, reporting
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig, check_row_length, load_config, load_shape, override
from eagle3_jax.training.data import encode_file
from eagle3_jax.training.features import Rows, check_tokens
from eagle3_jax.training.packing import pack
from eagle3_jax.training.step import TrainState, make_optimizer

logger = logging.getLogger(__name__)


def _config(args: argparse.Namespace) -> TrainConfig:
    return override(load_config(Path(args.config)), args.fields)


def _shape(args: argparse.Namespace, config: TrainConfig) -> TargetConfig:
    """The shape of a config's target: as its folder says, or where that is not here, the config file."""
    folder, shape = Path(config.target), load_shape(Path(args.config))
    return read_target_config(folder) if folder.exists() or shape is None else shape


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, while nothing else watches it: the loop does, from its first update."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # outside the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def train(args: argparse.Namespace) -> int:
    """Train a draft; see `eagle3-jax train --help`."""
    with _ended_by_sigterm():
        return _train(args)


def _train(args: argparse.Namespace) -> int:
    config = _config(args)
    config.check()
    if args.distributed or args.coordinator or args.processes is not None or args.process is not None:
        processes.join(args.coordinator, args.processes, args.process)
    info = runtime.start(args.device, "float32", args.cache_dir)
    where = ""
    if jax.process_count() > 1:
        # Notes of all processes may go to one place.
        where = f"[process {jax.process_index()}] "
        logging.basicConfig(format=f"{where}%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
        logging.getLogger("eagle3_jax").setLevel(logging.INFO if processes.first() else logging.WARNING)
    print(f"{where}{info}", file=sys.stderr)
    if config.compute_dtype != "float32":
        print(f"weights and optimiser in float32, activations and products in {config.compute_dtype}", file=sys.stderr)
    if args.dry_run:
        found = make_plan(config, _shape(args, config), find_topology("local"))
        print(shown(found), file=sys.stderr)
        print(json.dumps(found | {"updates": config.updates}))
        return 0
    result = loop.train(config, profile=None if args.profile is None else Path(args.profile))
    summary = {"output": config.output, "updates": result.updates, "held_out": result.evaluation}
    if processes.first():
        print(json.dumps(reporting.finite(summary)))
    return 0 if result.finished else 130


def plan(args: argparse.Namespace) -> int:
    """Say what a run will take on named devices."""
    config = _config(args)
    config.check()
    # Nothing runs: programs are only compiled, and not for this machine.
    runtime.start(args.device if args.topology == "local" else "cpu", "float32", args.cache_dir)
    found = make_plan(config, _shape(args, config), find_topology(args.topology, config.slices))
    print(json.dumps(found) if args.json else shown(found))
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a run's draft as a canonical folder."""
    runtime.start(args.device or "cpu", "float32", "")
    run = RunFolder(at(args.run_folder))
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
    encoded, report = encode_file(at(args.data), tokenizer, max_length=row_length, options=dict(args.template))
    logger.info("%s", report)
    encoded = encoded[: args.limit]
    target = load_target(folder, runtime.DTYPES[info.dtype])
    draft = load_draft(Path(args.draft), target)
    packed = pack(encoded, row_length=row_length, seed=0)
    check_tokens(packed.tokens, target.config.vocab_size)
    rows = Rows(packed)
    drafting: dict[str, Any] = {"draft_length": length} if tree is None else {"tree": tree}
    plan_for(target.config, draft, **drafting)
    forced = evaluation.evaluate_rows(target, draft, rows, length)
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
    promised, real = evaluation.promised_tau(forced, length), evaluation.acceptance(answers, length)
    result: dict[str, Any] = {
        "rows": len(encoded),
        "draft_length": length,
        "teacher_forced": forced | {"tau": promised},
        "decoding": real,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{'':<16}{'tau':>6}  joint acceptance of drafts 1..{length} | conditional")
        for name in ("teacher_forced", "decoding"):
            part = result[name]
            ratios = " | ".join(reporting.shown(part[key]) for key in ("joint", "conditional"))
            print(f"{name:<16}{part['tau'] or float('nan'):>6.2f}  {ratios}")
    evaluation.warn_of_gap(promised, real["tau"])
    return 0
