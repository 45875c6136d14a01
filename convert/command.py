"""What the command lines of this folder do alike: wrong input is one line and exit code 2, an interruption 130."""

from __future__ import annotations

import sys
from collections.abc import Callable

from eagle3_jax.errors import InputError


def run(command: Callable[[], int], *, debug: bool) -> int:
    """The exit code of a command; with `debug` its errors are raised, for their traceback."""
    try:
        return command()
    except InputError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        return 130
