"""Draft for LLaMA-3.1-8B-Instruct, on a TPU slice or a GPU node.

    eagle3-jax data regenerate prompts.jsonl --target models/Llama-3.1-8B-Instruct --out answers.jsonl
    eagle3-jax train configs/llama_3_1_8b.py --data answers.jsonl

The mesh is that of eight devices, fsdp alone:

    eagle3-jax plan configs/llama_3_1_8b.py --topology v5e:2x4
    eagle3-jax plan configs/llama_3_1_8b.py --topology h100:8

On v5e:2x4 a chip holds 8.6 of 15.8 GiB, and an update takes at least 1.5 s; on h100:8, by arithmetic, 8.0 of 55.9 GiB
and 0.3 s. Compute binds.
"""

from eagle3_jax.config import TargetConfig
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training.config import TrainConfig


def target_shape() -> TargetConfig:
    """The target's config.json, so that a plan needs no download."""
    return TargetConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


def config() -> TrainConfig:
    """One step for most of the run, seven at the end; 20,000 updates of 65,536 slots."""
    return TrainConfig(
        target="models/Llama-3.1-8B-Instruct",
        target_dtype="bfloat16",
        output="runs/llama-3.1-8b",
        data=("answers.jsonl",),
        draft_vocab_size=32000,
        held_out_rows=64,
        row_length=2048,
        batch_rows=8,
        accumulation=4,
        updates=20000,
        schedule=((14000, 1), (6000, 7)),
        learning_rate=1e-4,
        final_learning_rate=1e-6,
        warmup=300,
        compute_dtype="bfloat16",
        rematerialise="all",
        mesh=(1, 8, 1),
        eval_every=500,
        save_every=500,
    )
