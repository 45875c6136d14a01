"""What a run will take, before it is paid for: its programs compiled for devices that need not be here.

For a TPU slice libtpu compiles the real update, the teacher's pass and a round of decoding, and says what they need;
for the local devices their own compiler does. GPUs that are not here are estimated by arithmetic, and marked so.

A part's bytes follow from the shapes of its shards; `temporary` is the compiler's. The time is a roofline: the longest
of what the products, the memory's traffic and the network's traffic would take at the makers' figures, so a run is
slower than that. Traffic is counted by formulas given below.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import draft_specs
from eagle3_jax.errors import InputError
from eagle3_jax.flops import count_flops
from eagle3_jax.hardware import GIB, Topology
from eagle3_jax.params import count_params
from eagle3_jax.sharding import AXES, entered, make_mesh
from eagle3_jax.target import target_specs
from eagle3_jax.training.abstract import (
    AbstractRound,
    AbstractRun,
    abstract_round,
    abstract_run,
    device_bytes,
    trace_teacher,
    trace_update,
    unique_params,
)
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.evaluation import chain_length
from eagle3_jax.training.head import HEAD_CHUNK, ceil_div
from eagle3_jax.training.start import planned_shape
from eagle3_jax.training.step import ARGMAX_CHUNK

LEAST_ROW = 512  # rows that are not advised to be made shorter
PARTS = ("target", "draft", "optimiser", "batch", "caches", "temporary")
# "Used 17.25G of 15.75G hbm. Exceeded hbm capacity by 1.50G.", of a whole program; or, of its temporaries alone,
# "the total memory required for HLO temporaries (48.81G) exceeds available HBM (15.75G)".
_EXCEEDED = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
_TEMPORARIES = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program and what is in memory while it runs, in bytes on each device.

    Attributes:
      parts: by PARTS, everything that is held, whether or not this program reads it.
      arguments: of them what it reads, by the shapes of the shards.
      compiled: argument + output + temporary - aliased bytes, as the compiler says; None where it was not asked or
        refused.
      seconds: it took to compile.
    """

    parts: Mapping[str, int]
    arguments: int
    compiled: int | None
    seconds: float

    @property
    def total(self) -> int:
        """Bytes while it runs."""
        return sum(self.parts.values())


def make_plan(config: TrainConfig, shape: TargetConfig, topology: Topology) -> dict[str, Any]:
    """Compile, or estimate, a run.

    Args:
      config: the run.
      shape: of its target, whose weights are not read.
      topology: the devices.

    Returns:
      topology, devices, device_kind, estimated, attention (who computes it), fits (None where the devices' memory is
      not known), bytes_per_device, programs, flops_per_step, roofline_seconds, bound (both None where the devices'
      rates are not known), compile_seconds, advice.

      bytes_per_device has what the largest program takes. Its `caches` are those of a round of decoding at an
      evaluation, which is no part of an update: there `temporary` is what is needed beyond their space.

    Raises:
      InputError: see `abstract_run` and `make_mesh`.
    """
    mesh, estimated = _mesh(config, topology), topology.devices is None
    platform = topology.devices[0].platform if topology.devices else "gpu"
    run = abstract_run(config, shape, mesh, platform)
    with jax.default_matmul_precision(config.precision):
        with jax.sharding.use_abstract_mesh(mesh) if estimated else entered(mesh):
            flops = _flops(run)
        programs = _estimated(run) if estimated else _compiled_programs(run, platform)
    memory = _memory(topology)
    described = {
        name: {
            "total": one.total, **one.parts, "arguments": one.arguments, "compiled": one.compiled,
            "fits": None if memory is None else one.total <= memory,
        }
        for name, one in programs.items()
    }  # fmt: skip
    parts = dict(max(programs.values(), key=lambda program: program.total).parts)
    if "round" in programs and not parts["caches"]:
        parts["caches"] = programs["round"].parts["caches"]
        parts["temporary"] = max(0, parts["temporary"] - parts["caches"])
    count = 1 if mesh is None else mesh.size
    found = {
        "topology": topology.name, "devices": count, "device_kind": topology.kind, "estimated": estimated,
        "attention": run.attention, "bytes_per_device": {"total": sum(parts.values()), **parts},
        "programs": described, "compile_seconds": sum(program.seconds for program in programs.values()),
    }  # fmt: skip
    return found | _verdict(config, shape, topology, flops, count, sum(parts.values()))


