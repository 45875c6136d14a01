"""What `convert.verify` and `convert.inspect` say of drafts that are right, damaged, and misread."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import inspect, verify
from convert.draft import convert
from eagle3_jax.checkpoint import save_draft
from eagle3_jax.draft import Draft
from eagle3_jax.target import Target
from tests import draft_folders, tiny
from tests.tiny_tokenizers import SHORT_TEMPLATE, chatml

SMOLLM2 = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct"
RELEASED = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct-eagle3"


@pytest.fixture(scope="module")
def target_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0 with a tokenizer."""
    folder = tmp_path_factory.mktemp("with_tokenizer") / "t0"
    shutil.copytree(tiny_folder, folder)
    chatml(SHORT_TEMPLATE, size=320).save_pretrained(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any], str]:
    code = verify.main([str(one) for one in arguments])
    printed = capsys.readouterr()
    return code, json.loads(printed.out or "{}"), printed.err


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as a converter writes them that takes neighbouring dimensions for a pair."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fc_norm": True, "norm_output": True, "hidden_size": 48, "head_dim": 12},
        {"norm_before_fc": True, "norm_before_residual": True, "taps": (1, 3, 6)},
    ],
)
def test_the_arithmetic_is_that_of_the_folder(t0: Target, tmp_path: Path, settings: dict[str, Any]):
    draft = tiny.draft(t0, **settings)
    save_draft(tmp_path / "draft", draft, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(3, 320, 24)
    wrong = {"embed_norm": lambda w: -w, "q": lambda w: w[::-1], "lm_head": lambda w: w[::-1], "norm": jnp.zeros_like}
    source = verify.read_draft(tmp_path / "draft")
    steps = verify.parity(draft, source, t0, tokens.tolist())
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(step["carry"] < 1e-5 and step["logits"] < 1e-5 for step in steps)
    for name, change in wrong.items():
        params = draft.params.replace(**{name: change(getattr(draft.params, name))})
        far = verify.parity(draft.replace(params=params), source, t0, tokens.tolist())
        assert max(step["logits"] for step in far) > 1e-2, name


def test_a_conversion_that_changed_something_is_noticed(
    target_folder: Path, t0: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Rows of q and k in the other rotary layout agree at position 0 only."""
    run_prompts, tried = verify.probe, []
    # Compiled once: the candidates take as long as the draft itself.
    monkeypatch.setattr(verify, "probe", lambda *args: tried.append(args) or run_prompts(*tried[0]))
    source = draft_folders.official(tmp_path / "in", tiny.draft(t0), binary=False)
    convert(source, tmp_path / "right", "vllm", target=target_folder)
    shutil.copytree(source, tmp_path / "wrong")
    tensors = load_file(tmp_path / "wrong" / "model.safetensors")
    for name, heads in (("q", 4), ("k", 2)):
        key = f"midlayer.self_attn.{name}_proj.weight"
        tensors[key] = interleave(tensors[key], heads)
    save_file(tensors, tmp_path / "wrong" / "model.safetensors")
    options = ("--target", target_folder, "--max-new-tokens", 8)
    for folder, equal in (("right", True), ("wrong", False)):
        code, result, said = run(capsys, tmp_path / folder, "--against", source, *options)
        assert result["equal"] is equal
        assert "step 5: carry" in said
        # A draft that has learnt nothing: everything likely is tried, and nothing repairs it.
        assert code == 1
        assert result["tau"] < 1.1
        assert len(result["tried"]) == 4
        assert result["repaired_by"] is None
    assert run(capsys, tmp_path / "right")[0] == 2


@pytest.mark.parametrize(
    ("misread", "said"),
    [
        ({"taps": (3, 5, 6)}, "--set taps=[2, 4, 5]"),
        ({"taps": (1, 3, 4)}, "--set taps=[2, 4, 5]"),
        ({"norm_output": True}, "--set norm_output=false"),
        ({"norm_before_residual": True}, "--set norm_before_residual=false"),
        ({"rope": dataclasses.replace(tiny.RopeConfig(), theta=5e5)}, "--set rope_theta=10000.0"),
    ],
)
def test_the_cause_that_repairs_a_draft_is_named(
    target_folder: Path, t0: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, misread: dict[str, Any], said: str,
):  # fmt: skip
    """Whether a draft drafts is taken from its config here: it does as it was trained, and not otherwise."""
    right = tiny.draft(t0)
    config = dataclasses.replace(right.config, **misread)
    save_draft(tmp_path / "draft", right.replace(config=config))

    def probe(draft: Draft, *_: Any) -> float:
        return 1.9 if dataclasses.replace(draft.config, target_fingerprint=None) == right.config else 1.0

    monkeypatch.setattr(verify, "probe", probe)
    code, result, printed = run(capsys, tmp_path / "draft", "--target", target_folder)
    assert code == 1
    assert result["repaired_by"]["say"].startswith(said)
    assert f"repaired by {result['repaired_by']['cause']}" in printed
    assert result["equal"]


@pytest.mark.full
def test_the_released_draft_drafts_and_is_repaired_when_misread(capsys: pytest.CaptureFixture[str]):
    options = ("--target", SMOLLM2, "--max-new-tokens", 32)
    code, result, _ = run(capsys, RELEASED, *options)
    assert code == 0
    assert result["tau"] > 1.5
    code, result, _ = run(capsys, RELEASED, *options, "--set", "norm_before_residual=true")
    assert code == 1
    assert result["tau"] < 1.1
    assert result["repaired_by"]["say"] == "--set norm_before_residual=false"
    assert result["repaired_by"]["tau"] > 1.5


def test_inspect_names_the_kind_and_what_loads_it(
    tiny_folder: Path, t0: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def said(folder: Path, *more: str) -> dict[str, Any]:
        assert inspect.main([str(folder), "--target", str(tiny_folder), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    assert said(tiny_folder)["kind"] == "target"
    plain = said(draft_folders.specforge(tmp_path / "plain", tiny.draft(t0)))
    assert (plain["kind"], plain["dialect"], plain["taps"]) == ("draft", "sglang", [2, 4, 5])
    assert not any(plain["loads"].values()) or set(filter(None, plain["loads"].values())) == {
        "does not read the form sglang"
    }
    normed = tiny.draft(t0, norm_before_residual=True)
    nested = said(draft_folders.speculators(tmp_path / "nested", normed))["loads"]
    assert nested["vLLM until pull request 42764 (00bd149)"] is None
    assert "norm_before_residual" in nested["SGLang from 2026-05 (pull request 24663)"]
    assert nested["tpu-inference (b8692ff)"] == "does not read the form vllm"
    assert inspect.main([str(tmp_path / "plain")]) == 0
    assert "official EAGLE (cb7e084): loads it" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert inspect.main([str(tmp_path / "empty")]) == 2
