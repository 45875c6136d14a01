"""`python -m convert.draft SRC DST --to FORM`: an EAGLE-3 draft of any dialect to the form that an engine loads.

SRC is a folder that the official code, SpecForge, SGLang, speculators (vLLM), Automodel, Model-Optimizer or this
library wrote. DST becomes a folder for this library (canonical), SGLang (sglang), vLLM (vllm) or the official code
(official); llama.cpp's converter takes the canonical one. The weights stay bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convert.command import run
from convert.draft_dialects import DIALECTS
from convert.draft_reader import parse_changes, read_draft
from convert.draft_writer import FORMS, write_draft
from convert.llama_folder import DTYPES
from eagle3_jax.files import check_destination


def add_reading(parser: argparse.ArgumentParser) -> None:
    """The options that say how a draft is to be read."""
    parser.add_argument("--target", metavar="DIR", type=Path, help="folder of the model that the draft was made for")
    parser.add_argument("--dialect", choices=sorted(DIALECTS), help="who wrote SRC; default: recognised")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="changes",
        help="a key of SRC's config to read otherwise, for example rope_theta=10000 or taps=[2,16,29]",
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show a traceback with every error")


def convert(
    source: Path,
    destination: Path,
    form: str,
    *,
    target: Path | None = None,
    dialect: str | None = None,
    changes: dict[str, object] | None = None,
    verifier: str | None = None,
    dtype: str | None = None,
    force: bool = False,
) -> list[str]:
    """Read the draft at `source`, write it to `destination` in a form of `draft_writer.FORMS`; return notes.

    Raises:
      InputError: see `read_draft` and `write_draft`.
    """
    check_destination(destination, source, force=force)
    draft = read_draft(source, target=target, dialect=dialect, changes=changes)
    notes = write_draft(draft, destination, form, target=target, verifier=verifier, dtype=dtype, force=force)
    return [*draft.notes, *notes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m convert.draft", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument("--to", choices=sorted(FORMS), required=True, dest="form", help="the form to write")
    parser.add_argument("--verifier", metavar="NAME", help="with --to vllm: the target's name, as the engine finds it")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="type of the weights; default: as they are")
    parser.add_argument("--force", action="store_true", help="replace DST if it is a model folder")
    add_reading(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 done, 2 wrong input, 130 interrupted)."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        notes = convert(
            options.source, options.destination, options.form, target=options.target, dialect=options.dialect,
            changes=parse_changes(options.changes), verifier=options.verifier, dtype=options.dtype, force=options.force,
        )  # fmt: skip
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        print(options.destination)
        return 0

    return run(command, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
