"""The time of 12 digits runs: `train.py` in a loop, and a sweep with one at a time and with one on
each core.

    python -m benchmarks.sweep [RUNS] [--key value ...]

Each way starts with an empty cache of compiled programs. The runs differ only in their seed, so all
use the same. Other arguments go to the config.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

from benchmarks import job


def seconds(jobs: int | None, runs: int, folder: pathlib.Path, more: list[str]) -> float:
    """Return the wall time of all runs; jobs: at once in a sweep; None: a loop. Raises
    CalledProcessError.
    """
    seeds = [*map(str, range(runs))]
    common = [
        "--config",
        str(job.ROOT / "configs" / "digits.yaml"),
        "--compilation_cache",
        str(folder / f"cache{jobs}"),
    ]
    common += more
    sweep = [
        sys.executable,
        "-m",
        "jaxdp",
        "sweep",
        *common,
        "--jobs",
        str(jobs),
        "--run_dir",
        str(folder / f"{jobs}"),
    ]
    train = [sys.executable, str(job.ROOT / "train.py"), *common]
    commands = [[*sweep, "--seed", ",".join(seeds)]]
    if jobs is None:
        commands = [
            [*train, "--seed", seed, "--run_dir", str(folder / f"loop{seed}")] for seed in seeds
        ]
    began = time.perf_counter()
    for command in commands:
        job.call(command, job.environment())
    return time.perf_counter() - began


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=int, nargs="?", default=12)
    options, more = parser.parse_known_args(argv)
    runs, cores = options.runs, len(os.sched_getaffinity(0))
    if runs < 2:
        parser.error(f"RUNS: {runs}, but a sweep has at least 2")
    with tempfile.TemporaryDirectory() as folder:
        times = {
            jobs: seconds(jobs, runs, pathlib.Path(folder), more)
            for jobs in dict.fromkeys((None, cores, 1))
        }
    print(f"{runs} runs on {cores} cores: train.py in a loop {times[None]:.1f} s, a sweep with one at a time "
          f"{times[1]:.1f} s, with {cores} at once {times[cores]:.1f} s: {times[None] / times[cores]:.2f} times faster "
          f"than the loop, {times[1] / times[cores]:.2f} times faster than one at a time")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
