"""Whole training runs on a tiny target: an interrupted run continues bit for bit however it ended, what a run leaves
on disk, and what it says about itself.

The programs are compiled once for the whole file (a persistent cache of its own), and the straight run that others are
compared with is made once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from eagle3_jax.checkpoint import fingerprint, load_target, save_draft
from eagle3_jax.errors import InputError
from eagle3_jax.files import at
from eagle3_jax.training import loop
from eagle3_jax.training import setup as training_setup
from eagle3_jax.training.checkpoint import RunFolder, abstract_state
from eagle3_jax.training.config import TrainConfig, load_config
from eagle3_jax.training.evaluation import evaluate, held_out_prompts
from eagle3_jax.training.features import FeatureRows, Rows, rows_mark, write_features
from eagle3_jax.training.loop import Result, train
from eagle3_jax.training.reporting import finite
from eagle3_jax.training.row_files import rows_file
from eagle3_jax.training.setup import packed_rows, prepare
from eagle3_jax.training.step import TrainState, make_eval_step
from tests import tiny, tiny_tokenizers

TAPS = (0, 1, 2)
UPDATES, BATCH = 20, 2
TRAINED_ROWS = 20  # 10 updates are an epoch
CHILD = """
import os, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.loop import train

rename = os.rename
def killed_before(source, destination, **options):
    if Path(destination).name == "20":  # all of this checkpoint is written, under another name
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, destination, **options)
os.rename = killed_before
train(eval(sys.argv[1]))
"""


COMMAND = """
import sys, time
from eagle3_jax import cli
from eagle3_jax.training import loop

def slow(*args, **options):
    print("loading", file=sys.stderr, flush=True)
    for _ in range(600):
        time.sleep(0.1)

