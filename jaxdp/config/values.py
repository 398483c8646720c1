"""Values of a config: YAML 1.2 text to Python values and back, and the types that annotations ask
for.

PyYAML reads YAML 1.1, in which `no` is false, `0123` is 83 and `16:9` is 969. Here, as in the core
schema of YAML 1.2, they are texts. A number remembers how it was written, because the parameter
that it is for may be a text: `1.10`."""

import dataclasses
import inspect
import json
import numbers
import os
import pathlib
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NewType, Union, get_args, get_origin

import yaml

from jaxdp.errors import UsageError, one_line

TAG = "tag:yaml.org,2002:"
# Tag -> (the unquoted texts that have it, their first characters), as in the core schema of YAML
# 1.2, except that a number has no leading zeros: `0123` is a code, or octal elsewhere.
CORE = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),  # of YAML 1.1, and in use
}
# The types that YAML's core schema stores.
PLAIN_TYPES = (types.NoneType, bool, int, float, str, list, tuple, dict)
# Types of the values that a config can have.
YAML = str | numbers.Number | list | tuple | Mapping | None
Epochs = NewType("Epochs", str)
"""The type of a number of epochs, such as "2 epochs"."""

NUMBERS = {bool: bool, int: numbers.Integral, float: numbers.Real}
WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    types.NoneType: "null",
    Epochs: "epochs (such as 2 epochs)",
}
PLURALS = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}


class Int(int):
    """An integer written in another way than Python writes it, such as 0x10. text: as written."""

    text: str


class Float(float):
    """A number written in another way than Python writes it, such as 1e-3 or 1.10. text: as
    written.
    """

    text: str


class Loader(yaml.SafeLoader):
    """Read YAML by `CORE`; refuse duplicate keys, of which the last one would silently win.

    Of the keys that several merges give (`<<`), a mapping's own comes first, and then that of the
    earliest. PyYAML tells keys apart by the addresses of their texts, and a mapping is merged as often
    as others refer to it; so texts are made unique, and each key stays once.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors: dict[Any, Any] = {}

    def flatten_mapping(self, node: Any) -> None:
        names = set[str]()
        for key, _ in node.value:
            key.value = sys.intern(f"{key.value}")  # a list is refused as a key later
            if key.value in names:
                raise UsageError(
                    f"line {key.start_mark.line + 1}: the key {key.value!r} appears twice; remove one"
                )
            names.add(key.value)
        super().flatten_mapping(node)
        node.value = [*{key.value: (key, x) for key, x in node.value}.values()]

    def construct_number(self, node: Any) -> int | float:
        text = self.construct_scalar(node)
        if node.tag == f"{TAG}int":
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            integer = int(text, base)
            return integer if str(integer) == text else _written(Int(integer), text)
        number = float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        return number if repr(number) == text else _written(Float(number), text)


class Dumper(yaml.SafeDumper):
    """Write `PLAIN_TYPES`, and quote a text that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers = {k: [*v] for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}
    yaml_representers = {
        kind: yaml.SafeDumper.yaml_representers[kind] for kind in (*PLAIN_TYPES, None)
    }

    def represent_number(self, data: Any) -> Any:
        return self.represent_scalar(
            f"{TAG}{'int' if isinstance(data, int) else 'float'}", data.text
        )


for _tag, (_pattern, _first) in CORE.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(f"{TAG}{_tag}", re.compile(rf"^(?:{_pattern})\Z"), _first)
for _tag in ("null", "bool", "str", "seq", "map"):
    Loader.add_constructor(f"{TAG}{_tag}", yaml.SafeLoader.yaml_constructors[f"{TAG}{_tag}"])
Loader.add_constructor(f"{TAG}merge", yaml.SafeLoader.construct_yaml_str)
Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)
for _tag in ("int", "float"):
    Loader.add_constructor(f"{TAG}{_tag}", Loader.construct_number)
for _number in (Int, Float):
    Dumper.add_representer(_number, Dumper.represent_number)


def read_file(file: pathlib.Path) -> str:
    """Return the text of a file, which is UTF-8 whatever the locale. Raises UsageError if it is
    not.
    """
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = (
            "UTF-16"
            if content.startswith((b"\xff\xfe", b"\xfe\xff"))
            else f"line {line} has byte {content[error.start]:#04x}"
        )
        raise UsageError(f"{file}: not UTF-8 ({hint}); save it as UTF-8") from None


