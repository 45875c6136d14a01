"""What the update of an 8B-shaped draft needs in memory, from the compiler, without weights."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.training.abstract import abstract_run, trace_update
from eagle3_jax.training.config import TrainConfig, load_config, load_shape
from eagle3_jax.training.head import soft_cross_entropy

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
            # The head's own gradient is [4096, 32000].
            for width in (32000, 128256) if tokens != 4096 else (128256,):
                assert not re.search(rf"f32\[(1,)?{tokens},{width}\]|f32\[7,(1,)?{length},{width}\]", text)
    print(rematerialise, [f"{size / 2**30:.2f} GiB" for size in sizes])
    for one, two in pairwise(sizes):
        assert two <= 2.2 * one


def test_the_head_and_its_gradients_take_less_than_one_block_of_logits():
    steps, tokens, width, vocab = 2, 1024, 256, 32000
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

    @jax.jit
    def gradients(hidden, head, label_hidden, label_head, weights):
        loss = lambda hidden, head: soft_cross_entropy(hidden, head, label_hidden, label_head, weights, weights > 0)[0]
        return jax.grad(loss, argnums=(0, 1))(hidden, head)

    program = gradients.lower(
        array(steps, tokens, width), array(vocab, width), array(tokens, width), array(vocab, width),
        array(steps, tokens),
    ).compile()  # fmt: skip
    found: Any = program.memory_analysis()
    # The head's gradient is laid out in two ways.
    assert found.temp_size_in_bytes - 2 * vocab * width * 4 < 0.6 * tokens * vocab * 4
