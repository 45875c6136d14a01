"""What `speculators` (PyPI, its own interpreter) makes of a draft: `python speculators_side.py FOLDER MODE ...`.

FOLDER make TARGET   a draft as its training command makes it by default, with random weights, to FOLDER/theirs
FOLDER run DRAFT     logits and carried states of DRAFT over FOLDER/inputs.npz, to FOLDER/outputs.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.train.cli import create_transformer_layer_config

STEPS = 5


def make(folder: Path, target: str) -> None:
    """The flags that its command line has by default; every weight random, so that each one matters."""
    torch.manual_seed(0)
    layer = create_transformer_layer_config(target, 1, "llama", None, 2048, [])
    kept = torch.randperm(layer.vocab_size)[: layer.vocab_size // 3]
    member = torch.zeros(layer.vocab_size, dtype=torch.bool)
    member[kept] = True
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=member, d2t=kept - torch.arange(kept.numel()), verifier_name_or_path=target,
        draft_vocab_size=kept.numel(), norm_before_residual=True, norm_before_fc=True, norm_output=True, ttt_steps=3,
        draft_attn_impl="eager",
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.startswith(("embed_tokens", "verifier")):
                weight.copy_(1 + 0.2 * torch.randn_like(weight) if "norm" in name else 0.08 * torch.randn_like(weight))
    model.save_pretrained(folder / "theirs")


def run(folder: Path, draft: str) -> None:
    """Unrolled with the true tokens, as it trains: slot j pairs the state of token j with token j + 1."""
    config = Eagle3DraftModel.config_class.from_pretrained(draft)
    config.transformer_layer_config._attn_implementation = "eager"  # FlexAttention wants multiples of 128 slots here
    model = Eagle3DraftModel.from_pretrained(draft, config=config).float().eval()
    inputs = np.load(folder / "inputs.npz")
    carries: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    carrying = model.norm if model.config.norm_output else model.layers[-1]
    carrying.register_forward_hook(lambda module, arguments, output: carries.append(output))
    model.lm_head.register_forward_hook(lambda module, arguments, output: logits.append(output))
    taps, tokens = torch.from_numpy(inputs["taps"]), torch.from_numpy(inputs["tokens"]).long()
    slots = tokens.shape[1] - 1
    with torch.no_grad():
        model(
            hidden_states=taps[:, :slots], input_ids=tokens[:, 1:], ttt_steps=STEPS,
            document_ids=torch.ones(1, slots, dtype=torch.long), position_ids=torch.arange(slots)[None],
        )  # fmt: skip
    stack = lambda parts: torch.stack(parts).numpy()
    np.savez(folder / "outputs.npz", carries=stack(carries), logits=stack(logits))


if __name__ == "__main__":
    place, mode, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    {"make": make, "run": run}[mode](place, what)
