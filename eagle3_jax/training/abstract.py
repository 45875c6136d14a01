"""A training run without weights or data: the shapes, types and places of everything that it holds, and its programs.

From these follow what a run will take (`plan`), before anything is paid for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.drafters import Plan
from eagle3_jax.generate import Structure, decode_round, empty_state
from eagle3_jax.sampling import Sampling
from eagle3_jax.sharding import abstract_placed, batch_axes, partition, replicated
from eagle3_jax.target import Target, stack_specs, target_specs
from eagle3_jax.training.config import TrainConfig, check_row_length, check_taps
from eagle3_jax.training.loss import Batch
from eagle3_jax.training.start import new_shape
from eagle3_jax.training.step import (
    Teacher,
    TrainState,
    init_optimizer,
    make_train_step,
    optimizer_of,
    step_options,
    target_features,
)
from eagle3_jax.vocab import DraftVocab

DRAFT_LENGTH = 4  # of the chain whose round is planned
EOS = 4  # ids that end an answer, padded to this many


def device_bytes(tree: Any) -> int:
    """Bytes of a tree on each device, by the shapes of its shards."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    return total


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """Everything that a run holds, as `jax.ShapeDtypeStruct`s with their places on the mesh.

    Attributes:
      config: the run.
      attention: who computes attention, one of `attention.PACKED`.
      mesh: None for one device.
      target: the target whole, of which `kept` stays in memory.
      state: draft, optimiser, counters.
      model: the draft whose `params` are in the state.
      teacher: the target's head at the draft vocabulary.
      batches: the rows of an update, with their features.
    """

    config: TrainConfig
    attention: str
    mesh: Mesh | None
    target: Target
    state: TrainState
    model: Draft
    teacher: Teacher
    batches: Batch

    @property
    def kept(self) -> Any:
        """What of the target stays in memory."""
        if not self.config.features or self.config.decodes:
            return unique_params(self.target)
        return dataclasses.replace(unique_params(self.target), layers=())


def unique_params(target: Target) -> Any:
    """The target's parameters, those of a tied head once."""
    params = target.params
    return dataclasses.replace(params, lm_head=None) if target.config.tie_word_embeddings else params


def abstract_run(
    config: TrainConfig, shape: TargetConfig, mesh: Mesh | None, platform: str, *, stacked: bool = True
) -> AbstractRun:
    """Describe a run.

    Args:
      config: the run.
      shape: of its target.
      mesh: the devices, which may be those of a topology that is not here; None for one local device.
      platform: theirs; decides who computes attention.
      stacked: the target's layers as one, as training holds them; decoding has them apart.

    Raises:
      InputError: see `TrainConfig.check`; taps, rows or attention that the target or the devices do not have.
    """
    config.check()
    taps = config.taps or shape.default_taps
    check_taps(taps, shape.num_layers)
    check_row_length(config.row_length, shape.context_limit)
    attention = config.attention_on(platform, shape.head_dim)

    def array(dims: tuple[int, ...], dtype: Any, *axes: Any) -> Any:
        if mesh is None:
            return jax.ShapeDtypeStruct(dims, dtype)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    target_dtype = jnp.dtype(config.target_dtype)
    specs = target_specs(shape)
    if stacked:
        specs = dataclasses.replace(specs, layers=stack_specs(cast(Any, specs.layers)))
    target = Target(params=abstract_placed(specs, mesh, target_dtype), config=shape)
    draft_shape = new_shape(config, shape, taps)
    weights, number = abstract_placed(draft_specs(draft_shape), mesh), array((), jnp.int32)
    opt_state = init_optimizer(optimizer_of(config), weights, mesh)
    vocab = DraftVocab(d2t=array((draft_shape.draft_vocab_size,), jnp.int32), t2d=array((shape.vocab_size,), jnp.bool_))
    head = weights.lm_head
    label_head: Any = jax.ShapeDtypeStruct(head.shape, target_dtype, sharding=head.sharding)
    teacher = Teacher(label_head=label_head)
    rows = (config.accumulation, config.batch_rows, config.row_length)
    split = None if mesh is None else batch_axes(mesh.shape)
    stored = target_dtype if not config.features else jnp.bfloat16
    integers = {
        name: array(rows, jnp.int32, None, split) for name in ("tokens", "spans", "documents", "positions", "argmax")
    }
    features = {
        "taps": array((*rows, len(taps) * shape.hidden_size), stored, None, split),
        "hidden": array((*rows, shape.hidden_size), stored, None, split),
    }
    return AbstractRun(
        config=config,
        attention=attention,
        mesh=mesh,
        target=target,
        state=TrainState(weights, opt_state, number, number),
        model=Draft(params=None, vocab=vocab, embed=target.params.embed, config=draft_shape),  # type: ignore[arg-type]
        teacher=teacher,
        batches=Batch(**integers, **features),
    )


