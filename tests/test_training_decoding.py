"""Real decoding at evaluations: on meshes whose weights fsdp splits, in one process and in two, as on one device."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from eagle3_jax.checkpoint import load_target
from eagle3_jax.sharding import entered, make_mesh
from eagle3_jax.training.evaluation import decoding_sizes, split_for_decoding
from eagle3_jax.training.loop import train
from tests import tiny, tiny_tokenizers
from tests.on_eight_decoding import config_of
from tests.test_processes import together

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose heads divide by eight, its tokenizer and rows."""
    folder = tmp_path_factory.mktemp("target")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    tiny.hf_target(**heads).save_pretrained(folder)
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder)
    words = "one two three four five six seven eight nine ten red green blue".split()
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(24):
            prompt, response = (" ".join(rng.choice(words, count)) for count in (2, 12))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    return folder


def test_what_fsdp_splits_is_split_by_tensor_as_far_as_heads_divide():
    sizes = lambda *each: dict(zip(("slice", "data", "fsdp", "tensor"), each))
    assert decoding_sizes(sizes(1, 1, 8, 1), 32) == (1, 1, 1, 8)
    assert decoding_sizes(sizes(1, 1, 16, 1), 40) == (1, 2, 1, 8)
    assert decoding_sizes(sizes(2, 2, 2, 2), 9) == (2, 8, 1, 1)
    assert decoding_sizes(sizes(1, 2, 1, 4), 9) == (1, 2, 1, 4)  # nothing to do


def test_a_copy_for_decoding_has_its_layers_apart_and_a_tied_head_once(folder: Path):
    mesh = make_mesh((1, 1, 1), devices=jax.devices()[:1])
    each, stacked = (load_target(folder, mesh=mesh, layers=layers) for layers in ("each", "stacked"))
    draft = tiny.draft(each, taps=(0, 1, 2))
    with entered(mesh):
        target, copy = split_for_decoding(stacked, draft, mesh)
        params = dataclasses.replace(stacked.params, lm_head=stacked.params.embed)
        tied, _ = split_for_decoding(dataclasses.replace(stacked, params=params), draft, mesh)
    assert jax.tree.structure(target) == jax.tree.structure(each)
    jax.tree.map(np.testing.assert_array_equal, target, each)
    jax.tree.map(np.testing.assert_array_equal, copy, draft)
    assert copy.embed is target.params.embed
    assert target.params.lm_head is not target.params.embed
    assert tied.params.lm_head is tied.params.embed


@pytest.mark.full
def test_held_out_prompts_are_decoded_on_a_mesh_as_on_one_device(folder: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.on_eight_decoding", str(folder), "1,8,1", "2,2,2", "8,1,1"],
        capture_output=True, text=True, cwd=ROOT, timeout=600, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "could not be decoded" not in done.stderr
    alone, *meshes = json.loads(done.stdout)
    assert alone["tau"] >= 1
    assert len(alone["answers"]) == 3
    for found in meshes:
        assert found["tau"] == alone["tau"]
        assert found["answers"] == alone["answers"]
    # Nothing is gathered: what fsdp splits in training is split by tensor.
    assert [found["held"] for found in meshes] == [[1 / 8, ["tensor"]], [1 / 4, ["tensor"]], [1, []]]


@pytest.mark.full
def test_held_out_prompts_are_decoded_by_two_processes(folder: Path, tmp_path: Path):
    config = dataclasses.replace(config_of(folder), output=str(tmp_path / "run"), mesh=(1, 2, 1))
    started = together(config, tmp_path)
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "could not be decoded" not in said[0][1]
    both = json.loads(said[0][0].splitlines()[-1])["held_out"]
    alone = train(dataclasses.replace(config, output=str(tmp_path / "alone"), mesh=())).evaluation
    assert both["decoding_tau"] == alone["decoding_tau"] >= 1
