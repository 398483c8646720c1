"""The text of `jaxdp VERB --help`: how it is called, examples, its own options, then the config's keys by section."""

import dataclasses
import difflib
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.config.describe import KINDS, Key, groups
from jaxdp.errors import UsageError

Options = Mapping[str, tuple[Any, Any, str]]
WIDEST = 100  # columns
COMMON: Options = {
    "config": (str, None, "the YAML file of the run; what the command line says takes precedence"),
    "print_config": (bool, False, "print the config as it is understood, and end"),
    "help": (bool, False, "print this; `--help SECTION` prints the keys of one section, such as --help optimizer"),
}


def help_text(
    verb: str,
    does: str,
    examples: Sequence[str],
    options: Options,
    places: Mapping[str, str] | None = None,
    keys: bool = True,
    section: str | None = None,
    width: int | None = None,
) -> str:
    """The help of a verb.

    does: what it does; places: arguments without a name; keys: whether it takes the keys of a config; section: of the
    keys, only those of this one; width: columns, those of the terminal where it is None. Raises UsageError for a
    section that there is not.
    """
    width = width or min(shutil.get_terminal_size().columns, WIDEST)
    if section is not None:
        return "\n".join(_sections(width, section)) + "\n"
    words = [f"{name.upper()}{'...' * (many == '*')}" for name, many in (places or {}).items()]
    words += ["--config FILE [--key value ...]"] if keys else ["[--option value ...]"] if options else []
    lines = [" ".join(["usage: jaxdp", verb, *words]), "", *_wrapped(f"{does[0].upper()}{does[1:]}.", width, "")]
    if examples:
        lines += ["", *(f"  {line}" for line in examples)]
    own = {**COMMON, **options} if keys else {**options, "help": (bool, False, "print this")}
    lines += ["", "options:"]
    for name, (kind, default, text) in own.items():
        flag = kind is bool
        lines += _entry(f"--{name}{'' if flag else f' {KINDS[kind].upper()}'}", None if flag else default, text, width)
    if keys:
        lines += ["", *_wrapped(KEYS, width, "")]
        lines += _sections(width)
    return "\n".join(lines) + "\n"


KEYS = (
    "The keys of a config follow, each as in the YAML file (`parallel: {zero: 1}`) or on the command line "
    "(`--parallel.zero 1`; lists and mappings as YAML in quotes). Those with a * change the numbers; the others "
    "only the speed, the memory, or what is written."
)


def _sections(width: int, section: str | None = None) -> list[str]:
    found = groups()
    known = [group.name for group in found if group.name]
    if section is not None and section not in known:
        near = difflib.get_close_matches(section, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise UsageError(f"--help: no section {section!r}; {hint}")
    lines: list[str] = []
    for group in found:
        if section in (None, group.name):
            text = f"{group.name}: {group.text[0].lower()}{group.text[1:]}" if group.name else "the run as a whole:"
            lines += ["", *_wrapped(text, width, "")]
            for key in group.keys:
                lines += _entry(f"--{key.name} {value(key)}", key.default, key.text, width, key.decides == "numbers")
    return lines


def value(key: Key) -> str:
    """What stands for a key's value: its choices, or its kind in capitals."""
    return f"{{{','.join(key.choices)}}}" if key.choices else key.kind.partition(",")[0].partition(" ")[0].upper()


def shown(default: Any) -> str:
    """A default as it would stand in a config; empty where there is none, or a section of its own."""
    if default in (None, "", [], {}) or dataclasses.is_dataclass(default):
        return ""
    return default if isinstance(default, str) else json.dumps(default)


def _entry(head: str, default: Any, text: str, width: int, mark: bool = False) -> list[str]:
    head = f"{'*' if mark else ' '} {head}{f'  (default: {shown(default)})' if shown(default) else ''}"
    return [head, *_wrapped(text, width, " " * 8)]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
