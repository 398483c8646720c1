"""A pairwise cover: few combinations in which every pair of values of two factors meets at least once."""

import itertools


def pairwise(**factors):
    """A list of {factor: value}; greedy, deterministic."""
    names = list(factors)
    pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    rows = []
    everything = [dict(zip(names, values)) for values in itertools.product(*factors.values())]
    covered = lambda row: {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
    while pairs:
        best = max(everything, key=lambda row: len(covered(row) & pairs))
        rows.append(best)
        pairs -= covered(best)
    return rows


def product(**factors):
    return [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
