"""What elastic training costs where nothing happens: the time of an update with it and without it.

    python -m benchmarks.elastic_cost [--config configs/gpt_3m.yaml] [--processes 2] [--repeats 3] [--key value ...]

Two jobs in turn, `repeats` times; of each, the median `step_time_ms` of its records. Prints the
medians over the jobs, their ratio, and the mean difference of the two jobs of a turn, in us, with
its standard error (null for one turn). Other arguments go to the config.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

from benchmarks import job


def step_time(args: argparse.Namespace, elastic: bool, more: list[str]) -> float:
    """The milliseconds of an update in a job: the median over its records."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "jaxdp",
            "launch",
            "-n",
            str(args.processes),
            "train",
            "--config",
            args.config,
        ]
        command += ["--run_dir", f"{folder}/run", "--elastic.enabled", str(elastic).lower(), *more]
        job.call(command, job.environment(XLA_FLAGS=""), job.ROOT)
        records = job.records(pathlib.Path(folder) / "run")
    return statistics.median(
        record["step_time_ms"] for record in records if "step_time_ms" in record
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("config", "configs/gpt_3m.yaml"), ("processes", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args, more = parser.parse_known_args(argv)
    found: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(args.repeats):
        for elastic in (False, True) if repeat % 2 else (True, False):
            found[elastic].append(step_time(args, elastic, more))
    without, with_it = (statistics.median(found[elastic]) for elastic in (False, True))
    costs = [1e3 * (b - a) for a, b in zip(found[False], found[True])]
    result = {
        **vars(args),
        "without_ms": round(without, 2),
        "with_ms": round(with_it, 2),
        "ratio": round(with_it / without, 4),
        "difference_us": round(statistics.mean(costs)),
        "standard_error_us": round(statistics.stdev(costs) / len(costs) ** 0.5)
        if args.repeats > 1
        else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
