"""Training while processes are killed: the share of the updates that are made without faults in the
same time.

    python -m benchmarks.elastic_soak [--processes 4] [--minutes 5] [--every 10] [--ways elastic,restart,torchrun]
        [--faults kill,coordinator,...|all] [--seed 0] [--healthy 15] [--steps N] [--key value ...]

A small MLP, 20 ms of waiting in each update. `elastic`: jaxdp launch with elastic training.
`restart`: jaxdp launch in a loop, which starts again from the last checkpoint. `torchrun`:
PyTorch's DistributedDataParallel, restarted by its agent from its last checkpoint. A checkpoint is
written every 100 updates. Faults: those of `elastic_faults`, of which `restart` and `torchrun` know
kill, first, pair and stop. Prints the goodput: the updates per second with faults relative to those
before the first fault, in `--healthy` seconds. The elastic run is then finished without faults, and
compared with one device that ran alone. Other arguments go to jaxdp's config."""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import job
from benchmarks.elastic_faults import FAULTS, send
from benchmarks.job import ROOT

HUNG = 60.0  # seconds without an update
FIRST = 100  # updates before anything is measured; fewer in a run of fewer than ten times as many
CONFIG = """
model: {target: MLP, args: {hidden: [64], dropout: 0.1}}
data: {target: Digits, args: {augment: true}}
batch_size: 64
optimizer: {target: adam, lr: 1.0e-3}
log: {every: 10}
checkpoint: {every: 100}
eval: {every: 50}
callbacks: [{target: benchmarks.waiting.Wait}]
parallel: {reduction: exact}
"""


class Run:
    """What a job has written to its folder so far."""

    folder: pathlib.Path

    def lines(self, name: str, last: int = 0) -> list[dict]:
        """The lines of a file; if `last`, as many of the last ones: reading all would take a core
        of a long run.
        """
        file = self.folder / "run" / name
        if not file.exists():
            return []
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 1024 * last) if last else 0)
            lines = stream.read().decode().splitlines()
        return [json.loads(x) for x in lines[-last:] if x.startswith("{") and x.endswith("}")]

    def step(self) -> int:
        """The newest update that is in the log of the run."""
        return max((line["step"] for line in self.lines("metrics.jsonl", 3)), default=0)

    def generations(self) -> list[int]:
        """The number of processes of each generation that has started to train."""
        return [
            e["processes"] for e in self.lines("events.jsonl") if e["kind"] in ("start", "resume")
        ]

    def has_trained(self) -> bool:
        """Whether the newest generation has made an update."""
        kinds = [
            e["kind"]
            for e in self.lines("events.jsonl")
            if e["kind"] in ("start", "resume", "first_update")
        ]
        return kinds[-1:] == ["first_update"]


class Job(Run):
    """One way to train. again: start the command again when it ends, until `close`."""

    def __init__(self, command: list[str], folder: pathlib.Path, again: bool):
        self.command, self.folder, self.again = command, folder, again
        env = os.environ | {
            "XLA_FLAGS": "",
            "PYTHONPATH": f"{ROOT}:{folder}",
            "JAXDP_TIMEOUT": "60",
        }
        self.log = (folder / "log").open("ab")
        self.env = env | {"OMP_NUM_THREADS": "1"}
        self.launcher = self._start()
        threading.Thread(target=self._restart, daemon=True).start()

    def _start(self) -> subprocess.Popen:
        return job.start(self.command, self.env, self.folder, stdout=self.log, stderr=self.log)

    def _restart(self) -> None:
        while self.launcher.wait() != 0 and self.again:
            self.launcher = self._start()

    def ranks(self) -> list[int]:
        """The processes that train."""
        return [
            int(p.name)
            for p in pathlib.Path("/proc").glob("[0-9]*")
            if parent(p) == self.launcher.pid
        ]

    def coordinators(self) -> list[int]:
        """The coordinator: any rank may have started it, and may have died since."""
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_one = b"jaxdp.process.coordinator_process" in (process / "cmdline").read_bytes()
                if is_one and (process / "cwd").readlink() == self.folder:
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        self.again = False
        for pid in [*self.coordinators(), *self.ranks(), self.launcher.pid]:
            send(pid, signal.SIGKILL)
        self.launcher.wait()


def parent(process: pathlib.Path) -> int | None:
    try:
        return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


class Progress(threading.Thread):
    """Watches a job: the newest update, and the longest time without a new one since `clear`."""

    def __init__(self, job: Run):
        super().__init__(daemon=True)
        self.job, self.newest, self.at, self.longest = job, 0, time.monotonic(), 0.0

    def run(self) -> None:
        while True:
            step, now = self.job.step(), time.monotonic()
            self.longest = max(self.longest, now - self.at)
            if step > self.newest:
                self.newest, self.at = step, now
            time.sleep(0.05)

    def clear(self) -> float:
        longest, self.longest = self.longest, 0.0
        return longest


