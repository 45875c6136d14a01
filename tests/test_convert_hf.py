"""HuggingFace folders with .bin or safetensors files to folders of one form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import save_file

from convert.target import convert, main
from eagle3_jax.checkpoint import load_target
from eagle3_jax.errors import InputError
from tests import tiny
from tests.tiny_gguf import hf_tensors, reference_tokenizer, tiny_llama

Weights = dict[str, torch.Tensor]


def weights(tied: bool = True, dtype: torch.dtype = torch.float32) -> Weights:
    return {name: torch.tensor(array).to(dtype) for name, array in hf_tensors(tied).items()}


def folder_of(path: Path, *, tied: bool = True, config: dict[str, Any] | None = None) -> Path:
    """A folder with config, tokenizer and licence, and no weights yet; a config value of None removes the key."""
    path.mkdir()
    content = tiny_llama(tied).config.to_dict() | {"tie_word_embeddings": tied} | (config or {})
    (path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    (path / "LICENSE").write_text("terms")
    reference_tokenizer("smollm").save(str(path / "tokenizer.json"))
    return path


def safetensors_folder(path: Path, tensors: Weights | None = None, **options: Any) -> Path:
    folder = folder_of(path, **options)
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def split_folder(path: Path, suffix: str) -> Path:
    """A folder with its weights in two files and an index."""
    folder, names = folder_of(path), sorted(weights())
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = {}
    for number, part in enumerate((names[:20], names[20:]), start=1):
        file = f"{stem}-{number:05d}-of-00002.{suffix}"
        tensors = {name: weights()[name] for name in part}
        save_file(tensors, folder / file) if suffix == "safetensors" else torch.save(tensors, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def written(folder: Path, tmp_path: Path, **options: Any) -> dict[str, np.ndarray]:
    convert(folder, tmp_path / "out", **options)
    return load_file(tmp_path / "out" / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        convert(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()
    return str(caught.value)


def assert_same(got: dict[str, np.ndarray], wanted: Weights) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(got[name].astype(np.float32), tensor.float().numpy(), err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["safetensors", "archive", "legacy"])
def test_tensors_come_through_bit_for_bit(tmp_path: Path, dtype: torch.dtype, form: str) -> None:
    tensors = weights(dtype=dtype)
    if form == "safetensors":
        folder = safetensors_folder(tmp_path / "in", tensors)
    else:
        folder = folder_of(tmp_path / "in")
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "archive")
    got = written(folder, tmp_path)
    assert_same(got, tensors)
    assert {str(array.dtype) for array in got.values()} == {str(dtype).removeprefix("torch.")}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix(
        "torch."
    )


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_split_weights_are_joined(tmp_path: Path, suffix: str) -> None:
    folder = split_folder(tmp_path / "in", suffix)
    (folder / ("consolidated." + suffix)).write_bytes(b"a file that the index does not name")
    assert_same(written(folder, tmp_path), weights())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_split_weights_without_index_are_joined(tmp_path: Path, suffix: str) -> None:
    folder = split_folder(tmp_path / "in", suffix)
    next(folder.glob("*.index.json")).unlink()
    assert_same(written(folder, tmp_path), weights())


def test_a_file_that_the_index_names_must_exist(tmp_path: Path) -> None:
    folder = split_folder(tmp_path / "in", "safetensors")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in")
    for name in ("model-a.safetensors", "model-b.safetensors"):
        save_file(weights(), folder / name)
    assert "in model-b.safetensors and in another" in refusal(folder)


def test_safetensors_are_preferred_and_that_is_said(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "in")
    torch.save({"other": torch.zeros(1)}, folder / "pytorch_model.bin")
    done = convert(folder, tmp_path / "out")
    assert any("the safetensors were used" in note for note in done.notes)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("archive", [True, False])
def test_code_in_a_bin_file_is_never_run(tmp_path: Path, archive: bool) -> None:
    folder = folder_of(tmp_path / "in")
    content = weights() | {"bomb": Bomb(tmp_path / "ran")}
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    assert "a file of tensors, and nothing else" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_bin_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "in")
    torch.save(weights(), folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert ".[torch]" in refusal(folder)


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], {"model.norm.weight": 1.0}])
def test_a_bin_file_of_other_things_is_refused(tmp_path: Path, content: Any) -> None:
    folder = folder_of(tmp_path / "in")
    torch.save(content, folder / "pytorch_model.bin")
    assert "state dictionary of tensors" in refusal(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("kept", [0, 5, 3000, -50])
def test_cut_files_are_refused(tmp_path: Path, suffix: str, kept: int) -> None:
    folder = folder_of(tmp_path / "in")
    path = folder / ("model.safetensors" if suffix == "safetensors" else "pytorch_model.bin")
    save_file(weights(), path) if suffix == "safetensors" else torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in refusal(folder)


def test_rope_in_any_place_means_the_same(tmp_path: Path) -> None:
    places = {
        "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "old": {"rope_parameters": None, "rope_theta": 5e5},
        "scaled": {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    }
    for name, config in places.items():
        folder = safetensors_folder(tmp_path / name, config=config)
        convert(folder, tmp_path / f"{name}-out")
        got = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert got["rope_theta"] == 5e5
        assert got["rope_scaling"] == ({"rope_type": "linear", "factor": 2.0} if name == "scaled" else None)
        assert "rope_parameters" not in got


def test_what_the_config_leaves_open_is_filled_in_and_said(tmp_path: Path) -> None:
    config = {"rope_parameters": None, "head_dim": None, "eos_token_id": None, "note_of_ours": "kept"}
    folder = safetensors_folder(tmp_path / "in", config=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))
    done = convert(folder, tmp_path / "out")
    got = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"rope_theta": 10000.0, "head_dim": 16, "eos_token_id": [2, 0], "note_of_ours": "kept"}
    assert wanted.items() <= got.items()
    assert any("no rope_theta" in note for note in done.notes)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "temperature": 0.6}


def test_stop_ids_of_generation_config_stay_as_they_are(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "in")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    assert (tmp_path / "out" / "LICENSE").read_text() == "terms"


def test_derived_and_tied_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": weights()["model.embed_tokens.weight"].clone(),
    }
    folder = safetensors_folder(tmp_path / "in", weights() | extra)
    done = convert(folder, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), weights())
    assert any("inv_freq" in note for note in done.notes)
    assert any("lm_head.weight" in note for note in done.notes)


def test_a_tied_model_with_its_own_head_is_refused(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "in", weights() | {"lm_head.weight": torch.zeros(320, 64)})
    assert "tie_word_embeddings" in refusal(folder)


def test_mixed_types_become_float32(tmp_path: Path) -> None:
    tensors = weights(dtype=torch.bfloat16) | {"model.norm.weight": weights()["model.norm.weight"]}
    got = written(safetensors_folder(tmp_path / "in", tensors), tmp_path)
    assert_same(got, tensors)
    assert {array.dtype for array in got.values()} == {np.dtype(np.float32)}


def without(name: str) -> Weights:
    return {key: tensor for key, tensor in weights().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (without("model.layers.3.mlp.up_proj.weight"), "1 missing (model.layers.3.mlp.up_proj.weight)"),
        (weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "self_attn.q_proj.bias"),
        ({name.removeprefix("model."): tensor for name, tensor in weights().items()}, "embed_tokens.weight"),
        (weights() | {"model.norm.weight": torch.zeros(32)}, "model.norm.weight of shape (64,)"),
        (weights() | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "I8"),
        (weights() | {"model.norm.weight": torch.full((64,), torch.nan)}, "inf or nan in model.norm.weight"),
        (weights() | {"fc.weight": torch.zeros(64, 192)}, "this is an EAGLE-3 draft"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(128, 64)}, "this is an EAGLE-3 draft"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, tensors: Weights, told: str) -> None:
    assert told in refusal(safetensors_folder(tmp_path / "in", tensors))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"draft_vocab_size": 32}, "this is an EAGLE-3 draft"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"eos_token_id": None}, "eos_token_id"),
    ],
)
def test_configs_that_cannot_be_a_target_are_refused_by_name(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    assert told in refusal(safetensors_folder(tmp_path / "in", config=config))


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "in")
    (folder / "tokenizer.json").unlink()
    assert "--tokenizer" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "model*.safetensors" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "a JSON object" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "JSON in" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)


def test_converting_twice_changes_nothing_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = safetensors_folder(tmp_path / "in", weights(tied=False), tied=False)
    assert main([str(folder), str(tmp_path / "one")]) == 0
    assert main([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one'}\n{tmp_path / 'two'}\n"
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in tiny_llama(tied=False).state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=0, rtol=0)


def test_heads_of_their_own_size_come_through(tmp_path: Path) -> None:
    model = tiny.hf_target(head_dim=32)
    folder = folder_of(tmp_path / "in", tied=False, config=model.config.to_dict())
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == 32
    target = load_target(tmp_path / "out")
    assert target.config.head_dim == 32
    jax.tree.map(np.testing.assert_array_equal, target.params, tiny.from_hf(model).params)
