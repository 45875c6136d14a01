"""Draft for SmolLM2-135M-Instruct, trained on a laptop's CPU from the target's own answers.

    eagle3-jax data features configs/smollm2_135m.py --data answers.jsonl --out runs/features
    eagle3-jax train configs/smollm2_135m.py --features runs/features

Short unrolls first: a one-step update costs a quarter of a seven-step one and teaches most of what there is to learn;
the seven-step phase at the end keeps acceptance from falling with depth.
"""

from eagle3_jax.training.config import TrainConfig


def config() -> TrainConfig:
    """The released draft's settings, but for the data."""
    return TrainConfig(
        target="models/SmolLM2-135M-Instruct",
        output="runs/smollm2-135m",
        data=("answers.jsonl",),
        held_out_rows=24,
        draft_vocab_size=8192,
        row_length=512,
        batch_rows=4,
        updates=1850,
        schedule=((1400, 1), (450, 7)),
        learning_rate=2e-3,
        final_learning_rate=1e-4,
        warmup=50,
        compute_dtype="bfloat16",
        eval_every=200,
        save_every=200,
    )
