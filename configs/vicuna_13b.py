"""Draft for Vicuna-13B-v1.3, on a TPU slice or a GPU node.

    eagle3-jax data regenerate prompts.jsonl --target models/vicuna-13b-v1.3 --out answers.jsonl
    eagle3-jax train configs/vicuna_13b.py --data answers.jsonl

The mesh is that of sixteen devices, fsdp alone, as of v5e:4x4 (16 GB a chip); a node of eight takes half of it:

    eagle3-jax plan configs/vicuna_13b.py --topology v5e:4x4
    eagle3-jax plan configs/vicuna_13b.py --topology h100:8 --mesh '(1,8,1)'

On v5e:4x4 a chip holds 9.3 of 15.8 GiB, and an update takes at least 1.2 s; on h100:8, by arithmetic, 13.1 of 55.9 GiB
and 0.48 s. Compute binds.
"""

from eagle3_jax.config import TargetConfig
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training.config import TrainConfig


def target_shape() -> TargetConfig:
    """The target's config.json, so that a plan needs no download."""
    return TargetConfig(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def config() -> TrainConfig:
    """One step for most of the run, seven at the end; 20,000 updates of 65,536 slots."""
    return TrainConfig(
        target="models/vicuna-13b-v1.3",
        target_dtype="bfloat16",
        output="runs/vicuna-13b",
        data=("answers.jsonl",),
        draft_vocab_size=32000,
        held_out_rows=64,
        row_length=2048,
        batch_rows=16,
        accumulation=2,
        updates=20000,
        schedule=((14000, 1), (6000, 7)),
        learning_rate=1e-4,
        final_learning_rate=1e-6,
        warmup=300,
        compute_dtype="bfloat16",
        rematerialise="all",
        mesh=(1, 16, 1),
        eval_every=500,
        save_every=500,
    )
