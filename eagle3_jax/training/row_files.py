"""Packed rows kept beside a run, so that a resume neither tokenises nor packs again.

The name of the file says what the rows follow from: the contents of the data files and of the tokenizer, and every
field of the config that encoding and packing read. Rows that are found are read through a memory map.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from safetensors.numpy import save_file

from eagle3_jax import __version__
from eagle3_jax.errors import InputError
from eagle3_jax.files import SafetensorsFile, at, in_cloud, replace_file
from eagle3_jax.training.config import TrainConfig
from eagle3_jax.training.features import ROW_ARRAYS
from eagle3_jax.training.packing import Packed

logger = logging.getLogger(__name__)

FIELDS = ("template", "row_length", "last_turn_only", "seed")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_BLOCK = 1 << 22


def rows_file(config: TrainConfig, folder: Path) -> Path | None:
    """Where the rows of a config are kept in the folder of its run; None where they cannot be mapped (in a bucket)."""
    if in_cloud(folder):
        return None
    target = Path(config.target)
    contents = [_content(at(name)) for name in config.data]
    contents += [f"{name} {_content(target / name)}" for name in _TOKENIZER_FILES if (target / name).is_file()]
    said = [__version__, contents, [(name, getattr(config, name)) for name in FIELDS]]
    mark = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    return folder / f"rows-{mark}.safetensors"


def read_packed(path: Path | None) -> Packed | None:
    """The rows in a file, mapped; None where there is no file, or a damaged one."""
    if path is None or not path.is_file():
        return None
    try:
        file = SafetensorsFile(path)
        packed = Packed(**{name: file.view(name) for name in ROW_ARRAYS})
    except (InputError, KeyError) as error:
        logger.warning("rows are packed again: %s", error)
        return None
    logger.info("%s: %s", path, packed)
    return packed


def write_packed(path: Path, packed: Packed) -> None:
    """Keep rows in a file, whole or not at all."""
    arrays = {name: getattr(packed, name) for name in ROW_ARRAYS}
    replace_file(path, lambda part: save_file(arrays, part))


def _content(path: Path) -> str:
    """A hash of what a file holds; of a file that is not there, which reading it will say better, none."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
