"""Covers: few combinations in which any two (or three) values of different factors meet at least
once.
"""

import itertools
import random

import pytest


def cover(allowed=lambda row: True, **factors):
    """Choose rows {factor: value} until any two values of different factors meet. allowed: the
    valid rows.

    Greedy over a sample of the valid rows, then a row for each pair that the sample lacks.
    """
    everything = product(allowed, **factors)
    names = list(itertools.combinations(factors, 2))

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in names}

    missing = {(a, row[a], b, row[b]) for a, b in names for row in everything}
    candidates = [
        (row, pairs(row)) for row in random.Random(0).sample(everything, min(len(everything), 200))
    ]
    rows = []
    while missing:
        row, covered = max(candidates, key=lambda c: len(c[1] & missing))
        if not covered & missing:
            row, covered = next((r, pairs(r)) for r in everything if pairs(r) & missing)
        rows.append(row)
        missing -= covered
    return rows


def product(allowed=lambda row: True, **factors):
    return [
        row
        for values in itertools.product(*factors.values())
        if allowed(row := dict(zip(factors, values)))
    ]


def first(count, rows):
    """Mark all rows but the first as slow. In a cover, the first rows are those in which most
    values meet.
    """
    return only(rows[:count], rows)


def only(quick, rows):
    """Mark every row that is not in `quick` as slow."""
    quick = list(quick)
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]


def name(row):
    """The id of a row."""
    return "-".join(str(v) for v in row.values())
