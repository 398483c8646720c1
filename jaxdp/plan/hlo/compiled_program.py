"""The operations of a program that XLA has compiled, read from its text: what each of them computes,
reads and writes, and which devices exchange data: XLA prints groups in four syntaxes."""

import functools
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_SYNTAX = r"\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\](?:, ?device_ids=\(.*?\))? \{[^:}]*\}"
_GROUPS = re.compile(rf"(replica_groups|source_target_pairs)=({_SYNTAX})")
UNKNOWN_GROUPS = re.compile(
    rf"(?:replica_groups|source_target_pairs)=(?!\{{\}}|{_SYNTAX})(.*?)(?:, \w+=|$)", re.MULTILINE
)
"""Groups in a syntax that `replica_groups` does not know."""


def replica_groups(attributes: str, devices: int) -> Groups:
    """Return the groups of a collective in HLO text; without the attribute, or if that is empty or in
    an unknown syntax, all `devices` are one group.

    {{0,1},{2,3}}; [2,4]<=[4,2]T(1,0), an iota reshaped and transposed; mesh['r'=2,'d'=4] {'d'}, the
    axes that a group runs along, perhaps with device_ids=(...), but no parts of axes, as 'd':(2)2;
    source_target_pairs={{0,1},{1,0}}, the devices that the pairs connect (XLA:
    hlo/ir/replica_group.cc, hlo/ir/mesh_and_axis.cc).
    """
    found = _GROUPS.search(attributes)
    return _parsed(*found.groups()) if found else (tuple(range(devices)),)


@functools.lru_cache
def _parsed(attribute: str, text: str) -> Groups:
    if attribute == "source_target_pairs":
        group_of: dict[int, set[int]] = {}
        for source, target in np.reshape(_ints(text), (-1, 2)).tolist():
            merged = group_of.get(source, {source}) | group_of.get(target, {target})
            group_of.update(dict.fromkeys(merged, merged))
        return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))
    if text.startswith("{"):
        return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]+)\}", text))
    if text.startswith("["):
        shape, source = text.split("<=")
        rows = _iota(source).reshape(_ints(shape))
    else:
        rows = _along(*text.rsplit(" {", 1))
    return tuple(map(tuple, rows.tolist()))


def _along(mesh: str, axes: str) -> np.ndarray:
    """Return the groups of devices along some axes of a mesh, one in a row."""
    sizes = {name: int(n) for name, n in re.findall(r"'?([^',\[\]=]+)'?=(\d+)", mesh.split("]")[0])}
    devices = np.arange(math.prod(sizes.values()))
    if ids := re.search(r"device_ids=\((.*)\)", mesh):
        devices = np.ravel(_iota(ids[1]) if ids[1].startswith("[") else _ints(ids[1]))
    along = [[*sizes].index(name) for name in re.findall("[^', }]+", axes)]
    others = [axis for axis in range(len(sizes)) if axis not in along]
    grid = devices.reshape(*sizes.values()).transpose(*others, *along)
    return grid.reshape(math.prod(grid.shape[: len(others)]), -1)


def _iota(text: str) -> np.ndarray:
    """Parse [4,2]T(1,0): 0, 1, 2, ... in that shape, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


_COMPUTATION = re.compile(r"^\s*(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
# The fields of `Instruction`. Parentheses in the arguments are of layouts: no comma follows them.
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\((.*?)\)(,.*)?$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
ATTRIBUTES = {
    # The name that JAX gave to an operation, such as jit(update)/jvp()/dot_general.
    "source": r'op_name="([^"]*)"',
    "condition": r"condition=%?([\w.-]+)",
    "index": r"\bindex=(\d+)",
    "trips": r'(?:known_trip_count"?[=:]\s*\{"?n"?:\s*"?|\btimes_(?=\d+/while"))(\d+)',
    "target": r'custom_call_target="([^"]+)"',
    "fusion": r"kind=k(\w+)",
    "summed": r"lhs_contracting_dims=\{([\d,]*)\}",
    "kernel": r"dim_labels=\w+_(\w+)->",
    "batch groups": r"batch_group_count=(\d+)",
    # Attention by cuDNN, a custom call: the shape of its scores, which it does not store.
    "scores": r'"intermediate_tensor_shape".*?"dimensions": ?\[(.*?)\]',
    # Of a collective that a TPU runs beside products, in the fusions of its chain.
    "chain": r'chain_id="(\d+)"',
}
"""What is read of an operation's attributes (`Instruction.find`)."""

