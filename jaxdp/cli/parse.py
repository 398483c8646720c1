"""Parse command-line arguments into a checked config and a verb's options; report an error in one
line.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from jaxdp.cli.option_table import VERBS, Option
from jaxdp.config import Config
from jaxdp.config import values as texts
from jaxdp.config.parsing import from_mapping, put
from jaxdp.config.validation import (
    check_key,
    check_structure,
    drop_former,
    expected,
    inner,
    known_keys,
    program,
)
from jaxdp.errors import UsageError, suggest
from jaxdp.run import rundir

Options = Mapping[str, Option]
FLAGS = ("help", "print_config")


def load(argv: list[str], verb: str = "train") -> tuple[Config, str | None, dict[str, Any]]:
    """Return (the checked config, the path of the config file, the options of the verb). Raises
    UsageError.
    """
    options = VERBS[verb].options
    pairs, words = split_pairs(argv, verb)
    names = dict(pairs)
    if verb == "eval" and "config" not in names:
        pairs = with_saved_config(pairs, names.get("run_dir"))
    files = [text for name, text in pairs if name == "config"]
    values: dict[str, Any] = {}
    for file in files:  # files come first: the command line overrides them
        for key, value in read_config(file).items():
            put(values, key, value)
    for name, text in pairs:
        if name not in ("config", *FLAGS, *options):
            put(values, name, read_value(name, text))
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in names and other not in names:  # the command line overrides the file
            values[other] = None
    if not files and values.get("steps") is values.get("epochs") is None:
        raise UsageError(
            f"--config: no file given; e.g. {program(verb)} --config configs/digits.yaml"
        )
    chosen = read_options(pairs, words, verb)
    parallel = values.get("parallel", {})
    if chosen.get("zero", "0") not in ("0", "config") and (
        parallel.get("shard_size") or parallel.get("rules")
    ):
        parallel["zero"] = (
            parallel.get("zero") or 1
        )  # `plan` replaces it by its stages, but 0 does not go with them
    config = from_mapping(values, "command line")
    if "print_config" in names:
        print(texts.dump(dataclasses.asdict(config)), end="")
        sys.exit(0)
    return config, (files[-1] if files else None), chosen


def split_pairs(argv: Sequence[str], verb: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (name, text) of each `--name value` or `--name=value`, and the positional arguments;
    a flag has no text.

    Raises UsageError for an unknown name, an argument that the verb does not take, and if a text is
    missing."""
    row = VERBS[verb]
    options = VERBS[verb].options
    has_config = row.where != "host"
    pairs = list[tuple[str, str]]()
    words = list[str]()
    remaining = iter(argv)
    for arg in remaining:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            if arg.startswith("-") or not row.arguments:
                is_config = arg.endswith((".yaml", ".yml"))
                key = "config" if is_config else "run_dir" if os.path.isdir(arg) else "KEY"
                raise UsageError(f"command line: {arg!r} belongs to no option; write --{key} {arg}")
            words.append(arg)
            continue
        if has_config and name not in ("config", *FLAGS, *options):
            check_key(name, "command line")
        elif not has_config and name not in ("help", *options):
            hint = suggest(name, options, otherwise=f"known: {', '.join(options)}")
            raise UsageError(f"command line: unknown option {name!r}; {hint}")
        if equals and is_flag(name, options):
            raise UsageError(f"--{name}: {text!r} is one argument too many; write --{name} alone")
        if (
            not equals
            and not is_flag(name, options)
            and (text := next(remaining, "--")).startswith("--")
        ):
            if name == "config":
                raise UsageError("--config: no file given")
            missing = f"{name}: no value given"
            raise UsageError(missing if has_config else f"argument --{name}: expected one argument")
        pairs.append((name, text))
    return pairs, words


def is_flag(name: str, options: Options) -> bool:
    return name in FLAGS or (name in options and options[name].kind is bool)


def read_value(key: str, text: str) -> Any:
    """Return the value of a key on the command line. Raises UsageError if it does not have the
    key's type.
    """
    value = texts.argument(text)
    hint = known_keys().get(key, Any)
    section = inner(hint)
    if section is not None and not (
        isinstance(value, dict) or (value is None and section is not hint)
    ):
        first = next(iter(get_type_hints(section)))
        raise UsageError(
            f"{key}: {text!r} is not {expected(key)}; set its keys, as in --{key}.{first} VALUE"
        )
    if hint is not Any and isinstance(value, str):
        value = text  # the shell has removed the quotes of a text
    if texts.fits(texts.typed(value, hint), hint):
        return value
    if texts.fits(text, hint):  # such as a folder called true
        return text
    raise UsageError(f"{key}: {text!r} is not {expected(key)}")


