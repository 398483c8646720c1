"""The schedule of a compiled program, played through: when each operation begins and ends on a
device.

XLA's compilers for GPUs and TPUs decide the order of a program's operations, and where an
asynchronous one starts and is waited for. Each operation takes its roofline time (Williams et al.
2009): that of its products at the peak rate of their dtype, or that of its bytes, whichever is
longer. Collectives take the times of `hardware.collective_seconds`, one after the other, on a
stream of their own, and slow down what is computed beside them; and so do copies that a program
starts and waits for (on TPUs).

What this does not know: kernels that are slower than the constants here say. Nothing was measured
on a device: two of the constants are fitted to published runs.

`write_page` draws what each stream of a device does, and when.
"""

import html
import itertools
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxdp.errors import UsageError, one_line
from jaxdp.plan.hardware import Hardware, seconds_sent
from jaxdp.plan.hlo import WIRE, read_collective
from jaxdp.plan.hlo.compiled_program import (
    CompiledProgram,
    Instruction,
    arrays,
    replica_groups,
    size,
)

# Fitted to half of the published runs in benchmarks/published.py: `python -m benchmarks.published
# --fit`. PRODUCTS: share of the peak that large products reach (an H200 has the cores of an H100;
# others count as one, which is not fitted). SLOWED: seconds that computation takes longer for each second of
# communication beside it.
PRODUCTS = {"a100": 0.775, "h100": 0.55, "h200": 0.55, "tpu": 0.825}
SLOWED = 0.25
MEMORY = 0.85  # share of the memory's bandwidth; the published runs do not tell
LAUNCH = 1e-6  # seconds between two kernels of a GPU
PLAYED = 100  # iterations of a loop; the others take as long as the last of these
SHOWN = 10  # operations and arrays in a report
COMPUTE, COLLECTIVES, COPIES = "compute", "collectives", "copies"

FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "async-update",
)
"""Operations without a kernel."""


class Event(NamedTuple):
    """An operation on a stream, in seconds since the update began."""

    stream: str
    name: str
    begin: float
    end: float


class Schedule(NamedTuple):
    """A program that was played through.

    Args:
        seconds: of the update.
        communication: seconds of the collectives, one after the other.
        exposed: seconds in which the device waits for a collective.
        kernels: {kind: how many run}.
        longest: (name, seconds, how many run) of the operations that take most.
        largest: (shape, name, bytes) of the largest arrays.
        events: all that took time, for a picture.
    """

    seconds: float
    communication: float
    exposed: float
    kernels: dict[str, int]
    longest: list[tuple[str, float, int]]
    largest: list[tuple[str, str, int]]
    events: list[Event]

    @property
    def hidden_share(self) -> float | None:
        """Return the share of the communication during which the device computes; None if there is
        no communication."""
        return 1 - self.exposed / self.communication if self.communication else None


def play(text: str, hardware: Hardware) -> Schedule:
    """Play a compiled program (`Compiled.as_text()`) through."""
    player = Player(CompiledProgram(text), hardware)
    player.run(player.program.entry)
    hidden = player.communication - player.exposed
    player.now = max(player.now, *player.free.values()) + SLOWED * hidden
    seconds = player.seconds
    longest = sorted(seconds, key=lambda name: -seconds[name])
    return Schedule(
        player.now,
        player.communication,
        player.exposed,
        dict(player.kernels.most_common()),
        [(name, seconds[name], player.counts[name]) for name in longest[:SHOWN]],
        largest_arrays(player.program, player.ran),
        player.events,
    )


