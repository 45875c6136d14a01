"""Rules from logical axes to a mesh, and training on eight fake devices against one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from eagle3_jax import cli
from eagle3_jax.errors import InputError
from eagle3_jax.sharding import make_mesh, partition
from tests import placed, tiny, tiny_tokenizers
from tests.on_eight_devices import HEADS

ROOT = Path(__file__).parent.parent
SIZES = {"slice": 2, "data": 2, "fsdp": 4, "tensor": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target of 16 query and 8 key/value heads, with its tokenizer and some rows of data."""
    folder = tmp_path_factory.mktemp("heads")
    tiny.hf_target(scale=2.0, **HEADS).save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    words = "one two three four five six seven eight nine ten red green blue".split()
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(40):
            prompt, response = (" ".join(rng.choice(words, count)) for count in (2, 12))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    return folder


def run_on_eight(folder: Path, check: str, meshes: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.on_eight_devices", check, str(folder), *meshes.split()], capture_output=True,
        text=True, cwd=ROOT, timeout=900, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("check", "meshes"),
    [
        ("gradients", "2,2,2"),
        ("loading", "2,2,2"),
        ("features", "2,2,2"),
        pytest.param("answers", "1,1,4", marks=pytest.mark.full),
        pytest.param("features", "8,1,1 1,8,1 1,1,8", marks=pytest.mark.full),
        pytest.param("argmax", "1,8,1 2,2,2", marks=pytest.mark.full),
        pytest.param("splash", "2,2,2", marks=pytest.mark.full),
        pytest.param("runs", "8,1,1 2,2,2", marks=pytest.mark.full),
        pytest.param("gradients", "8,1,1 1,8,1 1,1,8 2,1,2,2", marks=pytest.mark.full),
        pytest.param("undivided", "2,2,2 1,1,8", marks=pytest.mark.full),
        pytest.param("updates", "8,1,1 1,8,1 2,2,2 1,1,8", marks=pytest.mark.full),
    ],
)
def test_eight_devices_train_as_one_does(folder: Path, check: str, meshes: str):
    run_on_eight(folder, check, meshes)
    if check == "runs":
        # A run that was saved on eight devices is exported where there is one.
        assert cli.main(["export", str(folder / "split"), str(folder / "exported"), "--step", "latest"]) == 0
        assert (folder / "exported" / "model.safetensors").exists()


def test_a_state_is_restored_bit_for_bit_on_another_number_of_devices(folder: Path):
    draft = placed.shape_of(folder)
    placed.saved(folder / "one", draft, None)
    run_on_eight(folder, "restores", "1,8,1 1,2,1")
    for name in ("1x8x1", "1x2x1"):
        state = placed.resumed(folder / name, draft, None, 3)
        placed.equals_saved(state, folder / name)
        placed.check_places(state, draft, None)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("vocab", "embed"), (32000, 4096), ("tensor", "fsdp")),
        (("heads", "head_dim", "embed"), (32, 128, 4096), ("tensor", None, "fsdp")),
        (("kv_heads", "head_dim", "embed"), (4, 128, 4096), (None, None, "fsdp")),
        (("norm",), (4096,), (None,)),
        (("batch", None, None), (32, 7, 5), (("slice", "data", "fsdp"), None, None)),
        (("batch", None), (8, 7), (None, None)),
    ],
)
def test_axes_are_split_by_the_rules_where_they_divide(axes, shape, expected):
    assert tuple(partition(axes, shape, SIZES)) == expected


def test_axes_that_collide_or_have_no_rule_are_faults():
    with pytest.raises(ValueError, match=r"collide.*tensor"):
        partition(("vocab", "mlp"), (64, 64), SIZES)
    with pytest.raises(ValueError, match="no rule for the logical axis 'width'"):
        partition(("width",), (64,), SIZES)
    # An axis of size 1 splits nothing, so nothing collides.
    assert tuple(partition(("vocab", "mlp"), (64, 64), SIZES | {"tensor": 1})) == (None, None)


@pytest.mark.parametrize(("shape", "slices"), [((3, 1, 1), 1), ((1, 1), 1), ((0, 1, 1), 1), ((1, 1, 1), 2)])
def test_a_mesh_of_another_number_of_devices_is_refused(shape, slices):
    with pytest.raises(InputError, match=f"the number of devices, {jax.device_count()}; found"):
        make_mesh(shape, slices=slices)
