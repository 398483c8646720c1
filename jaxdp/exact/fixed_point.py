"""Fixed-point numbers: integers of a given number of bits, whose sums are equal in any order and
take few bytes.

    q = round(g x limit / 2^exponent),      total = (sum of q) x 2^exponent / limit

`limit` is the largest integer whose sum over all summands fits the format. Every device must know
the exponent beforehand: IntSGD (arXiv 2102.08374) adapts one scale, SwitchML (NSDI 2021) stores
exponents; we store one exponent per leaf of gradients. Values (losses, metrics, model state) are
small: each element has an exponent of its own. Norms are summed in digits, after Ahrens, Demmel &
Nguyen (ACM TOMS 46(3), 2020)."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.exact.rounding import exactly, fusion_barrier, pin
from jaxdp.split import WHOLE

Tree = Any
ZERO, LARGEST = (
    -90,
    100,
)  # binary exponents: smaller values count as zero, larger ones as not finite
NOT_FINITE = 1 << 16  # in place of an exponent; exponents count from ZERO
PER_BIT = 16  # updates until a stored exponent falls by one
NEAR = 4  # bits above the needed exponent and its headroom, from which a stored one falls faster
DIGITS, DIGIT, ROW = (
    3,
    16,
    2**16,
)  # digits of a float32's square, bits per digit, digits that a uint32 can sum


class Format(NamedTuple):
    """A fixed-point format. bits: of an element in the all-reduce. headroom: added to the exponent
    that was needed. stochastic: round up or down at random, by the microbatch's key; the mean is
    exact."""

    bits: int
    headroom: int
    stochastic: bool

    def wire(self, dtype: Any) -> Any:
        """Return the dtype of the all-reduce for sums in integers of this dtype."""
        return jnp.dtype(dtype) if self.bits == 32 else jnp.dtype(f"int{self.bits}")


FORMATS = {
    "exact": Format(32, 3, False),
    "exact16": Format(16, 2, True),
    "exact8": Format(8, 1, True),
}


def quantized(
    tree: Tree, exponents: jax.Array, form: Format, summands: int, key: jax.Array | None = None
) -> Tree:
    """Quantize every leaf. exponents [leaf]: in units of 1/PER_BIT, as stored in the state."""
    leaves, treedef = jax.tree.flatten(tree)
    bits = in_bits(exponents)
    keys = [None if key is None else jax.random.fold_in(key, i + 2) for i in range(len(leaves))]
    return jax.tree.unflatten(
        treedef, [quantize(x, e, form, summands, k) for x, e, k in zip(leaves, bits, keys)]
    )


@functools.partial(jax.jit, static_argnums=(2, 3))  # traced once for each shape
def quantize(
    x: jax.Array, exponent: jax.Array, form: Format, summands: int, key: jax.Array | None = None
) -> jax.Array:
    """Quantize x [...] to int32 [...] (float64 in 32 bits: int64), so that `summands` of them sum
    without overflow.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    limit, power = limit_of(x.dtype.itemsize * 8 if form.bits == 32 else form.bits, summands)
    scaled = x * (limit * power_of_two(power - exponent - ZERO, x.dtype))
    rounded = jnp.round(scaled) if key is None else jnp.floor(scaled + uniform(key, x.shape))
    return rounded.astype(jnp.int64 if form.bits == 32 and x.dtype == jnp.float64 else jnp.int32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def restore(x: jax.Array, exponent: jax.Array, form: Format, summands: int) -> jax.Array:
    """Convert a sum of quantized numbers back to floats: NaN where the exponent is NOT_FINITE."""
    dtype = jnp.float64 if x.dtype == jnp.int64 else jnp.float32
    limit, power = limit_of(x.dtype.itemsize * 8 if form.bits == 32 else form.bits, summands)
    unit = jnp.where(
        exponent == NOT_FINITE, jnp.nan, power_of_two(exponent + ZERO - power, dtype) / limit
    )
    return x.astype(dtype) * unit


@functools.partial(jax.jit, static_argnums=2)
def quantize_values(x: jax.Array, exponent: jax.Array, summands: int) -> jax.Array:
    """Quantize values [row, ...] with the exponent [...] of each element (`largest_exponent`) to
    int32 or int64.

    An element that is not finite in some row is a count instead: 1 for inf, `summands` + 1 for
    -inf, both for NaN."""
    low, high = _halves(limit_of(x.dtype.itemsize * 8, summands)[1] - exponent, x.dtype)

    def counted(sign):
        return ~jnp.isfinite(x) & ~(sign * x < 0)  # NaN has both signs

    counts = counted(1).astype(jnp.int32) + (summands + 1) * counted(-1).astype(jnp.int32)
    integers = jnp.round(x * low * high).astype(jnp.int64 if x.dtype == jnp.float64 else jnp.int32)
    return jnp.where(exponent > jnp.finfo(x.dtype).maxexp, counts.astype(integers.dtype), integers)


@functools.partial(jax.jit, static_argnums=2)
def restore_values(x: jax.Array, exponent: jax.Array, summands: int) -> jax.Array:
    """Convert sums [...] of `quantize_values` back to floats; inf, -inf and NaN are those of a sum
    of floats.
    """
    dtype = jnp.float64 if x.dtype == jnp.int64 else jnp.float32
    low, high = _halves(exponent - limit_of(x.dtype.itemsize * 8, summands)[1], dtype)
    positive, negative = x % (summands + 1) > 0, x > summands
    infinite = jnp.where(positive & negative, jnp.nan, jnp.where(negative, -jnp.inf, jnp.inf))
    return jnp.where(
        exponent > jnp.finfo(dtype).maxexp, infinite.astype(dtype), x.astype(dtype) * low * high
    )


def _halves(exponent: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return two floats whose product is 2^exponent, which may be out of their range."""
    return power_of_two(exponent // 2, dtype), power_of_two(exponent - exponent // 2, dtype)


def limit_of(bits: int, summands: int) -> tuple[float, int]:
    """Return (m, e), 1 <= m < 2: the sum of `summands` integers up to m x 2^e fits into `bits` with
    a sign. From 32 bits on, m is 1, so that integers stay exact."""
    limit = (2 ** (bits - 1) - 1) // summands
    power = limit.bit_length() - 1
    return (1.0 if bits >= 32 else limit / 2**power), power


@exactly
def exponent_of(x: jax.Array) -> jax.Array:
    """Return the least exponent, from ZERO, whose power of two exceeds all elements, or NOT_FINITE;
    0 for integers.
    """
    if not is_float(x):
        return jnp.int32(0)
    exponent = largest_exponent(x)
    return jnp.where(exponent <= LARGEST, jnp.maximum(exponent - ZERO, 0), NOT_FINITE)


def largest_exponent(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the least exponent whose power of two exceeds all elements along the axis; above the
    `maxexp` of the dtype if one is not finite."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    kind, mantissa, bias = (jnp.int64, 52, 1022) if x.dtype == jnp.float64 else (jnp.int32, 23, 126)
    bits = (
        jax.lax.bitcast_convert_type(x, kind) & jnp.iinfo(kind).max
    )  # of |x|: ordered like the numbers
    return ((jnp.max(bits, axis, initial=0) >> mantissa) - bias).astype(jnp.int32)


def in_bits(exponents: jax.Array) -> jax.Array:  # from units of 1/PER_BIT, rounded up
    return -(-exponents // PER_BIT)


def remembered(exponents: jax.Array, needed: jax.Array, headroom: int) -> jax.Array:
    """Return the next update's exponents: the needed ones plus headroom, falling slowly.

    They fall by 1/PER_BIT an update and by half of what is above NEAR bits. After gradients of zero
    only the first applies, since a leaf that is not always used soon needs its exponent again.
    """
    raised = jnp.where(needed == NOT_FINITE, exponents, (needed + headroom) * PER_BIT)
    excess = jnp.where(needed > 0, exponents - raised - NEAR * PER_BIT, 0)
    return jnp.maximum(raised, exponents - 1 - jnp.maximum(excess, 0) // 2)


def fits(exponents: jax.Array, needed: jax.Array, form: Format, summands: int) -> jax.Array:
    """Return for each leaf whether its gradients are not too large for its exponent, and not so
    small that most bits would be lost. Gradients of zero, or not finite, fit."""
    bits, (_, power) = in_bits(exponents), limit_of(form.bits, summands)
    coarse = (needed > 0) & (bits > needed + form.headroom + max(2 * NEAR, power // 2))
    return (needed == NOT_FINITE) | (needed <= bits) & ~coarse


def power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """Return 2^exponent, exactly."""
    if jnp.dtype(dtype) == jnp.float64:
        return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return random numbers [...] in (0, 1) of 8 bits each: four from each random word."""
    size = math.prod(shape)
    words = jax.random.bits(key, (-(-size // 4),), jnp.uint32)
    bytes_ = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:size]
    return ((bytes_.astype(jnp.float32) + 0.5) / 256).reshape(shape)


def pack(x: jax.Array) -> jax.Array:
    """Pack integers [..., n] into unsigned words [..., ceil(n / lanes)] whose sums are the sums in
    each lane.

    A negative lane borrows from the lane above; `unpack` returns the loan, so no offset is needed.
    """
    assert jnp.issubdtype(x.dtype, jnp.integer), x.dtype
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    lanes, bits = 4 // x.dtype.itemsize, 8 * x.dtype.itemsize
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)]).astype(jnp.int32)
    parts = padded.reshape(*x.shape[:-1], lanes, -1)
    words = functools.reduce(jnp.add, (parts[..., i, :] << bits * i for i in range(lanes)))
    return jax.lax.bitcast_convert_type(words, jnp.uint32)


def unpack(words: jax.Array, dtype: Any, size: int) -> jax.Array:
    """Invert `pack`: return integers [..., size]."""
    bits = 8 * jnp.dtype(dtype).itemsize
    if bits >= 32:
        return jax.lax.bitcast_convert_type(words, dtype)
    rest = jax.lax.bitcast_convert_type(words, jnp.int32)
    lanes = []
    for _ in range(32 // bits):
        low = (rest << 32 - bits) >> 32 - bits  # with its sign
        lanes.append(low)
        rest = (rest - low) >> bits
    return jnp.concatenate(lanes, -1)[..., :size].astype(dtype)


def squares_and_bad(tree: Tree, dims: Tree, axis: str, live: jax.Array) -> jax.Array:
    """Return [2]: the sum of squares and the number of non-finite elements; leaves are replicated
    or slices along dims.

    Relative to the largest element, a square is a few digits; digits are summed as integers, at
    most 2^32 of them."""
    leaves = jax.tree.leaves(tree)
    dims = [WHOLE] * len(leaves) if dims is None else jax.tree.leaves(dims)
    split = any(d != WHOLE for d in dims)
    if (
        sum(x.size * (1 if d == WHOLE else jax.lax.axis_size(axis)) for x, d in zip(leaves, dims))
        > ROW**2
    ):
        raise UsageError(
            f"parallel.reduction: exact sums squares of at most {ROW**2:,} parameters; use xla or bucket"
        )
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in leaves), jnp.float32)
    first = jax.lax.axis_index(axis) == 0 if split else True  # replicated leaves count once
    leaves = [
        x.astype(dtype) if d != WHOLE else jnp.where(first, x.astype(dtype), 0)
        for x, d in zip(leaves, dims)
    ]
    finite = [jnp.isfinite(x) for x in leaves]
    values = [jnp.where(ok, x, 0) for ok, x in zip(finite, leaves)]
    needed = functools.reduce(jnp.maximum, (exponent_of(x) for x in values), jnp.int32(0))
    bad = sum((jnp.sum(~ok, dtype=jnp.int32) for ok in finite), jnp.int32(0))
    needed = fusion_barrier(jax.lax.pmax(needed, axis) if split else needed, live)
    unit = power_of_two(-needed - ZERO, dtype)
    rows = sum((digits_of(x * unit, live) for x in values), jnp.zeros((), jnp.uint32))
    if split:
        rows, bad = jax.lax.psum((rows, bad), axis)
    terms = [x.astype(dtype) * 2.0 ** (-DIGIT * i) for i, x in enumerate(propagate_carries(rows))]
    size = power_of_two(needed + ZERO, dtype)
    squares = functools.reduce(jnp.add, terms) * size * size
    squares = jnp.where((bad > 0) | (needed == NOT_FINITE), jnp.nan, squares)
    return fusion_barrier(jnp.stack([squares, bad.astype(dtype)]), live)