if sys.argv[1] == "loading":
    loop.prepare = slow
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every run makes its programs anew; they are compiled once."""
    folder = tmp_path_factory.mktemp("programs")
    names = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a target of two layers with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_target(num_hidden_layers=2).save_pretrained(folder)
    tokenizer = tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300)
    assert len(tokenizer) <= tiny.T0["vocab_size"]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """20 updates of two steps; rows of 48 tokens, one document each."""
    words = "one two three four five six seven eight nine ten red green blue".split()
    rng = np.random.default_rng(0)
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for _ in range(24):
            prompt, response = (" ".join(rng.choice(words, count)) for count in (2, 12))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    config = TrainConfig(
        target=str(target), output="", data=(str(data),), draft_vocab_size=96, taps=TAPS, row_length=48,
        batch_rows=BATCH, updates=UPDATES, schedule=((UPDATES, 2),), learning_rate=1e-3, warmup=2, eval_every=10,
        save_every=10, log_every=1, decoded_prompts=0,
    )  # fmt: skip
    rows = packed_rows(config).tokens.shape[0]
    assert rows == 24
    # Three rows held out, which is no multiple of the batch, and one left over from an epoch of ten updates.
    return dataclasses.replace(config, held_out_rows=rows - TRAINED_ROWS)


def saved(folder: Path, step: int | str = "latest") -> TrainState:
    """A checkpoint, without knowing what is in it."""
    run = RunFolder(folder)
    try:
        return run.manager.restore(run.latest() if step == "latest" else step)
    finally:
        run.close()


def steps_on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_same_run(folder: Path, other: Path) -> None:
    """The same weights and optimiser, bit for bit, and the same log but for the times."""
    pairs = list(zip(jax.tree.leaves(saved(folder)), jax.tree.leaves(saved(other))))
    assert len(pairs) > 40
    for one, two in pairs:
        np.testing.assert_array_equal(one, two)
    timeless = lambda entry: {name: value for name, value in entry.items() if "second" not in name}
    assert [*map(timeless, logged(folder))] == [*map(timeless, logged(other))]


@pytest.fixture(scope="module")
def straight(settings: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, train(dataclasses.replace(settings, output=str(folder)))


def test_a_run_learns_and_says_so(straight: tuple[Path, Result], settings: TrainConfig):
    folder, result = straight
    assert result.finished
    assert result.updates == UPDATES
    entries = logged(folder)
    updates = [entry for entry in entries if "loss" in entry]
    assert [entry["update"] for entry in updates] == [*range(1, UPDATES + 1)]
    rates = [float(settings.learning_rates()(update)) for update in range(UPDATES)]
    np.testing.assert_allclose([entry["learning_rate"] for entry in updates], rates, rtol=1e-5)
    assert updates[-1]["learning_rate"] == pytest.approx(settings.final_learning_rate, rel=1e-4)
    for entry in updates:
        assert entry["clipped"] == float(entry["gradient_norm"] > settings.clip)  # every update is logged
        assert entry["skipped"] == 0
        assert entry["tokens_per_second"] > 0
        assert entry["loss"] == pytest.approx(entry["cross_entropy"][0] + 0.8 * entry["cross_entropy"][1], rel=1e-5)
        assert entry["joint"][0] == entry["conditional"][0]
    assert np.mean([entry["loss"] for entry in updates[-5:]]) < np.mean([entry["loss"] for entry in updates[:5]])
    held_out = [entry for entry in entries if "held_out" in entry]
    assert [entry["update"] for entry in held_out] == [10, 20]
    assert held_out[-1]["held_out"] == result.evaluation
    assert len(result.evaluation["joint"]) == 2


def test_a_checkpoint_holds_the_draft_and_nothing_of_the_target(straight: tuple[Path, Result], settings: TrainConfig):
    folder, _ = straight
    state = saved(folder)
    assert sorted(state) == ["opt_state", "params", "skipped", "update"]
    params = state["params"]
    assert {name: leaf.shape for name, leaf in params.items() if leaf is not None} == {
        "fc": (64, 192), "embed_norm": (64,), "feature_norm": (64,), "q": (4, 16, 128), "k": (2, 16, 128),
        "v": (2, 16, 128), "o": (64, 4, 16), "post_norm": (64,), "gate": (128, 64), "up": (128, 64), "down": (64, 128),
        "norm": (64,), "lm_head": (96, 64),
    }  # fmt: skip
    size = lambda tree: sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
    assert size(state["opt_state"]) == 2 * size(params) + 2  # two moments; a count for Adam and one for the schedule
    # An update donates the state: nothing of the target may have gone with it, and nothing of it is trained.
    assert (folder / "run.json").stat().st_size < 20_000


def test_a_killed_run_continues_bit_for_bit(
    straight: tuple[Path, Result], settings: TrainConfig, cache: Path, tmp_path: Path
):
    # Killed in the middle of its second save, ten updates after the first, which fell on the border of an epoch.
    output = tmp_path / "run"
    config = dataclasses.replace(settings, output=str(output))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, repr(config), str(cache)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps_on_disk(output) == ["10", "20.orbax-checkpoint-tmp"]
    assert logged(output)[-1]["update"] == 20
    run = RunFolder(output)
    assert run.latest() == 10
    run.close()
    # A reader leaves a half-written checkpoint alone (its writer may be at work); the next training run clears it.
    assert len(steps_on_disk(output)) == 2
    with (output / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"update": 21, "los')
    result = train(config)
    assert result == straight[1]
    assert steps_on_disk(output) == ["10", "20"]
    assert_same_run(output, straight[0])


def at_update(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Do something while an update, counted from 1, is computed."""
    make, calls = loop.make_train_step, []

    def made(*args: Any, **options: Any) -> Any:
        step = make(*args, **options)

        def counted(*args: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) == number:
                act()
            return step(*args, **options)

        return counted

    monkeypatch.setattr(loop, "make_train_step", made)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_an_interrupted_run_saves_and_continues_bit_for_bit(
    straight: tuple[Path, Result], settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    config = dataclasses.replace(settings, output=str(tmp_path / "run"))
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_update(patch, 7, lambda: os.kill(os.getpid(), number))
        result = train(config)
    assert result == Result(updates=7, finished=False, evaluation={})
    assert signal.getsignal(number) is handler
    assert steps_on_disk(tmp_path / "run") == ["7"]
    assert train(config) == straight[1]
    assert_same_run(tmp_path / "run", straight[0])
    assert steps_on_disk(tmp_path / "run") == ["10", "20"]


@pytest.mark.parametrize("moment", ["loading", "training"])
def test_sigterm_ends_the_command_with_130(
    settings: TrainConfig, straight: tuple[Path, Result], cache: Path, tmp_path: Path, moment: str
):
    """Also before the loop watches signals: then there is nothing to save."""
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), updates=5000, schedule=((5000, 2),))
    path = tmp_path / "config.py"
    path.write_text(
        "from eagle3_jax.training.config import TrainConfig\n"
        "def config():\n"
        f"    return {config!r}\n",
        encoding="utf-8",
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, moment, "train", str(path), "--cache-dir", str(cache)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(("update 1/", "loading")):
            break
    process.send_signal(signal.SIGTERM)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, [*said, rest]
    assert "Traceback" not in rest
    if moment == "loading":
        assert "interrupted" in rest
        assert not (tmp_path / "run").exists()
        return
    (step,) = steps_on_disk(tmp_path / "run")
    assert logged(tmp_path / "run")[-1]["update"] == json.loads(out)["updates"] == int(step) < 5000


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_in_a_save_leaves_no_more_than_is_kept(settings: TrainConfig, cache: Path, tmp_path: Path, moment: str):
    """One checkpoint and the best are kept; killed as the fourth save takes its name, and right after."""
    output = tmp_path / "run"
    config = dataclasses.replace(
        settings, output=str(output), updates=12, schedule=((12, 2),), keep=1, save_every=2, eval_every=2
    )
    child = CHILD.replace('"20"', '"8"')
    if moment == "after":
        child = child.replace("        os.kill", "        rename(source, destination, **options)\n        os.kill")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", child, repr(config), str(cache)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole = [name for name in steps_on_disk(output) if "tmp" not in name]
    assert len(whole) <= config.keep + 2
    run = RunFolder(output)
    assert run.latest() == max(map(int, whole)) == (6 if moment == "before" else 8)
    run.close()
    assert train(config).finished
    joint = {entry["update"]: sum(entry["held_out"]["joint"]) for entry in logged(output) if "held_out" in entry}
    # The later of equals.
    best = max(joint, key=lambda update: (joint[update], update))
    assert steps_on_disk(output) == sorted({str(best), "12"})
    run = RunFolder(output)
    assert (run.latest(), run.manager.best_step()) == (12, best)
    run.close()


@pytest.mark.full
def test_ten_kills_at_any_moment_cost_nothing(settings: TrainConfig, cache: Path, tmp_path: Path):
    """60 updates, saved every third; killed somewhere between the first update and the last, also while saving."""
    config = dataclasses.replace(
        settings, updates=60, schedule=((60, 2),), save_every=3, eval_every=20, output=str(tmp_path / "straight")
    )
    began = time.monotonic()
    train(config)
    lasts = time.monotonic() - began
    child = CHILD.split("rename = ")[0] + "train(eval(sys.argv[1]))\n"
    rng, killed, torn = np.random.default_rng(0), [], 0
    for attempt in range(10):
        output = tmp_path / f"run{attempt}"
        one = dataclasses.replace(config, output=str(output))
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", child, repr(one), str(cache)], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("update 1/"):
                break
        time.sleep(float(rng.uniform(0, lasts)))
        process.kill()
        process.communicate()
        folder = output / "checkpoints"
        torn += folder.exists() and any("tmp" in name for name in steps_on_disk(output))
        killed.append(logged(output)[-1]["update"] if process.returncode == -signal.SIGKILL else 60)
        assert train(one).finished
        assert_same_run(output, tmp_path / "straight")
        assert steps_on_disk(output) == steps_on_disk(tmp_path / "straight")
    print("killed after", killed, "of which while saving", torn)
    assert len(set(killed)) > 3


def test_held_out_prompts_are_decoded_for_real(
    settings: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), updates=1, schedule=((1, 3),), warmup=0, decoded_prompts=3,
        final_learning_rate=1e-3,
    )  # fmt: skip
    found = train(config).evaluation
    assert found["draft_length"] == 3
    assert found["promised_tau"] == pytest.approx(1 + sum(found["joint"]))
    assert 1 <= found["decoding_tau"] <= 4
    assert f"tau of a chain of 3: {found['promised_tau']:.2f} promised, {found['decoding_tau']:.2f} in decoding" in (
        capsys.readouterr().err
    )
    setup = prepare(dataclasses.replace(config, output=str(tmp_path / "other")), RunFolder(tmp_path / "other"))
    requests = held_out_prompts(setup, 3, ())
    assert len(requests) == 3
    rows = [setup.rows[int(index)] for index in setup.held_out]
    for request, row in zip(requests, rows):
        start = int((row["spans"] > 0).argmax())
        assert request.tokens == tuple(row["tokens"][:start].tolist())
    assert len(held_out_prompts(setup, 99, ())) == len(rows)  # one document a row


