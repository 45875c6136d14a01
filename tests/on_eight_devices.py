"""Checks on eight fake devices, in a process of their own: `python -m tests.on_eight_devices CHECK FOLDER MESH ...`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from eagle3_jax import cli
from eagle3_jax.checkpoint import fingerprint_of, load_target
from eagle3_jax.draft import draft_specs
from eagle3_jax.sharding import by_rows, entered, make_mesh, place, replicated, shardings
from eagle3_jax.target import Target
from eagle3_jax.training import data_commands, loop, regenerate
from eagle3_jax.training.checkpoint import RunFolder, abstract_state
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import FeatureRows
from eagle3_jax.training.head import soft_cross_entropy
from eagle3_jax.training.loss import find_slots, training_time_test_loss
from eagle3_jax.training.setup import stack_batches
from eagle3_jax.training.start import label_head
from eagle3_jax.training.step import Teacher, TrainState, make_optimizer, make_train_step, target_features
from tests import tiny

Sizes = tuple[int, ...]
ROOT = Path(__file__).parent.parent
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 128}
STEPS = 3


def models(folder: Path, mesh: Any = None) -> tuple[Target, Any]:
    """The target from its folder and a random draft, placed on the mesh."""
    target = load_target(folder, mesh=mesh)
    draft = tiny.draft(load_target(folder))
    if mesh is not None:
        draft = draft.replace(
            params=jax.device_put(draft.params, shardings(draft_specs(draft.config), mesh)),
            vocab=jax.device_put(draft.vocab, replicated(mesh)),
            embed=target.params.embed,
        )
    return target, draft


def batch_of(target: Target, draft: Any, mesh: Any, rows: int = 8, seed: int = 0) -> Any:
    """Rows of two documents whose replies lie elsewhere in each row, with the target's own features."""
    documents = np.ones((rows, 24), np.int32)
    documents[:, 11:] = 2
    spans = np.zeros((rows, 24), np.int32)
    for row in range(rows):
        spans[row, 2 + row % 5 : 11] = 1
        spans[row, 15 : 24 - row % 4] = 2
    batch = tiny.training_batch(draft, documents, spans, seed)
    if mesh is not None:
        batch = place(batch, by_rows(mesh))
    rows_of = (batch.tokens, batch.documents, batch.positions)
    taps, hidden, argmax = target_features(target, *rows_of, taps=draft.config.taps)
    return dataclasses.replace(batch, taps=taps, hidden=hidden, argmax=argmax)


def close(one: Any, other: Any, tolerance: float) -> None:
    """Every array within a tolerance relative to its maximum."""
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        expected = np.asarray(b)
        np.testing.assert_allclose(
            np.asarray(a), expected, atol=tolerance * max(np.abs(expected).max(), 1e-30), rtol=0,
            err_msg=jax.tree_util.keystr(path),
        )  # fmt: skip


def gradients(folder: Path, mesh: Any) -> Any:
    """Features, loss, sums of metrics and gradients of one batch."""
    target, draft = models(folder, mesh)
    batch = batch_of(target, draft, mesh)
    slots = find_slots(batch.spans, batch.argmax, draft.vocab.t2d, STEPS)

    @jax.jit
    def run(params: Any, draft: Any, batch: Any, head: jax.Array, slots: Any) -> Any:
        weights = jnp.asarray([0.05, 0.04, 0.03], jnp.float32)
        loss = lambda params: training_time_test_loss(draft.replace(params=params), batch, head, slots, weights)
        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, sums), gradient = run(draft.params, draft, batch, label_head(target, draft.vocab), slots)
    return (batch.taps, batch.hidden, loss, sums, gradient), batch.argmax


