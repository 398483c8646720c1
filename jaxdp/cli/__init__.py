"""The command line: `jaxdp VERB --config FILE [--key value ...]`; nothing here needs jax until the config is right."""

import atexit
import collections
import difflib
import gc
import importlib
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, get_origin, get_type_hints

from jaxdp import __version__, environment, xla_presets
from jaxdp.config import Config
from jaxdp.config.check import resolve
from jaxdp.config.keys import WORDS, check_key, check_structure, expected, inner, known_keys
from jaxdp.config.reading import explain, to_dataclass
from jaxdp.distributed import launchers
from jaxdp.errors import INTERRUPTED, DistributedError, Said, UsageError, explained, one_line
from jaxdp.metrics import aloud
from jaxdp.supervise import signals

# Objects made between two collections: looking through what imports and tracing leave, every 700, took 12 % of a start.
BETWEEN_COLLECTIONS = 100_000
PREEMPTED = 75  # the exit code that asks to be started again (sysexits.h: EX_TEMPFAIL)
VERBS = {
    "train": "train a model, or go on where the run directory stands",
    "eval": "evaluate the last checkpoint of a run directory",
    "plan": "say what a run would need and move on N devices, without them",
    "verify": "prove that many devices train what one device would",
    "report": "make one web page of one or several runs",
    "export": "write the parameters of a checkpoint to a .safetensors file",
    "profile": "trace a few updates, and say where their time goes",
    "sample": "print text that a language model goes on with",
    "data": "make shards of tokens from text (jaxdp data tokenize)",
    "doctor": "check this machine, and under mpirun all of a job's, before a run",
    "completion": "print what lets bash or zsh complete commands and keys",
}
# Options of a verb beside the keys of the config: name to (type, default, help).
OPTIONS: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "plan": {
        "devices": (int, 8, "how many devices to plan for"),
        "zero": (str, "config", "the ZeRO stage: 0 to 3, all, or the one of the config"),
        "memory": (str, None, "of one device, such as 80GB; left out, that of the hardware"),
        "hardware": (str, "h100-nvlink-ib400", "a name, or a YAML file of one's own"),
        "json": (bool, False, "print JSON"),
    },
    "verify": {
        "devices": (
            int,
            8,
            "simulate so many CPU devices, where there are not as many real ones; under mpirun, all there are",
        ),
        "updates": (int, 3, "how many updates to compare"),
        "exact": (
            bool,
            False,
            "compare bits instead: reduction: exact on 1, 2, 3, ... devices; under mpirun, on 1 and on all",
        ),
        "tolerance": (float, None, "largest relative error allowed; left out, 1e-10 in float64, 1e-5 in float32"),
        "json": (bool, False, "print JSON"),
    },
    "profile": {
        "updates": (int, 5, "how many updates to trace"),
        "top": (int, 20, "how many operations to list"),
    },
    "report": {
        "out": (str, None, "the file to write; left out, report.html in the run, or here if there are several"),
    },
    "export": {
        "run_dir": (str, None, "the directory of the run"),
        "output": (str, None, "the file to write; left out, export.safetensors in the run directory"),
        "step": (int, None, "the checkpoint of this update; left out, the last"),
        "ema": (bool, False, "write the running average of the parameters instead"),
        "layout": (str, "jaxdp", "the names in the file: our own, or gpt2, as GPT-2's weights are published"),
    },
    "sample": {
        "run_dir": (str, None, "the directory of the run"),
        "prompt": (str, "\n", "the text to go on from"),
        "tokens": (int, 256, "how many tokens to draw"),
        "temperature": (float, 0.8, "logits are divided by it; 0 takes the most probable token"),
        "top_k": (int, None, "draw from so many of the most probable tokens; left out, from all"),
        "seed": (int, 0, "of what is drawn"),
        "step": (int, None, "the checkpoint of this update; left out, the last"),
        "ema": (bool, False, "take the running average of the parameters"),
    },
    "data": {
        "output": (str, None, "the folder to make"),
        "tokenizer": (str, "gpt2", "byte, char, the path of a tokenizer.json, or a name of tiktoken"),
        "split": (float, 0.01, "the share of each input, its last, that is for validation"),
        "shard_tokens": (int, 100_000_000, "tokens in a shard"),
    },
    "completion": {},
    "doctor": {
        "config": (str, None, "the config of a run, to see whether there is room for its checkpoints"),
        "run_dir": (str, None, "where they are to go; left out, that of the config, or runs"),
        "json": (bool, False, "print JSON"),
    },
}
# Arguments of a verb that have no name on the command line: name to how many (as argparse's nargs).
ARGUMENTS: dict[str, dict[str, str]] = {
    "data": {"action": "?", "inputs": "*"},
    "report": {"run": "*"},
    "completion": {"shell": "?"},
}
ALONE = ("plan", "verify")  # verbs of one process, on simulated devices where there are no real ones
# Verbs without a config: a module each. All but the doctor are of one process, on the CPU.
WITHOUT_CONFIG = {
    "export": "verbs",
    "sample": "verbs",
    "data": "tokenizing",
    "report": "reporting",
    "completion": "completion",
    "doctor": "doctoring",
}

