"""The keys of a config in words: what `--help`, the completion and the reference page are made of."""

import dataclasses
import inspect
import re
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxdp.config import Config
from jaxdp.config.keys import inner

KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "mapping", list: "list"}


class Key(NamedTuple):
    """name: dotted, as on the command line; choices: the values it can have, where these are few; decides: 'numbers'
    or 'speed'."""

    name: str
    kind: str
    choices: tuple[str, ...]
    default: Any
    decides: str
    text: str


class Group(NamedTuple):
    """The keys of one section; the name of the first section, which has none of its own, is empty."""

    name: str
    text: str
    keys: list[Key]


def groups() -> list[Group]:
    """All keys of a config, section by section, in the order of the file."""
    fields = dataclasses.fields(Config)
    hints = get_type_hints(Config)
    top = [f for f in fields if inner(hints[f.name]) is None]
    found = [Group("", summary(Config), [_key(Config, f, "") for f in top])]
    for field in fields:
        if part := inner(hints[field.name]):
            found.append(Group(field.name, summary(part), _keys(part, f"{field.name}.")))
    return found


def summary(thing: Any) -> str:
    """A docstring's text ahead of its arguments, in one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\nArgs:")[0].split())


def arguments(thing: Any) -> dict[str, str]:
    """{argument: its description} of a docstring's section `Args:`."""
    section = (inspect.getdoc(thing) or "").partition("\nArgs:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _keys(part: Any, prefix: str) -> list[Key]:
    found: list[Key] = []
    for field in dataclasses.fields(part):
        found.append(_key(part, field, prefix))
        if below := inner(get_type_hints(part)[field.name]):
            found += _keys(below, f"{prefix}{field.name}.")
    return found


def _key(part: Any, field: "dataclasses.Field[Any]", prefix: str) -> Key:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    hint = get_type_hints(part)[field.name]
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words: list[str] = []
    choices: tuple[str, ...] = ()
    for kind in kinds:
        if get_origin(kind) is Literal:
            choices += get_args(kind)
            words += get_args(kind)
        elif kind is not type(None):
            words.append("target and args" if inner(kind) else KINDS[get_origin(kind) or kind])
            choices += ("true", "false") if kind is bool else ()
    if type(None) in kinds:
        words.append("null")
    decides = field.metadata["decides"]
    return Key(
        f"{prefix}{field.name}", ", ".join(words), choices, default, decides, arguments(part).get(field.name, "")
    )
