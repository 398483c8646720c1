"""The verb `sweep`: train a config with several values of its keys, in a grid or a random sample of
it.

Each run is a `jaxdp train` of its own, in a directory named by its values, so that a sweep that is
started again only trains what is not finished. `jaxdp.sweep.slots` runs several at once.
"""

import itertools
import json
import os
import pathlib
import random
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp import config as schema
from jaxdp.cli import Call
from jaxdp.cli.option_table import VERBS
from jaxdp.cli.parse import load, load_options
from jaxdp.cli.report import read_runs
from jaxdp.config.keys import check_key, known_keys
from jaxdp.errors import UsageError
from jaxdp.process import launchers
from jaxdp.report import table
from jaxdp.run import rundir
from jaxdp.sweep.slots import Trial, make_slots, run_all

OWN = VERBS["sweep"].options


def run(call: Call) -> None:
    """Check all runs, train those that are not finished, print a table, and exit with the code of
    `run_all`.
    """
    options, fixed, swept = split_arguments(call.options["argv"])
    if launchers.discover().size > 1:
        raise UsageError(
            "sweep: started in several processes; start it once: each run is a process of its own"
        )
    trials = make_trials(options, fixed, swept)
    mine, directory = trials[array_part(os.environ)], trials[0].directory.parent
    pending = [trial for trial in mine if not trial.is_finished()]
    slots = make_slots(options["jobs"], trials[0].config.parallel.devices, len(pending))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(rundir.cannot_write(directory, error)) from None
    sweep = {"metric": options["metric"], "command": sys.argv[1:]}
    rundir.write(directory / table.SWEEP, json.dumps(sweep) + "\n")
    count = len(mine) - len(pending)
    finished = f"; {count} are finished already (their data is not compared)" if count else ""
    print(f"sweep: {len(mine)} runs in {directory}, {len(slots)} at once{finished}", flush=True)
    code, failed = run_all(pending, slots)
    begun = [trial.directory for trial in trials if (trial.directory / "metrics.jsonl").is_file()]
    if begun:
        try:
            runs = [*read_runs(begun).values()]
            for run in runs:
                if (
                    pathlib.Path(run["path"]) in failed and run["state"]["word"] == "finished"
                ):  # before this sweep
                    run["state"]["word"] = "failed"
            print(table.table(table.ranked(runs, options["metric"]), options["metric"]))
        except UsageError as error:  # the runs are trained: `jaxdp report --metric` makes the table
            print(f"jaxdp: {error}", file=sys.stderr)
            code = code or 2
    sys.exit(code)


def split_arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], dict[str, list[str]]]:
    """Return (the options of the verb, arguments of all runs, the values of each key with several).

    Raises UsageError for an unknown or repeated key or option, and if no key has several values.
    """
    own, fixed, swept = list[str](), list[str](), dict[str, list[str]]()
    remaining = iter(argv)
    for arg in remaining:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            raise UsageError(
                f"command line: {arg!r} belongs to no option; values with spaces need quotes"
            )
        if name not in ("config", *OWN):
            check_key(name, "command line")
        if name in swept or (name != "config" and f"--{name}" in [*own, *fixed]):
            raise UsageError(
                f"{name}: given twice; give it once, with commas between several values"
            )
        value = value if equals else next(remaining, "")
        if not value or (not equals and value.startswith("--")):
            raise UsageError(f"{name}: no value given")
        values = [value] if name in ("config", "run_dir", *OWN) else split_values(name, value)
        if len(values) > 1:
            swept[name] = values
        else:
            (own if name in OWN else fixed).extend((f"--{name}", *values))
    if not swept:
        raise UsageError(
            "sweep: no key has several values; give one, such as --optimizer.lr 1e-3,3e-3 or --seed 0,1,2"
        )
    return load_options(own, "sweep"), fixed, swept


def split_values(key: str, text: str) -> list[str]:
    """Split at the commas outside brackets and quotes; remove quotes around a text. Repeated values
    count once.
    """
    parts, depth, quote = [""], 0, ""
    for char in text:
        if char in "\"'":
            quote = "" if quote == char else quote or char
        depth += 0 if quote else (char in "[{(") - (char in "]})")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    parts = [part.strip() for part in parts]
    if "" in parts:
        raise UsageError(f"{key}: {text!r} has an empty value; separate values by single commas")
    if key in known_keys():  # YAML reads the quotes of an argument of a target

        def quoted(part):
            return "," in part and part[0] in "\"'" and part.find(part[0], 1) == len(part) - 1

        parts = [part[1:-1] if quoted(part) else part for part in parts]
    return list(dict.fromkeys(parts))


def make_trials(
    options: Mapping[str, Any], fixed: list[str], swept: Mapping[str, list[str]]
) -> list[Trial]:
    """Return the runs: the grid, or a random sample of it, of which a larger one contains the
    smaller.

    Raises UsageError for the first run with a wrong config.
    """
    grid = [dict(zip(swept, values)) for values in itertools.product(*swept.values())]
    if options["sample"] is not None:
        random.Random(options["sample_seed"]).shuffle(grid)
    trials: dict[pathlib.Path, Trial] = {}
    for values in grid[: options["sample"]]:
        arguments = [*fixed, *(f"--{key}={value}" for key, value in values.items())]
        config, path, _ = load(arguments, "train")
        base = schema.run_dir(config, path)
        base = base if config.run_dir else base.with_name(f"{base.name}_sweep")
        if (base / "metrics.jsonl").exists():
            raise UsageError(
                f"run_dir: {str(base)!r} is a run; give a directory for all runs of the sweep"
            )
        directory = base / name_of(values)
        if directory in trials:
            raise UsageError(
                f"sweep: two runs have the name {directory.name!r}; change the text of one of the values"
            )
        trials[directory] = Trial(directory, [*arguments, f"--run_dir={directory}"], config)
    return [*trials.values()]


def name_of(values: Mapping[str, str]) -> str:
    """Return the name of a run's directory, such as `optimizer.lr=1e-3,seed=0`."""

    def plain(value):
        return re.sub(r"[^\w.+-]+", "_", value).strip("_")

    return ",".join(f"{key}={plain(value)}" for key, value in values.items())[:200]


def array_part(env: Mapping[str, str]) -> slice:
    """Return the part of a Slurm array's task: every n-th run. Raises UsageError for variables that
    do not fit.
    """

    def number(name, default):
        return int(env.get(f"SLURM_ARRAY_TASK_{name}") or default)

    try:
        count, step = number("COUNT", 1), number("STEP", 1)
        rank, remainder = divmod(number("ID", 0) - number("MIN", 0), step)
        if remainder or not 0 <= rank < count:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        shown = {name: env[name] for name in sorted(env) if name.startswith("SLURM_ARRAY_TASK_")}
        raise UsageError(
            f"sweep: {shown} is not a task of a Slurm array; submit it as --array=0-3"
        ) from None
    return slice(rank, None, count)
