"""The time of a sweep of 12 digits runs, one at a time on all cores and one on each core.

    python -m benchmarks.sweep [RUNS]

Each of the two has an empty cache of compiled programs.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]


def seconds(jobs: int, runs: int, folder: pathlib.Path) -> float:
    """Return the wall time of a sweep over `runs` seeds. Raises CalledProcessError if a run fails."""
    seeds = ",".join(map(str, range(runs)))
    command = [
        *(sys.executable, "-m", "jaxdp", "sweep", "--config", str(ROOT / "configs" / "digits.yaml")),
        *("--seed", seeds, "--jobs", str(jobs), "--run_dir", str(folder / str(jobs))),
        *("--compilation_cache", str(folder / f"cache{jobs}")),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    runs, cores = int(sys.argv[1]) if sys.argv[1:] else 12, len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        times = {jobs: seconds(jobs, runs, pathlib.Path(folder)) for jobs in (cores, 1)}
    print(f"{runs} runs on {cores} cores: one at a time {times[1]:.1f} s, {cores} at once {times[cores]:.1f} s, "
          f"{times[1] / times[cores]:.2f} times faster")  # fmt: skip


if __name__ == "__main__":
    main()
