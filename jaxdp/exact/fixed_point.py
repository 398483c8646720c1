"""Fixed-point numbers: integers of a given number of bits, whose sums are equal in any order and
take few bytes.

    q = round(g x limit / 2^exponent),      total = (sum of q) x 2^exponent / limit

`limit` is the largest integer whose sum over all summands fits the format. Every device must know
the exponent beforehand: IntSGD (arXiv 2102.08374) adapts one scale, SwitchML (NSDI 2021) stores
exponents; we store one exponent per leaf of gradients. Values (losses, metrics, model state) are
small: each element has an exponent of its own. Norms are summed in digits, after Ahrens, Demmel &
Nguyen (ACM TOMS 46(3), 2020)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.exact.formats import FORMATS, Format
from jaxdp.exact.rounding import fusion_barrier, pin
from jaxdp.precision import at_least_float32, is_float
from jaxdp.split import WHOLE, fit, padded_shape

Tree = Any
ZERO, LARGEST = -90, 100  # exponents: smaller values count as zero, larger ones as not finite
NOT_FINITE = 1 << 16  # in place of an exponent; exponents count from ZERO
PER_BIT = 16  # updates until a stored exponent falls by one
NEAR = 4  # bits above the needed exponent and its headroom, from which a stored one falls faster
DIGITS, DIGIT = 3, 16  # digits of a float32's square, and their bits
ROW = 2**16  # digits that a uint32 can sum


def quantized(
    tree: Tree, exponents: Any, form: Format, summands: int, key: jax.Array, first: int = 0
) -> Tree:
    """Quantize every leaf. exponents: [leaf]. first: the number of the first leaf's key."""
    leaves, treedef = jax.tree.flatten(tree)
    ints = (
        quantize(x, exponent, form, summands, jax.random.fold_in(key, number))
        for number, (x, exponent) in enumerate(zip(leaves, exponents), first)
    )
    return jax.tree.unflatten(treedef, ints)


def restored(tree: Tree, exponents: Any, summands: int) -> Tree:
    """Convert the sums of `quantized` back to floats."""
    by_leaf = jax.tree.unflatten(jax.tree.structure(tree), exponents)
    return jax.tree.map(lambda x, exponent: restore(x, exponent, summands), tree, by_leaf)


def quantize(
    x: jax.Array, exponent: jax.Array, form: Format, summands: int, key: Any = None
) -> jax.Array:
    """Quantize x [...] to integers [...] of the format's bits (float64 in 32 bits: int64), so that
    `summands` of them sum without overflow. exponent: [], or one of each element [...]. key: of a
    stochastic format.
    """
    x = at_least_float32(x)
    bits = 8 * x.dtype.itemsize if form.bits == 32 else form.bits
    limit, power = limit_of(bits, summands)
    low, high = halves(power - exponent - ZERO, x.dtype)
    scaled = x * low * (limit * high)
    rounded = jnp.floor(scaled + uniform(key, x)) if form.stochastic else jnp.round(scaled)
    return rounded.astype(f"int{bits}")


def restore(x: jax.Array, exponent: jax.Array, summands: int) -> jax.Array:
    """Convert a sum of quantized numbers back to floats: NaN where the exponent is NOT_FINITE."""
    dtype = jnp.float64 if x.dtype == jnp.int64 else jnp.float32
    limit, power = limit_of(8 * x.dtype.itemsize, summands)
    low, high = halves(exponent + ZERO - power, dtype)
    return x.astype(dtype) * low * jnp.where(exponent == NOT_FINITE, jnp.nan, high / limit)


def value_exponents(values: Tree) -> Tree:
    """Return the exponents [...] of the elements of each leaf [row, ...] of floats; None for
    integers, which are summed as they are."""
    return jax.tree.map(lambda x: largest_exponent(x, 0) if is_float(x) else None, values)


def sum_values(values: Tree, exponents: Tree, summands: int) -> Tree:
    """Sum leaves [row, ...] over their rows, floats as integers with the exponents of
    `value_exponents`.

    An element that is not finite in some row is a count instead: 1 for inf, `summands` + 1 for
    -inf, both for NaN."""

    def total(x, exponent):
        if exponent is not None:
            counts = ~(x < jnp.inf) + (summands + 1) * ~(x > -jnp.inf)
            integers = quantize(x, exponent - ZERO, FORMATS["exact"], summands)
            x = jnp.where(exponent > jnp.finfo(x.dtype).maxexp, counts, integers)
        return x.sum(0, dtype=x.dtype)

    return jax.tree.map(total, values, exponents)


def restore_values(totals: Tree, exponents: Tree, summands: int) -> Tree:
    """Convert the sums [...] of `sum_values` back to floats; inf, -inf and NaN are those of a sum
    of floats.
    """

    def value(x, exponent):
        if exponent is None:
            return x
        finite = restore(x, exponent - ZERO, summands)
        positive = jnp.where(x % (summands + 1) > 0, jnp.inf, 0)
        negative = jnp.where(x > summands, jnp.inf, 0)
        return jnp.where(exponent > jnp.finfo(finite.dtype).maxexp, positive - negative, finite)

    return jax.tree.map(value, totals, exponents)


