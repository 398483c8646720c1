"""One run, killed again and again at random moments, against the same run left alone: the same
bits, nothing lost.

    python -m benchmarks.soak [--kills 100] [--launcher openmpi|mpich|hand] [--processes 2] [--seed 0]
        [--json FILE] [--work FOLDER]

A life is: start the command, wait for a random moment, kill -9 one rank or all processes, wait
until every process of the job is gone. Moments are of three kinds: in the middle of training
(most), while it starts, while it saves. How long a life trains is drawn so that the kills spread
evenly over the updates. Then the run is let to its end. Exits with 1 where anything is not as it
should be."""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from importlib import metadata

from benchmarks.job import mpirun
from benchmarks.soak_job import Job, Wrong

MOMENTS = {"training": 0.7, "starting": 0.15, "saving": 0.15}  # shares of the kills
VICTIMS = {"rank 0": 0.4, "rank 1": 0.4, "all": 0.2}
CONFIG = """model: {{target: MLP, args: {{hidden: [64], dropout: 0.1}}}}
data: {{target: benchmarks.data.SlowDigits, args: {{sleep: {sleep}}}}}
steps: {steps}
batch_size: 64
optimizer: {{target: adam, lr: 1.0e-3, ema: 0.99}}
log: {{every: 1}}
eval: {{every: {eval_every}}}
checkpoint: {{every: {save_every}, asynchronous: {asynchronous}}}
"""


@dataclasses.dataclass
class Kill:
    """moment: the wanted one; found: in which it was; begun: after which update the life went on,
    None where it was killed before it knew; said: the last step that any life said to be saved;
    reached: the last update made; on_disk: the step that the next life goes on after; gone: seconds
    from the kill until every process had ended."""

    moment: str
    victim: str
    found: str
    begun: int | None
    said: int
    reached: int
    gone: float
    trained: float
    on_disk: int = 0


