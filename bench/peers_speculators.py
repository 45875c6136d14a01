"""Updates of `speculators` (PyPI, its own interpreter) on the arrays that `bench.peers` left in a folder.

Rows are passed one at a time, as its model takes them, with one optimiser step for the batch. Its head, frozen by
default, is trained here as ours is; its loss is the one whose gradient is ours (cross-entropy with soft labels), in
plain PyTorch, since its fused losses need Triton. Of its attention paths "eager" (a dense mask) is the one that trains
on a CPU: PyTorch 2.13 has no backward pass of FlexAttention there.
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import AutoConfig


def main() -> int:
    """FOLDER UPDATES BATCH STEPS float32|bfloat16 TARGET ATTENTION."""
    folder, (updates, batch_rows, steps) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    narrow, target, attention = sys.argv[5] == "bfloat16", sys.argv[6], sys.argv[7]
    read = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
    d2t, t2d = torch.from_numpy(np.array(read("d2t"))).long(), torch.from_numpy(np.array(read("t2d")))
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    settings = {
        "verifier_name_or_path": target, "draft_vocab_size": d2t.numel(), "norm_before_residual": False,
        "ttt_steps": steps, "ttt_step_loss_decay": 0.8, "loss_fn": "ce", "loss_implementation": "eager",
        "draft_attn_impl": attention,
        "target_layer_ids": json.loads((folder / "taps.json").read_text(encoding="utf-8")),
    }  # fmt: skip
    model = Eagle3DraftModel.from_training_args(config, t2d=t2d, d2t=d2t - torch.arange(d2t.numel()), **settings)
    model.lm_head.weight.requires_grad_(True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**settings)
    arrays = {name: read(name) for name in ("tokens", "spans", "documents", "positions", "taps", "hidden")}
    seconds, losses = [], []
    for update in range(updates):
        began = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for place in range(batch_rows):
            index = (update * batch_rows + place) % len(arrays["tokens"])
            # Aligned as its own `shift_batch` does: token j + 1 with the feature of j.
            row = {name: torch.from_numpy(np.array(array[index]))[None] for name, array in arrays.items()}
            for name in ("taps", "hidden"):
                row[name] = row[name].view(torch.bfloat16).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                _, loss, _ = model(
                    hidden_states=row["taps"][:, :-1],
                    input_ids=row["tokens"][:, 1:].long(),
                    document_ids=row["documents"][:, 1:].long(),
                    loss_mask=row["spans"][:, 1:] > 0,
                    position_ids=row["positions"][:, 1:].long(),
                    verifier_last_hidden_states=row["hidden"][:, 1:],
                    **call,
                )
            (loss / batch_rows).backward()
            total += loss.item() / batch_rows
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        losses.append(total)
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "losses": losses, "peak_bytes": peak, "attention": attention}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
