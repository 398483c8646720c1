"""Two versions of the project side by side: the time of an update and of a start, in turns.

    python -m benchmarks.versions --other FOLDER [--root FOLDER_OF_CIFAR10] [--repeats 3] [--processes 1,2]
        [--cases digits gpt_3m cifar10_resnet9] [--updates N] [--key value ...]

FOLDER is a checkout of the other version (`git worktree add FOLDER COMMIT`). Each trains with its
own configs and an empty compilation cache at first. Prints medians, this version's relative to the
other's: of the last records' milliseconds of an update, and of the seconds of a start (all of a run
of one update) with what an earlier run cached. Other arguments go to the config.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

from benchmarks import job

CASES = {"digits": 3000, "gpt_3m": 40, "cifar10_resnet9": 390}  # updates


def train(tree: pathlib.Path, processes: int, words: list[str], cache: str) -> tuple[float, float]:
    """Return (milliseconds of an update, seconds of the whole command)."""
    launch = job.mpirun(processes) if processes > 1 else []
    env = job.environment() | {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": cache}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [
            *launch,
            sys.executable,
            f"{tree}/train.py",
            *words,
            "--run_dir",
            f"{folder}/run",
        ]
        job.call(command, env, tree)
        took = time.perf_counter() - began
        records = job.records(pathlib.Path(folder) / "run")
    times = [r["step_time_ms"] for r in records if r["split"] == "train" and "step_time_ms" in r]
    return statistics.median(times[1:] or times or [float("nan")]), took


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", required=True, type=pathlib.Path)
    parser.add_argument("--root")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--processes", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--updates", type=int, help="of a run; left out, as many as its case needs")
    args, more = parser.parse_known_args(argv)
    trees = (job.ROOT, args.other.resolve())
    cases = {
        name: args.updates or CASES[name]
        for name in args.cases
        if args.root or "cifar10" not in name
    }
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for name, updates in cases.items():
            for processes in args.processes:
                words = [
                    "--config",
                    f"configs/{name}.yaml",
                    *(["--data.args.root", args.root] if args.root else []),
                ]
                words = [*(words if "cifar10" in name else words[:2]), *more]
                long = [
                    *words,
                    "--epochs",
                    "null",
                    "--steps",
                    str(updates),
                    "--log.every",
                    str(min(updates, max(10, updates // 10))),
                ]
                long += ["--eval.every", "null", "--checkpoint.every", "null"]
                short = [
                    *words,
                    "--epochs",
                    "null",
                    "--steps",
                    "1",
                    "--optimizer.warmup_steps",
                    "0",
                ]
                times: tuple[list, list] = ([], [])
                for repeat in range(args.repeats + 1):
                    for i, cache in (
                        ((0, first), (1, second)) if repeat % 2 else ((1, second), (0, first))
                    ):
                        _, start = train(trees[i], processes, short, cache)
                        update = train(trees[i], processes, long, cache)[0] if repeat else 0.0
                        times[i].append((update, start))
                rows = [[statistics.median(column) for column in zip(*t[1:])] for t in times]
                row = {
                    "case": name,
                    "processes": processes,
                    "update_ms": [round(r[0], 3) for r in rows],
                }
                row |= {
                    "update": round(rows[0][0] / rows[1][0], 3),
                    "first_start_s": [round(t[0][1], 2) for t in times],
                }
                row |= {
                    "start_s": [round(r[1], 2) for r in rows],
                    "start": round(rows[0][1] / rows[1][1], 3),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
