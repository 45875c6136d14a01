"""The process around a command: device, precision, compilation cache. Set once, before jax touches a device."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle3_jax.errors import InputError

logger = logging.getLogger(__name__)

# jax's name of each platform that the command line offers.
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
MOST_MAPS = 30_000
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Runtime:
    """What a command runs on.

    Attributes:
      platform: cpu, gpu or tpu.
      device: the device's own name.
      dtype: of parameters and activations.
      precision: of matrix products.
    """

    platform: str
    device: str
    dtype: str
    precision: str

    def __str__(self) -> str:
        return f"platform {self.platform}, device {self.device}, dtype {self.dtype}, matmul precision {self.precision}"


# How libraries of a GPU fail to start when another process holds its memory, mostly without a word about memory.
_FULL_MEMORY = (
    "RESOURCE_EXHAUSTED", "out of memory", "OUT_OF_MEMORY", "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_NOT_INITIALIZED", "DNN library initialization failed",
)  # fmt: skip


def looks_like_full_memory(error: BaseException) -> bool:
    """Whether an error is, or hides, a device without free memory."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _FULL_MEMORY)


def full_memory(found: str) -> InputError:
    """What to say about it."""
    return InputError(
        expected="enough free memory on the device",
        found=found.splitlines()[0] if found else "none left",
        remedy="Another process may hold it: jax takes 75 % of a GPU at its start unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false say otherwise. Or use fewer rows "
        "(--batch, --batch_rows), shorter ones, or --dtype bfloat16.",
    )


def start(device: str | None = None, dtype: str | None = None, cache_dir: str | None = None) -> Runtime:
    """Choose the device, the precision and the compilation cache.

    Args:
      device: cpu, gpu or tpu; None takes what jax finds.
      dtype: float32 or bfloat16; None is float32 on a CPU, where it is what the lossless guarantee is stated for, and
        bfloat16 on accelerators.
      cache_dir: folder of compiled programs; None is a private folder per processor type; "" keeps none.

    Raises:
      InputError: no such device here.
    """
    if device is not None:
        jax.config.update("jax_platforms", PLATFORMS[device])
    try:
        first = jax.devices()[0]
        found = first.platform
    except (RuntimeError, AssertionError) as error:
        if looks_like_full_memory(error):
            raise full_memory(str(error)) from error
        # jax 0.10 asserts, without a message, when no plugin for the platform is installed.
        first, found = None, (str(error) or "no such platform in this installation of jax").splitlines()[0]
    kind = "gpu" if found in ("gpu", "cuda", "rocm") else found
    # In a process that has used jax before, another platform is kept without an error.
    if first is None or device not in (None, kind):
        raise InputError(
            expected=f"a {device or 'usable'} device",
            found=found,
            remedy="Leave --device out to use what there is; GPUs need the extra `cuda` (pip install -e '.[cuda]'), "
            "TPUs the extra `tpu`.",
        )
    dtype = dtype or ("float32" if kind == "cpu" else "bfloat16")
    # fp32 means fp32: without this, GPUs would use TF32 and TPUs bf16 passes.
    precision = "highest" if dtype == "float32" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    use_compilation_cache(cache_dir, kind, first.device_kind)
    name = _processor() if kind == "cpu" else first.device_kind
    return Runtime(platform=kind, device=name, dtype=dtype, precision=precision)


def check_attention(info: Runtime, backend: str) -> None:
    """Refuse cuDNN's attention where it cannot run.

    Raises:
      InputError: no GPU, or fp32.
    """
    if backend == "cudnn" and (info.platform != "gpu" or info.dtype == "float32"):
        raise InputError(
            expected="a GPU and --dtype bfloat16 for --attention cudnn",
            found=str(info),
            remedy="Leave --attention out: the default runs anywhere.",
        )


def use_compilation_cache(folder: str | None, kind: str, device_kind: str) -> Path | None:
    """Keep compiled programs between processes.

    The default folder is private to the user, since its files are executed, and named after the processor, since a
    program compiled for one CPU may not run on another.
    """
    if folder == "":
        return None
    if folder is None:
        key = hashlib.sha256(f"{kind} {device_kind} {_processor()} {jax.__version__}".encode()).hexdigest()[:12]
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = base / "eagle3_jax" / f"xla-{kind}-{key}"
    else:
        path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        if folder is not None:
            raise InputError(
                expected=f"a folder for compiled programs at {path}",
                found=str(error),
                remedy="Choose another --cache-dir, or '' to keep none.",
            ) from error
        logger.warning("compiled programs are not kept: %s (--cache-dir chooses another folder)", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path


def drop_programs(most: int = MOST_MAPS) -> bool:
    """Forget all compiled programs if this process holds more memory maps than `most`; says whether it did.

    Each program for the CPU holds some to hundreds of maps, of which Linux gives a process 65,530 (vm.max_map_count),
    and the compiler crashes when it gets none. What is needed again is read from the kept programs.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") <= most:
        return False
    jax.clear_caches()
    return True


def kept() -> str:
    """Where compiled programs are kept, in words."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return f"kept in {folder}" if folder else "not kept"


def _processor() -> str:
    """The CPU's model name and instruction sets, as Linux gives them; else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    flags = hashlib.sha256(wanted.get("flags", "").encode()).hexdigest()[:8]
    return f"{wanted.get('model name', platform.machine())} ({os.cpu_count()} cores, features {flags})"
