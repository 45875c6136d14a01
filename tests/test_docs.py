"""What the documentation tells people to type: every command parses, every module exists, the snippet runs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from eagle3_jax.cli import _fields, build_parser
from eagle3_jax.training.config import TrainConfig, load_config, override

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "docs/*.md", "checkpoints/*/README.md", "configs/*.py", "bench/*.py")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))


def commands(start: str) -> list[tuple[str, list[str]]]:
    """Lines of code that begin with `start`, continued ones joined: (page, words)."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        inline = re.findall(rf"`({start} [^`]+)`", re.sub(r"\s+", " ", text))
        blocks = re.findall(rf"^(?:    )?({start} .+)$", text, flags=re.MULTILINE)
        for line in [*inline, *blocks]:
            found.append((page.name, shlex.split(line.split(" # ")[0].rstrip(".,;"))[len(start.split()) :]))
    return found


@pytest.mark.parametrize(("page", "words"), commands("eagle3-jax"), ids=lambda value: str(value)[:60])
def test_every_command_of_the_documentation_parses(page: str, words: list[str]) -> None:
    if len(words) < 3:
        return  # the name of a command, not a call of it
    parser = build_parser()
    args, rest = parser.parse_known_args(words)
    if getattr(args, "takes_fields", False):
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        fields = _fields(parser, rest)
        assert set(fields) <= known
        assert (ROOT / args.config).exists()
        override(load_config(ROOT / args.config), fields).check()
    else:
        assert not rest


def test_the_examples_of_the_help_are_valid() -> None:
    (subcommands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    examples = [sub.epilog for sub in subcommands.choices.values() if sub.epilog]
    assert len(examples) >= 2
    for example in examples:
        args, rest = build_parser().parse_known_args(shlex.split(example.removeprefix("Example: eagle3-jax ")))
        if getattr(args, "takes_fields", False):
            override(load_config(ROOT / args.config), _fields(build_parser(), rest)).check()
        else:
            assert not rest


def test_there_are_commands_to_check() -> None:
    pages = {page for page, words in commands("eagle3-jax") if len(words) >= 3}
    assert {"README.md", "smollm2_135m.py"} <= pages


@pytest.mark.parametrize(("page", "words"), commands("python -m"), ids=lambda value: str(value)[:60])
def test_every_module_that_the_documentation_runs_exists(page: str, words: list[str]) -> None:
    assert importlib.util.find_spec(words[0]) is not None


@pytest.mark.smollm2
@pytest.mark.skipif(
    not (ROOT / "models/SmolLM2-135M-Instruct").exists(), reason="`make target` brings the model the snippet loads"
)
def test_the_readmes_snippet_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert sum(len(eval(line)) for line in printed) == 32
