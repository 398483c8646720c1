"""The operations of a program that XLA has compiled, read from its text: what each of them computes,
reads and writes, and which devices exchange data: XLA prints groups in four syntaxes."""

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_ATTRIBUTE = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\](?:, ?device_ids=\(.*?\))? \{.*?\})"
)


def replica_groups(attributes: str, devices: int) -> Groups:
    """Return the groups of a collective in HLO text; without the attribute, all `devices` are one
    group.

    {{0,1},{2,3}}; [2,4]<=[4,2]T(1,0), an iota reshaped and transposed; mesh['r'=2,'d'=4] {'d'}, the
    axes that a group runs along, perhaps with device_ids=(...); source_target_pairs={{0,1},{1,0}},
    the devices that the pairs connect (XLA: hlo/ir/replica_group.cc, hlo/ir/mesh_and_axis.cc).
    """
    attribute = _ATTRIBUTE.search(attributes)
    if attribute is None or attribute[1] == "{}":
        return (tuple(range(devices)),)
    return _connected(attribute[1]) if attribute[0].startswith("source") else _parsed(attribute[1])


@functools.lru_cache
def _connected(pairs: str) -> Groups:
    group_of: dict[int, set[int]] = {}
    for pair in re.findall(r"\d+,\d+", pairs):
        source, target = _ints(pair)
        merged = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(merged, merged))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


@functools.lru_cache
def _parsed(text: str) -> Groups:
    if text.startswith("{"):
        return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]+)\}", text))
    if text.startswith("["):
        shape, source = text.split("<=")
        return tuple(map(tuple, _iota(source).reshape(_ints(shape)).tolist()))
    return _along(*text.rsplit(" {", 1))


