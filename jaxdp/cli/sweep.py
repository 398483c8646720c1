"""The verb `sweep`: train a config with several values of its keys, in a grid or a random sample of it.

Each run is a `jaxdp train` of its own, in a directory named by its values, so that a sweep that is started again only
trains what is not finished. `jaxdp.cli.slots` runs several at once.
"""

import itertools
import json
import math
import os
import pathlib
import random
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxdp import bounded_yaml, rundir
from jaxdp import config as schema
from jaxdp.cli import Call
from jaxdp.cli.parse import load, load_options
from jaxdp.cli.slots import make_slots, run_all
from jaxdp.cli.table import VERBS
from jaxdp.config import Config
from jaxdp.config.check import changed_numbers
from jaxdp.config.keys import check_key
from jaxdp.distributed import launchers
from jaxdp.errors import UsageError
from jaxdp.metrics.jsonl import read
from jaxdp.report import table
from jaxdp.report.read import read_run

RANGE = re.compile(r"(uniform|loguniform|randint)\(([^,]+),([^,]+)\)")
LONGEST = 200  # characters of a run's name
Values = dict[str, str]


class Range(NamedTuple):
    """A distribution between two numbers, both included."""

    kind: str
    low: float
    high: float

    def draw(self, rng: random.Random) -> str:
        if self.kind == "randint":
            return str(rng.randint(int(self.low), int(self.high)))
        if self.kind == "uniform":
            return f"{rng.uniform(self.low, self.high):.4g}"
        return f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.4g}"


class Trial(NamedTuple):
    """A run of the sweep. arguments: of `jaxdp train`."""

    name: str
    directory: pathlib.Path
    arguments: list[str]
    config: Config

    def is_finished(self) -> bool:
        """Return True if this run is complete. Raises UsageError if its directory has a run of another config."""
        file = self.directory / "config.yaml"
        if not file.is_file():
            return False
        saved = bounded_yaml.load(file.read_text(), str(file))
        changed = changed_numbers(saved, self.config)
        if changed and not self.config.resume.force:
            raise UsageError(
                f"run_dir: {str(self.directory)!r} was trained with another config ({changed[0]}); choose another"
            )
        same_end = all(saved.get(key) == getattr(self.config, key) for key in ("steps", "epochs"))
        return same_end and any(record.get("split") == "final" for record in read(self.directory / "metrics.jsonl"))


def run(call: Call) -> None:
    """Check all runs, train those that are not finished, and print a table. Exits with 1 if one failed, with 75 or 130
    after a signal."""
    options, fixed, swept = split_arguments(call.options["argv"])
    if launchers.discover().size > 1:
        raise UsageError("sweep: started in several processes; start it once: each run is a process of its own")
    directory, trials = make_trials(options, fixed, swept)
    mine = trials[array_part(os.environ)]
    pending = [trial for trial in mine if not trial.is_finished()]
    slots = make_slots(options["jobs"], trials[0].config.parallel.devices, len(pending))
    directory.mkdir(parents=True, exist_ok=True)
    with rundir.replaced(directory / table.SWEEP) as new:
        new.write_text(json.dumps({"metric": options["metric"], "keys": [*swept], "command": sys.argv[1:]}) + "\n")
    of_all = f" of {len(trials)}, a part of the array" if len(mine) < len(trials) else ""
    finished = f"; {len(mine) - len(pending)} are finished already" if len(pending) < len(mine) else ""
    print(f"sweep: {len(mine)} runs{of_all} in {directory}, {len(slots)} at once{finished}", flush=True)
    code = run_all(pending, slots)
    runs = [read_run(trial.directory) for trial in trials if (trial.directory / "metrics.jsonl").is_file()]
    if any(options["metric"] in run["numbers"] for run in runs):
        print(table.table(table.ranked(runs, options["metric"]), options["metric"]))
    sys.exit(code)


def split_arguments(argv: Sequence[str]) -> tuple[dict, list[str], dict[str, list[str] | Range]]:
    """Return (the options of the verb, arguments of all runs, the values of each key with several).

    Raises UsageError for an unknown key or option, and if no key has several values.
    """
    own, fixed, swept = [], [], dict[str, list[str] | Range]()
    remaining = iter(argv)
    for arg in remaining:
        if not arg.startswith("--"):
            raise UsageError(f"command line: {arg!r} belongs to no option; values with spaces need quotes")
        name, equals, value = arg[2:].partition("=")
        if name not in ("config", *VERBS["sweep"].options):
            check_key(name, "command line")
        if not equals:
            value = next(remaining, "")
        if not value or (not equals and value.startswith("--")):
            raise UsageError(f"{name}: no value given")
        if name in VERBS["sweep"].options:
            own += [f"--{name}", value]
        elif name != "config" and (match := RANGE.fullmatch(value)):
            swept[name] = to_range(name, *match.groups())
        elif name in ("config", "run_dir") or len(values := split_values(name, value)) == 1:
            fixed += [f"--{name}", value]
        else:
            swept[name] = values
    if not swept:
        raise UsageError("sweep: no key has several values; give one, such as --optimizer.lr 1e-3,3e-3 or --seed 0,1,2")
    return load_options(own, "sweep"), fixed, swept


