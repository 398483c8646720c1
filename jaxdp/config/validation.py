"""Check the keys and the values of a config, with suggestions for unknown keys, and compare two
configs in the keys that change the numbers."""

import dataclasses
import functools
import json
import math
import operator
import os
import pathlib
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from jaxdp.config import Config, Init
from jaxdp.config.values import in_words
from jaxdp.errors import UsageError, nearest, one_line, suggest
from jaxdp.extras import extras_of

RENAMED = {  # former key -> key
    "parallel.accumulator": "parallel.gradient_buffer",
    "watchdog.slow_factor": "watchdog.straggler_factor",
}
GONE = {  # key, also of other trainers -> what to do instead
    "parallel.xla_preset": "set XLA_FLAGS (docs/performance.md)",
    "max_time": "callbacks: [{target: TimeLimit, args: {minutes: 60}}] saves and ends with 75",
}
FORMER_VALUES = {
    "parallel.accumulate": "loop is now scan",
    "parallel.gradient_buffer": "split is now sharded, whole is now replicated",
}


def drop_former(values: dict[str, Any]) -> None:
    """Remove the keys that there are no more from a config that was saved; none decides numbers."""
    for key in (*RENAMED, *GONE):
        section, _, name = key.partition(".")
        if isinstance(values.get(section), dict):
            values[section].pop(name, None)


def inner(hint: Any) -> Any:
    """Return the dataclass in a type hint, alone or in a union with None; None if there is none."""
    return next((k for k in (hint, *get_args(hint)) if dataclasses.is_dataclass(k)), None)


def known_keys() -> dict[str, Any]:
    """Return {dotted key: type hint} of all keys."""
    return {key: field.type for key, field in known_fields().items()}


@functools.cache
def known_fields(cls: Any = Config, prefix: str = "") -> dict[str, "dataclasses.Field[Any]"]:
    """Return {dotted key: field} of all keys."""
    fields = dict[str, Any]()
    for field in dataclasses.fields(cls):
        fields[f"{prefix}{field.name}"] = field
        if (section := inner(field.type)) is not None:
            fields |= known_fields(section, f"{prefix}{field.name}.")
    return fields


# Names of keys in other trainers.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), "optimizer.clip_norm"),
    **{name: f"optimizer.args.{name}" for name in ("momentum", "b1", "b2", "eps")},
    **dict.fromkeys(("scheduler", "lr_scheduler"), "optimizer.schedule"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "iterations"), "steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "microbatches"),
    **dict.fromkeys(("output_dir", "out_dir", "workdir", "logdir"), "run_dir"),
    "batch": "batch_size",
    "num_workers": "data.workers",
    "dataset": "data.target",
    "criterion": "loss.target",
    "eval_every": "eval.every",
    "log_every": "log.every",
    "save_every": "checkpoint.every",
}


def check_key(key: str, where: str) -> None:
    """Raise `UsageError` with the nearest known key if `key` is unknown; after `args`, any name is
    allowed.
    """
    known = known_keys()
    if key in known or any(
        get_origin(hint) is dict and key.startswith(f"{k}.") and key[-1] != "."
        for k, hint in known.items()
    ):
        return
    if key in RENAMED:
        now = RENAMED[key]
        raise UsageError(f"{where}: {key} is now called {now}, and is {expected(now)}")
    if key in GONE:
        raise UsageError(f"{where}: there is no {key}; {GONE[key]}")
    raise UsageError(f"{where}: unknown key {key!r}; {_meant(key, known)}")


def _meant(key: str, known: dict[str, Any]) -> str:
    """Return advice for an unknown key."""
    leaf = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    section, _, name = key.rpartition(".")
    if (meant := ELSEWHERE.get(name)) and (not section or meant.startswith(f"{section}.")):
        return f"did you mean {meant!r}?"
    if f"{section}.args" in known:  # usually an argument of the target
        in_section = [k for k in known if k.startswith(f"{section}.")]
        return suggest(key, in_section, 0.85, f"did you mean {f'{section}.args.{name}'!r}?")
    near = nearest(key, known, 0.6) or leaf.get(nearest(name, leaf, 0.7))
    return f"did you mean {near!r}?" if near else f"`{program('train')} --help` lists the keys"


