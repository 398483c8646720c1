"""What a compiled program moves between devices, read from its text: each collective, times the loops around it.

A layout promises bytes on the wire; only the compiled program says what was kept. The text is XLA's HLO, as
`jax.stages.Compiled.as_text()` prints it on CPU and GPU. Nothing here needs jax, or a device.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

from jaxdp.analysis.hlo.groups import Groups, replica_groups

# Kind of collective -> how often each byte of the payload crosses the wire (a ring's, without its (n - 1)/n).
WIRE = {
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-gather": 1,
    "all-to-all": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
}


class Collective(NamedTuple):
    """One collective instruction of a program, or its operands of one dtype where it has several.

    count: how often one run of the program executes it. exact: False where only the run knows that: a loop without a
    known trip count counts once, and so does each branch of a conditional.
    bytes: the whole array per execution: what an all-gather gives, what every other kind takes; of all its operands.
    dtype: as NumPy and JAX call it.
    groups: positions in the mesh's device order that exchange data with each other; of a permute, those that its
    source-target pairs connect. group_size: of the largest.
    op_name: where the program asked for it ("jit(update)/.../psum"), or "".
    """

    kind: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    bytes: int
    dtype: str
    group_size: int
    groups: Groups
    operands: int = 1
    exact: bool = True
    op_name: str = ""

    @property
    def wire(self) -> int:
        """Bytes per run, an all-reduce's twice: parameters all-reduced give 2, reduce-scattered or gathered 1."""
        return WIRE[self.kind] * self.bytes * self.count

    @property
    def ring(self) -> float:
        """Bytes that one device sends per run, by the ring algorithms (Patarasuk & Yuan 2009): wire x (n - 1)/n."""
        n = self.group_size
        return self.wire * (1.0 if self.kind == "collective-permute" and n > 1 else (n - 1) / n)

    def per_block(self, k: int) -> int:
        """How many devices of a group share a block of k consecutive ones (a host's); group_size where none leaves it.

        Of groups that are spread unevenly, the smallest share: it has the least bandwidth.
        """
        spread = [Counter(device // k for device in group) for group in self.groups]
        return min((min(blocks.values()) for blocks in spread if len(blocks) > 1), default=self.group_size)


class Total(NamedTuple):
    """Executions, bytes and wire bytes per run."""

    count: int  # type: ignore[assignment]
    bytes: int
    wire: int


def summarize(found: list[Collective]) -> dict[str, Total]:
    """Kind -> totals per run of the program; a kind that it does not use is left out."""
    rows: dict[str, Total] = {}
    for c in found:
        old = rows.get(c.kind, Total(0, 0, 0))
        rows[c.kind] = Total(old.count + c.count, old.bytes + c.bytes * c.count, old.wire + c.wire)
    return rows


_COMPUTATION = re.compile(r"^\s*(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z\d-]*)\((.*)")  # (result's shape, opcode, rest)
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?[=:]\s*\{"?n"?:\s*"?(\d+)')
_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_METADATA = re.compile(r'metadata=\{(?:"(?:[^"\\]|\\.)*"|[^}"])*\}')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")


def collectives(compiled_text: str, lowered_text: str | None = None) -> list[Collective]:
    """The collectives that a run of a program executes, in the order of its text.

    compiled_text: `jit(f).lower(...).compile().as_text()`. lowered_text: `jit(f).lower(...).as_text()`, StableHLO.
    XLA:CPU widens narrow floats to float32 for a collective; where StableHLO has only narrower ones of the same kind
    and number of elements, they are taken instead: a GPU sends those. What the partitioner inserted is not in StableHLO
    and stays as compiled.
    An asynchronous pair (-start, -done) is one collective. One with operands of several dtypes is one entry for each.
    Raises ValueError where the text is no compiled module.
    """
    stated = _stated(lowered_text or "")
    sites: defaultdict[str, list[tuple[str, int, bool]]] = defaultdict(list)  # callee -> caller, times, exact
    found: list[tuple[str, Collective]] = []
    here, entry, devices = "", "", 1
    for line in compiled_text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).rstrip()
        if line.startswith("HloModule"):
            devices = math.prod(int(n) for n in re.findall(r"(?:replica_count|num_partitions)=(\d+)", line))
        elif header := _COMPUTATION.match(line):
            here = header[2]
            entry = here if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            shape, opcode, rest = instruction.groups()
            name = _NAME.search(rest)
            rest = _METADATA.sub("", rest)
            called = [] if opcode.endswith(("-done", "-update")) else _CALLED.findall(rest)
            for role, callees in called:
                times, exact = _times(opcode, role, rest)
                for callee in re.findall(r"[\w.-]+", callees):
                    sites[callee].append((here, times, exact))
            kind = opcode.removesuffix("-start")
            if kind in WIRE and not any(role == "calls" for role, _ in called):  # else its wrapped computation has it
                result = shape if opcode == kind else _started(kind, shape)
                for c in _read(kind, result, replica_groups(rest, devices), stated):
                    found.append((here, c._replace(op_name=name[1] if name else "")))
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program, compile().as_text()")

    @functools.cache
    def runs(computation: str) -> tuple[int, bool]:
        if computation == entry:
            return 1, True
        calls = [(*runs(caller), times, exact) for caller, times, exact in sites[computation]]
        return sum(n * times for n, _, times, _ in calls), all(sure and exact for _, sure, _, exact in calls)

    counted = [c._replace(count=runs(where)[0], exact=runs(where)[1]) for where, c in found]
    return [c for c in counted if c.count]


def _times(opcode: str, role: str, rest: str) -> tuple[int, bool]:
    """How often one execution of an instruction runs a computation that it calls, and whether that is certain."""
    if opcode == "while":
        trips = _TRIPS.search(rest)
        return (int(trips[1]) + (role == "condition"), True) if trips else (1, False)
    return 1, opcode != "conditional"


def _started(kind: str, shape: str) -> str:
    """The result in the shape of a -start: of (operands, results, contexts...), but an all-reduce's is its results."""
    depth, parts = 0, [""]
    for c in shape[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    bundled = shape.startswith("(") and len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("("))
    return parts[1] if bundled else shape


def _read(kind: str, shape: str, groups: Groups, stated: dict[tuple[str, int], set[str]]) -> list[Collective]:
    """A collective from its result, an entry per dtype."""
    size = max(map(len, groups))
    arrays = [(dtype, math.prod(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(shape)]
    if kind == "reduce-scatter":
        arrays = [(dtype, n * size) for dtype, n in arrays]
    if kind == "all-to-all":  # perhaps a tuple of one piece per peer
        arrays = [(dtype, sum(n for d, n in arrays if d == dtype)) for dtype in dict.fromkeys(d for d, _ in arrays)]
    sent: dict[str, list[int]] = {}
    for dtype, elements in arrays:
        narrower = stated.get((kind, elements), {"f32"})
        dtype = max(narrower, key=_bits) if dtype == "f32" and "f32" not in narrower else dtype
        sent.setdefault(dtype, []).append(elements)
    return [
        Collective(kind, 1, sum(-(-n * _bits(dtype) // 8) for n in ns), _numpy_name(dtype), size, groups, len(ns))
        for dtype, ns in sent.items()
    ]


def _stated(lowered: str) -> dict[tuple[str, int], set[str]]:
    """(kind, number of elements) -> the dtypes of StableHLO's collectives, floats of 32 bits or fewer."""
    stated: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    kind = ""
    for line in lowered.splitlines():
        op = re.search(r'"stablehlo\.(\w+)"\(', line)
        if op and (name := op[1].replace("_", "-")) in WIRE:
            kind = name
        types = re.search(r"\}[>)] : \((.*?)\) -> (.*)", line)  # after the reducer's region, where it has one
        if kind and types:
            for dims, dtype in re.findall(r"tensor<((?:\d+x)*)(b?f\d\w*)>", types[2 if kind == "all-gather" else 1]):
                if _bits(dtype) <= 32:
                    stated[kind, math.prod(map(int, dims.split("x")[:-1]))].add(dtype.lower())
            kind = ""
    return stated


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def _numpy_name(dtype: str) -> str:
    """bf16 -> bfloat16, f8e4m3fn -> float8_e4m3fn, s32 -> int32."""
    if dtype == "pred":
        return "bool"
    letters, bits, variant = re.findall(r"([a-z]+)(\d+)(\w*)", dtype)[0]
    long = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    return long.get(letters, letters) + bits + (variant and f"_{variant}")
