"""A hardware model for the time of an update: latency and bandwidth of two kinds of link, and
published peaks.

It ranks layouts and measures nothing. It assumes links at data-sheet speed without other traffic,
and that collectives inside a host and between hosts do not overlap. The alpha-beta costs are those
of Thakur, Rabenseifner & Gropp (2005) and of Patarasuk & Yuan (2009).
"""

import argparse
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jsonargparse
import numpy as np
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt, restricted_number_type

from jaxdp.config.values import load, read_file
from jaxdp.errors import UsageError, one_line, suggest
from jaxdp.plan.hlo import WIRE, Collective

Share = restricted_number_type("Share", float, [(">", 0), ("<=", 1)])


class Hardware(NamedTuple):
    """A cluster of equal hosts; bandwidths in bytes/s per device and in one direction, latencies in
    s per step.

    flops: dtype of the operands -> dense peak, FLOP/s. "float32" is without tensor cores;
    "tensorfloat32" is what JAX's default matmul precision uses for float32 on GPUs that have it.
    memory: bytes per device; memory_bandwidth: bytes/s.
    intra: between the devices of a host; inter: between hosts, each device over its own share of
    the network. efficiency: the share of the peak that a model's products reach (EFFICIENCY).
    source: the origin of the figures."""

    name: str
    flops: dict[str, PositiveFloat]
    memory: PositiveFloat
    memory_bandwidth: PositiveFloat
    devices_per_host: PositiveInt
    intra_bandwidth: PositiveFloat
    intra_latency: NonNegativeFloat
    inter_bandwidth: PositiveFloat
    inter_latency: NonNegativeFloat
    efficiency: Share  # type: ignore[valid-type]  # a type that jsonargparse has made
    source: str


# Fitted to half of the published runs in benchmarks/published.py: `python -m benchmarks.published
# --fit`.
EFFICIENCY = {
    "a100": 0.675,
    "h100": 0.45,
    "tpu": 0.775,
}  # share of the peak that products reach; else 0.5, not fitted
NETWORK = 0.7  # share of a link's bandwidth that collectives reach
OVERLAP = 0.9  # share of the shorter of computation and communication that the longer one hides
_Pair = tuple[float, float]


def _row(
    name: str,
    tflops: tuple[float, ...],
    memory: _Pair,
    intra: _Pair,
    inter: float,
    sheets: str,
    share: float = 0.5,
) -> Hardware:
    """Build a host of eight: TFLOP/s in (bfloat16, tensorfloat32, float32), (bytes, bytes/s),
    (bytes/s, s), bytes/s.
    """
    bf16, tf32, f32 = (1e12 * peak for peak in tflops)
    flops = {"bfloat16": bf16, "float16": bf16, "tensorfloat32": tf32, "float32": f32}
    source = f"NVIDIA data sheets: {sheets}; latencies: NCCL 2.18, src/graph/tuning.cc"
    return Hardware(name, flops, *memory, 8, *intra, inter, 4e-6, share, source)


def _tpu(version: str, memory: _Pair, pod: int, links: float, per_host: int) -> Hardware:
    """Build a pod, in the place of a host: (bytes, bytes/s), chips, bytes/s of a chip; a host sends
    25e9 bytes/s.
    """
    rates, source = (links, 1e-6, 25e9 / per_host, 4e-6), "jax-ml.github.io/scaling-book/tpus"
    return Hardware(
        f"tpu-{version}", _TPU[version], *memory, pod, *rates, EFFICIENCY["tpu"], source
    )


