"""A target is a built-in name or a dotted path, and arguments that fit its signature; what does not fit says so."""

import difflib
import functools
import importlib
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxdp import own_code
from jaxdp.errors import UsageError, one_line

OF_SCRIPT = "optax"  # the name, in a config, of an Optax transformation that a script gave to `fit`


def locate(key: str, target: str, table: Mapping[str, Any]) -> Any:
    """The object that `key`.target names: a row of `table` (an object or its dotted path), or an importable path."""
    entry = table.get(target, target)
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.rpartition(".")
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
        place = own_code.lines(error)
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
    known = name in (OF_SCRIPT, "tuple", "dict", "list", "__main__")
    return "; it stands for an object that a script gave to jaxdp.fit: run the script, which has it" if known else ""


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
    filled = {k: v for k, v in (given or {}).items() if k in takes}
    return functools.partial(target, **{**filled, **args})


def call(key: str, bound: Callable[..., Any], make: Callable[[], Any] | None = None) -> Any:
    """What a bound target gives (or `make` of it); what it finds wrong with an argument is a `UsageError`."""
    if make is None:
        require(key, bound)
    try:
        return (make or bound)()
    except UsageError:
        raise
    except Exception as error:
        own = own_code.lines(error)
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
