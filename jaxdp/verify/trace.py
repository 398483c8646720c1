"""What a function asks of its surroundings stands in its jaxpr: its device, the other devices, a random generator.

A fault there is found where it is written, before anything is computed.
"""

import importlib
import pathlib
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxdp.axes import DATA

LIBRARIES = tuple(
    str(pathlib.Path(str(importlib.import_module(name).__file__)).parent)
    for name in ("jax", "jaxlib", "flax", "optax", "numpy")
)
PYTHON = sysconfig.get_paths()["stdlib"]
HERE = pathlib.Path(__file__).parents[2]
NO_TALK = {"pvary", "pcast", "pbroadcast"}  # name an axis and move nothing
DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
CAUSES = {
    "axis_index": "{part} asks which device it is on ({what}{where}), and a key or value made of that depends on the "
    "devices; derive it from the key that is given",
    "talks": "{part} communicates over the devices ({what}{where}), as BatchNorm with sync: true does, so that its "
    "numbers depend on how many there are",
    "counts": "{part} asks how many devices there are (axis_size, or psum of 1{where}), and its numbers depend on it",
    "impure": "{part} is not the same when it is traced again (it differs{where}): it draws from a generator of its "
    "own, NumPy's or Python's, or changes something global; derive what is random from the key that is given",
    "unbound": "{part} names an axis that is not there ({what}); that of all devices is 'data', and init is outside it",
}


class Finding(NamedTuple):
    """kind: a key of CAUSES. what: an operation; where: a line of the code that asked for it, or nothing."""

    kind: str
    part: str
    what: str = ""
    where: str = ""

    def __str__(self) -> str:
        return CAUSES[self.kind].format(part=self.part, what=self.what, where=self.where and f" at {self.where}")


class Traced(NamedTuple):
    """random: it draws random numbers; narrow: (dtype, where) of the first cast below float64, or None.

    out: the shapes of what it returns, or None where it cannot be traced.
    """

    part: str
    findings: list[Finding]
    random: bool
    narrow: tuple[Any, str] | None
    out: Any


def trace(part: str, f: Callable, *args: Any, mapped: bool = True) -> Traced:
    """What `f(*args)` asks for; part: what to call it. mapped: where it runs, the axis of all devices is bound."""
    on = lambda devices: bound(f, devices if mapped else None)(*args)
    try:
        first, out = on(2)
    except NameError as error:
        return Traced(
            part,
            [Finding("unbound", part, repr(str(error).partition("axis name: ")[2].partition(".")[0]))],
            False,
            None,
            None,
        )
    findings: dict[str, Finding] = {}
    random, narrow = False, None
    for eqn in equations(first.jaxpr):
        name = eqn.primitive.name
        random = random or name in DRAWS
        if name == "axis_index":
            findings.setdefault(name, Finding(name, part, name, line(eqn)))
        elif name not in NO_TALK and DATA in axis_names(eqn):
            findings.setdefault("talks", Finding("talks", part, name, line(eqn)))
        elif narrow is None and name == "convert_element_type":
            narrow = narrowing(eqn)
    again = differing(first, on(2)[0])
    if again is not None:
        findings["impure"] = Finding("impure", part, where=again)
    elif not findings and (where := differing(first, on(3)[0])) is not None:
        findings["counts"] = Finding("counts", part, where=where)
    return Traced(part, list(findings.values()), random, narrow, out)


def bound(f: Callable, devices: int | None = 2) -> Callable[..., tuple[jex.ClosedJaxpr, Any]]:
    """args -> (the jaxpr of f(*args), the shapes of what it returns), traced as one of so many devices, and anew."""
    axes = [(DATA, devices)] if devices else None
    return jax.make_jaxpr(lambda *args: f(*args), axis_env=axes, return_shape=True)


def equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Every equation, those inside of others (loops, calls, rules) too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inside(eqn):
            yield from equations(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def inside(eqn: jex.JaxprEqn) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, jex.Jaxpr | jex.ClosedJaxpr):
                yield one


def axis_names(eqn: jex.JaxprEqn) -> tuple[Any, ...]:
    """The mesh axes that an equation names; dims of an array are integers."""
    names = [eqn.params.get(key, ()) for key in ("axes", "axis_name")]
    return tuple(n for name in names for n in (name if isinstance(name, tuple | list) else (name,)))


def narrowing(eqn: jex.JaxprEqn) -> tuple[Any, str] | None:
    source, target = getattr(eqn.invars[0].aval, "dtype", None), eqn.params["new_dtype"]
    if source == jnp.float64 and jnp.issubdtype(target, jnp.floating) and target != jnp.float64:
        return jnp.dtype(target), line(eqn)
    return None


def line(eqn: jex.JaxprEqn) -> str:
    """file:line of the innermost code that belongs to no library."""
    found: Any = eqn.source_info.traceback
    for frame in found.frames if found is not None else ():
        file = pathlib.Path(frame.file_name)
        python = frame.file_name.startswith(PYTHON) and "site-packages" not in file.parts
        if file.is_absolute() and not python and not frame.file_name.startswith(LIBRARIES):
            near = next((root for root in (pathlib.Path.cwd(), HERE) if file.is_relative_to(root)), None)
            return f"{file.relative_to(near) if near else file}:{frame.line_num}"
    return ""


def differing(one: jex.ClosedJaxpr, other: jex.ClosedJaxpr) -> str | None:
    """Where two jaxprs differ first, in an operation or a constant; None where they are the same."""
    first, second = list(signature(one)), list(signature(other))
    for (a, where), (b, _) in zip(first, second):
        if a != b:
            return where
    return None if len(first) == len(second) else ""


def signature(closed: jex.ClosedJaxpr) -> Iterator[tuple[str, str]]:
    """(operation, shapes and constants as text, where it is written) of every equation."""
    yield from _signature(closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts)))


def _signature(jaxpr: jex.Jaxpr, consts: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    for eqn in jaxpr.eqns:
        known = [v.val if isinstance(v, jex.Literal) else consts.get(v) for v in eqn.invars]
        shapes = [str(v.aval) for v in eqn.outvars]
        yield f"{eqn.primitive.name} {shapes} {[_bytes(v) for v in known if v is not None]}", line(eqn)
        for inner in inside(eqn):
            if isinstance(inner, jex.ClosedJaxpr):
                yield from signature(inner)
            else:
                yield from _signature(inner, {})


def _bytes(value: Any) -> bytes | str:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    try:
        return np.asarray(value).tobytes()
    except TypeError:
        return type(value).__name__
