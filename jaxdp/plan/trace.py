"""Analysis of a profiler's trace: a device's time for computation, communication and idling, and by
operation.
"""

import collections
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxdp.errors import UsageError
from jaxdp.plan.hlo import WIRE

OUTER = re.compile(
    r"^(jit\([^)]*\)/|shard_map/|while/body/|closed_call/|vmap\(\)/)+"
)  # prefixes without information
ANNOTATION = "jaxdp update"  # the name of an update in a trace


class Operation(NamedTuple):
    """One execution of an instruction of a compiled program. device: its plane or ordinal; lane: a
    sequence of operations that follow or enclose each other; start, end: ns."""

    device: str
    lane: str
    name: str
    start: float
    end: float


class Shares(NamedTuple):
    """A device's time in a window, ns. hidden: communication that overlaps computation; it counts
    as computation.
    """

    device: str
    window: float
    compute: float
    communication: float
    hidden: float

    @property
    def idle(self) -> float:
        return max(0.0, self.window - self.compute - self.communication)


class Row(NamedTuple):
    """An instruction: its time in ns, without enclosed operations, over all devices, and its number
    of executions.
    """

    name: str
    time: float
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls


def read(directory: pathlib.Path) -> tuple[list[Operation], list[tuple[float, float]]]:
    """Read the newest trace below a folder: return (its operations, the intervals of updates on the
    host).

    Raises UsageError if there is none. The format is XPlane (https://openxla.org/xprof), read by
    JAX."""
    import jax

    files = sorted(directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UsageError(
            f"profile: no trace in {str(directory)!r}; give the folder of one, such as RUN/profile"
        )
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    operations, updates = [], []
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith(ANNOTATION):
                    updates.append((event.start_ns, event.end_ns))
                    continue
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    device = (
                        plane.name
                        if plane.name.startswith("/device")
                        else f"cpu:{stats.get('device_ordinal', 0)}"
                    )
                    lane = f"{plane.name} {line.name}"
                    operations.append(
                        Operation(device, lane, str(stats["hlo_op"]), event.start_ns, event.end_ns)
                    )
    return operations, sorted(updates)


def shares(
    operations: Iterable[Operation], window: tuple[float, float], kinds: Mapping[str, str]
) -> list[Shares]:
    """Return each device's use of a window of time; kinds: instruction -> opcode of the programs
    (`opcodes`).
    """
    by_device: dict[str, list[Operation]] = collections.defaultdict(list)
    for operation in operations:
        if operation.end > window[0] and operation.start < window[1]:
            by_device[operation.device].append(operation)
    result = []
    for device, executed in sorted(by_device.items()):
        leaves = [o for o in executed if kinds.get(o.name) not in ("while", "call", "conditional")]
        moving = union([(o.start, o.end) for o in leaves if is_collective(o.name, kinds)], window)
        busy = union([(o.start, o.end) for o in leaves if not is_collective(o.name, kinds)], window)
        both = union([*moving, *busy], window)
        compute, communication, total = length(busy), length(moving), length(both)
        result.append(
            Shares(
                device,
                window[1] - window[0],
                compute,
                total - compute,
                compute + communication - total,
            )
        )
    return result


def top(operations: Iterable[Operation], window: tuple[float, float]) -> list[Row]:
    """Return the instructions of a window, the longest first."""
    times: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    lanes: dict[str, list[Operation]] = collections.defaultdict(list)
    for operation in operations:
        if operation.end > window[0] and operation.start < window[1]:
            lanes[operation.lane].append(operation)
    for lane in lanes.values():
        open_: list[Operation] = []
        for operation in sorted(lane, key=lambda o: (o.start, -o.end)):
            while open_ and open_[-1].end <= operation.start:
                open_.pop()
            if open_:  # enclosed: not the outer operation's own time
                times[open_[-1].name] -= min(operation.end, open_[-1].end) - operation.start
            times[operation.name] += operation.end - operation.start
            counts[operation.name] += 1
            open_.append(operation)
    rows = [Row(name, max(0.0, time), counts[name]) for name, time in times.items()]
    return sorted(rows, key=lambda row: -row.time)


def union(
    intervals: Iterable[tuple[float, float]], window: tuple[float, float]
) -> list[tuple[float, float]]:
    """Merge intervals, clipped to a window, into disjoint ones in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def opcodes(text: str) -> dict[str, str]:
    """Return {instruction: opcode} from a compiled program's text."""
    return dict(re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([\w\-]+)\(", text, re.M))


def origins(text: str) -> dict[str, str]:
    """Return {instruction: its origin in the program}, such as "transpose(jvp(Block))/dot_general"."""
    pairs = re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', text, re.M)
    return {name: OUTER.sub("", where) for name, where in pairs}


def is_collective(name: str, kinds: Mapping[str, str]) -> bool:
    kind = re.sub(r"-(start|done)$", "", kinds.get(name, name.partition(".")[0]))
    return kind in WIRE
