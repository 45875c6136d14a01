"""What the update of an 8B-shaped draft needs in memory, from the compiler, without weights."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.attention import packed_attend
from eagle3_jax.config import TargetConfig
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training.abstract import abstract_run, device_bytes, trace_teacher, trace_update
from eagle3_jax.training.config import TrainConfig, load_config, load_shape
from eagle3_jax.training.head import HEAD_CHUNK, soft_cross_entropy

PATH = Path(__file__).parents[1] / "configs" / "llama_3_1_8b.py"
SHAPE = load_shape(PATH)


# Vocabularies that are larger than anything else, in rows of several chunks.
SMALL = TargetConfig(
    vocab_size=16384, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
SMALL_RUN = TrainConfig(
    target="", output="", data=("rows.jsonl",), draft_vocab_size=4096, taps=(0, 1, 2), row_length=1536, batch_rows=2,
    updates=2, schedule=((2, 2),), warmup=0,
)  # fmt: skip


def assert_no_array_of(text: str, count: int, weights: Any) -> None:
    """No array of a compiled program has so many elements, but for those as large as a weight."""
    found = {tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\b(?:f|bf|s|u)\d+\[([\d,]+)\]", text)}
    assert len(found) > 20
    known = {leaf.size for leaf in jax.tree.leaves(weights)}
    assert [shape for shape in found if math.prod(shape) >= count and math.prod(shape) not in known] == []


@pytest.mark.parametrize("program", ["teacher", "update"])
def test_no_array_of_all_tokens_and_a_vocabulary_exists(program: str):
    """Of the teacher's program, which reads the whole vocabulary, and of the update's, which reads the draft's."""
    run = abstract_run(SMALL_RUN, SMALL, None, "cpu")
    trace, vocab = {"teacher": (trace_teacher, 16384), "update": (trace_update, 4096)}[program]
    tokens, compiled = SMALL_RUN.batch_rows * SMALL_RUN.row_length, trace(run).lower().compile()
    assert_no_array_of(compiled.as_text(), tokens * vocab, (run.target, run.state, run.teacher))
    if program == "update":
        # The state before lends its memory to the state after.
        assert compiled.memory_analysis().alias_size_in_bytes >= device_bytes(run.state)


def attention_of(length: int, kind: str) -> Any:
    """Attention at the third unrolled step, with its gradients."""
    q, k, v = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((2, length, 2, 16), (2, 1, 16, length), (2, 1, length, 16))
    )
    documents = jax.ShapeDtypeStruct((2, length), jnp.int32)
    attend = lambda q, runs, documents: packed_attend(q, *runs[0], documents, runs[1:], kind=kind).sum()
    return jax.jit(jax.grad(attend, argnums=(0, 1))).trace(q, [(k, v)] * 3, documents)


def update_of(length: int, kind: str) -> Any:
    """The update, two steps."""
    config = dataclasses.replace(SMALL_RUN, row_length=length, rematerialise="all", attention=kind)
    return trace_update(abstract_run(config, SMALL, None, "cpu"))


@pytest.mark.parametrize("kind", ["chunked", "reference"])
@pytest.mark.parametrize("trace", [attention_of, pytest.param(update_of, marks=pytest.mark.full)])
def test_what_a_longer_row_adds_is_in_proportion_unless_all_scores_are_made(trace: Any, kind: str):
    # From two chunks of queries on.
    programs = [trace(length, kind).lower().compile() for length in (1024, 2048, 4096)]
    sizes = [program.memory_analysis().temp_size_in_bytes for program in programs]
    one, two = sizes[1] - sizes[0], sizes[2] - sizes[1]
    print(kind, sizes)
    assert one > 0
    assert (two <= 2.5 * one) == (kind == "chunked")


def config_of(length: int, **changes: object) -> TrainConfig:
    """Seven steps on one row, features from disk."""
    config = dataclasses.replace(
        load_config(PATH), mesh=(), features=("f",), row_length=length, batch_rows=1, accumulation=1
    )
    return dataclasses.replace(config, **changes)


def compiled(config: TrainConfig) -> jax.stages.Compiled:
    assert SHAPE is not None
    return trace_update(abstract_run(config, SHAPE, None, "cpu")).lower().compile()


@pytest.mark.full
@pytest.mark.parametrize("rematerialise", ["all", "activations", "nothing"])
def test_temporary_memory_grows_with_the_length_and_not_with_its_square(rematerialise: str):
    lengths = (512, 1024, 2048, 4096)
    sizes = []
    for length in lengths:
        program = compiled(config_of(length, rematerialise=rematerialise))
        sizes.append(program.memory_analysis().temp_size_in_bytes)
        if length > 7 * HEAD_CHUNK:  # shorter rows have fewer logits than a chunk at all steps
            run = abstract_run(config_of(length), SHAPE, None, "cpu")  # type: ignore[arg-type]
            assert_no_array_of(program.as_text(), length * 32000, (run.target, run.state))
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
