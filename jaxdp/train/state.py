"""The two records of a step: what an update changes, and what adds up.

A loss returns (sum, weight, metrics); a metric is a sum, divided by the loss's weight, or a pair (sum,
its own weight). Inside an update a pair becomes two entries, `name` and `weight/name`. A metric whose
name begins with sums: may be an array, such as a histogram. It is not divided and not reported: the
loss's `derive` gets it, and returns the numbers to report.

The model state (BatchNorm's averages, counters) adds up over microbatches: floats by weight, integers
by change. Complex numbers are floats with a leading dim for the real and imaginary part. An array that
no microbatch changes, such as a table of constants, is not averaged, since that would round it in each
update. The change of an integer is summed byte by byte, so that no sum overflows, whatever the width of
the integer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.errors import ReportedError, UsageError, cause
from jaxdp.losses import SUMS
from jaxdp.metrics.writer import RESERVED
from jaxdp.precision import LossScale, at_least_float32, is_float
from jaxdp.train.skip import Guard, start_guard

Tree = Any
Batch = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
    """Everything that an update changes, in logical shapes.

    Args:
        step: int32 [], the number of updates so far, applied or skipped.
        params: the parameters, in the dtype that they are stored in.
        model_state: what the model keeps besides parameters, such as BatchNorm's averages.
        opt_state: of the optimizer, for the parameters that are trained.
        loss_scale: None if the loss is not scaled.
        guard: counters of skipped updates.
        extra: what wrappers of the step and an arithmetic remember, by name, such as "ema". A tree
            with the structure of the parameters is stored like them.
        kept: what belongs to the examples of a microbatch, by name, such as "carry": leaves
            [microbatch, example, ...].
        seed: uint32 [], the root of all random keys. It is the config's: an exported state, as in a
            checkpoint, has None.
    """

    step: jax.Array
    params: Tree
    model_state: Tree
    opt_state: Tree
    loss_scale: LossScale | None = None
    guard: Guard = struct.field(default_factory=start_guard)
    extra: dict[str, Tree] = struct.field(default_factory=dict)
    kept: dict[str, Tree] = struct.field(default_factory=dict)
    seed: Any = None


class Sums(NamedTuple):
    """Sums over microbatches and devices: all of it adds up, and `apply` divides once.

    Args:
        grads: of the sum of the losses; None for frozen parameters.
        loss: [], the sum of the losses.
        weight: [], what all sums are divided by, such as the number of examples.
        metrics: [] each.
        model_state: floats as `Average`, integers as `Change` (`jaxdp.train.state`).
        extra: what an arithmetic hands over from the sums to the update.
        kept: the new `TrainState.kept`, the only field that is not summed: leaves [microbatch,
            example, ...].
    """

    grads: Tree = None
    loss: Tree = None
    weight: Tree = None
    metrics: Tree = None
    model_state: Tree = None
    extra: Tree = None
    kept: Tree = None


def microbatch_key(seed: jax.Array, step: jax.Array, number: jax.Array) -> jax.Array:
    """Return the key of everything random in one microbatch: fold_in(fold_in(key(seed), step),
    number).

    It depends on the microbatch and not on the device that computes it. That is half of why the
    number of devices does not change a loss curve; the other half is that `Sums` adds up.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), number)


def expand_to(marks: jax.Array, x: jax.Array) -> jax.Array:
    """Return marks [example, ...] with more dims of size 1, so that they apply to x [example, ...]."""
    return marks.reshape(marks.shape + (1,) * (x.ndim - marks.ndim))


def add(sums: Tree, more: Tree) -> Tree:
    """Add two trees of sums, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)


def select(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Select one of two trees; a leaf that is one array in both is returned without a selection."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def merge(tree: Tree, full: Tree) -> Tree:
    """Fill the None leaves of `tree` with those of `full`."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, full, is_leaf=lambda x: x is None)


WEIGHT = "weight/"
Scalars = dict[str, jax.Array]


def check_result(result: Any) -> tuple[jax.Array, jax.Array, Scalars]:
    """Return a loss's (sum, weight, metrics), with pairs as two entries. Raises UsageError for
    anything else.

    Floats become at least float32: a bfloat16 counts up to 256, and the order of the sums would
    change the result."""
    is_triple = isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)
    metrics = flat(result[2]) if is_triple else {}

    single = [x for name, x in metrics.items() if SUMS not in name]
    if not is_triple or any(getattr(x, "shape", None) != () for x in (*result[:2], *single)):
        got = str(jax.tree.map(_kind, result)).replace("'", "")
        raise UsageError(
            f"loss: it returned {got}; a loss returns (sum [], weight [], {{name: sum [] or (sum [], weight [])}}), "
            "e.g. jnp.sum(jnp.where(mask != 0, losses, 0) * mask) and jnp.sum(mask), with mask = batch['mask']"
        )
    loss, weight, _ = result
    if not is_float(loss):
        raise UsageError(
            f"loss: its sum is {loss.dtype}, which has no gradient; return a sum of real numbers"
        )
    for name, total in metrics.items():
        if (own_weight := metrics.get(WEIGHT + name)) is not None:
            # else it would be 0 times infinity
            metrics[name] = jnp.where((own_weight != 0) | jnp.isfinite(total), total, 0)
    return jax.tree.map(at_least_float32, (loss, weight, metrics))