def split_values(key: str, text: str) -> list[str]:
    """Split at the commas outside brackets and quotes; repeated values count once."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += char
        if char in "\"'":
            quote = "" if quote == char else quote or char
        elif not quote:
            depth += (char in "[{(") - (char in "]})")
    parts = [part.strip() for part in parts]
    if "" in parts:
        raise UsageError(f"{key}: {text!r} has an empty value; separate values by single commas")
    return list(dict.fromkeys(parts))


def to_range(key: str, kind: str, low: str, high: str) -> Range:
    try:
        numbers = Range(kind, float(low), float(high))
    except ValueError:
        raise UsageError(f"{key}: {kind}({low},{high}) needs two numbers") from None
    if not numbers.low < numbers.high or (kind == "loguniform" and numbers.low <= 0):
        positive = ", both above 0" if kind == "loguniform" else ""
        raise UsageError(f"{key}: {kind}({low},{high}) is empty; give the smaller number first{positive}")
    return numbers


def make_trials(
    options: Mapping, fixed: list[str], swept: Mapping[str, list[str] | Range]
) -> tuple[pathlib.Path, list[Trial]]:
    """Return (the directory of the sweep, its runs). Raises UsageError for the first run with a wrong config."""
    trials: dict[str, Trial] = {}
    directory = None
    for values in choose(swept, options["sample"], options["sample_seed"]):
        arguments = [*fixed, *(f"--{key}={value}" for key, value in values.items())]
        config, path, _ = load(arguments, "train")
        if directory is None:
            base = schema.run_dir(config, path)
            directory = base if config.run_dir else base.with_name(f"{base.name}_sweep")
            if (directory / "metrics.jsonl").exists():
                raise UsageError(f"run_dir: {str(directory)!r} is a run; give a directory for all runs of the sweep")
        name = name_of(values)
        if name in trials:
            raise UsageError(f"sweep: two runs have the name {name!r}; write their values without special characters")
        trials[name] = Trial(name, directory / name, [*arguments, f"--run_dir={directory / name}"], config)
    assert directory is not None
    return directory, [*trials.values()]


def choose(swept: Mapping[str, list[str] | Range], sample: int | None, seed: int) -> list[Values]:
    """Return the values of each run: the grid, or a random sample, whose first runs do not depend on its size."""
    lists = {key: values for key, values in swept.items() if not isinstance(values, Range)}
    if len(lists) == len(swept):
        grid = [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
        if sample is not None:
            random.Random(seed).shuffle(grid)
        return grid[:sample]
    if sample is None:
        key = next(key for key in swept if key not in lists)
        raise UsageError(f"{key}: {swept[key].kind} is a range; give the number of runs, such as --sample 20")
    drawn: dict[tuple[str, ...], Values] = {}
    for i in range(sample):
        rngs = {key: random.Random(f"{seed} {i} {key}") for key in swept}
        values = {k: x.draw(rngs[k]) if isinstance(x, Range) else rngs[k].choice(x) for k, x in swept.items()}
        drawn[tuple(values.values())] = values
    return [*drawn.values()]


def name_of(values: Values) -> str:
    """Return the name of a run's directory, such as `optimizer.lr=1e-3,seed=0`."""
    plain = lambda value: re.sub(r"[^\w.+-]+", "_", value).strip("_")
    name = ",".join(f"{key}={plain(value)}" for key, value in values.items())
    if len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{random.Random(name).getrandbits(32):08x}"


def array_part(env: Mapping[str, str]) -> slice:
    """Return the part of a Slurm array's task: every n-th run. Raises UsageError for variables that do not fit."""
    if not env.get("SLURM_ARRAY_TASK_ID"):
        return slice(None)
    number = lambda name, default: int(env.get(name) or default)
    try:
        first, step = number("SLURM_ARRAY_TASK_MIN", "0"), number("SLURM_ARRAY_TASK_STEP", "1")
        rank, remainder = divmod(int(env["SLURM_ARRAY_TASK_ID"]) - first, step)
        count = number("SLURM_ARRAY_TASK_COUNT", "1")
        if remainder or not 0 <= rank < count:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        shown = {name: env[name] for name in sorted(env) if name.startswith("SLURM_ARRAY_TASK_")}
        raise UsageError(f"sweep: {shown} is not a task of a Slurm array; submit it as --array=0-3") from None
    return slice(rank, None, count)
