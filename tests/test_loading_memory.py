"""What a load of shards needs in memory beside the model itself, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

SCRIPT = """
import gc, json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from eagle3_jax.checkpoint import load_target

def resident():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")]

jnp.zeros(3).block_until_ready()
began = resident()[1]
target = jax.block_until_ready(load_target(Path(sys.argv[1]), sys.argv[2]))
gc.collect()
print(json.dumps([began, *resident()]))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_needs_no_more_than_a_shard_beside_the_model(tmp_path: Path, dtype: str):
    model = tiny.hf_target(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=8000)
    model.save_pretrained(tmp_path / "model", max_shard_size="20MB")
    sizes = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    assert len(sizes) > 4
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), dtype], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    began, peak, final = json.loads(done.stdout)
    width = {"float32": 1.0, "bfloat16": 0.5}[dtype]
    assert final - began > 0.9 * width * sum(sizes)  # the model is really there
    assert peak - final <= 1.3 * max(sizes)
