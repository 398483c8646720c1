"""What JAX reads from the environment once, when it starts; nothing here imports it."""

import contextlib
import hashlib
import os
import pathlib
import platform
import re
import sys

from jaxdp.distributed import gpus
from jaxdp.errors import UsageError

COUNT = "--xla_force_host_platform_device_count"
# Of glibc's malloc, the most that its own dynamic thresholds come to: mallopt(3). What is larger is given back at once.
KEPT = {"mmap_threshold": 2**25, "trim_threshold": 2**26}  # bytes
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
MOST = 2048  # simulated devices: JAX fails beyond
THREADS = 4  # of the CPU's pool, for each simulated device
EXACT = {"--xla_allow_excess_precision": "false"}
EXACT_GPU = {"--xla_gpu_deterministic_ops": "true", **EXACT}
EXACT_CPU = {
    "--xla_disable_hlo_passes": "algsimp,reshape-mover",
    "--xla_cpu_experimental_ynn_fusion_type": "individual_dot,individual_convolution",
    **EXACT,
}


def user_cache() -> pathlib.Path:
    """Our folder among the user's caches (XDG Base Directory Specification)."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxdp"


def compiled(where: str) -> pathlib.Path:
    """The folder of what XLA compiles for this host's processor. where: `compilation_cache`, a folder or "auto"."""
    top = user_cache() / "xla" if where == "auto" else pathlib.Path(where).expanduser()
    return top.absolute() / processor()


def processor() -> str:
    """Names the instructions that this host's processor has, in a few letters."""
    flags = ""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    features = " ".join(sorted(flags.partition(":")[2].split() or [flags]))
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def malloc() -> None:
    """Begins this process anew, once, with a malloc that keeps what a step frees for the next one and asks for huge
    pages, where steps run on CPU. Nothing is lost: to be called first of all, and by commands alone.

    XLA allocates what a program needs anew in each call, and the kernel hands it out page by page, cleared: 57,000 page
    faults a step are 70 of 330 ms of a GPT of 3.2M parameters on one core, and 2 of 10 ms of ResNet-9 on two processes.
    glibc's thresholds rise to what is kept here by themselves, but only as far as some array has happened to ask for.
    It reads GLIBC_TUNABLES only as a process begins; what is set there stands.
    """
    if not libc().startswith("glibc") or "GLIBC_TUNABLES" in os.environ or gpus.count():
        return
    os.environ["GLIBC_TUNABLES"] = tunables()
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def tunables() -> str:
    """GLIBC_TUNABLES, as `malloc` sets it."""
    settings = dict(KEPT)
    with contextlib.suppress(OSError):
        if "[madvise]" in pathlib.Path(HUGE_PAGES).read_text():  # else they are given unasked, or never
            settings["hugetlb"] = 1  # since glibc 2.35; others pass over it
    return ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())


def libc() -> str:
    """Its name and version."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""


def simulate(devices: int) -> None:
    """So many devices for JAX's CPU backend, unless XLA_FLAGS says otherwise."""
    if simulated() is None:
        add_flag(f"{COUNT}={min(devices, MOST)}")  # a plan for more is scaled


def simulated() -> int | None:
    """How many CPU devices XLA_FLAGS asks for."""
    found = re.findall(rf"{COUNT}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else None


def add_flag(flag: str) -> None:
    """To XLA_FLAGS, unless it is set there."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in [given.partition("=")[0] for given in flags.split()]:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def trace_operations() -> None:
    """A profile shows the operations of the CPU's programs too, before JAX starts; elsewhere it does so by itself."""
    if not gpus.count():
        add_flag("--xla_cpu_enable_xprof_traceme=true")


def exact(microbatches: int) -> None:
    """Set what must be the same for the same bits, before JAX opens its devices.

    Everywhere: no excess precision, by which XLA leaves out a rounding to bfloat16 or float16 wherever it fuses two
    operations, and it fuses other ones in another program. On CPU: the number of threads, over which XLA splits
    products and sums; no algebraic simplification, which decides by the rest of the program whether to divide or to
    multiply by the reciprocal, nor the moving of reshapes, which without it puts transposes before transposes until
    the compiler's stack is full; and kernels of its library for single products alone: where the library fuses a
    reduction with its neighbours, it rounds by these, and without the simplifier jaxlib 0.10.2 writes out of bounds.
    On a GPU: deterministic operations, and none chosen by timing.

    Raises `UsageError` where JAX has opened its devices without these settings.
    """
    if "jax" in sys.modules:
        from jaxdp.distributed import private_jax

        if private_jax.backends_initialized():
            check_exact(microbatches)
    os.environ.update(_exact(microbatches))


def check_exact(microbatches: int) -> None:
    """Raises `UsageError` where `exact` was not called, or not for so many microbatches."""
    for name, value in _exact(microbatches).items():
        if os.environ.get(name) != value:
            raise UsageError(
                f"parallel.reduction: exact needs {name}={value!r} in the environment, not {os.environ.get(name)!r}; "
                f"call jaxdp.environment.exact({microbatches}) before JAX opens its devices"
            )


def _exact(microbatches: int) -> dict[str, str]:
    """{variable: value}"""
    flags = os.environ.get("XLA_FLAGS", "").split()
    for name, value in (EXACT_GPU if gpus.count() else EXACT_CPU).items():
        given = [flag.partition("=")[2] for flag in flags if flag.partition("=")[0] == name]
        if name.endswith("passes"):  # several such flags add up; of any other, the last counts
            there = [one for flag in given for one in flag.split(",")]
            value = ",".join([*there, *(one for one in value.split(",") if one not in there)])
        if given != [value]:
            flags = [flag for flag in flags if flag.partition("=")[0] != name]
            flags.append(f"{name}={value}")
    return {"XLA_FLAGS": " ".join(flags), "NPROC": threads(microbatches)}


def flags_of_numbers() -> str:
    """The XLA_FLAGS that may change numbers: not those of what is dumped, or of how many devices there are."""
    beside = ("--xla_dump", COUNT)
    return " ".join(sorted(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(beside)))


def threads(devices: int) -> str:
    return str(min(THREADS * devices, MOST))


def enough_threads() -> None:
    """A pool of CPU threads in which all simulated devices can wait in several collectives each.

    XLA runs what is independent side by side, in any order, and a collective blocks its thread: with as many threads
    as devices, some devices in one collective and the rest in another wait for each other for ever.
    """
    if simulated() is not None:
        os.environ.setdefault("NPROC", threads(simulated() or 1))
