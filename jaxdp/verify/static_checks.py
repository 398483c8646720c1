"""Trace data, model, loss and optimizer, here and as on other hosts: find what depends on devices, host or chance.

A fault is named by its line of code, before anything is computed.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.analysis.programs import Digest, describe, digest
from jaxdp.data.base import probes
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.sums import check_result
from jaxdp.verify import other_hosts, trace
from jaxdp.verify.checks import FAILED, NOTE, OK, Check
from jaxdp.verify.problem import Problem, Trial
from jaxdp.verify.trace import Program, trace_parts

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}  # by the dtype of the computation
CAUSES = {  # how the numbers of a part come to depend on its surroundings
    "axis_index": "{part} asks which device it is on (axis_index{where}), and a key or value made of that depends on "
    "the devices; derive it from the key that is passed in",
    "communicates": "{part} communicates over the devices ({what}{where}), as BatchNorm with sync: true does, so that "
    "its numbers depend on how many there are",
    "counts": "{part} asks how many devices there are (axis_size, or psum of 1{where}), and its numbers depend on it",
    "impure": "{part} is not the same when it is traced again (it differs{where}): it draws from a generator of its "
    "own, NumPy's or Python's, or reads something that changes; derive random numbers from the key that is passed in",
    "host": "{part} depends on {what} (it differs{where}), which is another in every process or on other hardware; use "
    "the config, the key, or the data instead",
    "raises": "what the config names cannot be constructed or traced on another host (another value of {what})",
    "unbound": "{part} names an axis that does not exist ({what}); that of all devices is 'data', and init has none",
}
COMBINED = (trace.EVALUATION, trace.GRADIENT)  # repeat what the parts before them have
MADE_BY_USER = (trace.DATA_TRAIN, trace.INIT, trace.MODEL, trace.LOSS)


class StaticChecks(NamedTuple):
    """random: data or model draw random numbers. epsilon: the last digit of the dtype of the computation.

    parameters: their number, 0 if init cannot be traced. digests: of the programs and the data, by part.
    """

    checks: list[Check]
    random: bool
    epsilon: float
    tolerance: float
    parameters: int
    digests: dict[str, Digest]


def run_static_checks(problem: Problem, trial: Trial, tolerance: float | None) -> StaticChecks:
    """Check the data and the traced parts. tolerance: as asked for, or None."""
    checks = [check_data(problem)]
    parts = trace_parts(problem, trial)
    checks += check_surroundings(problem, trial, parts, checks[0].verdict == OK)
    checks += check_form(parts)
    dtype, precision = check_precision(problem, parts, tolerance)
    checks += precision
    random = any(trace.is_random(parts[part]) for part in (trace.DATA_TRAIN, trace.MODEL) if part in parts)
    init = parts[trace.INIT].out
    count = 0 if init is None else sum(x.size for x in jax.tree.leaves(init[0]))
    digests = {part: digest(program.lines) for part, program in parts.items()}
    allowed = TOLERANCE[dtype.name] if tolerance is None else tolerance
    return StaticChecks(checks, random, float(jnp.finfo(dtype).eps), allowed, count, digests)


def check_data(problem: Problem) -> Check:
    """Check that the data returns the same example for the same index, in another order too."""
    index = probes(problem.dataset)
    one, other = problem.dataset.read(index), problem.dataset.read(index[::-1])
    same = lambda a, b: describe(np.asarray(a)) == describe(np.ascontiguousarray(np.asarray(b)[::-1]))
    changed = [k for k in {**one, **other} if k not in one or k not in other or not same(one[k], other[k])]
    if changed:
        text = (
            f"the data is not a function of the index: {changed[0]!r} of an example changes when it is read again; "
            "move what is random into its transform(batch, key, train)"
        )
        return Check("data", FAILED, text)
    return Check("data", OK, f"{len(index)} examples are the same when they are read again")


def check_surroundings(problem: Problem, trial: Trial, parts: dict[str, Program], readable: bool) -> list[Check]:
    """Check that no part depends on the devices, the host or the time."""
    causes = differences(parts, trace_parts(problem, trial), "impure")
    if not causes and readable:
        causes = on_other_hosts(problem, trial, parts)
    asked = [cause for part in MADE_BY_USER if part in parts for cause in device_causes(part, parts[part])]
    if not causes and not asked:
        asked = differences(parts, trace_parts(problem, trial, 3), "counts")
    if causes or asked:
        return [Check("devices", FAILED, cause) for cause in causes + asked]
    text = "data, model, loss and optimizer depend on neither devices, nor host, nor a random generator of their own"
    return [Check("devices", OK, text)]


def explain(kind: str, part: str = "", where: str = "", what: str = "") -> str:
    return CAUSES[kind].format(part=part, what=what, where=where and f" at {where}")


def device_causes(part: str, program: Program) -> list[str]:
    """Return what the program asks of the devices, as causes."""
    if program.unbound:
        return [explain("unbound", part, what=program.unbound)]
    return [
        explain("axis_index" if name == "axis_index" else "communicates", part, where, name)
        for name, where in trace.device_operations(program).items()
    ]


def differences(one: dict[str, Program], other: dict[str, Program], kind: str, what: str = "") -> list[str]:
    """Return a cause for each part whose programs differ; for combined parts only if no other part differs."""
    where = {part: trace.first_difference(program, other.get(part, Program([]))) for part, program in one.items()}
    differ = [part for part, line in where.items() if line is not None]
    chosen = [part for part in differ if part not in COMBINED] or differ[:1]
    return [explain(kind, part, where[part] or "", what) for part in chosen]


def on_other_hosts(problem: Problem, trial: Trial, parts: dict[str, Program]) -> list[str]:
    """Construct and trace everything again as on other hosts, and return what differs with its cause."""
    remake = problem.remake

    def trace_under(context: Any) -> dict[str, Program]:
        with context, other_hosts.fresh_modules() if remake else contextlib.nullcontext():
            return trace_parts(remake() if remake else problem, trial)

    if remake:
        try:
            again = trace_under(contextlib.nullcontext())
        except Exception:  # modules that cannot be imported twice
            remake = None
        else:
            if causes := differences(parts, again, "impure"):
                return causes

    def compare(host: other_hosts.Host, what: str, facts: list[str]) -> list[str]:
        try:
            return differences(parts, trace_under(other_hosts.pretend(host, facts)), "host", what=what)
        except Exception as error:
            return [explain("raises", what=f"{what}: {type(error).__name__}: {one_line(error)}")]

    facts = list(other_hosts.FACTS)
    for host in other_hosts.HOSTS:
        if causes := compare(host, "what differs between hosts", facts):
            return next((named for fact in facts if (named := compare(host, fact, [fact]))), causes)
    return []


def check_form(parts: dict[str, Program]) -> list[Check]:
    """Return a failure if the loss does not return (sum, weight, {metric: sum})."""
    if trace.LOSS in parts and not parts[trace.LOSS].unbound:
        try:
            check_result(parts[trace.LOSS].out)
        except UsageError as error:
            return [Check("loss", FAILED, str(error))]
    return []


def check_precision(problem: Problem, parts: dict[str, Program], tolerance: float | None) -> tuple[Any, list[Check]]:
    """Return (the dtype that model or loss compute in, a note if it is not float64)."""
    casts = [(part, trace.narrow_cast(parts[part])) for part in (trace.MODEL, trace.LOSS) if part in parts]
    for part, cast in casts:
        if cast is not None:
            dtype, where = cast[0], problem.float32_line or cast[1]
            allowed = TOLERANCE[dtype.name] if tolerance is None else tolerance
            text = f"{part} computes in {dtype.name}{where and f' at {where}'}, also from float64 arguments; "
            return dtype, [Check("precision", NOTE, f"{text}allowed is {allowed:g}")]
    return jnp.dtype(jnp.float64), []
