"""Targets: GPUs and TPUs that are not here, for which their own compilers compile a program.

XLA's compilers for GPUs and TPUs are libraries that JAX loads as plug-ins. Both can compile for a
described machine: no driver and no device is needed (`jax.experimental.topologies`). So memory,
kernels, collectives and their schedule are those of the real program. Kernels are chosen without
being timed, since nothing runs.

They run in a process of their own: a compiler that crashes ends only that one.
"""

import importlib.metadata
import math
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import jax
from jax.experimental import topologies

from jaxdp import cpu
from jaxdp.config import Config
from jaxdp.errors import DistributedError, UsageError, install, one_line, suggest
from jaxdp.plan.hardware import HARDWARE, TABLES, Hardware
from jaxdp.plan.prediction import Plan, make_plan
from jaxdp.process import environment
from jaxdp.run.build import make_case
from jaxdp.run.components import Parts, make_parts, set_jax

# XLA's GpuTargetConfigProto, with the figures of devices.toml.
GPU = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {most_shared}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth:.0f}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


class Chip(NamedTuple):
    """A kind of device.

    hardware: the name of its row in HARDWARE. platform: JAX's name of its compiler. dims: of a
    TPU's torus. gpu: figures in the description of a GPU, for its compiler.
    """

    hardware: str
    platform: str
    dims: int = 0
    gpu: dict[str, float] = {}


CHIPS = {name: Chip(**fields) for name, fields in TABLES["chips"].items()}
PLUGINS = {"cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt"), "tpu": ("libtpu",)}
EXAMPLES = "h100:8, h100:8x8 (hosts x devices of a host), v5e:16x16, v5p:8x8x8"
SHOWN = 300  # characters of a compiler's last line


class Target(NamedTuple):
    """Devices of one kind. shape: of a GPU, (hosts, devices of a host); of a TPU, its torus."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.chip.hardware]


def read_target(text: str) -> Target:
    """Parse h100:8, h100:8x8, v5e:16x16, v5p:8x8x8.

    Raises UsageError for an unknown chip, and for a shape that it does not have.
    """
    kind, _, size = text.partition(":")
    if kind not in CHIPS:
        near = suggest(kind, CHIPS, otherwise=f"known: {', '.join(CHIPS)}")
        raise UsageError(f"--target: {text!r} names no known device, as {EXAMPLES} do; {near}")
    chip = CHIPS[kind]
    row = HARDWARE[chip.hardware]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        raise UsageError(f"--target: {text!r} has no shape such as {EXAMPLES}")
    shape = tuple(map(int, size.split("x")))
    if chip.platform == "cuda":
        shape = (1, *shape) if len(shape) == 1 else shape
        if len(shape) != 2 or shape[1] > row.devices_per_host:
            raise UsageError(
                f"--target: {text!r}: a host of {kind} has at most {row.devices_per_host} devices; "
                f"write hosts x devices, such as {kind}:2x{row.devices_per_host}"
            )
    elif len(shape) != chip.dims or math.prod(shape) > row.devices_per_host:
        raise UsageError(
            f"--target: {text!r}: {kind} is a torus of {chip.dims} dims with at most "
            f"{row.devices_per_host:,} devices, such as {kind}:{'x'.join(['4'] * chip.dims)}"
        )
    return Target(text, chip, shape)


class CompilerFailed(DistributedError):
    """The compiler of a target is missing, has compiled nothing, or has ended its process."""


def check_plugin(target: Target) -> None:
    """Raise CompilerFailed if the target's compiler cannot be used.

    A plug-in for GPUs must have the version of JAX.
    """
    for name in PLUGINS[target.chip.platform]:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise CompilerFailed(f"{name} is not installed: {install('targets')}") from None
        if target.chip.platform == "cuda" and version != jax.__version__:
            raise CompilerFailed(
                f"{name} is {version}, but jax is {jax.__version__}; they must be the same"
            )


def allow_compilers() -> None:
    """Set what the plug-ins read, before they are loaded: the flags that a run on several GPUs would
    set, that there is no device to look for, and that several processes compile at once."""
    environment.set_gpu_flag(local_gpus=2)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="-1",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )


def open_target(target: Target) -> list[jax.Device]:
    """Return the devices of a target. Programs can be compiled for them; they store no arrays.

    Raises UsageError if the compiler does not know the shape.
    """
    settings = {"topology_name": target.name}
    if target.chip.platform == "cuda":
        hosts, local = target.shape
        figures = target.hardware._asdict() | target.chip.gpu
        settings = {"target_config": GPU.format(**figures), "topology": f"{hosts}x1x{local}"}
    try:
        found = topologies.get_topology_desc(platform=target.chip.platform, **settings)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UsageError(f"--target: {target.name}: its compiler refuses it: {error}") from None
    return list(found.devices)


def assume_cudnn() -> None:
    """Let JAX use attention by cuDNN: it asks the library for its version, and there is none here.

    The kernel is a custom call, which is compiled when it runs. A private function of JAX 0.10.2
    is replaced, in the process that compiles: `test_attention_is_that_of_cudnn` fails if JAX asks
    another. Look again in June 2027, whether JAX has a way to name the version.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = cudnn_version


def cudnn_version() -> int:
    """Return the version in `GPU`, 9.7, as cuDNN does."""
    return 90700


def compile_plans(
    config: Config, target: Target, stages: Sequence[int], per_device: int
) -> tuple[list[Plan], list[str]]:
    """Return the result of `plan_stages` for a target, from its compiler.

    Raises UsageError if the target or the config is refused, and CompilerFailed.
    """
    check_plugin(target)
    allow_compilers()
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            work = pool.submit(compile_here, config, target, stages, per_device, str(log))
            try:
                plans, notes = work.result()
            except BrokenProcessPool:
                words = log.read_text(encoding="utf-8", errors="replace").strip()
                last = words.rpartition("\n")[2]
                raise CompilerFailed(
                    f"the compiler for {target.name} ended without a result: {last[-SHOWN:]}"
                ) from None
    if not plans:
        raise CompilerFailed(notes[0])
    return plans, notes


def compile_here(
    config: Config, target: Target, stages: Sequence[int], per_device: int, log: str
) -> tuple[list[Plan], list[str]]:
    """Return the result of `plan_stages` for a target; the errors of this process go to a file."""
    with open(log, "wb") as file:  # what compilers print, on the level of the operating system
        os.dup2(file.fileno(), sys.stderr.fileno())
    set_jax(config)
    devices = open_target(target)
    cpu.target = devices[0].platform
    assume_cudnn()
    return plan_stages(config, make_parts(config), stages, per_device, devices, target)


def plan_stages(
    config: Config,
    parts: Parts,
    stages: Sequence[int],
    per_device: int,
    devices: Sequence[jax.Device],
    target: Target | None = None,
) -> tuple[list[Plan], list[str]]:
    """Return the plans of ZeRO stages, and notes on those that are left out.

    target: that of the devices; None: they are simulated. Raises UsageError if a run would refuse
    the first stage.
    """
    plans, notes = list[Plan](), list[str]()
    for zero in stages:
        try:
            case = make_case(config, parts, zero, per_device, devices)
            plans.append(make_plan(case, zero, target and target.hardware))
        except UsageError as error:
            if zero == stages[0]:
                raise
            notes.append(f"zero {zero} is left out, since a run would refuse it: {error}")
        except RuntimeError as error:  # of XLA: the program does not fit, for example
            if target is None:
                raise
            notes.append(f"zero {zero} cannot be compiled for {target.name}: {one_line(error)}")
    return plans, notes
