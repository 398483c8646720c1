"""The collectives of a compiled program, read from its text, multiplied by the loops around them.

A layout promises bytes on the wire; only the compiled program shows the real ones. The text is
XLA's HLO, as `jax.stages.Compiled.as_text()` prints it on CPU and GPU. This module needs neither
jax nor a device."""

import functools
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

from jaxdp.plan.hlo.groups import Groups, replica_groups

# Kind of collective -> how often each payload byte crosses the wire, for a ring, without the factor
# (n - 1)/n.
WIRE = {
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-gather": 1,
    "all-to-all": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
}


class Collective(NamedTuple):
    """One collective instruction of a program, or its operands of one dtype if it has several
    dtypes.

    count: executions per run of the program. exact: False if the count is known only at run time: a
    loop without a known trip count counts once, and so does each branch of a conditional.
    bytes: the full array per execution: the result of an all-gather, the input of other kinds;
    summed over operands. dtype: the name in NumPy and JAX.
    groups: positions in the mesh's device order that exchange data with each other; for a permute,
    positions connected by its source-target pairs. group_size: of the largest.
    """

    kind: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    bytes: int
    dtype: str
    group_size: int
    groups: Groups
    exact: bool = True

    @property
    def wire(self) -> int:
        """Payload bytes per run, those of an all-reduce counted twice."""
        return WIRE[self.kind] * self.bytes * self.count

    def per_block(self, k: int) -> int:
        """Return how many devices of a group share a block of k consecutive ones (a host);
        group_size if all do.

        For an uneven spread, return the smallest number: it has the least bandwidth.
        """
        spread = [Counter(device // k for device in group) for group in self.groups]
        return min(
            (min(blocks.values()) for blocks in spread if len(blocks) > 1), default=self.group_size
        )


class Total(NamedTuple):
    """Totals per run: executions, bytes and wire bytes."""

    count: int  # type: ignore[assignment]
    bytes: int
    wire: int


def summarize(instructions: list[Collective]) -> dict[str, Total]:
    """Return {kind: totals per run of the program}, for the kinds that it uses."""
    rows: dict[str, Total] = {}
    for c in instructions:
        old = rows.get(c.kind, Total(0, 0, 0))
        rows[c.kind] = Total(old.count + c.count, old.bytes + c.bytes * c.count, old.wire + c.wire)
    return rows


_COMPUTATION = re.compile(r"^\s*(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z\d-]*)\((.*)"
)  # (result's shape, opcode, rest)
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(
    r'known_trip_count"?[=:]\s*\{"?n"?:\s*"?(\d+)|\btimes_(\d+)/while"'
)  # the latter: `scan_unfused`
_METADATA = re.compile(r'metadata=\{(?:"(?:[^"\\]|\\.)*"|[^}"])*\}')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")


def collectives(compiled_text: str, lowered_text: str | None = None) -> list[Collective]:
    """Return the collectives that a run of a program executes, in the order of its text.

    compiled_text: `jit(f).lower(...).compile().as_text()`. lowered_text:
    `jit(f).lower(...).as_text()`, StableHLO. XLA:CPU widens narrow floats to float32 for a
    collective. If StableHLO has only narrower ones of the same kind and number of elements, their
    dtype is used, as on a GPU. Collectives inserted by the partitioner are not in StableHLO and
    keep the compiled dtype. An asynchronous pair (-start, -done) is one collective. One with
    operands of several dtypes is one entry for each. Raises ValueError if the text is not a
    compiled module."""
    stated = _stated(lowered_text or "")
    sites: defaultdict[str, list[tuple[str, int, bool]]] = defaultdict(
        list
    )  # callee -> caller, times, exact
    located: list[tuple[str, Collective]] = []
    computation, entry, devices = "", "", 1
    for line in compiled_text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).rstrip()
        if line.startswith("HloModule"):
            devices = math.prod(
                int(n) for n in re.findall(r"(?:replica_count|num_partitions)=(\d+)", line)
            )
        elif header := _COMPUTATION.match(line):
            computation = header[2]
            entry = computation if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            shape, opcode, rest = instruction.groups()
            trips, rest = _TRIPS.search(rest), _METADATA.sub("", rest)
            called = [] if opcode.endswith(("-done", "-update")) else _CALLED.findall(rest)
            for role, callees in called:
                times, exact = _times(opcode, role, trips)
                for callee in re.findall(r"[\w.-]+", callees):
                    sites[callee].append((computation, times, exact))
            kind = opcode.removesuffix("-start")
            if kind in WIRE and not any(
                role == "calls" for role, _ in called
            ):  # else its wrapped computation has it
                result = shape if opcode == kind else _started(kind, shape)
                located += [
                    (computation, c)
                    for c in _read(kind, result, replica_groups(rest, devices), stated)
                ]
    if not entry:
        raise ValueError(
            "no ENTRY computation: this is not the text of a compiled program, compile().as_text()"
        )

    @functools.cache
    def runs(name: str) -> tuple[int, bool]:
        if name == entry:
            return 1, True
        calls = [(*runs(caller), times, exact) for caller, times, exact in sites[name]]
        return sum(n * times for n, _, times, _ in calls), all(
            sure and exact for _, sure, _, exact in calls
        )

    counted = [(*runs(where), c) for where, c in located]
    return [c._replace(count=count, exact=exact) for count, exact, c in counted if count]


def _times(opcode: str, role: str, trips: re.Match[str] | None) -> tuple[int, bool]:
    """Return how often an instruction runs a computation that it calls, and whether that number is
    certain.
    """
    if opcode == "while":
        return (int(trips[1] or trips[2]) + (role == "condition"), True) if trips else (1, False)
    return 1, opcode != "conditional"


def _started(kind: str, shape: str) -> str:
    """Return the result's part of a -start's shape (operands, results, contexts...); an all-reduce
    has only results.
    """
    depth, parts = 0, [""]
    for c in shape[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    bundled = len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("("))
    return parts[1] if bundled and shape.startswith("(") else shape


def _read(
    kind: str, shape: str, groups: Groups, stated: dict[tuple[str, int], set[str]]
) -> list[Collective]:
    """Build a collective from the shape of its result: an entry per dtype."""
    size = max(map(len, groups))
    arrays = [
        (dtype, math.prod(map(int, filter(None, dims.split(",")))))
        for dtype, dims in _ARRAY.findall(shape)
    ]
    if kind == "reduce-scatter":
        arrays = [(dtype, n * size) for dtype, n in arrays]
    if kind == "all-to-all":  # perhaps a tuple of one piece per peer
        pieces = Counter[str]()
        for dtype, n in arrays:
            pieces[dtype] += n
        arrays = [*pieces.items()]
    sent = Counter[str]()
    for dtype, elements in arrays:
        narrower = stated.get((kind, elements), {"f32"})
        dtype = max(narrower, key=_bits) if dtype == "f32" and "f32" not in narrower else dtype
        sent[dtype] += -(-elements * _bits(dtype) // 8)
    return [Collective(kind, 1, n, _numpy_name(dtype), size, groups) for dtype, n in sent.items()]


def _stated(lowered: str) -> dict[tuple[str, int], set[str]]:
    """Return {(kind, number of elements): dtypes} of StableHLO's collectives, for floats of at most
    32 bits.
    """
    stated: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    kind = ""
    for line in lowered.splitlines():
        op = re.search(r'"stablehlo\.(\w+)"\(', line)
        if op and (name := op[1].replace("_", "-")) in WIRE:
            kind = name
        types = re.search(r"\}[>)] : \((.*?)\) -> (.*)", line)  # after the reducer's region, if any
        if kind and types:
            for dims, dtype in re.findall(
                r"tensor<((?:\d+x)*)(b?f\d\w*)>", types[2 if kind == "all-gather" else 1]
            ):
                if _bits(dtype) <= 32:
                    stated[kind, math.prod(map(int, dims.split("x")[:-1]))].add(dtype.lower())
            kind = ""
    return stated


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def _numpy_name(dtype: str) -> str:
    """Convert an XLA dtype: bf16 -> bfloat16, f8e4m3fn -> float8_e4m3fn, s32 -> int32."""
    if dtype == "pred":
        return "bool"
    letters, bits, variant = re.findall(r"([a-z]+)(\d+)(\w*)", dtype)[0]
    long = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    return long.get(letters, letters) + bits + (variant and f"_{variant}")
