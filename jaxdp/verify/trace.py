"""Trace the parts of a problem into programs, and read from them what they ask of their surroundings."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxdp.analysis.programs import Line, describe, inside, line, lines, needed
from jaxdp.axes import DATA
from jaxdp.data.base import probes
from jaxdp.errors import UsageError
from jaxdp.losses import apply_loss, attribute
from jaxdp.metrics.sums import WEIGHT, check_result, flat
from jaxdp.precision import cast_floats
from jaxdp.verify.oracle import key_of, make_oracle
from jaxdp.verify.problem import Problem, Trial

DATA_READ, DATA_TRAIN, DATA_EVAL = "the data", "the data's transform", "the data's transform in evaluation"
INIT, MODEL, EVALUATION = "the model's init", "the model", "the model's evaluation"
LOSS, DERIVED, GRADIENT, OPTIMIZER = "the loss", "what the loss derives", "the gradient", "the optimizer"
DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
MOVES_NOTHING = {"pvary", "pcast", "pbroadcast"}  # operations that name an axis


class Program(NamedTuple):
    """A traced part. out: the shapes of what it returns; None if it names an axis that is not bound."""

    lines: list[Line]
    out: Any = None
    jaxpr: jex.Jaxpr | None = None
    unbound: str = ""


def trace(f: Callable, *args: Any, devices: int | None = 2) -> Program:
    """Trace `f(*args)` as one of this number of devices; None: without an axis of devices."""
    axes = [(DATA, devices)] if devices else None
    try:
        closed, out = jax.make_jaxpr(lambda *args: f(*args), axis_env=axes, return_shape=True)(*args)
    except NameError as error:
        if "axis name: " not in str(error):
            raise
        return Program([], unbound=repr(str(error).partition("axis name: ")[2].partition(".")[0]))
    return Program(list(lines(closed, callbacks=True)), out, closed.jaxpr)


def trace_parts(problem: Problem, trial: Trial, devices: int = 2) -> dict[str, Program]:
    """Trace each part for one microbatch, up to the first that names an axis that is not bound."""
    jax.clear_caches()
    batch: Any = trial.microbatch(0, 0)
    key, mask = key_of(problem, 0, 0), batch["mask"]
    transform = problem.transform or (lambda batch, key, train: batch)
    parts = {DATA_READ: read(problem)}

    def out(part: str, f: Callable, *args: Any, devices: int | None = devices) -> Any:
        parts[part] = trace(f, *args, devices=devices)
        return parts[part].out

    data = out(DATA_TRAIN, lambda batch, key: transform(batch, key, True), batch, key)
    with contextlib.suppress(Exception):  # a transform for training alone
        out(DATA_EVAL, lambda batch, key: transform(batch, key, False), batch, key)
    arrays = out(INIT, problem.model.init, key, wide(trial.example), devices=None)
    if data is None or arrays is None:
        return parts
    params, state = wide(arrays)
    inputs = {**wide(data), "mask": jax.ShapeDtypeStruct(mask.shape, jnp.bool_)}
    outputs = out(MODEL, lambda *args: problem.model.apply(*args, True), params, state, inputs, key)
    if outputs is None:
        return parts
    targets = {**data, "mask": jax.ShapeDtypeStruct(mask.shape, jnp.float64)}
    sums = out(LOSS, functools.partial(apply_loss, problem.loss), wide(outputs[0]), targets)
    try:
        check_result(sums)
    except UsageError:  # reported by the static checks
        return parts
    parts[DERIVED] = derive(problem, sums[2])
    with contextlib.suppress(Exception):  # a model that cannot be evaluated
        out(EVALUATION, lambda *args: problem.model.apply(*args, False)[0], params, state, inputs, key)
    out(GRADIENT, make_oracle(problem).value, params, jax.tree.map(lambda x: None, params), [state], [batch], [key])
    tx = problem.make_tx(1.0)
    with contextlib.suppress(TypeError, UsageError):  # reported by `check_optimizer`
        out(OPTIMIZER, lambda params: tx.update(params, tx.init(params), params), params, devices=None)
    return parts


def read(problem: Problem) -> Program:
    """Return the examples that a fingerprint covers, as a program of constants."""
    examples = problem.dataset.read(probes(problem.dataset))
    return Program([Line(f"{k} {describe(np.asarray(v))}", (), "") for k, v in examples.items()])


def derive(problem: Problem, metrics: Any) -> Program:
    """Return what the loss derives from some means, as a program of constants."""
    means = {name: 0.5 + i / 64 for i, name in enumerate(["loss", *flat(metrics)]) if not name.startswith(WEIGHT)}
    with contextlib.suppress(Exception):  # a run reports it
        return Program([Line(describe(attribute(problem.loss, "derive", dict)(means)), (), "")])
    return Program([])


def wide(shapes: Any) -> Any:
    """Return the shapes with float64 for every float."""
    return jax.eval_shape(lambda tree: cast_floats(tree, jnp.float64), shapes)


def operations(program: Program) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""

    def inner(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
        for eqn in needed(jaxpr):
            yield eqn
            for one in inside(eqn):
                yield from inner(one.jaxpr if isinstance(one, jex.ClosedJaxpr) else one)

    return inner(program.jaxpr) if program.jaxpr is not None else iter(())


def is_random(program: Program) -> bool:
    return any(eqn.primitive.name in DRAWS for eqn in operations(program))


def device_operations(program: Program) -> dict[str, str]:
    """Return {operation: line of code} of what asks for the device, or communicates over devices."""
    asked: dict[str, str] = {}
    for eqn in operations(program):
        names = [eqn.params.get(key, ()) for key in ("axes", "axis_name")]
        axes = [axis for name in names for axis in (name if isinstance(name, tuple | list) else (name,))]
        if DATA in axes and eqn.primitive.name not in MOVES_NOTHING:
            asked.setdefault(eqn.primitive.name, line(eqn))
    return asked


def narrow_cast(program: Program) -> tuple[Any, str] | None:
    """Return (dtype, line of code) of the first cast from float64 to a shorter float, or None."""
    for eqn in operations(program):
        if eqn.primitive.name == "convert_element_type" and getattr(eqn.invars[0].aval, "dtype", None) == jnp.float64:
            dtype = jnp.dtype(eqn.params["new_dtype"])
            if jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float64:
                return dtype, line(eqn)
    return None


def first_difference(one: Program, other: Program) -> str | None:
    """Return the line of code where two programs first differ ("" if unknown), or None."""
    for a, b in zip(one.lines, other.lines, strict=False):
        if a[:2] != b[:2]:
            return a.where or b.where
    return None if len(one.lines) == len(other.lines) else ""
