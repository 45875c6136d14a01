"""Where a run's numbers go besides its own log."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle3_jax.errors import InputError
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.loop import train
from eagle3_jax.training.reporting import Journal, check_writers, open_writers, scalars

ENTRY = {"update": 3, "loss": 1.5, "joint": [0.5, None], "held_out": {"accuracy": [0.25]}, "note": "skipped"}
NUMBERS = {"loss": 1.5, "joint/0": 0.5, "held_out/accuracy/0": 0.25}


def test_an_entry_is_flat_numbers():
    assert scalars(ENTRY) == NUMBERS | {"update": 3.0}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for both packages and keeps what they are told."""
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str):
            told.append(("folder", folder))

        def add_scalar(self, name: str, value: float, update: int) -> None:
            told.append((name, value, update))

        def close(self) -> None:
            told.append("closed")

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            told.append((numbers, step))

        def finish(self) -> None:
            told.append("finished")

    def init(**options: Any) -> Run:
        told.append(options)
        return Run()

    boards, wandb = types.ModuleType("tensorboardX"), types.ModuleType("wandb")
    boards.SummaryWriter, wandb.init = SummaryWriter, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", boards)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return told


def test_numbers_reach_tensorboard_and_wandb(packages: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Journal(tmp_path / "metrics.jsonl", open_writers(("tensorboard", "wandb"), tmp_path)) as journal:
        journal.record(ENTRY, "a line")
    assert ("folder", str(tmp_path / "tensorboard")) in packages
    assert {(name, value, 3) for name, value in NUMBERS.items()} <= {
        item for item in packages if isinstance(item, tuple) and len(item) == 3
    }
    assert (NUMBERS, 3) in packages
    assert packages[-2:] == ["closed", "finished"]
    # A run that is resumed goes on under the same name.
    (options,) = (item for item in packages if isinstance(item, dict))
    assert options["id"] == (tmp_path / "wandb-id").read_text()
    open_writers(("wandb",), tmp_path)
    assert packages[-1]["id"] == options["id"]
    assert options["resume"] == "allow"
    assert "a line" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "process"), [(Terminal, 0), (io.StringIO, 0), (Terminal, 1)])
def test_a_terminal_gets_a_bar_from_the_first_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: type[io.StringIO], process: int
):
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    with Journal(tmp_path / "metrics.jsonl", begun=2, updates=4) as journal:
        for update in (3, 4):
            journal.record(ENTRY, f"a line of {update}")
            journal.advance()
    said = err.getvalue()
    assert ("a line of 3" in said) == (process == 0)
    # From where the run was resumed to its end.
    for part in ("| 2/4 ", "| 4/4 "):
        assert (part in said) == (stream is Terminal and process == 0)
    if process == 0 and stream is io.StringIO:
        assert said == "a line of 3\na line of 4\n"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"tensorboardX for --writers tensorboard.*eagle3-jax\[tensorboard\]"):
        check_writers(("tensorboard",))
    # Before the target is read.
    with pytest.raises(InputError, match="tensorboardX"):
        train(TrainConfig(target="absent", output=str(tmp_path), data=("absent",), writers=("tensorboard",)))
