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

import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp.errors import UsageError, one_line
from jaxdp.plan.hardware import Hardware, seconds_sent
from jaxdp.plan.hlo import WIRE, kind_of, read_collective
from jaxdp.plan.hlo.compiled_program import CompiledProgram, Instruction, size

# Seconds that computation takes longer for each second of communication beside it. Fitted to half of
# the published runs in benchmarks/published.py, as are the shares of the peak that large products
# reach (`products` in devices.toml): `python -m benchmarks.published --fit`.
SLOWED = 0.25
MEMORY = 0.85  # share of the memory's bandwidth; the published runs do not tell
LAUNCH = 1e-6  # seconds between two kernels of a GPU
PLAYED = 100  # iterations of a loop; the others take as long as the last of these
SHOWN = 10  # operations and arrays in a report
COMPUTE, COLLECTIVES, COPIES = "compute", "collectives", "copies"  # streams
SENT, EXPOSED = "communication", "exposed"  # of a `Schedule`

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
    clock, seconds = player.clock, player.seconds
    hidden = clock[SENT] - clock[EXPOSED]
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SHOWN]
    return Schedule(
        max(clock[COMPUTE], clock[COLLECTIVES], clock[COPIES]) + SLOWED * hidden,
        clock[SENT],
        clock[EXPOSED],
        dict(player.kernels.most_common()),
        [(name, seconds[name], player.counts[name]) for name in longest],
        player.largest_arrays(),
        player.events,
    )


class Operation(NamedTuple):
    """What an instruction does, on which stream, and how long. name: in a report."""

    stream: str
    kind: str
    name: str
    seconds: float


