"""The XLA flags of the exact reductions. This module does not import JAX."""

import os
import platform
import sys
from pathlib import Path

from jaxdp.errors import UsageError
from jaxdp.process.environment import gpu_count

GPU = ["--xla_gpu_deterministic_ops=true", "--xla_allow_excess_precision=false"]
CPU = [
    "--xla_disable_hlo_passes=algsimp,reshape-mover,cpu-parallel-task-assigner",
    "--xla_cpu_experimental_ynn_fusion_type=individual_dot",
    "--xla_cpu_max_isa=AVX",
    "--xla_cpu_enable_platform_dependent_math=false",
    "--xla_allow_excess_precision=false",
]


def set_flags() -> None:
    """Set the XLA flags that make results independent of the number of devices, before JAX opens
    devices.

    All platforms: no excess precision. With it, XLA skips a rounding to bfloat16 or float16
    wherever it fuses two operations, and different programs fuse different ones. CPU: no algebraic
    simplification, which chooses between a division and a product with the reciprocal by the rest
    of the program; no reshape mover, which without the simplifier moves transposes until the
    compiler's stack overflows; no loops divided among threads, whose ends are computed with scalar
    instructions that round `exp` and `log` differently; library kernels for single products only,
    since the rounding of fused reductions depends on their neighbours, and without the simplifier
    jaxlib 0.10.2 writes out of bounds. GPU: deterministic operations, and none chosen by timing.
    The number of threads does not matter (`jaxdp.exact.products`).

    The same bits on every x86-64 processor (CPU): AVX is the newest instruction set of which all
    have every instruction and none has a fused multiply-add, so no compiler chooses which product
    of a sum is left unrounded; and no math that depends on the platform: roots are not refined
    from each vendor's estimate, and YNNPACK computes a product with kernels that agree. It has
    none of these without FMA, and a program would wait for ever.

    Raises `UsageError` if JAX has opened its devices without these settings, or if the processor
    has no FMA.
    """
    if "jax" in sys.modules:
        from jaxdp.process import private_jax

        if private_jax.backends_initialized():
            check_flags()
    if platform.machine() == "x86_64" and b" fma " not in Path("/proc/cpuinfo").read_bytes():
        raise UsageError("parallel.reduction: exact needs a processor with FMA; use bucket here")
    os.environ["XLA_FLAGS"] = _flags()


def check_flags() -> None:
    """Raise `UsageError` if `set_flags` was not called."""
    if os.environ.get("XLA_FLAGS") != _flags():
        raise UsageError(
            f"parallel.reduction: exact needs XLA_FLAGS={_flags()!r} in the environment, not "
            f"{os.environ.get('XLA_FLAGS')!r}; call jaxdp.exact.flags.set_flags() before JAX opens its devices"
        )


def _flags() -> str:
    """Return the XLA_FLAGS that `set_flags` sets."""
    # The last of several flags of one name wins, and passes to disable add up.
    own = GPU if gpu_count() else CPU
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in own]
    return " ".join(others + own)