def _along(mesh: str, axes: str) -> Groups:
    """Return the groups of devices along some axes of a mesh.

    A sub-axis 'd':(pre)size is the dim of that size in d reshaped to [pre, size, rest]; several may
    cut one axis. So each axis is cut where any of them begins or ends: `dims` has a name, a
    beginning and an end per piece."""
    sizes = {name: int(n) for name, n in re.findall(r"'?([^',\[\]=]+)'?=(\d+)", mesh.split("]")[0])}
    ids = re.search(r"device_ids=\((.*)\)", mesh)
    order = np.arange(math.prod(sizes.values()))
    if ids:
        order = _iota(ids[1]) if ids[1].startswith("[") else np.array(_ints(ids[1]))
    chosen = [
        (name, int(pre or 1), int(pre or 1) * int(size or sizes[name]))
        for name, pre, size in re.findall(r"'?([^',{}:()]+)'?(?::\((\d+)\)(\d+))?'?(?=[,}])", axes)
    ]
    dims: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        cuts = sorted({1, size} | {cut for axis, *ends in chosen if axis == name for cut in ends})
        dims += [(name, begin, end) for begin, end in itertools.pairwise(cuts)] or [(name, 1, 1)]
    inside = [dims.index(axis) for axis in chosen]
    outside = [i for i in range(len(dims)) if i not in inside]
    cube = order.reshape([end // begin for _, begin, end in dims]).transpose(outside + inside)
    rows = cube.reshape(-1, math.prod(end // begin for _, begin, end in chosen))
    return tuple(map(tuple, rows.tolist()))


def _iota(text: str) -> np.ndarray:
    """Parse [4,2]T(1,0): 0, 1, 2, ... in that shape, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


_COMPUTATION = re.compile(r"^\s*(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?[=:]\s*\{"?n"?:\s*"?(\d+)|\btimes_(\d+)/while"')
# Attention by cuDNN, a custom call: the shape of its scores, which it does not store.
_ATTENTION = re.compile(r'"intermediate_tensor_shape".*?"dimensions": ?\[(.*?)\]')
# Of a collective that a TPU runs beside products, in the fusions of its chain.
_CHAIN = re.compile(r'chain_id="(\d+)"')
NEAR = "S(1)"  # in a layout: the array is in a TPU's vector memory, not in its large one
SLICES = ("dynamic-slice", "slice", "gather")


class Instruction(NamedTuple):
    """An operation. arguments: the text in its parentheses; attributes: the rest of its line;
    called: the computations that it runs; conditions: the one that says whether a loop goes on.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool
    called: list[str]
    conditions: list[str]

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def source(self) -> str:
        """Return the name that JAX gave to the operation, such as jit(update)/jvp()/dot_general."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
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
                root, name, shape, opcode, rest = found.groups()
                arguments, attributes = _split(rest)
                called = " ".join(_CALLED.findall(attributes))
                self.computations[where][name] = Instruction(
                    name,
                    shape,
                    opcode,
                    arguments,
                    attributes,
                    is_root=root is not None,
                    called=re.findall(r"[\w.-]+", called),
                    conditions=re.findall(r"condition=%?([\w.-]+)", attributes),
                )
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
        for x in [*computation.values()]:
            if x.opcode != "fusion":
                continue
            inner = self.computations[x.called[0]]
            for y in [*inner.values()]:
                if found := _CHAIN.search(y.attributes):
                    inside = " ".join(z.attributes for z in inner.values())
                    if "AsyncCollectiveStart" in inside:
                        starts[found[1]] = x.name
                        computation[x.name] = x._replace(opcode="async-start")
                    elif "AsyncCollectiveDone" in inside:
                        started = f"%{starts[found[1]]}"
                        computation[x.name] = x._replace(opcode="async-done", arguments=started)
                    else:
                        inner[y.name] = y._replace(opcode="async-update")

    def trips(self, where: str, x: Instruction) -> int | None:
        """Return the iterations of a loop; None if they are not known."""
        if found := _TRIPS.search(x.attributes):
            return int(found[1] or found[2])
        return self.compared(where, x)

    def compared(self, where: str, x: Instruction) -> int | None:
        """Return the iterations of a loop whose number XLA does not state, since it has peeled some
        off: the condition compares a counter with a constant, and the counter begins at another.
        """
        operations = [y for name in x.conditions for y in self.computations[name].values()]
        inner = [
            z for y in operations for name in y.called for z in self.computations[name].values()
        ]
        ends = [y.arguments for y in [*operations, *inner] if y.opcode == "constant"]
        if len(ends) != 1 or not ends[0].isdigit():
            return None
        start = self.computations[where].get(x.operands[0])
        first = start and start.opcode == "tuple" and self.computations[where][start.operands[0]]
        began = first.arguments if first and first.opcode == "constant" else "0"
        return int(ends[0]) - int(began)

    def flops(self, where: str, x: Instruction) -> Counter[str]:
        """Return the FLOPs of an operation's products, by the dtype of their operands; those of
        float32 in full precision are "highest"."""
        total = Counter[str]()
        if x.opcode in ("dot", "convolution"):
            left, right = (self.computations[where][name].shape for name in x.operands[:2])
            dtype = numpy_name(arrays(left)[0][0])
            if dtype == "float32" and "highest" in x.attributes:
                dtype = "highest"
            count = dot_flops if x.opcode == "dot" else convolution_flops
            total[dtype] += count(x, left, right)
        elif x.opcode in ("fusion", "call", "async-start"):
            for name in x.called:
                for inner in self.computations[name].values():
                    total += self.flops(name, inner)
        elif scores := _ATTENTION.search(x.attributes):
            products = 5 if "SoftmaxBackward" in x.attributes else 2
            width = arrays(x.shape)[0][1][-1]
            total["bfloat16"] += 2 * products * math.prod(_ints(scores[1])) * width
        return total

    def traffic(self, where: str, x: Instruction) -> int:
        """Return the bytes of the device's memory that an operation reads and writes.

        A fusion reads only the slices of an operand that it only slices, and writes only the update
        of a result that it updates in place.
        """
        operands = [self.computations[where][name] for name in x.operands]
        if x.opcode in ("copy-start", "slice-start"):  # between the memories of a TPU
            dtype, dims, _ = arrays(x.shape)[0]
            return _bytes(dtype, dims, "")
        if x.opcode in SLICES:
            return 2 * size(x.shape)
        if x.opcode == "dynamic-update-slice":
            return 2 * size(operands[1].shape)
        if x.opcode != "fusion":
            return size(x.shape) + sum(size(operand.shape) for operand in operands)

        inner = self.computations[x.called[0]]
        users: defaultdict[str, list[Instruction]] = defaultdict(list)
        for user in inner.values():
            for name in user.operands:
                users[name].append(user)
        total = 0
        for parameter in inner.values():
            if parameter.opcode == "parameter":
                outer = operands[int(parameter.arguments)]
                parts = [_read(parameter, user) for user in users[parameter.name]]
                total += min(size(outer.shape), sum(parts))

        [root] = [y for y in inner.values() if y.is_root]
        results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for y, (dtype, dims, layout) in zip(results, arrays(x.shape)):
            if y.opcode == "dynamic-update-slice":
                total += size(inner[y.operands[1]].shape)
            else:
                total += _bytes(dtype, dims, layout)
        return total


def _read(parameter: Instruction, user: Instruction) -> int:
    """Return the bytes of a fusion's parameter that one of its operations reads."""
    if user.opcode in SLICES and user.operands[0] == parameter.name:
        return size(user.shape)
    if user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
        return 0  # the result takes its place
    return size(parameter.shape)


def _split(rest: str) -> tuple[str, str]:
    """Split what follows an opening parenthesis where that is closed."""
    depth = 1
    for i, c in enumerate(rest):
        depth += (c == "(") - (c == ")")
        if not depth:
            return rest[:i], rest[i + 1 :]
    return rest, ""


def arrays(shape: str) -> list[tuple[str, list[int], str]]:
    """Return (dtype, dims, layout) of each array in the text of a shape."""
    return [
        (dtype, [int(n) for n in dims.split(",") if n], layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    ]


def elements(shape: str) -> int:
    return sum(math.prod(dims) for _, dims, _ in arrays(shape))


def size(shape: str) -> int:
    """Return the bytes of a shape in the large memory of a device."""
    return sum(_bytes(*array) for array in arrays(shape))


def _bytes(dtype: str, dims: list[int], layout: str) -> int:
    if NEAR in layout:
        return 0
    return math.prod(dims) * bits(dtype) // 8


def bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def numpy_name(dtype: str) -> str:
    """Convert an XLA dtype: bf16 -> bfloat16, f8e4m3fn -> float8_e4m3fn, s32 -> int32."""
    if dtype == "pred":
        return "bool"
    letters, number, variant = re.findall(r"([a-z]+)(\d+)(\w*)", dtype)[0]
    long = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    return long.get(letters, letters) + number + (variant and f"_{variant}")


def dot_flops(x: Instruction, left: str, right: str) -> int:
    """Return the FLOPs of a dot: two for each element of the result and of the dims that are summed."""
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
    dims = arrays(left)[0][1]
    contracted = [dims[int(d)] for d in (found[1].split(",") if found else []) if d]
    return 2 * elements(x.shape) * math.prod(contracted)


def convolution_flops(x: Instruction, left: str, right: str) -> int:
    """Return the FLOPs of a convolution, which on TPUs every product is; padding counts.

    Of a product of stacks of matrices, the dims of the stack are those of a dilated window: each
    element of the result meets one of its positions.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    assert labels is not None
    shapes = [arrays(shape)[0][1] for shape in (left, right, x.shape)]
    _, kernel, outputs = (dict(zip(*pair)) for pair in zip(labels.groups(), shapes))
    is_stack = "lhs_dilate" in x.attributes
    window = 1 if is_stack else math.prod(n for dim, n in kernel.items() if dim.isdigit())
    groups = int((re.findall(r"batch_group_count=(\d+)", x.attributes) or ["1"])[0])
    return 2 * math.prod(outputs.values()) * kernel["i"] * window // groups