class Soak:
    def __init__(self, args, folder):
        self.args, self.folder, self.random = args, folder, random.Random(args.seed)
        text = CONFIG.format(
            sleep=args.sleep_ms / 1e3,
            eval_every=5 * args.save_every,
            **vars(args),
            asynchronous=str(not args.wait).lower(),
        )
        (folder / "soak.yaml").write_text(text)
        self.said = 0
        self.job: Job | None = None  # the last that was started
        self.restarts: list[float] = []  # seconds from the start of a life to its first new update

    def start(self, name):
        train = [sys.executable, "train.py", "--config", str(self.folder / "soak.yaml")]
        train += ["--run_dir", str(self.folder / name)]
        program, *options = mpirun(self.args.processes)
        program = self.args.mpirun or program
        before = {"openmpi": [program, *options], "mpich": [program, *options[:2]], "hand": []}[
            self.args.launcher
        ]
        self.job = Job([*before, *train], self.folder, self.args.launcher, self.args.processes)
        return self.job

    def left_alone(self):
        """The uninterrupted run; (seconds until its first update was made, of an update, in all;
        updates that are made while a save is written, median and most)."""
        began = time.monotonic()
        job = self.start("alone")
        job.wait_end()
        updates = [when for when, line in job.lines if line.startswith("train ")]
        seconds = (updates[-1] - updates[0]) / (len(updates) - 1)
        lags: list[int] = []
        made = 0
        for _, line in job.lines:
            if found := re.match(r"(train|saved step) +(\d+)", line):
                made, lags = (
                    (int(found[2]), lags)
                    if found[1] == "train"
                    else (made, [*lags, made - int(found[2])])
                )
        return updates[0] - job.began, seconds, time.monotonic() - began, spread(lags)

    def life(self, kills_left, starting, update):
        """One life and its end. starting, update: seconds, of the uninterrupted run."""
        moment = self.random.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        victim = self.random.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        on, share = self.on_disk(), self.random.random()
        mean = (
            self.args.steps - on
        ) / kills_left + self.args.save_every / 2  # of them half an interval is lost
        wait = share * min(2 * mean, 0.8 * (self.args.steps - on)) * update
        job = self.start("killed")
        first = None
        if moment == "starting":
            deadline = job.began + share * starting
            job.wait_until(lambda: time.monotonic() > deadline, "the kill")
        else:
            job.wait_until(lambda: job.find(r"^train "), "an update")
            first = job.find(r"^train ")[0]
            self.restarts.append(first - job.began)
            job.wait_until(lambda: time.monotonic() > first + wait, "the kill")
        if moment == "saving":
            job.wait_until(self.saves, "a save")
            time.sleep(self.random.random() * 0.15)
        when = time.monotonic()
        victim = job.kill(victim)
        job.wait_gone()
        gone = time.monotonic() - when
        begin = job.find(r"; (?:resumes after step (\d+)|starts)\b.* in ")
        begun = int(begin[1][1] or 0) if begin else None
        if begun is not None and begun != on:
            raise Wrong(f"step {on} is the last that is whole, but the run went on after {begun}")
        for _, line in list(job.lines):
            if saved := re.match(r"saved step (\d+)", line):
                self.said = int(saved[1])
        steps = [
            line["step"] for line in records(self.folder / "killed") if line["split"] == "train"
        ]
        reached = max(steps, default=0) if begun is not None else on
        found = "starting" if reached == on else "saving" if self.saves() else "training"
        trained = when - first if first else 0.0
        return Kill(moment, victim, found, begun, self.said, reached, gone, trained)

    def on_disk(self):
        """The last step with a manifest."""
        folders = (self.folder / "killed" / "checkpoints").glob("[0-9]*")
        return max(
            (int(p.name) for p in folders if p.name.isdecimal() and (p / "manifest.json").exists()),
            default=0,
        )

    def saves(self):
        """Whether a save is under way, or was when the job died: a directory of one that is no
        checkpoint yet.
        """
        folders = list((self.folder / "killed" / "checkpoints").glob("[0-9]*"))
        written = [p for p in folders if p.name.isdecimal() and not (p / "manifest.json").exists()]
        return bool(written) or any("orbax-checkpoint-tmp" in p.name for p in folders)

    def check(self, kill):
        """A killed life against what the next one will find."""
        kill.on_disk = self.on_disk()
        # A save waits for the one before.
        most = self.args.save_every if self.args.wait else 2 * self.args.save_every - 1
        if kill.on_disk < kill.said:
            raise Wrong(
                f"step {kill.said} was said to be saved, and {kill.on_disk} is the last that is there"
            )
        if kill.begun is not None and kill.reached - kill.on_disk > most:
            raise Wrong(
                f"update {kill.reached} was made, and {kill.on_disk} is the last checkpoint"
            )

    def run(self):
        starting, update, alone, lags = self.left_alone()
        show(
            f"left alone: {alone:.1f} s, {starting:.1f} s to the first update, {1e3 * update:.1f} ms an update"
        )
        began = time.monotonic()
        kills: list[Kill] = []
        while len(kills) < self.args.kills:
            kill = self.life(self.args.kills - len(kills), starting, update)
            self.check(kill)
            kills.append(kill)
            show(
                f"kill {len(kills)}: {kill.victim} while {kill.found}, {kill.trained:.1f} s into the updates, at "
                f"update {kill.reached}; {kill.on_disk} is saved; gone in {kill.gone:.2f} s"
            )
        job = self.start("killed")
        job.wait_until(lambda: job.find(r"^train "), "an update")
        self.restarts.append(job.find(r"^train ")[0] - job.began)
        job.wait_end()
        seconds = time.monotonic() - began
        same, problems = compare(self.folder / "killed", self.folder / "alone", self.args.steps)
        again = [max(0, k.reached - k.on_disk) for k in kills if k.begun is not None]
        return {
            "kills": len(kills),
            "by_moment": dict(collections.Counter(k.found for k in kills)),
            "by_victim": dict(collections.Counter(k.victim for k in kills)),
            "steps": self.args.steps,
            "save_every": self.args.save_every,
            "launcher": self.args.launcher,
            "seed": self.args.seed,
            "params_sha256": same,
            "problems": problems,
            "seconds": round(seconds, 1),
            "seconds_alone": round(alone, 1),
            "update_ms": round(1e3 * update, 2),
            "goodput": round(update * self.args.steps / seconds, 3),
            "repeated_updates": sum(again),
            "repeated_share": round(sum(again) / (sum(again) + self.args.steps), 3),
            "updates_while_a_save_is_written": lags,
            "repeated_most": max(again, default=0),
            "repeated_more_than_an_interval": sum(n > self.args.save_every for n in again),
            "gone_s": spread([k.gone for k in kills]),
            "restart_s": spread(self.restarts),
            "start_alone_s": round(starting, 2),
            "update_at_kill": [k.reached for k in kills],
            "jax": metadata.version("jax"),
        }


