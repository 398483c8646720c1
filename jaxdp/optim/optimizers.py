"""The table of optimizers, and settings of parameters by regular expressions that match anywhere in
a path a/b/c.

Weight decay is decoupled, or L2 where PyTorch's optimizer of that name uses L2.

Bfloat16 parameters learn by a float32 master copy, of which the optimizer's state has the lower halves.
An update of less than half of a parameter's last digit would be rounded away. A parameter is the upper
half of the master copy's bits, rounded to the nearest; the rest is exact, so the master copy takes two
bytes a parameter.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.errors import ReportedError, UsageError, cause
from jaxdp.optim.muon import muon, with_decay
from jaxdp.optim.roles import AUTO, Role, role_of
from jaxdp.optim.schedule import Schedule
from jaxdp.precision import cast_floats
from jaxdp.split import path_string

Tree = Any


HALF = 16  # bits


class Master(NamedTuple):
    """The state of an optimizer that updates a master copy. inner: its own. low: the lower halves,
    int16, like the parameters; None: the parameters are not bfloat16, and are their own master
    copy."""

    inner: Tree
    low: Tree


def with_master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a float32 master copy of bfloat16 parameters, and with its own
    state in float32.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params):
        is_narrow = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
        low = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int16), params) if is_narrow else None
        return Master(inner.init(params if low is None else join(params, low)), low)

    def update(grads, state, params=None, **extra):
        if state.low is None:
            updates, new = inner.update(grads, state.inner, params, **extra)
            return updates, Master(new, None)
        copy = join(params, state.low)
        updates, new = inner.update(cast_floats(grads, jnp.float32), state.inner, copy, **extra)
        high, low = split(optax.apply_updates(copy, updates))
        # the difference of two bfloat16 is added in float32 and rounded to the new one
        moves = jax.tree.map(
            lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), high, params
        )
        return moves, Master(new, low)

    return optax.GradientTransformationExtraArgs(init, update)


def master_copy(params: Tree, opt_state: Any) -> Tree:
    """Return the values that the optimizer updates: the parameters, or their master copy."""
    narrow = isinstance(opt_state, Master) and opt_state.low is not None
    return join(params, opt_state.low) if narrow else params


def moving_share(params: Tree, size: float) -> jax.Array:
    """Return the share [] of bfloat16 elements that an update of this size changes; rounding loses
    it in the others.
    """
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]

    def bits(x):
        return jax.lax.bitcast_convert_type(split(x)[0], jnp.int16)

    moves = [
        jnp.sum((bits(x + size) != bits(x)) | (bits(x - size) != bits(x)), dtype=jnp.float32)
        for x in leaves
    ]
    return sum(moves) / sum(x.size for x in leaves)


def join(high: Tree, low: Tree) -> Tree:
    """Return the float32 values of two halves."""

    def one(high: jax.Array, low: jax.Array) -> jax.Array:
        upper = jax.lax.bitcast_convert_type(high, jnp.int16).astype(jnp.int32) << HALF
        return jax.lax.bitcast_convert_type(upper + low.astype(jnp.int32), jnp.float32)

    return jax.tree.map(one, high, low)


def split(copy: Tree) -> tuple[Tree, Tree]:
    """Return float32 values rounded to bfloat16, and the rest of their bits, positive or negative,
    as int16.
    """
    bits = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.int32), copy)
    upper = jax.tree.map(lambda x: (x + (1 << HALF - 1) >> HALF).astype(jnp.int16), bits)
    high = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.bfloat16), upper)
    return high, jax.tree.map(lambda x: x.astype(jnp.int16), bits)


MASKS = ("mask", "weight_decay_mask")  # names of the argument that selects what decays


def _decay_first(tx: Callable) -> Callable:
    """Add L2 decay to the gradient before `tx`, as PyTorch's SGD and Adam do."""

    @functools.wraps(tx)
    def make(learning_rate: Schedule, weight_decay: float = 0.0, mask: Any = None, **args: Any):
        decay = [optax.add_decayed_weights(weight_decay, mask)] if weight_decay else []
        return optax.chain(*decay, tx(learning_rate, **args))

    return make


@functools.wraps(optax.adafactor)
def _adafactor(learning_rate: Schedule, weight_decay: float = 0.0, mask: Any = None, **args: Any):
    tx = optax.adafactor(learning_rate, weight_decay_rate=None, **args)
    return with_decay(tx, learning_rate, weight_decay, mask)


