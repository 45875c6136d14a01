"""Several processes that train together: joining, waiting for each other, agreeing.

`jax.distributed` does the work. With one process everything here does nothing. All processes run the same programs in
the same order; the first one writes what is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.errors import InputError


def join(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Join the other processes, before jax touches a device.

    Args:
      coordinator: HOST:PORT of the first process; None where the cluster's environment says everything (Cloud TPU,
        SLURM, Open MPI, Kubernetes).
      count: processes in all.
      index: of this one, from 0.

    Raises:
      InputError: no environment that says it; the others did not come.
    """
    given = [value is not None for value in (coordinator, count, index)]
    if any(given) and not all(given):
        raise InputError(
            expected="--coordinator, --processes and --process together",
            found="only some of them",
            remedy="Give all three, or --distributed where the cluster says them.",
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise InputError(expected="--coordinator HOST:PORT", found=coordinator, remedy="Give the port as well.")
    # It would take SIGTERM for itself, which the training loop answers.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, count, index)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            expected=f"{count or 'the'} processes that meet at {coordinator or 'the place that the cluster names'}",
            found=(str(error) or type(error).__name__).splitlines()[0],
            remedy="Start the same command once in every process, or name the place: --coordinator HOST:PORT "
            "--processes N --process I.",
        ) from error


def first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


@contextmanager
def agreed() -> Iterator[None]:
    """For what one process may fail at alone, with no collective program inside: when one fails, none goes on.

    Raises:
      InputError: another process failed.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    if jax.process_count() > 1:
        some = multihost_utils.process_allgather(np.asarray(failed is not None))
        if failed is None and np.any(some):
            raise InputError(
                expected="all processes to come this far",
                found=f"a failure in process {int(np.argmax(some))}",
                remedy="See what that process says.",
            )
    if failed is not None:
        raise failed


def said_by_first(value: int) -> int:
    """What the first process says."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


class Vote:
    """Whether any process has said so, known to all of them at the same update.

    With several processes the answer is that of the update before: its program has run by then, so that nobody waits
    for the one that was just started.
    """

    def __init__(self, mesh: Mesh | None):
        self._mesh, self._asked = mesh, None

    def any_of(self, value: bool) -> bool:
        """Say something at this update; what anybody said (with several processes, at the last one)."""
        if jax.process_count() == 1 or self._mesh is None:
            return value
        where = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        said = jax.make_array_from_callback((self._mesh.size,), where, lambda part: np.asarray([value]))
        before, self._asked = self._asked, _any(said)
        return before is not None and bool(before)


@jax.jit
def _any(said: jax.Array) -> jax.Array:
    return jnp.any(said)


def on_host(array: Any) -> np.ndarray:
    """A whole array, whoever holds its parts."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
