"""EAGLE-3 speculative decoding in JAX: train drafts, decode with them losslessly, convert, measure."""

from eagle3_jax.checkpoint import load_draft, load_target, save_draft
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Draft
from eagle3_jax.engine import decode
from eagle3_jax.errors import InputError
from eagle3_jax.requests import Answer, Event, Request
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Draft",
    "DraftConfig",
    "Event",
    "InputError",
    "Request",
    "RopeConfig",
    "Target",
    "TargetConfig",
    "decode",
    "load_draft",
    "load_target",
    "save_draft",
]