@pytest.mark.parametrize("promised", [1.0, 2.0])
def test_a_gap_between_promised_and_real_decoding_is_warned_about(
    settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    promised: float,
):  # fmt: skip
    monkeypatch.setattr(loop, "promised_tau", lambda *_: promised)
    monkeypatch.setattr(loop, "decode_held_out", lambda *_: 1.2)
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), updates=1, schedule=((1, 2),), warmup=0,
                                 decoded_prompts=1, final_learning_rate=1e-3)  # fmt: skip
    found = train(config).evaluation
    assert (found["promised_tau"], found["decoding_tau"]) == (promised, 1.2)
    warned = "real decoding accepts 40 % less than teacher forcing promises" in caplog.text
    assert warned == (promised == 2.0)


def test_rows_are_read_ahead_in_the_order_of_the_updates(
    settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = dataclasses.replace(settings, output=str(tmp_path / "run"))
    training = loop._Training(config, None)
    seen = []
    with closing(training.loader(0)) as straight, closing(training.loader(7)) as resumed:
        for update in range(10):
            rows = next(straight)
            if update >= 7:
                jax.tree.map(np.testing.assert_array_equal, rows[0].parts, next(resumed)[0].parts)
            expected = [
                training.setup.rows[cast(int, training.order[update * BATCH + place])] for place in range(BATCH)
            ]
            np.testing.assert_array_equal(rows[0].parts[0, BATCH]["tokens"], [row["tokens"] for row in expected])
            seen += rows[0].parts[0, BATCH]["tokens"].tolist()
    training.folder.close()
    # Ten updates are an epoch: every row that is trained on, once.
    epoch = [training.setup.rows[int(index)]["tokens"].tolist() for index in training.setup.train_order]
    assert sorted(seen) == sorted(epoch)
    # While an update runs, the rows of the next are read.
    read, second = loop.read_rows, threading.Event()
    calls = []

    def slow(*args: Any) -> Any:
        calls.append(threading.current_thread())
        if len(calls) == 2:
            second.set()
        return read(*args)

    monkeypatch.setattr(loop, "read_rows", slow)
    overlapped = []
    at_update(monkeypatch, 1, lambda: overlapped.append(second.wait(30)))
    changes: dict[str, Any] = {"updates": 2, "schedule": ((2, 2),), "warmup": 0, "final_learning_rate": 1e-3}
    train(dataclasses.replace(config, output=str(tmp_path / "other"), held_out_rows=0, **changes))
    assert overlapped == [True]
    assert threading.main_thread() not in calls


def test_rows_are_packed_once(settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(settings.target, tmp_path / "target")
    config = dataclasses.replace(settings, target=str(tmp_path / "target"), output=str(tmp_path / "run"))
    kept = lambda: {path.name for path in (tmp_path / "run").glob("rows-*")}
    again = lambda: prepare(config, RunFolder(tmp_path / "run")).rows
    before = again()
    (name,) = kept()
    with monkeypatch.context() as patch:
        patch.setattr(training_setup, "packed_rows", lambda config: pytest.fail("packed again"))
        after = again()
    assert rows_mark(after) == rows_mark(before) == rows_mark(Rows(packed_rows(config)))
    # A damaged file is replaced.
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert rows_mark(again()) == rows_mark(before)
    assert path.read_bytes() == whole
    # What the rows follow from is in the name: fields, contents of the data, tokenizer; not what else a config says.
    names = [rows_file(config, tmp_path)]
    for changes in (
        {"template": (("enable_thinking", False),)},
        {"row_length": 64},
        {"last_turn_only": True},
        {"seed": 1},
    ):
        names.append(rows_file(dataclasses.replace(config, **changes), tmp_path))
    assert rows_file(dataclasses.replace(config, updates=99, learning_rate=1.0), tmp_path) == names[0]
    data = tmp_path / "rows.jsonl"
    data.write_bytes(Path(config.data[0]).read_bytes())
    copied = dataclasses.replace(config, data=(str(data),))
    assert rows_file(copied, tmp_path) == names[0]
    data.write_bytes(data.read_bytes().replace(b"red", b"two"))  # of the same size
    names.append(rows_file(copied, tmp_path))
    tokenizer = tmp_path / "target" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    names.append(rows_file(config, tmp_path))
    assert len(set(names)) == 7
    assert rows_file(config, at("gs://bucket/run")) is None


def test_layers_are_loaded_only_where_something_runs_them(settings: TrainConfig, tmp_path: Path):
    model = load_target(Path(settings.target))
    write_features(tmp_path / "features", packed_rows(settings), model, TAPS, batch=BATCH)
    offline = dataclasses.replace(settings, data=(), features=(str(tmp_path / "features"),), output="")
    for prompts, layers in ((0, 0), (1, 2)):
        config = dataclasses.replace(offline, decoded_prompts=prompts)
        setup = prepare(config, RunFolder(tmp_path / f"run{prompts}"))
        norms = setup.target.params.layers
        assert (len(norms) if norms == () else len(norms.input_norm)) == layers
        assert setup.draft.config.target_fingerprint == fingerprint(model)


def test_a_finished_run_is_left_as_it_is(straight: tuple[Path, Result], settings: TrainConfig):
    folder, _ = straight
    before = logged(folder)
    result = train(dataclasses.replace(settings, output=str(folder)))
    assert result == Result(updates=UPDATES, finished=True, evaluation={})
    assert logged(folder) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 2e-3}, "learning_rate 0.002 instead of 0.001"),
        ({"draft_vocab_size": 64, "seed": 1}, "draft_vocab_size 64 instead of 96; seed 1 instead of 0"),
        ({"updates": 30, "schedule": ((30, 2),)}, "updates 30 instead of 20"),
    ],
)
def test_another_config_in_the_same_folder_is_refused(
    straight: tuple[Path, Result], settings: TrainConfig, changes: dict[str, Any], named: str
):
    folder, _ = straight
    with pytest.raises(InputError, match=named):
        train(dataclasses.replace(settings, output=str(folder), **changes))
    RunFolder(folder).check_same(dataclasses.replace(settings, keep=9, log_every=3, eval_every=7, save_every=1))


