"""Decoding on several devices: fake ones, in a process of their own, since their number is fixed when jax starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import chex

chex.set_n_cpu_devices(4)

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.generate import generate
from eagle3_jax.requests import Request
from tests.test_whole_generation import PLANS, arguments
from tests.tiny_decoding import answers, prompts, toy, toy_draft

assert jax.device_count() == 4
requests = [Request(prompt, max_new_tokens=5 + 3 * row) for row, prompt in enumerate(prompts(8, 64, seed=3))]
drafter, plan, drafting = PLANS["tree"]
alone = [answer.token_ids for answer in answers(toy(), None, requests)]

# Models on another device than the first: everything that decoding makes follows them.
last = jax.device_put((toy(), drafter), jax.devices()[3])
assert [answer.token_ids for answer in answers(*last, requests, **drafting, batch=3)] == alone

# Rows over all devices, with a copy of the models on each.
mesh = Mesh(np.asarray(jax.devices()), ("data",))
copies = jax.device_put((toy(), drafter), NamedSharding(mesh, PartitionSpec()))
traced, static = arguments(requests, plan, eos=())
rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
*by_row, ends = traced
found = generate(*copies, *jax.device_put(tuple(by_row), rows), jax.device_put(ends, whole), **static)
assert len(found.tokens.sharding.device_set) == 4
texts = [tuple(np.asarray(found.tokens)[row, : int(found.count[row])].tolist()) for row in range(8)]
assert texts == alone
print("as on one device")
"""


@pytest.mark.property
def test_texts_do_not_depend_on_where_the_models_and_the_rows_lie():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as on one device\n"
