"""Features on disk: equal to those of the target run in the loop, continued after an interruption, and refused where
they belong to other rows, other boundaries or another target.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from eagle3_jax.attention import document_mask
from eagle3_jax.checkpoint import fingerprint, load_target
from eagle3_jax.errors import InputError
from eagle3_jax.target import Target, target_forward, target_logits
from eagle3_jax.training import features as room
from eagle3_jax.training import step as step_room
from eagle3_jax.training.features import (
    FeatureRows,
    Joined,
    Rows,
    features_in_loop,
    tap_rms,
    tap_scales,
    write_features,
)
from eagle3_jax.training.packing import Packed
from tests import tiny

TAPS = (2, 4, 8)  # 8 is the state that leaves the last layer, before the final norm
ROWS, LENGTH, BATCH = 5, 12, 2


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SHARD_ROWS", 2)


def packed_rows(rows: int = ROWS, seed: int = 0) -> Packed:
    """Rows of two documents of 5 and 6 tokens and one padding token."""
    rng = np.random.default_rng(seed)
    documents = np.tile([1] * 5 + [2] * 6 + [0], (rows, 1)).astype(np.int32)
    positions = np.tile([*range(5), *range(6), 0], (rows, 1)).astype(np.int32)
    tokens = np.where(documents > 0, rng.integers(3, 320, (rows, LENGTH)), 0).astype(np.int32)
    spans = np.tile([0, 0, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0], (rows, 1)).astype(np.int32)
    return Packed(tokens=tokens, spans=spans, documents=documents, positions=positions)


def opened(folder: Path, target: Target, **changes: Any) -> FeatureRows:
    wanted: dict[str, Any] = {"taps": TAPS, "target_fingerprint": fingerprint(target), "row_length": LENGTH}
    return FeatureRows(folder, **(wanted | changes))


@pytest.fixture
def folder(tmp_path: Path, t0: Target) -> Path:
    write_features(tmp_path / "features", packed_rows(), t0, TAPS, batch=BATCH)
    return tmp_path / "features"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_features_on_disk_equal_those_in_the_loop(folder: Path, t0: Target):
    stored, packed = opened(folder, t0), packed_rows()
    assert len(stored) == ROWS
    assert len(list(folder.glob("features-*"))) == 3
    for start in range(0, ROWS - 1, BATCH):
        rows = [Rows(packed)[start + i] for i in range(BATCH)]
        online = features_in_loop(t0, TAPS, {name: jnp.asarray(np.stack([r[name] for r in rows])) for name in rows[0]})
        for i in range(BATCH):
            row = stored[start + i]
            for name in ("tokens", "spans", "documents", "positions", "argmax"):
                np.testing.assert_array_equal(row[name], online[name][i], err_msg=name)
            for name in ("taps", "hidden"):
                assert row[name].dtype == ml_dtypes.bfloat16
                np.testing.assert_array_equal(row[name], np.asarray(online[name][i]).astype(ml_dtypes.bfloat16))


def test_features_are_those_of_the_target_and_the_argmax_is_over_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_room, "ARGMAX_CHUNK", 5)  # 3 rows of 11 tokens: chunks that do not divide evenly
    target, taps = tiny.from_hf(tiny.hf_target(num_hidden_layers=2)), (0, 1, 2)
    packed = packed_rows(3)
    rows = [jnp.asarray(array[:, :11]) for array in (packed.tokens, packed.documents, packed.positions)]
    tapped, hidden, argmax = step_room.target_features(target, *rows, taps=taps)

    @jax.jit
    def plain(tokens: jax.Array, documents: jax.Array, positions: jax.Array) -> Any:
        out = target_forward(target, tokens, positions, document_mask(documents), taps=taps)
        return out.taps, out.hidden, target_logits(target, out.hidden).argmax(-1)

    expected_taps, expected_hidden, expected_argmax = plain(*rows)
    np.testing.assert_allclose(tapped, expected_taps, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(argmax, expected_argmax)


def test_an_interrupted_run_continues_where_it_stopped(tmp_path: Path, t0: Target):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_features(whole, packed_rows(), t0, TAPS, batch=BATCH)

    def stop(done: int, total: int) -> None:
        assert total == ROWS
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_features(cut, packed_rows(), t0, TAPS, batch=BATCH, progress=stop)
    assert len(list(cut.glob("features-*"))) == 2
    with pytest.raises(InputError, match=r"features with complete True .* found False"):
        opened(cut, t0)
    first = (cut / "features-00000.safetensors").stat().st_mtime_ns
    write_features(cut, packed_rows(), t0, TAPS, batch=BATCH)
    assert (cut / "features-00000.safetensors").stat().st_mtime_ns == first
    assert contents(cut) == contents(whole)


def test_a_lost_shard_is_named_and_made_again(folder: Path, t0: Target):
    before = contents(folder)
    (folder / "features-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"no features-00001\.safetensors"):
        opened(folder, t0)
    write_features(folder, packed_rows(), t0, TAPS, batch=BATCH)
    assert contents(folder) == before


def test_a_shard_cut_short_is_refused(folder: Path, t0: Target):
    path = folder / "features-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"complete safetensors file at .*features-00002"):
        opened(folder, t0)


def other_order(packed: Packed) -> Packed:
    """The same rows in another order: every count and sum is the same."""
    return Packed(*(getattr(packed, field.name)[::-1] for field in dataclasses.fields(packed)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"packed": packed_rows(seed=1)}, "tokens"),
        ({"packed": other_order(packed_rows())}, "tokens"),
        ({"packed": dataclasses.replace(packed_rows(), spans=np.zeros((ROWS, LENGTH), np.int32))}, "spans"),
        ({"packed": packed_rows(4)}, "rows"),
        ({"taps": (2, 4, 7)}, "taps"),
        ({"target": 1}, "target_fingerprint"),
    ],
    ids=["tokens", "order", "spans", "count", "taps", "target"],
)
def test_features_of_something_else_are_not_continued(folder: Path, change: dict[str, Any], named: str):
    before = contents(folder)
    given: dict[str, Any] = {"packed": packed_rows(), "target": 0, "taps": TAPS} | change
    given["target"] = tiny.target(given["target"])
    with pytest.raises(InputError, match=f"features that differ in {named}"):
        write_features(folder, batch=BATCH, **given)
    assert contents(folder) == before


def test_shards_that_nothing_describes_are_not_taken_for_ours(folder: Path, t0: Target):
    (folder / room.META_FILE).unlink()
    with pytest.raises(InputError, match=r"features-00000\.safetensors without features\.json"):
        write_features(folder, packed_rows(), t0, TAPS, batch=BATCH)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"taps": (2, 4, 5)}, "taps"),
        ({"target_fingerprint": "0"}, "target_fingerprint"),
        ({"row_length": 13}, "row_length"),
    ],
)
def test_features_for_another_run_are_refused(folder: Path, t0: Target, change: dict[str, Any], named: str):
    with pytest.raises(InputError, match=f"features with {named}"):
        opened(folder, t0, **change)


def test_a_folder_without_features_is_refused(tmp_path: Path, t0: Target):
    for path, found in ((tmp_path / "absent", "nothing there"), (tmp_path, "a folder without it")):
        with pytest.raises(InputError, match=f"a features folder .* found {found}"):
            opened(path, t0)


def broken(target: Target, change: Callable[[Any], Any]) -> Target:
    return dataclasses.replace(target, params=change(target.params))


def test_a_feature_that_is_not_finite_is_named_by_row_and_leaves_a_folder_that_can_be_continued(
    tmp_path: Path, t0: Target
):
    packed = packed_rows()
    packed.tokens[:] = np.where(packed.tokens == 7, 8, packed.tokens)
    packed.tokens[3, 4] = 7  # the second row of the second shard
    bad = broken(t0, lambda params: dataclasses.replace(params, embed=params.embed.at[7, 0].set(jnp.inf)))
    with pytest.raises(
        InputError, match=r"nan or inf at the boundary IN\(2\) of row 3; .* model\.embed_tokens\.weight"
    ):
        write_features(tmp_path, packed, bad, TAPS, batch=BATCH)
    with pytest.raises(InputError, match="complete True"):
        opened(tmp_path, t0)
    write_features(tmp_path, packed, t0, TAPS, batch=BATCH)
    assert len(opened(tmp_path, t0)) == ROWS


@pytest.mark.parametrize("layers", ["each", "stacked"])
def test_the_first_weight_that_is_not_finite_is_named_with_its_file(tmp_path: Path, layers: str):
    """An inf in layer 3: the states are good at IN(3), the last before it, and bad at IN(4)."""
    model = tiny.hf_target(num_hidden_layers=5)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 6] = torch.inf
        model.model.layers[4].self_attn.q_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "target")
    target = load_target(tmp_path / "target", layers=layers)
    words = r"IN\(4\) of row 0; nan or inf in the weight model\.layers\.3\.mlp\.up_proj\.weight"
    for source, file in ((tmp_path / "target", r" of .*/target/model\.safetensors"), (None, "")):
        with pytest.raises(InputError, match=words + file + r"\. Fetch"):
            write_features(tmp_path / "out", packed_rows(), target, (2, 3, 4), batch=BATCH, source=source)


def test_a_head_that_is_not_finite_is_named_and_an_overflow_is_called_one(tmp_path: Path, t0: Target):
    bad = broken(t0, lambda params: dataclasses.replace(params, lm_head=params.lm_head.at[7, 0].set(jnp.nan)))
    with pytest.raises(InputError, match=r"found nan or inf in the weight lm_head\.weight"):
        write_features(tmp_path, packed_rows(), bad, TAPS, batch=BATCH)
    assert not list(tmp_path.iterdir())
    first, *others = t0.params.layers
    huge = dataclasses.replace(first, down=jnp.full_like(first.down, 3e38))
    huge = broken(t0, lambda params: dataclasses.replace(params, layers=(huge, *others)))
    with pytest.raises(InputError, match=r"of row 0; finite weights\. States overflow in float32"):
        write_features(tmp_path, packed_rows(), huge, TAPS, batch=BATCH)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_noticed_when_its_shard_is_first_read_and_the_shard_is_made_again(
    folder: Path, t0: Target, caplog: pytest.LogCaptureFixture
):
    before, meta = contents(folder), json.loads((folder / room.META_FILE).read_text())
    assert meta["sha256"] == {
        name: hashlib.sha256(content).hexdigest() for name, content in before.items() if name != room.META_FILE
    }
    flip(folder / "features-00001.safetensors", -100)
    stored = opened(folder, t0)
    for index in (0, 1, 4):
        stored[index]
    for index in (2, 3, 2):  # also when asked again
        with pytest.raises(InputError, match=r"features-00001\.safetensors as it was written.*file is damaged"):
            stored[index]
    write_features(folder, packed_rows(), t0, TAPS, batch=BATCH)
    assert "features-00001.safetensors is not as it was written; it is made again" in caplog.text
    assert contents(folder) == before
    flip(folder / room.ROWS_FILE, -1)
    with pytest.raises(InputError, match=r"rows\.safetensors as it was written.*--force"):
        opened(folder, t0)


def test_a_shard_is_read_whole_once_only(folder: Path, t0: Target, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    real = room.checksum
    monkeypatch.setattr(room, "checksum", lambda path: read.append(path.name) or real(path))
    stored = opened(folder, t0)
    assert read == [room.ROWS_FILE]
    for index in (4, 0, 1, 0, 4):
        stored[index]
    assert read[1:] == ["features-00002.safetensors", "features-00000.safetensors"]


def test_features_without_checksums_are_read_with_a_warning_and_get_them(
    folder: Path, t0: Target, caplog: pytest.LogCaptureFixture
):
    before = contents(folder)
    meta = json.loads(before[room.META_FILE])
    del meta["sha256"]
    (folder / room.META_FILE).write_text(json.dumps(meta))
    stored = opened(folder, t0)
    for index in range(ROWS):
        stored[index]
    assert caplog.text.count("no checksums") == 1
    write_features(folder, packed_rows(), t0, TAPS, batch=BATCH)
    assert contents(folder) == before


def test_force_replaces_other_features_and_nothing_else(folder: Path, t0: Target, tmp_path: Path):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="pass --force"):
        write_features(folder, packed_rows(3, seed=1), t0, TAPS, batch=BATCH)
    bad = packed_rows(3, seed=1)
    bad.tokens[0, 0] = 320
    before = contents(folder)
    with pytest.raises(InputError, match="token id 320"):
        write_features(folder, bad, t0, TAPS, batch=BATCH, force=True)
    assert contents(folder) == before
    write_features(folder, packed_rows(3, seed=1), t0, TAPS, batch=BATCH, force=True)
    write_features(tmp_path / "new", packed_rows(3, seed=1), t0, TAPS, batch=BATCH)
    assert contents(folder) == contents(tmp_path / "new") | {"notes.txt": b"mine"}


def test_tokens_and_boundaries_that_the_target_does_not_have_are_refused_before_anything_is_written(
    tmp_path: Path, t0: Target
):
    packed = packed_rows()
    packed.tokens[1, 2] = 320
    with pytest.raises(InputError, match="token ids below the target's vocabulary size 320; found token id 320"):
        write_features(tmp_path / "a", packed, t0, TAPS)
    with pytest.raises(InputError, match=r"final hidden state; found \(2, 10\)"):
        write_features(tmp_path / "a", packed_rows(), t0, (2, 10))
    assert not (tmp_path / "a").exists()


def test_rows_are_found_by_number(folder: Path, t0: Target):
    stored, plain = opened(folder, t0), Rows(packed_rows())
    for index in (0, 1, 2, 4):
        np.testing.assert_array_equal(stored[index]["tokens"], plain[index]["tokens"])
        assert stored[index]["taps"].shape == (LENGTH, 3 * 64)
        assert stored[index]["hidden"].shape == (LENGTH, 64)
    for index in (-1, ROWS):
        with pytest.raises(IndexError):
            stored[index]


def test_joined_sources_are_one_after_the_other():
    parts = [Rows(packed_rows(count, seed)) for seed, count in enumerate((2, 0, 3))]
    joined = Joined(parts)
    assert len(joined) == 5
    expected = [parts[0][0], parts[0][1], parts[2][0], parts[2][1], parts[2][2]]
    for index, row in enumerate(expected):
        np.testing.assert_array_equal(joined[index]["tokens"], row["tokens"])
    for index in (-1, 5):
        with pytest.raises(IndexError):
            joined[index]


def test_tap_scales_are_medians_over_real_tokens():
    taps = np.zeros((1, 4, 6), ml_dtypes.bfloat16)
    taps[0, :, :2], taps[0, :, 2:4], taps[0, :, 4:] = 1, 2, 3
    taps[0, 1] *= 100  # a sink
    taps[0, 3] = 50  # padding
    rms = np.asarray(tap_rms(jnp.asarray(taps), count=3))
    np.testing.assert_allclose(tap_scales(rms, np.asarray([[1, 1, 1, 0]])), [1, 2, 3], rtol=1e-2)