@exactly
def digits_of(x: jax.Array, live: jax.Array) -> jax.Array:
    """Sum the squares of numbers below 1, as uint32 [digit, 2]: the low DIGIT bits of row sums, and
    the bits above.
    """
    rest = pin(jnp.square(x), live).reshape(-1)
    rest = jnp.pad(rest, (0, -rest.size % ROW)).reshape(-1, ROW) if rest.size > ROW else rest[None]
    digits = []
    for _ in range(DIGITS * x.dtype.itemsize // 4):
        rest = rest * 2.0**DIGIT
        digit = rest.astype(jnp.int32)  # the integer part
        rest = rest - digit.astype(rest.dtype)
        rows = digit.astype(jnp.uint32).sum(1, dtype=jnp.uint32)
        digits.append(jnp.stack([rows & (2**DIGIT - 1), rows >> DIGIT]).sum(1, dtype=jnp.uint32))
    return jnp.stack(digits)


def propagate_carries(rows: jax.Array) -> list[jax.Array]:
    """Convert sums of `digits_of` [digit, 2] to a leading digit and digits of DIGIT bits,
    independent of the order.
    """
    mask, carry = jnp.uint32(2**DIGIT - 1), jnp.uint32(0)
    digits = []
    for low, above in reversed([*zip(rows[:-1, 0], rows[1:, 1]), (rows[-1, 0], jnp.uint32(0))]):
        rest = (low & mask) + (above & mask) + (carry & mask)
        digits.append(rest & mask)
        carry = (low >> DIGIT) + (above >> DIGIT) + (carry >> DIGIT) + (rest >> DIGIT)
    return [rows[0, 1] + carry, *reversed(digits)]


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
