"""`speculators` computes from our export what we do, and we compute from its drafts what it does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from convert.draft import convert
from eagle3_jax.checkpoint import load_draft, save_draft
from eagle3_jax.draft import Draft, draft_logits, draft_unroll, fuse
from eagle3_jax.target import Target
from tests import tiny
from tests.test_convert_draft import LLAMA3

SIDE = Path(__file__).with_name("speculators_side.py")
STEPS = 5
LENGTH = 24


def theirs(folder: Path, *arguments: Any) -> None:
    python = os.environ["SPECULATORS_PYTHON"]  # `make test-peers` sets it
    command = [python, str(SIDE), str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(folder: Path, name: Path, draft: Draft) -> None:
    """Logits and carried states of the five steps to 1e-4, on slots whose tokens all lie in the row."""
    rng = np.random.default_rng(4)
    config = draft.config
    taps = rng.standard_normal((1, LENGTH, len(config.taps) * config.target_hidden_size)).astype(np.float32)
    tokens = rng.integers(3, config.vocab_size, (1, LENGTH)).astype(np.int32)
    np.savez(folder / "inputs.npz", taps=taps, tokens=tokens)
    theirs(folder, "run", name)
    found = np.load(folder / "outputs.npz")
    positions, documents = jnp.arange(LENGTH, dtype=jnp.int32)[None], jnp.ones((1, LENGTH), jnp.int32)
    carries = draft_unroll(draft, fuse(draft, jnp.asarray(taps)), jnp.asarray(tokens), positions, documents, STEPS)
    assert found["carries"].shape[0] == found["logits"].shape[0] == STEPS
    spread = found["logits"].std()
    assert spread > 0.3
    for step, carry in enumerate(carries):
        slots = slice(0, LENGTH - 1 - step)
        for ours, other in ((carry, found["carries"][step]), (draft_logits(draft, carry), found["logits"][step])):
            np.testing.assert_allclose(ours[:, slots], other[:, slots], atol=1e-4, rtol=0, err_msg=f"step {step + 1}")
    assert np.abs(found["logits"][1] - found["logits"][0]).max() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "sliding_window": 64},
        {"fc_norm": True, "taps": (1, 2, 4, 8), "rope": LLAMA3, "head_dim": 32},
        {"own_embedding": True},
        {"size": 320},
    ],
)
def test_our_export_is_computed_alike(tmp_path: Path, tiny_folder: Path, t0: Target, settings: dict[str, Any]):
    draft = tiny.draft(t0, scale=2.0, **settings)
    if draft.config.own_embedding:
        draft = draft.replace(embed=draft.embed[::-1])
    save_draft(tmp_path / "ours", draft, dtype=jnp.float32)
    convert(tmp_path / "ours", tmp_path / "exported", "vllm", target=tiny_folder)
    compare(tmp_path, tmp_path / "exported", draft)


def test_its_own_draft_of_default_flags_is_computed_alike(tmp_path: Path, tiny_folder: Path, t0: Target):
    theirs(tmp_path, "make", tiny_folder)
    convert(tmp_path / "theirs", tmp_path / "out", "canonical", target=tiny_folder)
    draft = load_draft(tmp_path / "out", t0)
    config = draft.config
    assert (config.norm_before_fc, config.norm_output, config.norm_before_residual) == (True, True, True)
    assert (config.sliding_window, config.taps) == (2048, (2, 4, 5))
    compare(tmp_path, tmp_path / "theirs", draft)
