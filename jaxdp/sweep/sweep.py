"""The verb `sweep`: train a config with several values of its keys, in a grid or a random sample of
it.

Each run is a `jaxdp train` of its own, in a directory named by its values, so that a sweep that is
started again only trains what is not finished. Runs on one host are side by side, each on its share
of the GPUs.
"""

import itertools
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp.cli import Call
from jaxdp.cli.parse import load, parse
from jaxdp.cli.report import read_runs
from jaxdp.config import Config
from jaxdp.config.validation import as_saved, changed_numbers, flatten, known_keys
from jaxdp.errors import INTERRUPTED, PREEMPTED, UsageError
from jaxdp.metrics.jsonl import read
from jaxdp.process import environment, hosts, launchers
from jaxdp.process.signals import end_after_second, handled, start_verb
from jaxdp.report import table
from jaxdp.report.read import is_held, mapping
from jaxdp.report.table import METRICS
from jaxdp.run import rundir

OUTPUT = "output.txt"  # in the directory of a run: what it printed
CSV = "sweep.csv"  # in the directory of the sweep: the table


class Trial(NamedTuple):
    """A run of the sweep. arguments: of `jaxdp train`."""

    directory: pathlib.Path
    arguments: list[str]
    config: Config

    def is_finished(self) -> bool:
        """Return True if this run is complete, with the same data and evaluation; else its training
        continues it.

        Raises UsageError if its directory has a run of another config.
        """
        try:
            saved = mapping(self.directory / "config.yaml")
        except UsageError:  # its training writes the file again
            saved = {}
        if not saved:
            return False
        changed = changed_numbers(saved, self.config)
        if changed and not self.config.resume.force:
            raise UsageError(
                f"run_dir: {str(self.directory)!r} was trained with another config ({changed[0]}); choose another"
            )
        old, new = map(flatten, as_saved(saved, self.config))
        keys = [key for key in {**old, **new} if re.match(r"(steps|epochs)$|(data|eval)\.", key)]
        same = not changed and all(old.get(key) == new.get(key) for key in keys)
        return same and any(
            record.get("split") == "final" for record in read(self.directory / "metrics.jsonl")
        )


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
            runs = table.ranked(runs, options["metric"])
            print(table.table(runs, options["metric"]))
            table.write_csv(directory / CSV, runs, options["metric"])
            print(f"the table in {directory / CSV}")
        except UsageError as error:  # the runs are trained: `jaxdp report --metric` makes the table
            print(f"jaxdp: {error}", file=sys.stderr)
            code = code or 2
    sys.exit(code)


def split_arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], dict[str, list[str]]]:
    """Return (the options of the verb, arguments of all runs, the values of each key with several).

    Raises UsageError for an unknown or repeated key or option, and if no key has several values.
    """
    names = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for name in names:
        if name != "--config" and names.count(name) > 1:
            raise UsageError(
                f"{name[2:]}: given twice; give it once, with commas between several values"
            )
    options, pairs = parse(argv, "sweep")
    fixed = [f"--config={file}" for file in options["config"]]
    swept = dict[str, list[str]]()
    for name, text in pairs:
        values = [text] if name == "run_dir" else split_values(name, text)
        if len(values) > 1:
            swept[name] = values
        else:
            fixed.append(f"--{name}={values[0]}")
    if not swept:
        raise UsageError(
            "sweep: no key has several values; give one, such as --optimizer.lr 1e-3,3e-3 or --seed 0,1,2"
        )
    return options, fixed, swept


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
        base = rundir.directory_of(config, path)
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


class Running(NamedTuple):
    trial: Trial
    child: subprocess.Popen[bytes]
    since: float


def make_slots(jobs: int | None, devices: int | None, count: int) -> list[dict[str, str]]:
    """Divide the devices of this host among at most `count` runs; return the variables of each
    run's process.

    jobs: runs at once; None: one for each GPU, or for `devices` of them, and without GPUs one for
    each core. devices: GPUs of a run (`parallel.devices`). Raises UsageError if there are too few
    GPUs."""
    cores = max(1, int(min(len(os.sched_getaffinity(0)), hosts.core_quota())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(environment.gpu_count())]
    if names and visible:
        names = environment.visible_gpus(visible)
    each = devices or (max(1, len(names) // jobs) if jobs else 1)
    jobs = jobs or max(1, len(names) // each if names else cores)
    if names and jobs * each > len(names):
        raise UsageError(
            f"--jobs: {jobs} runs on {each} GPUs each, but there are {len(names)}; give a smaller number"
        )
    jobs = max(1, min(jobs, count))
    if names:
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(names[i * each : (i + 1) * each])}
            for i in range(jobs)
        ]
    return [{}] * jobs  # not tied to cores, which other programs may use


def run_all(
    trials: Sequence[Trial], slots: Sequence[dict[str, str]]
) -> tuple[int, list[pathlib.Path]]:
    """Train each in a process, with its output in `output.txt`, and print a line about each.

    SIGTERM, SIGUSR1 and SIGHUP are sent on to the processes, which save and end. A run that another
    process trains waits for it. Returns the exit code (0, 1 if a run failed, 75 or 130 after a
    signal), and the directories that failed.
    """
    waiting, running, failed, done = list(trials), dict[int, Running](), list[pathlib.Path](), 0
    received: list[int] = []

    def stop(number, frame):
        received.append(number)
        if number != signal.SIGINT:  # a terminal sends it to the processes too
            for process in running.values():
                process.child.send_signal(number)
        end_after_second(received)

    for number in handled():
        if number != signal.SIGUSR2:
            signal.signal(number, stop)
    try:
        while running or (waiting and not received):
            for i, slot in enumerate(slots):
                if i in running and running[i].child.poll() is not None:
                    done += 1
                    ended = running.pop(i)
                    if not report(ended, f"{done}/{len(trials)}"):
                        failed.append(ended.trial.directory)
                if i in running or received:
                    continue
                trial = next((t for t in waiting if not is_held(t.directory)), None)
                if trial is not None:
                    waiting.remove(trial)
                    if trial.is_finished():  # meanwhile, by another process
                        done += 1
                    else:
                        running[i] = start(trial, slot)
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.child.kill()
    if received:
        return INTERRUPTED if received[0] == signal.SIGINT else PREEMPTED, failed
    return 1 if failed else 0, failed


def start(trial: Trial, slot: dict[str, str]) -> Running:
    trial.directory.mkdir(parents=True, exist_ok=True)
    with open(trial.directory / OUTPUT, "ab", opener=rundir.no_link) as output:
        child = start_verb(["train", *trial.arguments], os.environ | slot, output)
    return Running(trial, child, time.monotonic())


def report(ended: Running, count: str) -> bool:
    """Print the result of a run; return True if it finished."""
    directory, code = ended.trial.directory, ended.child.poll()
    took = f"{time.monotonic() - ended.since:.1f} s"
    final = [r for r in read(directory / "metrics.jsonl") if r.get("split") == "final"]
    if code or not final:
        lines = (
            (directory / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
        print(
            f"[{count}] {directory.name}  exit code {code} after {took}: {(lines or [''])[-1]}",
            flush=True,
        )
        return False
    numbers = [
        f"{name} {final[-1][name]:.4f}"
        for name in METRICS
        if isinstance(final[-1].get(name), float)
    ]
    print("  ".join([f"[{count}] {directory.name}", *numbers, took]), flush=True)
    return True
