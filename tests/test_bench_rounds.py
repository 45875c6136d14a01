"""The script that measures large shapes runs, at toy size, and says what it measured."""

from __future__ import annotations

import json
import sys

import jax
import pytest

from bench import rounds
from eagle3_jax.drafters import Plan
from eagle3_jax.errors import InputError
from eagle3_jax.tree import TreeShape


def test_rounds_are_measured_in_plain_steps_and_against_the_bound(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rounds, "PLANS", {"plain": Plan(), "tree": Plan(2, TreeShape(4, 2, 2))})
    monkeypatch.setattr(sys, "argv", ["rounds", "--json", "--rounds", "3", "--repeats", "1", "--cache", "256"])
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_default_matmul_precision
    try:
        assert rounds.main() == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_default_matmul_precision", before[1])
    record = json.loads(capsys.readouterr().out)
    plain, tree = record["rounds"]["plain"], record["rounds"]["tree"]
    assert tree["plain_steps"] == pytest.approx(tree["program"] / plain["program"])
    assert tree["host"] == pytest.approx(tree["calls"] / tree["program"])
    assert record["share_of_bound"] == pytest.approx(
        record["weight_bytes"] / record["bytes_per_second"] / plain["program"]
    )
    assert 1e7 < record["bytes_per_second"] < 1e13
    # Every weight but the embedding's, in bf16.
    target, _ = rounds.random_models("toy", "bfloat16")
    leaves = sum(leaf.size for leaf in jax.tree.leaves(target.params)) - target.params.embed.size
    assert record["weight_bytes"] == 2 * leaves


def test_more_rounds_than_the_cache_holds_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["rounds", "--rounds", "1000"])
    with pytest.raises(InputError, match="--cache of at least 9138 for 1000 rounds after 128 tokens; found 1024"):
        rounds.main()
