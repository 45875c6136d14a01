"""The strict reader of HuggingFace configs: every form of the rotary keys, every refusal, and the round trip of a
draft's config. A config that is misread runs and gives wrong text, so each refusal names the key and the value."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.rope import DEFAULT_ROPE_THETA, ROPE_TYPES, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 128},
    "llama3": {key: value for key, value in LLAMA3.items() if key != "rope_type"},
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.9, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
    },
}  # fmt: skip

YARN_CONFIG = RopeConfig(
    theta=10000.0, kind="yarn", factor=4.0, original_max_positions=128, attention_factor=0.9, beta_fast=16.0,
    beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5, truncate=False,
)  # fmt: skip


def target_config(**changes: Any) -> TargetConfig:
    return TargetConfig.from_hf(LLAMA | changes)


def rope(**changes: Any) -> RopeConfig:
    return target_config(**changes).rope


def draft_config(**changes: Any) -> DraftConfig:
    return DraftConfig.for_target(target_config(), draft_vocab_size=96, **changes)


def assert_refused(error: pytest.ExceptionInfo[InputError], *words: str) -> None:
    """The message names what decides (`words`) and says what to do."""
    for word in words:
        assert word in str(error.value)
    assert error.value.remedy


def test_target_shape_is_read_from_the_config():
    config = target_config()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 128)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)


def test_head_dim_and_key_value_heads_are_taken_from_the_config_before_they_are_derived():
    assert target_config(head_dim=32).head_dim == 32
    assert target_config(head_dim=None).head_dim == 16
    assert target_config(num_key_value_heads=None).num_kv_heads == 4


def test_target_config_survives_the_round_trip():
    config = target_config(head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert config.to_hf()["head_dim"] == 32
    assert TargetConfig.from_hf(config.to_hf()) == config


def test_rope_theta_is_read_at_the_top_and_inside_rope_parameters(caplog: pytest.LogCaptureFixture):
    top = rope(rope_theta=500000.0)
    inside = rope(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    both = rope(rope_theta=500000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert top == inside == both == RopeConfig(theta=500000.0)
    assert not caplog.records


def test_missing_rope_theta_takes_the_documented_default_and_says_so(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert rope(rope_theta=None) == RopeConfig(theta=DEFAULT_ROPE_THETA)
    assert "rope_theta" in caplog.text
    assert "10000" in caplog.text


@pytest.mark.parametrize("unscaled", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_null_or_default_rope_scaling_means_unscaled(unscaled: dict[str, Any] | None):
    assert rope(rope_scaling=unscaled) == RopeConfig(theta=10000.0)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_every_rope_type_reads_alike_from_old_and_new_keys(kind: str):
    rule = RULES[kind]
    forms = [
        rope(rope_scaling={"type": kind, **rule}),
        rope(rope_scaling={"rope_type": kind, **rule}),
        rope(rope_scaling={"type": kind, "rope_type": kind, **rule}),
        rope(rope_theta=None, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **rule}),
        rope(rope_scaling={"type": kind, **rule}, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **rule}),
    ]
    assert set(forms) == {forms[0]}
    assert forms[0].kind == kind


def test_values_of_the_rope_types_arrive_in_their_fields():
    assert rope(rope_scaling={"type": "linear", "factor": 2}) == RopeConfig(theta=10000.0, kind="linear", factor=2.0)
    assert rope(rope_scaling=LLAMA3) == RopeConfig(
        theta=10000.0, kind="llama3", factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert rope(rope_scaling={"rope_type": "yarn", **RULES["yarn"]}) == YARN_CONFIG


def test_original_length_defaults_to_the_maximum_and_is_also_read_at_the_top():
    assert rope(rope_scaling={"type": "dynamic", "factor": 2.0}).original_max_positions == 512
    inner = {"rope_type": "yarn", "factor": 4.0}
    assert rope(rope_scaling=inner, original_max_position_embeddings=128).original_max_positions == 128


def test_dynamic_scaling_serves_only_the_original_length():
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128}
    assert target_config(rope_scaling=scaling).context_limit == 128
    assert target_config(rope_scaling={"type": "linear", "factor": 2.0}).context_limit == 512


def test_unknown_rope_type_is_refused_with_field_value_and_supported_list():
    with pytest.raises(InputError) as error:
        rope(rope_scaling={"rope_type": "foo", "factor": 2.0})
    assert_refused(error, "rope_scaling.rope_type", "'foo'", *ROPE_TYPES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "linear"]),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, ["original_max_position_embeddings"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, ["rope_scaling.low_freq_factor", "llama3"]),
        ({"rope_scaling": LLAMA3 | {"foo_factor": 3}}, ["foo_factor", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, ["mscale"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, ["linear", "dynamic"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ["rope_theta", "10000", "500000"]),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 32.0}}, ["8.0", "32.0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 8192}, ["8192", "64"]),
    ],
)
def test_rotary_settings_that_would_be_applied_wrongly_are_refused(changes: dict[str, Any], words: list[str]):
    with pytest.raises(InputError) as error:
        rope(**changes)
    assert_refused(error, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, ["model_type", "'mixtral'", "llama"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"rope_interleaved": True}, ["rope_interleaved"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
        ({"draft_vocab_size": 96}, ["EAGLE-3 draft", "--draft"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps", "null"]),
    ],
)
def test_target_that_would_run_wrongly_is_refused(changes: dict[str, Any], words: list[str]):
    with pytest.raises(InputError) as error:
        target_config(**changes)
    assert_refused(error, *words)


def test_missing_key_is_named_with_its_file():
    with pytest.raises(InputError) as error:
        TargetConfig.from_hf({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "x/config.json")
    assert_refused(error, "'hidden_size'", "x/config.json", "no such key")


def test_keys_that_the_target_reader_does_not_know_are_named(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        target_config(torch_dtype="bfloat16", eos_token_id=[7, 9])
        assert not caplog.records
        target_config(logit_scale=0.5)
    assert "logit_scale" in caplog.text


@pytest.mark.parametrize("layers", range(7, 81))
def test_default_taps_are_the_papers_and_the_same_for_the_draft(layers: int):
    config = target_config(num_hidden_layers=layers)
    low, middle, high = config.default_taps
    assert (low, middle, high) == (2, layers // 2, layers - 3)
    assert 0 < low < middle < high < layers
    assert DraftConfig.for_target(config, draft_vocab_size=96).taps == config.default_taps


@pytest.mark.parametrize("layers", range(1, 7))
def test_targets_too_shallow_for_the_default_taps_need_explicit_ones(layers: int):
    config = target_config(num_hidden_layers=layers)
    with pytest.raises(InputError) as error:
        _ = config.default_taps
    assert_refused(error, f"{layers} layers", "taps=")
    assert DraftConfig.for_target(config, draft_vocab_size=96, taps=(0, layers)).taps == (0, layers)


def test_draft_for_a_target_takes_its_layer_shape_but_not_its_rotary_base():
    target = target_config(head_dim=32, rope_theta=500000.0)
    draft = DraftConfig.for_target(target, draft_vocab_size=96, fc_norm=True)
    assert (draft.head_dim, draft.num_kv_heads, draft.target_hidden_size) == (32, 2, 64)
    assert draft.rope == RopeConfig(theta=10000.0)
    assert draft.fc_norm


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        {"trained_length": 256, "target_fingerprint": "0123456789abcdef"},
        {"hidden_size": 48, "head_dim": 32, "num_heads": 6, "num_kv_heads": 3, "taps": (0, 3, 5, 8)},
        {"rope": RopeConfig(theta=1e6)},
        {"rope": rope(rope_scaling=LLAMA3)},
        {"rope": rope(rope_scaling={"type": "dynamic", "factor": 2.0})},
        {"rope": rope(rope_scaling={"type": "linear", "factor": 2.0})},
        {"rope": YARN_CONFIG},
    ],
)
def test_draft_config_survives_the_round_trip(changes: dict[str, Any], caplog: pytest.LogCaptureFixture):
    config = draft_config(**changes)
    assert DraftConfig.from_hf(config.to_hf()) == config
    assert not caplog.records


def test_draft_config_names_another_target_width_only_when_there_is_one():
    assert "target_hidden_size" not in draft_config().to_hf()
    assert draft_config(hidden_size=48).to_hf()["target_hidden_size"] == 64


@pytest.mark.parametrize("form", ["top", "nested"])
def test_draft_rope_theta_is_read_in_either_place(form: str):
    config = draft_config(rope=RopeConfig(theta=1e6))
    keys = config.to_hf()
    if form == "nested":
        del keys["rope_theta"], keys["rope_scaling"]
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert DraftConfig.from_hf(keys) == config


@pytest.mark.parametrize("taps", [None, [], "absent"])
def test_draft_config_without_taps_leaves_them_open(taps: Any):
    keys = draft_config().to_hf()
    del keys["taps"]
    if taps != "absent":
        keys["taps"] = taps
    assert DraftConfig.from_hf(keys) == dataclasses.replace(draft_config(), taps=())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, ["num_hidden_layers", "2"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"eagle_config": {"use_aux_hidden_state": True}}, ["eagle_config", "canonical folder"]),
        ({"fc_norm": True, "norm_before_fc": True}, ["norm_before_fc", "input_norm.weight"]),
        ({"head_dim": None}, ["head_dim", "null"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["rope_scaling.rope_type", "'longrope'"]),
        ({"draft_vocab_size": None}, ["draft_vocab_size", "null"]),
    ],
)
def test_draft_that_would_run_wrongly_is_refused(changes: dict[str, Any], words: list[str]):
    with pytest.raises(InputError) as error:
        DraftConfig.from_hf(draft_config().to_hf() | changes)
    assert_refused(error, *words)


def test_target_given_as_draft_is_refused_and_told_where_to_go():
    with pytest.raises(InputError) as error:
        DraftConfig.from_hf(LLAMA)
    assert_refused(error, "draft_vocab_size", "LlamaForCausalLM", "--target")
