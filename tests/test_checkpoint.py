"""Model folders in and out: every tensor is loaded exactly, derived by a rule that is said, or the load fails and names
it; a draft folder is written whole or not at all, in the form that every serving engine reads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from eagle3_jax import checkpoint
from eagle3_jax.checkpoint import fingerprint, load_draft, load_target, save_draft
from eagle3_jax.draft import Draft
from eagle3_jax.errors import InputError
from eagle3_jax.files import INDEX_FILE, SINGLE_FILE, SafetensorsFile, open_tensors, read_config
from eagle3_jax.rope import RopeConfig
from eagle3_jax.target import Target
from eagle3_jax.vocab import vocab_from_ids
from tests import tiny

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
SMALL = {"num_hidden_layers": 2}  # where the depth does not matter


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of a folder's config; the value `...` deletes."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def save_target(folder: Path, *, dtype: str = "float32", shard: str = "1GB", **changes: Any) -> dict[str, torch.Tensor]:
    """Write a small random target as transformers does; returns what was written."""
    model = tiny.hf_target(**(SMALL | changes)).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    return dict(model.state_dict())


def leaves_equal(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def drafted(t0: Target, folder: Path, **changes: Any) -> Draft:
    draft = tiny.draft(t0, **changes)
    save_draft(folder, draft, dtype=jnp.float32)
    return draft


# Targets


@pytest.mark.parametrize("shard", ["1GB", "100KB"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_single_and_sharded_targets_load_bit_equal_in_every_precision(tmp_path: Path, dtype: str, shard: str):
    state = save_target(tmp_path, dtype=dtype, shard=shard)
    assert (tmp_path / INDEX_FILE).exists() == (shard == "100KB")
    target = load_target(tmp_path, jnp.dtype(dtype))
    expected = {name: tensor.float().numpy() for name, tensor in state.items()}
    layer = target.params.layers[1]
    for name, array in {
        EMBED: target.params.embed, HEAD: target.params.lm_head, "model.norm.weight": target.params.norm,
        "model.layers.1.self_attn.q_proj.weight": layer.q.reshape(64, 64),
        "model.layers.1.self_attn.o_proj.weight": layer.o.reshape(64, 64),
        "model.layers.1.mlp.down_proj.weight": layer.down,
    }.items():  # fmt: skip
        assert array.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected[name], err_msg=name)


def test_bf16_tensors_are_read_to_the_last_bit_without_torch(tmp_path: Path):
    state = save_target(tmp_path, dtype="bfloat16")
    script = f"""
import sys
from pathlib import Path
import numpy as np
from eagle3_jax.checkpoint import load_draft, load_target, save_draft
from eagle3_jax.files import open_tensors
import eagle3_jax.target, eagle3_jax.draft
folder = Path({str(tmp_path)!r})
load_target(folder)
np.save(folder / "embed.npy", open_tensors(folder)["{EMBED}"]["{EMBED}"].view(np.uint16))
assert not [name for name in sys.modules if name.split(".")[0] == "torch"], "torch was imported"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    payload = state[EMBED].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(np.load(tmp_path / "embed.npy"), payload)


@pytest.mark.parametrize("key", ["torch_dtype", "dtype", None])
def test_precision_of_parameters_is_the_callers_and_not_the_configs(tmp_path: Path, key: str | None):
    save_target(tmp_path, dtype="bfloat16")
    edit_config(tmp_path, torch_dtype=..., dtype=...)
    if key is not None:
        edit_config(tmp_path, **{key: "bfloat16"})
    assert {leaf.dtype for leaf in jax.tree.leaves(load_target(tmp_path).params)} == {jnp.dtype("float32")}
    wanted = load_target(tmp_path, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(wanted.params)} == {jnp.dtype("bfloat16")}


def test_tied_target_without_a_head_uses_its_embedding(tmp_path: Path):
    save_target(tmp_path, tie_word_embeddings=True)
    assert HEAD not in open_tensors(tmp_path)
    target = load_target(tmp_path)
    assert target.params.lm_head is target.params.embed


