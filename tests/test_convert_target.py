"""GGUF files to HuggingFace folders: weights, config, the folder itself and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from convert import gguf_reader
from convert.llama_folder import SourceTensor, plan_shards, tensor_shapes, write_folder
from convert.target import convert, main
from eagle3_jax.checkpoint import load_target
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.target import target_forward, target_logits
from tests.tiny_gguf import HEADS, HIDDEN, VOCAB, gguf_tensors, hf_tensors, tiny_llama, write_gguf

ROOT = Path(__file__).parents[1]
# Cosine between a matrix and what the type keeps of it. A 4-bit type has steps of about 0.3 standard deviations.
COSINES = {"F32": 1.0, "F16": 0.999999, "BF16": 0.99999, "Q8_0": 0.9999, "Q4_0": 0.99, "Q4_1": 0.99}


def converted(tmp_path: Path, **options: Any) -> Path:
    """Writes a GGUF file with these options, converts it and gives the folder."""
    return Path(_convert(write_gguf(tmp_path / "model.gguf", **options), tmp_path / "out"))


def _convert(source: Path, destination: Path, **options: Any) -> Path:
    convert(source, destination, **options)
    return destination


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def refusal(tmp_path: Path, **options: Any) -> str:
    """The message with which a GGUF file of these options is refused; nothing may be left behind."""
    source = write_gguf(tmp_path / "model.gguf", **options)
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    return str(caught.value)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits


@pytest.mark.parametrize("kind", COSINES)
def test_every_type_keeps_each_tensor_within_its_error(tmp_path: Path, kind: str) -> None:
    tensors = load_file(converted(tmp_path, kind=kind) / "model.safetensors")
    wanted = hf_tensors()
    assert tensors.keys() == wanted.keys()
    for name, values in wanted.items():
        got, array = tensors[name].astype(np.float64), values.astype(np.float64)
        assert got.shape == array.shape
        cosine = np.sum(got * array) / np.linalg.norm(got) / np.linalg.norm(array)
        assert cosine >= COSINES[kind] - 1e-12, name
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(array), rel=0.02), name
        if kind == "F32" or array.ndim == 1:
            tolerance = {"F16": 1e-3, "BF16": 1e-2}.get(kind, 0)
            np.testing.assert_allclose(got, array, rtol=tolerance)


def test_rows_of_q_and_k_come_back_in_order(tmp_path: Path) -> None:
    tensors = hf_tensors()
    counted = {
        name: np.arange(array.size, dtype=np.float32).reshape(array.shape)
        for name, array in tensors.items()
        if "q_proj" in name or "k_proj" in name
    }
    stored = gguf_tensors(tensors | counted)
    assert not np.array_equal(stored["blk.0.attn_q.weight"], counted["model.layers.0.self_attn.q_proj.weight"])
    written = load_file(converted(tmp_path, tensors=stored) / "model.safetensors")
    for name, array in counted.items():
        np.testing.assert_array_equal(written[name], array)


@pytest.mark.parametrize(("tied", "kind", "error"), [(True, "F32", 1e-5), (False, "F32", 1e-5), (True, "F16", 3e-2)])
def test_transformers_computes_the_same_logits(tmp_path: Path, tied: bool, kind: str, error: float) -> None:
    folder = converted(tmp_path, kind=kind, tensors=gguf_tensors(hf_tensors(tied)))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.tie_word_embeddings == tied
    assert model.dtype == (torch.float32 if kind == "F32" else torch.float16)
    torch.testing.assert_close(logits(model.float()), logits(tiny_llama(tied)), atol=error, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(("tied", "kind"), [(True, "F16"), (True, "F32"), (False, "BF16")])
def test_our_own_target_computes_what_transformers_does(tmp_path: Path, tied: bool, kind: str) -> None:
    folder = converted(tmp_path, kind=kind, tensors=gguf_tensors(hf_tensors(tied)))
    target = load_target(folder, jnp.float32)
    assert target.config.tie_word_embeddings == tied
    assert (target.params.lm_head is target.params.embed) == tied
    tokens = jnp.arange(3, 43, dtype=jnp.int32)[None]
    positions, mask = jnp.arange(40, dtype=jnp.int32)[None], jnp.tril(jnp.ones((40, 40), bool))[None]
    ours = np.asarray(target_logits(target, target_forward(target, tokens, positions, mask).hidden))
    same = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(ours, same, atol=1e-4 * np.abs(same).max())
    source = logits(tiny_llama(tied)).numpy()
    np.testing.assert_allclose(ours, source, atol=(0.1 if kind == "BF16" else 1e-2) * np.abs(source).max())


def test_config_states_everything_at_top_level(tmp_path: Path) -> None:
    folder = converted(tmp_path, kind="Q8_0", metadata={"tokenizer.ggml.eot_token_id": 0})
    config = config_of(folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    expected = {
        "model_type": "llama",
        "head_dim": 16,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()
    # Both ids that end a turn, not only the one that the tokenizer calls eos.
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


@pytest.mark.parametrize(
    ("kind", "dtype", "written"),
    [
        ("F16", None, "F16"),
        ("BF16", None, "BF16"),
        ("Q4_0", None, "F32"),
        ("Q4_0", "bfloat16", "BF16"),
        ("BF16", "float16", "F16"),
    ],
)
def test_dtype_is_that_of_the_source_or_the_one_asked_for(
    tmp_path: Path, kind: str, dtype: str | None, written: str
) -> None:
    folder = _convert(write_gguf(tmp_path / "model.gguf", kind=kind), tmp_path / "out", dtype=dtype)
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0  # engines map the data, which must begin aligned
    header = json.loads(content[8 : 8 + size])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {written}
    assert config_of(folder)["torch_dtype"] == {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[written]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_tensor(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / scaled.numpy()).astype(np.float32)
    assert divisors.min() < 1.001 < divisors.max()
    folder = converted(
        tmp_path,
        tensors=gguf_tensors(hf_tensors()) | {"rope_freqs.weight": divisors},
        metadata={"llama.rope.freq_base": 500000.0},
    )
    assert config_of(folder)["rope_scaling"] == scaling


def test_other_rope_freqs_are_refused(tmp_path: Path) -> None:
    freqs = {"rope_freqs.weight": np.linspace(1, 7, 8, dtype=np.float32)}
    assert "rope_freqs.weight" in refusal(tmp_path, tensors=gguf_tensors(hf_tensors()) | freqs)


@pytest.mark.parametrize("kind", ["linear", None])
def test_linear_scaling_is_kept(tmp_path: Path, kind: str | None) -> None:
    folder = converted(tmp_path, metadata={"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0})
    assert config_of(folder)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
        ({"llama.attention.head_count": 5, "llama.rope.dimension_count": None}, "multiple of"),
        ({"llama.attention.head_count_kv": [2] * 7 + [4]}, "for all layers"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.context_length": None}, "llama.context_length"),
        ({"llama.feed_forward_length": 96}, "of shape"),
        ({"llama.block_count": 9}, "blk.8.attn_norm.weight"),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, "eos_token_id below 320"),
        ({"tokenizer.ggml.eot_token_id": VOCAB}, "eot_token_id below 320"),
        ({"split.count": 2}, "split into 2"),
    ],
)
def test_metadata_that_cannot_be_kept_are_refused_by_name(tmp_path: Path, metadata: dict[str, Any], told: str) -> None:
    assert told in refusal(tmp_path, metadata=metadata)


def test_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, architecture="gemma2")
    assert "'gemma2'" in message
    assert "supported architecture: llama" in message


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("blk.3.attn_v.weight", np.zeros((32, 64), np.int32), "blk.3.attn_v.weight of type I32"),
        ("blk.0.attn_q.bias", np.zeros(64, np.float32), "blk.0.attn_q.bias"),
        ("blk.0.ffn_gate_exps.weight", np.zeros((64, 64), np.float32), "blk.0.ffn_gate_exps.weight"),
        ("blk.7.ffn_up.weight", np.zeros((64, 64), np.float32), "blk.7.ffn_up.weight of shape (128, 64)"),
        ("blk.2.attn_k.weight", np.full((32, 64), np.inf, np.float32), "layers.2.self_attn.k_proj.weight"),
        ("blk.2.attn_norm.weight", np.full(64, np.nan, np.float32), "layers.2.input_layernorm.weight"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, name: str, array: np.ndarray, told: str
) -> None:
    assert told in refusal(tmp_path, tensors=gguf_tensors(hf_tensors()) | {name: array})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_tensors())
    del tensors["blk.5.ffn_norm.weight"]
    assert "blk.5.ffn_norm.weight" in refusal(tmp_path, tensors=tensors)


def test_defaults_that_the_file_leaves_open_are_said(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_tensors())
    for name in [name for name in tensors if "attn_k" in name or "attn_v" in name]:
        tensors[name] = np.zeros((HIDDEN, HIDDEN), np.float32)
    metadata = {"llama.rope.freq_base": None, "llama.attention.head_count_kv": None, "tokenizer.chat_template": None}
    source = write_gguf(tmp_path / "model.gguf", tensors=tensors, metadata=metadata)
    done = convert(source, tmp_path / "out")
    assert done.config["rope_theta"] == 10000.0
    assert done.config["num_key_value_heads"] == HEADS
    for said in ("freq_base", "head_count_kv", "no chat template", "no licence"):
        assert any(said in note for note in done.notes), said


def test_values_beyond_float16_are_refused_only_there(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_tensors())
    tensors["output_norm.weight"] = np.full(HIDDEN, 7e4, np.float32)
    source = write_gguf(tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(InputError, match=r"fit into float16.*model\.norm\.weight .* 70000"):
        convert(source, tmp_path / "out", dtype="float16")
    convert(source, tmp_path / "out", dtype="bfloat16")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 10, 24, 30, 77, 500, 5000, 9000, 12000, len(whole) // 2, len(whole) - 4):
        cut.write_bytes(whole[:length])
        with pytest.raises(InputError, match="a whole GGUF file"):
            convert(cut, tmp_path / "out")
    cut.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(InputError, match="a whole GGUF file"):
        convert(cut, tmp_path / "out")


def test_big_endian_file_is_refused(tmp_path: Path) -> None:
    assert "big-endian" in refusal(tmp_path, endianess=gguf.GGUFEndian.BIG)


def test_missing_gguf_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reader, "gguf", None)
    assert ".[convert]" in refusal(tmp_path)


def test_planned_shapes_are_those_of_transformers() -> None:
    options = {"num_hidden_layers": 2, "head_dim": 24, "attention_bias": True, "mlp_bias": True}
    config = transformers.LlamaConfig(**(tiny_llama().config.to_dict() | options | {"tie_word_embeddings": False}))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert tensor_shapes(TargetConfig.from_hf(config.to_dict())) == wanted


def test_large_models_are_written_in_shards_that_load(tmp_path: Path) -> None:
    source = gguf_reader.read_gguf(write_gguf(tmp_path / "model.gguf"), None)
    write_folder(source, tmp_path / "out", "float32", limit=100_000)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in hf_tensors().values())
    assert sorted(set(index["weight_map"].values())) == names
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(model), logits(tiny_llama()), atol=1e-5, rtol=0)


def test_shards_end_at_the_limit() -> None:
    tensors = [SourceTensor(str(n), (size,), lambda: np.zeros(1)) for n, size in enumerate((6, 4, 1, 30, 2, 8))]
    shards = plan_shards(tensors, itemsize=2, limit=20)
    assert [[tensor.shape[0] for tensor in shard] for shard in shards] == [[6, 4], [1], [30], [2, 8]]


def test_licence_is_carried_along(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").write_text("terms")
    done = convert(write_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "terms"
    assert not done.notes


def test_existing_destination_is_refused_without_force(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    (folder / "stale.txt").write_text("from before")
    with pytest.raises(InputError, match="--force"):
        convert(tmp_path / "model.gguf", folder)
    assert (folder / "stale.txt").exists()
    convert(tmp_path / "model.gguf", folder, force=True)
    assert not (folder / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    source = gguf_reader.read_gguf(write_gguf(tmp_path / "model.gguf"), None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("another run's")
    with pytest.raises(InputError, match="the system refused"):
        write_folder(source, tmp_path / "out", "float32")
    assert (tmp_path / "out" / "config.json").read_text() == "another run's"


def test_force_replaces_model_folders_only(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    for destination in (tmp_path / "photos", source):
        with pytest.raises(InputError):
            convert(source, destination, force=True)
    with pytest.raises(InputError, match="holds the source"):
        convert(source, tmp_path, force=True)
    assert (tmp_path / "photos" / "one.jpg").exists()


def test_a_failure_half_way_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    tensors = gguf_tensors(hf_tensors()) | {"output_norm.weight": np.full(HIDDEN, np.inf, np.float32)}
    broken = write_gguf(tmp_path / "broken.gguf", tensors=tensors)
    with pytest.raises(InputError, match="inf or nan"):
        convert(broken, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf", "model.gguf", "out"]


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the system refused"):
        convert(source, tmp_path / "file" / "out")


def test_folder_must_hold_one_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_gguf(source / "a.gguf")
    assert config_of(_convert(source, tmp_path / "one"))["model_type"] == "llama"
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.gguf, model\.safetensors"):
        convert(source, tmp_path / "two")
    (source / "model.safetensors").unlink()
    write_gguf(source / "b.gguf")
    with pytest.raises(InputError, match=r"a\.gguf, b\.gguf"):
        convert(source, tmp_path / "two")


def test_command_prints_the_folder_and_keeps_notes_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_gguf(tmp_path / "model.gguf"), tmp_path / "out"
    assert main([str(source), str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert printed.err.startswith("note: no licence file")
    assert main([str(source), str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: expected a destination")
    assert printed.err.count("\n") == 1
    with pytest.raises(InputError):
        main([str(source), str(out), "--debug"])


def test_module_runs_and_exits_with_two_on_wrong_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "convert.target", str(tmp_path / "none"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"nothing at {tmp_path / 'none'}" in done.stderr


@pytest.mark.smollm2
def test_demo_target_writes_english() -> None:
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip("run `make target` first")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "The capital of France is Paris." in tokenizer.decode(answer)