def load(text: str, where: str) -> Any:
    """Return the value of a YAML text. where: name of its source in an error. Raises UsageError if
    it is not YAML.
    """
    try:
        content = yaml.load(text, Loader)
        json.dumps(content, default=str, skipkeys=True)  # refuses a value that contains itself
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = one_line(error).replace('in "<unicode string>", ', "")
        raise UsageError(f"{where}: not YAML: {problem}; correct it there") from None
    return content


def dump(value: Any) -> str:
    """Return the YAML text of a value. Raises `yaml.YAMLError` for a type that it cannot store."""
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False))


def argument(text: str) -> Any:
    """Return the value of an argument of the command line: YAML in quotes or brackets, else an
    unquoted scalar.
    """
    if text.startswith(("[", "{", '"', "'")):
        try:
            return load(text, "")
        except UsageError:
            return text
    if not text:
        return text
    loader = Loader("")
    return loader.construct_object(
        yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    )


def plain(value: Any) -> Any:
    """Return a value with Python's numbers instead of `Int` and `Float`; args of a nested target
    are left to it.
    """
    if type(value) is dict:
        return {
            plain(name): part if name == "args" else plain(part) for name, part in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return int(value) if type(value) is Int else float(value) if type(value) is Float else value


def typed(value: Any, hint: Any) -> Any:
    """Return a value in the type of an annotation; unchanged if it has another type, or any is
    allowed.

    A number for a text becomes the text that was written.
    """
    kind = get_origin(hint) or hint
    inside = get_args(hint)
    if kind in (Union, types.UnionType):
        options = sorted(
            inside, key=lambda one: one not in PLAIN_TYPES or not isinstance(value, one)
        )
        return next((new for one in options if fits(new := typed(value, one), one)), value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = getattr(value, "text", str(value))
        if is_text(kind) or (kind is Literal and value not in inside and text in inside):
            return text
        return plain(value) if kind in (int, float) else value
    if type(value) in (list, tuple) and inside and kind in (Sequence, list, tuple):
        hints = (
            inside
            if kind is tuple and len(inside) == len(value) and ... not in inside
            else inside[:1] * len(value)
        )
        return type(value)(map(typed, value, hints))
    if type(value) is dict and inside and kind in (Mapping, dict):
        return {name: typed(part, inside[1]) for name, part in value.items()}
    return value


def is_text(kind: Any) -> bool:
    """Return True for `str` and the types of paths."""
    return kind is str or (inspect.isclass(kind) and issubclass(kind, os.PathLike))


def fits(value: Any, hint: Any) -> bool:
    """Return True if a YAML value has the type `hint`, or if it is not a YAML value."""
    kind = get_origin(hint) or hint
    inside = get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inside)
    if not isinstance(value, YAML):
        return True
    if kind is Literal:
        return value in inside
    if kind is Epochs:
        return re.fullmatch(r"[1-9][0-9]* epochs?", f"{value}") is not None
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and isinstance(value, bool) == (kind is bool)
    if kind in (str, types.NoneType):
        return isinstance(value, kind)
    if is_text(kind):
        return isinstance(value, str)
    if kind in (Sequence, list):
        return isinstance(value, list | tuple) and all(
            fits(one, *inside[:1]) for one in value if inside
        )
    return kind not in (Mapping, dict) or isinstance(value, Mapping)


def in_words(hint: Any) -> str:
    """Describe a type of `fits` in words."""
    kind = get_origin(hint) or hint
    inside = get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in inside))
    if kind is Literal:
        return f"{'one of ' * (len(inside) > 1)}{', '.join(map(str, inside))}"
    if kind in (Sequence, list):
        return f"a list of {PLURALS[inside[0]]}" if inside and inside[0] in PLURALS else "a list"
    if is_text(kind):
        return WORDS[str]
    is_mapping = kind in (Mapping, dict) or dataclasses.is_dataclass(kind)
    return WORDS.get(kind, "a mapping" if is_mapping else getattr(kind, "__name__", str(kind)))


def _written(number: Any, text: str) -> Any:
    number.text = text
    return number
