"""Local updates over a slow network: updates per second and evaluation loss, against an all-reduce of every update.

    python -m benchmarks.outer --launcher "LINE" --config configs/gpt_3m.yaml --steps 200 [--every 1,5,20,100] [...]

LINE starts two processes, one on each host, of the command that follows it; without it, both are on this host. Trains
with `bucket`, then with two replicas and an outer step every so many updates, each for the same number of updates, one
after the other. Prints the milliseconds of an update (of the records after the first), relative to `bucket`, and the
final evaluation. Other arguments go to the config.
"""

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

from benchmarks.harness import ROOT


def train(launcher: list[str], argv: list[str], folder: pathlib.Path) -> dict:
    """Train once; return the median milliseconds of an update and the final record."""
    command = [*launcher, sys.executable, f"{ROOT}/train.py", *argv, "--run_dir", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [r["step_time_ms"] for r in records if r["split"] == "train"][1:]
    return {"ms": statistics.median(times), "loss": records[-1]["loss"]}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", default="mpirun --bind-to none -np 2")
    parser.add_argument("--every", type=lambda text: [int(x) for x in text.split(",")], default=[1, 5, 20, 100])
    args, more = parser.parse_known_args(argv)
    launcher = shlex.split(args.launcher)
    with tempfile.TemporaryDirectory() as folder:
        base = train(launcher, [*more, "--parallel.reduction", "bucket"], pathlib.Path(folder, "bucket"))
        print(json.dumps({"way": "bucket", **base}), flush=True)
        for every in args.every:
            outer = ["--outer.replicas", "2", "--outer.every", str(every)]
            found = train(launcher, [*more, *outer], pathlib.Path(folder, f"every {every}"))
            speed, loss = base["ms"] / found["ms"], found["loss"] / base["loss"] - 1
            print(json.dumps({"way": f"outer, every {every}", **found, "speed": speed, "loss_vs": loss}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
