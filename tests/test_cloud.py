"""Paths of a cloud: data files and a run's small files, against a bucket in this process's memory.

Checkpoints in a bucket are orbax's own; they are not tried here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

from eagle3_jax import cli
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.files import at, in_cloud, replace_file
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import Row
from eagle3_jax.training.reporting import Journal
from eagle3_jax.training.rows import read_rows
from eagle3_jax.training.start import choose_vocab, read_vocab
from eagle3_jax.vocab import vocab_from_ids
from tests import tiny, tiny_tokenizers


class Bucket(MemoryFileSystem):
    """Answers to gs://."""

    protocol = ("gs", "memory")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("gs://", "memory://"))


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    system = Bucket()
    monkeypatch.setattr(type(backend.fsspec_backend), "fs", lambda self, path: system)
    yield system
    system.store.clear()


def test_names_with_a_scheme_are_a_clouds():
    assert at("runs/a") == Path("runs/a")
    assert not in_cloud(at("runs/a"))
    assert in_cloud(at("gs://bucket/runs/a"))
    assert str(at("gs://bucket/runs/a") / "run.json") == "gs://bucket/runs/a/run.json"


def test_rows_are_read_from_a_bucket(bucket: fsspec.AbstractFileSystem):
    bucket.pipe("gs://bucket/rows.jsonl", b'{"prompt": "q", "response": "a"}\n{"prompt": 1}\n')
    rows, report = read_rows(at("gs://bucket/rows.jsonl"))
    assert [row.messages[0]["content"] for row in rows] == ["q"]
    assert "gs://bucket/rows.jsonl: 2 rows read, 1 kept" in str(report)
    with pytest.raises(InputError, match="no such file"):
        read_rows(at("gs://bucket/absent.jsonl"))


def test_a_run_keeps_its_config_and_its_log_in_a_bucket(bucket: fsspec.AbstractFileSystem):
    shape = TargetConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16,
        rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    draft = DraftConfig.for_target(shape, draft_vocab_size=4)
    config = TrainConfig(target="t", output="gs://bucket/run", data=("gs://bucket/rows.jsonl",))
    folder = RunFolder(at(config.output), writes=True)
    assert not folder.exists
    folder.start(config, draft, vocab_from_ids([1, 2, 3, 5], 320), {"rows": "x"})
    assert folder.exists
    assert folder.read()[0]["output"] == "gs://bucket/run"
    folder.check_same(config)
    for update in (1, 2):
        with Journal(folder.metrics) as journal:
            journal.record({"update": update}, "")
    assert bucket.cat("gs://bucket/run/metrics.jsonl") == b'{"update": 1}\n{"update": 2}\n'
    folder.trim_log(1)
    assert bucket.cat("gs://bucket/run/metrics.jsonl") == b'{"update": 1}\n'


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config and a tokenizer; there are no weights."""
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_target(num_hidden_layers=2).config.save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([*map(str, arguments), "--cache-dir", ""])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--prompts", "FILE"),
        ("bench", "--methods", "plain", "--tasks", "t=FILE", "--out", "out"),
        ("eval", "--draft", "d", "--data", "FILE"),
        ("data", "regenerate", "FILE", "--out", "out"),
        ("data", "inspect", "FILE"),
        ("data", "vocab", "FILE"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_every_command_looks_for_its_rows_in_the_bucket(target: Path, capsys, arguments):
    file = "gs://bucket/absent.jsonl"
    code, _, notes = run(capsys, *(part.replace("FILE", file) for part in arguments), "--target", target)
    assert (code, f"a jsonl file at {file}; found no such file" in notes) == (2, True), notes


def test_prompts_and_answered_ids_are_read_from_a_bucket(target: Path, capsys, bucket, tmp_path: Path):
    bucket.pipe("gs://bucket/asked.jsonl", b'{"id": "a", "prompt": "q"}\n{"id": "b", "prompt": "r"}\n')
    bucket.pipe("gs://bucket/known.jsonl", b'{"id": "a"}\n{"id": "b"}\n')
    common = ("data", "regenerate", "gs://bucket/asked.jsonl", "--target", target)
    code, _, notes = run(capsys, *common, "--out", tmp_path / "out", "--exclude", "gs://bucket/known.jsonl")
    assert (code, "0 prompts to answer, 2 answered before" in notes) == (0, True)


class OneRow:
    """A source of one row."""

    def __init__(self, row: Row):
        self.row = row

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Row:
        return self.row

    text = __getitem__


def test_a_vocabulary_is_written_to_a_bucket_and_read_there(target: Path, capsys, bucket):
    bucket.pipe("gs://bucket/rows.jsonl", b'{"prompt": "q", "response": "a b c"}\n')
    place = "gs://bucket/vocab.json"
    common = ("data", "vocab", "gs://bucket/rows.jsonl", "--target", target, "--sizes", 4, "--out", place)
    assert run(capsys, *common)[0] == 0
    code, _, notes = run(capsys, *common)
    assert (code, "an --out that does not exist yet" in notes) == (2, True)
    ids = read_vocab(at(place), 4, 320)
    row = {"tokens": ids[:2], "spans": np.ones(2, np.int32)}
    config = TrainConfig(target="t", output="o", data=("d",), vocab=place, draft_vocab_size=4)
    found, coverage = choose_vocab(OneRow(row), config, 320, ())
    np.testing.assert_array_equal(found.d2t, ids)
    assert coverage == 1
    code, out, _ = run(capsys, *common[:5], "--out", "gs://bucket/none.json", "--sizes", "4,5")
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("regenerate", "rows.jsonl", "--target", "t"), "a local file as --out, which answers are appended to"),
        (("features", "configs/smollm2_135m.py"), "a local folder as --out: features are read through a memory map"),
    ],
    ids=lambda value: value[0],
)
def test_what_is_appended_to_or_mapped_is_not_written_to_a_bucket(capsys, arguments, words):
    code, _, notes = run(capsys, "data", *arguments, "--out", "gs://bucket/out")
    assert (code, words in notes, "found gs://bucket/out" in notes) == (2, True, True)


def test_what_is_mapped_into_memory_must_be_local():
    features = TrainConfig(target="t", output="run", features=("gs://bucket/features",))
    with pytest.raises(InputError, match=r"features: a local folder.*found gs://bucket/features"):
        features.check()
    config = TrainConfig(target="gs://bucket/target", output="run", data=("rows.jsonl",))
    with pytest.raises(InputError, match=r"target: a local folder.*found gs://bucket/target"):
        config.check()


def test_a_local_file_is_replaced_whole(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old", encoding="utf-8")

    def fail(part: Path) -> None:
        part.write_text("ne", encoding="utf-8")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_file(path, fail)
    assert path.read_text(encoding="utf-8") == "old"