@pytest.mark.parametrize("equal", [True, False])
def test_tied_target_with_both_tensors_follows_the_config_and_says_so(
    tmp_path: Path, equal: bool, caplog: pytest.LogCaptureFixture
):
    save_target(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED] + (0 if equal else 1)}))
    target = load_target(tmp_path)
    assert target.params.lm_head is target.params.embed
    np.testing.assert_array_equal(target.params.embed, load_file(tmp_path / SINGLE_FILE)[EMBED])
    assert bool(caplog.records) == (not equal)
    if not equal:
        assert HEAD in caplog.text
        assert "the embedding is used" in caplog.text


def test_tied_target_with_only_a_head_is_refused(tmp_path: Path):
    save_target(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBED)}))
    with pytest.raises(InputError, match=f"{EMBED} is absent"):
        load_target(tmp_path)


def test_missing_shard_is_named(tmp_path: Path):
    save_target(tmp_path, shard="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    shards[1].unlink()
    with pytest.raises(InputError, match=f"no {shards[1].name}"):
        load_target(tmp_path)


@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_truncated_file_is_named_with_both_sizes(tmp_path: Path, shard: str):
    save_target(tmp_path, shard=shard)
    path = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1024])
    with pytest.raises(InputError) as error:
        load_target(tmp_path)
    for word in (path.name, str(len(whole)), str(len(whole) - 1024)):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02\x03",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"nope",
        (4).to_bytes(8, "little") + b"[12]",
        b"\x80\x02}q\x00." * 10,
    ],
)
def test_file_that_is_no_safetensors_is_refused_by_name(tmp_path: Path, content: bytes):
    path = tmp_path / SINGLE_FILE
    path.write_bytes(content)
    with pytest.raises(InputError, match=SINGLE_FILE):
        SafetensorsFile(path)


def test_header_that_contradicts_itself_is_refused(tmp_path: Path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InputError, match="8 bytes for a of type F32"):
        SafetensorsFile(tmp_path / SINGLE_FILE)


def test_index_that_places_a_tensor_in_the_wrong_shard_is_refused(tmp_path: Path):
    save_target(tmp_path, shard="100KB")
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"][EMBED] = next(name for name in shards if name != index["weight_map"][EMBED])
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match=EMBED):
        load_target(tmp_path)


def test_tensor_that_the_index_forgets_is_not_dropped_unseen(tmp_path: Path):
    save_target(tmp_path, shard="100KB")
    path = tmp_path / json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"][EMBED]
    save_file(load_file(path) | {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}, path)
    with pytest.raises(InputError, match="q_norm"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["model.layers.1.mlp.up_proj.weight is absent"]),
        (lambda t: t.update({HEAD: t[HEAD][:-1]}), [HEAD, "(319, 64)", "(320, 64)"]),
        (lambda t: t.update({"model.norm.weight": np.ones(64, np.int64)}), ["model.norm.weight", "int64"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
            ["model.layers.0.self_attn.q_proj.bias", "dropped"],
        ),
        (lambda t: t.update({"fc.weight": np.ones((64, 192), np.float32)}), ["fc.weight", "EAGLE-3 draft", "--draft"]),
    ],
)
def test_target_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], words: list[str]
):
    save_target(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(InputError) as error:
        load_target(tmp_path)
    for word in words:
        assert word in str(error.value)


def test_rotary_tables_of_old_exports_are_known_to_be_redundant(tmp_path: Path):
    save_target(tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(table))
    load_target(tmp_path)


def test_fp8_weights_are_refused_by_name(tmp_path: Path):
    save_target(tmp_path)
    tensors = {name: torch.from_numpy(array) for name, array in load_file(tmp_path / SINGLE_FILE).items()}
    from safetensors.torch import save_file as save_torch

    tensors[HEAD] = tensors[HEAD].to(torch.float8_e4m3fn)
    save_torch(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(InputError, match=f"{HEAD} of type F8_E4M3"):
        load_target(tmp_path)


def test_what_is_no_model_folder_is_refused_with_what_is_there(tmp_path: Path):
    with pytest.raises(InputError, match="nothing there"):
        read_config(tmp_path / "absent")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"model\.gguf.*convert\.target"):
        read_config(tmp_path)
    with pytest.raises(InputError, match="a file"):
        read_config(tmp_path / "model.gguf")
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match="JSON"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"only model\.gguf"):
        open_tensors(tmp_path)


