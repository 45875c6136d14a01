"""Paths of a cloud: data files and a run's small files, against a bucket in this process's memory.

Checkpoints in a bucket are orbax's own; they are not tried here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.files import at, in_cloud, replace_file
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.reporting import Journal
from eagle3_jax.training.rows import read_rows
from eagle3_jax.vocab import vocab_from_ids


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


def test_what_is_mapped_into_memory_must_be_local():
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
