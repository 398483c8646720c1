"""A target is a built-in name or a dotted path, and arguments that fit its signature; what does not fit says so."""

import contextlib
import difflib
import functools
import importlib
import inspect
import numbers
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from jaxdp import user_errors
from jaxdp.errors import UsageError, one_line

OF_SCRIPT = "optax"  # begins the name, in a config, of an Optax transformation that a script gave to `fit`
OBJECT = " (object)"  # ends the name of anything else that only the script has
NUMBERS = {bool: bool, int: numbers.Integral, float: numbers.Real}
YAML = str | numbers.Number | list | tuple | Mapping | None  # types of the values that a config can have
PLURALS = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}


def name_of(transformation: Any, depth: int = 3) -> str:
    """Return what made an Optax transformation, as in chain(scale_by_adam, scale): it keeps no name of its own."""
    update = getattr(transformation, "update", transformation)
    name = getattr(update, "__qualname__", type(update).__name__).partition(".<locals>")[0].removesuffix(".update")
    parts: list[Any] = []
    for cell in (getattr(update, "__closure__", None) or ()) if depth else ():
        with contextlib.suppress(ValueError):  # an empty cell
            parts += cell.cell_contents if type(cell.cell_contents) in (tuple, list) else [cell.cell_contents]
    inner = [x for x in parts if hasattr(x, "init") or (inspect.isfunction(x) and "update" in x.__name__)]
    if name == "with_extra_args_support" and inner:
        return name_of(inner[0], depth)
    return f"{name}({', '.join(name_of(x, depth - 1) for x in inner)})" if inner else name


