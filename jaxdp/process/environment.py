"""Set the environment variables that JAX reads when it starts, and assign the GPUs of a host to its
processes, before any of them opens one. This module does not import JAX."""

import contextlib
import hashlib
import importlib.util
import mmap
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

COUNT = "--xla_force_host_platform_device_count"
# The maxima of glibc's dynamic malloc thresholds, see mallopt(3). Larger blocks are returned to the
# kernel at once.
MALLOC = {"mmap_threshold": 2**25, "trim_threshold": 2**26}  # bytes
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
MOST = 2048  # simulated devices; JAX fails with more
THREADS = 4  # threads of the CPU's pool for each simulated device
GPU_FLAG = "--xla_gpu_enable_pipelined_all_gather"
"""For several GPUs: stage 3 of ZeRO gathers the parameters of a block while the one before is
computed (docs.jax.dev, "GPU performance tips")."""


def compiled(where: str) -> pathlib.Path:
    """Return the folder of programs compiled for this host's processor. where: `compilation_cache`,
    or "auto": in the user's cache directory (XDG Base Directory Specification)."""
    top = (
        f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/jaxdp/xla" if where == "auto" else where
    )
    return pathlib.Path(top).expanduser().absolute() / processor()


def processor() -> str:
    """Return a short name (architecture and hash) for the instruction set of this host's processor."""
    flags = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    features = " ".join(sorted(flags.partition(":")[2].split() or [flags]))
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def malloc() -> None:
    """Restart this process once, on CPU, with malloc settings that reuse memory between steps and
    request huge pages.

    Only commands call it, before anything else, so no work is lost.
    XLA allocates a program's buffers in each call, and the kernel maps and clears them page by
    page: 57,000 page faults a step take 70 of 330 ms for a GPT of 3.2M parameters on one core, and
    2 of 10 ms for ResNet-9 on two processes. glibc raises its thresholds to these values itself,
    but only as far as the largest array allocated so far. It reads GLIBC_TUNABLES only when a
    process starts, so the new process removes it: the programs that it starts must not get it. A
    user's GLIBC_TUNABLES is left unchanged."""
    if os.environ.get("GLIBC_TUNABLES") == tunables():
        del os.environ["GLIBC_TUNABLES"]
    elif (
        platform.libc_ver()[0] == "glibc" and "GLIBC_TUNABLES" not in os.environ and not gpu_count()
    ):
        environment = {**os.environ, "GLIBC_TUNABLES": tunables()}
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def tunables() -> str:
    """Return the value of GLIBC_TUNABLES that `malloc` sets."""
    settings = dict(MALLOC)
    with contextlib.suppress(OSError):
        if "[madvise]" in pathlib.Path(HUGE_PAGES).read_text(
            encoding="utf-8"
        ):  # else the kernel uses them always, or never
            settings["hugetlb"] = 1  # since glibc 2.35; older versions ignore it
    return ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())


def use_cpu() -> None:
    """Let JAX open the CPU alone, in this process and those that it starts, before it opens its
    devices.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read the variable at its import
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def simulate(devices: int) -> None:
    """Simulate this number of devices on JAX's CPU backend, unless XLA_FLAGS sets one."""
    if simulated() is None:
        add_flag(f"{COUNT}={min(devices, MOST)}")


