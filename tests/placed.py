"""What lies where on a mesh: states that are saved and restored, weights that are loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from eagle3_jax.checkpoint import load_draft, load_target, read_target_config, save_draft
from eagle3_jax.config import DraftConfig
from eagle3_jax.draft import draft_specs
from eagle3_jax.files import SafetensorsFile
from eagle3_jax.params import ParamSpec, is_spec
from eagle3_jax.sharding import AXES, abstract_placed, entered, make_mesh, place, replicated, shardings
from eagle3_jax.target import target_specs
from eagle3_jax.training import loop
from eagle3_jax.training.checkpoint import RunFolder
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.step import TrainState, init_optimizer, optimizer_of
from eagle3_jax.vocab import vocab_from_ids
from tests import tiny

Sizes = tuple[int, ...]
CONFIG = TrainConfig(target="", output="", data=("rows.jsonl",))


def mesh_of(sizes: Sizes) -> Mesh:
    """Sizes of data, fsdp and tensor, or of slices and these, over the first devices."""
    if len(sizes) == 3:
        return make_mesh(sizes, devices=jax.devices()[: math.prod(sizes)])
    # These devices lie in one process and in no slice, of which `make_mesh` would make none.
    return Mesh(np.asarray(jax.devices()).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def held(tree: Any) -> list[int]:
    """Bytes of a tree on each device."""
    found = dict.fromkeys(range(8), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return list(found.values())


def check_places(state: TrainState, draft: DraftConfig, mesh: Any) -> None:
    """Parameters lie where the rules say, the optimiser's moments with them, and counters everywhere."""
    here = SingleDeviceSharding(jax.devices()[0])
    everywhere = here if mesh is None else replicated(mesh)
    wanted = jax.tree.map(lambda _: here, state.params) if mesh is None else shardings(draft_specs(draft), mesh)
    trees = [state.params, *(optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))]
    assert len([leaf for leaf in jax.tree.leaves(state) if leaf.ndim]) == len(jax.tree.leaves(trees))
    for tree in trees:
        for (path, leaf), where in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim), jax.tree_util.keystr(path)
    for leaf in jax.tree.leaves(state):
        assert leaf.ndim > 0 or leaf.sharding.is_equivalent_to(everywhere, 0)


def shape_of(folder: Path) -> DraftConfig:
    """The draft of a target that need not be loaded."""
    return DraftConfig.for_target(read_target_config(folder), draft_vocab_size=96)


def random_state(draft: DraftConfig, mesh: Any) -> TrainState:
    """A state after three updates, with another number in every place, on a mesh or on one device."""
    params, number = abstract_placed(draft_specs(draft), mesh), jnp.int32(3)
    state = TrainState(params, init_optimizer(optimizer_of(CONFIG), params, mesh), number, number)
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), state)
    values = dataclasses.replace(values, update=np.int32(3), skipped=np.int32(1))
    if mesh is None:
        return jax.tree.map(jnp.asarray, values)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    return place(values, dataclasses.replace(places, update=replicated(mesh), skipped=replicated(mesh)))


def resumed(folder: Path, draft: DraftConfig, mesh: Any, update: int) -> TrainState:
    """What the training loop begins with when it goes on from a checkpoint."""
    setup = SimpleNamespace(draft=SimpleNamespace(params=None, config=draft), mesh=mesh, trained=update)
    run = RunFolder(folder)
    training = SimpleNamespace(setup=setup, optimizer=optimizer_of(CONFIG), folder=run)
    state = loop._Training.first_state(cast(Any, training))
    run.close()
    return state


def saved(folder: Path, draft: DraftConfig, mesh: Any) -> TrainState:
    """A random state, written to a run's folder and, as plain arrays, beside it."""
    state, run = random_state(draft, mesh), RunFolder(folder, writes=True)
    run.save(state)
    run.close()
    np.savez(folder / "state.npz", *(np.asarray(leaf) for leaf in jax.tree.leaves(state)))
    return state


def equals_saved(state: TrainState, folder: Path) -> None:
    """Every leaf of a state has the bits that were saved."""
    with np.load(folder / "state.npz") as arrays:
        for (path, leaf), expected in zip(jax.tree.leaves_with_path(state), arrays.values(), strict=True):
            assert leaf.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(leaf), expected, err_msg=jax.tree_util.keystr(path))


