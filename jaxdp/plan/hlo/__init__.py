"""The collectives of a compiled program, read from its text, multiplied by the loops around them.

A layout promises bytes on the wire; only the compiled program shows the real ones. The text is
XLA's HLO, as `jax.stages.Compiled.as_text()` prints it on CPU and GPU. This module needs neither
jax nor a device."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxdp.plan.hlo.compiled_program import (
    CompiledProgram,
    Groups,
    arrays,
    bits,
    numpy_name,
    replica_groups,
)

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


def collectives(compiled_text: str, lowered_text: str | None = None) -> list[Collective]:
    """Return the collectives that a run of a program executes, in the order of its text.

    compiled_text: `jit(f).lower(...).compile().as_text()`. lowered_text:
    `jit(f).lower(...).as_text()`, StableHLO. XLA:CPU widens narrow floats to float32 for a
    collective. If StableHLO has only narrower ones of the same kind and number of elements, their
    dtype is used, as on a GPU. Collectives inserted by the partitioner are not in StableHLO and
    keep the compiled dtype. An asynchronous pair (-start, -done) is one collective. One with
    operands of several dtypes is one entry for each. Raises ValueError if the text is not a
    compiled module."""
    stated, program = _stated(lowered_text or ""), CompiledProgram(compiled_text)
    counted: dict[tuple[str, str], list[Collective]] = {}

    def visit(where: str, times: int, exact: bool) -> None:
        """Count a computation that runs so often."""
        for x in program.computations[where].values():
            if x.opcode == "while":
                trips = program.trips(where, x)
                for body in x.called:
                    visit(body, times * (trips or 1), exact and trips is not None)
                for condition in x.conditions:
                    visit(condition, times * ((trips or 0) + 1), exact and trips is not None)
            elif x.opcode.removesuffix("-start") in WIRE:
                groups = replica_groups(x.attributes, program.devices)
                one = read_collective(x.opcode, x.shape, groups, stated)
                before = counted.get((where, x.name)) or [c._replace(count=0) for c in one]
                counted[where, x.name] = [
                    c._replace(count=c.count + times, exact=c.exact and exact) for c in before
                ]
            elif not x.opcode.endswith(("-done", "-update")):
                for callee in x.called:
                    visit(callee, times, exact and x.opcode != "conditional")

    visit(program.entry, 1, True)
    in_order = [(where, name) for where, inner in program.computations.items() for name in inner]
    return [c for place in in_order for c in counted.get(place, ())]


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


def read_collective(
    opcode: str,
    shape: str,
    groups: Groups,
    stated: Mapping[tuple[str, int], set[str]] = MappingProxyType({}),
) -> list[Collective]:
    """Return a collective that runs once: an entry for each dtype.

    shape: of the result of an operation; opcode: its name, perhaps with "-start". stated: see
    `collectives`.
    """
    kind = opcode.removesuffix("-start")
    shape = shape if opcode == kind else _started(kind, shape)
    size = max(map(len, groups))
    sizes = [(dtype, math.prod(dims)) for dtype, dims, _ in arrays(shape)]
    if kind == "reduce-scatter":
        sizes = [(dtype, n * size) for dtype, n in sizes]
    if kind == "all-to-all":  # perhaps a tuple of one piece per peer
        pieces = Counter[str]()
        for dtype, n in sizes:
            pieces[dtype] += n
        sizes = [*pieces.items()]
    sent = Counter[str]()
    for dtype, elements in sizes:
        narrower = stated.get((kind, elements), {"f32"})
        dtype = max(narrower, key=bits) if dtype == "f32" and "f32" not in narrower else dtype
        sent[dtype] += -(-elements * bits(dtype) // 8)
    return [Collective(kind, 1, n, numpy_name(dtype), size, groups) for dtype, n in sent.items()]


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
                if bits(dtype) <= 32:
                    stated[kind, math.prod(map(int, dims.split("x")[:-1]))].add(dtype.lower())
            kind = ""
    return stated
