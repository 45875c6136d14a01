"""Where arrays lie on a mesh of devices: the mesh, the rules from logical axes to its axes, and hints inside programs.

Parameters say what their dimensions mean (`params.ParamSpec.axes`); RULES say which axis of the mesh splits a meaning.
The mesh's axes: `data` copies the weights and splits the rows of a batch; `fsdp` splits rows and weights (which are
gathered where they are used); `tensor` splits heads, feed-forward and vocabulary within a product; `slice` is as
`data`, between the slices of a TPU pod or the nodes that only a slower network joins. Axis types are Auto: the compiler
places what no rule or hint decides. Without a mesh, everything here does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from eagle3_jax.errors import InputError
from eagle3_jax.params import ParamSpec, abstract_params, is_spec

AXES = ("slice", "data", "fsdp", "tensor")
BATCH = ("slice", "data", "fsdp")  # what splits the rows of a batch
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "batch": BATCH,
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "features": ("tensor",),
    "embed": ("fsdp",),
    "head_dim": (),
    "layers": (),
    "norm": (),
})  # fmt: skip


def make_mesh(shape: Sequence[int], *, slices: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices.

    Args:
      shape: sizes of data, fsdp and tensor within a slice.
      slices: how many slices; where devices do not say that they are in so many, they are told apart by process.
      devices: default all.

    Raises:
      InputError: another number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = (slices, *shape)
    if len(shape) != 3 or min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise InputError(
            expected=f"sizes of data, fsdp and tensor whose product, times {slices} slices, is the number of devices, "
            f"{len(devices)}",
            found=f"{tuple(shape)}",
            remedy="Set --mesh (and --slices), e.g. "
            f"--mesh '(1,{max(1, len(devices) // slices)},1)'; without --mesh one device is used.",
        )
    if slices == 1:
        grid = mesh_utils.create_device_mesh(sizes, devices=devices, allow_split_physical_axes=True)
    else:
        # Devices of one machine may all say that they are in one slice, whatever processes drive them.
        known = len({getattr(device, "slice_index", None) for device in devices}) == slices
        try:
            grid = mesh_utils.create_hybrid_device_mesh(
                (1, *shape), (slices, 1, 1, 1), devices=devices, process_is_granule=not known,
                allow_split_physical_axes=True,
            )  # fmt: skip
        except ValueError as error:
            raise InputError(
                expected=f"devices in {slices} slices, or of {slices} processes",
                found=str(error).splitlines()[0],
                remedy="Set --slices to the number of slices (or of nodes with one process each), or leave it out.",
            ) from error
    return Mesh(np.asarray(grid), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition(axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """How an array is split.

    Args:
      axes: the meaning of each dimension; None is never split.
      shape: a dimension that does not divide by the number of its parts is not split either.
      sizes: of the mesh's axes.

    Raises:
      ValueError: two dimensions that the rules split by the same axis of the mesh, or an axis without a rule.
    """
    entries: list[Any] = []
    used: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(f"no rule for the logical axis {axis!r}; rules: {', '.join(RULES)}")
        names = tuple(name for name in RULES[axis] if sizes[name] > 1) if axis else ()
        if used & set(names):
            raise ValueError(f"axes {tuple(axes)} collide: two of them are split by {sorted(used & set(names))}")
        used |= set(names)
        if size % math.prod(sizes[name] for name in names):
            names = ()
        entries.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*entries)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """The sharding of every parameter of an abstract tree, by the rules."""
    place = lambda spec: NamedSharding(mesh, partition(spec.axes, spec.shape, mesh.shape))
    return jax.tree.map(place, specs, is_leaf=is_spec)


def abstract_placed(specs: Any, mesh: Mesh | None, dtype: DTypeLike = jnp.float32) -> Any:
    """Parameters as `jax.ShapeDtypeStruct`s, on a mesh with their places."""
    if mesh is None:
        return abstract_params(specs, dtype)
    place = lambda spec, where: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where)
    return jax.tree.map(place, specs, shardings(specs, mesh), is_leaf=is_spec)


def unsplit(specs: Any, mesh: Mesh) -> list[str]:
    """What the rules would split, but its size does not allow it: one line for each kind of dimension."""
    found: dict[str, list[str]] = {}
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        assert isinstance(spec, ParamSpec)
        for axis, size in zip(spec.axes, spec.shape):
            parts = math.prod(mesh.shape[name] for name in RULES[axis])
            if size % parts:
                found.setdefault(f"{axis} of {size} does not divide by {parts}", []).append(spec.name)
    return [f"{why}: {len(names)} arrays are whole on every device ({names[0]}, ...)" for why, names in found.items()]


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that split rows."""
    return tuple(name for name in BATCH if sizes[name] > 1)


def row_parts(rows: int) -> int:
    """Inside a program: into how many parts the mesh splits the rows of a batch; 1 without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    parts = math.prod(sizes[name] for name in BATCH) if sizes else 1
    return 1 if rows % parts else parts


def place(tree: Any, places: Any) -> Any:
    """Arrays that every process has whole, to where they belong; each device is sent its own part.

    Args:
      tree: arrays.
      places: one sharding for all, or a tree of them.
    """
    if isinstance(places, NamedSharding):
        places = jax.tree.map(lambda _: places, tree)

    def one(array: Any, where: NamedSharding) -> jax.Array:
        whole = np.asarray(array)
        return jax.make_array_from_callback(whole.shape, where, whole.__getitem__)

    return jax.tree.map(one, tree, places)


def by_rows(mesh: Mesh) -> NamedSharding:
    """The first dimension is the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh.shape)))


def entered(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """The context in which programs for a mesh are traced and called."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def constrain_params(tree: Any, specs: Any) -> Any:
    """`constrain` for a tree of parameters, or of the same form."""
    return jax.tree.map(lambda spec, leaf: constrain(leaf, *spec.axes), specs, tree, is_leaf=is_spec)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Inside a program: say how an array is split, by the meaning of its dimensions; nothing without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh.shape))
