"""Numbers as integers of a fixed number of bits: their sums are the same in any order, and may be sent in few bytes.

    q = round(g x limit / 2^exponent),      total = (sum of q) x 2^exponent / limit

`limit` is the most that so many summands may have each in an integer of the format. Every device must know the exponent
beforehand: IntSGD (arXiv 2102.08374) adapts one scale, SwitchML (NSDI 2021) remembers exponents; ours are remembered
for each leaf. Norms are summed in digits, after Ahrens, Demmel & Nguyen (ACM TOMS 46(3), 2020).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.parallel.rounding import pin, settle
from jaxdp.split import WHOLE

Tree = Any
ZERO, LARGEST = -90, 100  # binary exponents: what is smaller counts as zero, what is larger as not finite
NOT_FINITE = 1 << 16  # instead of an exponent; these count from ZERO
PER_BIT = 16  # updates in which a remembered exponent falls by one
DIGITS, DIGIT, ROW = 3, 16, 2**16  # of a float32's square: how many, their bits, and how many a uint32 can add up


class Format(NamedTuple):
    """bits: of an element on the wire. headroom: by how many an exponent exceeds what was needed. stochastic: rounded
    up or down at random, by the microbatch's key, right on average."""

    bits: int
    headroom: int
    stochastic: bool

    def wire(self, dtype: Any) -> Any:
        """The integers that travel, of sums in integers of this dtype."""
        return jnp.dtype(dtype) if self.bits == 32 else jnp.dtype(f"int{self.bits}")


FORMATS = {"exact": Format(32, 3, False), "exact16": Format(16, 2, True), "exact8": Format(8, 1, True)}


def quantized(tree: Tree, exponents: jax.Array, form: Format, summands: int, key: jax.Array | None = None) -> Tree:
    """The leaves as integers. exponents [leaf]: in 1/PER_BIT, as they are remembered."""
    leaves, treedef = jax.tree.flatten(tree)
    used = in_bits(exponents)
    keys = [None if key is None else jax.random.fold_in(key, i + 2) for i in range(len(leaves))]
    return jax.tree.unflatten(treedef, [quantize(x, e, form, summands, k) for x, e, k in zip(leaves, used, keys)])


