"""Targets: built-in names or dotted paths with arguments; each argument is checked against the
signature.
"""

import contextlib
import functools
import importlib
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from jaxdp.config.values import YAML, fits, in_words, plain, typed
from jaxdp.errors import UsageError, cause, nearest, suggest, user_lines
from jaxdp.process import imports

Table = Mapping[str, Any]  # names -> objects, or their dotted paths
Args = Mapping[str, Any]  # the arguments of a target

# prefix, in a config, of the name of an Optax transformation that a script passed to `fit`
OF_SCRIPT = "optax"
OBJECT = " (object)"  # suffix of the name of any other object that only the script has


def name_of(transformation: Any, depth: int = 3) -> str:
    """Return a name for an Optax transformation, which has none, from its functions:
    chain(scale_by_adam, scale).
    """
    update = getattr(transformation, "update", transformation)
    name = getattr(update, "__qualname__", type(update).__name__)
    name = name.partition(".<locals>")[0].removesuffix(".update")
    inner: list[Any] = []
    for cell in (getattr(update, "__closure__", None) or ()) if depth else ():
        with contextlib.suppress(ValueError):  # an empty cell
            content = cell.cell_contents
            for x in content if type(content) in (tuple, list) else [content]:
                if hasattr(x, "init") or (inspect.isfunction(x) and "update" in x.__name__):
                    inner.append(x)
    if name == "with_extra_args_support" and inner:
        return name_of(inner[0], depth)
    return f"{name}({', '.join(name_of(x, depth - 1) for x in inner)})" if inner else name


def locate(key: str, target: str, table: Table, field: str | None = None) -> Any:
    """Import the object that a target names: a row of `table` (an object or its dotted path), or a
    dotted path.

    field: the config's key for messages, if it is not `key`.target.
    """
    field = field or f"{key}.target"
    entry = table.get(target, target)
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.rpartition(".")
    if target.endswith(OBJECT):
        raise UsageError(f"{field}: {target!r} cannot be imported{_of_script(target)}")
    if not module:
        near = nearest(target, table)
        known = ", ".join(table)
        hint = f"; did you mean {near!r}, or module.{target}?" if near else f"; built in: {known}"
        raise UsageError(
            f"{field}: {target!r} is neither built in nor a dotted path"
            f"{_of_script(target) or _in_module(target) or hint}"
        )
    if os.path.isfile(target):
        name = (
            f"an object in it, such as {module}.Name"
            if name == "py"
            else "a function of yours that reads and returns it"
        )
        raise UsageError(f"{field}: {target!r} is a file; name {name}")
    if not all(part.isidentifier() for part in entry.split(".")):
        raise UsageError(f"{field}: {target!r} is not a dotted path, such as package.module.Name")
    try:
        imported: Any = imports.for_user(importlib.import_module, module)
    except Exception as error:
        raise _not_imported(f"{field}: {target!r}", module, error) from error
    if not hasattr(imported, name):
        public = [n for n, v in vars(imported).items() if not n.startswith("_") and callable(v)]
        near, file = suggest(name, public), imports.hiding().get(module.partition(".")[0])
        hint = f"; {near}" if near else ""
        if file and not near:
            hint = f": it is a library, which comes before {file}; rename this file"
        raise UsageError(f"{field}: module {module!r} has no {name!r}{_of_script(module) or hint}")
    return getattr(imported, name)


def _not_imported(target: str, module: str, error: Exception) -> UsageError:
    """Return the error for a module that is not there, lacks another one, or fails."""
    if not isinstance(error, ModuleNotFoundError):
        return UsageError(f"{target} cannot be imported{cause(error)}")
    if error.name is None or not f"{module}.".startswith(f"{error.name}."):
        return UsageError(f"{target} cannot be imported: it needs {error.name!r}")
    local = [file.stem for file in pathlib.Path().glob("*.py")]
    hint = suggest(error.name, local, 0.6, "is it installed, or its folder on PYTHONPATH?")
    return UsageError(f"{target} cannot be imported: no module {error.name!r}; {hint}")


def _of_script(name: str) -> str:
    """Return advice for a saved config that names an object of a script; "" for other names."""
    head = name.partition(" ")[0]
    if head not in (OF_SCRIPT, "tuple", "dict", "list") and not name.endswith(OBJECT):
        return ""
    return (
        "; it names an object that a script passed to jaxdp.fit: run the script, or pass jaxdp.fit a class or function "
        "of a module, or its dotted path"
    )


