"""Drafts of every dialect in, the canonical draft out, and back; what cannot be said is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import draft_reader
from convert.draft import convert, main
from convert.draft_reader import read_draft
from convert.weight_files import StoredTensor
from eagle3_jax.checkpoint import fingerprint, load_draft, save_draft
from eagle3_jax.draft import Draft
from eagle3_jax.errors import InputError
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target
from tests import draft_folders, tiny

LLAMA3 = RopeConfig(
    theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
)


def same(found: Draft, wanted: Draft) -> None:
    """Every array bit for bit, and the config but for what only our own folders record."""
    assert jax.tree.structure(found) == jax.tree.structure(dataclasses.replace(wanted, config=found.config))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))
    assert dataclasses.replace(found.config, target_fingerprint=None) == dataclasses.replace(
        wanted.config, target_fingerprint=None
    )


def shuffled(draft: Draft) -> Draft:
    """The draft with its vocabulary in another order, so that some offsets are negative."""
    return tiny.bad_drafts(tiny.target())["shuffled_map"].replace(params=draft.params, config=draft.config)


# By dialect: how the folder is laid out, what the draft is like, and what has to be said on reading.
FIXTURES: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    "official": (draft_folders.official, {}, {}),
    "official, safetensors": (lambda *args: draft_folders.official(*args, binary=False), {}, {}),
    "official, own width": (draft_folders.official, {"hidden_size": 48, "head_dim": 12}, {}),
    "specforge": (draft_folders.specforge, {"head_dim": 32}, {}),
    "specforge, taps and llama3": (draft_folders.specforge, {"taps": (1, 3, 8), "rope": LLAMA3}, {}),
    "specforge, norm_output": (
        lambda *args: draft_folders.specforge(*args, norm_output=True), {"fc_norm": True}, {"dialect": "specforge"},
    ),
    "sglang, norm_output": (
        lambda *args: draft_folders.specforge(*args, norm_output=True), {"norm_output": True, "fc_norm": True},
        {"dialect": "sglang"},
    ),
    "speculators": (draft_folders.speculators, {"rope": RopeConfig(theta=1e6)}, {}),
    "speculators, its defaults": (
        draft_folders.speculators,
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "sliding_window": 256}, {},
    ),
    "speculators, fc_norm": (draft_folders.speculators, {"fc_norm": True, "taps": (1, 2, 4, 8), "rope": LLAMA3}, {}),
    "automodel": (draft_folders.automodel, {"fc_norm": True, "norm_output": True}, {}),
    "automodel, served": (lambda *args: draft_folders.automodel(*args, served=True), {}, {}),
    "modelopt": (draft_folders.modelopt, {"head_dim": 32}, {}),
}  # fmt: skip


@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("name", FIXTURES)
def test_every_dialect_is_read_bit_for_bit(tmp_path: Path, tiny_folder: Path, t0: Target, name: str, order: str):
    layout, settings, options = FIXTURES[name]
    draft = tiny.draft(t0, **settings)
    draft = shuffled(draft).replace(embed=draft.embed) if order == "unsorted" else draft
    source = layout(tmp_path / "in", draft)
    convert(source, tmp_path / "out", "canonical", target=tiny_folder, **options)
    found = load_draft(tmp_path / "out", t0)
    same(found, draft)
    assert found.config.target_fingerprint == fingerprint(t0)
    written = name.split(",")[0]
    known = "sglang" if written == "specforge" else written  # one form, until norm_output is in it
    assert read_draft(source, target=tiny_folder, **options).dialect == options.get("dialect", known)


# What each form can say, beside the plain draft.
FORMS: dict[str, list[dict[str, Any]]] = {
    "canonical": [{"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "taps": (0, 3, 9)}],
    "sglang": [{"fc_norm": True, "norm_output": True}, {"taps": (2, 5, 8)}, {"rope": LLAMA3, "head_dim": 32}],
    "vllm": [
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "sliding_window": 256},
        {"fc_norm": True, "taps": (1, 2, 4, 8), "rope": LLAMA3}, {"head_dim": 32},
    ],
    "official": [{"hidden_size": 48, "head_dim": 12}, {"rope": RopeConfig(theta=1e6, kind="linear", factor=2.0)}],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("form", "index"), [(form, i) for form in FORMS for i in range(-1, len(FORMS[form]))])
def test_every_form_comes_back_bit_for_bit(
    tmp_path: Path, tiny_folder: Path, t0: Target, form: str, index: int, dtype: Any
):
    settings = FORMS[form][index] if index >= 0 else {}
    draft = shuffled(tiny.draft(t0, trained_length=77, target_fingerprint=fingerprint(t0), **settings))
    draft = draft.replace(embed=tiny.draft(t0, **settings).embed)
    save_draft(tmp_path / "ours", draft, dtype=dtype)
    convert(tmp_path / "ours", tmp_path / "theirs", form, target=tiny_folder)
    convert(tmp_path / "theirs", tmp_path / "again", "canonical", target=tiny_folder)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert old.keys() == new.keys()
    for name, array in old.items():
        assert array.dtype == new[name].dtype
        assert array.tobytes() == new[name].tobytes(), name
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "again")]
    assert configs[0] == configs[1]
    assert load_draft(tmp_path / "again", t0).config == draft.config


@pytest.mark.parametrize(
    ("form", "settings", "told"),
    [
        ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
        ("sglang", {"norm_before_fc": True}, "norm_before_fc"),
        ("sglang", {"taps": (1, 4, 5)}, "count in two ways"),
        ("sglang", {"hidden_size": 48, "head_dim": 12}, "a width other than the target's"),
        ("vllm", {"hidden_size": 48, "head_dim": 12}, "a width other than the target's"),
        ("vllm", {"taps": (2, 4, 9)}, "final norm"),
        ("official", {"fc_norm": True}, "fc_norm"),
        ("official", {"norm_output": True}, "norm_output"),
        ("official", {"taps": (2, 4, 6)}, "taps other than the default"),
        ("official", {"taps": (1, 2, 4, 8)}, "taps"),
        ("official", {"rope": LLAMA3}, "RoPE scaling of type llama3"),
        ("official", {"head_dim": 32}, "head_dim"),
    ],
)
def test_what_an_engine_would_not_compute_is_refused(
    tmp_path: Path, tiny_folder: Path, t0: Target, form: str, settings: dict[str, Any], told: str
):
    save_draft(tmp_path / "ours", tiny.draft(t0, **settings))
    with pytest.raises(InputError, match=told):
        convert(tmp_path / "ours", tmp_path / "theirs", form, target=tiny_folder)
    assert not (tmp_path / "theirs").exists()
    with pytest.raises(InputError, match="--target"):
        convert(tmp_path / "ours", tmp_path / "theirs", form)


def test_a_head_that_is_absent_is_borrowed_for_a_whole_vocabulary_only(tmp_path: Path, tiny_folder: Path, t0: Target):
    whole = tiny.draft(t0, size=320)
    source = draft_folders.speculators(tmp_path / "whole", whole)
    edit(source, lambda tensors: tensors.pop("lm_head.weight"))
    notes = convert(source, tmp_path / "out", "canonical", target=tiny_folder)
    assert any("the target's head is used" in note for note in notes)
    np.testing.assert_array_equal(load_draft(tmp_path / "out", t0).params.lm_head, t0.params.lm_head)
    with pytest.raises(InputError, match="--target, to borrow the head"):
        read_draft(source)
    source = draft_folders.modelopt(tmp_path / "part", tiny.draft(t0))
    edit(source, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(InputError, match=r"lm_head\.weight \[96, 64\]"):
        read_draft(source, target=tiny_folder)


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def put(**new: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda tensors: tensors.update(new)


def test_an_embedding_of_the_drafts_own_is_kept_and_used(tmp_path: Path, tiny_folder: Path, t0: Target):
    own = tiny.draft(t0, own_embedding=True)
    own = own.replace(embed=jnp.asarray(np.random.default_rng(3).standard_normal(own.embed.shape), jnp.float32))
    source = draft_folders.speculators(tmp_path / "in", own)
    notes = convert(source, tmp_path / "out", "canonical", target=tiny_folder)
    assert any("differs from the target's" in note for note in notes)
    same(load_draft(tmp_path / "out", t0), own)
    convert(tmp_path / "out", tmp_path / "vllm", "vllm", target=tiny_folder)
    found = load_file(tmp_path / "vllm" / "model.safetensors")["embed_tokens.weight"]
    np.testing.assert_array_equal(found, own.embed)
    with pytest.raises(InputError, match="an embedding of its own"):
        convert(tmp_path / "out", tmp_path / "sglang", "sglang", target=tiny_folder)


def test_absolute_maps_are_told_from_offsets(tmp_path: Path, tiny_folder: Path, t0: Target):
    draft = tiny.draft(t0)
    ids = np.asarray(draft.vocab.d2t, np.int32)
    source = draft_folders.specforge(tmp_path / "flagged", draft)
    edit(source, put(d2t=ids))
    notes = convert(source, tmp_path / "out", "canonical", target=tiny_folder)
    assert any("absolute target ids" in note for note in notes)
    same(load_draft(tmp_path / "out", t0), draft)
    # Without flags, a map that only rises may be either; offsets of these ids would leave the vocabulary or not.
    low = np.arange(0, 96, dtype=np.int64)
    edit(source, lambda tensors: (tensors.pop("t2d"), tensors.update(d2t=low)))
    with pytest.raises(InputError, match="d2t=absolute or --set d2t=offsets"):
        read_draft(source, target=tiny_folder)
    absolute = read_draft(source, target=tiny_folder, changes={"d2t": "absolute"})
    np.testing.assert_array_equal(absolute.vocab.d2t, low)
    offsets = read_draft(source, target=tiny_folder, changes={"d2t": "offsets"})
    np.testing.assert_array_equal(offsets.vocab.d2t, 2 * low)


@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        (put(d2t=np.full(96, -1)), {}, "negative id -1"),
        (put(d2t=np.full(96, 320)), {}, "beyond the vocabulary"),
        (put(d2t=np.arange(96)[::-1].copy()), {}, "a duplicate"),
        (put(d2t=np.zeros(96, np.int64)), {}, "d2t is all zeros"),
        (put(d2t=np.zeros(96, np.float32)), {}, "integers"),
        (put(d2t=np.zeros(95, np.int64)), {}, "96 entries"),
        (lambda tensors: tensors.pop("d2t"), {}, "d2t in the draft's weights"),
        (put(**{"input_norm.weight": np.ones(192, np.float32)}), {}, "--set norm_before_fc=true"),
        (put(**{"aux_norm_low.weight": np.ones(64, np.float32)}), {}, "--set fc_norm=true"),
        (lambda tensors: None, {"fc_norm": True}, "fc_norm.0.weight is absent"),
        (lambda tensors: None, {"draft_vocab_size": 64}, "64"),
        (lambda tensors: None, {"hidden_act": "gelu"}, "hidden_act"),
        (lambda tensors: None, {"rope_scaling": {"rope_type": "foo"}, "rope_parameters": None}, "'foo'"),
        (lambda tensors: None, {"norm_output": True}, "--dialect specforge"),
        (lambda tensors: None, {"hidden_size": None}, "hidden_size"),
        (lambda tensors: None, {"eagle_config": {draft_folders.IDS: [1, 2, 3, 4]}}, "3 taps"),
        (lambda tensors: None, {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        (lambda tensors: None, {"fc_norm": False, "eagle_config": {"fc_norm": True}}, "in eagle_config"),
        (put(**{"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}), {}, "Qwen3"),
        (put(**{"midlayer.self_attn.q_proj.bias": np.ones(64, np.float32)}), {}, "q_proj.bias"),
        (put(**{"layers.1.input_layernorm.weight": np.ones(64, np.float32)}), {}, "layers"),
        (put(mask_hidden=np.ones((1, 1, 192), np.float32)), {}, "P-EAGLE"),
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), {}, "EAGLE-1 or EAGLE-2"),
        (lambda tensors: tensors.pop("fc.weight"), {}, "a target model"),
        (lambda tensors: tensors.pop("norm.weight"), {}, "norm.weight is absent"),
        (put(**{"model.norm.weight": np.ones(64, np.float32)}), {}, "under two names"),
        (put(spare=np.ones(1, np.float32)), {}, "spare has no use"),
    ],
)
def test_drafts_that_are_not_understood_are_refused(
    tmp_path: Path, tiny_folder: Path, t0: Target, change: Callable[..., Any], config: dict[str, Any], told: str
):
    source = draft_folders.specforge(tmp_path / "in", tiny.draft(t0), **config)
    edit(source, change)
    with pytest.raises(InputError, match=told):
        convert(source, tmp_path / "out", "canonical", target=tiny_folder)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_took_and_replaces_only_with_force(
    tmp_path: Path, tiny_folder: Path, t0: Target, capsys: pytest.CaptureFixture[str]
):
    source = str(draft_folders.official(tmp_path / "in", tiny.draft(t0)))
    out = str(tmp_path / "out")
    assert main([source, out, "--to", "canonical", "--target", str(tiny_folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == out
    assert "RoPE base 10000" in printed.err
    assert "taps [2, 4, 5]" in printed.err
    assert main([source, out, "--to", "canonical"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([source, out, "--to", "sglang", "--target", str(tiny_folder), "--force"]) == 0
    assert main([source, source, "--to", "sglang", "--force"]) == 2
    assert main([source, str(tmp_path / "b"), "--to", "canonical", "--set", "rope_theta"]) == 2
    assert main([source, str(tmp_path / "c"), "--to", "canonical", "--set", "rope_theta=5000"]) == 0
    assert json.loads((tmp_path / "c" / "config.json").read_text())["rope_theta"] == 5000


def published(**changes: Any) -> dict[str, Any]:
    """The config of an official draft for LLaMA-3.1-8B; a value of None takes a key out."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "draft_vocab_size": 32000,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "torch_dtype": "float16", "pad_token_id": 0,
    } | changes  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


