"""What the update of an 8B-shaped draft needs in memory, from the compiler, without weights."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import jax
import pytest

from eagle3_jax.training.abstract import abstract_run, trace_update
from eagle3_jax.training.config import TrainConfig, load_config, load_shape

PATH = Path(__file__).parents[1] / "configs" / "llama_3_1_8b.py"


def config_of(length: int, **changes: object) -> TrainConfig:
    """Seven steps on one row, features from disk."""
    config = dataclasses.replace(
        load_config(PATH), mesh=(), features=("f",), row_length=length, batch_rows=1, accumulation=1
    )
    return dataclasses.replace(config, **changes)


def compiled(config: TrainConfig) -> jax.stages.Compiled:
    shape = load_shape(PATH)
    assert shape is not None
    return trace_update(abstract_run(config, shape, None, "cpu")).lower().compile()


@pytest.mark.full
@pytest.mark.parametrize("rematerialise", ["all", "activations", "nothing"])
def test_temporary_memory_grows_with_the_length_and_not_with_its_square(rematerialise: str):
    lengths = (512, 1024, 2048, 4096)
    sizes = []
    for length in lengths:
        program = compiled(config_of(length, rematerialise=rematerialise))
        sizes.append(program.memory_analysis().temp_size_in_bytes)
        text = program.as_text()
        # No logits of all tokens, over the draft's vocabulary or the target's.
        for tokens in (length, 7 * length):
            for width in (32000, 128256):
                assert not re.search(rf"f32\[(1,)?{tokens},{width}\]|f32\[7,(1,)?{length},{width}\]", text)
    print(rematerialise, [f"{size / 2**30:.2f} GiB" for size in sizes])
    for one, two in pairwise(sizes):
        assert two <= 2.2 * one


def test_a_long_row_needs_less_than_one_block_of_logits_beside_the_weights():
    config = config_of(1024, draft_vocab_size=32000, schedule=((20000, 2),), rematerialise="all")
    program = compiled(config)
    logits = 1024 * 32000 * 4
    run = abstract_run(config, load_shape(PATH), None, "cpu")  # type: ignore[arg-type]
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(run.state.params))
    # Gradients, and weights in the compute precision, are as large as the weights.
    assert program.memory_analysis().temp_size_in_bytes < 2 * weights + 1.2 * logits
