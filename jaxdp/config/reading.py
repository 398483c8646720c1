"""Create a config from a user's values; report a wrong value in one line, with the expected type."""

import os
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import yaml

from jaxdp.config import Config
from jaxdp.config.check import flatten, resolve
from jaxdp.config.keys import WORDS, check_structure, expected, inner, known_keys
from jaxdp.errors import UsageError, one_line


def from_mapping(values: dict[str, Any], where: str) -> Config:
    """Return the checked config of nested dicts, as in a YAML file. where: name of their source in an error.

    Raises `UsageError` for an unknown key, with the nearest known one, and for a value of another type.
    """
    import argparse

    import jsonargparse

    values = plain(values)
    check_structure(values, where)
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(Config, None, as_group=False)
    try:
        space = parser.parse_object(values)
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UsageError(explain(str(error))) from None
    config = to_dataclass(Config, space.as_dict())
    check_plain(config)
    return resolve(config)


def plain(value: Any) -> Any:
    """Return the value with Python numbers instead of scalars of NumPy and JAX, and texts instead of paths."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def check_plain(config: Config) -> None:
    """Raise `UsageError` for a value that YAML cannot store, such as an array among the arguments of a target."""
    for key, value in flatten(config).items():
        try:
            yaml.safe_dump(value)
        except yaml.YAMLError as error:
            kind = type(error.args[-1]).__name__
            raise UsageError(
                f"{key}: config.yaml cannot store a value of type {kind}; use numbers, text, lists and dicts, or pass "
                "an object with its arguments bound, as by functools.partial, instead of target and args"
            ) from None


def explain(text: str, options: Mapping[str, Any] = {}) -> str:
    """Rewrite the parser's message as one line: key or option, value, and the expected type."""
    key = re.search(r'(?:key|for) "([\w.]+)"', text)
    value = re.search(r"(?:Got|Given) value: *(.+?) *(?:\n|$)", text)
    if key and value and (name := key.group(1)) in {*known_keys(), *options}:
        shown, kind = (f"--{name}", WORDS[options[name].kind]) if name in options else (name, expected(name))
        return f"{shown}: {value.group(1)!r} is not {kind}"
    return one_line(text.replace('in "<unicode string>", ', ""))


def to_dataclass(cls: Any, values: dict[str, Any]) -> Any:
    kinds = {name: inner(hint) for name, hint in get_type_hints(cls).items()}
    return cls(**{k: to_dataclass(kinds[k], v) if kinds[k] and isinstance(v, dict) else v for k, v in values.items()})