NEAR = "S(1)"  # in a layout: the array is in a TPU's vector memory, not in its large one
SLICES = ("dynamic-slice", "slice", "gather")


class Array(NamedTuple):
    """An array in the text of a shape, by XLA's name of its dtype."""

    dtype: str
    dims: list[int]
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Return the bytes in the large memory of a device."""
        return 0 if NEAR in self.layout else self.elements * bits(self.dtype) // 8


class Instruction(NamedTuple):
    """An operation. root: "ROOT " if its result is that of the computation; arguments: the text in
    its parentheses; attributes: the rest of its line.
    """

    root: str
    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def called(self) -> list[str]:
        """Return the names of the computations that it runs; a loop's condition is none of them."""
        return re.findall(r"[\w.-]+", " ".join(_CALLED.findall(self.attributes)))

    def find(self, attribute: str) -> str:
        """Return the text of one of ATTRIBUTES; "" if there is none."""
        found = re.search(ATTRIBUTES[attribute], self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]


class CompiledProgram:
    """A program, from XLA's text. Raises ValueError if that is not one.

    Attributes:
        computations: by name; `entry` is the name of the program itself.
        devices: that run it.
    """

    def __init__(self, text: str):
        self.computations: defaultdict[str, Computation] = defaultdict(dict)
        self.entry, self.devices, where = "", 1, ""
        for line in text.splitlines():
            line = re.sub(r"/\*.*?\*/", "", line).rstrip()
            if line.startswith("HloModule"):
                counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", line)
                self.devices = math.prod(map(int, counts))
            elif header := _COMPUTATION.match(line):
                where = header[2]
                self.entry = where if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                x = Instruction(*found.groups(""))
                self.computations[where][x.name] = x
        if not self.entry:
            raise ValueError("no ENTRY computation: this is not the text of a compiled program")
        for computation in self.computations.values():
            self.unfold_chains(computation)

    def unfold_chains(self, computation: Computation) -> None:
        """Make a start and a done of the fusions in which a TPU runs a collective beside products.

        XLA repeats the collective in each fusion of a chain: the first starts it, the last waits
        for it, and each between them has a product beside which it goes on.
        """
        starts: dict[str, str] = {}
        for x in computation.values():
            if x.opcode != "fusion":
                continue
            inner = self.computations[x.called[0]]
            targets = {y.find("target") for y in inner.values()}
            for y in inner.values():
                if not (chain := y.find("chain")):
                    continue
                if "AsyncCollectiveStart" in targets:
                    starts[chain] = x.name
                    computation[x.name] = x._replace(opcode="async-start")
                elif "AsyncCollectiveDone" in targets:
                    started = f"%{starts[chain]}"
                    computation[x.name] = x._replace(opcode="async-done", arguments=started)
                else:
                    inner[y.name] = y._replace(opcode="async-update")

    def inner(self, x: Instruction) -> list[Instruction]:
        """Return the operations of the computations that an operation runs."""
        return [y for name in x.called for y in self.computations[name].values()]

    def trips(self, where: str, x: Instruction) -> int | None:
        """Return the iterations of a loop; None if they are not known.

        XLA does not state the number of a loop of which it has peeled some off: then the condition
        reads a counter alone, which runs from a constant to another.
        """
        if stated := x.find("trips"):
            return int(stated)
        condition = self.computations[x.find("condition")].values()
        operations = [z for y in condition for z in (y, *self.inner(y))]
        read = [y for y in operations if y.opcode == "get-tuple-element"]
        ends = [y for y in operations if y.opcode == "constant"]
        is_counted = any("direction=LT" in y.attributes for y in operations)
        around = self.computations[where]
        start = around.get(x.operands[0])
        if not (is_counted and len(read) == len(ends) == 1 and start and start.opcode == "tuple"):
            return None
        first = around[start.operands[int(read[0].find("index"))]]
        while first.opcode == "copy":
            first = around[first.operands[0]]
        bounds = first, ends[0]
        if not all(y.opcode == "constant" and y.shape.startswith(("s", "u")) for y in bounds):
            return None
        return max(0, int(ends[0].arguments) - int(first.arguments))

    def unknown_loops(self) -> list[str]:
        """Return the loops whose iterations are not known, by their sources."""
        return [
            x.find("source") or x.name
            for where, inner in self.computations.items()
            for x in inner.values()
            if x.opcode == "while" and self.trips(where, x) is None
        ]

    def flops(self, where: str, x: Instruction) -> Counter[str]:
        """Return the FLOPs of an operation's products, by the peak of the hardware that they have:
        the dtype of their operands; "tensorfloat32" for float32, unless in full precision."""
        total = Counter[str]()
        if x.opcode in ("dot", "convolution"):
            left, right = (
                arrays(self.computations[where][name].shape)[0] for name in x.operands[:2]
            )
            dtype = numpy_name(left.dtype)
            if dtype == "float32" and "highest" not in x.attributes:
                dtype = "tensorfloat32"
            summed = [left.dims[d] for d in _ints(x.find("summed"))]
            if x.opcode == "convolution":
                summed = [summed_over(x, right.dims)]
            [result] = arrays(x.shape)
            groups = int(x.find("batch groups") or 1)
            total[dtype] += 2 * result.elements * math.prod(summed) // groups
        elif x.opcode in ("fusion", "call", "async-start"):
            for name in x.called:
                for inner in self.computations[name].values():
                    total += self.flops(name, inner)
        elif scores := x.find("scores"):
            products = 5 if "SoftmaxBackward" in x.attributes else 2
            width = arrays(x.shape)[0].dims[-1]
            total["bfloat16"] += 2 * products * math.prod(_ints(scores)) * width
        return total

    def traffic(self, where: str, x: Instruction) -> int:
        """Return the bytes of the device's memory that an operation reads and writes.

        A fusion reads only the slices of an operand that it only slices, and writes only the update
        of a result that it updates in place.
        """
        operands = [self.computations[where][name] for name in x.operands]
        if x.opcode in ("copy-start", "slice-start"):  # between the memories of a TPU
            return arrays(x.shape)[0]._replace(layout="").bytes
        if x.opcode in SLICES:
            return 2 * size(x.shape)
        if x.opcode == "dynamic-update-slice":
            return 2 * size(operands[1].shape)
        if x.opcode != "fusion":
            return size(x.shape) + sum(size(operand.shape) for operand in operands)

        inner = self.computations[x.called[0]]
        read = Counter[str]()
        for user in inner.values():
            for name in user.operands:
                read[name] += _read(inner[name], user)
        total = 0
        for parameter in inner.values():
            if parameter.opcode == "parameter":
                outer = operands[int(parameter.arguments)]
                total += min(size(outer.shape), read[parameter.name])

        [root] = [y for y in inner.values() if y.root]
        results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for y, array in zip(results, arrays(x.shape)):
            is_update = y.opcode == "dynamic-update-slice"
            total += size(inner[y.operands[1]].shape) if is_update else array.bytes
        return total