def compare(run_dir, reference, steps):
    """(the digest that both end in, what is wrong): every line once and in order, and the same
    losses, bit for bit.
    """
    ours, theirs = records(run_dir), records(reference)
    problems = []

    def key(line):
        return (line["step"], line["split"])

    if [key(x) for x in theirs if x["split"] == "train"] != [
        (s, "train") for s in range(1, steps + 1)
    ]:
        problems.append("the uninterrupted run itself has not every step once")
    count, want = collections.Counter(map(key, ours)), collections.Counter(map(key, theirs))
    if count != want:
        problems.append(
            f"lines missing {sorted((want - count).elements())}, too many {sorted((count - want).elements())}"
        )
    elif list(map(key, ours)) != list(map(key, theirs)):
        problems.append("the lines are in another order")
    losses = {key(x): x["loss"] for x in theirs}
    differ = [key(x) for x in ours if losses.get(key(x)) != x["loss"]]
    if differ:
        problems.append(f"{len(differ)} losses differ, the first at {differ[0]}")
    digests = [
        next((x["params_sha256"] for x in lines if x["split"] == "final"), None)
        for lines in (ours, theirs)
    ]
    if digests[0] != digests[1] or digests[0] is None:
        problems.append(f"params_sha256 {digests[0]} instead of {digests[1]}")
    return digests[0], problems


def records(run_dir):
    """The lines of metrics.jsonl; a torn last one is left out."""
    found = []
    file = run_dir / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def spread(values):
    return (
        {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}
        if values
        else {}
    )


def show(text):
    print(text, flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=None, help="of the run; left out, 120 a kill")
    parser.add_argument("--save_every", type=int, default=100)
    parser.add_argument(
        "--wait", action="store_true", help="for every save: checkpoint.asynchronous: false"
    )
    parser.add_argument("--sleep_ms", type=float, default=8.0, help="that reading a batch takes")
    parser.add_argument("--launcher", choices=["openmpi", "mpich", "hand"], default="openmpi")
    parser.add_argument(
        "--mpirun", default=None, help="its path; left out, the one beside this Python"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, default=None, help="file for the result")
    parser.add_argument(
        "--work", type=pathlib.Path, default=None, help="folder to keep; left out, a temporary one"
    )
    args = parser.parse_args(argv)
    args.steps = args.steps or 120 * args.kills
    with contextlib.ExitStack() as stack:
        folder = args.work or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "killed").exists():
            parser.error(f"--work: there is a run in {folder} already")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        soak = Soak(args, folder.resolve())
        try:
            result = soak.run()
        except Wrong as wrong:
            show(f"WRONG: {wrong}")
            sys.exit(1)
        finally:
            if soak.job is not None:
                soak.job.kill("all")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    show(json.dumps(result))
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