USAGE = """usage: jaxdp VERB [--config FILE] [--key value ...]

{verbs}

  jaxdp train --config configs/digits.yaml
  jaxdp train --config configs/digits.yaml --optimizer.lr 3e-4 --parallel.backend pjit
  mpirun -np 2 jaxdp train --config configs/digits.yaml
  jaxdp eval --run_dir runs/digits
  jaxdp plan --config configs/gpt2_124m.yaml --devices 1024 --zero all
  jaxdp verify --config configs/digits.yaml
  mpirun -np 2 jaxdp verify --config configs/digits.yaml
  jaxdp report runs/digits runs/other
  jaxdp export --run_dir runs/digits
  jaxdp sample --run_dir runs/python_gpt --prompt "def "
  jaxdp data tokenize text.txt --output tokens --tokenizer gpt2
  jaxdp doctor
  mpirun -np 2 jaxdp doctor --run_dir runs/digits
  eval "$(jaxdp completion bash)"

`jaxdp VERB --help` has examples, and every key with its default. `python train.py` is `jaxdp train`.
"""
# More lines for the help of a verb, beside those of the usage.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "eval": ("jaxdp eval --run_dir runs/digits --eval.ema true",),
    "plan": ("jaxdp plan --config configs/llama_7b.yaml --devices 64 --memory 80GB --json",),
    "verify": (
        "jaxdp verify --config configs/digits.yaml --exact",
        "jaxdp verify --config configs/gpt2_124m.yaml --verify.model_args '{layers: 2, dim: 64}' --verify.strategies 4",
    ),
    "profile": ("jaxdp profile --config configs/digits.yaml --updates 10 --top 5",),
    "export": (
        "jaxdp export --run_dir runs/digits --step 1380 --output digits.safetensors",
        "jaxdp export --run_dir runs/gpt2_124m --layout gpt2",
    ),
    "sample": ("jaxdp sample --run_dir runs/python_gpt --prompt 'class ' --tokens 400 --temperature 0.5",),
    "data": ("jaxdp data tokenize a.txt b.jsonl --output tokens --tokenizer byte --split 0.05",),
    "completion": ("jaxdp completion zsh > ~/.jaxdp.zsh",),
}


