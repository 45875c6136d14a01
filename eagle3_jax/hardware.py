"""What accelerators can do: the numbers of their makers, for plans and rooflines.

Sources: Google Cloud's pages on TPU v5e, v5p and v6e (interconnect: half of the bidirectional figure of a chip);
NVIDIA's data sheets of A100, H100 SXM and H200 (dense, without sparsity). `hbm` of a TPU is what its compiler lets a
program use, of a GPU what jax takes. Between slices and nodes, figures are those of usual networks and no more.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import jax

from eagle3_jax.errors import InputError

GIB = 2**30
PASSES = 6  # bf16 products in one of fp32 on a TPU, at the highest precision
# Of a GPU's memory jax takes this much, unless told otherwise.
POOL = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      platform: tpu or gpu.
      hbm: bytes of memory.
      flops: operations of bf16 products, per second.
      flops_fp32: of fp32 products.
      hbm_bandwidth: bytes per second.
      network: bytes per second to its neighbours in the slice or node, all links, one direction.
      slow_network: bytes per second to other slices or nodes.
    """

    platform: str
    hbm: float
    flops: float
    flops_fp32: float
    hbm_bandwidth: float
    network: float
    slow_network: float


CHIPS = {
    "v5e": Chip("tpu", 15.75 * GIB, 197e12, 197e12 / PASSES, 819e9, 200e9, 3.1e9),
    "v5p": Chip("tpu", 95.74 * GIB, 459e12, 459e12 / PASSES, 2765e9, 600e9, 6.2e9),
    "v6e": Chip("tpu", 31.25 * GIB, 918e12, 918e12 / PASSES, 1640e9, 400e9, 12.5e9),
    "a100": Chip("gpu", POOL * 80e9, 312e12, 19.5e12, 2039e9, 300e9, 25e9),
    "h100": Chip("gpu", POOL * 80e9, 989e12, 67e12, 3350e9, 450e9, 50e9),
    "h200": Chip("gpu", POOL * 141e9, 989e12, 67e12, 4800e9, 450e9, 50e9),
}
# What jax calls them; others of a family, such as PCIe cards, have other rates.
KINDS = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e",
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """Named devices.

    Attributes:
      name: as given.
      chip: what each of them can do; None for the local devices.
      count: how many, over all slices.
      devices: that programs can be compiled for; None where only arithmetic is possible.
    """

    name: str
    chip: Chip | None
    count: int
    devices: list[Any] | None

    @property
    def kind(self) -> str:
        """What the devices are: a name of `CHIPS`, or where there is none for the local ones, jax's."""
        if self.chip is not None or not self.devices:
            return self.name.partition(":")[0]
        kind = str(self.devices[0].device_kind)
        return KINDS.get(kind, kind)

    @property
    def rates(self) -> Chip | None:
        """What each device can do; None for local ones that `KINDS` does not know."""
        return self.chip or CHIPS.get(self.kind)


def find_topology(name: str, slices: int = 1) -> Topology:
    """The devices of a name: "local", a TPU slice ("v5e:2x4", compiled for by libtpu), or GPUs of a node ("h100:8").

    Args:
      name: of one slice, or node.
      slices: how many of them.

    Raises:
      InputError: an unknown name; libtpu is not installed or knows no such slice.
    """
    if name == "local":
        return Topology(name, None, jax.device_count(), list(jax.devices()))
    kind, _, size = name.partition(":")
    wanted = "local, or a chip and a shape, as in v5e:2x4, v5p:2x2x4, h100:8; chips: " + ", ".join(CHIPS)
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        raise InputError(expected=f"--topology {wanted}", found=name, remedy="Name the devices of one slice or node.")
    chip, count = CHIPS[kind], slices
    for part in size.split("x"):
        count *= int(part)
    if chip.platform == "gpu":
        return Topology(name, chip, count, None)
    # Off-cloud, libtpu would ask a metadata server that is not there; and no TPU is touched, so that it need not be the
    # only process that loads it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        more = {"num_slices": slices} if slices > 1 else {}
        devices = topologies.get_topology_desc(name, "tpu", **more).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise InputError(
            expected=f"libtpu, which compiles for {name} on any Linux machine",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="Install it beside jax (pip install 'eagle3-jax[plan]'; pyproject.toml has the pairs that were "
            "tried), and name a slice that exists, e.g. v5e:2x4, v5p:2x2x4, v6e:2x4.",
        ) from error
    if len(devices) != count:
        raise InputError(
            expected=f"{count} devices in {slices} x {name}", found=f"{len(devices)}, by libtpu's description",
            remedy="Name the slice as its documentation does, e.g. v5e:2x4.",
        )  # fmt: skip
    return Topology(name, chip, count, list(devices))
