"""Parse command-line arguments into a checked config and a verb's options; report an error in one
line.

`argparse` parses the options of a verb and prints the help. The keys of a config are read as a file
is: their values are YAML.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

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
from jaxdp.extras import door
from jaxdp.metrics import safe_print
from jaxdp.run import rundir

Pairs = list[tuple[str, str]]
ALSO = (
    "--KEY VALUE sets a key of the config, as in --batch_size 64; `jaxdp train --help` lists them."
)


class Parser(argparse.ArgumentParser):
    """A parser of which an error is a UsageError."""

    def error(self, message: str) -> NoReturn:
        hint = "" if "; " in message else f"; see {self.prog} --help"
        raise UsageError(f"{message.removeprefix('argument ')}{hint}")


def load(argv: list[str], verb: str = "train") -> tuple[Config, str | None, dict[str, Any]]:
    """Return (the checked config, the path of the config file, the options of the verb). Raises
    UsageError.
    """
    options, pairs = parse(argv, verb)
    data = options.pop("data", None)
    files, print_config = options.pop("config"), options.pop("print_config")
    names = dict(pairs)
    if verb == "eval" and not files:
        files, pairs = with_saved_config(pairs, names.get("run_dir"))
    values: dict[str, Any] = {}
    for file in files:  # files come first: the command line overrides them
        for key, value in read_config(file).items():
            put(values, key, value)
    for name, text in pairs:
        put(values, name, read_value(name, text))
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in names and other not in names:  # the command line overrides the file
            values[other] = None
    if data:
        starter: Any = door("starter", f"DATA: {data}")
        values = starter.complete(data, values, print_config)
    if not files and values.get("steps") is values.get("epochs") is None:
        raise UsageError(
            f"--config: no file given; e.g. {program(verb)} --config configs/digits.yaml, or data: "
            "jaxdp train churn.csv"
        )
    parallel = values.get("parallel", {})
    if options.get("zero", "0") not in ("0", "config") and (
        parallel.get("shard_size") or parallel.get("rules")
    ):
        # `plan` replaces it by its stages, but 0 does not go with them.
        parallel["zero"] = parallel.get("zero") or 1
    config = from_mapping(values, "command line")
    if print_config:
        safe_print.say(texts.dump(dataclasses.asdict(config)).rstrip())
        sys.exit(0)
    return config, (files[-1] if files else data), options


def parse(argv: Sequence[str], verb: str) -> tuple[dict[str, Any], Pairs]:
    """Return the values of a verb's options and positional arguments, and (key, text) of each
    `--key value` or `--key=value` of a config. Prints the help and exits, if that is asked for.

    Raises UsageError for an unknown name, and for a value that is missing or of another type."""
    row = VERBS[verb]
    parser = make_parser(verb)
    if row.command:
        parsed, words = parser.parse_known_args(argv)
        if parsed.command[:1] == ["--"]:
            del parsed.command[0]
    else:  # options may stand between positional arguments
        parsed, words = parser.parse_known_intermixed_args(argv)
    options = vars(parsed)
    if options.pop("help"):
        safe_print.say(help_of(verb).rstrip())
        sys.exit(0)
    pairs: Pairs = []
    remaining = iter(words)
    for word in remaining:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            if verb == "train" and "data" not in options:
                options["data"] = word
                continue
            raise UsageError(
                f"command line: {word!r} belongs to no option; write --config {word}, --run_dir {word} or --KEY {word}"
            )
        if not row.has_config:
            hint = suggest(name, row.options, otherwise=f"known: {', '.join(row.options)}")
            raise UsageError(f"command line: unknown option {name!r}; {hint}")
        check_key(name, "command line")
        if not equals and (text := next(remaining, "--")).startswith("--"):
            raise UsageError(f"{name}: no value given; write --{name} VALUE")
        pairs.append((name, text))
    return options, pairs


def make_parser(verb: str) -> Parser:
    """Return the parser of a verb's options and positional arguments."""
    row = VERBS[verb]
    parser = Parser(prog=f"jaxdp {verb}", allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
    if row.has_config:
        parser.add_argument(
            "--config",
            metavar="FILE",
            action="append",
            default=[],
            help="the YAML file of the run; of several, a later one overrides",
        )
    if row.where in ("job", "alone"):
        parser.add_argument(
            "--print_config",
            action="store_true",
            help="print the config with all its keys, and exit",
        )
    for name, option in row.options.items():
        if option.kind is bool:
            parser.add_argument(f"--{name}", action="store_true", help=option.text)
        else:
            parser.add_argument(
                *option.short,
                f"--{name}",
                default=option.default,
                type=functools.partial(read_option, option),
                help=described(option.text, option.default),
            )
    for name, count in row.arguments.items():
        parser.add_argument(name, nargs=count, help=argparse.SUPPRESS)  # the usage shows it
    if row.command:
        parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def help_of(verb: str) -> str:
    """Return the text of `jaxdp VERB --help`: usage, examples, options; of `train`, the keys of a
    config too.
    """
    row = VERBS[verb]
    called = program(verb)
    words = [f"[{name.upper()}{' ...' * (count == '*')}]" for name, count in row.arguments.items()]
    words += ["--config FILE [--key value ...]" if row.has_config else "[--option value ...]"]
    words += ["COMMAND ..."] * row.command
    examples = [example.replace(f"jaxdp {verb}", called) for example in row.examples]
    parser = make_parser(verb)
    parser.usage = "\n  ".join([" ".join([called, *words]), "", *examples]).replace("%", "%%")
    parser.description = f"{row.does[0].upper()}{row.does[1:]}."
    if verb == "train":
        add_keys(parser)
    elif row.has_config:
        parser.epilog = ALSO
    return parser.format_help()


def add_keys(parser: Parser, section: Any = Config, prefix: str = "", about: str = "") -> None:
    """Add the keys of a section of the config to a help, and then those of the sections inside.
    about: describes this section, by default as its docstring does.
    """
    import docstring_parser

    doc = docstring_parser.parse(section.__doc__)
    group = parser.add_argument_group(prefix[:-1] or "keys", about or doc.description)
    texts_of = {param.arg_name: param.description or "" for param in doc.params}
    sections = dict[str, Any]()
    for name, hint in get_type_hints(section).items():
        default = getattr(section(), name)
        if (inside := inner(hint)) is not None:
            sections[name] = inside
        else:
            group.add_argument(
                f"--{prefix}{name}",
                dest=name,
                choices=get_args(hint) if get_origin(hint) is Literal else None,
                help=described(texts_of[name], default, texts.in_words(hint)),
            )
    for name, inside in sections.items():
        add_keys(parser, inside, f"{prefix}{name}.", texts_of.get(name, ""))


def described(text: str, default: Any, kind: str = "") -> str:
    """Return the help of an option or a key. kind: of its values."""
    notes = [kind] if kind else []
    if default not in (None, ""):
        notes.append(f"default: {json.dumps(default)}")
    return (f"{text} ({'; '.join(notes)})" if notes else text).replace("%", "%%")


def read_option(option: Option, text: str) -> Any:
    """Return the value of an option. Raises ArgumentTypeError if it has another type, or is too
    small.
    """
    value = text if option.kind is str else texts.argument(text)
    if not texts.fits(value, option.kind):
        raise argparse.ArgumentTypeError(f"{text!r} is not {texts.WORDS[option.kind]}")
    value = option.kind(value)
    if option.least is not None and value < option.least:
        raise argparse.ArgumentTypeError(
            f"{value} is too small; it must be at least {option.least}"
        )
    return value


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


def with_saved_config(pairs: Pairs, directory: str | None) -> tuple[list[str], Pairs]:
    """Return the config file of a run directory, and the keys of `eval`; their paths are absolute if
    it evaluates in another working directory. Raises UsageError if there is none."""
    saved = saved_config(directory)
    if rundir.folder(pathlib.Path(saved).parent) not in (None, os.getcwd()):
        # Of the arguments of targets: those that name a file or a folder.
        pairs = [
            (name, os.path.abspath(text) if ".args." in name and os.path.exists(text) else text)
            for name, text in pairs
        ]
    return [saved], pairs


def saved_config(directory: str | None) -> str:
    """Return the path of the config saved in a run directory. Raises UsageError if there is none."""
    if not directory:
        raise UsageError("--run_dir: none given; e.g. jaxdp eval --run_dir runs/digits")
    saved = pathlib.Path(directory).expanduser() / "config.yaml"
    if not saved.is_file():
        raise UsageError(
            f"run_dir: no run in {directory!r}; give the directory of a run, such as runs/digits"
        )
    return str(saved)


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a config file. Raises UsageError if it is missing, is not YAML, or has
    an unknown key.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise UsageError(
            f"--config: no file {path!r}; give the path of a YAML file, e.g. configs/digits.yaml"
        )
    content = texts.load(texts.read_file(file), path)
    if not isinstance(content, dict):
        raise UsageError(
            f"{path}: a config is a YAML mapping, this is {type(content).__name__}; write keys with their values, "
            "such as steps: 1000"
        )
    if (file.parent / "env.json").is_file():  # of a run, perhaps of a former version
        drop_former(content)
    check_structure(content, path)
    return content