def main(argv: list[str] | None = None) -> NoReturn:
    """Exit codes: 0 done, 2 bad usage or config, 75 preempted after a good save, 130 interrupted, 1 anything else."""
    argv = sys.argv[1:] if argv is None else argv
    gc.set_threshold(BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    atexit.register(aloud.drain)
    if not argv or argv[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:10} {text}" for verb, text in VERBS.items())
        print(USAGE.format(verbs=verbs), end="")
        sys.exit(0 if argv else 2)
    if argv[0] == "--version":
        print(__version__)
        sys.exit(0)
    if argv[0] not in VERBS:
        near = difflib.get_close_matches(argv[0], VERBS, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(VERBS)}"
        _refuse(UsageError(f"unknown verb {argv[0]!r}; {hint}"))
    try:
        if argv[0] != "train":  # which saves what there is
            signals.deliver()
        if {"-h", "--help"} & {*argv[1:]}:
            print(help_of(argv[0], argv[1:]), end="")
            sys.exit(0)
        _run(argv[0], argv[1:])
    except Said as error:
        _refuse(error)
    except SystemExit as error:
        _exit_alone(error)
    except KeyboardInterrupt:
        _refuse(DistributedError("interrupted by Ctrl-C (SIGINT)"), INTERRUPTED)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and argv[0] in WITHOUT_CONFIG:
            sys.exit(0)  # whoever read what it prints has seen enough
        if (known := explained(error)) is not None:
            _refuse(known)
        _crash(error)
    sys.exit(0)


def help_of(verb: str, argv: Sequence[str] = (), width: int | None = None) -> str:
    """The text of `jaxdp VERB --help [SECTION]`; examples are the lines of the usage, and more of the verb's own."""
    from jaxdp.cli.help import help_text

    examples = [line.strip() for line in USAGE.splitlines() if re.match(rf"  [^`]*\bjaxdp {verb}\b", line)]
    given = [*argv, "", ""]
    after = given[next((i for i, arg in enumerate(given) if arg in ("-h", "--help")), -2) + 1]
    section = after if after and not after.startswith("-") and verb not in WITHOUT_CONFIG else None
    own, places = OPTIONS.get(verb, {}), ARGUMENTS.get(verb)
    examples += EXAMPLES.get(verb, ())
    return help_text(verb, VERBS[verb], examples, own, places, verb not in WITHOUT_CONFIG, section, width)


def _run(verb: str, argv: list[str]) -> None:
    config: Config | None = None
    error: str | None = None
    options: dict[str, Any] = {}
    if verb in WITHOUT_CONFIG:
        options = load_options(argv, verb)
        if verb != "doctor":
            os.environ["JAX_PLATFORMS"] = "cpu"  # a training job may have all of a GPU
        getattr(importlib.import_module(f"jaxdp.cli.{WITHOUT_CONFIG[verb]}"), verb)(options)
        return
    together = verb == "verify" and launchers.discover().size > 1
    if verb in ALONE and not together:
        config, path, options = load(argv, verb)
        if verb == "plan":  # for devices that are not there: the CPU's compiler will do, and need not try hard
            os.environ["JAX_PLATFORMS"] = "cpu"
            flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
            os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
        environment.simulate(options["devices"])
        set_threads(config, verb == "verify", options.get("exact", False))
        from jaxdp.cli import verbs

        getattr(verbs, verb)(config, options)
        return
    if verb == "train":
        signals.listen()
    try:
        config, path, options = load(argv, verb)
    except UsageError as e:
        if launchers.discover().size == 1:
            raise
        error = str(e)  # the others may have a right config: the handshake tells them why this rank cannot
    set_threads(config, exact=options.get("exact", False))
    if verb == "profile":
        environment.trace_operations()
    left_out = xla_presets.use(config.parallel.xla_preset, config.parallel.devices) if config is not None else None
    import jaxdp

    context = jaxdp.init()
    signals.heed()
    context.agree(error)
    if left_out and context.is_root:
        print(f"jaxdp: {left_out}", file=sys.stderr)
    assert config is not None
    from jaxdp.cli import verbs
    from jaxdp.distributed.context import leave
    from jaxdp.supervise.monitor import Stopped

    if together:
        try:
            verbs.verify(config, options, context)
        except SystemExit as ended:
            leave(int(str(ended)), speaker=0)
        return
    try:
        getattr(verbs, verb)(config, path, context, *([options] if verb in OPTIONS else []))
    except Stopped:
        leave(PREEMPTED, speaker=0)


def set_threads(config: Config | None, simulated: bool = True, exact: bool = False) -> None:
    """Set what JAX reads as it starts. simulated: for simulated devices that are to run; exact: for exact reductions,
    whatever the config's are."""
    if config is not None and (exact or config.parallel.exact):
        environment.exact(config.microbatches)
    if simulated:
        environment.enough_threads()


def load(argv: list[str], verb: str = "train") -> tuple[Config, str | None, dict[str, Any]]:
    """(the checked config, the config file's path, the verb's own options) from command-line arguments.

    Raises `UsageError` where they are wrong.
    """
    import argparse

    import jsonargparse

    from jaxdp import bounded_yaml

    parser = bounded_yaml.parser(prog=f"jaxdp {verb}")
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile)
    own = OPTIONS.get(verb, {})
    _add_options(parser, own)
    parser.add_class_arguments(Config, None, as_group=False)
    argv = _with_saved_config(argv) if verb == "eval" else argv
    if not argv:
        if verb == "eval":
            raise UsageError("--run_dir: none given; e.g. jaxdp eval --run_dir runs/digits")
        raise UsageError(f"--config: no file given; e.g. jaxdp {verb} --config configs/digits.yaml")
    _check_arguments(argv, own)
    try:
        others, nested = _take_nested(argv)
        space = parser.parse_args(others)
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UsageError(_unnamed(error) or explain(str(error))) from None
    files = [str(f) for f in space.pop("config") or []]
    given = {arg.partition("=")[0] for arg in argv}
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if f"--{key}" in given and f"--{other}" not in given:  # the command line overrides the file
            space[other] = None
    values = space.as_dict()
    _put_nested(values, nested)
    options = {name: values.pop(name) for name in own}
    if options.get("devices", 1) < 1 or options.get("updates", 1) < 1:
        name = "devices" if options["devices"] < 1 else "updates"
        raise UsageError(f"--{name}: {options[name]} is too small; it must be at least 1")
    return resolve(to_dataclass(Config, values)), (files[-1] if files else None), options


