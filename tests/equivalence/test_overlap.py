"""A block's gradients travel while those of the block below are computed: in the compiled program,
their sum over the devices needs nothing that the same iteration of the backward loop computes.

Whether a backend then runs both at once is its scheduler's choice; a sum that needs the iteration's
own products could never be hidden.
"""

import re

import pytest

from covering import first
from programs import compiled

REDUCES = "all-reduce", "reduce-scatter"
CALLS = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)")


def computations(text):
    """{computation: {operation: (kind, operands, the line)}}"""
    found = {}
    for part in text.split("\n\n"):
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", part.strip())
        lines = [OPERATION.match(line) for line in part.splitlines()]
        if head:
            found[head[1]] = {
                m[1]: (m[3], re.findall(r"%([\w.\-]+)", m[4].split("), ")[0]), m[0] + m[4])
                for m in lines
                if m
            }
    return found


def has_product(line, all_computations):
    """Whether an operation computes a matrix product, or calls what does."""
    inside = (all_computations.get(name, {}) for name in CALLS.findall(line))
    return " dot(" in line or any(
        has_product(one, all_computations) for part in inside for _, _, one in part.values()
    )


def sums_in_loops(text):
    """[(does it need a product of its iteration?, are there any?)] of the sums in loops over
    blocks."""
    parts, found = computations(text), []
    for name, operations in parts.items():
        is_body = re.search(rf"body=%?{re.escape(name)}\b", text)
        if not is_body or any(kind == "while" for kind, _, _ in operations.values()):
            continue  # a loop over microbatches, around that over blocks
        products = {x for x, (_, _, line) in operations.items() if has_product(line, parts)}
        for operation, (kind, _, _) in operations.items():
            if kind.removesuffix("-start") in REDUCES:
                needed, ahead = set(), [operation]
                while ahead:
                    one = ahead.pop()
                    if one in operations and one not in needed:
                        needed.add(one)
                        ahead += operations[one][1]
                found.append((bool(needed & products), bool(products)))
    return found


@pytest.mark.parametrize("accumulate", first(1, ["scan", "vmap"]))
@pytest.mark.parametrize("zero", first(1, [0, 3, 1, 2]))
def test_a_blocks_reduction_overlaps_its_iteration(zero, accumulate):
    program = compiled(zero=zero, accumulate=accumulate, layers=4)
    sums = sums_in_loops(program.text)
    assert sums and all(products and not needs for needs, products in sums), sums
