"""How soon an elastic job continues: a random one of its processes is killed, and starts again,
some number of times.

    python -m benchmarks.elastic_recovery [--config configs/gpt_3m.yaml] [--processes 4] [--kills 20] [--key value ...]

Prints the seconds from each kill to the next new update (at which the others continue) and until
the process trains again, with their medians. Each kill is of a complete job that has made 10 to 30
more updates, a random number: how many are lost depends on the moment between two copies of the
state. The first `--warm` kills fill the compilation cache, and are not counted. Other arguments go
to the config, such as --parallel.backend pjit --parallel.zero 3.
"""

import argparse
import json
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time

from benchmarks.elastic_faults import kill
from benchmarks.elastic_soak import Job
from benchmarks.job import ROOT

LIMIT = 300.0  # seconds until the job must have come so far


def until(job: Job, condition) -> float:
    """Wait for the condition; return the time. Raises SystemExit if the job ends, or after LIMIT
    seconds.
    """
    deadline = time.monotonic() + LIMIT
    while not condition():
        if job.launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"the job has ended or hangs after update {job.step()}: see {job.folder}/log"
            )
        time.sleep(0.02)
    return time.monotonic()


def measure(job: Job, processes: int, rng: random.Random) -> dict[str, float]:
    """Kill a process of a complete job; return the seconds until others train, and until all do."""
    step = job.step() + rng.randint(10, 30)
    until(job, lambda: job.step() >= step and job.generations()[-1] == processes)
    before, killed, step = len(job.generations()), time.monotonic(), job.step()
    kill(job, rng)
    update = until(job, lambda: job.step() > step and len(job.generations()) > before)
    complete = until(job, lambda: job.generations()[-1] == processes)
    step = job.step()
    complete = until(job, lambda: job.step() > step)
    return {"update": round(update - killed, 2), "complete": round(complete - killed, 2)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/gpt_3m.yaml")
    for name, default in (("processes", 4), ("kills", 20), ("warm", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args, more = parser.parse_known_args(argv)
    folder = pathlib.Path(tempfile.mkdtemp())
    words = [
        "launch",
        "-n",
        str(args.processes),
        "--restart",
        "1000",
        "train",
        "--config",
        str(ROOT / args.config),
    ]
    words += [
        "--run_dir",
        "run",
        "--steps",
        "1000000",
        "--log.every",
        "1",
        "--elastic.enabled",
        "true",
        *more,
    ]
    job, rng, results = (
        Job([sys.executable, "-m", "jaxdp", *words], folder, again=False),
        random.Random(args.seed),
        [],
    )
    try:
        until(job, lambda: job.step() > 0)
        for number in range(args.warm + args.kills):
            result = measure(job, args.processes, rng)
            print(json.dumps(result), flush=True)
            results += [result] if number >= args.warm else []
    finally:
        job.close()
    medians = {
        name: round(statistics.median(r[name] for r in results), 2)
        for name in ("update", "complete")
    }
    print(json.dumps({**vars(args), "more": more, "median": medians}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
