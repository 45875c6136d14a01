"""Real decoding at the evaluations of a run on eight fake devices: `python -m tests.on_eight_decoding FOLDER MESH ...`.

The folder has a target, its tokenizer and rows.jsonl, as `tests.test_training_decoding` makes it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import chex
import jax
from jax.sharding import NamedSharding

from eagle3_jax.training import evaluation, loop
from eagle3_jax.training.config import TrainConfig


def config_of(folder: Path) -> TrainConfig:
    """Two updates of two steps, after which three prompts are decoded."""
    return TrainConfig(
        target=str(folder), output="", data=(str(folder / "rows.jsonl"),), draft_vocab_size=96, taps=(0, 1, 2),
        row_length=48, batch_rows=8, held_out_rows=8, decoded_prompts=3, updates=2, schedule=((2, 2),),
        learning_rate=1e-3, warmup=1, eval_every=2, save_every=2, log_every=1,
    )  # fmt: skip


def on_a_mesh(leaves: list[Any]) -> bool:
    """Whether arrays lie on a mesh."""
    return isinstance(leaves[0].sharding, NamedSharding)


def main(folder: Path, meshes: list[tuple[int, ...]]) -> None:
    """Of every mesh: tau, the answers; the largest share of an array that one device holds while they decode, and the
    mesh's axes that split arrays then.
    """
    decode, held, answers = evaluation.decode, [], []

    def watched(target: Any, draft: Any, *args: Any, **options: Any) -> Any:
        leaves = jax.tree.leaves((target.params.layers, draft.params))
        shares = [leaf.addressable_shards[0].data.size / leaf.size for leaf in leaves if leaf.ndim > 1]
        specs = [leaf.sharding.spec for leaf in leaves] if on_a_mesh(leaves) else []
        held.append((max(shares), sorted({axis for spec in specs for axis in spec if axis})))
        events = list(decode(target, draft, *args, **options))
        answers.append([event.answer.token_ids for event in events if event.answer is not None])
        return events

    evaluation.decode = watched
    found = []
    for sizes in [(), *meshes]:
        output = folder / ("run" + "-".join(map(str, sizes)))
        result = loop.train(dataclasses.replace(config_of(folder), output=str(output), mesh=sizes))
        found.append({"tau": result.evaluation["decoding_tau"], "answers": answers.pop(), "held": held.pop()})
    print(json.dumps(found))


if __name__ == "__main__":
    chex.set_n_cpu_devices(8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main(Path(sys.argv[1]), [tuple(map(int, sizes.split(","))) for sizes in sys.argv[2:]])