def head_alone() -> Any:
    """Losses and guesses of the head on random states; some rows of the vocabulary are equal, in parts far apart."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    head = draw(96, 16)
    head = head.at[70].set(head[3])
    # Rows of 8 slots, whose labels lie in the same row.
    wanted = jnp.asarray((rng.random(64) < 0.8) & (np.arange(64) % 8 < 8 - STEPS))[None].repeat(STEPS, 0)
    sweep = jax.jit(soft_cross_entropy)
    weights = jnp.where(wanted, 0.1, 0.0)
    total, losses, guesses = sweep(draw(STEPS, 64, 16), head, draw(64, 16), draw(96, 16), weights, wanted)
    assert {3, *range(60, 70)} & set(np.asarray(guesses)[np.asarray(wanted)].tolist())
    return total, jnp.where(wanted, losses, 0.0), jnp.where(wanted, guesses, 0)


def updates(folder: Path, mesh: Any, count: int) -> tuple[Any, list[float], TrainState]:
    """Parameters and losses after some updates of two micro-batches each."""
    target, draft = models(folder, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-3))
    state = TrainState(draft.params, optimizer.init(draft.params), jnp.int32(0), jnp.int32(0))
    step, teacher = make_train_step(optimizer, decay=0.8), Teacher(label_head(target, draft.vocab))
    losses = []
    for update in range(count):
        micro = [batch_of(target, draft, mesh, seed=2 * update + part) for part in range(2)]
        state, sums, _ = step(
            state, stack_batches(micro), dataclasses.replace(draft, params=None), teacher, steps=STEPS
        )
        losses.append(float((sums.cross_entropy / sums.trained).sum()))
    return state.params, losses, state


def held(tree: Any) -> list[int]:
    """Bytes of a tree on each device."""
    found = dict.fromkeys(range(8), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return list(found.values())


def check_gradients(folder: Path, meshes: list[Sizes]) -> None:
    """Loss, metrics and gradients on every mesh as on one device; large arrays really split."""
    alone, argmax = gradients(folder, None)
    assert float(alone[3].trained[0]) > 20
    swept = head_alone()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(models(folder)[0].params))
    for sizes in meshes:
        mesh = make_mesh(sizes)
        with entered(mesh):
            found, said = gradients(folder, mesh)
            close(found, alone, 1e-5)
            np.testing.assert_array_equal(said, argmax)
            close(head_alone(), swept, 1e-5)
            target, draft = models(folder, mesh)
        print(sizes, "target: bytes on each device", held(target.params), "of", whole)
        parts = sizes[1] * sizes[2]
        for path, leaf in jax.tree.leaves_with_path((target.params, draft.params)):
            split = leaf.sharding.shard_shape(leaf.shape) != leaf.shape
            assert split == (parts > 1 and leaf.ndim > 1), jax.tree_util.keystr(path)
        assert max(held(target.params)) < 1.1 * whole / parts if parts > 1 else min(held(target.params)) == whole


def check_updates(folder: Path, meshes: list[Sizes]) -> None:
    """Parameters after 5 updates, and 20 losses, on every mesh as on one device."""
    after_five, _, _ = updates(folder, None, 5)
    _, losses, _ = updates(folder, None, 20)
    for sizes in meshes:
        mesh = make_mesh(sizes)
        with entered(mesh):
            found, _, state = updates(folder, mesh, 5)
            close(found, after_five, 1e-5)
            for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(models(folder, mesh)[1].params)):
                assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
            np.testing.assert_allclose(updates(folder, mesh, 20)[1], losses, rtol=1e-4)


class Stopped(Exception):
    """The end of a run that is to be resumed."""


def abstract(folder: Path, config: TrainConfig, mesh: Any) -> TrainState:
    """The state of a run, on a mesh or on one device."""
    _, draft = models(folder, mesh)
    optimizer = make_optimizer(
        config.learning_rates(), betas=config.betas, weight_decay=config.weight_decay, clip=config.clip
    )
    return abstract_state(TrainState(draft.params, optimizer.init(draft.params), jnp.int32(0), jnp.int32(0)))


def check_runs(folder: Path, meshes: list[Sizes]) -> None:
    """A run that was saved on one mesh goes on, on another and on none, as the run of one device."""
    before, after = meshes
    config = TrainConfig(
        target=str(folder), output="", data=(str(folder / "rows.jsonl"),), draft_vocab_size=96, taps=(0, 3, 8),
        row_length=48, batch_rows=8, held_out_rows=8, decoded_prompts=0, updates=6, schedule=((6, 2),),
        learning_rate=1e-3, warmup=1,
        eval_every=6, save_every=3, log_every=1,
    )  # fmt: skip
    logged = lambda name: [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = lambda name: [entry["loss"] for entry in logged(name) if "loss" in entry]
    loop.train(dataclasses.replace(config, output=str(folder / "alone")))
    save = RunFolder.save

    def save_and_stop(run: RunFolder, state: TrainState, joint: float | None = None) -> None:
        save(run, state, joint)
        run.close()
        raise Stopped

    split = dataclasses.replace(config, output=str(folder / "split"), mesh=before)
    RunFolder.save = save_and_stop
    try:
        loop.train(split)
        raise AssertionError("the run was not stopped")
    except Stopped:
        RunFolder.save = save
    shutil.copytree(folder / "split", folder / "whole")
    plain = RunFolder(folder / "split").restore(abstract(folder, config, None), 3)
    mesh = make_mesh(after)
    with entered(mesh):
        moved = RunFolder(folder / "split").restore(abstract(folder, config, mesh), 3)
    assert len(moved.params.fc.sharding.device_set) == 8
    for (path, one), two in zip(jax.tree.leaves_with_path(moved), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))
    loop.train(dataclasses.replace(split, mesh=after))
    loop.train(dataclasses.replace(split, mesh=(), output=str(folder / "whole")))
    assert len(losses("alone")) == 6
    assert losses("alone")[-1] < losses("alone")[0]
    for name in ("split", "whole"):
        np.testing.assert_allclose(losses(name), losses("alone"), rtol=1e-5, err_msg=name)
        one, other = (logged(which)[-1]["held_out"]["cross_entropy"] for which in (name, "alone"))
        np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=name)


def few_rows(folder: Path) -> Path:
    """Some of the folder's rows in a file of their own."""
    few = folder / "few.jsonl"
    few.write_text("".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[:11]))
    return few


