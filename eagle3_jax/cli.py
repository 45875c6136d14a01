"""The command line: parses, starts the runtime, calls a command, turns errors into exit codes.

Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 2 the input is wrong, 1 a fault of ours,
130 interrupted with a state that can be resumed.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from eagle3_jax import commands, runtime
from eagle3_jax.attention import BACKENDS
from eagle3_jax.errors import InputError
from eagle3_jax.prompts import FORMS as PROMPTS
from eagle3_jax.training import commands as training
from eagle3_jax.training import data_commands as data_room
from eagle3_jax.training.regenerate import regenerate as regenerate_command
from eagle3_jax.training.rows import FORMS as ROWS

_DATA = "Data files are jsonl, local or gs://; each line is in one of the forms " + " | ".join(ROWS) + "."


class _Parser(argparse.ArgumentParser):
    """Answers bad arguments as bad input of any other kind."""

    def error(self, message: str) -> NoReturn:
        raise InputError(
            expected=f"arguments as `{self.prog} --help` lists them", found=message, remedy="Correct the command."
        )


def _integer(
    parser: argparse._ActionsContainer, flag: str, least: int, *, listed: bool = False, **options: Any
) -> None:
    """Add a flag that takes an integer of at least `least`, or with `listed` several between commas."""

    def convert(text: str) -> Any:
        values = [int(item) for item in text.split(",")] if listed else [int(text)]
        if min(values) < least:
            raise argparse.ArgumentTypeError(f"{text}, which must be at least {least}")
        return values if listed else values[0]

    convert.__name__ = "list of integers" if listed else "integer"  # argparse names the type in its message
    parser.add_argument(flag, type=convert, **options)


def _several(parser: argparse.ArgumentParser, flag: str, **options: Any) -> None:
    """Add a flag that takes several values, at once or by being repeated."""
    parser.add_argument(flag, nargs="+", action="extend", default=[], **options)


def _tree(parser: argparse.ArgumentParser, *, lookup: bool = True) -> None:
    group = parser.add_argument_group("a tree, instead of a chain")
    _integer(group, "--tree-nodes", 2, metavar="M", help="nodes verified a round, the last decided token included")
    _integer(group, "--tree-depth", 1, metavar="W", help="drafted levels")
    _integer(group, "--tree-top-k", 1, metavar="K", help="nodes expanded in each level, and children of each")
    _integer(
        group, "--tree-parents", 0, listed=True, metavar="P,P,...",
        help="a fixed tree instead of a dynamic one: the parent of node 1, of node 2, ...; 0 is the root",
    )  # fmt: skip
    if lookup:
        _integer(
            group, "--lookup-nodes", 1, metavar="L",
            help="also look up, in the text so far, a branch of L tokens to verify",
        )  # fmt: skip


def _temperatures(text: str) -> list[float]:
    return [float(item) for item in text.split(",")]


def _common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("common")
    group.add_argument(
        "--device", choices=sorted(runtime.PLATFORMS), help="refused when absent; default: what jax finds"
    )
    group.add_argument("--cache-dir", help="folder of compiled programs; '' keeps none; default: a private one")
    group.add_argument("--debug", action="store_true", help="show tracebacks")


def _dtype(parser: argparse.ArgumentParser, default: str = "float32 on a CPU, else bfloat16") -> None:
    parser.add_argument("--dtype", choices=sorted(runtime.DTYPES), help=f"default: {default}")


def _attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention", choices=BACKENDS, default="einsum",
        help="who computes the target's attention; cudnn needs an NVIDIA GPU and bfloat16 (default einsum)",
    )  # fmt: skip


def _sampling(parser: argparse.ArgumentParser) -> None:
    _integer(parser, "--max-new-tokens", 1, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    _integer(parser, "--batch", 1, default=1, help="rows decoded together")


def _turns(text: str) -> int | None:
    """A number of at least 1, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}, which is neither all nor a number of at least 1")
    return int(text)


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as in Python or else a text."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r}, which is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = _Parser(
        prog="eagle3-jax", description="EAGLE-3 speculative decoding in JAX: train drafts, decode with them, measure."
    )
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = subcommands.add_parser(
        "generate",
        help="answer prompts, plain or with a draft",
        description="Answer prompts. Without --draft: plain decoding, one token a pass. With it: EAGLE-3, same text.",
        epilog="Example: eagle3-jax generate --target models/SmolLM2-135M-Instruct --draft "
        'checkpoints/smollm2-135m-instruct-eagle3 --prompt "Why is the sky blue?" --stream',
    )
    generate.add_argument("--target", required=True, help="HuggingFace LLaMA folder")
    generate.add_argument("--draft", help="canonical draft folder, or a small model with the target's tokenizer")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt")
    source.add_argument("--prompts", metavar="FILE", help=f"jsonl: {PROMPTS}; of `turns` the first is asked")
    generate.add_argument(
        "--method",
        choices=("plain", "sps", "lookup", "eagle3"),
        help="sps: a small model drafts; lookup: the text itself; default: what --draft is, else plain",
    )
    _integer(generate, "--draft-length", 1, help=f"tokens drafted a round in a chain (default {commands.DRAFT_LENGTH})")
    _tree(generate)
    _sampling(generate)
    _several(generate, "--stop", metavar="TEXT", help="end the answer before TEXT")
    generate.add_argument("--ignore-eos", action="store_true")
    generate.add_argument("--logprobs", action="store_true", help="the target's log-probability of each token (--json)")
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.add_argument("--stream", action="store_true", help="print text as it is decided (one prompt at a time)")
    generate.add_argument("--json", action="store_true", help="one JSON object a line")
    _dtype(generate)
    _attention(generate)
    generate.set_defaults(run=commands.generate)

    train = subcommands.add_parser(
        "train",
        help="train a draft",
        description="Train a draft as a config file says; resumes by itself when the output folder holds a run. Every "
        "field of the config can be overridden: --learning_rate 2e-4 --schedule '((100,1),(50,7))'. " + _DATA,
        epilog="Example: eagle3-jax train configs/smollm2_135m.py --output runs/mine --updates 500 "
        "--schedule '((400,1),(100,7))'",
    )
    train.add_argument("config", help="a Python file under configs/")
    train.add_argument(
        "--dry-run", action="store_true", help="compile without weights or data, print the bytes that a run holds, stop"
    )
    train.add_argument("--profile", metavar="DIR", help="write a jax.profiler trace of a few early updates")
    group = train.add_argument_group("several processes, which all run the same command")
    group.add_argument(
        "--distributed", action="store_true", help="join the others where the cluster says how (Cloud TPU, SLURM, MPI)"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, with --processes and --process")
    _integer(group, "--processes", 1, metavar="N", help="how many there are")
    _integer(group, "--process", 0, metavar="I", help="which this one is, from 0")
    train.set_defaults(run=training.train, takes_fields=True)

    plan = subcommands.add_parser(
        "plan",
        help="what a run will take on named devices: memory, operations, time",
        description="Compile a config's update, the target's pass and a round of decoding for devices that need not be "
        "here, and say what they take. Takes the fields of the config as `train` does.",
    )
    plan.add_argument("config", help="Python file with a function config() -> TrainConfig")
    plan.add_argument(
        "--topology", default="local",
        help="devices of one slice or node: local (default); a TPU slice such as v5e:2x4, v5p:2x2x4 or v6e:4x4 (needs "
        "libtpu, not a TPU); or GPUs, such as h100:8, which are estimated by arithmetic",
    )  # fmt: skip
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=training.plan, takes_fields=True)

    export = subcommands.add_parser("export", help="write a run's draft as a canonical folder")
    export.add_argument("run_folder", metavar="RUN", help="output folder of a training run")
    export.add_argument("destination", metavar="DST")
    export.add_argument("--step", default="best", help="an update number, best (default) or latest")
    export.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    export.add_argument("--force", action="store_true", help="replace DST")
    export.set_defaults(run=training.export)

    evaluate = subcommands.add_parser("eval", help="teacher-forced acceptance of a draft beside real decoding")
    evaluate.add_argument("--target", required=True)
    evaluate.add_argument("--draft", required=True)
    evaluate.add_argument("--data", required=True, help="jsonl with answers, as for training: " + " | ".join(ROWS))
    _integer(evaluate, "--limit", 1, default=32, help="rows used (default 32)")
    _integer(evaluate, "--draft-length", 1, help="tokens drafted a round in a chain (default 5, or none with a tree)")
    _tree(evaluate, lookup=False)
    _integer(evaluate, "--max-new-tokens", 1, default=128)
    _integer(evaluate, "--row-length", 3, help="cut rows there (default 512, or the target's context)")
    evaluate.add_argument("--json", action="store_true")
    _dtype(evaluate)
    evaluate.set_defaults(run=training.evaluate)

    bench = subcommands.add_parser(
        "bench",
        help="methods side by side on tasks",
        description="Answer the prompts of tasks with several methods in turn and compare speed, tau and output. "
        "Writes results.json and report.md to --out.",
    )
    bench.add_argument("--target", required=True)
    _several(bench, "--draft", metavar="NAME=DIR")
    _several(
        bench, "--tasks", required=True, metavar="NAME=FILE", help="prompts, as for generate; of `turns` the first"
    )
    bench.add_argument(
        "--methods", default="plain,eagle3", help="out of plain,eagle3,sps,lookup,hf (default plain,eagle3)"
    )
    bench.add_argument("--temperatures", type=_temperatures, default=[0.0], help="comma-separated (default 0)")
    _integer(
        bench, "--draft-length", 1, listed=True,
        help=f"of chains, comma-separated; each is a row (default {commands.DRAFT_LENGTH}, or none with a tree)",
    )  # fmt: skip
    _tree(bench)
    bench.add_argument("--sweep", action="store_true", help="try a list of chains and trees, and name the fastest")
    _integer(
        bench, "--batch", 1, listed=True, default=[1],
        help="prompts decoded together, comma-separated; each is a run of its own (default 1)",
    )  # fmt: skip
    _integer(bench, "--limit", 1, help="prompts of each task")
    _integer(bench, "--max-new-tokens", 1, default=128)
    bench.add_argument("--out", required=True)
    _dtype(bench)
    _attention(bench)
    bench.set_defaults(run=commands.bench)

    data = subcommands.add_parser("data", help="prepare training data").add_subparsers(dest="what", required=True)
    regenerate = data.add_parser(
        "regenerate",
        help="let the target answer prompts",
        description="Let the target write answers to prompts, which is what a draft learns best from. Interrupted runs "
        "continue: rows whose id is in the output already are not asked again. Answers in the rows are left out.",
    )
    regenerate.add_argument("prompts", help=f"jsonl: {PROMPTS}")
    regenerate.add_argument("--target", required=True)
    regenerate.add_argument("--out", required=True, help="jsonl of answers")
    _integer(regenerate, "--skip", 0, default=0, help="prompts to leave out at the beginning")
    _integer(regenerate, "--limit", 1, help="prompts to take after that")
    _several(regenerate, "--exclude", metavar="FILE", help="leave out ids found in FILE")
    _integer(
        regenerate, "--max-prompt-tokens", 1,
        help="leave out longer prompts, which leave little room in a row; a later turn's ends its conversation",
    )  # fmt: skip
    regenerate.add_argument(
        "--turns", type=_turns, default=1, metavar="N",
        help="answer the first N questions of each conversation, or all, each after the target's own answers to those "
        "before; an answer cut short ends the conversation (default 1)",
    )  # fmt: skip
    _integer(
        regenerate, "--tensor", 1, default=1, metavar="N",
        help="devices that split the target's heads, feed-forward and vocabulary, if it does not fit one (default 1)",
    )  # fmt: skip
    regenerate.add_argument("--force", action="store_true", help="start over, replacing the output")
    _sampling(regenerate)
    _dtype(regenerate)
    regenerate.set_defaults(run=regenerate_command)
    features = data.add_parser(
        "features",
        help="write the target's features of a config's data to disk",
        description="Run the target over the data of a config once, so that training need not. Takes the fields of the "
        "config as `train` does.",
    )
    features.add_argument("config")
    features.add_argument("--out", required=True, help="features folder; what is there of the same features continues")
    features.add_argument("--force", action="store_true", help="start over, replacing the features in the folder")
    _dtype(features, "bfloat16, in which features are stored")
    features.set_defaults(run=data_room.features, takes_fields=True)
    look = data.add_parser(
        "inspect",
        help="show one row with its supervised tokens marked",
        description="Show a row of a data file as a draft will be trained on it, supervised tokens between marks, and "
        "how many rows were read, kept and dropped, by reason and line. " + _DATA,
    )
    look.add_argument("data", help="jsonl, as for training")
    _integer(look, "--row", 0, default=0, help="which of the kept rows (default 0)")
    look.add_argument("--json", action="store_true", help="tokens and spans instead of text")
    look.set_defaults(run=data_room.inspect)
    count = data.add_parser(
        "vocab",
        help="what draft vocabularies of several sizes cover",
        description="Count the supervised tokens of data files, say what share of them the most frequent ones cover, "
        "and write the largest vocabulary asked for. The target is not run. " + _DATA,
    )
    count.add_argument("data", nargs="+", help="jsonl, as for training")
    _integer(
        count, "--sizes", 1, listed=True, metavar="C,C,...",
        help="default: " + ", ".join(map(str, data_room.SIZES)) + ", as far as the target's vocabulary goes, or all of "
        "a smaller one",
    )  # fmt: skip
    count.set_defaults(run=data_room.vocab)
    for sub in (look, count):
        sub.add_argument("--target", required=True, help="its tokenizer and config; no weights are read")
        sub.add_argument(
            "--out",
            metavar="FILE",
            help="write there instead of to standard output"
            if sub is look
            else "write the largest of the vocabularies there",
        )
        sub.add_argument("--force", action="store_true", help="replace FILE")
        _integer(sub, "--row-length", 3, help="cut rows there (default: the target's context)")
        sub.add_argument("--last-turn-only", action="store_true", help="supervise the last reply alone")

    for sub in (generate, evaluate, bench, regenerate, look, count):
        sub.add_argument(
            "--template", nargs="+", action="extend", default=[], type=_option, metavar="NAME=VALUE",
            help="variables for the chat template, e.g. enable_thinking=False",
        )  # fmt: skip
    for sub in (generate, train, plan, export, evaluate, bench, regenerate, features, look, count):
        _common(sub)
    return parser