@pytest.mark.parametrize("size", [96, 64, 320])
def test_the_head_has_the_vocabulary_that_was_asked_for(settings: TrainConfig, tmp_path: Path, size: int):
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), draft_vocab_size=size, row_length=128)
    run = RunFolder(tmp_path / "run")
    setup = prepare(config, run)
    _, draft, vocab = run.read()
    assert setup.draft.params.lm_head.shape == (size, 64)
    assert setup.teacher.label_head.shape == (size, 64)
    assert draft.draft_vocab_size == vocab.size == size
    assert draft.trained_length == 1 + packed_rows(config).positions.max() < config.row_length
    np.testing.assert_array_equal(vocab.d2t, setup.draft.vocab.d2t)
    head = np.asarray(load_target(Path(config.target)).params.lm_head)
    np.testing.assert_array_equal(setup.draft.params.lm_head, head[np.asarray(vocab.d2t)])


def test_a_run_is_not_continued_on_other_contents_under_the_same_names(settings: TrainConfig, tmp_path: Path):
    shutil.copytree(settings.target, tmp_path / "target")
    data = tmp_path / "rows.jsonl"
    rows = Path(settings.data[0]).read_text(encoding="utf-8")
    data.write_text(rows, encoding="utf-8")
    model = load_target(tmp_path / "target")
    for name, seed in (("draft", 0), ("other", 1)):
        save_draft(tmp_path / name, tiny.draft(model, seed, taps=TAPS))
    config = dataclasses.replace(
        settings, target=str(tmp_path / "target"), data=(str(data),), output=str(tmp_path / "run"),
        init=str(tmp_path / "draft"),
    )  # fmt: skip
    again = lambda: prepare(config, RunFolder(tmp_path / "run"))
    again()
    again()
    data.write_text(rows + rows.splitlines(keepends=True)[0], encoding="utf-8")
    with pytest.raises(InputError, match="the same rows that the run"):
        again()
    data.write_text(rows, encoding="utf-8")
    weights = (tmp_path / "draft" / "model.safetensors").read_bytes()
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "draft")
    with pytest.raises(InputError, match="the same draft of --init that the run"):
        again()
    (tmp_path / "draft" / "model.safetensors").write_bytes(weights)
    tiny.hf_target(1, num_hidden_layers=2).save_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match="the same target that the run"):
        again()