def _mesh(config: TrainConfig, topology: Topology) -> Any:
    """The devices as a mesh; None for one local device."""
    if topology.devices is None:
        sizes = _mesh_sizes(config)
        if math.prod(sizes.values()) != topology.count:
            raise _no_mesh(config, topology)
        kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
        return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    if config.mesh:
        return make_mesh(config.mesh, slices=config.slices, devices=topology.devices)
    if topology.chip is None:
        return None
    if topology.count > 1:
        raise _no_mesh(config, topology)
    # One device that is not here: a mesh of one says where to compile for.
    return make_mesh((1, 1, 1), devices=topology.devices)


def _no_mesh(config: TrainConfig, topology: Topology) -> InputError:
    return InputError(
        expected=f"a mesh over the {topology.count} devices of {topology.name}",
        found=f"mesh {config.mesh} and {config.slices} slices",
        remedy=f"Add e.g. --mesh '(1,{topology.count // config.slices},1)'.",
    )


def _memory(topology: Topology) -> float | None:
    """Bytes that a device of a topology has; None where nothing says so, as on a CPU."""
    if topology.chip is not None:
        return topology.chip.hbm
    assert topology.devices is not None
    return (topology.devices[0].memory_stats() or {}).get("bytes_limit")


def _flops(run: AbstractRun) -> int:
    """Operations of an update and the teacher's passes that it needs, attention over all T keys included."""
    config = run.config
    parts = 1 if run.mesh is None else run.mesh.size // run.mesh.shape["tensor"]
    chunks = ceil_div(config.batch_rows * config.row_length // parts, HEAD_CHUNK)
    total = count_flops(trace_update(run, "chunked").jaxpr, trips=chunks)
    if not config.features:
        total += config.accumulation * count_flops(trace_teacher(run, "chunked").jaxpr)
    return total


def _compiled(traced: jax.stages.Traced, arguments: int) -> tuple[int, int | None, int, float]:
    """Temporary bytes, the compiler's whole figure, bytes of results that nothing else counts, seconds.

    A program that does not fit is refused by the TPU's compiler, which says how much it would take.
    """
    began = time.perf_counter()
    lowered = traced.lower()
    try:
        found: Any = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        of_program = _EXCEEDED.search(str(error))
        match = of_program or _TEMPORARIES.search(str(error))
        if match is None:
            raise
        size = int(float(match[1]) * _UNITS[match[2]])
        return size - (arguments if of_program else 0), None, 0, time.perf_counter() - began
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    whole = found.argument_size_in_bytes + found.temp_size_in_bytes + results
    return found.temp_size_in_bytes, whole, results, time.perf_counter() - began


def _program(traced: jax.stages.Traced, held: dict[str, int], arguments: int) -> Program:
    temporary, whole, results, seconds = _compiled(traced, arguments)
    parts = {name: held.get(name, 0) for name in PARTS} | {"temporary": temporary + results}
    return Program(parts, arguments, whole, seconds)


def _compiled_programs(run: AbstractRun, platform: str) -> dict[str, Program]:
    """What training runs, as the devices' own compiler has it."""
    programs, held = {}, _held(run)
    with entered(run.mesh):
        read = device_bytes((run.state, run.batches, run.model, run.teacher))
        programs["update"] = _program(trace_update(run), held, read)
        if not run.config.features:
            rows = device_bytes(run.batches.tokens) // run.config.accumulation
            programs["teacher"] = _program(trace_teacher(run), held, device_bytes(run.target.params) + 3 * rows)
    if run.config.decodes:
        one = abstract_round(run, platform)
        # The compiler counts an array once for every argument that it is: the embedding is also the draft's.
        read = device_bytes((one.run.target.params, one.draft, one.state))
        with entered(one.run.mesh):
            programs["round"] = _program(one.trace(), _held_decoding(run, one), read)
    return programs


def _held(run: AbstractRun) -> dict[str, int]:
    """What stays in memory between the programs of training.

    The batch is there three times: programs are started before the last one has ended, so that the next update's
    micro-batches, and the stack of them, are made while this one's is in use.
    """
    head = device_bytes(run.teacher)
    return {
        "target": device_bytes(run.kept) + head,
        "draft": device_bytes(run.state.params) + device_bytes(run.model.vocab),
        "optimiser": device_bytes(run.state.opt_state),
        "batch": 3 * device_bytes(run.batches),
    }


def _held_decoding(run: AbstractRun, one: AbstractRound) -> dict[str, int]:
    """What is in memory while an evaluation decodes: all that training goes on with, a narrow draft, and the caches."""
    held = _held(run)
    copies = device_bytes(unique_params(one.run.target)) if one.copied else 0
    vocab = device_bytes(one.draft.vocab) if one.copied else 0
    return held | {
        "target": held["target"] + copies,
        "draft": held["draft"] + device_bytes(one.draft.params) + vocab,
        "batch": 0,
        "caches": device_bytes(one.state),
    }


def _estimated(run: AbstractRun) -> dict[str, Program]:
    """Programs by arithmetic.

    Temporary bytes of an update are the sum of: the gradients gathered in fp32, and split as the draft is; the draft
    gathered in the compute precision; for each row that a device has, what every unrolled step keeps for the backward
    pass, and four copies of all steps' outputs that the loss arranges; the largest layer of the target, gathered twice
    over; one chunk of logits and their gradient, of all steps. Of a round: a layer, and the logits of its tokens twice.
    """
    config, shape, draft, sizes = run.config, run.target.config, run.model.config, _mesh_sizes(run.config)
    parts, tensor = sizes["slice"] * sizes["data"] * sizes["fsdp"], sizes["tensor"]
    wide = jnp.dtype(config.compute_dtype).itemsize
    tokens = config.batch_rows * config.row_length // parts
    kept = (_kept_widths(config, draft, tensor) + 4 * draft.hidden_size) * wide * tokens * config.max_steps
    weights = count_params(draft_specs(draft)) // tensor
    layers = count_params(target_specs(shape).layers) // tensor * jnp.dtype(config.target_dtype).itemsize
    gathered = 0 if config.features else 2 * layers // shape.num_layers
    chunk = HEAD_CHUNK * config.max_steps * draft.draft_vocab_size // tensor * 8
    held = _held(run)
    temporary = held["optimiser"] // 2 + weights * (4 + wide) + kept + gathered + chunk
    read = device_bytes((run.state, run.batches, run.model, run.teacher))
    zeros = dict.fromkeys(PARTS, 0)
    programs = {"update": Program(zeros | held | {"temporary": temporary}, read, None, 0.0)}
    if config.decodes:
        one = abstract_round(run, "gpu")
        logits = (chain_length(config) + 1) * shape.vocab_size * 4
        temporary = 2 * logits + device_bytes(one.run.target.params.layers) // shape.num_layers
        read = device_bytes((one.run.target.params, one.draft, one.state))
        parts_of = zeros | _held_decoding(run, one) | {"temporary": temporary}
        programs["round"] = Program(parts_of, read, None, 0.0)
    return programs


def _kept_widths(config: TrainConfig, draft: DraftConfig, tensor: int) -> int:
    """Numbers that a slot of one unrolled step keeps for the backward pass, by the policy of rematerialisation."""
    heads = (draft.num_heads + 2 * draft.num_kv_heads) * draft.head_dim // tensor
    steps = 3 * draft.hidden_size + heads  # the carry, its normed copy for the head, its gradient; keys and values
    if config.rematerialise == "all":
        return steps
    products = steps + 2 * draft.hidden_size + 2 * draft.intermediate_size // tensor
    if config.rematerialise == "activations":
        return products
    return products + 8 * draft.hidden_size + 2 * draft.intermediate_size // tensor


def _mesh_sizes(config: TrainConfig) -> dict[str, int]:
    return dict(zip(AXES, (config.slices, *(config.mesh or (1, 1, 1)))))


def traffic(
    config: TrainConfig, shape: TargetConfig, draft: DraftConfig, sizes: Mapping[str, int]
) -> tuple[float, float, float]:
    """Bytes that each device moves in an update: through its memory, through the fast network, through the slow one.

    Memory: the target's gathered weights once a micro-batch, its head once for every 512 tokens, the draft's three
    times an unrolled step (the pass and both its gradients), 28 bytes a parameter of the optimiser's share, and 16
    widths of activations for each token of each layer or step. Network: gathering what fsdp splits (the target once a
    micro-batch, the draft twice) and scattering the draft's gradients; sums of activations over tensor (two a layer,
    four a step); sums of gradients over data, and over slices on the slow network, each twice its size.
    """
    tensor, fsdp = sizes["tensor"], sizes["fsdp"]
    parts = sizes["slice"] * sizes["data"] * fsdp
    wide, stored = jnp.dtype(config.compute_dtype).itemsize, jnp.dtype(config.target_dtype).itemsize
    tokens = config.batch_rows * config.row_length / parts
    online = 0 if config.features else config.accumulation
    specs = target_specs(shape)
    head = count_params(specs.lm_head) / tensor * stored
    target = count_params(specs.layers) / tensor * stored + head
    weights = count_params(draft_specs(draft)) / tensor
    steps = config.accumulation * config.max_steps
    row = tokens * draft.hidden_size
    memory = (
        online * (target + head * (max(1, tokens / ARGMAX_CHUNK) - 1) + 16 * row * shape.num_layers * stored)
        + steps * (3 * weights * wide + 16 * row * wide)
        + 28 * weights / fsdp
    )
    apart = (fsdp - 1) / fsdp
    between = (tensor - 1) / tensor
    network = apart * (online * target + config.accumulation * (2 * weights * wide + 4 * weights))
    network += between * 2 * row * (online * 2 * shape.num_layers * stored + steps * 4 * wide)
    network += 2 * 4 * weights / fsdp * (sizes["data"] - 1) / sizes["data"]
    slow = 2 * 4 * weights / fsdp * (sizes["slice"] - 1) / sizes["slice"]
    return memory, network, slow


def _verdict(
    config: TrainConfig, shape: TargetConfig, topology: Topology, flops: int, count: int, total: int
) -> dict[str, Any]:
    memory_size, chip = _memory(topology), topology.rates
    found: dict[str, Any] = {"flops_per_step": flops, "fits": None, "advice": ""}
    if memory_size is not None:
        found["fits"] = total <= memory_size
        if not found["fits"]:
            found["advice"] = (
                f"{(total - memory_size) / GIB:.2f} GiB a device more than {memory_size / GIB:.2f}: "
                + "; ".join(_remedies(config))
            )
    if chip is None:
        return found | {"roofline_seconds": None, "bound": None}
    draft = planned_shape(config, shape)
    memory, network, slow = traffic(config, shape, draft, _mesh_sizes(config))
    seconds = {
        "compute": flops / count / (chip.flops if config.precision == "default" else chip.flops_fp32),
        "memory": memory / chip.hbm_bandwidth,
        "network": network / chip.network + slow / chip.slow_network,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return found | {"roofline_seconds": seconds[bound], "bound": bound, "seconds_by_resource": seconds}


def _remedies(config: TrainConfig) -> list[str]:
    """What would take less memory, cheapest first."""
    found = []
    if config.target_dtype == "float32" and not config.features:
        found.append("--target_dtype bfloat16")
    if config.compute_dtype == "float32":
        found.append("--compute_dtype bfloat16")
    if config.rematerialise != "all":
        found.append("--rematerialise all")
    if config.mesh and config.mesh[0] > 1:
        found.append("fsdp instead of data in --mesh")
    parts = max(1, config.slices * (config.mesh[0] * config.mesh[1] if config.mesh else 1))
    if config.batch_rows > parts:
        found.append(f"--batch_rows {parts} with more --accumulation")
    if config.decodes:
        found.append("--decoded_prompts 0")
    if not config.features:
        found.append("features on disk (eagle3-jax data features): with no prompts decoded, no target's layers")
    found.append("more devices" if config.row_length <= LEAST_ROW else "shorter rows (--row_length), more devices")
    return found


def shown(plan: Mapping[str, Any]) -> str:
    """A plan as text."""
    lines = [
        f"{plan['topology']}, {plan['devices']} devices" + (" (estimated by arithmetic)" if plan["estimated"] else "")
    ]
    gib = lambda value: f"{value / GIB:9.3f} GiB"
    lines += [f"  {name:<12}{gib(value)}" for name, value in plan["bytes_per_device"].items()]
    for name, program in plan["programs"].items():
        compiled = "refused by the compiler" if program["compiled"] is None else gib(program["compiled"]).strip()
        itself = "" if plan["estimated"] else f"; itself, as compiled: {compiled}"
        verdict = "" if program["fits"] is None else "; fits" if program["fits"] else "; does not fit"
        lines.append(f"  {name:<12}{gib(program['total'])} held while it runs{itself}{verdict}")
    lines.append(f"  {plan['flops_per_step']:.3e} operations an update")
    if plan["bound"]:
        lines.append(f"  at least {plan['roofline_seconds']:.3f} s an update, bound by {plan['bound']}")
    else:
        lines.append(f"  no time: what one {plan['device_kind']} can do is not known")
    if plan["fits"] is not None:
        lines.append("  fits" if plan["fits"] else f"  does not fit: {plan['advice']}")
    return "\n".join(lines)