def load_options(argv: list[str], verb: str) -> dict[str, Any]:
    """The options of a verb without a config. Raises `UsageError` where they are wrong."""
    import argparse

    from jaxdp import bounded_yaml

    own, places = OPTIONS[verb], ARGUMENTS.get(verb, {})
    parser = bounded_yaml.parser(prog=f"jaxdp {verb}")
    _add_options(parser, own)
    for name, many in places.items():
        parser.add_argument(name, nargs=many)
    for arg in argv:
        name = arg[2:].partition("=")[0]
        if arg.startswith("--") and name not in ("help", *own):
            near = difflib.get_close_matches(name, own, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(own)}"
            raise UsageError(f"command line: unknown option {name!r}; {hint}")
    try:
        return parser.parse_args(_options_first(argv, own)).as_dict()
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        key = re.search(r'(?:key|for|Option) "?(\w+)"?', str(error))
        value = re.search(r"(?:Got|Given) value: *(.+?) *(?:\n|$)", str(error))
        if key and value and key[1] in own:
            raise UsageError(f"--{key[1]}: {value[1]!r} is not {WORDS[own[key[1]][0]]}") from None
        raise UsageError(_unnamed(error) or one_line(error)) from None


def _unnamed(error: Exception) -> str:
    """What to write in place of an argument that belongs to no option; "" where that is not what was wrong."""
    found = re.match(r"unrecognized arguments: *(\S+)", str(error), re.IGNORECASE)
    if not found:
        return ""
    name = "config" if found[1].endswith((".yaml", ".yml")) else "run_dir" if os.path.isdir(found[1]) else "KEY"
    return f"command line: {found[1]!r} belongs to no option; write --{name} {found[1]}"


def _options_first(argv: list[str], own: Mapping[str, tuple[Any, Any, str]]) -> list[str]:
    """argparse takes arguments without a name from one place only."""
    options: list[str] = []
    rest: list[str] = []
    left = iter(argv)
    for arg in left:
        (options if arg.startswith("-") else rest).append(arg)
        if arg[2:] in own and own[arg[2:]][0] is not bool:
            options += [value for value in [next(left, None)] if value is not None]
    return [*options, *rest]


def _add_options(parser: Any, own: Mapping[str, tuple[Any, Any, str]]) -> None:
    for name, (kind, default, _) in own.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name}", default=default, **how)


def _with_saved_config(argv: list[str]) -> list[str]:
    """`eval --run_dir DIR` alone takes the config that the run left there."""
    given = {arg.partition("=")[0]: arg.partition("=")[2] or value for arg, value in zip(argv, [*argv[1:], ""])}
    saved = pathlib.Path(given.get("--run_dir", "")) / "config.yaml"
    return ["--config", str(saved), *argv] if "--config" not in given and saved.is_file() else argv


