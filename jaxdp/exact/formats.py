"""The fixed-point formats of the exact reductions. This module does not import JAX."""

from typing import NamedTuple


class Format(NamedTuple):
    """A fixed-point format. bits: of an element, in every sum; 32: as many as its float has.
    headroom: added to the exponent that was needed. stochastic: round up or down at random, by the
    microbatch's key; the mean is exact."""

    bits: int
    headroom: int
    stochastic: bool


FORMATS = {
    "exact": Format(32, 3, False),
    "exact16": Format(16, 2, True),
    "exact8": Format(8, 1, True),
}


def most_summands(reduction: str) -> int:
    """Return how many summands leave 3 bits for each, which hold numbers up to 7."""
    return (2 ** (FORMATS[reduction].bits - 1) - 1) // 7