def expected(key: str) -> str:
    """Describe the type of a known key's value for an error message."""
    former = f" ({FORMER_VALUES[key]})" if key in FORMER_VALUES else ""
    return f"{in_words(known_keys()[key])}{former}"


def program(verb: str) -> str:
    """Return the command that runs a verb, as this program was called."""
    script = pathlib.Path(__file__).parents[2] / "train.py"
    is_script = verb == "train" and pathlib.Path(sys.argv[0]).resolve() == script
    return "python train.py" if is_script else f"jaxdp {verb}"


def check_structure(values: dict[str, Any], where: str, prefix: str = "") -> None:
    """Raise `UsageError` for an unknown key, or if a section is no mapping."""
    known = known_keys()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if not isinstance(name, str) or ("." in name and name not in known):
            raise UsageError(
                f"{where}: {key!r} is not a key; nest its words, as in parallel: {{zero: 1}}"
            )
        outer, _, leaf = name.partition(".")
        if leaf and outer in values:
            raise UsageError(f"{where}: {name!r} is beside {outer!r}; write {leaf} inside of it")
        check_key(key, where)
        section = inner(known[key])
        if section is None or (value is None and section is not known[key]):
            continue  # `from_mapping` looks at its type
        if not isinstance(value, dict):
            first = dataclasses.fields(section)[0].name
            raise UsageError(
                f"{where}: {key}: {one_line(reprlib.repr(value))} is not {expected(key)}; set its keys, as in "
                f"{name}: {{{first}: ...}}"
            )
        check_structure(value, where, f"{key}.")


LIMITS = {  # limit: (whether a value violates it, the message)
    "least": (operator.lt, "is too small; it must be at least {}"),
    "most": (operator.gt, "is too large; it must be at most {}"),
    "above": (operator.le, "must be greater than {}"),
    "below": (operator.ge, "must be below {}"),
}
# Ignored in comparisons: the fingerprint of the data is compared instead.
PATHS = ("data.args.root", "data.args.path")


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value} of a config or of a dict; nested dicts of arguments are flattened
    too.
    """
    items = (
        dataclasses.asdict(tree)
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type)
        else tree
    )
    flat: dict[str, Any] = {}
    for name, value in items.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return flat


def decides(key: str) -> str:
    """Return whether a dotted key changes 'numbers' or only 'speed'."""
    fields = known_fields()
    # Also the target and the arguments of its data.
    key = "eval" if key.startswith("eval.") else key
    while key and key not in fields:  # an argument of a target
        key = key.rpartition(".")[0]
    return fields[key].metadata["decides"] if key else "numbers"


def changed_numbers(
    before: dict[str, Any], after: Config, ignored: Iterable[str] = ()
) -> list[str]:
    """Return a line `key: before -> after` for each key that differs and changes the numbers.

    ignored: keys that do not count. The number of steps does not count if the schedule does not
    depend on it."""
    trees = as_saved(before, after)
    for tree in trees:  # a parameter has the factor of the first expression that it matches
        tree["optimizer"]["lr_scale"] = [*tree["optimizer"]["lr_scale"].items()]
    old, new = map(flatten, trees)
    ignored = {*PATHS, *RENAMED, *GONE, *ignored}
    opt = after.optimizer
    # The name of a script's Optax transformation, which has its own schedule, has a space.
    if (
        opt.schedule == "constant"
        or opt.schedule_steps is not None
        or opt.target.startswith("optax ")
    ):
        ignored |= {"steps", "epochs"}
    if new["optimizer.schedule_steps"] == (old["optimizer.schedule_steps"] or old["steps"]):
        ignored.add("optimizer.schedule_steps")  # the length that the schedule had
    if "data.order" not in flatten(before) and new["data.order"] != "sequential":
        # A run older than this key was shuffled; `resume_step` refuses a recurrent model.
        ignored.add("data.order")
    keys = [
        k
        for k in old | new
        if k not in ignored and decides(k) == "numbers" and old.get(k) != new.get(k)
    ]
    reductions = {values.get("parallel.reduction") for values in (old, new)}
    if len(reductions) > 1 and reductions & {"exact16", "exact8"}:
        keys.append("parallel.reduction")
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys]


def as_saved(before: dict[str, Any], after: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a saved config, with defaults for newer keys, and another as it would be saved, with
    lists for tuples.
    """
    now = json.loads(json.dumps(dataclasses.asdict(after), default=str))
    old = filled(before, dataclasses.asdict(Config()))
    precision = old["precision"]
    precision["state"] = precision["state"] or precision["params"]  # a run older than this key
    return old, now


