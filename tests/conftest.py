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

from tests import tiny

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
