"""Trace data, model, loss and optimizer, here and as on other hosts: find what depends on devices, host or chance.

A fault is named by its line of code, before anything is computed.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxdp.analysis.programs import Digest, Line, describe, digest, inside, line, lines, needed
from jaxdp.axes import DATA
from jaxdp.data.base import probes
from jaxdp.errors import UsageError, one_line
from jaxdp.losses import attribute
from jaxdp.metrics.sums import WEIGHT, flat
from jaxdp.precision import cast_floats
from jaxdp.verify import hosts
from jaxdp.verify.causes import FAILED, NOTE, OK, Check, failed
from jaxdp.verify.oracle import key_of, make_oracle
from jaxdp.verify.problem import Misfit, Problem, Trial

EXAMPLES, TRANSFORM, INIT, GRADIENT = "the data", "the data's transform", "the model's init", "the model or the loss"
DERIVED, EVALUATION, OPTIMIZER = "what the loss derives", "the evaluation", "the optimizer"
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}  # by the dtype of the computation
DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
MOVES_NOTHING = {"pvary", "pcast", "pbroadcast"}  # operations that name an axis


class StaticChecks(NamedTuple):
    """random: data or model draw random numbers. epsilon: the last digit of the dtype of the computation.

    parameters: their number, 0 if init cannot be traced. digests: of the programs and the data, by part.
    """

    checks: list[Check]
    tolerance: float
    random: bool = False
    epsilon: float = 0.0
    parameters: int = 0
    digests: dict[str, Digest] = {}


class Program(NamedTuple):
    """A traced part. out: the shapes of what it returns; None if it names an axis that is not bound, `unbound`."""

    lines: list[Line]
    eqns: list[jex.JaxprEqn] = []
    out: Any = None
    unbound: str = ""

    @property
    def random(self) -> bool:
        return any(eqn.primitive.name in DRAWS for eqn in self.eqns)

    @property
    def cast(self) -> tuple[Any, str] | None:
        """Return (dtype, line of code) of the first cast from float64 to a shorter float, or None."""
        for eqn in self.eqns:
            if eqn.primitive.name == "convert_element_type":
                before, after = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
                if before == jnp.float64 != after and jnp.issubdtype(after, jnp.floating):
                    return after, line(eqn)
        return None


def run_static_checks(problem: Problem, trial: Trial, tolerance: float | None) -> StaticChecks:
    """Check the data and the traced parts. tolerance: as asked for, or None."""
    if tolerance is not None and not 0 < tolerance < 1:
        raise UsageError(f"tolerance: {tolerance} is not between 0 and 1; to compare bits, use --exact")
    data, dtype = check_data(problem), jnp.dtype(jnp.float64)
    try:
        parts = trace_parts(problem, trial)
    except Misfit as error:
        return StaticChecks([data, Check("trace", FAILED, str(error))], tolerance or TOLERANCE[dtype.name])
    checks = [data, *check_surroundings(problem, trial, parts, data.verdict == OK)]
    init, gradient = parts[INIT], parts.get(GRADIENT, Program([]))
    if cast := gradient.cast:
        dtype, where = cast[0], problem.float32_line or cast[1]
        at = where and f" at {where}"
        checks.append(Check("precision", NOTE, f"{GRADIENT} computes in {dtype.name}{at}, also from float64 arguments"))
    return StaticChecks(
        checks,
        tolerance or TOLERANCE[dtype.name],
        random=parts[TRANSFORM].random or gradient.random,
        epsilon=float(jnp.finfo(dtype).eps),
        parameters=0 if init.unbound else sum(x.size for x in jax.tree.leaves(init.out[0])),
        digests={part: digest(program.lines) for part, program in parts.items()},
    )


def check_data(problem: Problem) -> Check:
    """Check that the data returns the same example for the same index, in another order too."""
    index = probes(problem.dataset)
    one, other = problem.dataset.read(index), problem.dataset.read(index[::-1])
    same = lambda a, b: describe(np.asarray(a)) == describe(np.ascontiguousarray(np.asarray(b)[::-1]))
    for name in {**one, **other}:
        if name not in one or name not in other or not same(one[name], other[name]):
            return failed("data", "data", what=name)
    return Check("data", OK, f"{len(index)} examples are the same when they are read again")


def trace(f: Callable, *args: Any, devices: int | None = 2) -> Program:
    """Trace `f(*args)` as one of this number of devices; None: without an axis of devices."""
    axes = [(DATA, devices)] if devices else None
    try:
        closed, out = jax.make_jaxpr(lambda *args: f(*args), axis_env=axes, return_shape=True)(*args)
    except NameError as error:
        if "axis name: " not in str(error):
            raise
        return Program([], unbound=repr(str(error).partition("axis name: ")[2].partition(".")[0]))
    return Program(list(lines(closed, callbacks=True)), list(operations(closed.jaxpr)), out)


def operations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""
    for eqn in needed(jaxpr):
        yield eqn
        for inner in inside(eqn):
            yield from operations(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def trace_parts(problem: Problem, trial: Trial, devices: int = 2) -> dict[str, Program]:
    """Trace each part for one microbatch, up to the first that names an axis that is not bound."""
    jax.clear_caches()
    batch, key, model = trial.microbatch(0, 0), key_of(problem, 0, 0), problem.forward.model
    transform = problem.forward.transform or (lambda batch, key, train: batch)
    wide = lambda shapes: jax.eval_shape(lambda tree: cast_floats(tree, jnp.float64), shapes)
    constants = lambda values: Program([Line(f"{name} {describe(value)}", (), "") for name, value in values.items()])
    examples = problem.dataset.read(probes(problem.dataset))
    parts = {EXAMPLES: constants({name: np.asarray(value) for name, value in examples.items()})}
    augment = lambda batch, key: {"mask": batch["mask"], **transform(batch, key, True)}
    parts[TRANSFORM] = data = trace(augment, batch, key, devices=devices)
    parts[INIT] = first = trace(model.init, key, wide(trial.example), devices=None)
    if data.unbound or first.unbound:
        return parts
    params, state = wide(first.out)
    frozen, plain = jax.tree.map(lambda x: None, params), problem.forward._replace(transform=None)
    value = make_oracle(dataclasses.replace(problem, forward=plain)).value
    parts[GRADIENT] = gradient = trace(value, params, frozen, [state], [data.out], [key], devices=devices)
    if gradient.unbound:
        return parts

    def evaluate(params: Any, state: Any, batch: Any, data: Any, key: jax.Array) -> Any:
        with contextlib.suppress(Exception):  # a transform for training alone
            data = transform(batch, key, False)
        inputs = cast_floats({**data, "mask": batch["mask"] != 0}, jnp.float64)
        return model.apply(params, state, inputs, key, False)[0]

    with contextlib.suppress(Exception):  # a model for training alone
        parts[EVALUATION] = trace(evaluate, params, state, batch, data.out, key, devices=devices)
    metrics = ["loss", *flat(gradient.out[0][1][1])]
    means = {name: 0.5 + i / 64 for i, name in enumerate(metrics) if not name.startswith(WEIGHT)}
    with contextlib.suppress(Exception):  # a run reports it
        parts[DERIVED] = constants(attribute(problem.forward.loss, "derive", dict)(means))
    tx = problem.rule(1.0).tx
    try:
        parts[OPTIMIZER] = trace(lambda params: tx.update(params, tx.init(params), params), params, devices=None)
    except (TypeError, UsageError) as error:
        raise Misfit(f"optimizer: {one_line(error).removeprefix('optimizer.target: ')}") from error
    return parts


def check_surroundings(problem: Problem, trial: Trial, parts: dict[str, Program], readable: bool) -> list[Check]:
    """Check that no part depends on the devices, the host or the time."""
    checks, notes = differences(parts, trace_parts(problem, trial), "impure"), list[Check]()
    if not checks and readable:
        checks, notes = on_other_hosts(problem, trial, parts)
    asked = [check for part in (TRANSFORM, INIT, GRADIENT) if part in parts for check in asks(part, parts[part])]
    if not checks and not asked:
        asked = differences(parts, trace_parts(problem, trial, devices=3), "counts")
    text = "data, model, loss and optimizer depend on neither devices, nor host, nor a random generator of their own"
    return (checks + asked or [Check("devices", OK, text)]) + notes


def asks(part: str, program: Program) -> list[Check]:
    """Return a failure for each operation that asks for the device or communicates over devices."""
    if program.unbound:
        return [failed("devices", "unbound", part=part, what=program.unbound)]
    asked = dict[str, Check]()
    for eqn in program.eqns:
        name, axes = eqn.primitive.name, jax.tree.leaves([eqn.params.get(key) for key in ("axes", "axis_name")])
        if DATA in axes and name not in MOVES_NOTHING:
            kind = "axis_index" if name == "axis_index" else "communicates"
            asked.setdefault(name, failed("devices", kind, line(eqn), part=part, what=name))
    return list(asked.values())


def differences(one: dict[str, Program], other: dict[str, Program], kind: str, what: str = "") -> list[Check]:
    """Return a failure for each part whose programs differ; for the evaluation only if training does not."""
    where = {part: first_difference(program, other.get(part, Program([]))) for part, program in one.items()}
    if where.get(TRANSFORM) is not None or where.get(GRADIENT) is not None:
        where.pop(EVALUATION, None)
    return [failed("devices", kind, at, part=part, what=what) for part, at in where.items() if at is not None]


def first_difference(one: Program, other: Program) -> str | None:
    """Return the line of code where two programs first differ ("" if unknown), or None."""
    for a, b in zip(one.lines, other.lines, strict=False):
        if a[:2] != b[:2]:
            return a.where or b.where
    return None if len(one.lines) == len(other.lines) else ""


def on_other_hosts(problem: Problem, trial: Trial, parts: dict[str, Program]) -> tuple[list[Check], list[Check]]:
    """Construct and trace everything again as on other hosts. Return (failures with their causes, notes)."""
    remake, notes = problem.remake, list[Check]()

    def trace_under(context: Any) -> dict[str, Program]:
        with context, hosts.fresh_modules() if remake else contextlib.nullcontext():
            return trace_parts(remake() if remake else problem, trial)

    def compare(host: hosts.Host, what: str, facts: tuple[str, ...]) -> list[Check]:
        try:
            return differences(parts, trace_under(hosts.pretend(host, facts)), "host", what)
        except Exception as error:
            return [failed("devices", "raises", what=f"{what}: {type(error).__name__}: {one_line(error)}")]

    again = lambda: differences(parts, trace_under(contextlib.nullcontext()), "impure")
    if remake:
        try:
            if checks := again():
                return checks, notes
        except Exception as error:
            text = f"modules cannot be imported twice, so what they read at import is not checked: {one_line(error)}"
            remake, notes = None, [Check("devices", NOTE, text)]
    for host in hosts.HOSTS:
        if checks := compare(host, "what differs between hosts", hosts.FACTS):
            named = next(filter(None, (compare(host, fact, (fact,)) for fact in hosts.FACTS)), checks)
            return again() or named, notes  # a clock that moved meanwhile is not blamed on the host
    return [], notes
