"""A training run without weights or data: the shapes, types and places of everything that it holds, and its programs.

From these follow what a run will take (`plan`), before anything is paid for.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.cache import cache_bucket
from eagle3_jax.config import TargetConfig
from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.drafters import Plan
from eagle3_jax.generate import Structure, decode_round, empty_state
from eagle3_jax.sampling import Sampling
from eagle3_jax.sharding import AXES, abstract_placed, batch_axes, entered, partition, replicated
from eagle3_jax.target import Target, stack_specs, target_specs
from eagle3_jax.training.config import TrainConfig, check_row_length, check_taps
from eagle3_jax.training.evaluation import DECODED_TOKENS, chain_length, decoding_mesh
from eagle3_jax.training.loss import Batch
from eagle3_jax.training.start import planned_shape
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

EOS = 8  # ids that end an answer, padded to this many


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
    draft_shape = planned_shape(config, shape)
    taps = draft_shape.taps
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


@dataclasses.dataclass(frozen=True)
class AbstractRound:
    """A round of the greedy decoding of an evaluation: one row, a chain.

    Attributes:
      run: the models, where they decode.
      copied: whether they are there a second time, split in another way than in training.
      draft: in the target's precision.
      state: of `generate`, caches included.
      structure: its static part.
    """

    run: AbstractRun
    copied: bool
    draft: Draft
    state: Any
    structure: Structure

    def trace(self) -> jax.stages.Traced:
        """The round, traced."""
        mesh = self.run.mesh
        row: Any = lambda dtype, size=1: jax.ShapeDtypeStruct(
            (size,), dtype, sharding=None if mesh is None else replicated(mesh)
        )
        sampling = Sampling(row(jnp.float32), row(jnp.int32), row(jnp.float32), row(jnp.uint32))
        return decode_round.trace(
            self.run.target, self.draft, self.state, sampling, row(jnp.int32, EOS), structure=self.structure
        )


def abstract_round(run: AbstractRun, platform: str) -> AbstractRound:
    """Describe a round of decoding, as evaluations of a run do it, with a cache for the longest prompt of its rows."""
    config, mesh, shape = run.config, run.mesh, run.target.config
    copied = mesh is not None and mesh.shape["fsdp"] > 1
    if mesh is not None and copied:
        mesh = decoding_mesh(mesh, shape.num_heads)
        sizes = tuple(mesh.shape[name] for name in AXES)
        config = dataclasses.replace(config, mesh=sizes[1:], batch_rows=sizes[0] * sizes[1])
        run = abstract_run(config, shape, mesh, platform, stacked=False)
    dtype, length = run.target.params.embed.dtype, chain_length(config)
    narrow: Any = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    draft = dataclasses.replace(run.model, params=jax.tree.map(narrow, run.state.params))
    structure = Structure(plan=Plan(length))
    longest = min(config.row_length + DECODED_TOKENS, shape.context_limit) + length + 1
    rows = cache_bucket(longest, shape.context_limit + length + 1)
    make = lambda target, draft: empty_state(target, draft, batch=1, cache_length=rows, structure=structure)
    with entered(mesh) if isinstance(mesh, Mesh) else nullcontext():
        state = jax.eval_shape(make, run.target, draft)

    def place(path: Any, leaf: Any) -> Any:
        if mesh is None:
            return leaf
        # A CPU keeps caches in fp32 (see `cache.empty_cache`); the devices that are planned for may be others.
        name = jax.tree_util.keystr(path)
        kind = dtype if platform != "cpu" and (".keys" in name or ".values" in name) else leaf.dtype
        axes = (None, "kv_heads", None, None) if leaf.ndim == 4 else (None,) * leaf.ndim
        return jax.ShapeDtypeStruct(
            leaf.shape, kind, sharding=NamedSharding(mesh, partition(axes, leaf.shape, mesh.shape))
        )

    return AbstractRound(run, copied, draft, jax.tree_util.tree_map_with_path(place, state), structure)
