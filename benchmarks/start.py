"""How long a run takes to its first update, with an empty compilation cache and with the one that
is left behind.

    python -m benchmarks.start [--repeats 2] [--processes 2] [--configs digits gpt_3m] [--key value ...]

Each start is `python train.py --config ... --steps 1`, timed from its beginning to the line of
update 1 in its metrics file; with --processes under mpirun. Prints JSON. Other arguments go to the
config."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import job

CONFIGS = {
    "digits": ["configs/digits.yaml"],
    "gpt_3m": ["configs/gpt_3m.yaml"],
    "cifar10_resnet9": [
        *(
            "configs/cifar10_resnet9.yaml",
            "--data.target",
            "benchmarks.data.Images",
            "--data.args.root",
            "random",
        ),
        *("--epochs", "null"),
    ],
}


def first_update(
    config: list[str], folder: pathlib.Path, cache: pathlib.Path, processes: int = 1
) -> float:
    """Seconds to the first update. Raises CalledProcessError where the run fails."""
    # As a user has it: below it is the cache that is on by default.
    env = job.environment(XDG_CACHE_HOME=str(cache))
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    launch = job.mpirun(processes) if processes > 1 else []
    command = [
        *launch,
        sys.executable,
        "train.py",
        "--config",
        *config,
        "--steps",
        "1",
        "--run_dir",
        str(folder),
    ]
    metrics, began = folder / "metrics.jsonl", time.perf_counter()
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        run = job.start(command, env, stdout=log, stderr=log)
        while run.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        if run.wait(300):
            log.seek(0)
            raise subprocess.CalledProcessError(run.returncode, command, log.read())
    return seconds


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--configs", nargs="+", choices=[*CONFIGS], default=[*CONFIGS])
    options, more = parser.parse_known_args(argv)
    times: dict[str, dict[str, list[float]]] = {
        name: {"first": [], "second": []} for name in options.configs
    }
    for repeat in range(options.repeats):
        for name in options.configs:
            config = [*CONFIGS[name], *more]
            with tempfile.TemporaryDirectory() as folder:
                for start in ("first", "second"):
                    run = pathlib.Path(folder) / f"{start}{repeat}"
                    times[name][start].append(
                        first_update(config, run, pathlib.Path(folder) / "cache", options.processes)
                    )
    median = {
        name: {k: statistics.median(v) for k, v in own.items()} for name, own in times.items()
    }
    shares = {name: own["second"] / own["first"] for name, own in median.items()}
    print(
        json.dumps(
            {"seconds": times, "median": median, "shares": shares, "share": max(shares.values())}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
