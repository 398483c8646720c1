"""Local updates over a slow network: updates per second and evaluation loss, against an all-reduce
of every update.

    python -m benchmarks.outer --config configs/gpt_3m.yaml [--every 1,5,20,100] [...]
    python -m benchmarks.outer --launcher "LINE" --speed 3 --config configs/gpt_3m.yaml [...]

Trains with `bucket`, then with two replicas and an outer step every so many updates, one after the
other. Prints the milliseconds of an update (of the records after the first), relative to `bucket`,
and the final evaluation loss. LINE starts two processes, one on each host, of the command that
follows it; without it, both are on this host. The loss does not depend on the network, so `--speed
N` makes only the updates that N outer steps need (`bucket`: 2 N), and prints no loss. Other
arguments go to the config."""

import argparse
import json
import pathlib
import shlex
import statistics
import sys
import tempfile

from benchmarks import job


def train(launcher: list[str], argv: list[str], folder: pathlib.Path) -> dict:
    """Train once; return the median milliseconds of an update and the final loss."""
    records = job.train(argv, folder, launcher)
    times = [r["step_time_ms"] for r in records if r["split"] == "train"][1:]
    return {"ms": round(statistics.median(times), 1), "loss": records[-1]["loss"]}


def few(every: int, outer_steps: int) -> list[str]:
    """Return the arguments of a short run: a record for each outer step, or for two updates."""
    between = max(every, 2)
    return [
        "--steps",
        str(between * outer_steps),
        "--log.every",
        str(between),
        "--optimizer.warmup_steps",
        "0",
    ]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", default=shlex.join(job.mpirun(2)))
    parser.add_argument(
        "--every", type=lambda text: [int(x) for x in text.split(",")], default=[1, 5, 20, 100]
    )
    parser.add_argument("--speed", type=int)
    parser.add_argument("--bucket_ms", type=float, help="of an earlier run; leaves it out")
    args, more = parser.parse_known_args(argv)
    launcher = shlex.split(args.launcher)
    ways = [] if args.bucket_ms else [("bucket", 1, ["--parallel.reduction", "bucket"])]
    ways += [
        (f"every {n}", n, ["--outer.replicas", "2", "--outer.every", str(n)]) for n in args.every
    ]
    base = {"ms": args.bucket_ms} if args.bucket_ms else None
    with tempfile.TemporaryDirectory() as folder:
        for name, every, options in ways:
            short = few(every, args.speed) if args.speed else []
            result = train(launcher, [*more, *options, *short], pathlib.Path(folder, name))
            base = base or result
            result["speed"] = round(base["ms"] / result["ms"], 2)
            if args.speed:
                del result["loss"]
            elif "loss" in base:
                result["loss_vs"] = round(result["loss"] / base["loss"] - 1, 4)
            print(json.dumps({"way": name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