class Player:
    """A device that runs a program, operation by operation.

    Attributes:
        clock: seconds. When each stream has ended what was started on it, and each asynchronous
            operation, by its name; and the sums SENT and EXPOSED. That of COMPUTE is the time of
            the player.
        seconds, counts, kernels: of the operations that have run; see `Schedule`.
        streams: those of asynchronous operations, by their names.
        ran: the computations that have run.
    """

    def __init__(self, program: CompiledProgram, hardware: Hardware):
        self.program, self.hardware = program, hardware
        self.launch = 0.0 if hardware.name.startswith("tpu") else LAUNCH
        self.clock: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts, self.kernels = Counter[str](), Counter[str]()
        self.streams: dict[str, str] = {}
        self.events: list[Event] = []
        self.operations: dict[tuple[str, str], Operation] = {}
        self.ran: dict[str, None] = {}

    def run(self, where: str) -> None:
        """Run a computation in its scheduled order."""
        self.ran[where] = None
        for x in self.program.computations[where].values():
            if x.opcode == "while":
                self.loop(where, x)
            elif x.opcode in ("call", "conditional"):
                # The branch with most operations: the others are those of rare cases, and short.
                size = self.program.computations
                self.run(max(x.called, key=lambda branch: len(size[branch])))
            elif x.opcode.endswith("-done"):
                started = x.operands[0]  # perhaps in an earlier iteration
                self.wait(self.streams.get(started, COPIES), self.clock[started])
            elif x.opcode not in FREE:
                self.start(where, x)

    def loop(self, where: str, x: Instruction) -> None:
        """Run a loop; once, if its iterations are not known. After PLAYED of them, each of the
        others adds to all figures what the last one has added."""
        trips = self.program.trips(where, x)
        trips = 1 if trips is None else trips
        tables: list[dict[str, Any]] = [self.clock, self.seconds, self.counts, self.kernels]
        before = tables
        for _ in range(min(trips, PLAYED)):
            before = [table.copy() for table in tables]
            self.run(x.called[0])
        for table, earlier in zip(tables, before):
            for name in table:
                table[name] += max(0, trips - PLAYED) * (table[name] - earlier.get(name, 0))

    def start(self, where: str, x: Instruction) -> None:
        """Run an operation, or start an asynchronous one."""
        if (where, x.name) not in self.operations:
            self.operations[where, x.name] = self.operation(where, x)
        stream, kind, name, seconds = self.operations[where, x.name]
        self.kernels[kind] += 1
        self.seconds[name] += seconds
        self.counts[name] += 1
        begin = max(self.clock[COMPUTE], self.clock[stream])
        end = begin + seconds
        self.events.append(Event(stream, name, begin, end))
        if stream == COMPUTE:
            self.clock[stream] = begin + (seconds + self.launch)
            return
        self.clock[stream] = self.clock[x.name] = end
        self.streams[x.name] = stream
        if stream == COLLECTIVES:
            self.clock[SENT] += seconds
        if not x.opcode.endswith("-start"):
            self.wait(stream, end)

    def wait(self, stream: str, end: float) -> None:
        """Wait for the end of an operation on a stream."""
        waited = max(0.0, end - self.clock[COMPUTE])
        self.clock[COMPUTE] = max(end, self.clock[COMPUTE])
        if stream == COLLECTIVES:
            self.clock[EXPOSED] += waited

    def operation(self, where: str, x: Instruction) -> Operation:
        """Return what an instruction does, alone."""
        kind = self.kind(x)
        name = label(x, kind)
        if kind in WIRE:
            parts = self.program.inner(x) if x.opcode == "async-start" else [x]
            [sent] = [y for y in parts if kind_of(y) == kind]
            collectives = read_collective(sent, self.program.devices, {})
            return Operation(COLLECTIVES, kind, name, seconds_sent(self.hardware, collectives))
        stream = COPIES if x.opcode.endswith("-start") else COMPUTE
        return Operation(stream, kind, name, self.roofline(where, x))

    def kind(self, x: Instruction) -> str:
        """Return the kind of a collective, or of a kernel."""
        kind = kind_of(x)
        if kind == "custom-call":
            return x.find("target") or kind
        inner = [kind]
        if kind in ("async", "fusion"):
            inner = [y.opcode for y in self.program.inner(x)]
        if kind == "async":
            return next((opcode for opcode in inner if opcode in WIRE), kind)
        if "dot" in inner or "convolution" in inner:
            return "product"
        return f"fusion {x.find('fusion').lower()}" if kind == "fusion" else kind

    def roofline(self, where: str, x: Instruction) -> float:
        """Return the seconds of an operation that runs alone."""
        products = 0.0
        for dtype, flops in self.program.flops(where, x).items():
            products += flops / (self.hardware.products * self.rate(dtype))
        moved = self.program.traffic(where, x) / (MEMORY * self.hardware.memory_bandwidth)
        return max(products, moved)

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s of products of a dtype."""
        peaks = self.hardware.flops
        if dtype == "float32" and dtype not in peaks:
            return peaks["bfloat16"] / 6  # six products of bfloat16 on a TPU
        return peaks.get(dtype, min(peaks.values()))

    def largest_arrays(self) -> list[tuple[str, str, int]]:
        """Return (shape, source, bytes) of the largest arrays that operations have returned."""
        found = Counter[tuple[str, str]]()
        for where in self.ran:
            for x in self.program.computations[where].values():
                if x.opcode not in (*FREE, "while"):
                    for shape in re.findall(r"\w+\[[\d,]*\]", x.shape):
                        found[shape, x.find("source") or x.name] = size(shape)
        return [(*name, count) for name, count in found.most_common(SHOWN)]


def label(x: Instruction, kind: str) -> str:
    """Return the name of an operation in a report: what it is, and the code that it comes from."""
    parts = x.find("source").split("/")
    source = [part for part in parts if part not in ("shard_map", "jit(update)")]
    return f"{kind} {'/'.join(source[-3:])}".strip()


def write_page(path: str, schedules: Mapping[int, Schedule], title: str) -> None:
    """Write the page of the schedules by ZeRO stage. Raises UsageError if the file cannot be
    written."""
    plans = [{"zero": zero, **schedule._asdict()} for zero, schedule in schedules.items()]
    data = json.dumps({"title": title, "plans": plans}).replace("<", "\\u003c")
    template = pathlib.Path(__file__).with_name("schedule.html").read_text(encoding="utf-8")
    try:
        pathlib.Path(path).write_text(template.replace("[[data]]", data), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output: {path!r} cannot be written: {one_line(error)}") from None
