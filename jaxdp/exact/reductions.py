"""The exact reductions by their names in a config."""

import functools

from jaxdp.exact.fixed_point import FORMATS
from jaxdp.exact.integer_sums import integers

exact, exact16, exact8 = (functools.partial(integers, name) for name in FORMATS)
