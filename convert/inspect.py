"""`python -m convert.inspect DIR`: what a model folder is, and what loads it.

Of a target: its family and shape. Of a draft: its dialect, what it says in canonical terms, and for every engine
whether it computes this draft from this folder, or why not. Only headers and the draft's vocabulary are read, and both
embeddings where --target is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from convert.command import run
from convert.draft import add_reading
from convert.draft_reader import parse_changes, read_draft
from convert.engines import features, loads
from convert.weight_files import read_json
from eagle3_jax.checkpoint import read_target_config

# How a dialect's folder looks to an engine.
FORM = {"speculators": "vllm", "canonical": "canonical", "official": "official", "sglang": "sglang"}


def inspect(options: argparse.Namespace) -> dict[str, Any]:
    """What the folder is. Raises InputError when it is neither a target nor a draft that is known."""
    raw = read_json(options.folder / "config.json")
    if not ({"draft_vocab_size", "speculators_model_type", "taps"} & set(raw)) and "eagle_config" not in raw:
        config = read_target_config(options.folder)
        return {"kind": "target", **dataclasses.asdict(config)}
    changes = parse_changes(options.changes)
    draft = read_draft(options.folder, target=options.target, dialect=options.dialect, changes=changes)
    target = None if options.target is None else read_target_config(options.target)
    default = None if target is None else target.default_taps if target.num_layers > 6 else ()
    found = features(draft.config, default, None if target is None else target.num_layers)
    # SpecForge writes SGLang's form; the other writers' prefixes and keys are read by nothing as they are.
    form = {"specforge": "sglang"}.get(draft.dialect, FORM.get(draft.dialect, draft.dialect))
    return {
        "kind": "draft",
        "dialect": draft.dialect,
        **dataclasses.asdict(draft.config),
        "notes": list(draft.notes),
        "loads": loads(form, found),
    }


def _show(result: dict[str, Any]) -> str:
    lines = [f"{key}: {value}" for key, value in result.items() if key not in ("notes", "loads")]
    lines += [f"note: {note}" for note in result.get("notes", ())]
    for engine, reason in result.get("loads", {}).items():
        lines.append(f"{engine}: {'loads it' if reason is None else reason}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 done, 2 wrong input, 130 interrupted)."""
    parser = argparse.ArgumentParser(prog="python -m convert.inspect", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    add_reading(parser)
    options = parser.parse_args(arguments)

    def command() -> int:
        result = inspect(options)
        print(json.dumps(result) if options.json else _show(result))
        return 0

    return run(command, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
