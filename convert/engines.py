"""Which engine computes what a draft asks for, and from which form of folder: the rules behind every refusal to export.

An engine that does not honour a setting does not say so: it accepts fewer tokens, or none. So a form is written only if
the engines it is for honour all that the draft has. Sources: the engines' loaders at the versions named below; where a
setting came with a later version, that version.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3_jax.config import DraftConfig


@dataclass(frozen=True)
class Engine:
    """An engine, or a range of its versions.

    Attributes:
      name: with the version that was read.
      forms: layouts it loads, of `draft_writer.FORMS`.
      honours: the features, as `features` names them, that it computes.
    """

    name: str
    forms: frozenset[str]
    honours: frozenset[str]


FEATURES = {
    "other taps": "taps other than the default (2, L//2, L-3)",
    "first tap not 2": "explicit taps that do not begin with 2, which SGLang's versions count in two ways",
    "tap count": "a number of taps other than three",
    "tap 0": "the embedding as a tap",
    "final norm tap": "the state after the target's final norm as a tap",
    "own width": "a width other than the target's, with its own embedding",
    "own embedding": "an embedding of its own, as wide as the target's",
    "head_dim": "a head_dim other than hidden_size / heads",
    "fc_norm": "fc_norm",
    "norm_before_fc": "norm_before_fc",
    "norm_output": "norm_output",
    "norm_before_residual": "norm_before_residual",
    "sliding window": "a sliding window",
    **{f"rope {kind}": f"RoPE scaling of type {kind}" for kind in ("linear", "dynamic", "llama3", "yarn")},
}
_ROPES = ("rope linear", "rope dynamic", "rope llama3", "rope yarn")


def _engine(name: str, forms: str, *honours: str) -> Engine:
    return Engine(name, frozenset(forms.split()), frozenset(honours))


ENGINES = (
    _engine("eagle3-jax", "canonical", *FEATURES),
    _engine("SGLang until 2026-05 (03d5a77)", "canonical sglang", "head_dim", "other taps", *_ROPES),
    _engine(
        "SGLang from 2026-05 (pull request 24663)", "canonical sglang vllm",
        "head_dim", "other taps", "tap count", "fc_norm", "norm_output", *_ROPES,
    ),
    _engine(
        "vLLM until pull request 42764 (00bd149)", "canonical sglang vllm",
        "head_dim", "own embedding", "other taps", "first tap not 2", "tap 0", "norm_before_residual", *_ROPES,
    ),
    _engine(
        "vLLM from pull request 42764", "canonical sglang vllm",
        "head_dim", "own embedding", "other taps", "first tap not 2", "tap 0", "tap count", "norm_before_residual",
        "norm_before_fc", "fc_norm", "norm_output", "sliding window", *_ROPES,
    ),
    _engine("tpu-inference (b8692ff)", "canonical sglang official", "head_dim", "norm_before_residual", *_ROPES),
    _engine("sglang-jax (cddbf6f)", "canonical sglang official", "head_dim", *_ROPES),
    _engine(
        "llama.cpp (convert_hf_to_gguf.py of llama-cpp-python 0.3.36)", "canonical sglang vllm official",
        "head_dim", "own embedding", "own width", "other taps", "first tap not 2", "tap 0", "norm_before_residual",
        "norm_before_fc", "rope llama3",
    ),
    _engine("official EAGLE (cb7e084)", "canonical sglang official", "own width", "rope linear", "rope dynamic"),
)  # fmt: skip
# Where a form spells taps in a key that the engine does not read, only the default ones arrive.
_TAPS_READ_FROM = {"SGLang": {"sglang", "vllm"}, "vLLM": {"vllm"}, "llama.cpp": {"vllm"}}


def features(config: DraftConfig, default_taps: tuple[int, ...] | None, layers: int | None) -> frozenset[str]:
    """What a draft has beyond the plain one; taps of an unknown target (None) count as the default."""
    found = {name for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
             if getattr(config, name)}  # fmt: skip
    if config.taps and default_taps is not None and config.taps != default_taps:
        found.add("other taps")
        if config.taps[0] != 2:
            found.add("first tap not 2")
        if config.taps[0] == 0:
            found.add("tap 0")
    if config.taps and len(config.taps) != 3:
        found.add("tap count")
    if layers is not None and config.taps and config.taps[-1] > layers:
        found.add("final norm tap")
    if config.hidden_size != config.target_hidden_size:
        found.add("own width")
    elif config.own_embedding:
        found.add("own embedding")
    if config.head_dim * config.num_heads != config.hidden_size:
        found.add("head_dim")
    if config.sliding_window:
        found.add("sliding window")
    if config.rope.kind != "default":
        found.add(f"rope {config.rope.kind}")
    return frozenset(found)


def obstacle(engine: Engine, form: str, found: frozenset[str]) -> str | None:
    """Why an engine does not load a draft of these features from a form of folder; None if it does."""
    if form not in engine.forms:
        return f"does not read the form {form}"
    if lacking := sorted(found - engine.honours):
        return f"does not honour {FEATURES[lacking[0]]}"
    read_from = _TAPS_READ_FROM.get(engine.name.split()[0])
    if "other taps" in found and read_from is not None and form not in read_from:
        return f"does not find other taps in the form {form}"
    return None


def loads(form: str, found: frozenset[str]) -> dict[str, str | None]:
    """For each engine, None if it loads a draft of these features from the form, else why not."""
    return {engine.name: obstacle(engine, form, found) for engine in ENGINES}
