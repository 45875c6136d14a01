"""Held-out acceptance: teacher-forced, and what real decoding makes of it.

Training may split weights by fsdp, which gathers them where they are used. A decoding round reads all of them for a few
tokens, so that gathering would take more memory and time than everything else: for the time of decoding there is a
second copy of both models, split by tensor in fsdp's place (`decoding_mesh`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from eagle3_jax.draft import Draft, draft_specs
from eagle3_jax.engine import decode
from eagle3_jax.metrics import conditional_n_alpha, joint_n_alpha, tau, teacher_forced
from eagle3_jax.requests import Answer, Request
from eagle3_jax.sharding import AXES, entered, replicated, shardings
from eagle3_jax.target import Target, target_specs
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import RowSource
from eagle3_jax.training.loss import EAGLE3, Objective, StepSums
from eagle3_jax.training.setup import Setup, batch_of, read_rows
from eagle3_jax.training.start import label_head
from eagle3_jax.training.step import Teacher, make_eval_step

logger = logging.getLogger(__name__)

# Real decoding that falls this much short of what teacher forcing promises points to a mismatch between the two.
GAP = 0.2
DECODED_TOKENS = 64  # of each held-out prompt
DRAFT_LENGTH = 5  # of the chain, or as many as there are unrolled steps


def chain_length(config: TrainConfig) -> int:
    """Drafts of the chain that evaluations of a run decode with."""
    return min(DRAFT_LENGTH, config.max_steps)


def metrics_of(sums: StepSums, objective: Objective = EAGLE3) -> dict[str, Any]:
    """Acceptance by step from the sums of an update or an evaluation; the feature loss only where it is part of it."""
    host = jax.tree.map(lambda array: np.asarray(array, np.float64).tolist(), sums)
    found = teacher_forced(**{field.name: getattr(host, field.name) for field in dataclasses.fields(StepSums)})
    if not objective.feature_loss:
        del found["feature_loss"]
    return found


def evaluate(
    setup: Setup, draft: Draft, steps: int, batch_rows: int, eval_step: Any, objective: Objective = EAGLE3
) -> dict[str, Any]:
    """Teacher-forced metrics on all held-out rows."""
    total: StepSums | None = None
    for start in range(0, len(setup.held_out), batch_rows):
        indices = [int(index) for index in setup.held_out[start : start + batch_rows]]
        real = len(indices)
        # A short last batch is filled up with rows that nothing counts in, so that one program serves all.
        indices += indices[:1] * (batch_rows - real)
        blank = lambda place, row, real=real: row if place < real else row | {"spans": np.zeros_like(row["spans"])}
        sums = eval_step(draft, batch_of(setup, read_rows(setup, indices, blank)), setup.teacher, steps=steps)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return {} if total is None else metrics_of(total, objective)


def evaluate_rows(target: Target, draft: Draft, rows: RowSource, steps: int) -> dict[str, Any]:
    """Teacher-forced metrics of a draft on rows without features, one row at a time."""
    setup = Setup(
        target=target,
        draft=draft,
        teacher=Teacher(label_head=label_head(target, draft.vocab)),
        rows=rows,
        train_order=np.arange(0),
        held_out=np.arange(len(rows)),
        online=True,
        attention="chunked",
    )
    return evaluate(setup, draft, steps, 1, make_eval_step())


def held_out_prompts(setup: Setup, count: int, eos: Sequence[int]) -> list[Request]:
    """The first prompts of the held-out rows, as requests of `DECODED_TOKENS` greedy tokens.

    Args:
      setup: the run.
      count: at most so many.
      eos: ids that end an answer; a prompt that ends with one has been answered with nothing, and is left out.
    """
    requests = []
    for index in setup.held_out:
        row = setup.rows.text(int(index))
        for document in range(1, int(row["documents"].max()) + 1):
            inside = row["documents"] == document
            tokens, spans = row["tokens"][inside], row["spans"][inside]
            if not spans.any() or len(requests) == count:
                continue
            prompt = tokens[: int((spans > 0).argmax())]
            room = setup.target.config.context_limit - prompt.size
            if prompt.size and prompt[-1] not in eos and room > 1:
                requests.append(Request(tuple(prompt.tolist()), max_new_tokens=min(DECODED_TOKENS, room - 1)))
    return requests


def decode_held_out(
    setup: Setup, draft: Draft, requests: Sequence[Request], eos: Sequence[int], length: int
) -> float | None:
    """Tau of greedy decoding with a chain of `length` drafts, on the prompts of `held_out_prompts`, one at a time."""
    target, mesh = setup.target, setup.mesh
    dtype = target.params.embed.dtype
    draft = dataclasses.replace(draft, params=jax.tree.map(lambda leaf: leaf.astype(dtype), draft.params))
    if mesh is not None and mesh.shape["fsdp"] > 1:
        mesh = decoding_mesh(mesh, target.config.num_heads)
        with entered(mesh):
            target, draft = split_for_decoding(target, draft, mesh)
    with entered(mesh):
        events = list(decode(target, draft, requests, draft_length=length, eos=eos))
    return acceptance([event.answer for event in events if event.answer is not None], length)["tau"]


def decoding_sizes(sizes: Mapping[str, int], heads: int) -> tuple[int, int, int, int]:
    """Sizes of slice, data, fsdp and tensor where models decode that train on a mesh of these sizes.

    What fsdp splits is split by tensor, as far as the heads divide; beyond that there are more copies.
    """
    if sizes["fsdp"] == 1:
        return sizes["slice"], sizes["data"], 1, sizes["tensor"]
    parts = sizes["fsdp"] * sizes["tensor"]
    tensor = next(size for size in range(parts, 0, -1) if parts % size == 0 and heads % size == 0)
    return sizes["slice"], sizes["data"] * parts // tensor, 1, tensor


def decoding_mesh(mesh: Mesh, heads: int) -> Mesh:
    """The same devices in the same order, as `decoding_sizes` says."""
    sizes = decoding_sizes(mesh.shape, heads)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, AXES, axis_types=mesh.axis_types)  # type: ignore[return-value]
    return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=mesh.axis_types)


def split_for_decoding(target: Target, draft: Draft, mesh: Mesh) -> tuple[Target, Draft]:
    """Copies of a target with stacked layers and its draft on another mesh of the same devices, the layers apart.

    One array after the other, so that no more than one is in memory a third time.
    """
    params, specs = target.params, target_specs(target.config)
    places = shardings(specs, mesh)
    leaves, form = jax.tree.flatten(params.layers)
    where = zip(*(jax.tree.leaves(layer) for layer in places.layers))
    split = [_unstack(each)(leaf) for leaf, each in zip(leaves, where, strict=True)]
    embed = _move(places.embed)(params.embed)
    tied = params.lm_head is params.embed
    params = dataclasses.replace(
        params,
        embed=embed,
        layers=tuple(jax.tree.unflatten(form, layer) for layer in zip(*split)),
        norm=_move(places.norm)(params.norm),
        lm_head=embed if tied else _move(places.lm_head)(params.lm_head),
    )
    move = lambda leaf, place: _move(place)(leaf)
    return dataclasses.replace(target, params=params), dataclasses.replace(
        draft,
        params=jax.tree.map(move, draft.params, shardings(draft_specs(draft.config), mesh)),
        vocab=jax.tree.map(_move(replicated(mesh)), draft.vocab),
        embed=embed,
    )


@cache
def _move(place: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: leaf, out_shardings=place)


@cache
def _unstack(places: tuple[NamedSharding, ...]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return jax.jit(lambda stacked: tuple(stacked[index] for index in range(len(places))), out_shardings=places)


def acceptance(answers: Sequence[Answer], length: int) -> dict[str, Any]:
    """Tau and n-alpha of answers decoded with `length` drafted levels."""
    accepted = [count for answer in answers for count in answer.accepted]
    return {
        "tau": tau([len(one.token_ids) for one in answers], [one.verification_passes for one in answers]),
        "joint": joint_n_alpha(accepted, length),
        "conditional": conditional_n_alpha(accepted, length),
    }


def promised_tau(forced: dict[str, Any], length: int) -> float:
    """The tau of a chain of `length` drafts that teacher-forced acceptance promises."""
    return 1 + sum(value or 0.0 for value in forced["joint"][:length])


def warn_of_gap(promised: float, real: float | None) -> None:
    """Say so when real decoding accepts much less than teacher forcing promises."""
    if real is not None and (promised - real) / promised > GAP:
        logger.warning(
            "real decoding accepts %.0f %% less than teacher forcing promises. Where answers are not the target's own, "
            "that is expected; otherwise training and decoding disagree (template, taps, alignment).",
            100 * (promised - real) / promised,
        )