def _check_arguments(argv: list[str], own: Collection[str]) -> None:
    """Unknown keys, on the command line and in config files, with the nearest known one; `own`: a verb's options."""
    import yaml

    from jaxdp import bounded_yaml

    for i, arg in enumerate(argv):
        if not arg.startswith("--"):
            continue
        key, _, value = arg[2:].partition("=")
        value = value or (argv[i + 1] if i + 1 < len(argv) else "")
        if key == "config":
            if not value:
                raise UsageError("--config: no file given")
            file = pathlib.Path(value)
            if not file.is_file():
                raise UsageError(f"--config: no file {value!r}; give the path of a YAML file, e.g. configs/digits.yaml")
            try:
                content = bounded_yaml.load(file.read_text(), value, _loader(value))
            except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
                raise UsageError(f"{value}: not YAML: {explain(str(error))}") from None
            if not isinstance(content, dict):
                raise UsageError(f"{value}: a config is a YAML mapping, this is {type(content).__name__}")
            check_structure(content, value)
        elif key not in ("help", "print_config", *own):
            check_key(key, "command line")
            bounded_yaml.check(value, key)
            part = inner(known_keys().get(key))
            if part is not None and not value.startswith("{") and value != "null":
                first = next(iter(get_type_hints(part)))
                raise UsageError(f"{key}: {value!r} is not {expected(key)}; set its keys, as in --{key}.{first} VALUE")


def _take_nested(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the other arguments, what is given for keys of a dict inside a dict, as in `--model.args.block.dim 64`): the
    parser would take a text for each, and forget all else of the inner dict."""
    dicts = tuple(f"--{key}." for key, hint in known_keys().items() if get_origin(hint) is dict)
    others, nested, left = [], {}, iter(argv)
    for arg in left:
        name, equals, value = arg.partition("=")
        if any(name.startswith(own) and "." in name.removeprefix(own) for own in dicts):
            given = value if equals else next(left, None)
            if given is None or (not equals and given.startswith("--")):
                raise UsageError(f"{name[2:]}: no value given")
            nested[name[2:]] = given
        else:
            others.append(arg)
    return others, nested


def _put_nested(values: dict[str, Any], nested: Mapping[str, str]) -> None:
    """Sets what `_take_nested` found, read as the parser would. Raises UsageError where it stands inside something
    else."""
    import jsonargparse
    import yaml

    read = jsonargparse.get_loader("yaml")
    for key, text in nested.items():
        *path, last = key.split(".")
        place = values
        for depth, part in enumerate(path):
            inside = place.setdefault(part, {})
            if not isinstance(inside, dict):
                above = ".".join(path[: depth + 1])
                raise UsageError(f"{key}: {above} is {inside!r}, which has no keys; set {above} as a whole")
            place = inside
        try:
            place[last] = read(text)
        except yaml.YAMLError:
            place[last] = text


def _loader(file: str) -> Any:
    """YAML's safe loader, but a key that is there twice is refused: the last would win in silence."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            counts = collections.Counter(key if isinstance(key, str) else repr(key) for key in keys)
            if counts and (most := counts.most_common(1)[0])[1] > 1:
                raise UsageError(f"{file}: line {node.start_mark.line + 1}: the key {most[0]!r} is there twice")
            return super().construct_mapping(node, deep)

    return Loader


def _refuse(error: Said, code: int | None = None) -> NoReturn:
    """Print one line, on the one rank that should; exit by `code`, or 2 for bad input and 1 for any other failure."""
    if "jaxdp.distributed.context" in sys.modules:
        from jaxdp.distributed import context

        if not context.alone():
            context.fail(error, code)
    print(f"jaxdp: {error}", file=sys.stderr, flush=True)
    sys.exit(code or (2 if isinstance(error, UsageError) else 1))


def _exit_alone(error: SystemExit) -> NoReturn:
    """Something of the user's called sys.exit; other ranks would wait for this one."""
    if "jaxdp.distributed.context" in sys.modules:
        from jaxdp.distributed import context

        here = context.current()
        if here.size > 1:
            code = error.code if isinstance(error.code, int) and error.code else 1
            context.fail(DistributedError(f"rank {here.rank} called sys.exit({error.code!r})"), code)
    raise error


def _crash(error: BaseException) -> NoReturn:
    """The traceback, with the rank that it is from, and the end of the job: the others must not wait for this one."""
    if "jaxdp.distributed.context" not in sys.modules:
        traceback.print_exc()
        sys.exit(1)
    from jaxdp.distributed import context

    context.crash(error)