def test_tensors_stay_what_they_were_when_the_file_is_overwritten(tmp_path: Path):
    save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / SINGLE_FILE)
    array = SafetensorsFile(tmp_path / SINGLE_FILE)["a"]
    with (tmp_path / SINGLE_FILE).open("r+b") as file:
        file.seek(-32, 2)
        file.write(bytes(32))
    np.testing.assert_array_equal(array, np.arange(8))


def test_fingerprint_tells_targets_apart_but_not_precisions(tmp_path: Path, t0: Target):
    state = save_target(tmp_path, dtype="bfloat16")
    marks = {fingerprint(load_target(tmp_path, dtype)) for dtype in (jnp.float32, jnp.bfloat16)}
    assert len(marks) == 1
    assert fingerprint(tiny.from_hf(tiny.hf_target(seed=1, **SMALL))) not in marks
    assert state["model.norm.weight"].dtype == torch.bfloat16


# Drafts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "head_dim": 32},
        {"hidden_size": 48, "head_dim": 16},
        {"taps": (1, 2, 4, 8), "rope": RopeConfig(theta=1e6), "trained_length": 64},
    ],
)
def test_draft_survives_the_round_trip_bit_equal(
    tmp_path: Path, t0: Target, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    draft = drafted(t0, tmp_path / "draft", target_fingerprint=fingerprint(t0), **changes)
    again = load_draft(tmp_path / "draft", t0)
    assert again.config == draft.config
    leaves_equal(again, draft)
    assert not caplog.records


def test_draft_is_written_in_bf16_by_default_and_read_in_the_precision_asked(tmp_path: Path, t0: Target):
    draft = tiny.draft(t0)
    save_draft(tmp_path / "draft", draft)
    stored = load_file(tmp_path / "draft" / SINGLE_FILE)
    assert stored["fc.weight"].dtype == ml_dtypes.bfloat16
    assert read_config(tmp_path / "draft")["torch_dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), draft.params)
    leaves_equal(load_draft(tmp_path / "draft", t0, jnp.bfloat16).params, rounded)
    leaves_equal(load_draft(tmp_path / "draft", t0).params, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_draft_folder_is_the_form_that_every_engine_reads(tmp_path: Path, t0: Target):
    draft = drafted(t0, tmp_path / "draft", head_dim=32)
    config, tensors = read_config(tmp_path / "draft"), load_file(tmp_path / "draft" / SINGLE_FILE)
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == ["config.json", SINGLE_FILE]
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 320,
        "draft_vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": False, "rope_theta": 10000.0,
        "rope_scaling": None, "torch_dtype": "float32", "fc_norm": False, "norm_output": False,
        "norm_before_residual": False, "taps": [2, 4, 5], "trained_length": None, "target_fingerprint": None,
    }  # fmt: skip
    assert {name: array.shape for name, array in tensors.items()} == {
        "fc.weight": (64, 192), "midlayer.input_layernorm.weight": (64,), "midlayer.hidden_norm.weight": (64,),
        "midlayer.self_attn.q_proj.weight": (128, 128), "midlayer.self_attn.k_proj.weight": (64, 128),
        "midlayer.self_attn.v_proj.weight": (64, 128), "midlayer.self_attn.o_proj.weight": (64, 128),
        "midlayer.post_attention_layernorm.weight": (64,), "midlayer.mlp.gate_proj.weight": (128, 64),
        "midlayer.mlp.up_proj.weight": (128, 64), "midlayer.mlp.down_proj.weight": (64, 128), "norm.weight": (64,),
        "lm_head.weight": (96, 64), "d2t": (96,), "t2d": (320,),
    }  # fmt: skip
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
    assert (np.diff(tensors["d2t"]) >= 0).all()
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(96), draft.vocab.d2t)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), draft.vocab.d2t)


