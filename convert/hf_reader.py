"""HuggingFace LLaMA folders with safetensors or pytorch_model*.bin files.

The config goes through the library's own strict reader; the tensors must be exactly those that it implies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.gguf_tokenizer import tokenizer_files
from convert.llama_folder import DTYPES, LlamaSource, SourceTensor, licence_files, tensor_shapes
from convert.weight_files import StoredTensor, open_weights, read_json, weight_files
from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import InputError
from eagle3_jax.rope import DEFAULT_ROPE_THETA

# Said by other keys of the config that is written, or about the program that wrote the old one.
REPLACED_KEYS = {"rope_parameters", "dtype", "torch_dtype", "quantization_config", "transformers_version"}


def _some(label: str, names: list[str]) -> str:
    """A count and a few of the names, for a message."""
    return f"{len(names)} {label}" + (f" ({', '.join(names[:3])})" if names else "")


def _match(config: TargetConfig, stored: dict[str, StoredTensor]) -> tuple[tuple[SourceTensor, ...], list[str]]:
    """Every tensor of the model, found in the files; the files' other tensors dropped by a named rule or refused."""
    shapes = tensor_shapes(config)
    spare, notes = set(stored) - set(shapes), []
    if derived := {name for name in spare if name.endswith(".rotary_emb.inv_freq")}:
        spare -= derived
        notes.append(f"left out {len(derived)} rotary_emb.inv_freq tensors: they follow from the config")
    if "lm_head.weight" in spare and "model.embed_tokens.weight" in stored:
        if not np.array_equal(stored["lm_head.weight"].load(), stored["model.embed_tokens.weight"].load()):
            raise InputError(
                expected="lm_head.weight equal to the embedding, since tie_word_embeddings is true",
                found="another matrix",
                remedy="Set tie_word_embeddings to false in config.json if the model has its own head.",
            )
        spare.remove("lm_head.weight")
        notes.append("left out lm_head.weight: it equals the tied embedding")
    missing = [name for name in shapes if name not in stored]
    if spare or missing:
        raise InputError(
            expected="the tensors of the LLaMA model that config.json describes",
            found=f"{_some('missing', missing)}; {_some('others', sorted(spare))}",
            remedy="Quantised, partial and adapter checkpoints cannot be converted; use the full checkpoint.",
        )
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.shape != shape or tensor.dtype not in DTYPES:
            raise InputError(
                expected=f"{name} of shape {shape} in one of {', '.join(DTYPES)}",
                found=f"{tensor.shape} in {tensor.dtype}",
                remedy="Check that config.json belongs to these weights; quantised weights cannot be converted.",
            )
    return tuple(SourceTensor(name, shape, stored[name].load) for name, shape in shapes.items()), notes


def _token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids, of config.json or else of generation_config.json; eos must be in one of them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: generation.get(name) if config.get(name) is None else config[name] for name in names}
    if ids["eos_token_id"] is None:
        raise InputError(
            expected="eos_token_id in config.json or generation_config.json",
            found="neither",
            remedy="Add the id of the token that ends a reply.",
        )
    return ids


def read_hf(folder: Path, tokenizer: Path | None) -> LlamaSource:
    """Reads a HuggingFace LLaMA folder: config and headers now, tensors when they are written.

    Args:
      folder: with config.json and weights.
      tokenizer: a folder whose tokenizer files are used instead of the folder's own, or None.

    Raises:
      InputError: a draft, a quantised or unsupported model, or files that do not fit together.
    """
    raw = read_json(folder / "config.json")
    config = TargetConfig.from_hf(raw, str(folder / "config.json"))
    files = weight_files(folder)
    if not files:
        raise InputError(
            expected="model*.safetensors, pytorch_model*.bin or one .gguf file",
            found=f"none in {folder}",
            remedy="Name a folder that holds the model's weights.",
        )
    stored = open_weights(files)
    if any(name.startswith(("fc.", "midlayer.")) for name in stored):
        raise InputError(
            expected="a target model's weights",
            found="fc.weight or midlayer tensors: this is an EAGLE-3 draft",
            remedy="Pass it as --draft where it is used; only targets are converted.",
        )
    tensors, notes = _match(config, stored)
    if files[0].suffix == ".safetensors" and any(folder.glob("pytorch_model*.bin")):
        notes.append("the folder has .bin files too; the safetensors were used")
    if not raw.get("rope_theta") and not (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get(
        "rope_theta"
    ):
        notes.append(f"no rope_theta in config.json: RoPE base {DEFAULT_ROPE_THETA:g}, the default of transformers")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    ids = _token_ids(raw, generation)
    generation = {name: value for name, value in ids.items() if value is not None} | generation
    dtypes = {stored[tensor.name].dtype for tensor in tensors}
    if len(dtypes) > 1:
        notes.append(f"tensors of several types ({', '.join(sorted(dtypes))}): written as float32 without --dtype")
    found, more = tokenizer_files(tokenizer or folder, config.vocab_size)
    licences = licence_files(folder)
    if not licences:
        more.append("no licence file beside the source")
    kept = {name: value for name, value in raw.items() if name not in REPLACED_KEYS}
    return LlamaSource(
        config=kept | config.to_hf() | ids,
        generation_config=generation,
        tensors=tensors,
        default_dtype=dtypes.pop() if len(dtypes) == 1 else "float32",
        files={**found, **licences},
        notes=tuple(notes + more),
    )
