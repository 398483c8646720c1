"""Descriptions of the config's keys, for `--help`, shell completion and the reference page."""

import dataclasses
import inspect
import re
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxdp.config import Config
from jaxdp.config.keys import inner

KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "mapping", list: "list"}


class Key(NamedTuple):
    """A key. name: dotted, as on the command line. choices: the allowed values, if they can be listed. decides:
    'numbers' or 'speed'."""

    name: str
    kind: str
    choices: tuple[str, ...]
    default: Any
    decides: str
    text: str


class Group(NamedTuple):
    """The keys of one section; the name of the top level is empty."""

    name: str
    text: str
    keys: list[Key]


def groups() -> list[Group]:
    """Return all keys of a config by section, in the order of the schema."""
    fields = dataclasses.fields(Config)
    hints = get_type_hints(Config)
    top = [f for f in fields if inner(hints[f.name]) is None]
    sections = [Group("", summary(Config), [_key(Config, f, "") for f in top])]
    for field in fields:
        if part := inner(hints[field.name]):
            sections.append(Group(field.name, summary(part), _keys(part, f"{field.name}.")))
    return sections


def summary(thing: Any) -> str:
    """Return a docstring's text before `Args:`, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\nArgs:")[0].split())


def arguments(thing: Any) -> dict[str, str]:
    """Return {argument: description} of a docstring's section `Args:`."""
    section = (inspect.getdoc(thing) or "").partition("\nArgs:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _keys(part: Any, prefix: str) -> list[Key]:
    keys: list[Key] = []
    for field in dataclasses.fields(part):
        keys.append(_key(part, field, prefix))
        if subsection := inner(get_type_hints(part)[field.name]):
            keys += _keys(subsection, f"{prefix}{field.name}.")
    return keys


def _key(part: Any, field: "dataclasses.Field[Any]", prefix: str) -> Key:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    hint = get_type_hints(part)[field.name]
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words: list[str] = []
    choices: tuple[str, ...] = ()
    for kind in sorted(kinds, key=lambda kind: get_origin(kind) is dict):  # a text first
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