def trace_update(run: AbstractRun, attention: str | None = None) -> jax.stages.Traced:
    """The update with the most unrolled steps, traced; lower and compile it, or look into its jaxpr."""
    config = run.config
    step = make_train_step(optimizer_of(config), attention=attention or run.attention, **step_options(config))
    return step.trace(run.state, run.batches, run.model, run.teacher, steps=config.max_steps)


def trace_teacher(run: AbstractRun, attention: str | None = None) -> jax.stages.Traced:
    """The target's pass over the rows of one micro-batch, traced."""
    one = run.batches.tokens
    sharding = None
    if run.mesh is not None:
        sharding = NamedSharding(run.mesh, PartitionSpec(batch_axes(run.mesh.shape)))
    rows: Any = jax.ShapeDtypeStruct(one.shape[1:], one.dtype, sharding=sharding)
    taps = run.model.config.taps
    return target_features.trace(run.target, rows, rows, rows, taps=taps, attention=attention or run.attention)


def trace_round(run: AbstractRun, rows: int, cache_length: int) -> tuple[jax.stages.Traced, Any, Draft]:
    """A round of greedy decoding with a chain of `DRAFT_LENGTH`, traced.

    Args:
      run: gives both models; the draft in the target's precision.
      rows: sequences, split over the mesh as the rows of a batch are.
      cache_length: rows of the caches.

    Returns:
      The traced round, the state that it works on, the draft.
    """
    dtype, mesh = run.target.params.embed.dtype, run.mesh
    narrow = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    draft = dataclasses.replace(run.model, params=jax.tree.map(narrow, run.state.params))
    structure = Structure(plan=Plan(DRAFT_LENGTH))
    make = lambda target, draft: empty_state(target, draft, batch=rows, cache_length=cache_length, structure=structure)
    state = jax.eval_shape(make, run.target, draft)

    def place(path: Any, leaf: Any) -> Any:
        if mesh is None:
            return leaf
        # A CPU keeps caches in fp32 (see `cache.empty_cache`); the devices that are planned for may be others.
        name = jax.tree_util.keystr(path)
        kind = dtype if ".keys" in name or ".values" in name else leaf.dtype
        axes: tuple[Any, ...] = ("batch", *[None] * (leaf.ndim - 1))
        if leaf.ndim == 4:
            axes = ("batch", "kv_heads", None, None)
        return jax.ShapeDtypeStruct(
            leaf.shape, kind, sharding=NamedSharding(mesh, partition(axes, leaf.shape, mesh.shape))
        )

    state = jax.tree_util.tree_map_with_path(place, state)

    def row(dtype: Any) -> Any:
        sharding = None if mesh is None else NamedSharding(mesh, partition(("batch",), (rows,), mesh.shape))
        return jax.ShapeDtypeStruct((rows,), dtype, sharding=sharding)

    sampling = Sampling(row(jnp.float32), row(jnp.int32), row(jnp.float32), row(jnp.uint32))
    eos: Any = jax.ShapeDtypeStruct((EOS,), jnp.int32, sharding=None if mesh is None else replicated(mesh))
    return decode_round.trace(run.target, draft, state, sampling, eos, structure=structure), state, draft