def quantize(x: jax.Array, exponent: jax.Array, form: Format, summands: int, key: jax.Array | None = None) -> jax.Array:
    """x [...] -> int32 (int64 of a float64 in 32 bits) [...], of which so many can be added up."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    limit, power = limit_of(x.dtype.itemsize * 8 if form.bits == 32 else form.bits, summands)
    scaled = x * (limit * power_of_two(power - exponent - ZERO, x.dtype))
    whole = jnp.round(scaled) if key is None else jnp.floor(scaled + uniform(key, x.shape))
    return whole.astype(jnp.int64 if form.bits == 32 and x.dtype == jnp.float64 else jnp.int32)


def restore(x: jax.Array, exponent: jax.Array, form: Format, summands: int) -> jax.Array:
    """The inverse, of a sum; not a number where the exponent says so."""
    dtype = jnp.float64 if x.dtype == jnp.int64 else jnp.float32
    limit, power = limit_of(x.dtype.itemsize * 8 if form.bits == 32 else form.bits, summands)
    size = jnp.where(exponent == NOT_FINITE, jnp.nan, power_of_two(exponent + ZERO - power, dtype) / limit)
    return x.astype(dtype) * size


def limit_of(bits: int, summands: int) -> tuple[float, int]:
    """The largest number of which so many fit into so many bits with a sign, as m x 2^e, 1 <= m < 2; m is 1 where there
    are bits enough, so that whole numbers stay whole."""
    most = (2 ** (bits - 1) - 1) // summands
    power = most.bit_length() - 1
    return (1.0 if bits >= 32 else most / 2**power), power


def exponent_of(x: jax.Array) -> jax.Array:
    """The least exponent, from ZERO, of which all elements are below the power of two, or NOT_FINITE; 0 of integers."""
    if not is_float(x):
        return jnp.int32(0)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    kind, mantissa, bias = (jnp.int64, 52, 1022) if x.dtype == jnp.float64 else (jnp.int32, 23, 126)
    bits = jax.lax.bitcast_convert_type(x, kind) & jnp.iinfo(kind).max  # of |x|, in the order of the numbers
    exponent = ((jnp.max(bits, initial=0) >> mantissa) - bias).astype(jnp.int32)
    return jnp.where(exponent <= LARGEST, jnp.maximum(exponent - ZERO, 0), NOT_FINITE)


def in_bits(exponents: jax.Array) -> jax.Array:
    return -(-exponents // PER_BIT)


def remembered(exponents: jax.Array, needed: jax.Array, headroom: int) -> jax.Array:
    """The exponents of the next update: what this one needed, and headroom; or hardly less than before."""
    asked = jnp.where(needed == NOT_FINITE, exponents, (needed + headroom) * PER_BIT)
    return jnp.maximum(asked, exponents - 1)


def power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """2^exponent, exactly."""
    if jnp.dtype(dtype) == jnp.float64:
        return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random numbers [...] in (0, 1), of 8 bits: four of each word that the generator gives."""
    size = math.prod(shape)
    words = jax.random.bits(key, (-(-size // 4),), jnp.uint32)
    bytes_ = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:size]
    return ((bytes_.astype(jnp.float32) + 0.5) / 256).reshape(shape)


def pack(x: jax.Array) -> jax.Array:
    """Integers [..., n] as unsigned words [..., ceil(n / lanes)] whose sums are the sums in each lane.

    A lane's sign is borrowed from the one above, and given back by `unpack`: so nothing needs to be added to it.
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
    """The inverse of `pack`: [..., size]."""
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
    """[2]: the sum of squares and the number of elements not finite, of leaves that are whole, or slices along dims.

    With the largest element for unit, a square is a few digits; digits are added up as integers, at most 2^32 of them.
    """
    leaves = jax.tree.leaves(tree)
    along = [WHOLE] * len(leaves) if dims is None else jax.tree.leaves(dims)
    split = any(d != WHOLE for d in along)
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in leaves), jnp.float32)
    once = jax.lax.axis_index(axis) == 0 if split else True
    leaves = [x.astype(dtype) if d != WHOLE else jnp.where(once, x.astype(dtype), 0) for x, d in zip(leaves, along)]
    finite = [jnp.isfinite(x) for x in leaves]
    known = [jnp.where(ok, x, 0) for ok, x in zip(finite, leaves)]
    needed = functools.reduce(jnp.maximum, (exponent_of(x) for x in known), jnp.int32(0))
    bad = sum((jnp.sum(~ok, dtype=jnp.int32) for ok in finite), jnp.int32(0))
    needed = settle(jax.lax.pmax(needed, axis) if split else needed, live)
    unit = power_of_two(-needed - ZERO, dtype)
    rows = sum((digits_of(x * unit, live) for x in known), jnp.zeros((), jnp.uint32))
    if split:
        rows, bad = jax.lax.psum((rows, bad), axis)
    places = [x.astype(dtype) * 2.0 ** (-DIGIT * i) for i, x in enumerate(carried(rows))]
    size = power_of_two(needed + ZERO, dtype)
    squares = functools.reduce(jnp.add, places) * size * size
    squares = jnp.where((bad > 0) | (needed == NOT_FINITE), jnp.nan, squares)
    return settle(jnp.stack([squares, bad.astype(dtype)]), live)


def digits_of(x: jax.Array, live: jax.Array) -> jax.Array:
    """The sum of the squares of numbers below 1, as uint32 [digit, 2]: by DIGIT bits, and what exceeds them."""
    rest = pin(jnp.square(x), live).reshape(-1)
    rest = jnp.pad(rest, (0, -rest.size % ROW)).reshape(-1, ROW) if rest.size > ROW else rest[None]
    found = []
    for _ in range(DIGITS * x.dtype.itemsize // 4):
        rest = rest * 2.0**DIGIT
        digit = rest.astype(jnp.int32)  # without what is behind the point
        rest = rest - digit.astype(rest.dtype)
        rows = digit.astype(jnp.uint32).sum(1, dtype=jnp.uint32)
        found.append(jnp.stack([rows & (2**DIGIT - 1), rows >> DIGIT]).sum(1, dtype=jnp.uint32))
    return jnp.stack(found)


def carried(rows: jax.Array) -> list[jax.Array]:
    """What `digits_of` sums to [digit, 2], as digits of DIGIT bits after a first one: the same however it was split."""
    mask, carry = jnp.uint32(2**DIGIT - 1), jnp.uint32(0)
    digits = []
    for low, above in reversed([*zip(rows[:-1, 0], rows[1:, 1]), (rows[-1, 0], jnp.uint32(0))]):
        rest = (low & mask) + (above & mask) + (carry & mask)
        digits.append(rest & mask)
        carry = (low >> DIGIT) + (above >> DIGIT) + (carry >> DIGIT) + (rest >> DIGIT)
    return [rows[0, 1] + carry, *reversed(digits)]


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