def test_draft_of_its_own_width_carries_its_embedding_and_says_so(tmp_path: Path, t0: Target):
    draft = drafted(t0, tmp_path / "draft", hidden_size=48, head_dim=16)
    assert read_config(tmp_path / "draft")["target_hidden_size"] == 64
    np.testing.assert_array_equal(load_file(tmp_path / "draft" / SINGLE_FILE)["embed_tokens.weight"], draft.embed)
    edit_tensors(tmp_path / "draft", lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(InputError, match=r"embed_tokens\.weight is absent"):
        load_draft(tmp_path / "draft", t0)


def test_unsorted_map_belongs_to_the_weights_and_is_kept(tmp_path: Path, t0: Target):
    draft = tiny.bad_drafts(t0)["shuffled_map"]
    save_draft(tmp_path / "draft", draft, dtype=jnp.float32)
    leaves_equal(load_draft(tmp_path / "draft", t0), draft)


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, t0: Target, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    good = drafted(t0, tmp_path / "old")
    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_draft(tmp_path / "draft", good)
    with pytest.raises(OSError, match="disk full"):
        save_draft(tmp_path / "old", good, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    monkeypatch.undo()
    leaves_equal(load_draft(tmp_path / "old", t0), good)


def test_existing_folder_is_replaced_only_with_force(tmp_path: Path, t0: Target):
    drafted(t0, tmp_path / "draft")
    (tmp_path / "draft" / "pytorch_model.bin").write_bytes(b"stale")
    other = tiny.draft(t0, seed=1)
    with pytest.raises(InputError, match="--force"):
        save_draft(tmp_path / "draft", other, dtype=jnp.float32)
    save_draft(tmp_path / "draft", other, dtype=jnp.float32, force=True)
    leaves_equal(load_draft(tmp_path / "draft", t0), other)
    # Some loaders prefer a stale .bin beside the new weights; and no part of either folder may be left.
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == ["config.json", SINGLE_FILE]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, t0: Target, value: float):
    draft = tiny.draft(t0)
    broken = draft.replace(params=draft.params.replace(up=draft.params.up.at[0, 0].set(value)))
    with pytest.raises(InputError, match=r"nan or inf in midlayer\.mlp\.up_proj\.weight"):
        save_draft(tmp_path / "draft", broken)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", ["theta_top", "theta_nested", "taps_null", "full_vocab_without_maps"])
def test_published_variants_of_a_draft_all_load(
    tmp_path: Path, t0: Target, variant: str, caplog: pytest.LogCaptureFixture
):
    draft = tiny.draft(t0, size=320 if variant.startswith("full") else 96)
    save_draft(tmp_path / "draft", draft, dtype=jnp.float32)
    if variant == "theta_nested":
        nested = {"rope_type": "default", "rope_theta": 10000.0}
        edit_config(tmp_path / "draft", rope_theta=..., rope_scaling=..., rope_parameters=nested)
    if variant == "taps_null":
        edit_config(tmp_path / "draft", taps=None)
    if variant == "full_vocab_without_maps":
        edit_tensors(tmp_path / "draft", lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    again = load_draft(tmp_path / "draft", t0)
    assert again.config == draft.config
    leaves_equal(again, draft)
    if variant == "taps_null":
        assert "'taps'" in caplog.text
        assert "guessing [2, 4, 5]" in caplog.text
    else:
        assert not caplog.records


def test_missing_taps_are_not_guessed_when_the_fusion_has_another_width(tmp_path: Path, t0: Target):
    drafted(t0, tmp_path / "draft", taps=(1, 2, 4, 8))
    edit_config(tmp_path / "draft", taps=...)
    with pytest.raises(InputError, match=r"'taps'.*width 256"):
        load_draft(tmp_path / "draft", t0)


@pytest.mark.parametrize("taps", [[2, 4, 10], [-1, 2, 4], [4, 2, 5], [2, 2, 4]])
def test_taps_that_the_target_does_not_have_are_refused(tmp_path: Path, t0: Target, taps: list[int]):
    drafted(t0, tmp_path / "draft")
    edit_config(tmp_path / "draft", taps=taps)
    with pytest.raises(InputError, match="ascending taps between 0 and 8"):
        load_draft(tmp_path / "draft", t0)


def test_draft_without_a_head_borrows_the_targets_only_over_the_whole_vocabulary(
    tmp_path: Path, t0: Target, caplog: pytest.LogCaptureFixture
):
    draft = tiny.draft(t0, size=320).replace(vocab=vocab_from_ids(np.arange(320), 320))
    save_draft(tmp_path / "full", draft, dtype=jnp.float32)
    drafted(t0, tmp_path / "reduced")
    for name in ("full", "reduced"):
        edit_tensors(tmp_path / name, lambda tensors: tensors.pop("lm_head.weight"))
    np.testing.assert_array_equal(load_draft(tmp_path / "full", t0).params.lm_head, t0.params.lm_head)
    assert "no lm_head" in caplog.text
    with pytest.raises(InputError, match=r"lm_head\.weight is absent"):
        load_draft(tmp_path / "reduced", t0)


def test_borrowed_head_follows_the_order_of_the_drafts_own_map(tmp_path: Path, t0: Target):
    ids = np.random.default_rng(0).permutation(320)
    draft = tiny.draft(t0, size=320).replace(vocab=vocab_from_ids(ids, 320))
    save_draft(tmp_path / "draft", draft, dtype=jnp.float32)
    edit_tensors(tmp_path / "draft", lambda tensors: tensors.pop("lm_head.weight"))
    head = load_draft(tmp_path / "draft", t0).params.lm_head
    np.testing.assert_array_equal(head, np.asarray(t0.params.lm_head)[ids])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), ["fc.weight is absent"]),
        (
            lambda t: t.update({"lm_head.weight": np.ones((320, 64), np.float32)}),
            ["lm_head.weight", "(320, 64)", "(96, 64)", "config.json"],
        ),
        (lambda t: t.pop("d2t"), ["d2t", "96 of 320"]),
        (lambda t: t.update(d2t=t["d2t"][:-1]), ["d2t", "draft_vocab_size = 96", "(95,)"]),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), ["d2t", "float32"]),
        (lambda t: t.update(d2t=t["d2t"] + np.arange(96)), ["d2t"]),
        (lambda t: t.update(t2d=np.roll(t["t2d"], 1)), ["t2d", "differing tokens"]),
        (lambda t: t.update(input_norm=np.ones(192, np.float32)), ["input_norm"]),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}),
            ["midlayer.self_attn.q_norm.weight"],
        ),
        (lambda t: t.update({"embed_tokens.weight": np.ones((320, 64), np.float32)}), ["embed_tokens.weight"]),
    ],
)
def test_draft_tensors_that_do_not_fit_are_named(
    tmp_path: Path, t0: Target, change: Callable[[dict[str, np.ndarray]], Any], words: list[str]
):
    drafted(t0, tmp_path / "draft")
    edit_tensors(tmp_path / "draft", change)
    with pytest.raises(InputError) as error:
        load_draft(tmp_path / "draft", t0)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("changes", "word"), [({"vocab_size": 400}, "vocab_size"), ({"hidden_size": 32}, "width")])
