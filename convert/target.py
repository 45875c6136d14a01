"""`python -m convert.target SRC DST`: a target model from GGUF or HuggingFace files to a safetensors folder.

SRC is a GGUF file, a folder with exactly one GGUF file, or a HuggingFace folder with safetensors or pytorch_model*.bin
files. DST becomes a HuggingFace LLaMA folder: config.json, model.safetensors (or shards with an index above 5 GB),
generation_config.json, the tokenizer with its chat template, and the licence file if there is one beside the source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from convert.command import run
from convert.gguf_reader import read_gguf
from convert.hf_reader import read_hf
from convert.llama_folder import DTYPES, MAX_SHARD_BYTES, LlamaSource, SourceTensor, tensor_shapes, write_folder
from convert.weight_files import weight_files
from eagle3_jax.errors import InputError
from eagle3_jax.files import check_destination
from eagle3_jax.params import is_spec
from eagle3_jax.target import Target, target_specs


def read_source(source: Path, tokenizer: Path | None) -> LlamaSource:
    """Describes the model at `source`, whichever of the formats it has; raises InputError when it has none."""
    if tokenizer is not None and not tokenizer.is_dir():
        raise InputError(
            expected="a folder after --tokenizer",
            found=f"{tokenizer}, which is not a folder",
            remedy="Name the folder that holds tokenizer.json.",
        )
    if source.is_file():
        return read_gguf(source, tokenizer)
    ggufs = sorted(source.glob("*.gguf"))
    if not ggufs:
        return read_hf(source, tokenizer)
    files = ggufs + weight_files(source)
    if len(files) > 1:
        raise InputError(
            expected="one model in the folder",
            found=", ".join(path.name for path in files),
            remedy="Name the GGUF file itself.",
        )
    return read_gguf(ggufs[0], tokenizer)


def convert(
    source: Path, destination: Path, *, dtype: str | None = None, tokenizer: Path | None = None, force: bool = False
) -> LlamaSource:
    """Writes the model at `source` to the folder `destination` and returns what was written.

    Raises:
      InputError: the source cannot be converted faithfully, or the destination may not be written.
    """
    if not source.exists():
        raise InputError(expected="a file or folder to convert", found=f"nothing at {source}", remedy="Check the path.")
    check_destination(destination, source, force=force)
    described = read_source(source, tokenizer)
    write_folder(described, destination, dtype or described.default_dtype, replace=force)
    return described


def save_target(destination: Path, target: Target, *, limit: int = MAX_SHARD_BYTES, force: bool = False) -> None:
    """Writes a target in memory as a HuggingFace folder, bit for bit; its tokenizer is that of where it came from.

    Args:
      destination: to be created.
      target: with its layers one by one.
      limit: bytes of tensors in one file, above which there are shards with an index.
      force: replace an existing model folder.

    Raises:
      InputError: see `check_destination`; stacked layers.
    """
    check_destination(destination, None, force=force)
    if not isinstance(target.params.layers, tuple):
        raise InputError(
            expected="a target whose layers are one by one",
            found="stacked ones, as training holds them",
            remedy="Load it with layers='each'.",
        )
    specs = jax.tree.leaves(target_specs(target.config), is_leaf=is_spec)
    pairs = zip(specs, jax.tree.leaves(target.params), strict=True)
    shapes = tensor_shapes(target.config)

    def reader(array: jax.Array, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(array).reshape(shape)

    tensors = [
        SourceTensor(spec.name, shapes[spec.name], reader(array, shapes[spec.name]))
        for spec, array in pairs
        if spec.name in shapes
    ]
    dtype = target.params.embed.dtype.name
    source = LlamaSource(target.config.to_hf(), {}, tuple(tensors), dtype, {}, ())
    write_folder(source, destination, dtype, replace=force, limit=limit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m convert.target", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="type of the weights; default: that of the source, float32 if quantised"
    )
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="folder whose tokenizer files are used")
    parser.add_argument("--force", action="store_true", help="replace DST if it is a model folder")
    parser.add_argument("--debug", action="store_true", help="show a traceback with every error")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 done, 2 wrong input, 130 interrupted)."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        done = convert(
            options.source,
            options.destination,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            force=options.force,
        )
        for note in done.notes:
            print(f"note: {note}", file=sys.stderr)
        print(options.destination)
        return 0

    return run(command, debug=options.debug)


if __name__ == "__main__":
    sys.exit(main())