def test_features_on_disk_train_as_the_target_in_the_loop_does(
    straight: tuple[Path, Result], settings: TrainConfig, tmp_path: Path
):
    model = load_target(Path(settings.target))
    write_features(tmp_path / "features", packed_rows(settings), model, TAPS, batch=BATCH)
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), data=(), features=(str(tmp_path / "features"),), updates=2,
        schedule=((2, 2),), warmup=0, final_learning_rate=1e-3,
    )  # fmt: skip
    train(config)
    offline, online = logged(tmp_path / "run")[0], logged(straight[0])[0]
    # The first update sees the same rows and weights, but for what bf16 rounds away.
    assert offline["loss"] == pytest.approx(online["loss"], rel=2e-2)
    assert offline["gradient_norm"] == pytest.approx(online["gradient_norm"], rel=5e-2)
    assert RunFolder(tmp_path / "run").read()[2].size == 96
    with pytest.raises(InputError, match="features with row_length 40"):
        train(dataclasses.replace(config, output=str(tmp_path / "other"), row_length=40))
    assert len(FeatureRows(tmp_path / "features", taps=TAPS, target_fingerprint=fingerprint(model), row_length=48))


def test_too_few_rows_and_foreign_boundaries_are_refused(settings: TrainConfig, tmp_path: Path):
    config = dataclasses.replace(settings, output=str(tmp_path / "run"))
    with pytest.raises(InputError, match=r"held_out_rows \+ batch_rows = 25 packed rows, .* found 24"):
        train(dataclasses.replace(config, held_out_rows=23))
    with pytest.raises(InputError, match="from 0 to 2, the target's number of layers"):
        train(dataclasses.replace(config, taps=(0, 1, 4)))
    with pytest.raises(InputError, match="schedule"):
        train(dataclasses.replace(config, updates=21))
    assert not (tmp_path / "run" / "run.json").exists()