def check_restores(folder: Path, meshes: list[Sizes]) -> None:
    """What one device saved, and what each mesh saved, comes back bit for bit on every mesh and on one device."""
    draft = shape_of(folder)
    for sizes in meshes:
        mesh = mesh_of(sizes)
        with entered(mesh):
            check_places(saved(folder / "x".join(map(str, sizes)), draft, mesh), draft, mesh)
    for source in ("one", *("x".join(map(str, sizes)) for sizes in meshes)):
        for mesh in (None, *map(mesh_of, meshes)):
            before = np.asarray(held(jax.live_arrays()))
            with entered(mesh):
                state = resumed(folder / source, draft, mesh, 3)
            made, asked = np.asarray(held(jax.live_arrays())) - before, np.asarray(held(state))
            whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            parts = 1 if mesh is None else mesh.size
            assert np.count_nonzero(asked) == parts
            assert max(asked) < 1.1 * whole / parts
            assert np.all(made < 1.3 * asked + 1), made
            equals_saved(state, folder / source)
            check_places(state, draft, mesh)
            del state


class Recorded(np.ndarray):
    """A mapped tensor that notes which parts of it are read."""

    read: set[tuple[tuple[int, int, int], ...]]

    def __array_finalize__(self, source: Any) -> None:
        self.read = getattr(source, "read", set())

    def _note(self, part: Any) -> None:
        self.read.add(tuple(one.indices(size) for one, size in zip(part, self.shape, strict=True)))

    def __getitem__(self, part: Any) -> Any:
        self._note(part)
        return np.asarray(super().__getitem__(part))

    def astype(self, *args: Any, **options: Any) -> Any:
        self._note([slice(None)] * self.ndim)
        return np.asarray(self).astype(*args, **options)

    def copy(self, *args: Any) -> Any:
        self._note([slice(None)] * self.ndim)
        return np.asarray(self).copy()


@contextmanager
def recorded() -> Iterator[dict[str, set[Any]]]:
    """Which parts of which tensors are read meanwhile, by FOLDER/NAME."""
    view, read = SafetensorsFile.view, {}

    def note(file: SafetensorsFile, name: str) -> Any:
        array = view(file, name).view(Recorded)
        array.read = read.setdefault(f"{file.path.parent.name}/{name}", set())
        return array

    SafetensorsFile.view = note
    try:
        yield read
    finally:
        SafetensorsFile.view = view


def parts_of(spec: ParamSpec, mesh: Mesh) -> set[Any]:
    """The parts of a tensor that the devices of a mesh hold."""
    parts = shardings(spec, mesh).devices_indices_map(spec.shape).values()
    return {tuple(one.indices(size) for one, size in zip(part, spec.shape, strict=True)) for part in parts}


def check_loading(folder: Path, meshes: list[Sizes]) -> None:
    """Of every tensor exactly the parts are read that devices hold, of a target in both forms and of drafts."""
    plain = load_target(folder)
    whole = tiny.draft(plain, size=plain.config.vocab_size)
    rng = np.random.default_rng(0)
    shuffled = vocab_from_ids(rng.permutation(plain.config.vocab_size), plain.config.vocab_size)
    save_draft(folder / "draft", tiny.draft(plain), dtype=jnp.float32)
    save_draft(folder / "headless", whole.replace(vocab=shuffled), dtype=jnp.float32)
    tensors = load_file(folder / "headless" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "headless" / "model.safetensors")

    specs: Any = target_specs(plain.config)
    drafts = {name: load_draft(folder / name, plain) for name in ("draft", "headless")}
    for sizes in meshes:
        mesh = mesh_of(sizes)
        target = load_target(folder, mesh=mesh)
        loads: list[tuple[Any, Any, Any]] = []
        for layers in ("stacked", "each"):
            load = partial(load_target, folder, mesh=mesh, layers=layers)
            loads.append((load, load_target(folder, layers=layers), (folder, specs)))
        for name, draft in drafts.items():
            load = partial(load_draft, folder / name, target, mesh=mesh)
            loads.append((load, draft, (folder / name, draft_specs(draft.config))))
        for load, expected, (where, tree) in loads:
            with entered(mesh), recorded() as read:
                found = load()
            pairs = zip(jax.tree.leaves_with_path(found.params), jax.tree.leaves(expected.params), strict=True)
            for (path, one), other in pairs:
                np.testing.assert_array_equal(one, other)
                norm = "norm" in jax.tree_util.keystr(path)
                assert max(held(one)) == one.nbytes / (1 if norm else sizes[1] * sizes[2])
            for spec in jax.tree.leaves(tree, is_leaf=is_spec):
                absent = spec.name == "lm_head.weight" and where.name == "headless"
                exactly = None if absent else parts_of(spec, mesh)
                assert read.get(f"{where.name}/{spec.name}") == exactly, spec.name