def locate(key: str, target: str, table: Mapping[str, Any]) -> Any:
    """The object that `key`.target names: a row of `table` (an object or its dotted path), or an importable path."""
    entry = table.get(target, target)
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.rpartition(".")
    if target.endswith(OBJECT):
        raise UsageError(f"{key}.target: {target!r} cannot be imported{_of_script(target)}")
    if not module:
        near = difflib.get_close_matches(target, table, 1, 0.5)
        hint = f"; did you mean {near[0]!r}, or module.{target}?" if near else f"; built in: {', '.join(table)}"
        raise UsageError(
            f"{key}.target: {target!r} is neither built in nor a dotted path"
            f"{_of_script(target) or _in_module(target) or hint}"
        )
    if os.path.isfile(target):
        name = (
            f"what is in it, such as {module}.Name" if name == "py" else "a function of yours that reads and returns it"
        )
        raise UsageError(f"{key}.target: {target!r} is a file; name {name}")
    if not all(part.isidentifier() for part in entry.split(".")):
        raise UsageError(f"{key}.target: {target!r} is not a dotted path, such as package.module.Name")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{key}.target: {target!r} cannot be imported: it needs {error.name!r}") from error
        here = [file.stem for file in pathlib.Path().glob("*.py")]
        near = difflib.get_close_matches(error.name, here, 1, 0.6)
        hint = f"did you mean {near[0]!r}?" if near else "is it installed, or its folder on PYTHONPATH?"
        raise UsageError(f"{key}.target: {target!r} cannot be imported: no module {error.name!r}; {hint}") from None
    except Exception as error:
        place = user_errors.lines(error)
        raise UsageError(
            f"{key}.target: {target!r} cannot be imported: {type(error).__name__}{f' at {place}' if place else ''}: "
            f"{one_line(error)}"
        ) from error
    if not hasattr(found, name):
        offered = [n for n, v in vars(found).items() if not n.startswith("_") and callable(v)]
        near = difflib.get_close_matches(name, offered, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{key}.target: module {module!r} has no {name!r}{_of_script(module) or hint}")
    return getattr(found, name)


def _of_script(name: str) -> str:
    """What to do where a saved config names an object that only the script had."""
    head = name.partition(" ")[0]
    if head not in (OF_SCRIPT, "tuple", "dict", "list") and not name.endswith(OBJECT):
        return ""
    return (
        "; it stands for an object that a script gave to jaxdp.fit: run the script, which has it, or give jaxdp.fit "
        "a class or function of a module, or the dotted path of one"
    )


def _in_module(target: str) -> str:
    """How to name something of one's own, where a word is no dotted path."""
    module, colon, name = target.partition(":")
    if colon and name:
        return f"; with a dot: {module}.{name}"
    local = pathlib.Path(f"{target}.py").is_file()
    return f"; {target!r} is a module: name what is in it, such as {target}.Name" if local else ""


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that are still to be given. Of a class, its __init__'s: a metaclass may hide them."""
    if isinstance(target, functools.partial):
        left = list(parameters(target.func).items())[len(target.args) :]
        return {n: p for n, p in left if n not in target.keywords}
    if isinstance(target, type):
        make = getattr(target, "__init__")  # noqa: B009  # mypy takes target.__init__ for an instance's
        return dict(list(inspect.signature(make).parameters.items())[1:]) if make is not object.__init__ else {}
    try:
        return dict(inspect.signature(target).parameters)
    except ValueError:  # some functions written in C tell nothing of themselves
        return {}


def bind(
    key: str, target: Any, args: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> functools.partial[Any]:
    """`target` with its arguments, as a function of what is left.

    given: values for arguments of these names that the config leaves out, where the target takes them.
    Raises UsageError that names an argument it does not take, or one of another type than its default.
    """
    name = getattr(target, "__name__", str(target))
    if not callable(target):
        raise UsageError(f"{key}.target: {name} is {type(target).__name__}, not a class or a function")
    known = parameters(target)
    takes = {n for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for arg in args:
            if arg not in takes:
                near = difflib.get_close_matches(arg, takes, 1, 0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(sorted(takes)) or 'none'}"
                raise UsageError(f"{key}.args.{arg}: {name} takes no such argument; {hint}")
    for arg, value in args.items():
        default = getattr(known.get(arg), "default", None)
        if isinstance(value, str) and isinstance(default, int | float):
            raise UsageError(f"{key}.args.{arg}: {value!r} is a text, not like {name}'s default, {default!r}")
        if arg == "rngs" and isinstance(value, YAML):
            raise UsageError(f"{key}.args.rngs: leave it out; {name} gets what it draws from, by the config's seed")
        hint = hint_of(target, arg, default)
        if not fits(value, hint):
            raise UsageError(f"{key}.args.{arg}: {value!r} is not {in_words(hint)}, which {name} takes")
    filled = {k: v for k, v in (given or {}).items() if k in takes}
    return functools.partial(target, **{**filled, **args})


def hint_of(target: Any, arg: str, default: Any) -> Any:
    """Return the type that a target of this package or of Optax takes for an argument; Any where that is not known."""
    if not str(getattr(target, "__module__", "")).startswith(("jaxdp.", "optax.")):
        return Any
    with contextlib.suppress(Exception):  # a name that stands for nothing at run time
        hint = get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)[arg]  # noqa: B009
        if hint is not Any:
            return hint
    return bool | None if isinstance(default, bool) else float | None if isinstance(default, int | float) else Any


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value, as YAML knows them, is of a type; what YAML does not know fits."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inside)
    if not isinstance(value, YAML):
        return True
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and isinstance(value, bool) == (kind is bool)
    if kind in (str, types.NoneType):
        return isinstance(value, kind)
    if kind in (Sequence, list):
        return isinstance(value, list | tuple) and all(fits(one, *inside[:1]) for one in value if inside)
    return kind not in (Mapping, dict) or isinstance(value, Mapping)


def in_words(hint: Any) -> str:
    """Return what a type of `fits` is called."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in inside))
    if kind in (Sequence, list):
        return f"a list of {PLURALS[inside[0]]}" if inside and inside[0] in PLURALS else "a list"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text", types.NoneType: "null"}
    return names.get(kind, "a mapping" if kind in (Mapping, dict) else getattr(kind, "__name__", str(kind)))


def call(key: str, bound: Callable[..., Any], make: Callable[[], Any] | None = None) -> Any:
    """What a bound target gives (or `make` of it); what it finds wrong with an argument is a `UsageError`."""
    if make is None:
        require(key, bound)
    try:
        return (make or bound)()
    except UsageError:
        raise
    except Exception as error:
        own = user_errors.lines(error)
        if not own and not isinstance(error, TypeError | ValueError):
            raise
        name = getattr(getattr(bound, "func", bound), "__name__", str(bound))
        args = getattr(bound, "keywords", {})
        shown = ", ".join(f"{k}={v!r}" for k, v in args.items())
        place = f" at {own}" if own else ""
        raise UsageError(
            f"{key}.args: {name}({shown}) failed{place}: {type(error).__name__}: {one_line(error)}"
        ) from error


def require(key: str, make: Callable[..., Any], *given: str) -> None:
    """Raises UsageError for the first argument of a bound target without a value, other than those `given`."""
    for arg, p in parameters(make).items():
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and arg not in given:
            name = getattr(getattr(make, "func", make), "__name__", str(make))
            raise UsageError(f"{key}.args.{arg}: {name} needs it; set {key}.args.{arg}")


def targets_in(key: str, entries: Sequence[Any], kind: str, example: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (target, args) of each entry of a list: a name, or {target, args}. Raises UsageError for anything else."""
    pairs: list[tuple[str, dict[str, Any]]] = []
    for entry in entries:
        if isinstance(entry, str):
            pairs.append((entry, {}))
        elif isinstance(entry, Mapping) and isinstance(entry.get("target"), str) and set(entry) <= {"target", "args"}:
            pairs.append((entry["target"], dict(entry.get("args") or {})))
        else:
            raise UsageError(f"{key}: {entry!r} is no {kind}; give a name such as {example}, or {{target, args}}")
    return pairs
