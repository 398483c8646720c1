"""A pairwise cover: few combinations in which every pair of values of two factors meets at least once."""

import itertools


def pairwise(allowed=lambda row: True, **factors):
    """A list of {factor: value}; greedy, deterministic. allowed: which rows there are."""
    everything = product(allowed, **factors)
    covered = [{(a, row[a], b, row[b]) for a, b in itertools.combinations(factors, 2)} for row in everything]
    pairs = set().union(*covered)
    rows = []
    while pairs:
        best = max(range(len(everything)), key=lambda i: len(covered[i] & pairs))
        rows.append(everything[best])
        pairs -= covered[best]
    return rows


def product(allowed=lambda row: True, **factors):
    return [row for values in itertools.product(*factors.values()) if allowed(row := dict(zip(factors, values)))]