def test_draft_of_another_vocabulary_or_width_is_refused(
    tmp_path: Path, t0: Target, changes: dict[str, Any], word: str
):
    drafted(t0, tmp_path / "draft")
    other = tiny.from_hf(tiny.hf_target(**changes))
    with pytest.raises(InputError, match=f"{word}.*another target"):
        load_draft(tmp_path / "draft", other)


def test_draft_of_another_target_of_the_same_shape_loads_with_a_warning(
    tmp_path: Path, t0: Target, caplog: pytest.LogCaptureFixture
):
    draft = drafted(t0, tmp_path / "draft", target_fingerprint=fingerprint(t0))
    other = tiny.target(seed=3)
    with caplog.at_level(logging.WARNING):
        leaves_equal(load_draft(tmp_path / "draft", other).params, draft.params)
    assert "another target" in caplog.text
    assert fingerprint(t0) in caplog.text
    assert fingerprint(other) in caplog.text


def test_draft_and_target_folders_given_the_wrong_way_round_are_told_apart(
    tmp_path: Path, t0: Target, tiny_folder: Path
):
    drafted(t0, tmp_path / "draft")
    with pytest.raises(InputError, match=r"EAGLE-3 draft.*--draft"):
        load_target(tmp_path / "draft")
    with pytest.raises(InputError, match="--target"):
        load_draft(tiny_folder, t0)


def test_biases_load_from_a_folder(tmp_path):
    model = tiny.hf_target(attention_bias=True, mlp_bias=True, num_hidden_layers=2)
    model.save_pretrained(tmp_path / "biased")
    loaded, wanted = load_target(tmp_path / "biased").params, tiny.from_hf(model).params
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert loaded.layers[0].q_bias is not None
    assert loaded.layers[0].q_bias.shape == (4, 16)
