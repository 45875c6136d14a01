"""Draft for SmolLM2-135M-Instruct on a laptop's CPU, second phase: three, then seven unrolled steps, replies only.

    eagle3-jax train configs/smollm2_135m_unrolled.py --features runs/answers
    eagle3-jax export runs/smollm2-135m-unrolled my-draft

Continues the draft that `smollm2_135m.py` ends with; this is what keeps acceptance from falling with depth. Two cores
with AMX: about 45 minutes.

Of eight devices each takes a copy of the weights and a row of the batch:

    eagle3-jax plan configs/smollm2_135m_unrolled.py --mesh '(8,1,1)' --batch_rows 8 --topology v5e:2x4
    eagle3-jax plan configs/smollm2_135m_unrolled.py --mesh '(8,1,1)' --batch_rows 8 --topology h100:8

On v5e:2x4 a chip holds 0.9 of 15.8 GiB, and an update takes at least 0.0023 s; on h100:8, by arithmetic, 1.0 of 55.9
GiB and 0.00055 s. Memory binds.
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
    """The second phase of the released draft, but for the data."""
    return TrainConfig(
        target="models/SmolLM2-135M-Instruct",
        output="runs/smollm2-135m-unrolled",
        init="runs/first-phase",
        data=("answers.jsonl",),
        held_out_rows=24,
        draft_vocab_size=8192,
        row_length=512,
        batch_rows=4,
        updates=1250,
        schedule=((500, 3), (750, 7)),
        learning_rate=8e-4,
        final_learning_rate=2e-5,
        warmup=50,
        compute_dtype="bfloat16",
        eval_every=250,
        save_every=100,
    )
