"""Draft for SmolLM2-135M-Instruct on a laptop's CPU, first phase: one unrolled step, every token of a conversation.

    eagle3-jax data features configs/smollm2_135m.py --data answers.jsonl --out runs/answers
    eagle3-jax data features configs/smollm2_135m.py --data dialogues.jsonl --out runs/dialogues
    eagle3-jax train configs/smollm2_135m.py --features runs/answers,runs/dialogues
    eagle3-jax export runs/smollm2-135m runs/first-phase --step latest

Then `smollm2_135m_unrolled.py`. A one-step update costs a quarter of a seven-step one and teaches most of what there is
to learn; answers are the target's own, dialogues may be anybody's. Two cores with AMX: about 40 minutes for 4,000
updates (and a minute for every 65,000 tokens of features). Meshes for more devices: see there.
"""

from eagle3_jax.config import TargetConfig
from eagle3_jax.rope import RopeConfig
from eagle3_jax.training.config import TrainConfig


def target_shape() -> TargetConfig:
    """The target's config.json, so that a plan needs no download."""
    return TargetConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def config() -> TrainConfig:
    """The first phase of the released draft, but for the data."""
    return TrainConfig(
        target="models/SmolLM2-135M-Instruct",
        output="runs/smollm2-135m",
        data=("answers.jsonl",),
        supervise="all",
        held_out_rows=24,
        draft_vocab_size=8192,
        row_length=512,
        batch_rows=4,
        updates=4000,
        schedule=((4000, 1),),
        learning_rate=2e-3,
        final_learning_rate=2e-4,
        warmup=50,
        compute_dtype="bfloat16",
        eval_every=500,
        save_every=200,
    )
