"""Checks on eight fake devices, in a process of their own: `python -m tests.on_eight_devices CHECK FOLDER MESH ...`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from eagle3_jax import cli
from eagle3_jax.attention import packed_attend
from eagle3_jax.checkpoint import fingerprint_of, load_target, read_target_config
from eagle3_jax.draft import draft_specs
from eagle3_jax.sharding import (
    by_rows,
    entered,
    place,
    replicated,
    shardings,
)
from eagle3_jax.splash import splash_attend
from eagle3_jax.target import Target
from eagle3_jax.training import data_commands, loop, regenerate
from eagle3_jax.training import step as step_room
from eagle3_jax.training.abstract import abstract_run, trace_teacher
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import FeatureRows
from eagle3_jax.training.head import soft_cross_entropy
from eagle3_jax.training.loss import find_slots, training_time_test_loss
from eagle3_jax.training.setup import prepare, stack_batches
from eagle3_jax.training.start import label_head
from eagle3_jax.training.step import (
    Teacher,
    TrainState,
    init_optimizer,
    make_train_step,
    optimizer_of,
    target_features,
)
from tests import tiny, tiny_tokenizers
from tests.placed import CONFIG, Sizes, check_loading, check_places, check_restores, held, mesh_of

ROOT = Path(__file__).parent.parent
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 128}
STEPS = 3


def models(folder: Path, mesh: Any = None, size: int = 96) -> tuple[Target, Any]:
    """The target from its folder and a random draft with a vocabulary of some size, placed on the mesh."""
    target = load_target(folder, mesh=mesh)
    draft = tiny.draft(load_target(folder), size=size)
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


def gradients(folder: Path, mesh: Any, size: int = 96) -> Any:
    """Features, loss, sums of metrics and gradients of one batch; the rows of it lie apart."""
    target, draft = models(folder, mesh, size)
    batch = batch_of(target, draft, mesh)
    if mesh is not None:
        parts = mesh.size // mesh.shape["tensor"]
        assert all(leaf.sharding.shard_shape(leaf.shape)[0] * parts == leaf.shape[0] for leaf in jax.tree.leaves(batch))
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
    number = jnp.int32(0) if mesh is None else place(np.int32(0), replicated(mesh))
    state = TrainState(draft.params, init_optimizer(optimizer, draft.params, mesh), number, number + 0)
    step, teacher = make_train_step(optimizer, decay=0.8), Teacher(label_head(target, draft.vocab))
    losses = []
    for update in range(count):
        micro = [batch_of(target, draft, mesh, seed=2 * update + part) for part in range(2)]
        state, sums, _ = step(
            state, stack_batches(micro), dataclasses.replace(draft, params=None), teacher, steps=STEPS
        )
        losses.append(float((sums.cross_entropy / sums.trained).sum()))
    return state.params, losses, state


def check_gradients(folder: Path, meshes: list[Sizes]) -> None:
    """Loss, metrics and gradients on every mesh as on one device; large arrays really split."""
    step_room.ARGMAX_CHUNK = 5  # several chunks, that do not divide evenly
    alone, argmax = gradients(folder, None)
    assert float(alone[3].trained[0]) > 20
    swept = head_alone()
    for sizes in meshes:
        mesh = mesh_of(sizes)
        with entered(mesh):
            found, said = gradients(folder, mesh)
            close(found, alone, 1e-5)
            np.testing.assert_array_equal(said, argmax)
            close(head_alone(), swept, 1e-5)
            target, draft = models(folder, mesh)
            opt_state = init_optimizer(optimizer_of(CONFIG), draft.params, mesh)
        parts = mesh.shape["fsdp"] * mesh.shape["tensor"]
        for path, leaf in jax.tree.leaves_with_path((target.params, draft.params)):
            split = leaf.sharding.shard_shape(leaf.shape) != leaf.shape
            assert split == (parts > 1 and leaf.ndim > 1), jax.tree_util.keystr(path)
        number = place(np.int32(0), replicated(mesh))
        check_places(TrainState(draft.params, opt_state, number, number), draft.config, mesh)
        for name, tree in (("target", target.params), ("optimiser", opt_state)):
            whole = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            print(sizes, f"{name}: bytes on each device", held(tree), "of", whole)
            assert max(held(tree)) < 1.1 * whole / parts if parts > 1 else min(held(tree)) == whole


def check_updates(folder: Path, meshes: list[Sizes]) -> None:
    """Parameters after 5 updates, and 20 losses, on every mesh as on one device."""
    after_five, _, _ = updates(folder, None, 5)
    _, losses, _ = updates(folder, None, 20)
    for sizes in meshes:
        mesh = mesh_of(sizes)
        with entered(mesh):
            found, _, state = updates(folder, mesh, 5)
            close(found, after_five, 1e-5)
            check_places(state, models(folder)[1].config, mesh)
            np.testing.assert_allclose(updates(folder, mesh, 20)[1], losses, rtol=1e-4)


def check_splash(folder: Path, meshes: list[Sizes]) -> None:
    """The TPU's kernel, each device on its own rows and heads, against all scores at once: values and gradients."""
    length, steps = 128, 2
    rng = np.random.default_rng(0)
    documents = np.ones((4, length), np.int32)
    documents[:, 60:], documents[1, 110:] = 2, 0
    for sizes, heads, kv_heads, dtype, tolerance in (
        *((sizes, 4, 2, jnp.float32, 1e-5) for sizes in meshes),
        (meshes[0], 3, 1, jnp.float32, 1e-5),  # heads that do not divide: whole on every device
        (meshes[0], 4, 2, jnp.bfloat16, 2e-2),
    ):
        draw = lambda *shape, dtype=dtype: jnp.asarray(rng.standard_normal(shape), dtype)
        q, weight = draw(4, length, heads, 128), draw(4, length, heads, 128)
        runs = [(draw(4, kv_heads, 128, length), draw(4, kv_heads, length, 128)) for _ in range(steps)]

        def loss(attend: Any, q: Any, runs: Any, documents: Any, weight: Any) -> Any:
            out = attend(q, *runs[0], documents, runs[1:])
            return jnp.sum((out * weight).astype(jnp.float32)), out

        def run(attend: Any, *arrays: Any) -> Any:
            return jax.jit(jax.grad(partial(loss, attend), argnums=(0, 1), has_aux=True))(*arrays)

        given = (q, runs, jnp.asarray(documents), weight)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.ndim == 4 else leaf, given)
        expected = run(partial(packed_attend, kind="reference"), *wide)
        mesh = mesh_of(sizes)
        with entered(mesh):
            found = run(partial(splash_attend, interpret=True), *place(given, by_rows(mesh)))
        for leaf in jax.tree.leaves(expected):
            assert float(jnp.abs(leaf).max()) > 1e-2
        close(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), found), expected, tolerance)