def _in_module(target: str) -> str:
    """Return advice for a target that is not a dotted path: a colon instead of a dot, or a module's
    name.
    """
    module, colon, name = target.partition(":")
    if colon and name:
        return f"; with a dot: {module}.{name}"
    local = pathlib.Path(f"{target}.py").is_file()
    return f"; {target!r} is a module: name an object in it, such as {target}.Name" if local else ""


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the unbound parameters; for a class, those of __init__, since a metaclass may hide
    them.
    """
    if isinstance(target, functools.partial):
        unbound = list(parameters(target.func).items())[len(target.args) :]
        return {n: p for n, p in unbound if n not in target.keywords}
    if isinstance(target, type):
        make = getattr(target, "__init__")  # noqa: B009  # mypy takes target.__init__ for an instance's
        if make is object.__init__:
            return {}
        return dict([*inspect.signature(make).parameters.items()][1:])
    try:
        return dict(inspect.signature(target).parameters)
    # Not callable; or written in C, as some functions without a signature.
    except (TypeError, ValueError):
        return {}


def named(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the unbound parameters that can be passed by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in parameters(target).items() if p.kind in kinds}


def bind(key: str, target: Any, args: Args, extra: Args | None = None) -> functools.partial[Any]:
    """Bind `target` to its arguments; return a function of the remaining ones.

    args: of the config; the target gets them in the types of its annotations.
    extra: values for arguments of these names, if the target takes them and the config does not set
    them. Raises UsageError for an argument that the target does not take, or that has the wrong
    type."""
    name = getattr(target, "__name__", str(target))
    if not callable(target):
        raise UsageError(
            f"{key}.target: it is an object of type {type(target).__name__}, not a class or a function"
        )
    known, takes = parameters(target), named(target)
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for arg in args:
            if arg not in takes:
                hint = suggest(
                    arg, takes, otherwise=f"it takes: {', '.join(sorted(takes)) or 'none'}"
                )
                raise UsageError(f"{key}.args.{arg}: {name} takes no such argument; {hint}")
    values = arguments(target, args)
    # The annotations of these libraries are complete: they say where null is meant.
    complete = str(getattr(target, "__module__", "")).startswith(("jaxdp.", "optax."))
    for arg, value in values.items():
        field = f"{key}.args.{arg}"
        default: Any = getattr(known.get(arg), "default", None)
        wanted: Any = hint_of(target, known.get(arg))
        if isinstance(default, int | float):
            if isinstance(value, str) and (wanted is Any or not fits(value, wanted)):
                raise UsageError(
                    f"{field}: {value!r} is a text, unlike {name}'s default, {default!r}"
                )
            if complete and fits({}, wanted):  # of any type, or of an array's
                wanted = bool | None if isinstance(default, bool) else float | None
        if arg == "rngs" and isinstance(value, YAML):
            raise UsageError(
                f"{field}: leave it out; {name} gets its random numbers from the config's seed"
            )
        if not fits(value, wanted) and (complete or value is not None):
            quotes = "; put it in quotes" * (fits("", wanted) and isinstance(value, bool | None))
            raise UsageError(
                f"{key}.args.{arg}: {value!r} is not {in_words(wanted)}, which {name} takes{quotes}"
            )
    filled = {k: v for k, v in (extra or {}).items() if k in takes}
    return functools.partial(target, **(filled | values))


def arguments(target: Callable[..., Any], args: Args) -> dict[str, Any]:
    """Return the arguments of a target in the types of its annotations, unchecked."""
    known = parameters(target)
    return plain(
        {arg: typed(value, hint_of(target, known.get(arg))) for arg, value in args.items()}
    )


def hint_of(target: Any, parameter: inspect.Parameter | None) -> Any:
    """Return the type in the annotation of a target's parameter; Any if it has none, or one that
    cannot be read.
    """
    if parameter is None or parameter.annotation is parameter.empty:
        return Any
    function = getattr(target, "func", target)  # of a partial
    if isinstance(function, type):
        function = getattr(function, "__init__")  # noqa: B009  # mypy takes it for an instance's
    function = inspect.unwrap(function)
    annotated = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    with contextlib.suppress(Exception):  # a name that does not exist at run time
        return get_type_hints(annotated, vars(sys.modules[function.__module__]))[parameter.name]
    return Any


def attribute(target: Any, name: str, default: Any) -> Any:
    """Return an attribute of a function or an object, looking through `functools.partial`."""
    return getattr(target.func if isinstance(target, functools.partial) else target, name, default)


def call(key: str, bound: Callable[..., Any], make: Callable[[], Any] | None = None) -> Any:
    """Call a bound target (or `make` instead). Raises UsageError if it rejects an argument or its
    own code fails.
    """
    if make is None:
        require(key, bound)
    try:
        return (make or bound)()
    except UsageError:
        raise
    except Exception as error:
        if not user_lines(error) and not isinstance(error, TypeError | ValueError):
            raise
        name = attribute(bound, "__name__", str(bound))
        shown = ", ".join(f"{k}={v!r}" for k, v in getattr(bound, "keywords", {}).items())
        raise UsageError(f"{key}.args: {name}({shown}) failed{cause(error)}") from error


def require(key: str, make: Callable[..., Any], *provided: str) -> None:
    """Raise UsageError for the first argument of a bound target that has no value and is not in
    `provided`.
    """
    for arg, parameter in named(make).items():
        if parameter.default is parameter.empty and arg not in provided:
            name = attribute(make, "__name__", str(make))
            raise UsageError(f"{key}.args.{arg}: {name} needs it; set {key}.args.{arg}")


def targets_in(
    key: str, entries: Sequence[Any], kind: str, example: str
) -> list[tuple[str, dict[str, Any]]]:
    """Return (target, args) of each entry of a list: a name, or {target, args}. Raises UsageError
    for anything else.
    """
    pairs: list[tuple[str, dict[str, Any]]] = []
    for entry in entries:
        target: Any = {"target": entry} if isinstance(entry, str) else entry
        if (
            not isinstance(target, Mapping)
            or not isinstance(target.get("target"), str)
            or not set(target) <= {"target", "args"}
        ):
            raise UsageError(
                f"{key}: {entry!r} is not a {kind}; give a name such as {example}, or {{target, args}}"
            )
        pairs.append((target["target"], target.get("args") or {}))
    return pairs
