"""What a run will hold in memory, by compiling its widest update without weights or data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from eagle3_jax.checkpoint import read_target_config
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.params import abstract_params
from eagle3_jax.target import Target, target_specs
from eagle3_jax.training.config import TrainConfig, check_row_length, check_taps
from eagle3_jax.training.loss import Batch
from eagle3_jax.training.start import new_shape
from eagle3_jax.training.step import Teacher, TrainState, make_optimizer, make_train_step, target_features
from eagle3_jax.vocab import DraftVocab


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def measure_memory(config: TrainConfig) -> dict[str, int]:
    """Compile the update with the most unrolled steps, and the target's pass where it runs in the loop.

    Args:
      config: the run; of its target only config.json is read.

    Returns:
      Bytes: `target`, `draft` (fp32 weights), `optimiser` (its state), `batch` (rows with features), `temporary` (what
      the larger of the two programs needs beside its arguments and results: gradients, activations, logits), `total`.

    Raises:
      InputError: see `TrainConfig.check` and the target's config.
    """
    config.check()
    folder = Path(config.target)
    shape = read_target_config(folder)
    taps = config.taps or shape.default_taps
    check_taps(taps, shape.num_layers)
    check_row_length(config.row_length, shape.context_limit)
    target = Target(params=abstract_params(target_specs(shape)), config=shape)
    draft_shape = new_shape(config, shape, taps)
    params = abstract_params(draft_specs(draft_shape))
    array = jax.ShapeDtypeStruct
    number: Any = array((), jnp.int32)
    optimizer = make_optimizer(
        config.learning_rates(), betas=config.betas, weight_decay=config.weight_decay, clip=config.clip
    )
    state = TrainState(params, jax.eval_shape(optimizer.init, cast(Any, params)), number, number)
    vocab = DraftVocab(
        d2t=cast(Any, array((draft_shape.draft_vocab_size,), jnp.int32)),
        t2d=cast(Any, array((shape.vocab_size,), jnp.bool_)),
    )
    model = Draft(params=cast(Any, None), vocab=vocab, embed=target.params.embed, config=draft_shape)
    teacher = Teacher(
        label_head=cast(Any, array((draft_shape.draft_vocab_size, shape.hidden_size), target.params.embed.dtype))
    )
    stored = jnp.float32 if not config.features else jnp.bfloat16
    rows = (config.accumulation, config.batch_rows, config.row_length)
    integers = {name: array(rows, jnp.int32) for name in ("tokens", "spans", "documents", "positions", "argmax")}
    features = {
        "taps": array((*rows, len(taps) * shape.hidden_size), stored),
        "hidden": array((*rows, shape.hidden_size), stored),
    }
    batches = Batch(**cast(Any, integers | features))
    step = make_train_step(
        optimizer,
        decay=config.step_decay,
        compute=jnp.dtype(config.compute_dtype),
        rematerialise=config.rematerialise,
    )
    programs = [step.lower(state, batches, model, teacher, steps=config.max_steps)]
    if not config.features:
        one = cast(Any, array(rows[1:], jnp.int32))
        programs.append(target_features.lower(target, one, one, one, taps=taps))
    analyses: list[Any] = [program.compile().memory_analysis() for program in programs]
    sizes = {
        "target": _bytes(target.params) - (_bytes(target.params.lm_head) if shape.tie_word_embeddings else 0),
        "draft": _bytes(params),
        "optimiser": _bytes(state.opt_state),
        "batch": _bytes(batches),
        "temporary": max(analysis.temp_size_in_bytes for analysis in analyses),
    }
    return sizes | {"total": sum(sizes.values())}