def check_argmax(folder: Path, meshes: list[Sizes]) -> None:
    """On a mesh each device makes the logits of as many tokens at a time as one device alone does."""
    vocab, shape = 16384, read_target_config(folder)
    shape = dataclasses.replace(shape, vocab_size=vocab, max_position_embeddings=2048)
    for sizes in meshes:
        config = dataclasses.replace(
            CONFIG, mesh=sizes, taps=(0, 1, 2), draft_vocab_size=96, row_length=1536, batch_rows=8,
            schedule=((CONFIG.updates, 1),),
        )  # fmt: skip
        mesh = mesh_of(sizes)
        with entered(mesh):
            text = trace_teacher(abstract_run(config, shape, mesh, "cpu")).lower().compile().as_text()
        own = vocab // mesh.shape["tensor"]
        logits = {tuple(map(int, found.split(","))) for found in re.findall(rf"f32\[([\d,]+,{own})\]", text)}
        most = max(math.prod(dims[:-1]) for dims in logits)
        assert most == step_room.ARGMAX_CHUNK, (sizes, logits)


class Stopped(Exception):
    """The end of a run that is to be resumed."""


def check_undivided(folder: Path, meshes: list[Sizes]) -> None:
    """Heads and a draft vocabulary that the mesh does not divide: whole everywhere, said, and the same gradients."""
    tiny.hf_target(scale=2.0, **HEADS | {"num_key_value_heads": 2}).save_pretrained(folder / "few")
    tiny_tokenizers.chatml(tiny_tokenizers.SHORT_TEMPLATE, size=300).save_pretrained(folder / "few")
    config = dataclasses.replace(
        CONFIG, target=str(folder / "few"), data=(str(folder / "rows.jsonl"),), draft_vocab_size=97, taps=(0, 3, 8),
        row_length=48, batch_rows=8, held_out_rows=8, decoded_prompts=0,
    )  # fmt: skip
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("eagle3_jax").addHandler(handler)
    logging.getLogger("eagle3_jax").setLevel(logging.INFO)
    alone, _ = gradients(folder / "few", None, 97)
    for index, sizes in enumerate(meshes):
        mesh = mesh_of(sizes)
        tensor = mesh.shape["tensor"]
        with entered(mesh):
            close(gradients(folder / "few", mesh, 97)[0], alone, 1e-5)
            lines.clear()
            params = prepare(config, RunFolder(folder / f"undivided{index}"), mesh).draft.params
        for leaf, size in ((params.lm_head, 97), (params.k, 2)):
            assert leaf.sharding.shard_shape(leaf.shape)[0] == (size if size % tensor else size // tensor)
        whole = "arrays are whole on every device"
        said = {line.split(": ")[0]: line.split(": ")[1] for line in lines if "does not divide" in line}
        expected = {f"vocab of 97 does not divide by {tensor}": f"1 {whole} (lm_head.weight, ...)"}
        if tensor > 2:  # keys and values of 8 layers and of the draft
            name = "model.layers.0.self_attn.k_proj.weight"
            expected[f"kv_heads of 2 does not divide by {tensor}"] = f"18 {whole} ({name}, ...)"
        assert said == expected


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
        "gradients": check_gradients, "undivided": check_undivided, "updates": check_updates,
        "splash": check_splash, "argmax": check_argmax, "restores": check_restores, "loading": check_loading,
        "runs": check_runs, "features": check_features, "answers": check_answers,
    }  # fmt: skip
    checks[sys.argv[1]](Path(sys.argv[2]), [tuple(map(int, sizes.split(","))) for sizes in sys.argv[3:]])