class Player:
    """A device that runs a program, operation by operation.

    Attributes:
        now: seconds since the update began.
        ran: the computations that have run.
        free: when each of the other streams has ended what was started on it.
        done: when what an operation has started is done, by the name of that operation.
    """

    def __init__(self, program: CompiledProgram, hardware: Hardware):
        self.program, self.hardware = program, hardware
        self.launch = 0.0 if hardware.name.startswith("tpu") else LAUNCH
        self.now, self.free = 0.0, {COLLECTIVES: 0.0, COPIES: 0.0}
        self.done: dict[str, tuple[str, float]] = {}
        self.communication = self.exposed = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts, self.kernels = Counter[str](), Counter[str]()
        self.events: list[Event] = []
        self.costs: dict[tuple[str, str], float] = {}
        self.ran: set[str] = set()

    def run(self, where: str) -> None:
        """Run a computation in its scheduled order."""
        self.ran.add(where)
        for x in self.program.computations[where].values():
            if x.opcode == "while":
                self.loop(where, x)
            elif x.opcode == "conditional":
                # The branch with most operations: the others are those of rare cases, and short.
                size = self.program.computations
                self.run(max(x.called, key=lambda branch: len(size[branch])))
            elif x.opcode == "call":
                self.run(x.called[0])
            elif x.opcode.endswith("-done"):
                self.wait(x)
            elif x.opcode not in FREE:
                self.operation(where, x)

    def loop(self, where: str, x: Instruction) -> None:
        [body] = x.called
        last, trips = 0.0, self.program.trips(where, x) or 1
        for _ in range(min(trips, PLAYED)):
            began = self.now
            self.run(body)
            last = self.now - began
        self.now += max(0, trips - PLAYED) * last

    def operation(self, where: str, x: Instruction) -> None:
        """Run an operation, or start an asynchronous one."""
        key = where, x.name
        kind = self.kind(x)
        if key not in self.costs:
            is_sent = kind in WIRE
            self.costs[key] = self.sent_seconds(x) if is_sent else self.roofline(where, x)
        seconds = self.costs[key]
        stream = COMPUTE
        if kind in WIRE:
            stream, self.communication = COLLECTIVES, self.communication + seconds
        elif x.opcode.endswith("-start"):
            stream = COPIES
        name = label(x, kind)
        self.kernels[kind] += 1
        self.seconds[name] += seconds
        self.counts[name] += 1
        if stream == COMPUTE:
            self.events.append(Event(stream, name, self.now, self.now + seconds))
            self.now += seconds + self.launch
            return
        begin = max(self.now, self.free[stream])
        self.free[stream] = begin + seconds
        self.events.append(Event(stream, name, begin, begin + seconds))
        if x.opcode.endswith("-start"):
            self.done[x.name] = stream, begin + seconds
        else:
            self.expose(stream, begin + seconds)

    def wait(self, x: Instruction) -> None:
        """Wait for what an operation has started, perhaps in an earlier iteration."""
        stream, end = self.done.get(x.operands[0], (COPIES, self.now))
        self.expose(stream, end)

    def expose(self, stream: str, end: float) -> None:
        if end > self.now:
            self.exposed += (end - self.now) * (stream == COLLECTIVES)
            self.now = end

    def kind(self, x: Instruction) -> str:
        """Return the kind of a collective, or of a kernel."""
        opcode = x.opcode.removesuffix("-start")
        if opcode in WIRE:
            return opcode
        if opcode == "async":
            inner = self.program.computations[x.called[0]].values()
            return next((y.opcode for y in inner if y.opcode in WIRE), "async")
        if opcode == "custom-call":
            return (re.findall(r'custom_call_target="([^"]+)"', x.attributes) or [opcode])[0]
        if opcode == "fusion":
            inner = self.program.computations[x.called[0]].values()
            if any(y.opcode in ("dot", "convolution") for y in inner):
                return "product"
            return "fusion " + (re.findall(r"kind=k(\w+)", x.attributes) or [""])[0].lower()
        return "product" if opcode in ("dot", "convolution") else opcode

    def sent_seconds(self, x: Instruction) -> float:
        """Return the seconds of a collective."""
        if x.called and x.opcode == "async-start":
            inner = self.program.computations[x.called[0]].values()
            [x] = [y for y in inner if y.opcode in WIRE]
        groups = replica_groups(x.attributes, self.program.devices)
        return seconds_sent(self.hardware, read_collective(x.opcode, x.shape, groups))

    def roofline(self, where: str, x: Instruction) -> float:
        """Return the seconds of an operation that runs alone."""
        products = 0.0
        for dtype, flops in self.program.flops(where, x).items():
            products += flops / (products_share(self.hardware) * self.rate(dtype))
        moved = self.program.traffic(where, x) / (MEMORY * self.hardware.memory_bandwidth)
        return max(products, moved)

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s of products of a dtype; float32 uses the tensor cores by default."""
        peaks = self.hardware.flops
        if dtype == "float32":
            return peaks["tensorfloat32"]
        if dtype == "highest":  # six products of bfloat16 on a TPU
            return peaks.get("float32", peaks["bfloat16"] / 6)
        return peaks.get(dtype, min(peaks.values()))


def products_share(hardware: Hardware) -> float:
    """Return the share of the peak that large products reach."""
    return PRODUCTS.get(hardware.name.split("-")[0], PRODUCTS["h100"])


def label(x: Instruction, kind: str) -> str:
    """Return the name of an operation in a report: what it is, and the code that it comes from."""
    source = [part for part in x.source.split("/") if part not in ("shard_map", "jit(update)")]
    return " ".join([kind, "/".join(source[-3:])]).strip()


def largest_arrays(program: CompiledProgram, ran: Iterable[str]) -> list[tuple[str, str, int]]:
    """Return (shape, source, bytes) of the largest arrays that operations of computations return."""
    found = {}
    for where in ran:
        for x in program.computations[where].values():
            for dtype, dims, _ in [] if x.opcode in (*FREE, "while") else arrays(x.shape):
                shape = f"{dtype}[{','.join(map(str, dims))}]"
                found[shape, x.source or x.name] = size(shape)
    largest = sorted(found, key=lambda name: -found[name])[:SHOWN]
    return [(*name, found[name]) for name in largest]


WIDTH, HEIGHT = 4000, 40  # pixels of a stream
COLORS = {COMPUTE: "#4878a8", COLLECTIVES: "#d1663a", COPIES: "#8a9a5b"}
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} .streams {{ overflow-x: auto }}
td {{ padding: 0 1em 0 0; text-align: right }} td:last-child {{ text-align: left }}</style>
<h1>{title}</h1><p>Compiled, not run: the order of the compiler of the target, with the time of each
operation by its roofline. Point at an operation for its name; scroll to the right.</p>{body}
"""


