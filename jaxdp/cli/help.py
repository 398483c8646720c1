"""The text of `jaxdp VERB --help`: usage, examples, the verb's options, then the config's keys by section."""

import dataclasses
import json
import shutil
import textwrap
from typing import Any

from jaxdp.cli.table import Option, Verb
from jaxdp.config.describe import KINDS, Key, groups
from jaxdp.errors import UsageError, suggest

WIDEST = 100  # columns
COMMON = {
    "config": Option(str, None, "the YAML file of the run; the command line takes precedence"),
    "print_config": Option(bool, False, "print the resolved config and exit"),
    "help": Option(bool, False, "print this; `--help SECTION` prints the keys of one section, e.g. --help optimizer"),
}


def help_text(name: str, verb: Verb, section: str | None = None, width: int | None = None) -> str:
    """Return the help of a verb.

    Args:
        section: only the keys of this section of the config.
        width: columns; None for the width of the terminal.

    Raises:
        UsageError: there is no such section.
    """
    width = width or min(shutil.get_terminal_size().columns, WIDEST)
    if section is not None:
        return "\n".join(_sections(width, section)) + "\n"
    words = [f"{argument.upper()}{'...' * (count == '*')}" for argument, count in verb.arguments.items()]
    words += ["--config FILE [--key value ...]"] if verb.has_config else ["[--option value ...]"] * bool(verb.options)
    lines = [" ".join(["usage: jaxdp", name, *words]), "", *_wrapped(f"{verb.does[0].upper()}{verb.does[1:]}.", width)]
    lines += ["", *(f"  {line}" for line in verb.examples), "", "options:"]
    common = dict(COMMON) if verb.has_config else {"help": Option(bool, False, "print this")}
    if verb.where == "runs":  # there is no single config to print
        common.pop("print_config")
    options = {**common, **verb.options} if verb.has_config else {**verb.options, **common}
    for option_name, option in options.items():
        flag = option.kind is bool
        head = f"--{option_name}{'' if flag else f' {KINDS[option.kind].upper()}'}"
        lines += _entry(head, None if flag else option.default, option.text, width)
    if verb.has_config:
        lines += ["", *_wrapped(KEYS, width)]
        lines += _sections(width)
    return "\n".join(lines) + "\n"


KEYS = (
    "The keys of a config follow, each as in the YAML file (`parallel: {zero: 1}`) or on the command line "
    "(`--parallel.zero 1`; lists and mappings as YAML in quotes). Those with a * change the numbers; the others "
    "only the speed, the memory, or what is written."
)


def _sections(width: int, section: str | None = None) -> list[str]:
    known = [group.name for group in groups() if group.name]
    if section is not None and section not in known:
        hint = suggest(section, known, 0.6, f"known: {', '.join(known)}")
        raise UsageError(f"--help: no section {section!r}; {hint}")
    lines: list[str] = []
    for group in groups():
        if section in (None, group.name):
            text = f"{group.name}: {group.text[0].lower()}{group.text[1:]}" if group.name else "top-level keys:"
            lines += ["", *_wrapped(text, width)]
            for key in group.keys:
                lines += _entry(f"--{key.name} {value(key)}", key.default, key.text, width, key.decides == "numbers")
    return lines


def value(key: Key) -> str:
    """Return the placeholder of a key's value: its choices, or its kind in capitals."""
    return f"{{{','.join(key.choices)}}}" if key.choices else key.kind.partition(",")[0].partition(" ")[0].upper()


def shown(default: Any) -> str:
    """Return a default as written in a config; empty if there is none, or if it is a section."""
    if default in (None, "", [], {}) or dataclasses.is_dataclass(default):
        return ""
    return default if isinstance(default, str) else json.dumps(default)


def _entry(head: str, default: Any, text: str, width: int, mark: bool = False) -> list[str]:
    head = f"{'*' if mark else ' '} {head}{f'  (default: {shown(default)})' if shown(default) else ''}"
    return [head, *_wrapped(text, width, " " * 8)]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
