"""Parse command-line arguments into a checked config and a verb's options; report an error in one line."""

import json
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, get_origin, get_type_hints

from jaxdp.cli.table import VERBS, Option
from jaxdp.config import Config
from jaxdp.config.check import resolve
from jaxdp.config.keys import WORDS, check_key, check_structure, expected, inner, known_keys
from jaxdp.config.reading import explain, to_dataclass
from jaxdp.errors import UsageError, one_line, suggest

Options = Mapping[str, Option]


def load(argv: list[str], verb: str = "train") -> tuple[Config, str | None, dict[str, Any]]:
    """Return (the checked config, the path of the config file, the options of the verb). Raises UsageError."""
    import argparse

    options, parser = VERBS[verb].options, make_parser(verb)
    check_arguments(argv, options)
    argv = with_saved_config(argv) if verb == "eval" else argv
    is_file = lambda pair: "--config" in pair or pair[1].startswith("--config=")
    ordered = sorted(zip(["", *argv], argv), key=is_file, reverse=True)  # of an argument and the one before it
    argv = [arg for _, arg in ordered]  # files come first: the command line overrides them
    try:
        others, nested = take_nested(argv)
        space = parser.parse_args(others)
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UsageError(unnamed(error) or explain(str(error), options)) from None
    files = [str(file) for file in space.pop("config") or []]
    names = dict(pairs(argv))
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in names and other not in names:  # the command line overrides the file
            space[other] = None
    values = space.as_dict()
    put_nested(values, nested)
    if not files and values["steps"] is values["epochs"] is None:
        raise UsageError(f"--config: no file given; e.g. jaxdp {verb} --config configs/digits.yaml")
    chosen = check_least({name: values.pop(name) for name in options}, options)
    parallel = values["parallel"]
    if chosen.get("zero", "0") not in ("0", "config") and (parallel["shard_size"] or parallel["rules"]):
        parallel["zero"] = parallel["zero"] or 1  # `plan` replaces it by its stages, but 0 does not go with these keys
    return resolve(to_dataclass(Config, values)), (files[-1] if files else None), chosen


def help_of(verb: str) -> str:
    """Return the text of `jaxdp VERB --help`: usage, examples, options, keys of the config."""
    row = VERBS[verb]
    words = [f"[{argument.upper()}{' ...' * (count == '*')}]" for argument, count in row.arguments.items()]
    words += ["--config FILE [--key value ...]" if row.has_config else "[--option value ...]"]
    words += ["COMMAND ..."] * row.command
    parser = make_parser(verb) if row.has_config else make_options_parser(verb)
    parser.usage = "\n  ".join([" ".join(["jaxdp", verb, *words]), "", *row.examples]).replace("%", "%%")
    parser.description = f"{row.does[0].upper()}{row.does[1:]}."
    return str(parser.format_help())


def make_parser(verb: str) -> Any:
    """Return the parser of a verb's options and of the keys of a config."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="the YAML file of the run")
    add_options(parser, VERBS[verb].options)
    parser.add_class_arguments(Config, None, as_group=False)
    return parser


def make_options_parser(verb: str) -> Any:
    """Return the parser of a verb without a config."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise argparse.ArgumentError(None, message)

    parser = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser, VERBS[verb].options)
    for name, count in VERBS[verb].arguments.items():
        parser.add_argument(name, nargs=count)
    return parser


def load_options(argv: list[str], verb: str) -> dict[str, Any]:
    """Return the options and arguments of a verb without a config. Raises UsageError."""
    import argparse

    options = VERBS[verb].options
    argv, command = split_command(argv, options) if VERBS[verb].command else (argv, None)
    for arg in argv:
        name = arg[2:].partition("=")[0]
        if arg.startswith("--") and name not in ("help", *options):
            hint = suggest(name, options, otherwise=f"known: {', '.join(options)}")
            raise UsageError(f"command line: unknown option {name!r}; {hint}")

    try:
        values = check_least(vars(make_options_parser(verb).parse_intermixed_args(argv)), options)
    except argparse.ArgumentError as error:
        wrong = re.fullmatch(r"argument --(\w+): invalid \w+ value: (.*)", str(error))
        if wrong:
            raise UsageError(f"--{wrong[1]}: {wrong[2]} is not {WORDS[options[wrong[1]].kind]}") from None
        raise UsageError(unnamed(error) or one_line(error)) from None
    return values if command is None else {**values, "command": command}


def split_command(argv: list[str], options: Options) -> tuple[list[str], list[str]]:
    """Return (the options of a verb, the command behind them). `-n N` stands for the first option."""
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
        i += 1 if "=" in argv[i] else 2
    first, command = f"--{next(iter(options))}", argv[i:]
    return [first if arg == "-n" else arg for arg in argv[:i]], command[1:] if command[:1] == ["--"] else command


