"""Create a config from a user's values; report a wrong value in one line, with the expected type."""

import os
import reprlib
from typing import Any, get_args, get_origin

import yaml

from jaxdp.config import Config
from jaxdp.config import values as texts
from jaxdp.config.validation import check_structure, expected, flatten, inner, known_keys, resolve
from jaxdp.errors import UsageError, one_line


def from_mapping(values: dict[str, Any], where: str) -> Config:
    """Return the checked config of nested dicts, as in a YAML file. where: name of their source in
    an error.

    Raises `UsageError` for an unknown key, with the nearest known one, and for a value of another
    type, or that YAML cannot store."""
    check_structure(values, where)
    nested: dict[str, Any] = {}
    for key, value in values.items():
        put(nested, key, value)
    config: Config = make(Config, nested)
    for key, value in flatten(config).items():
        try:
            texts.dump(value)
        except yaml.YAMLError as error:  # such as an array among the arguments of a target
            kind = type(error.args[-1]).__name__
            raise UsageError(
                f"{key}: config.yaml cannot store a value of type {kind}; use numbers, text, lists and dicts, or pass "
                "an object with its arguments bound, as by functools.partial, instead of target and args"
            ) from None
    return resolve(config)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dicts to a copy of a value; the keys of a section are added to
    those before.

    Raises `UsageError` for a key inside a value that is not a dict.
    """
    *path, last = key.split(".")
    mapping = values
    for depth, part in enumerate(path, 1):
        if mapping.get(part) is None:
            mapping[part] = {}
        mapping = mapping[part]
        if not isinstance(mapping, dict):
            above = ".".join(path[:depth])
            raise UsageError(
                f"{key}: {above} is {mapping!r}, which has no keys; set {above} as a whole"
            )
    if isinstance(value, dict) and inner(known_keys().get(key)) is not None:
        if mapping.get(last) is None:
            mapping[last] = {}
        for name, part in value.items():
            put(values, f"{key}.{name}", part)
    else:
        mapping[last] = plain(value)


def make(section: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """Return the dataclass of a section of the config. Raises `UsageError` for a value of another
    type.
    """
    return section(**{name: convert(f"{prefix}{name}", value) for name, value in values.items()})


def convert(key: str, value: Any) -> Any:
    """Return the value of a key in the type that the config has. Raises `UsageError` if it has
    another type.
    """
    hint = known_keys()[key]
    section = inner(hint)
    if section is not None and isinstance(value, dict):
        return make(section, value, f"{key}.")
    typed = as_float(texts.typed(value, hint), hint)
    if not texts.fits(typed, hint):
        raise UsageError(f"{key}: {one_line(reprlib.repr(value))} is not {expected(key)}")
    return typed


def as_float(value: Any, hint: Any) -> Any:
    """Return the value of a key, with floats for integers where its type is a float."""
    kinds = {*(get_args(hint) or [hint])}
    if isinstance(value, dict) and get_origin(hint) is dict:
        return {name: as_float(part, get_args(hint)[1]) for name, part in value.items()}
    return float(value) if type(value) is int and float in kinds else value


def plain(value: Any) -> Any:
    """Return the value with Python numbers instead of scalars of NumPy and JAX, and texts instead
    of paths.
    """
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