def write_page(path: str, schedules: Mapping[int, Schedule], title: str) -> None:
    """Write the page of the schedules by ZeRO stage. Raises UsageError if the file cannot be
    written."""
    body = "".join(section(zero, schedule) for zero, schedule in schedules.items())
    title = html.escape(title)
    try:
        pathlib.Path(path).write_text(PAGE.format(title=title, body=body), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output: {path!r} cannot be written: {one_line(error)}") from None


def section(zero: int, schedule: Schedule) -> str:
    """Return the picture and the tables of one plan."""
    share = schedule.hidden_share
    hidden = (
        "" if share is None else f", {share:.0%} of {1e3 * schedule.communication:.3g} ms hidden"
    )
    rows = "".join(
        f"<tr><td>{1e3 * seconds:.3g} ms<td>{count} x<td>{html.escape(name)}"
        for name, seconds, count in schedule.longest
    )
    return (
        f"<h2>zero {zero}: {1e3 * schedule.seconds:.4g} ms{hidden}</h2>"
        f'<div class="streams">{picture(schedule)}</div>'
        f"<h3>Operations that take most</h3><table>{rows}</table>"
    )


def picture(schedule: Schedule) -> str:
    """Return the streams as SVG."""
    shapes = []
    for row, (stream, color) in enumerate(COLORS.items()):
        top = row * (HEIGHT + 20) + 16
        shapes.append(f'<text x="0" y="{top - 4}">{stream}</text>')
        scale = WIDTH / schedule.seconds
        for event in joined(x for x in schedule.events if x.stream == stream):
            left, wide = event.begin * scale, (event.end - event.begin) * scale
            title = f"{html.escape(event.name)}, {1e6 * (event.end - event.begin):.1f} us"
            shapes.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{HEIGHT}" '
                f'fill="{color}"><title>{title}</title></rect>'
            )
    height = len(COLORS) * (HEIGHT + 20)
    return f'<svg width="{WIDTH}" height="{height}">{"".join(shapes)}</svg>'


def joined(events: Iterable[Event]) -> Iterable[Event]:
    """Join neighbours of one name, so that a page has no more shapes than one can see."""
    for name, group in itertools.groupby(events, key=lambda x: x.name):
        same = list(group)
        yield Event(same[0].stream, name, same[0].begin, same[-1].end)
