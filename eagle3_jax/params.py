"""One abstract tree per model: its leaves say shape, logical axes, initial value and name in a checkpoint.

Initialisation, shape checks, loading, saving and sharding all follow from the same tree, so that they cannot
disagree (the idea of an abstract parameter tree is jax-llm-examples').
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape: in our layout: of a linear map, output dimensions first, then input dimensions. That is torch's [out, in]
        with heads split off, so a file's tensor only needs a reshape, and a tied embedding serves as the head as is.
      axes: a logical axis name for each dimension.
      name: the tensor's name in a safetensors file.
      init: "normal" (mean 0, standard deviation `scale`), "ones" or "zeros".
      scale: standard deviation of "normal".
      inputs: how many trailing dimensions are the input of a linear map (or an embedding's width). Files hold them as
        one dimension, and the ones before as another; 0 for norms and biases, which files hold flat.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    name: str
    init: Literal["normal", "ones", "zeros"] = "normal"
    scale: float = 0.02
    inputs: int = 0

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        outputs = len(self.shape) - self.inputs
        flat = (math.prod(self.shape[:outputs]),)
        return (*flat, math.prod(self.shape[outputs:])) if self.inputs else flat


def is_spec(leaf: Any) -> bool:
    """True for a `ParamSpec`; the `is_leaf` of maps over abstract trees."""
    return isinstance(leaf, ParamSpec)


def init_params(specs: Tree, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Tree:
    """Draw every parameter of an abstract tree.

    Args:
      specs: a tree of `ParamSpec`.
      key: a PRNG key; each leaf folds in its own index, so that leaves do not depend on each other.
      dtype: of every leaf.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    arrays = []
    for index, spec in enumerate(leaves):
        if spec.init == "normal":
            draw = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32) * spec.scale
            arrays.append(draw.astype(dtype))
        else:
            arrays.append(jnp.full(spec.shape, 1 if spec.init == "ones" else 0, dtype))
    return jax.tree.unflatten(treedef, arrays)


def abstract_params(specs: Tree, dtype: DTypeLike = jnp.float32) -> Tree:
    """The same tree with `jax.ShapeDtypeStruct` leaves, for `eval_shape`, ahead-of-time compilation and restoring."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs, is_leaf=is_spec)


def count_params(tree: Any) -> int:
    """Number of parameters of a tree of specs or arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_spec))