def help_of(verb: str) -> str:
    """Return the text of `jaxdp VERB --help`: usage, examples, options, keys of the config."""
    row = VERBS[verb]
    words = [
        f"[{argument.upper()}{' ...' * (count == '*')}]"
        for argument, count in row.arguments.items()
    ]
    words += ["--config FILE [--key value ...]" if row.has_config else "[--option value ...]"]
    words += ["COMMAND ..."] * row.command
    parser = make_parser(verb) if row.has_config else make_options_parser(verb)
    lines = [
        " ".join([program(verb), *words]),
        "",
        *(x.replace(f"jaxdp {verb}", program(verb)) for x in row.examples),
    ]
    parser.usage = "\n  ".join(lines).replace("%", "%%")
    parser.description = f"{row.does[0].upper()}{row.does[1:]}."
    return str(parser.format_help())


def make_parser(verb: str) -> Any:
    """Return the parser of a verb's options and of the keys of a config."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_argument(
        "--config", action=jsonargparse.ActionConfigFile, help="the YAML file of the run"
    )
    add_options(parser, VERBS[verb].options)
    parser.add_class_arguments(Config, None, as_group=False)
    return parser


def make_options_parser(verb: str) -> Any:
    """Return the parser of a verb without a config, for its help."""
    import argparse

    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, VERBS[verb].options)
    for name, count in VERBS[verb].arguments.items():
        parser.add_argument(name, nargs=count)
    return parser


def load_options(argv: list[str], verb: str) -> dict[str, Any]:
    """Return the options and arguments of a verb without a config. Raises UsageError."""
    if not VERBS[verb].command:
        return read_options(*split_pairs(argv, verb), verb)
    argv, command = split_command(argv, VERBS[verb].options)
    return {**read_options(*split_pairs(argv, verb), verb), "command": command}


def read_options(pairs: Iterable[tuple[str, str]], words: list[str], verb: str) -> dict[str, Any]:
    """Return the values of a verb's options, with their defaults, and of its positional arguments.

    Args:
        pairs: (name, text) of arguments; those that are no options of the verb do not count.
        words: the positional arguments.
    """
    row = VERBS[verb]
    values = {name: option.default for name, option in row.options.items()}
    values |= {name: read_option(name, text, verb) for name, text in pairs if name in row.options}
    for name, count in row.arguments.items():
        if count == "*":
            values[name] = words
        else:
            values[name] = next(iter(words), None)
            words = words[1:]
    return values


def read_option(name: str, text: str, verb: str) -> Any:
    """Return the value of an option. Raises UsageError if it has another type, or is too small."""
    option = VERBS[verb].options[name]
    if option.kind is bool:
        return True
    value = text if option.kind is str else texts.argument(text)
    if not texts.fits(value, option.kind):
        raise UsageError(f"--{name}: {text!r} is not {texts.WORDS[option.kind]}")
    value = option.kind(value)
    if option.least is not None and value < option.least:
        raise UsageError(f"--{name}: {value} is too small; it must be at least {option.least}")
    return value


def split_command(argv: list[str], options: Options) -> tuple[list[str], list[str]]:
    """Return (the options of a verb, the command behind them). `-n N` stands for the first option."""
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
        i += 1 if "=" in argv[i] else 2
    first = f"--{next(iter(options))}"
    command = argv[i:]
    return [first if arg == "-n" else arg for arg in argv[:i]], command[1:] if command[:1] == [
        "--"
    ] else command


def add_options(parser: Any, options: Options) -> None:
    for name, option in options.items():
        kind = {"action": "store_true"} if option.kind is bool else {"type": option.kind}
        parser.add_argument(f"--{name}", default=option.default, help=option.text, **kind)


def with_saved_config(pairs: list[tuple[str, str]], directory: str | None) -> list[tuple[str, str]]:
    """Return the arguments of `eval` with the config of a run directory; their paths are absolute if
    it evaluates in another working directory. Raises UsageError if there is none."""
    if not directory:
        raise UsageError("--run_dir: none given; e.g. jaxdp eval --run_dir runs/digits")
    saved = pathlib.Path(directory).expanduser() / "config.yaml"
    if not saved.is_file():
        raise UsageError(
            f"run_dir: no run in {directory!r}; give the directory of a run, such as runs/digits"
        )
    if rundir.folder(saved.parent) not in (None, os.getcwd()):
        pairs = [
            (name, os.path.abspath(text) if is_path(name, text) else text) for name, text in pairs
        ]
    return [*pairs, ("config", str(saved))]


def is_path(name: str, text: str) -> bool:
    """Return whether the text of an argument of a target names a file or a folder."""
    return ".args." in name and os.path.exists(text)


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a config file. Raises UsageError if it is missing, is not YAML, or has
    an unknown key.
    """
    if not path:
        raise UsageError("--config: no file given")
    file = pathlib.Path(path)
    if not file.is_file():
        raise UsageError(
            f"--config: no file {path!r}; give the path of a YAML file, e.g. configs/digits.yaml"
        )
    content = texts.load(texts.read_file(file), path)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: a config is a YAML mapping, this is {type(content).__name__}")
    if (file.parent / "env.json").is_file():  # of a run, perhaps of a former version
        drop_former(content)
    check_structure(content, path)
    return content
