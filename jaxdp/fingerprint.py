"""Fingerprints of Python objects by content, to compare the objects of two runs.

A fingerprint covers everything that decides an object's results: arrays and other values, code, default arguments,
closures, the globals that the code reads, and classes with their bases. Code of installed packages is represented by
its name. A fingerprint is the same in every process. An object that cannot be compared raises `NotComparable`.
"""

import builtins
import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import itertools
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.user_errors import is_own

# Modules whose results may differ in the next process.
OUTSIDE = {"os", "posix", "io", "_io", "pathlib", "tempfile", "glob", "importlib", "socket", "subprocess", "urllib"}
OUTSIDE |= {"time", "datetime", "random", "numpy.random", "secrets", "uuid"}
OUTSIDE_CALLS = {"open", "input", "eval", "exec", "compile", "globals", "locals", "__import__", "id", "hash"}
ATOMS = {bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented)}
# Class attributes added by Python, dataclasses and type hints, which follow from the rest or do not matter.
BESIDE = re.compile(
    r"__(module|qualname|dict|weakref|doc|firstlineno|static_attributes|annotations|annotate|annotate_func|"
    r"annotations_cache|abstractmethods|dataclass_fields|dataclass_params|orig_bases|parameters|type_params|hash|repr)__"
    r"|_abc_.*"
)


class NotComparable(Exception):
    """An object that has no fingerprint; the message names the cause."""


def fingerprint(value: Any, pure: bool = True) -> str:
    """Return 16 hex digits that are equal for equal objects, in any process.

    pure: refuse code that reads files, the environment, the clock or random numbers. Raises NotComparable.
    """
    try:
        return _Walk(pure).digest(value).hex()[:16]
    except NotComparable:
        raise
    except RecursionError:
        raise NotComparable("it is nested too deeply") from None
    except Exception as error:  # a property or an array that cannot be read
        raise NotComparable(f"reading it raised {type(error).__name__}") from error


class _Walk:
    """The digests of an object and of all objects that it refers to."""

    def __init__(self, pure: bool):
        self.pure = pure
        self.open: list[int] = []  # ids of the enclosing objects
        self.done: dict[int, tuple[bytes, Any]] = {}  # with the object, so that its id is not reused

    def digest(self, x: Any) -> bytes:
        if x is None or type(x) in ATOMS:
            return f"{type(x).__name__} {x!r}".encode()
        if id(x) in self.done:
            return self.done[id(x)][0]
        if id(x) in self.open:
            return b"up %d" % (len(self.open) - self.open.index(id(x)))
        self.open.append(id(x))
        sha = hashlib.sha256()
        for part in self.parts(x):
            part = part if isinstance(part, bytes | memoryview) else str(part).encode()
            sha.update(b"%d:" % len(part))
            sha.update(part)
        self.open.pop()
        self.done[id(x)] = sha.digest(), x
        return sha.digest()

    def all(self, values: Iterable[Any]) -> Iterator[bytes]:
        return map(self.digest, values)

    def parts(self, x: Any) -> Iterator[Any]:
        """Yield the names, bytes and digests that identify `x`."""
        kind = type(x)
        if kind is np.memmap and x.mode == "r" and x.filename:  # it may be too large to read at each start
            file, base = os.stat(x.filename), np.frombuffer(x._mmap, np.uint8).ctypes.data
            yield from ("file", os.path.realpath(x.filename), file.st_size, file.st_mtime_ns, x.offset)
            yield from (x.ctypes.data - base, x.dtype.name, x.shape, x.strides)
        elif isinstance(x, jax.Array | np.generic) or kind in (np.ndarray, np.memmap):
            yield from self.array(x)
        elif kind in (tuple, list):
            yield from (kind.__name__, *self.all(x))
        elif kind in (dict, types.MappingProxyType):
            yield from ("dict", *(self.digest(part) for item in x.items() for part in item))
        elif kind in (set, frozenset):
            yield from (kind.__name__, *sorted(self.all(x)))
        elif isinstance(x, types.ModuleType):
            yield from ("module", self.name(x.__name__))
        elif (name := _library_name(x)) is not None:
            yield from ("name", self.name(name))
        elif isinstance(x, type):
            yield from self.of_class(x)
        elif isinstance(x, types.FunctionType):
            yield from self.function(x)
        elif isinstance(x, types.MethodType):
            yield from ("method", *self.all((x.__func__, x.__self__)))
        elif isinstance(x, types.BuiltinMethodType | types.MethodWrapperType):
            yield from ("method", x.__name__, self.digest(x.__self__))
        else:
            yield from self.instance(x)

    def name(self, name: str) -> str:
        """Return the name of a library's module, class or function; it represents the object."""
        module = name.partition(".")[0] if not name.startswith("numpy.random") else "numpy.random"
        if self.pure and (module in OUTSIDE or name.removeprefix("builtins.") in OUTSIDE_CALLS):
            raise NotComparable(f"it uses {name}, which may differ in the next process")
        return name

    def array(self, x: Any) -> Iterator[Any]:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            yield str(x.dtype)
            x = jax.random.key_data(x)
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            raise NotComparable("it has an array that is split over processes")
        value = np.asarray(x)
        yield from ("array", value.dtype.str if value.dtype.names is None else value.dtype.descr, value.dtype.name)
        yield str(value.shape)
        if value.dtype.hasobject:
            yield from self.all(value.ravel().tolist())
        else:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data

    def of_class(self, x: type) -> Iterator[Any]:
        yield from ("class", x.__qualname__, *self.all(x.__bases__))
        if issubclass(x, enum.Enum):
            yield from self.all((m.name, m.value) for m in x)
            members = {k: v for k, v in vars(x).items() if isinstance(v, types.FunctionType)}
        else:
            members = {k: v for k, v in vars(x).items() if not BESIDE.fullmatch(k)}
        for name, value in sorted(members.items()):
            yield from (name, self.digest(value))

    def function(self, x: types.FunctionType) -> Iterator[Any]:
        """Yield code, default arguments, closure and attributes, and outside of libraries the globals that it reads."""
        yield from ("function", *self.all((x.__code__, x.__defaults__, x.__kwdefaults__, x.__dict__)))
        for cell in x.__closure__ or ():
            yield self.digest(cell)
        if not _is_library(x.__module__):
            for name, value in _globals(x.__code__, x.__globals__):
                yield from (name, self.digest(value))

    def code(self, x: types.CodeType) -> Iterator[Any]:
        arguments = x.co_varnames[: x.co_argcount + x.co_kwonlyargcount + 2]
        names = (x.co_argcount, x.co_posonlyargcount, x.co_kwonlyargcount, x.co_flags, x.co_names, x.co_freevars)
        yield from ("code", x.co_code, x.co_exceptiontable, repr((names, arguments)), *self.all(x.co_consts))

    def instance(self, x: Any) -> Iterator[Any]:
        """Yield the parts of any other object: by its type if known, else as pickle would save it."""
        kind = type(x)
        if isinstance(x, types.CodeType):
            yield from self.code(x)
        elif isinstance(x, types.CellType):
            yield from ("cell", *self.all([x.cell_contents] if x != types.CellType() else []))
        elif isinstance(x, staticmethod | classmethod | functools.cached_property):
            yield from (kind.__name__, self.digest(getattr(x, "__func__", None) or getattr(x, "func", None)))
        elif isinstance(x, property):
            yield from ("property", *self.all((x.fget, x.fset)))
        elif isinstance(x, types.MemberDescriptorType | types.GetSetDescriptorType | types.WrapperDescriptorType):
            yield from (kind.__name__, x.__name__)  # a slot
        elif isinstance(x, functools.partial):
            yield from ("partial", *self.all((kind, x.func, x.args, dict(sorted(x.keywords.items())))))
        elif _is_linen(x):
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.name != "parent"}
            yield from ("fields", *self.all((kind, fields)))
        elif _is_library(kind.__module__) and callable(x) and hasattr(x, "__wrapped__"):
            # made by jax.jit, jax.custom_jvp, functools.cache
            yield from ("wrapper", *self.all((kind, x.__wrapped__, getattr(x, "__dict__", {}))))
        elif hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):  # another library's array
            yield from (self.digest(kind), *self.array(np.asarray(x)))
        else:
            yield from self.pickled(x)

    def pickled(self, x: Any) -> Iterator[Any]:
        try:
            reduced = x.__reduce_ex__(4)
        except Exception:
            raise NotComparable(f"it has a {type(x).__module__}.{type(x).__qualname__}") from None
        if isinstance(reduced, str):
            module = getattr(x, "__module__", None) or type(x).__module__
            if getattr(sys.modules.get(module), reduced, None) is not x:
                raise NotComparable(f"it has {reduced!r}, which {module} does not have")
            yield from ("named", self.name(f"{module}.{reduced}"))
            return
        parts: list[Any] = [*reduced, None, None, None]
        make, args, state, items, pairs = parts[:5]
        yield from ("object", *self.all((type(x), make, args)))
        if isinstance(state, Mapping):
            state = dict(sorted(state.items()))
        yield self.digest(state)
        if self.pure and not _is_library(type(x).__module__):  # which its __getstate__ may leave out
            yield self.digest(dict(sorted(getattr(x, "__dict__", {}).items())))
        for part in (items, pairs):
            yield from ("items", *self.all(part or ()))