def check_least(values: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return the values unchanged. Raises UsageError if one is too small."""
    for name, option in options.items():
        if option.least is not None and values[name] is not None and values[name] < option.least:
            raise UsageError(f"--{name}: {values[name]} is too small; it must be at least {option.least}")
    return values


def unnamed(error: Exception) -> str:
    """Return the error message for an argument without an option, with a correction; "" for another error."""
    stray = re.match(r"unrecognized arguments: *(\S+)", str(error), re.IGNORECASE)
    if not stray:
        return ""
    name = "config" if stray[1].endswith((".yaml", ".yml")) else "run_dir" if os.path.isdir(stray[1]) else "KEY"
    return f"command line: {stray[1]!r} belongs to no option; write --{name} {stray[1]}"


def add_options(parser: Any, options: Options) -> None:
    for name, option in options.items():
        kwargs: dict[str, Any] = {"action": "store_true"} if option.kind is bool else {"type": option.kind}
        parser.add_argument(f"--{name}", default=option.default, help=option.text, **kwargs)


def with_saved_config(argv: list[str]) -> list[str]:
    """Add the config saved in the run directory, for `eval --run_dir DIR` without --config. Raises UsageError."""
    values = dict(pairs(argv))
    if "config" in values or (argv and not argv[0].startswith("--")):  # the parser corrects the latter
        return argv
    if not (directory := values.get("run_dir")):
        raise UsageError("--run_dir: none given; e.g. jaxdp eval --run_dir runs/digits")
    saved = pathlib.Path(directory).expanduser() / "config.yaml"
    if not saved.is_file():
        raise UsageError(f"run_dir: no run in {directory!r}; give the directory of a run, such as runs/digits")
    check_file(str(saved))
    return ["--config", str(saved), *argv]


def pairs(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each option in `--name value` or `--name=value`; a flag is followed by something else."""
    for arg, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--"):
            yield name, value if equals else following


def check_arguments(argv: list[str], options: Collection[str]) -> None:
    """Raise UsageError for an unknown key, on the command line or in a config file, with the nearest known one."""
    for key, value in pairs(argv):
        if key == "config":
            check_file(value)
        elif key not in ("help", "print_config", *options):
            check_key(key, "command line")
            section = inner(hint := known_keys().get(key))
            if section is not None and not value.startswith("{") and (value != "null" or section is hint):
                first = next(iter(get_type_hints(section)))
                raise UsageError(f"{key}: {value!r} is not {expected(key)}; set its keys, as in --{key}.{first} VALUE")


def check_file(path: str) -> None:
    """Raise UsageError for a config file that is missing, is not YAML, or has an unknown key."""
    import yaml

    if not path:
        raise UsageError("--config: no file given")
    file = pathlib.Path(path)
    if not file.is_file():
        raise UsageError(f"--config: no file {path!r}; give the path of a YAML file, e.g. configs/digits.yaml")
    try:
        content = yaml.load(file.read_text(), strict_loader(path))
        json.dumps(content, default=str, skipkeys=True)  # refuses a value that contains itself
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise UsageError(f"{path}: not YAML: {explain(str(error))}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: a config is a YAML mapping, this is {type(content).__name__}")
    check_structure(content, path)


def strict_loader(path: str) -> Any:
    """Return a YAML safe loader that refuses duplicate keys, of which the last one would silently win."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = set[str]()
            for key, _ in node.value:
                name = key.value if isinstance(key.value, str) else repr(key.value)
                if name in names:
                    raise UsageError(f"{path}: line {key.start_mark.line + 1}: the key {name!r} appears twice")
                names.add(name)
            return super().construct_mapping(node, deep)

    return Loader


def take_nested(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return (the other arguments, {key: text} for keys in nested dicts, as in `--model.args.block.dim 64`).

    jsonargparse would read each value as text, and drop the rest of the inner dict.
    """
    dicts = "|".join(key for key, hint in known_keys().items() if get_origin(hint) is dict)
    others, nested, remaining = [], {}, iter(argv)
    for arg in remaining:
        name, equals, value = arg[2:].partition("=")
        if not arg.startswith("--") or not re.match(rf"({dicts})\..*\.", name):
            others.append(arg)
        elif not equals and (value := next(remaining, "--")).startswith("--"):
            raise UsageError(f"{name}: no value given")
        else:
            nested[name] = value
    return others, nested


def put_nested(values: dict[str, Any], nested: Mapping[str, str]) -> None:
    """Set the keys of `take_nested`. Raises UsageError for a key inside a value that is not a dict."""
    import jsonargparse
    import yaml

    for key, text in nested.items():
        *path, last = key.split(".")
        mapping: Any = values
        for depth, part in enumerate(path, 1):
            mapping = mapping.setdefault(part, {})
            if not isinstance(mapping, dict):
                above = ".".join(path[:depth])
                raise UsageError(f"{key}: {above} is {mapping!r}, which has no keys; set {above} as a whole")
        try:
            mapping[last] = jsonargparse.get_loader("yaml")(text)
        except yaml.YAMLError:
            mapping[last] = text