def test_every_held_out_row_counts_once(settings: TrainConfig, tmp_path: Path):
    setup = prepare(dataclasses.replace(settings, output=str(tmp_path / "run")), RunFolder(tmp_path / "run"))
    setup.held_out = setup.held_out[:3]  # no multiple of the batch
    step, found = make_eval_step(), []

    def watched(*args: Any, **options: Any) -> Any:
        assert args[1].tokens.shape[0] == BATCH
        found.append(step(*args, **options))
        return found[-1]

    evaluate(setup, setup.draft, 2, BATCH, watched)
    spans = np.stack([setup.rows[int(index)]["spans"] for index in setup.held_out])
    for s in range(2):
        assert sum(float(sums.slots[s]) for sums in found) == tiny.assistant_slots(spans, s).sum() > 0


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_every_shipped_recipe_runs(settings: TrainConfig, tmp_path: Path, path: Path):
    shared = ("target", "data", "taps", "row_length", "batch_rows", "draft_vocab_size")
    changes = {name: getattr(settings, name) for name in shared}
    config = dataclasses.replace(
        load_config(path), output=str(tmp_path / "run"), features=(), init="", updates=2, schedule=((1, 1), (1, 2)),
        warmup=1, held_out_rows=2, mesh=(), slices=1, decoded_prompts=0, **changes,
    )  # fmt: skip
    assert train(config).finished
    assert [entry["steps"] for entry in logged(tmp_path / "run") if "steps" in entry] == [1, 2]