# Peaks of TPUs, which by default compute float32 products in bfloat16: cloud.google.com/tpu/docs,
# by version.
_TPU = {
    version: {"bfloat16": peak, "tensorfloat32": peak}
    for peak, versions in (
        (275e12, ["v4"]),
        (197e12, ["v5 lite", "v5e"]),
        (459e12, ["v5", "v5p"]),
        (918e12, ["v6 lite", "v6e"]),
    )
    for version in versions
}
# Dense peaks: where the sheets' tensor-core figures include sparsity, they are halved.
# NVLink and PCIe: one direction, half the sheets' sum of both. A DGX has one network card per GPU;
# the L4s of a cloud host share one. The latency of a step is NCCL's, for a ring with protocol
# LL128: NVLink 1.9, PCIe 2.5, network 4 microseconds.
_HOPPER = (989.4, 494.7, 66.9)
_NVLINK4 = (450e9, 1.9e-6)
_TABLE = [
    _row("h100-nvlink-ib400", _HOPPER, (80e9, 3.35e12), _NVLINK4, 50e9, "H100 SXM, DGX H100", EFFICIENCY["h100"]),
    _row("h200-nvlink-ib400", _HOPPER, (141e9, 4.8e12), _NVLINK4, 50e9, "H200 SXM, DGX H200", EFFICIENCY["h100"]),
    _row("a100-nvlink-ib200", (312, 156, 19.5), (80e9, 2.039e12), (300e9, 1.9e-6), 25e9, "A100 80GB SXM, DGX A100",
         EFFICIENCY["a100"]),
    _row("b200-nvlink-ib400", (2250, 1100, 80), (180e9, 8e12), (900e9, 1.9e-6), 50e9, "HGX B200, DGX B200"),
    _row("l4-pcie-eth100", (121, 60, 30.3), (24e9, 300e9), (32e9, 2.5e-6), 100e9 / 8 / 8, "L4; hosts with 100 Gb/s"),
    Hardware("p100-pcie-roce25", {"float32": 9.3e12}, 16e9, 732e9, 4, 16e9, 2.5e-6, 25e9 / 8 / 4, 4e-6, 0.5,
             "P100 PCIe: microway.com/hpc-tech-tips; four to a host with 25 Gb/s: Horovod, docs/benchmarks.rst"),
    _tpu("v4", (32e9, 1.2e12), 4096, 6 * 45e9, 4),
    _tpu("v5e", (16e9, 8.1e11), 256, 4 * 45e9, 8),
    _tpu("v5p", (96e9, 2.8e12), 8960, 6 * 90e9, 4),
    _tpu("v6e", (32e9, 1.6e12), 256, 4 * 90e9, 8),
]  # fmt: skip
HARDWARE = {row.name: row for row in _TABLE}

# JAX's device_kind, as a regular expression -> the peaks of such a device.
_KINDS = {
    r"NVIDIA (H100 80GB HBM3|GH200.*)": HARDWARE["h100-nvlink-ib400"].flops,
    r"NVIDIA H200": HARDWARE["h200-nvlink-ib400"].flops,
    r"NVIDIA A100-.*": HARDWARE["a100-nvlink-ib200"].flops,
    r"NVIDIA B200": HARDWARE["b200-nvlink-ib400"].flops,
    r"NVIDIA L4": HARDWARE["l4-pcie-eth100"].flops,
    **{f"TPU {version}": peaks for version, peaks in _TPU.items()},
}


def peak_flops(kind: str, compute: str, matmul: str = "default") -> float | None:
    """Return the dense peak of one device, FLOP/s, for products of `compute` operands, or None if
    unknown.

    kind: JAX's `device_kind`. matmul: jax_default_matmul_precision, which applies to float32
    products."""
    peaks = next((peaks for name, peaks in _KINDS.items() if re.fullmatch(name, kind)), {})
    return peaks.get(rate(compute, matmul, peaks))


def rate(compute: str, matmul: str, peaks: Mapping[str, float]) -> str:
    """Return the key of `peaks` for products of `compute` operands: by default TF32 for float32, if
    there is a peak.
    """
    tensor_cores = (compute, matmul) == ("float32", "default") and "tensorfloat32" in peaks
    return "tensorfloat32" if tensor_cores else compute


def load_hardware(name_or_path: str) -> Hardware:
    """Load a row of HARDWARE by its name, or a YAML file with all fields of `Hardware`.

    Raises UsageError for an unknown name, a file that cannot be read, and a missing, unknown or
    invalid field."""
    if name_or_path in HARDWARE:
        return HARDWARE[name_or_path]
    file = pathlib.Path(name_or_path)
    if not file.is_file():
        raise UsageError(
            f"hardware: {name_or_path!r} is neither a file nor known; {suggest(name_or_path, HARDWARE, 0.3)} known: "
            f"{', '.join(HARDWARE)}; or give the path of a YAML file with the fields {', '.join(Hardware._fields)}"
        )
    try:
        fields = load(read_file(file), name_or_path)
    except (OSError, ValueError) as error:
        raise UsageError(f"hardware: {name_or_path!r} cannot be read: {one_line(error)}") from None
    if not isinstance(fields, dict):
        raise UsageError(
            f"hardware: {name_or_path!r} has no fields; write one per line, such as memory: 80e9"
        )
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(Hardware)
    try:
        return Hardware(**parser.parse_object(fields).as_dict())
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UsageError(f"hardware: {name_or_path!r} does not fit: {one_line(error)}") from None


