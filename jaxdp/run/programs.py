"""Traced programs as lines of text, one per operation: programs with equal lines compute equal
numbers.

The text contains no addresses, object ids or hash orders, so that it can be compared between
processes."""

import enum
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from jaxdp.errors import FOLDER, UsageError, is_own, relative
from jaxdp.optim.interpreter import inside
from jaxdp.precision import is_key
from jaxdp.process.context import Context

CALLERS = (FOLDER / "verify", FOLDER / "precision.py")  # call or cast the traced code
LOGS = ("debug_callback", "debug_print")  # operations that change no number
# The effects of operations that write for people.
WRITES = ("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect")
Digest = tuple[str, Mapping[str, str]]  # of a program, and of each line of code in it
PLAIN = (str, int, float, complex, type(None), np.dtype, enum.Enum, slice)


class Line(NamedTuple):
    """An operation. operands: numbers of earlier results; where: file:line of the code that called
    it.
    """

    text: str
    operands: tuple[str, ...]
    where: str


def lines(program: jex.Jaxpr | jex.ClosedJaxpr, outer: str = "") -> Iterator[Line]:
    """Yield every operation that a result depends on, then the results. outer: the place of the
    enclosing operation.
    """
    jaxpr, consts = (
        (program.jaxpr, program.consts) if isinstance(program, jex.ClosedJaxpr) else (program, ())
    )
    names = dict(zip(jaxpr.constvars, map(describe, consts), strict=False))
    names |= {v: f"argument {i} {v.aval}" for i, v in enumerate(jaxpr.invars)}

    def named(v):
        return describe(v.val) if isinstance(v, jex.Literal) else names.get(v, "")

    count = itertools.count()
    for eqn in needed(jaxpr):
        operands = tuple(named(v) for v in eqn.invars)
        constants = [name for name in operands if not name.startswith(("argument", "result"))]
        params = {k: describe(v) for k, v in sorted(eqn.params.items()) if k != "name"}
        shapes = [str(v.aval) for v in eqn.outvars]
        where = line(eqn) or outer
        yield Line(f"{eqn.primitive.name} {constants} {params} {shapes}", operands, where)
        for inner in inside(eqn):
            yield from lines(inner, where)
        names |= {v: f"result {next(count)}" for v in eqn.outvars}
    yield Line("return", tuple(named(v) for v in jaxpr.outvars), outer)


def needed(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Return the operations that the results depend on, or that have an effect other than to write
    a log.
    """
    used, eqns = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        effect = any(type(e).__name__ not in WRITES for e in eqn.effects)
        if eqn.primitive.name not in LOGS and (effect or not used.isdisjoint(eqn.outvars)):
            eqns.append(eqn)
            used |= {v for v in eqn.invars if not isinstance(v, jex.Literal)}
    return eqns[::-1]


def describe(value: Any) -> str:
    """Return a parameter or a constant as text; an object without numbers becomes its name or its
    type's name.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{describe(k)}: {describe(v)}' for k, v in value.items()))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)} {digest_of(value)}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def digest_of(array: Any) -> str:
    values = np.asarray(jax.random.key_data(array) if is_key(array) else array)
    # Of objects, only the text, such as a shape, is compared.
    return (
        str(array) if values.dtype == object else hashlib.sha256(values.tobytes()).hexdigest()[:16]
    )


def line(eqn: jex.JaxprEqn) -> str:
    """Return file:line of the innermost frame outside of libraries."""
    trace: Any = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if file := shown(frame.file_name):
            return f"{file}:{frame.line_num}"
    return ""


@functools.cache
def shown(name: str) -> str:
    """Return the path for messages of a file of the user's or of jaxdp; "" for others, and for
    CALLERS.
    """
    file = pathlib.Path(name)
    if any(map(file.is_relative_to, CALLERS)) or not (is_own(name) or file.is_relative_to(FOLDER)):
        return ""
    return relative(name)


def digest(program: Iterable[Line]) -> Digest:
    """Return the digest of a program, and {file:line: digest} of its source lines, in the order of
    the program.
    """
    total, by_line = hashlib.sha256(), dict[str, Any]()
    for text, operands, where in program:
        total.update(f"{text} {operands}\n".encode())
        by_line.setdefault(where, hashlib.sha256()).update(text.encode())
    return total.hexdigest()[:16], {
        where: sha.hexdigest()[:8] for where, sha in by_line.items() if where
    }


def check_same(context: Context, programs: Mapping[str, Digest], timeout: float = 60.0) -> None:
    """Raise UsageError on every rank, printed by rank 0, if a rank's programs differ from those of
    rank 0.
    """
    name = "the traced programs"
    try:
        context.check_same(name, {part: total for part, (total, _) in programs.items()}, timeout)
    except UsageError as difference:
        text = str(difference)
        lines = {
            f"{part} at {where}": d
            for part, (_, by_line) in programs.items()
            for where, d in by_line.items()
        }
        try:
            context.check_same(name, lines, timeout)
        except UsageError as located:
            text = str(located)
        causes = "the rank, the environment, the time, a file or a process id"
        raise UsageError(
            f"{text}; does the code there depend on {causes}? See jaxdp verify", difference.rank
        ) from None