def test_a_profile_is_taken_of_updates_that_are_warm(settings: TrainConfig, tmp_path: Path):
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), updates=7, schedule=((7, 2),))
    train(config, profile=tmp_path / "profile")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("rows", [4, 2])
def test_accumulation_changes_neither_the_rows_nor_the_learning_rates(settings: TrainConfig, tmp_path: Path, rows: int):
    """Updates of four rows, whole and in parts: the same log and weights, but for the order of additions."""
    config = dataclasses.replace(
        settings, updates=4, schedule=((4, 2),), held_out_rows=0, batch_rows=4, output=str(tmp_path / "whole")
    )
    train(config)
    parts = dataclasses.replace(config, batch_rows=rows // 2, accumulation=8 // rows, output=str(tmp_path / "parts"))
    train(parts)
    whole, accumulated = logged(tmp_path / "whole"), logged(tmp_path / "parts")
    assert [entry["learning_rate"] for entry in whole] == [entry["learning_rate"] for entry in accumulated]
    np.testing.assert_allclose([e["loss"] for e in whole], [e["loss"] for e in accumulated], rtol=1e-5)
    pairs = zip(
        jax.tree.leaves(saved(tmp_path / "whole")["params"]), jax.tree.leaves(saved(tmp_path / "parts")["params"])
    )
    for one, two in pairs:
        # Adam divides by the gradient's own size, so that what rounds to nothing may still move by a learning rate.
        np.testing.assert_allclose(one, two, atol=2e-5)


def test_an_update_with_nothing_to_learn_is_skipped_and_said_to_be(
    settings: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls, real = [], loop.supervised

    def blind(row: Any, supervise: str) -> Any:
        calls.append(None)
        second = BATCH < len(calls) <= 2 * BATCH
        return real(row, supervise) | ({"spans": np.zeros_like(row["spans"])} if second else {})

    monkeypatch.setattr(loop, "supervised", blind)
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), updates=3, schedule=((3, 2),), warmup=1, held_out_rows=0
    )
    train(config)
    entries = logged(tmp_path / "run")
    assert [entry["loss"] == "skipped" for entry in entries] == [False, True, False]
    assert [entry["skipped"] for entry in entries] == [0, 1, 1]
    assert "SKIPPED (1 so far)" in capsys.readouterr().err
    state = saved(tmp_path / "run")
    assert int(state["skipped"]) == 1
    # The schedule goes by the run's updates, so that the last rate is the floor; Adam counts what it was given.
    rates = [float(config.learning_rates()(update)) for update in range(3)]
    np.testing.assert_allclose([entry["learning_rate"] for entry in entries], rates, rtol=1e-5)
    assert rates[-1] == pytest.approx(config.final_learning_rate)
    counts = [int(leaf) for leaf in jax.tree.leaves(state["opt_state"]) if np.ndim(leaf) == 0]
    assert sorted(counts) == [2, 3]