def _kind(x: Any) -> str:
    if not hasattr(x, "shape"):
        return f"a Python {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)}"


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a loss with each pair (sum, weight) as the entries `name` and
    `weight/name`. Raises UsageError for a name that a metric cannot have.
    """
    result = dict[str, Any]()
    for name, value in metrics.items():
        if not isinstance(name, str) or name in RESERVED or name.startswith(WEIGHT):
            raise UsageError(
                f"loss: a metric is called {name!r}, which every record contains already, or is no text; rename it"
            )
        pair = isinstance(value, tuple | list) and len(value) == 2
        result |= {name: value[0], WEIGHT + name: value[1]} if pair else {name: value}
    return result


def divide(metrics: Mapping[str, Any], weight: Any, xp: Any = jnp) -> dict[str, Any]:
    """Return the mean of each metric, NaN where its own weight is 0; and these weights and all
    sums:..., for `make_record`.

    xp: jax.numpy, or numpy for sums on the host.
    """

    def mean(name, value):
        if name.startswith(WEIGHT) or SUMS in name:
            return value
        if (own_weight := metrics.get(WEIGHT + name)) is None:
            return value / weight
        return xp.where(own_weight != 0, value / xp.where(own_weight != 0, own_weight, 1), xp.nan)

    return {name: mean(name, value) for name, value in metrics.items()}


def make_record(
    means: Mapping[str, Any], derive: Callable[..., Mapping[str, float]]
) -> dict[str, float]:
    """Return the numbers to report: the means that `divide` returns, and the numbers that `derive`
    computes from them.

    A metric whose own weight is 0 is NaN for `derive` and omitted from the report, as are derived
    numbers that are NaN. `derive` gets the sums:..., the report does not. Raises UsageError if
    `derive` fails, or returns anything but a dict of numbers."""
    weights = {name for name in means if name.startswith(WEIGHT)}
    empty = {name.removeprefix(WEIGHT) for name in weights if means[name] == 0}
    sums = {name for name in means if SUMS in name}
    means = {
        name: value if name in sums else float(value)
        for name, value in means.items()
        if name not in weights
    }
    try:
        derived = flat({name: float(value) for name, value in derive(means).items()})
    except ReportedError:
        raise
    except Exception as error:
        raise UsageError(f"loss: derive failed{cause(error)}; return {{name: number}}") from error
    unknown = {name for name, value in derived.items() if empty and math.isnan(value)}
    record = {**means, **derived}
    return {name: record[name] for name in record if name not in empty | unknown | sums}


class Average(NamedTuple):
    """Floats: the sum of values times the weight, and the number [] of microbatches that changed
    any of them.
    """

    sum: jax.Array
    changes: jax.Array


class Change(NamedTuple):
    """The bytes [..., byte] of an integer's change, over all microbatches that have examples: the
    number of these microbatches, the sum, the sum of squares.

    The microbatches agree if and only if number x squares = sum^2 (equality in the Cauchy-Schwarz
    inequality)."""

    number: jax.Array
    sum: jax.Array
    squares: jax.Array


def weighted_state(old: Tree, new: Tree, weight: jax.Array, real: jax.Array) -> Tree:
    """Return the model state of one microbatch in a form that can be summed; real []: the
    microbatch has examples.
    """

    def weigh(old, new):
        if jnp.issubdtype(old.dtype, jnp.inexact):
            # 0 times infinity is NaN
            value = jnp.where(weight != 0, _parts(new).astype(weight.dtype), 0)
            changed = (weight != 0) & jnp.any(new != old)
            return Average(value * weight, changed.astype(weight.dtype))
        change = jax.lax.bitcast_convert_type(_wide(new) - _wide(old), jnp.uint8).astype(jnp.int32)
        change = jnp.where(real, change, 0)
        return Change(real.astype(jnp.int32), change, change * change)

    return jax.tree.map(weigh, old, new)


def mean_state(old: Tree, sums: Tree, weight: jax.Array) -> tuple[Tree, jax.Array | None]:
    """Return (the model state after the update, the number of integers on which microbatches
    disagree or None).
    """
    disagreeing = []

    def mean(old, new):
        if isinstance(new, Average):
            average = new.sum / jnp.where(weight > 0, weight, 1)
            average = jax.lax.complex(*average) if jnp.iscomplexobj(old) else average
            return jnp.where((weight > 0) & (new.changes > 0), average.astype(old.dtype), old)
        differ = new.number * new.squares != new.sum * new.sum
        disagreeing.append(jnp.sum(jnp.any(differ, axis=-1)))
        change = (new.sum // jnp.maximum(new.number, 1)).astype(jnp.uint8)
        change = jax.lax.bitcast_convert_type(change, _wide(old).dtype)
        return (_wide(old) + change).astype(old.dtype)

    new = jax.tree.map(mean, old, sums)
    return new, (sum(disagreeing, jnp.zeros((), jnp.int32)) if disagreeing else None)


def floats(tree: Tree) -> Tree:
    """Return the tree with None for integers, such as counters."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def _parts(x: jax.Array) -> jax.Array:
    """Return [real, imaginary part] of complex numbers; floats are unchanged."""
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _wide(x: jax.Array) -> jax.Array:
    """Return integers, or booleans, of at least 32 bits."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
