"""Covers: few combinations in which any two (or three) values of different factors meet at least once."""

import itertools

import pytest


def cover(allowed=lambda row: True, strength=2, **factors):
    """A list of {factor: value}, chosen greedily. allowed: which rows there are. strength: how many values meet."""
    everything = product(allowed, **factors)
    covered = [
        {tuple((k, row[k]) for k in keys) for keys in itertools.combinations(factors, strength)} for row in everything
    ]
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
    """Rows of which all but the first are slow: those of a cover, where more values meet than in any that follow."""
    return [*rows[:count], *(pytest.param(row, marks=pytest.mark.slow) for row in rows[count:])]