def _globals(code: types.CodeType, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the global names that code reads, with their values, and the attributes that it reads from modules."""
    for inner in _codes(code):
        steps = [*dis.get_instructions(inner)]
        for step, following in itertools.pairwise(steps):
            if step.opname == "IMPORT_NAME":
                with contextlib.suppress(ImportError):
                    value = importlib.import_module(step.argval)
                    yield from _attributes(value, following, inner.co_names)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = space.get(step.argval, getattr(builtins, step.argval, None))
                yield step.argval, value
                if isinstance(value, types.ModuleType):
                    yield from _attributes(value, following, inner.co_names)


def _attributes(
    module: types.ModuleType, following: dis.Instruction, names: Iterable[str], inside: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield a module and its attributes: in a library only a module read by the next instruction, else all in `names`.

    inside: the enclosing modules.
    """
    yield module.__name__, module
    if _is_library(module.__name__):
        names = [following.argval] if following.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") else []
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):
            yield name, value
            if value not in inside and not _is_library(value.__name__):
                yield from _attributes(value, following, names, (*inside, module))
        elif hasattr(module, name) and not _is_library(module.__name__):
            yield name, value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _library_name(x: Any) -> str | None:
    """Return the dotted path under which an installed package has the object, or None."""
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if isinstance(x, types.BuiltinFunctionType) and (x.__self__ is None or isinstance(x.__self__, types.ModuleType)):
        module, name = module or "builtins", x.__name__
    if not (isinstance(module, str) and isinstance(name, str) and _is_library(module)):
        return None
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return f"{module}.{name}" if target is x else None


@functools.cache
def _is_library(name: str | None) -> bool:
    """Return True if a module belongs to Python, jaxdp or an installed package."""
    module = sys.modules.get(name or "")
    if module is None or name == "__main__":
        return False
    file = getattr(module, "__file__", None)
    if file is None:  # built into Python, or a folder without __init__.py
        return not hasattr(module, "__path__")
    return not is_own(file)


def _is_linen(x: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(x, linen.Module)