# Config, the width of the target, parameters in millions where the published size is known.
PUBLISHED: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "LLaMA-3.1-8B": (published(), 4096, 424.7),
    "R1-Distill-LLaMA-8B": (published(max_position_embeddings=131072), 4096, 424.7),
    "Vicuna-13B": (
        published(vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_attention_heads=40,
                  num_key_value_heads=40, num_hidden_layers=40), 5120, 638.3,
    ),
    "LLaMA-3.3-70B": (
        published(hidden_size=6144, target_hidden_size=8192, intermediate_size=16384, num_attention_heads=48,
                  max_position_embeddings=131072), 8192, None,
    ),
    "Qwen3-8B": (
        published(architectures=["Eagle3LlamaForCausalLM"], vocab_size=151936, intermediate_size=12288, head_dim=128,
                  max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6), 4096, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_layouts_of_published_drafts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    config, target_width, millions = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    d, f, whole, size = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size"))
    q = config["num_attention_heads"] * config.get("head_dim", d // config["num_attention_heads"])
    kv = q // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (d,), "hidden_norm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, 2 * d),
        "self_attn.k_proj": (kv, 2 * d), "self_attn.v_proj": (kv, 2 * d), "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    shapes = {f"midlayer.{module}.weight": shape for module, shape in layer.items()}
    shapes |= {"fc.weight": (d, 3 * target_width), "norm.weight": (d,), "lm_head.weight": (size, d)}
    if d != target_width:
        shapes["embed_tokens.weight"] = (whole, d)

    def never() -> np.ndarray:
        raise AssertionError("a weight was read")

    stored = {key: StoredTensor(shape, "float16", never) for key, shape in shapes.items()}
    if size != whole:
        flags = np.arange(whole) < size
        stored["d2t"] = StoredTensor((size,), "int64", lambda: np.zeros(size, np.int64))
        stored["t2d"] = StoredTensor((whole,), "bool", lambda: flags)
    monkeypatch.setattr(draft_reader, "open_weights", lambda files: stored)
    found = read_draft(tmp_path)
    assert found.tap_count == 3
    assert found.config.rope.theta == config.get("rope_theta", 10000)
    assert found.config.target_hidden_size == target_width
    assert {key: tensor.shape for key, tensor in found.tensors.items()} == shapes
    if millions is not None:
        parameters = sum(math.prod(shape) for shape in shapes.values())
        assert parameters / 1e6 == pytest.approx(millions, abs=0.05)