OPTIMIZERS: dict[str, Callable] = {
    "sgd": _decay_first(optax.sgd),
    "adam": _decay_first(optax.adam),
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "adafactor": _adafactor,
    "muon": muon,
}
"""make(learning_rate, weight_decay, mask, [blocks, roles], ...) -> transformation.

On a stack of blocks [block, ...], muon works block by block. lamb uses one trust ratio for the full
stack, and adafactor one clipping factor and one parameter scale, as Optax does for any leaf.
"""


def make_optimizer(
    make: Callable,
    schedule: Schedule,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
    *,
    lr_scale: Mapping[str, float] = {},
    blocks: Sequence[str] = (),
    roles: Mapping[str, Role] = {},
    **args: Any,
) -> optax.GradientTransformation:
    """Return make(learning_rate, weight_decay=, mask=, ...) with a weight-decay mask; see
    `decay_mask`.

    lr_scale: learning-rate factors by path; see `scale_by_path`.
    blocks: paths (a/b) below which leaves are stacked [block, ...]. roles: of the parameters, see
    `find_roles`. A `make` that takes `blocks` or `roles` gets them.
    Raises UsageError if weight decay is requested and `make` does not support it.
    """
    names, takes = inspect.signature(make).parameters, taken_by(make)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    known = {"blocks": blocks, "roles": roles, "weight_decay": weight_decay}
    args |= {name: value for name, value in known.items() if name in takes}
    masks = [name for name in MASKS if name in takes]
    if "weight_decay" in takes:
        if masks:
            args[masks[0]] = decay_mask(no_decay, blocks, roles)
        elif weight_decay and no_decay:
            raise UsageError(
                f"optimizer.no_decay: {make.__name__} takes no mask and would decay all parameters; set no_decay to [] "
                "or weight_decay to 0"
            )
    elif weight_decay and open_ended:
        args["weight_decay"] = weight_decay
    elif weight_decay:
        raise UsageError(
            f"optimizer.weight_decay: {weight_decay} but {make.__name__} takes none; set it to 0"
        )
    by_name = "learning_rate" in names or open_ended
    tx = make(learning_rate=schedule, **args) if by_name else make(schedule, **args)
    return optax.chain(tx, scale_by_path(lr_scale)) if lr_scale else tx


def taken_by(make: Callable) -> set[str]:
    """Return the names of a function's parameters."""
    return {
        *inspect.signature(make).parameters,
        *inspect.signature(make, follow_wrapped=False).parameters,
    }


def checked(name: str, tx: Any, key: str = "optimizer") -> optax.GradientTransformation:
    """Return `tx` with init and update wrapped to raise UsageError if they fail. Raises UsageError
    if it lacks them.

    key: the section of the config, for messages.
    """
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise UsageError(
            f"{key}.target: {name!r} returns {type(tx).__name__}, not an Optax transformation"
        )

    def with_usage_errors(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **extra: Any) -> Any:
            try:
                result = function(*args, **extra)
                jax.tree.map(jnp.asarray, result)  # fails if a leaf of the state is not an array
                return result
            except ReportedError:
                raise
            except Exception as error:
                raise UsageError(
                    f"{key}.target: {name!r} cannot be used: jaxdp calls init(parameters) and update(gradients, "
                    f"state, parameters), which failed{cause(error)}"
                ) from error

        return run

    is_known = isinstance(tx, optax.GradientTransformation)
    kind = type(tx) if is_known else optax.GradientTransformation
    return kind(with_usage_errors(tx.init), with_usage_errors(tx.update))


def decay_mask(
    no_decay: Sequence[str], blocks: Sequence[str] = (), roles: Mapping[str, Role] = {}
) -> Callable[[Any], Any]:
    """Return a function from params to a tree of booleans, False for leaves without weight decay.

    no_decay: expressions that match their paths; or AUTO: decay follows from `role_of` (see there
    for the others)."""

    def decays(path: Any, x: Any) -> bool:
        if no_decay == AUTO:
            return role_of(path, x, blocks, roles).decays
        return not any(re.search(pattern, path_string(path)) for pattern in no_decay)

    return lambda params: jax.tree_util.tree_map_with_path(decays, params)


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale each update by the factor of the first expression that matches its path, or by 1.

    Chained after an optimizer, it also scales decoupled weight decay, like the lr of a PyTorch
    parameter group; 0 freezes a parameter. Raises UsageError for an invalid expression.
    """
    rows = []
    for pattern, factor in factors.items():
        try:
            rows.append((re.compile(pattern), factor))
        except re.error as error:
            raise UsageError(
                f"lr_scale: {pattern!r} is not a regular expression: {error}"
            ) from None

    def scale(path: Any, update: Any) -> Any:
        name = path_string(path)
        return update * next((factor for pattern, factor in rows if pattern.search(name)), 1)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))
