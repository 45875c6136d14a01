"""What a round's parts cost, and the speedup that follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.costs import Costs, measure_costs
from eagle3_jax.tree import TreeShape


def test_the_modelled_speedup_is_tau_over_the_cost_of_a_round_in_plain_steps() -> None:
    costs = Costs(plain=2.0, verify={3: 3.0, 5: 4.0}, draft_step={1: 0.25, 2: 0.5}, catch_up={3: 0.5, 5: 1.0})
    assert costs.speedup(2.0, TreeShape.chain(2)) == pytest.approx(2.0 / (1.5 + 2 * 0.125 + 0.25))
    assert costs.speedup(1.0, TreeShape.chain(4)) == pytest.approx(1.0 / (2.0 + 4 * 0.125 + 0.5))
    assert costs.speedup(1.0, TreeShape(nodes=5, depth=2, top_k=2)) == pytest.approx(1.0 / (2.0 + 2 * 0.25 + 0.25))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_part_is_timed(t0, d0, dtype) -> None:
    target = t0.replace(params=jax.tree.map(lambda x: x.astype(dtype), t0.params))
    shapes = [TreeShape.chain(3), TreeShape(nodes=6, depth=2, top_k=3)]
    costs = measure_costs(target, d0, shapes, cache_length=128, repeats=2)
    assert (list(costs.verify), list(costs.draft_step), list(costs.catch_up)) == ([4, 6], [1, 3], [3, 4])
    every = [costs.plain, *costs.draft_step.values(), *costs.verify.values(), *costs.catch_up.values()]
    assert all(0 < seconds < 60 for seconds in every)
