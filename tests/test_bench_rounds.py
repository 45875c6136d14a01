"""The script that measures large shapes runs, at toy size, and says what it measured."""

from __future__ import annotations

import json
import sys

import jax
import pytest

from bench import rounds
from eagle3_jax.drafters import Plan


def test_rounds_are_measured_in_plain_steps_and_against_the_bound(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rounds, "PLANS", {"plain": Plan(), "chain of 1": Plan(1)})
    monkeypatch.setattr(sys, "argv", ["rounds", "--json", "--rounds", "3", "--repeats", "1", "--cache", "256"])
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_default_matmul_precision
    try:
        assert rounds.main() == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_default_matmul_precision", before[1])
    record = json.loads(capsys.readouterr().out)
    assert record["rounds"]["plain"]["plain_steps"] == 1.0
    assert record["rounds"]["chain of 1"]["plain_steps"] > 0
    assert record["share_of_bound"] == pytest.approx(
        record["bound_seconds"] / record["rounds"]["plain"]["program"], rel=1e-6
    )
    # Every weight but the embedding's, in bf16.
    target, _ = rounds.random_models("toy", "bfloat16")
    leaves = sum(leaf.size for leaf in jax.tree.leaves(target.params)) - target.params.embed.size
    assert record["weight_bytes"] == 2 * leaves