def filled(saved: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config with defaults for the keys that did not exist when it was saved."""
    values = {
        k: filled(v, defaults[k])
        if isinstance(v, dict) and isinstance(defaults.get(k), dict)
        else v
        for k, v in saved.items()
    }
    return {**{k: v for k, v in defaults.items() if k not in saved}, **values}


def resolve(config: Config) -> Config:
    """Check a config, and fill in the defaults that depend on other values."""
    check(config)
    dtypes = config.precision
    compute = dtypes.compute or dtypes.params
    reduce = dtypes.reduce or dtypes.widest
    half = "float16" in (compute, reduce)
    state = dtypes.state or dtypes.widest
    scale = "dynamic" if half and dtypes.loss_scale is None else dtypes.loss_scale
    dtypes = dataclasses.replace(
        dtypes, compute=compute, reduce=reduce, state=state, loss_scale=scale
    )
    run_dir = expanded("run_dir", config.run_dir)
    init_from = expanded("init_from", config.init_from)
    return dataclasses.replace(config, precision=dtypes, run_dir=run_dir, init_from=init_from)


def expanded(key: str, path: str | None) -> str | None:
    """Return a path with `~` replaced by the home directory. Raises `UsageError` if it is empty or
    a URL.
    """
    if path is None:
        return None
    if not path.strip():
        raise UsageError(f"{key}: {path!r} is empty; give a path, or leave it out")
    if "\0" in path:
        raise UsageError(
            f"{key}: {path!r} has a null character, which no path can have; give another"
        )
    if "://" in path:
        raise UsageError(
            f"{key}: {path!r} is not in the file system; mount the store there, and give that path"
        )
    return os.path.expanduser(path)


def check(config: Config) -> None:
    """Raise `UsageError` for the first field with an invalid value."""
    if (config.steps is None) == (config.epochs is None):
        raise UsageError(
            f"steps: {config.steps} with epochs: {config.epochs}; give one of the two, e.g. steps: 1000"
        )
    flat = flatten(config)
    for key, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{key}: {value} is not a finite number; give one that is")
    for key, field in known_fields().items():
        check_limits(key, flat.get(key), field.metadata["limits"])
    for key in ("model", "data", "loss", "optimizer"):
        if not flat[f"{key}.target"]:
            raise UsageError(
                f"{key}.target: missing; name a built-in or a dotted path, e.g. {key}: {{target: ...}}"
            )
    if (cache := config.compilation_cache) is not None:
        if cache.lower() in ("", "off", "no", "none", "false"):
            raise UsageError(
                f"compilation_cache: {cache!r} is not a folder; null disables the cache"
            )
        if "://" in cache:
            raise UsageError(
                f"compilation_cache: {cache!r} is not a folder; for a store that JAX itself writes "
                "to, set JAX_COMPILATION_CACHE_DIR"
            )
    opt = config.optimizer
    parallel = config.parallel
    check_patterns(config, "optimizer", "no_decay", "frozen", "lr_scale")
    for pattern, factor in opt.lr_scale.items():
        if (
            not isinstance(factor, int | float)
            or isinstance(factor, bool)
            or not 0 <= factor < math.inf
        ):
            raise UsageError(
                f"optimizer.lr_scale: {pattern!r} has {factor!r}; give a factor of at least 0, such as 0.1"
            )
    if config.init != Init():
        check_init(config)
    if config.eval.ema and opt.ema is None:
        raise UsageError("eval.ema: True, but no average is kept; set optimizer.ema, such as 0.999")
    if parallel.shard_size is not None and not parallel.zero:
        raise UsageError(
            f"parallel.shard_size: {parallel.shard_size} with zero: 0, which splits nothing; set zero"
        )
    if parallel.rules:
        check_rules(config)
    if parallel.backend == "pmap" and (parallel.zero > 1 or parallel.shard_size is not None):
        name = "zero" if parallel.zero > 1 else "shard_size"
        value = getattr(parallel, name)
        raise UsageError(
            f"parallel.{name}: {value} does not work under pmap; set parallel.backend to pjit"
        )
    if config.data.on_device and config.data.workers:
        raise UsageError(
            f"data.workers: {config.data.workers} read nothing where data.on_device is true; set one of the two"
        )
    if parallel.exact_group != 1 and not parallel.in_groups:
        raise UsageError(
            f"parallel.exact_group: {parallel.exact_group} with reduction: {parallel.reduction}; leave it 1, or set "
            "reduction to exact"
        )
    if (
        "float64" in (config.precision.compute, config.precision.reduce)
        and config.precision.params != "float64"
    ):
        raise UsageError(
            f"precision.params: {config.precision.params!r} with float64 elsewhere; set it to float64 too"
        )
    dtypes = config.precision
    is_master = (dtypes.params, dtypes.state) == ("bfloat16", "float32")
    if dtypes.state not in (None, dtypes.params) and not is_master:
        raise UsageError(
            f"precision.state: {dtypes.state} with precision.params: {dtypes.params}; leave it null, or set it to "
            f"{dtypes.params}{' or float32' if dtypes.params == 'bfloat16' else ''}"
        )
    for extra in extras_of(config):
        extra.check()


def check_limits(key: str, value: Any, limits: Mapping[str, float]) -> None:
    example = f", such as {limits['example']:g}" if "example" in limits else ""
    for name, (violates, text) in LIMITS.items():
        if isinstance(value, int | float) and name in limits and violates(value, limits[name]):
            raise UsageError(f"{key}: {value} {text.format(limits[name])}{example}")


def check_patterns(config: Config, section: str, *names: str) -> None:
    """Raise `UsageError` for an invalid regular expression in these keys of a section."""
    for name in names:
        patterns = getattr(getattr(config, section), name)
        for pattern in [] if isinstance(patterns, str) else patterns:  # a text stands for a rule
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise UsageError(
                    f"{section}.{name}: {pattern!r} is not a regular expression: {error}"
                ) from None


def check_rules(config: Config) -> None:
    check_patterns(config, "parallel", "rules")
    for pattern, entries in config.parallel.rules.items():
        if (
            not isinstance(entries, list)
            or set(map(str, entries)) - {"None", "shard"}
            or entries.count("shard") > 1
        ):
            raise UsageError(
                f"parallel.rules: {pattern!r} has {entries!r}; give a list with null for each dim, and shard for the "
                "one to shard, such as [null, shard]"
            )
    if not config.parallel.zero:
        raise UsageError(
            f"parallel.rules: {config.parallel.rules} with zero: 0, which splits nothing; set zero"
        )


def check_init(config: Config) -> None:
    """Raise `UsageError` for invalid values of `init`, or if it is set without init_from."""
    check_patterns(config, "init", "rename", "load", "skip")
    for pattern, replacement in config.init.rename.items():
        if not isinstance(replacement, str):
            raise UsageError(
                f"init.rename: {pattern!r} has {replacement!r}; give a text to replace it by"
            )
    if config.init_from is None:
        name, value = next((k, v) for k, v in vars(config.init).items() if v != getattr(Init(), k))
        raise UsageError(f"init.{name}: {value!r}, but nothing is loaded; set init_from")