def collective_seconds(
    hw: Hardware,
    kind: str,
    bytes: float,
    group_size: int,
    devices_in_group_per_host: int | None = None,
) -> float:
    """Return the seconds of a collective without other traffic, for a group of n devices, g on each
    of h = n/g hosts.

    kind, bytes: as in `Collective`: the full array. devices_in_group_per_host: g, by default a
    host's devices. With alpha the latency and B the bandwidth of a link, and a group inside one
    host:

        reduce-scatter, all-gather  (n - 1) alpha + (n - 1)/n bytes/B                 ring
        all-reduce                  2 ceil(log2 n) alpha + 2 (n - 1)/n bytes/B        see below
        all-to-all                  (n - 1) (alpha + bytes/n/B)                       pairwise exchange
        collective-permute          alpha + bytes/B
        collective-broadcast        ceil(log2 n) alpha + bytes/B                      pipelined tree

    An all-reduce has the bandwidth of a ring and the latency of NCCL's double binary trees, which
    never exceeds the ring's 2 (n - 1) steps, since NCCL chooses the faster. Across hosts, the first
    three work in two levels, one after the other: inside the host (n := g), and between hosts (n :=
    h) with bytes/g, since each of the g devices sends its part over its own network card. An
    all-to-all's n - g peers on other hosts, a permute, and a broadcast's bytes use the network's
    rate. A group of one takes 0 s. Raises ValueError for an unknown kind or an impossible group.
    """
    if kind not in WIRE:
        raise ValueError(f"kind: {kind!r} is no collective; known: {', '.join(WIRE)}")
    g = (
        min(hw.devices_per_host, group_size)
        if devices_in_group_per_host is None
        else devices_in_group_per_host
    )
    if not 1 <= g <= group_size:
        raise ValueError(
            f"devices_in_group_per_host: {g} of a group of {group_size}; give 1 to {group_size}"
        )
    if group_size == 1:
        return 0.0
    # Each array has an entry for the links inside a host, and one for those between hosts.
    members = np.array([g, math.ceil(group_size / g)])
    trees = np.ceil(np.log2(members))
    ring = (members - 1) / members * bytes / [1, g]
    peers = np.array([g - 1, members.prod() - g])
    slowest = np.array([members[1] == 1, members[1] > 1])
    steps, sent = {
        "all-reduce": (2 * trees, 2 * ring),
        "reduce-scatter": (members - 1, ring),
        "all-gather": (members - 1, ring),
        "all-to-all": (peers, peers / members.prod() * bytes),
        "collective-permute": (slowest, slowest * bytes),
        "collective-broadcast": (trees, slowest * bytes),
    }[kind]
    rates = np.array([hw.intra_bandwidth, hw.inter_bandwidth])
    return float(steps @ [hw.intra_latency, hw.inter_latency] + (sent / rates).sum())


def expected_seconds(
    compute: float, sent: float, network: float = NETWORK, overlap: float = OVERLAP
) -> float:
    """Return the seconds of an update: links reach `network` of their rate, `overlap` of the
    shorter part is hidden.
    """
    return compute + sent / network - overlap * min(compute, sent / network)


def update_seconds(
    hw: Hardware,
    flops: float,
    dtype: str,
    collectives: Sequence[tuple[Collective, int]],
    traffic: float = 0.0,
) -> dict[str, float]:
    """Return the seconds of one update: its parts, an upper and a lower bound, and an estimate.

    flops: of one device, in products of `dtype` operands, at hw.efficiency of its peak.
    collectives: each with the devices of a group that share a host
    (`Collective.per_block(hw.devices_per_host)`). traffic: bytes of device memory read and written
    outside of products, such as by the optimizer.

        compute         flops/(peak efficiency) + traffic/memory_bandwidth
        communication   the collectives, one after the other
        no_overlap      compute + communication: the upper bound, with links at their full rate
        full_overlap    max(compute, communication): the lower bound
        expected        an estimate between or above them: `expected_seconds`

    Raises UsageError if the hardware has no peak for `dtype`.
    """
    if dtype not in hw.flops:
        raise UsageError(
            f"hardware.flops.{dtype}: {hw.name!r} has no peak for it; it has: {', '.join(hw.flops)}"
        )
    compute = flops / (hw.flops[dtype] * hw.efficiency) + traffic / hw.memory_bandwidth
    communication = sum(
        c.count * collective_seconds(hw, c.kind, c.bytes, c.group_size, per_host)
        for c, per_host in collectives
    )
    return {
        "compute": compute,
        "communication": communication,
        "expected": expected_seconds(compute, communication),
        "no_overlap": compute + communication,
        "full_overlap": max(compute, communication),
    }
