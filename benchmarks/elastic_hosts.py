"""Elastic training on several hosts whose network is cut, and which are lost: does it end as one
device does alone?

    python -m benchmarks.elastic_hosts [--hosts 3] [--processes 1] [--minutes 2] [--seed 1] [--faults a,b]
        [--pause 0.2] [--key v]

Each host is a network namespace of this machine (needs root), with a loop that starts its processes
again. Faults are chosen at random, each in a complete job. Prints for each the seconds from its end
(the cable is plugged in, the host starts) to a new update and to a complete job, and the longest
time without a new update. Then finishes the run. Other arguments go to jaxdp's config. Exits with 1
if the job does not continue, a minority or a half trains, an update is missing or logged twice, the
parameters are not those of one device, or a process ends with another code than 0 or 1."""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.elastic_faults import OF_HOSTS, of_hosts
from benchmarks.elastic_soak import CONFIG, Progress, Run, alone, final
from benchmarks.job import ROOT

sys.path.insert(0, str(ROOT / "tests/support"))
from netns import Hosts

# seconds from the end of a fault until all processes train: 90 as documented, and a slow machine
LIMIT = 300.0
FEW = 10  # updates whose metrics may be written later
CHANGES = {
    "waiting.Wait": "waiting.Wait, args: {pause: {pause}, save: 40, evaluation: 20}",
    "every: 100}": "every: 40}", "every: 50}": "every: 20}", "every: 10}": "every: 1}",
}  # fmt: skip


class Job(Run):
    """A job on these hosts. A process starts again 2 s after its end, until one has ended with 0."""

    def __init__(self, hosts: Hosts, processes: int, folder: pathlib.Path, words: list[str]):
        self.hosts, self.folder, self.closed = hosts, folder, False
        self.codes: list[int] = []
        self.up = [threading.Event() for _ in hosts.names]
        self.env = os.environ | {
            "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}",
            "JAXDP_COORDINATOR": f"{hosts.address(0)}:4711", "JAXDP_SECRET": "5" * 32,
            "JAXDP_NUM_PROCESSES": str(processes * len(hosts.names)),
        }  # fmt: skip
        self.command = [
            sys.executable,
            "-m",
            "jaxdp",
            "train",
            "--config",
            "config.yaml",
            "--run_dir",
            "run",
            *words,
        ]
        each = [(h, h * processes + i) for h in range(len(hosts.names)) for i in range(processes)]
        self.loops = [threading.Thread(target=self._loop, args=x, daemon=True) for x in each]
        self.heal()
        for loop in self.loops:
            loop.start()

    def _loop(self, host: int, rank: int) -> None:
        env, command = (
            self.env | {"JAXDP_PROCESS_ID": str(rank)},
            [*self.hosts.prefixes[host], *self.command],
        )
        with (self.folder / "log").open("ab") as log:
            while not self.closed:
                self.up[host].wait()
                self.codes.append(
                    subprocess.run(
                        command, cwd=self.folder, env=env, stdout=log, stderr=log
                    ).returncode
                )
                if 0 in self.codes:  # this process has finished, or the job has while it was away
                    return
                time.sleep(2.0)

    def lose(self, host: int) -> bool:
        self.up[host].clear()
        self.hosts.kill(host)
        return True

    def heal(self) -> None:
        self.hosts.heal()
        for up in self.up:
            up.set()

    def close(self) -> None:
        self.closed = True
        for host in range(len(self.up)):
            self.lose(host)


def wait(condition, job: Job) -> bool:
    """Wait until the condition holds, or the job has finished; return whether it took less than
    LIMIT seconds.
    """
    deadline = time.monotonic() + LIMIT
    while not condition() and 0 not in job.codes and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.monotonic() < deadline


def endure(job: Job, progress: Progress, kind: str, rng: random.Random) -> dict:
    """One fault, and the recovery from it. Raises SystemExit if the job does not recover, or trains
    and must not.
    """
    progress.clear()
    seconds, must_train = of_hosts(job, kind, rng)
    time.sleep(min(seconds, 3.0))
    early = progress.newest
    time.sleep(max(0.0, seconds - 3.0))
    reached, healed = progress.newest, time.monotonic()
    job.heal()
    result: dict = {"fault": kind, "seconds": round(seconds, 1), "updates": reached - early}
    if must_train is not None and must_train != (reached > early + FEW):
        raise SystemExit(f"{result}: must it train? {must_train}; see {job.folder}")

    def is_complete():
        return progress.newest > reached and job.generations()[-1] == len(job.loops)

    for name, condition in (
        ("update", lambda: progress.newest > reached),
        ("complete", is_complete),
    ):
        if not wait(condition, job):
            raise SystemExit(f"{result}: no {name} for {LIMIT:.0f} s: see {job.folder}")
        result[name] = round(time.monotonic() - healed, 1)
    return result | {"longest": round(progress.clear(), 1)}


def soak(job: Job, minutes: float, faults: list[str], rng: random.Random) -> None:
    """Train with faults for some minutes, then without until the end. Raises SystemExit as `endure`
    does.
    """
    progress = Progress(job)
    progress.start()
    wait(lambda: progress.newest > 10, job)
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and 0 not in job.codes:
        print(json.dumps(endure(job, progress, rng.choice(faults), rng)), flush=True)
        time.sleep(rng.uniform(2.0, 6.0))
    (job.folder / "finish").touch()
    for loop in job.loops:
        loop.join(600)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("hosts", 3),
        ("processes", 1),
        ("minutes", 2.0),
        ("seed", 1),
        ("pause", 0.2),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--faults", type=lambda text: text.split(","), default=OF_HOSTS)
    args, more = parser.parse_known_args(argv)
    steps, config = round(60 * args.minutes / args.pause / 10) * 10, CONFIG
    for old, new in CHANGES.items():
        config = config.replace(old, new.replace("{pause}", str(args.pause)))
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.yaml").write_text(config)
    words = ["--steps", str(steps), *more]
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(args.hosts))
        except OSError as error:
            raise SystemExit(
                f"no network namespaces here ({error}): run it as root, with iproute2"
            ) from None
        job = Job(hosts, args.processes, folder, [*words, "--elastic.enabled", "true"])
        try:
            faults = [kind for kind in args.faults if kind != "halves" or args.hosts % 2 == 0]
            soak(job, args.minutes, faults, random.Random(args.seed))
        finally:
            job.close()
    logged = [line["step"] for line in job.lines("metrics.jsonl") if line["split"] == "train"]
    codes = {code: job.codes.count(code) for code in sorted(set(job.codes))}
    checks = {
        "codes": set(codes) <= {0, 1, -9},
        "every_update_once": logged == [*range(1, steps + 1)],
        "equal_to_one_device": final(folder / "run")["params_sha256"] == alone(folder, steps, more),
    }
    result = {
        **vars(args),
        "more": more,
        "generations": job.generations(),
        "codes": codes,
        "checks": checks,
    }
    print(json.dumps(result), flush=True)
    if not all(checks.values()):
        raise SystemExit(f"see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