def simulated() -> int | None:
    """Return the number of CPU devices set in XLA_FLAGS; None if it is not set."""
    counts = re.findall(rf"{COUNT}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def add_flag(flag: str) -> None:
    """Add a flag to XLA_FLAGS, unless it is set there."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in [existing.partition("=")[0] for existing in flags.split()]:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def flags_of_numbers() -> str:
    """Return the XLA_FLAGS that may change numbers: all but those for dumps and for the number of
    devices.
    """
    harmless = ("--xla_dump", COUNT)
    return " ".join(
        sorted(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(harmless))
    )


def enough_threads() -> None:
    """Make the CPU thread pool large enough for every simulated device to wait in several
    collectives.

    XLA runs independent operations concurrently, in any order, and a collective blocks its thread.
    With one thread for each device, some devices in one collective and the rest in another
    deadlock."""
    if devices := simulated():
        os.environ.setdefault("NPROC", str(min(THREADS * devices, MOST)))


def set_gpu_flag(devices: int | None = None, local_gpus: int | None = None) -> str | None:
    """Set GPU_FLAG, if XLA knows it, before JAX starts, unless it is in XLA_FLAGS already.

    devices: as in `parallel.devices`; local_gpus: GPUs of this host, counted if None. Sets nothing
    for one device, or without a GPU. Returns a line if the flag is left out, or None.
    """
    local_gpus = gpu_count() if local_gpus is None else local_gpus
    if not has_several_gpus(devices, local_gpus):
        return None
    if unknown_flags([GPU_FLAG]):
        return f"XLA_FLAGS: this XLA does not know {GPU_FLAG}, which is left out"
    add_flag(f"{GPU_FLAG}=true")
    return None


def has_several_gpus(devices: int | None, local_gpus: int) -> bool:
    """Return True if there is more than one GPU to train on, as far as is known before any is
    opened.
    """
    from jaxdp.process import launchers

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        local_gpus = min(local_gpus, len(visible_gpus(visible)))
    return local_gpus > 0 and (
        launchers.discover().size > 1 or min(local_gpus, devices or local_gpus) > 1
    )


def unknown_flags(names: Iterable[str]) -> set[str]:
    """Return the flags that a library of XLA does not have: a registered flag's name is a string in
    the library.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(library.open("rb")) for library in libraries()]
        contents = [
            stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            for file in files
        ]
        literals = {name: b"\0" + name.removeprefix("--").encode() + b"\0" for name in names}
        return {
            name
            for name, literal in literals.items()
            if any(content.find(literal) < 0 for content in contents)
        }


def libraries() -> list[pathlib.Path]:
    """Return the files of jaxlib and of JAX's GPU plug-ins that read XLA_FLAGS. Does not import
    them.
    """
    files: list[pathlib.Path] = []
    for package, pattern in {
        "jaxlib": "libjax_common*",
        "jax_plugins": "xla_*/xla_*_plugin*.so",
    }.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            files += sorted(pathlib.Path(folder).glob(pattern))
    return files


def gpu_count(env: Mapping[str, str] | None = None, dev: str = "/dev") -> int:
    """Count the NVIDIA GPUs of this host without opening one; 0 if JAX_PLATFORMS selects another
    platform.
    """
    platforms = (os.environ if env is None else env).get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    return sum(p.name[6:].isdigit() for p in pathlib.Path(dev).glob("nvidia[0-9]*"))


def visible_gpus(visible: str) -> list[str]:
    return [d for d in (d.strip() for d in visible.split(",")) if d and d != "-1"]


def assign_gpus(
    local_rank: int,
    local_size: int,
    gpus: int,
    visible: str | None = None,
    neighbours: Sequence[str | None] = (),
) -> tuple[list[int] | None, int]:
    """Return the GPUs of one process, and the largest number of processes that share one of the
    host's.

    The GPUs are indices into those that the process can see; None for all of these. A single
    process gets all GPUs; p processes get gpus // p adjacent ones each; if there are more processes
    than GPUs, they are assigned round-robin. gpus: number on this host. visible: this process's
    CUDA_VISIBLE_DEVICES. neighbours: that of every process on the host; if they differ, the
    launcher has assigned the GPUs already."""
    usable = gpus if visible is None else len(visible_gpus(visible))
    if usable == 0 or len(set(neighbours)) > 1:
        return None, 1
    sharers = -(-local_size // usable)
    if local_size == 1 or usable == 1:
        return None, sharers
    if local_size > usable:
        return [local_rank % usable], sharers
    each = usable // local_size
    return list(range(local_rank * each, (local_rank + 1) * each)), 1
