"""Covers: few combinations in which any two (or three) values of different factors meet at least once."""

import itertools

import pytest


def cover(allowed=lambda row: True, **factors):
    """Choose rows {factor: value} greedily until any two values of different factors meet. allowed: the valid rows."""
    everything = product(allowed, **factors)
    covered = [{tuple((k, row[k]) for k in keys) for keys in itertools.combinations(factors, 2)} for row in everything]
    left = set().union(*covered)
    gains, rows = [len(c) for c in covered], []
    while left:
        best = max(range(len(everything)), key=gains.__getitem__)
        while gains[best] != (now := len(covered[best] & left)):  # what a row would add only ever gets less
            gains[best] = now
            best = max(range(len(everything)), key=gains.__getitem__)
        rows.append(everything[best])
        left -= covered[best]
    return rows


def product(allowed=lambda row: True, **factors):
    return [row for values in itertools.product(*factors.values()) if allowed(row := dict(zip(factors, values)))]


def first(count, rows):
    """Mark all rows but the first as slow. In a cover, the first rows are those in which most values meet."""
    return only(rows[:count], rows)


def only(quick, rows):
    """Mark every row that is not in `quick` as slow."""
    quick = list(quick)
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]