def _fields(parser: argparse.ArgumentParser, rest: Sequence[str]) -> dict[str, str]:
    """`--field value` pairs that the parser does not know: overrides of the config."""
    fields: dict[str, str] = {}
    items = list(rest)
    while items:
        name = items.pop(0)
        if not name.startswith("--"):
            parser.error(f"unexpected argument {name!r}")
        name, sign, value = name[2:].partition("=")
        if not sign:
            if not items:
                parser.error(f"--{name} needs a value")
            value = items.pop(0)
        fields[name.replace("-", "_")] = value
    return fields


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = build_parser()
    debug = False
    # force: libraries imported above (absl) have put their own handler on the root.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("eagle3_jax").setLevel(logging.INFO)
    try:
        args, rest = parser.parse_known_args(arguments)
        debug = args.debug
        if rest and not getattr(args, "takes_fields", False):
            parser.error(f"unrecognised arguments: {' '.join(rest)}")
        args.fields = _fields(parser, rest)
        return int(args.run(args))
    except InputError as error:
        if debug:
            traceback.print_exc()
        print(f"eagle3-jax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eagle3-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone. Python would fail once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 130
    except OSError as error:
        if debug:
            traceback.print_exc()
        refusal = InputError(
            expected="files and folders that can be read and written",
            found=str(error),
            remedy="Check the path, its permissions and the free space.",
        )
        print(f"eagle3-jax: {refusal}", file=sys.stderr)
        return 2
    except Exception as error:
        if debug:
            traceback.print_exc()
        if runtime.looks_like_full_memory(error):
            print(f"eagle3-jax: {runtime.full_memory(str(error))}", file=sys.stderr)
            return 2
        print(f"eagle3-jax: a fault of ours: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
