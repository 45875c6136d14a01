"""Two processes on this machine that train as one does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from eagle3_jax import processes
from eagle3_jax.checkpoint import load_target, save_draft
from eagle3_jax.draft import draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.params import is_spec
from eagle3_jax.target import target_specs
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.loop import train
from eagle3_jax.training.setup import packed_rows
from tests import tiny, tiny_tokenizers

ROOT = Path(__file__).parents[1]
CONFIG = """
from eagle3_jax.training.config import TrainConfig
def config():
    return {config!r}
"""


CHILD = """
import dataclasses, json, os, sys, time
from eagle3_jax import cli
from eagle3_jax.training import setup
read = setup.packed_rows
def late(config):
    time.sleep(float(os.environ["LATE"]))
    if os.environ["MISSING"]:
        config = dataclasses.replace(config, data=("absent.jsonl",))
    return read(config)
setup.packed_rows = late
if not os.environ["RECORD"]:
    sys.exit(cli.main(sys.argv[1:]))
from tests.placed import recorded
with recorded() as found:
    code = cli.main(sys.argv[1:])
print(json.dumps({name: sorted(parts) for name, parts in found.items()}))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Eleven rows, two of them held out, in batches of two."""
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_target(num_hidden_layers=2).save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    words = "one two three four five six seven eight nine ten red green blue".split()
    rng = np.random.default_rng(0)
    data = folder / "rows.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for _ in range(11):
            prompt, response = (" ".join(rng.choice(words, count)) for count in (2, 12))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    config = TrainConfig(
        target=str(folder), output="", data=(str(data),), draft_vocab_size=96, taps=(0, 1, 2), row_length=48,
        batch_rows=2, held_out_rows=2, updates=10, schedule=((10, 2),), learning_rate=1e-3, warmup=2, eval_every=5,
        save_every=5, log_every=1, decoded_prompts=0,
    )  # fmt: skip
    assert len(packed_rows(config).tokens) == 11
    return config


def together(
    config: TrainConfig,
    folder: Path,
    count: int = 2,
    *,
    late: float = 0.0,
    missing: bool = False,
    record: bool = False,
) -> list[subprocess.Popen[str]]:
    """Processes of one device each that run the same command; the last one's data may be `late` by some seconds,
    or `missing`; with `record` they print which parts of the weights they read."""
    path = folder / "config.py"
    path.write_text(CONFIG.format(config=config), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", CHILD, "train", str(path), "--cache-dir", ""]
    place = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count)]
    return [
        subprocess.Popen(
            [*command, *place, "--process", str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "LATE": str(late if index == count - 1 else 0),
            "MISSING": "1" if missing and index == count - 1 else "", "RECORD": "1" if record else ""},
        )
        for index in range(count)
    ]  # fmt: skip


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in logged(folder) if "loss" in entry]


@pytest.mark.parametrize(
    ("mesh", "slices"),
    [
        ((2, 1, 1), 1),
        pytest.param((1, 2, 1), 1, marks=pytest.mark.full),
        pytest.param((1, 1, 2), 1, marks=pytest.mark.full),
        pytest.param((1, 1, 1), 2, marks=pytest.mark.full),
    ],
)
def test_two_processes_train_as_one_does(
    settings: TrainConfig, tmp_path: Path, mesh: tuple[int, int, int], slices: int
):
    alone, both = tmp_path / "alone", tmp_path / "both"
    train(dataclasses.replace(settings, output=str(alone)))
    assert len(losses(alone)) == 10
    started = together(dataclasses.replace(settings, output=str(both), mesh=mesh, slices=slices), tmp_path)
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    same_course(both, alone)
    # One of them keeps the log; both say who they are, and what becomes of rows that fill no batch.
    first, second = said
    assert (
        "9 rows to train on, 2 held out; batches run on from one epoch into the next, so that no row is dropped"
        in first
    )
    assert "update 10/10" in first
    assert "update 10/10" not in second
    assert "[process 1] platform cpu" in second


def same_course(one: Path, other: Path) -> None:
    """Two runs with the same losses and the same held-out metrics."""
    np.testing.assert_allclose(losses(one), losses(other), rtol=1e-5)
    held_out = lambda folder: [entry["held_out"]["cross_entropy"] for entry in logged(folder) if "held_out" in entry]
    np.testing.assert_allclose(held_out(one), held_out(other), rtol=1e-5)


@pytest.mark.full
def test_each_process_reads_its_own_parts_of_the_weights(settings: TrainConfig, tmp_path: Path):
    """Of the target and of the draft that the run goes on from."""
    target = load_target(Path(settings.target))
    draft = tiny.draft(target, taps=settings.taps)
    save_draft(tmp_path / "draft", draft)
    config = dataclasses.replace(
        settings, init=str(tmp_path / "draft"), rope_theta=draft.config.rope.theta, updates=4, schedule=((4, 2),)
    )
    train(dataclasses.replace(config, output=str(tmp_path / "alone")))
    started = together(
        dataclasses.replace(config, output=str(tmp_path / "both"), mesh=(1, 2, 1)), tmp_path, record=True
    )
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    same_course(tmp_path / "both", tmp_path / "alone")
    for index, (out, _) in enumerate(said):
        read = json.loads(out.splitlines()[-1])
        for folder, tree in (
            (Path(settings.target), target_specs(target.config)),
            (tmp_path / "draft", draft_specs(draft.config)),
        ):
            for spec in jax.tree.leaves(tree, is_leaf=is_spec):
                half = [[0, size, 1] for size in spec.shape]
                for axis, (name, size) in enumerate(zip(spec.axes, spec.shape)):
                    if name == "embed":
                        half[axis] = [index * size // 2, (index + 1) * size // 2, 1]
                assert read[f"{folder.name}/{spec.name}"] == [half], spec.name


@pytest.mark.full
def test_two_processes_stop_together_and_one_continues(settings: TrainConfig, tmp_path: Path):
    """A signal that reaches one of them stops both at the same update, with a state that one process resumes."""
    both = tmp_path / "both"
    config = dataclasses.replace(settings, output=str(both), updates=2000, schedule=((2000, 2),), mesh=(2, 1, 1))
    started = together(config, tmp_path)
    deadline = time.monotonic() + 240
    while not ((both / "metrics.jsonl").exists() and len(losses(both)) > 2):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in started)
        time.sleep(0.2)
    started[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [130, 130], said
    (saved,) = (both / "checkpoints").iterdir()
    at = int(saved.name)
    assert len(losses(both)) == at
    # The rows of an update follow from its number, so that one process goes on where two were.
    straight = tmp_path / "straight"
    alone = dataclasses.replace(config, mesh=(), save_every=2000, eval_every=2000)
    processes_of_one(dataclasses.replace(alone, output=str(straight)), at + 3)
    processes_of_one(alone, at + 3)
    np.testing.assert_allclose(losses(both), losses(straight), rtol=1e-4)


def processes_of_one(config: TrainConfig, updates: int) -> None:
    """Train to an update, here."""
    from eagle3_jax.training import loop

    make, calls = loop.make_train_step, []

    class Enough(Exception):
        pass

    def made(*args: Any, **options: Any) -> Any:
        step = make(*args, **options)

        def counted(state: Any, *args: Any, **options: Any) -> Any:
            if int(state.update) == updates:
                raise Enough
            calls.append(None)
            return step(state, *args, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", made)
        with pytest.raises(Enough):
            train(config)


@pytest.mark.full
def test_a_process_that_fails_takes_the_other_with_it(settings: TrainConfig, tmp_path: Path):
    """The data are missing for one of them only."""
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), mesh=(2, 1, 1))
    started = together(config, tmp_path, missing=True)
    said = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    assert "a failure in process 1" in said[0]
    assert "no such file" in said[1]


@pytest.mark.full
def test_a_process_whose_data_takes_long_is_waited_for(settings: TrainConfig, tmp_path: Path):
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), mesh=(2, 1, 1), updates=2, schedule=((2, 2),), warmup=1
    )
    started = together(config, tmp_path, late=90)
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert len(losses(tmp_path / "run")) == 2


def test_places_that_are_half_given_are_refused():
    with pytest.raises(InputError, match="--coordinator, --processes and --process together"):
        processes.join("127.0.0.1:1", 2)
    with pytest.raises(InputError, match="HOST:PORT; found localhost"):
        processes.join("localhost", 2, 0)


def test_one_process_agrees_with_itself():
    assert processes.first()
    assert [processes.said_by_first(value) for value in (True, False)] == [True, False]
    vote = processes.Vote(None)
    assert [vote.any_of(value) for value in (True, False)] == [True, False]
    with processes.agreed():
        pass
    with pytest.raises(KeyError), processes.agreed():
        raise KeyError
