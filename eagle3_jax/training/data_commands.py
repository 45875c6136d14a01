"""`eagle3-jax data inspect`, `vocab` and `features`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax import runtime
from eagle3_jax.checkpoint import load_target, read_target_config
from eagle3_jax.errors import InputError
from eagle3_jax.files import at, replace_file
from eagle3_jax.sharding import entered, make_mesh
from eagle3_jax.tokenizer import decode as decode_text
from eagle3_jax.tokenizer import eos_ids, load_tokenizer
from eagle3_jax.training.config import check_row_length, load_config, override
from eagle3_jax.training.data import Encoded, encode_file
from eagle3_jax.training.features import check_tokens, write_features
from eagle3_jax.training.setup import packed_rows
from eagle3_jax.vocab import most_frequent

logger = logging.getLogger(__name__)

# Marks around what is supervised in `data inspect`, and the colour that replaces them on a terminal.
MARKS = ("\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}")
SIZES = (1024, 4096, 8192, 16384, 32000, 64000)  # whose coverage `data vocab` says
COLOURS = ("\x1b[32m", "\x1b[0m")


def inspect(args: argparse.Namespace) -> int:
    """Show a row as the draft will be trained on it, and what became of all rows."""
    runtime.start(args.device or "cpu", "float32", "")
    out = _writable(args.out, args.force)
    tokenizer, encoded = _encoded(args, [args.data], args.row_length)
    if args.row >= len(encoded):
        raise InputError(
            expected=f"--row from 0 to {len(encoded) - 1}, of the rows that were kept",
            found=str(args.row),
            remedy="See the report above for rows that were dropped.",
        )
    document = encoded[args.row]
    if args.json:
        text = json.dumps({"tokens": document.tokens.tolist(), "spans": document.spans.tolist()})
    else:
        text = marked(tokenizer, document, COLOURS if out is None and sys.stdout.isatty() else MARKS)
    _write(out, text)
    return 0


def marked(tokenizer: Any, document: Encoded, marks: tuple[str, str]) -> str:
    """The text of a document with marks around its supervised spans."""
    parts = []
    starts = [0, *(np.flatnonzero(np.diff(document.spans)) + 1).tolist(), document.spans.size]
    for start, stop in pairwise(starts):
        text = decode_text(tokenizer, document.tokens[start:stop].tolist(), special=True)
        parts.append(marks[0] + text + marks[1] if document.spans[start] else text)
    return "".join(parts)


def vocab(args: argparse.Namespace) -> int:
    """Say what share of supervised tokens draft vocabularies of several sizes cover; write one of them."""
    runtime.start(args.device or "cpu", "float32", "")
    folder, out = Path(args.target), _writable(args.out, args.force)
    if out is not None and len(args.sizes or ()) != 1:
        raise InputError(
            expected="--out with one size, the vocabulary to write",
            found=f"{len(args.sizes or ())} of them",
            remedy="Look at the coverage of several sizes first, then write one: --sizes 16384 --out FILE.",
        )
    size = read_target_config(folder).vocab_size
    tokenizer, encoded = _encoded(args, args.data, args.row_length)
    counts = np.zeros(size, np.int64)
    for document in encoded:
        counts += np.bincount(document.tokens[document.spans > 0], minlength=size)
    stops = eos_ids(folder, tokenizer)
    sizes = sorted(set(args.sizes)) if args.sizes else [wanted for wanted in SIZES if wanted <= size] or [size]
    chosen = {wanted: most_frequent(counts, wanted, stops) for wanted in sizes}
    coverage = {wanted: float(counts[ids].sum() / counts.sum()) for wanted, ids in chosen.items()}
    print(f"{counts.sum()} supervised tokens, {np.count_nonzero(counts)} different ones", file=sys.stderr)
    for wanted, share in coverage.items():
        print(f"{wanted:>8} tokens cover {100 * share:6.2f} %", file=sys.stderr)
    print(json.dumps({"supervised_tokens": int(counts.sum()), "coverage": coverage}))
    if out is not None:
        record = {"vocab_size": size, "ids": chosen[sizes[-1]].tolist()}
        _write(out, json.dumps(record))
        use = f"--vocab {out} --draft_vocab_size {sizes[-1]}"
        print(f"the vocabulary of {sizes[-1]} tokens is in {out}: train with {use}", file=sys.stderr)
    return 0


def _encoded(args: argparse.Namespace, files: Sequence[str], row_length: int | None) -> tuple[Any, list[Encoded]]:
    folder = Path(args.target)
    limit = read_target_config(folder).context_limit
    check_row_length(row_length or limit, limit)
    tokenizer = load_tokenizer(folder)
    encoded: list[Encoded] = []
    for name in files:
        documents, report = encode_file(
            at(name), tokenizer, max_length=row_length or limit, last_turn_only=args.last_turn_only,
            options=dict(args.template),
        )  # fmt: skip
        logger.info("%s", report)
        encoded += documents
    check_tokens(np.concatenate([one.tokens for one in encoded]), read_target_config(folder).vocab_size)
    return tokenizer, encoded


def _writable(out: str | None, force: bool) -> Path | None:
    """The file to write, or None for the standard output."""
    if out is None:
        return None
    path = at(out)
    if path.exists() and not force:
        raise InputError(
            expected="an --out that does not exist yet", found=str(path), remedy="Name another file, or pass --force."
        )
    return path


def _write(out: Path | None, text: str) -> None:
    if out is None:
        print(text)
    else:
        replace_file(out, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def features(args: argparse.Namespace) -> int:
    """Write the features of a config's data."""
    config = override(load_config(Path(args.config)), args.fields)
    # On a CPU too: features are stored in bf16, and this is what the target's own numbers look like in bf16.
    info = runtime.start(args.device, args.dtype or "bfloat16", args.cache_dir)
    print(info, file=sys.stderr)
    config.check()
    if "://" in args.out:
        raise InputError(
            expected="a local folder as --out: features are read through a memory map",
            found=args.out,
            remedy="Write them to a local or mounted folder.",
        )
    folder = Path(config.target)
    limit = read_target_config(folder).context_limit
    check_row_length(config.row_length, limit)
    packed = packed_rows(config)
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        left = (time.perf_counter() - began) / done * (total - done)
        print(f"features: {done}/{total} rows, {left / 60:.1f} min left", file=sys.stderr, flush=True)

    mesh = make_mesh(config.mesh, slices=config.slices) if config.mesh else None
    # As training runs it in the loop: on the same mesh, its layers stacked, by the same attention.
    with entered(mesh):
        target = load_target(folder, runtime.DTYPES[info.dtype], mesh=mesh, layers="stacked")
        write_features(
            Path(args.out), packed, target, config.taps or target.config.default_taps, batch=config.batch_rows,
            attention=config.attention_on(jax.devices()[0].platform, target.config.head_dim), mesh=mesh, source=folder,
            force=args.force, progress=progress,
        )  # fmt: skip
    print(args.out)
    return 0