def _read(operand: Instruction, user: Instruction) -> int:
    """Return the bytes of an operand that an operation of a fusion reads."""
    if user.operands[0] == operand.name:
        if user.opcode in SLICES:
            return size(user.shape)
        if user.opcode == "dynamic-update-slice":
            return 0  # the result takes its place
    return size(operand.shape)


def arrays(shape: str) -> list[Array]:
    """Return each array in the text of a shape."""
    return [Array(dtype, _ints(dims), layout) for dtype, dims, layout in _ARRAY.findall(shape)]


def size(shape: str) -> int:
    """Return the bytes of a shape in the large memory of a device."""
    return sum(array.bytes for array in arrays(shape))


def bits(dtype: str) -> int:
    return 8 if dtype == "pred" else _ints(dtype)[0]


def numpy_name(dtype: str) -> str:
    """Convert an XLA dtype: bf16 -> bfloat16, f8e4m3fn -> float8_e4m3fn, s32 -> int32."""
    letters, number, variant = re.findall(r"([a-z]+)(\d*)(\w*)", dtype)[0]
    long = {"pred": "bool", "f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    return long.get(letters, letters) + number + (variant and f"_{variant}")


def summed_over(x: Instruction, kernel: list[int]) -> int:
    """Return the elements of a convolution's kernel, of these dims, that each element of the result
    is a sum over. On TPUs every product is a convolution; padding counts.

    Of a product of stacks of matrices, the dims of the stack are those of a dilated window: each
    element of the result meets one of its positions.
    """
    is_stack = "lhs_dilate" in x.attributes
    dims = zip(x.find("kernel"), kernel)
    return math.prod(n for dim, n in dims if dim == "i" or (dim.isdigit() and not is_stack))
