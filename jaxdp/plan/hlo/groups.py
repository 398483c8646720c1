"""Parsing of replica groups: XLA prints a partition of the devices in four syntaxes."""

import functools
import itertools
import math
import re

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
        return _rows(_iota(source).reshape(_ints(shape)))
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
    return _rows(cube.reshape(-1, math.prod(end // begin for _, begin, end in chosen)))


def _iota(text: str) -> np.ndarray:
    """Parse [4,2]T(1,0): 0, 1, 2, ... in that shape, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))