def watch_loads(room: Any) -> list[list[int]]:
    """The bytes on each device of every target that a command will load."""
    places: list[list[int]] = []
    real = load_target

    def load(*given: Any, **options: Any) -> Target:
        target = real(*given, **options)
        places.append(held(target.params))
        return target

    room.load_target = load
    return places


def check_features(folder: Path, meshes: list[Sizes]) -> None:
    """`data features` on every mesh writes what it writes on one device, from weights that are really split."""
    places, data, taps = watch_loads(data_commands), few_rows(folder), (0, 3, 8)
    for number, sizes in enumerate([(), *meshes]):
        done = cli.main([
            "data", "features", str(ROOT / "configs" / "smollm2_135m.py"), "--target", str(folder), "--data", str(data),
            "--out", str(folder / f"features-{number}"), "--taps", str(taps), "--row_length", "48", "--batch_rows", "8",
            "--mesh", str(sizes), "--dtype", "float32", "--cache-dir", "",
        ])  # fmt: skip
        assert done == 0
    options = {"taps": taps, "target_fingerprint": fingerprint_of(folder), "row_length": 48}
    alone, *split = [FeatureRows(folder / f"features-{number}", **options) for number in range(len(meshes) + 1)]
    assert len(alone) == 11  # the last batch is filled up
    for sizes, stored, there in zip(meshes, split, places[1:], strict=True):
        assert max(there) < 1.1 * max(places[0]) / (sizes[1] * sizes[2])
        differing = 0
        for index in range(len(alone)):
            for name, expected in alone[index].items():
                found = stored[index][name]
                if name in ("taps", "hidden"):
                    # Sums in another order may round to the next bf16 number.
                    differing += int((found != expected).sum())
                    expected = expected.astype(np.float32)
                    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=2**-7, atol=1e-5, err_msg=name)
                else:
                    np.testing.assert_array_equal(found, expected, err_msg=name)
        assert differing < 1e-3 * len(alone) * 48 * (len(taps) + 1) * 128
        print(sizes, "bf16 numbers that differ:", differing)


def check_answers(folder: Path, meshes: list[Sizes]) -> None:
    """`data regenerate` with the tensor axis of every mesh writes what it writes on one device."""
    places, data, written = watch_loads(regenerate), few_rows(folder), []
    for tensor in (1, *(sizes[2] for sizes in meshes)):
        out = folder / f"answers-{tensor}.jsonl"
        done = cli.main([
            "data", "regenerate", str(data), "--target", str(folder), "--out", str(out), "--tensor", str(tensor),
            "--max-new-tokens", "8", "--limit", "5", "--batch", "2", "--cache-dir", "",
        ])  # fmt: skip
        assert done == 0
        written.append(out.read_text())
        assert max(places[-1]) < 1.1 * max(places[0]) / tensor
        assert written[-1].count("\n") == 5
        assert written[-1] == written[0]


if __name__ == "__main__":
    chex.set_n_cpu_devices(8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    checks = {
        "gradients": check_gradients, "updates": check_updates, "runs": check_runs, "features": check_features,
        "answers": check_answers,
    }  # fmt: skip
    checks[sys.argv[1]](Path(sys.argv[2]), [tuple(map(int, sizes.split(","))) for sizes in sys.argv[3:]])