@pytest.mark.full
def test_two_hundred_updates_at_the_recipes_rate_stay_finite(settings: TrainConfig, tmp_path: Path):
    recipe = load_config(Path(__file__).parents[1] / "configs" / "smollm2_135m.py")
    rates = {name: getattr(recipe, name) for name in ("learning_rate", "final_learning_rate", "warmup", "clip")}
    config = dataclasses.replace(
        settings, output=str(tmp_path / "run"), updates=200, schedule=((150, 1), (50, 7)), **rates, log_every=10
    )
    train(config)
    entries = [entry for entry in logged(tmp_path / "run") if "loss" in entry]
    assert entries[-1]["skipped"] == 0
    assert all(0 <= entry["clipped"] <= 1 for entry in entries)
    assert entries[-1]["gradient_norm"] < 10 * entries[0]["gradient_norm"]


def small_state(update: int) -> TrainState:
    params: Any = {"weight": jnp.arange(3.0) + update}
    return TrainState(params, optax.adamw(1e-3).init(params), jnp.int32(update), jnp.int32(0))


def test_the_latest_and_the_best_checkpoints_are_kept_and_no_others(tmp_path: Path):
    run = RunFolder(tmp_path, keep=2, writes=True)
    kept = []
    for update, joint in enumerate([0.5, None, 0.9, 0.1, None, 0.9, 0.2, 0.3], start=1):
        run.save(small_state(update), joint)
        run.manager.wait_until_finished()
        kept.append(steps_on_disk(tmp_path))
    run.close()
    assert kept == [["1"], ["1", "2"], ["2", "3"], ["3", "4"], ["3", "4", "5"], ["5", "6"], ["6", "7"], ["6", "7", "8"]]
    run = RunFolder(tmp_path)
    abstract = abstract_state(small_state(0))
    assert run.latest() == 8
    assert int(run.restore(abstract, "best").update) == 6  # the later of two equals
    assert int(run.restore(abstract, "latest").update) == 8
    restored = run.restore(abstract, 7)
    assert jax.tree.structure(restored) == jax.tree.structure(small_state(7))
    np.testing.assert_array_equal(restored.params["weight"], np.arange(3.0) + 7)
    with pytest.raises(InputError, match=r"checkpoint 5 in .*; found updates 6, 7, 8"):
        run.restore(abstract, 5)
    run.close()


def test_the_best_of_a_run_without_held_out_rows_is_its_latest(tmp_path: Path):
    run = RunFolder(tmp_path, keep=1, writes=True)
    with pytest.raises(InputError, match="found no whole checkpoint"):
        run.restore(abstract_state(small_state(0)))
    for update in (1, 2):
        run.save(small_state(update))
    run.manager.wait_until_finished()
    assert int(run.restore(abstract_state(small_state(0)), "best").update) == 2
    run.save(small_state(2), 0.5)  # saved already: left as it is
    assert steps_on_disk(tmp_path) == ["2"]
    run.close()


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    for folder, found in ((tmp_path / "absent", "nothing there"), (tmp_path, "a folder without it")):
        assert not RunFolder(folder).exists
        with pytest.raises(InputError, match=f"a training run at .* found {found}"):
            RunFolder(folder).read()


def test_what_json_has_no_words_for_is_null_in_the_log():
    entry = {"a": float("nan"), "b": [float("inf"), 1.0, None], "c": {"d": -float("inf")}, "e": "skipped", "f": True}
    assert finite(entry) == {"a": None, "b": [None, 1.0, None], "c": {"d": None}, "e": "skipped", "f": True}
