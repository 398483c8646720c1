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
import tomllib
from collections.abc import Iterable, Mapping
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
    the network. efficiency: the share of the peak that a model's products reach, for an estimate
    without a schedule; products: with one, that of a target. source: the origin of the figures."""

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
    products: Share = 0.55  # type: ignore[valid-type]


# Fitted to half of the published runs in benchmarks/published.py, as the shares of the peak in
# devices.toml: `python -m benchmarks.published --fit`.
NETWORK = 0.7  # share of a link's bandwidth that collectives reach
OVERLAP = 0.9  # share of the shorter of computation and communication that the longer one hides

TABLES = tomllib.loads(pathlib.Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
HARDWARE = {name: Hardware(name, **fields) for name, fields in TABLES["hardware"].items()}


def peak_flops(kind: str, compute: str, matmul: str = "default") -> float | None:
    """Return the dense peak of one device, FLOP/s, for products of `compute` operands, or None if
    unknown.

    kind: JAX's `device_kind`. matmul: jax_default_matmul_precision, which applies to float32
    products."""
    kinds = TABLES["kinds"].items()
    peaks = next(
        (HARDWARE[name].flops for pattern, name in kinds if re.fullmatch(pattern, kind)), {}
    )
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
    hw: Hardware, kind: str, bytes: float, group_size: int, devices_in_group_per_host: int
) -> float:
    """Return the seconds of a collective without other traffic, for a group of n devices, g on each
    of h = n/g hosts.

    kind, bytes: as in `Collective`: the full array. devices_in_group_per_host: g. With alpha the
    latency and B the bandwidth of a link, and a group inside one host:

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
    g = devices_in_group_per_host
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


def seconds_sent(hw: Hardware, collectives: Iterable[Collective]) -> float:
    """Return the seconds of collectives, one after the other, without other traffic."""
    host = hw.devices_per_host
    seconds = (
        c.count * collective_seconds(hw, c.kind, c.bytes, c.group_size, c.per_block(host))
        for c in collectives
    )
    return sum(seconds, 0.0)


def expected_seconds(
    compute: float, sent: float, network: float = NETWORK, overlap: float = OVERLAP
) -> float:
    """Return the seconds of an update: links reach `network` of their rate, `overlap` of the
    shorter part is hidden.
    """
    return compute + sent / network - overlap * min(compute, sent / network)


def compute_seconds(hw: Hardware, flops: float, dtype: str, traffic: float) -> float:
    """Return the seconds of an update's computation: flops/(peak efficiency) +
    traffic/memory_bandwidth.

    flops: of one device, in products of `dtype` operands. traffic: bytes of device memory read and
    written outside of products, such as by the optimizer.

    Raises UsageError if the hardware has no peak for `dtype`.
    """
    if dtype not in hw.flops:
        raise UsageError(
            f"hardware.flops.{dtype}: {hw.name!r} has no peak for it; it has: {', '.join(hw.flops)}"
        )
    return flops / (hw.flops[dtype] * hw.efficiency) + traffic / hw.memory_bandwidth