def halves(exponent: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return two floats whose product is 2^exponent, which may be out of their range."""
    return power_of_two(exponent // 2, dtype), power_of_two(exponent - exponent // 2, dtype)


def limit_of(bits: int, summands: int) -> tuple[float, int]:
    """Return (m, e), 1 <= m < 2: the sum of `summands` integers up to m x 2^e fits into `bits` with
    a sign. From 32 bits on, m is 1, so that integers stay exact."""
    limit = (2 ** (bits - 1) - 1) // summands
    power = limit.bit_length() - 1
    return (1.0 if bits >= 32 else limit / 2**power), power


def needed_exponents(tree: Tree) -> jax.Array:
    """Return for each leaf [leaf] the least exponent, from ZERO, whose power of two exceeds all
    elements, or NOT_FINITE."""
    exponents = jnp.array([largest_exponent(x) for x in jax.tree.leaves(tree)], jnp.int32)
    return jnp.where(exponents <= LARGEST, jnp.maximum(exponents - ZERO, 0), NOT_FINITE)


def too_large(grads: Tree) -> jax.Array:
    """Return the number of elements that are not finite, or not below 2^LARGEST."""
    return jnp.int32(sum(jnp.sum(~(jnp.abs(x) < 2.0**LARGEST)) for x in jax.tree.leaves(grads)))


def largest_exponent(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the least exponent whose power of two exceeds all elements along the axis; above the
    `maxexp` of the dtype if one is not finite."""
    x = at_least_float32(x)
    info = jnp.finfo(x.dtype)
    size = jnp.abs(x).view(f"int{info.bits}")  # ordered like the numbers
    return ((jnp.max(size, axis, initial=0) >> info.nmant) + info.minexp).astype(jnp.int32)


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
    info = jnp.finfo(dtype)
    biased = exponent.astype(f"int{info.bits}") + (1 - info.minexp)
    return (biased << info.nmant).view(info.dtype)


def uniform(key: jax.Array, like: jax.Array) -> jax.Array:
    """Return random numbers [...] in (0, 1) of 8 bits each: four from each random word."""
    words = jax.random.bits(key, (-(-like.size // 4),), jnp.uint32)
    numbers = words.view(jnp.uint8)[: like.size].astype(jnp.float32)
    return ((numbers + 0.5) / 256).reshape(like.shape)


def in_words(add: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return add(x), for integers [..., n] and an `add` that sums over devices. It gets integers of
    less than 32 bits as words [..., ceil(n / lanes)] whose sums are the sums in each lane.

    A word is the sum of its lanes, with their signs, so a negative lane borrows from the lane above.
    """
    lanes = 4 // x.dtype.itemsize
    if lanes < 2:
        return add(x)
    signs = jnp.full(lanes, jnp.iinfo(x.dtype).min, x.dtype).view(jnp.uint32)
    words = fit(x, padded_shape(x.shape, x.ndim - 1, lanes)).view(jnp.uint32)
    total = add((words ^ signs) - signs)
    return ((total + signs) ^ signs).view(x.dtype)[..., : x.shape[-1]]


def squares_and_bad(grads: Tree, dims: Tree, axis: str, step: jax.Array) -> jax.Array:
    """Return [2]: the sum of squares and the number of elements that are `too_large`; leaves are
    replicated or slices along dims.

    Relative to the largest element, a square is a few digits; digits are summed as integers, at
    most 2^32 of them."""
    leaves = jax.tree.leaves(grads)
    split = [dim != WHOLE for dim in jax.tree.leaves(dims)] or [False] * len(leaves)
    axes = axis if any(split) else ()  # full leaves need no other device
    first, dtype = jax.lax.axis_index(axes) == 0, jnp.result_type(jnp.float32, *leaves)
    values = [  # a full leaf is counted once
        jnp.where(first | is_split, x.astype(dtype), 0) for x, is_split in zip(leaves, split)
    ]
    if jax.lax.axis_size(axes) * sum(x.size for x in leaves) > ROW**2:
        raise UsageError(
            f"parallel.reduction: exact sums squares of at most {ROW**2:,} parameters; use xla or bucket"
        )
    needed = jnp.max(needed_exponents(values), initial=0)
    needed = fusion_barrier(jax.lax.pmax(needed, axes), step)
    size = power_of_two(needed + ZERO, dtype)
    digits = sum((digits_of(x / size, step) for x in values), jnp.uint32(0))
    digits, bad = jax.lax.psum((digits, too_large(values)), axes)
    terms = [x.astype(dtype) * 2.0 ** (-DIGIT * i) for i, x in enumerate(carried(digits))]
    squares = jnp.where(needed == NOT_FINITE, jnp.nan, sum(terms) * size * size)
    return fusion_barrier(jnp.stack([squares, bad.astype(dtype)]), step)


@jax.jit
def digits_of(x: jax.Array, step: jax.Array) -> jax.Array:
    """Sum the squares of numbers below 1, as uint32 [1 + digit]: the integer part of the sum, and
    sums of digits of DIGIT bits.
    """
    row = min(x.size, ROW) or 1
    rest = pin(jnp.square(x), step).reshape(-1)
    rest = fit(rest, padded_shape(rest.shape, 0, row)).reshape(-1, row)
    digits = [jnp.uint32(0)]
    for _ in range(DIGITS * x.dtype.itemsize // 4):
        rest, digit = jnp.modf(rest * 2.0**DIGIT)
        digits.append(digit.astype(jnp.int32).sum(1, dtype=jnp.uint32))
    return jnp.stack(carried(digits)).sum(1, dtype=jnp.uint32)


def carried(sums: Any) -> list[jax.Array]:
    """Convert sums of digits, uint32 [1 + digit, ...], to digits of DIGIT bits; what is carried over
    from them is added to the integer part in front."""
    digits = [*sums]
    for i in range(len(digits) - 1, 0, -1):
        digits[i - 1] += digits[i] >> DIGIT
        digits[i] &= 2**DIGIT - 1
    return digits
