"""Targets of every supported family, against transformers and through files in both directions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from convert.gguf_reader import gguf_name
from convert.target import convert, save_target
from eagle3_jax.checkpoint import load_target
from eagle3_jax.config import TARGET_MODEL_TYPES, TargetConfig
from eagle3_jax.errors import InputError
from tests import tiny
from tests.test_target import ROPES, hf_logits, logits, prompt
from tests.tiny_gguf import interleaved, model_metadata, reference_tokenizer, write_gguf

FAMILIES = tuple(TARGET_MODEL_TYPES)
# A row for each family and rope type, the other settings so that any two values of any two settings meet.
COVER = [
    (family, rope, bool((i + j) % 2), bool((i // 2 + j // 2) % 2), ("old", "new")[(i + j // 3) % 2])
    for i, family in enumerate(FAMILIES)
    for j, rope in enumerate(ROPES)
]


def own_settings(family: str, bias: bool) -> dict[str, Any]:
    """What a family's config has of its own; Mistral has no biases, and Qwen2 always has them."""
    return {
        "llama": {"attention_bias": bias, "mlp_bias": bias},
        "mistral": {"head_dim": 32, "sliding_window": 256 if bias else None},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"head_dim": 32, "attention_bias": bias},
    }[family]


def folder_of(model: Any, path: Path, keys: str = "new", **changes: Any) -> Path:
    """The model as transformers saves it, with rotary settings under the keys of transformers 4 ("old") or 5."""
    model.save_pretrained(path)
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    if keys == "old":
        rule = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rule.pop("rope_theta")
        config["rope_scaling"] = None if rule["rope_type"] == "default" else rule
        config["torch_dtype"] = config.pop("dtype", "float32")
    file.write_text(json.dumps(config))
    return path


def test_the_cover_has_every_pair_of_values():
    values = [FAMILIES, tuple(ROPES), (False, True), (False, True), ("old", "new")]
    for (a, first), (b, second) in itertools.combinations(enumerate(values), 2):
        assert {(row[a], row[b]) for row in COVER} == set(itertools.product(first, second)), (a, b)


@pytest.mark.parametrize(("family", "rope", "tied", "bias", "keys"), COVER)
def test_logits_equal_transformers(tmp_path: Path, family: str, rope: str, tied: bool, bias: bool, keys: str):
    model = tiny.hf_target(
        scale=2.0, family=family, tie_word_embeddings=tied, rope_parameters=ROPES[rope], **own_settings(family, bias)
    )
    target = load_target(folder_of(model, tmp_path / "model", keys))
    expected = hf_logits(model, prompt())
    assert np.abs(logits(target, prompt()) - expected).max() < 1e-4
    assert expected.std() > 0.2
    assert TargetConfig.from_hf(target.config.to_hf()) == target.config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_bit_for_bit(tmp_path: Path, family: str):
    model = tiny.hf_target(family=family, **own_settings(family, True)).to(torch.bfloat16)
    source = folder_of(model, tmp_path / "in")
    reference_tokenizer("smollm").save(str(source / "tokenizer.json"))
    convert(source, tmp_path / "out")
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert old.keys() == new.keys()
    for name, array in old.items():
        assert array.dtype == new[name].dtype
        np.testing.assert_array_equal(array.view(np.uint16), new[name].view(np.uint16), err_msg=name)
    read = [TargetConfig.from_hf(json.loads((tmp_path / name / "config.json").read_text())) for name in ("in", "out")]
    assert read[0] == read[1]
    assert read[0].model_type == family


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_in_memory_is_written_bit_for_bit_and_in_shards(tmp_path: Path, family: str, tied: bool):
    model = tiny.hf_target(family=family, tie_word_embeddings=tied, **own_settings(family, True)).to(torch.bfloat16)
    target = load_target(folder_of(model, tmp_path / "in"), jnp.bfloat16)
    save_target(tmp_path / "out", target, limit=100_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    old = load_file(tmp_path / "in" / "model.safetensors")
    new = {name: array for shard in shards for name, array in load_file(shard).items()}
    assert old.keys() - {"lm_head.weight"} == new.keys() - {"lm_head.weight"}
    assert ("lm_head.weight" in new) is not tied
    for name, array in new.items():
        assert array.tobytes() == old[name].tobytes(), name
    read = [AutoModelForCausalLM.from_pretrained(tmp_path / name).float() for name in ("in", "out")]
    np.testing.assert_array_equal(*(hf_logits(one, prompt()) for one in read))
    with pytest.raises(InputError, match="--force"):
        save_target(tmp_path / "out", target)
    with pytest.raises(InputError, match="one by one"):
        save_target(tmp_path / "other", load_target(tmp_path / "in", layers="stacked"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_bias_or_norm_that_is_ignored_would_be_noticed(tmp_path: Path, family: str):
    model = tiny.hf_target(scale=2.0, family=family, **own_settings(family, True))
    target = load_target(folder_of(model, tmp_path / "model"))
    first, *others = target.params.layers
    names = ("q_bias", "k_bias", "v_bias") if family == "qwen2" else ("q_norm", "k_norm", "o_bias")
    whole = logits(target, prompt())
    for name in names:
        value = getattr(first, name)
        other = first.replace(**{name: value[..., ::-1]})
        params = target.params.replace(layers=(other, *others))
        assert np.abs(logits(target.replace(params=params), prompt()) - whole).max() > 1e-3, name


def test_mistrals_window_ends_the_context_where_it_would_bind(tmp_path: Path):
    model = tiny.hf_target(scale=2.0, family="mistral", sliding_window=64)
    config = load_target(folder_of(model, tmp_path / "model")).config
    assert config.context_limit == 64
    whole = tiny.from_hf(tiny.hf_target(scale=2.0, family="mistral", sliding_window=None))
    assert whole.config.context_limit == 512
    # transformers applies the window: with 64 tokens it changes nothing, with more it does.
    for length, equal in ((64, True), (80, False)):
        tokens = prompt(length)
        assert bool(np.abs(logits(whole, tokens) - hf_logits(model, tokens)).max() < 1e-4) is equal


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, "layer_types"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ("qwen2", {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("llama", {"model_type": "gemma2"}, "'gemma2'"),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(family: str, changes: dict[str, Any], told: str):
    config = tiny.hf_target(family=family, num_hidden_layers=1).config.to_dict() | {"layer_types": None} | changes
    with pytest.raises(InputError, match=told):
        TargetConfig.from_hf(config)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_gguf_of_another_family_computes_what_transformers_does(tmp_path: Path, family: str):
    """Qwen's rows of q and k are not interleaved; biases and norms of heads come along."""
    tied = family == "qwen2"
    model = tiny.hf_target(scale=2.0, family=family, tie_word_embeddings=tied, **own_settings(family, True))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        array, heads = tensor.numpy(), 4 if "q_proj" in name else 2 if "k_proj" in name else None
        tensors[gguf_name(name)] = interleaved(array, heads) if heads and family == "llama" else array
    config = model.config
    metadata = dict.fromkeys(model_metadata()) | {
        f"{family}.{key}": value
        for key, value in {
            "block_count": 8, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0, "attention.key_length": getattr(config, "head_dim", None) or 16,
            "attention.value_length": getattr(config, "head_dim", None) or 16,
        }.items()
    }  # fmt: skip
    source = write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata=metadata, architecture=family)
    convert(source, tmp_path / "out")
    target = load_target(tmp_path / "out")
    assert target.config.model_type == family
    assert np.abs(logits(target, prompt()) - hf_logits(model, prompt())).max() < 1e-4
