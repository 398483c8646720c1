"""The collectives of a compiled program, read from its text, multiplied by the loops around them.

A layout promises bytes on the wire; only the compiled program shows the real ones. The text is
XLA's HLO, as `jax.stages.Compiled.as_text()` prints it on CPU and GPU. This module needs neither
jax nor a device."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxdp.plan.hlo.compiled_program import (
    CompiledProgram,
    Groups,
    Instruction,
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


def summarize(instructions: Iterable[Collective]) -> dict[str, Total]:
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
    program, stated = CompiledProgram(compiled_text), _stated(lowered_text or "")
    times, inexact = Counter[str](), set[str]()

    def visit(where: str, runs: int, exact: bool) -> None:
        """Count a computation that runs so often, and those that it runs."""
        times[where] += runs
        if not exact:
            inexact.add(where)
        for x in program.computations[where].values():
            if x.opcode == "while":
                trips = program.trips(where, x)
                known = exact and trips is not None
                visit(x.called[0], runs * (1 if trips is None else trips), known)
                visit(x.find("condition"), runs * ((trips or 0) + 1), known)
            elif not x.opcode.endswith(("-done", "-update")):
                for callee in x.called:
                    visit(callee, runs, exact and x.opcode != "conditional")

    visit(program.entry, 1, True)
    found = list[Collective]()
    for where, inner in program.computations.items():
        for x in inner.values():
            if times[where] and kind_of(x) in WIRE:
                for c in read_collective(x, program.devices, stated):
                    found.append(c._replace(count=times[where], exact=where not in inexact))
    return found


def kind_of(x: Instruction) -> str:
    """Return what an operation does, or starts to do."""
    return x.opcode.removesuffix("-start")


def read_collective(
    x: Instruction, devices: int, stated: Mapping[tuple[str, int], set[str]]
) -> list[Collective]:
    """Return a collective that runs once: an entry for each dtype.

    devices: of the program. stated: see `collectives`.
    """
    kind, results = kind_of(x), arrays(x.shape)
    groups = replica_groups(x.attributes, devices)
    largest = max(map(len, groups))
    if kind != x.opcode:  # (operands, results, contexts...); an all-reduce has only results
        n = len(x.operands)
        results = results[n : 2 * n] or results
    sizes = [(array.dtype, array.elements) for array in results]
    if kind == "reduce-scatter":
        sizes = [(dtype, n * largest) for dtype, n in sizes]
    if kind == "all-to-all":  # perhaps a tuple of one piece per peer
        sizes = [(results[0].dtype, sum(n for _, n in sizes))]
    sent = Counter[str]()
    for dtype, elements in sizes:
        if dtype == "f32":
            dtype = max(stated.get((kind, elements), {dtype}), key=bits)
        sent[dtype] += -(-elements * bits(dtype) // 8)
    return [Collective(kind, 1, n, numpy_name(dtype), largest, groups) for dtype, n in sent.items()]


def _stated(lowered: str) -> dict[tuple[str, int], set[str]]:
    """Return {(kind, number of elements): dtypes} of StableHLO's collectives, for floats of at most
    32 bits.
    """
    stated: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    kinds = "|".join(WIRE).replace("-", "_")
    # The types follow the attributes, or the region of a reducer.
    operation = rf'"stablehlo\.({kinds})"\(.*?\}}[>)] : \((.*?)\) -> ([^\n]*)'
    for kind, operands, results in re.findall(operation, lowered, re.DOTALL):
        types = results if kind == "all_gather" else operands
        for dims, dtype in re.findall(r"tensor<((?:\d+x)*)(b?f\d\w*)>", types):
            if bits(dtype) <= 32:
                elements = math.prod(map(int, dims.split("x")[:-1]))
                stated[kind.replace("_", "-"), elements].add(dtype.lower())
    return stated
