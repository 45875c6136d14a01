"""Draft for SmolLM2-135M-Instruct on a laptop's CPU, second phase: three, then seven unrolled steps, replies only.

    eagle3-jax train configs/smollm2_135m_unrolled.py --features runs/answers
    eagle3-jax export runs/smollm2-135m-unrolled my-draft

Continues the draft that `smollm2_135m.py` ends with; this is what keeps acceptance from falling with depth. Two cores
with AMX: about 45 minutes.
"""

from eagle3_jax.training.config import TrainConfig


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
