"""What a run says of itself: lines and a bar on stderr, a JSONL log, TensorBoard or Weights & Biases where asked."""

from __future__ import annotations

import importlib
import io
import json
import math
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from eagle3_jax.errors import InputError
from eagle3_jax.files import in_cloud
from eagle3_jax.processes import first

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
WRITERS = tuple(_PACKAGES)


def finite(value: Any) -> Any:
    """The same with null for nan and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(values: Sequence[float | None]) -> str:
    """Ratios as the progress line prints them."""
    return " ".join("-" if value is None else f"{value:.3f}" for value in values)


def scalars(entry: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of an entry under flat names: lists by step ("joint/0"), groups by their own ("held_out/joint/0")."""
    found: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found |= scalars({str(index): item for index, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


class Writer(Protocol):
    """Takes the numbers of an update."""

    def write(self, update: int, numbers: dict[str, float]) -> None:
        """Record them."""
        ...

    def close(self) -> None:
        """Write out what is still held."""
        ...


class _TensorBoard:
    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found]

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, update: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path):
        import wandb  # type: ignore[import-not-found]

        # A run that is resumed goes on in the same place.
        note = folder / "wandb-id"
        if not note.exists():
            note.write_text(secrets.token_hex(4))
        local = tempfile.gettempdir() if in_cloud(folder) else str(folder)
        self._run = wandb.init(
            project="eagle3-jax", name=folder.name, id=note.read_text().strip(), resume="allow", dir=local
        )

    def write(self, update: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=update)

    def close(self) -> None:
        self._run.finish()


def check_writers(names: Sequence[str]) -> None:
    """Refuse writers whose package is not here, before anything slow.

    Raises:
      InputError: naming the package.
    """
    for name in names:
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            raise InputError(
                expected=f"the package {_PACKAGES[name]} for --writers {name}",
                found=str(error),
                remedy=f"Install the extra: pip install 'eagle3-jax[{name}]'.",
            ) from error


def open_writers(names: Sequence[str], folder: Path) -> list[Writer]:
    """The writers of a run, in its folder; only the first process has any."""
    makers = {"tensorboard": _TensorBoard, "wandb": _WandB}
    return [makers[name](folder) for name in names] if first() else []


class Journal:
    """Where entries go; only the first process writes. On a terminal a bar below the lines shows how far the run is."""

    def __init__(self, path: Path, writers: Sequence[Writer] = (), *, begun: int = 0, updates: int = 0):
        """Open the log at `path`; the bar goes from `begun` to `updates`."""
        self._writers, self._path, self._file, self._bar = writers, path, None, None
        self._closing = ExitStack()
        if not first():
            return
        if in_cloud(path):
            self._file = io.StringIO()
            self._file.write(path.read_text() if path.exists() else "")
        else:
            self._file = path.open("a", encoding="utf-8")
        if sys.stderr.isatty():
            self._bar = tqdm(total=updates, initial=begun, unit="update", file=sys.stderr, dynamic_ncols=True)
            # Notes of other modules go above the bar as well.
            self._closing.enter_context(logging_redirect_tqdm())
            self._closing.callback(self._bar.close)

    def record(self, entry: dict[str, Any], line: str) -> None:
        """Keep an entry, which has its `update`, and say a line."""
        if self._file is None:
            return
        self._file.write(json.dumps(finite(entry), allow_nan=False) + "\n")
        self._file.flush()
        if isinstance(self._file, io.StringIO):
            self._path.write_text(self._file.getvalue())
        numbers = {name: value for name, value in scalars(finite(entry)).items() if name != "update"}
        for writer in self._writers:
            writer.write(entry["update"], numbers)
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)

    def advance(self) -> None:
        """An update is done."""
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        if self._file is not None:
            self._file.close()
        for writer in self._writers:
            writer.close()
