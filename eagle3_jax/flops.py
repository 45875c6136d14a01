"""Floating-point operations of a program, counted in its jaxpr.

XLA's own count takes the body of a loop once, whatever its length; a jaxpr says how long its loops are. Products alone
are counted, as usual (two operations for a multiplication and an addition).
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core


def count_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr, *, trips: int = 1) -> int:
    """Operations of all products of a program, on all devices together.

    Args:
      jaxpr: e.g. `jax.jit(f).trace(...).jaxpr`.
      trips: how often the body of a loop runs whose length the program only learns from its data.
    """
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return sum(_equation(equation, trips) for equation in inner.eqns)


def _equation(equation: Any, trips: int) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    times = 1
    if name == "scan":
        times = parameters["length"]
    elif name == "while":
        times = trips
    elif name == "shard_map":
        times = parameters["mesh"].size
    found = [count_flops(jaxpr, trips=trips) for jaxpr in _jaxprs(parameters)]
    if name == "cond":
        return max(found)
    return times * sum(found)


def _jaxprs(parameters: dict[str, Any]) -> list[Any]:
    """The programs inside an operation; of a derivative rule only what runs, not how it is derived."""
    found = []
    for name, value in parameters.items():
        if name in ("jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"):
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr | core.Jaxpr):
                found.append(item)
    return found
