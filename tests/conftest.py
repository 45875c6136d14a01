"""Strict settings for every test: no silent dtype or rank promotion, warnings are errors (see pyproject.toml)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from eagle3_jax.checkpoint import load_draft, load_target
from eagle3_jax.draft import Draft
from eagle3_jax.runtime import drop_programs
from eagle3_jax.target import Target
from eagle3_jax.tokenizer import load_tokenizer
from tests import tiny, tiny_decoding

# Tiny products: a second thread waits more than it works, above all when the cores are shared.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target T0 as a HuggingFace folder."""
    folder = tmp_path_factory.mktemp("t0")
    tiny.hf_target().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def t0():
    """The tiny target as ours."""
    return tiny.target()


@pytest.fixture(scope="session")
def d0(t0):
    """A tiny random draft for T0."""
    return tiny.draft(t0)


@pytest.fixture(autouse=True)
def _few_programs():
    """A process that has compiled too many programs crashes."""
    yield
    drop_programs()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Models for the property suite."""
    parser.addoption("--target", type=Path, help="HuggingFace folder for `-m property`; default: a tiny random model")
    parser.addoption("--draft", type=Path, help="canonical draft folder for --target")


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> tuple[Target, Draft, PreTrainedTokenizerFast]:
    """What properties are checked on: the models of the command line, or tiny ones; and the tokenizer."""
    folders = [request.config.getoption(name) for name in ("--target", "--draft")]
    if folders == [None, None]:
        return tiny_decoding.toy(), tiny_decoding.toy_draft(), tiny_decoding.pair_tokenizer()
    if None in folders:
        raise pytest.UsageError("--target and --draft belong together")
    target = load_target(folders[0])
    return target, load_draft(folders[1], target), load_tokenizer(folders[0])