def soak(
    job: Job,
    minutes: float,
    every: float,
    faults: list[str],
    seed: int,
    healthy: float,
    updates: int,
) -> dict:
    """Train with faults; return the updates per second before the first fault, and the share that
    faults leave.

    faults: each is chosen at random. longest: of each kind, the longest time without a new update
    until the next fault."""
    rng = random.Random(seed)
    longest: dict[str, list[float | None]] = {}
    while job.step() < min(FIRST, updates // 10):
        if job.launcher.poll() == 2:
            raise SystemExit(f"the job was refused: see {job.folder}/log")
        time.sleep(0.1)
    first, began = job.step(), time.monotonic()
    time.sleep(healthy)
    base, start = job.step(), time.monotonic()
    normal, count = (base - first) / (start - began), 0
    progress = Progress(job)
    progress.start()
    while time.monotonic() < start + 60 * minutes:
        kind = rng.choice(faults)
        progress.clear()
        print(f"{time.monotonic() - start:.1f} s: {kind}", file=sys.stderr, flush=True)
        done = FAULTS[kind](job, rng)
        time.sleep(every * rng.uniform(0.5, 1.5))
        while time.monotonic() - progress.at > every and time.monotonic() - progress.at < HUNG:
            time.sleep(0.1)
        seconds = round(progress.clear(), 1)
        longest[kind] = [*longest.get(kind, []), seconds if done else None]
        count += done
        if seconds >= HUNG:
            raise SystemExit(
                f"no progress for {HUNG} s after {kind}: see {job.folder}; its processes run"
            )
    wall, reached = time.monotonic() - start, job.step()
    share = (reached - base) / wall / normal
    return {
        "number": count, "normal_per_s": round(normal, 1), "updates": reached - base, "goodput": round(share, 3),
        "longest": longest,
    }  # fmt: skip


def commands(way: str, processes: int, steps: int, more: list[str]) -> list[str]:
    jaxdp = [sys.executable, "-m", "jaxdp"]
    train = ["train", "--config", "config.yaml", "--run_dir", "run", "--steps", str(steps), *more]
    if way == "elastic":
        elastic = ["--elastic.enabled", "true", "--elastic.snapshot_every", "10"]
        return [*jaxdp, "launch", "-n", str(processes), "--restart", "1000", *train, *elastic]
    if way == "restart":
        return [*jaxdp, "launch", "-n", str(processes), *train]
    agent = ROOT / ".venv-torch/bin/torchrun"
    script = ROOT / "benchmarks/torch_ddp/restarted.py"
    return [
        str(agent),
        "--nproc_per_node",
        str(processes),
        "--max_restarts",
        "1000",
        str(script),
        str(steps),
    ]


def alone(folder: pathlib.Path, steps: int, more: list[str]) -> str:
    """The digest of the parameters after the same run on one device."""
    command = [
        sys.executable,
        f"{ROOT}/train.py",
        "--config",
        f"{folder}/config.yaml",
        "--steps",
        str(steps),
        *more,
    ]
    job.call([*command, "--run_dir", f"{folder}/alone"], job.environment(XLA_FLAGS=""), folder)
    return final(folder / "alone")["params_sha256"]


def final(folder: pathlib.Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def finish(job: Job, folder: pathlib.Path, steps: int, more: list[str]) -> dict:
    """Finish the elastic run without faults; return whether it ended as one device does alone."""
    (folder / "finish").touch()
    code = job.launcher.wait(600 + steps / 20)
    logged = [line["step"] for line in job.lines("metrics.jsonl") if line["split"] == "train"]
    return {
        "code": code,
        "generations": len(job.generations()),
        "every_update_once": logged == list(range(10, steps + 1, 10)),
        "from_the_first_update": [e["kind"] for e in job.lines("events.jsonl")].count("start"),
        "equal_to_one_device": final(folder / "run")["params_sha256"] == alone(folder, steps, more),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("processes", 4),
        ("minutes", 5.0),
        ("every", 10.0),
        ("seed", 0),
        ("healthy", 15.0),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument(
        "--steps", type=int, help="of the run; left out, what the minutes suffice for"
    )
    parser.add_argument(
        "--faults",
        type=lambda text: [*FAULTS] if text == "all" else text.split(","),
        default=["kill"],
    )
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), default=["elastic", "restart", "torchrun"]
    )
    args, more = parser.parse_known_args(argv)
    steps = args.steps or round(60 * args.minutes / 0.02)
    for way in args.ways:
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "config.yaml").write_text(CONFIG)
        job = Job(commands(way, args.processes, steps, more), folder, again=way == "restart")
        try:
            result = soak(
                job, args.minutes, args.every, args.faults, args.seed, args.healthy, steps
            )
            if way == "elastic":
                result |= finish(job, folder, steps, more)
        finally:
            job.close()
        print(json.dumps({"way": way, **vars(args), **result}), flush=True)
        if all(result.get(name, True) for name in ("every_update_once", "equal_to_one_device")):
            shutil.rmtree(folder)
        else:
            print(f"kept {folder}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
