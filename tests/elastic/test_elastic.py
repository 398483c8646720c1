"""Elastic jobs (reliability.md): processes are killed, start again, and the parameters are those of an
undisturbed run.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.elastic_faults import connect_often, listening
from launch import launched, mpirun
from slurm import Slurm
from two_hosts import TwoHosts

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
model: {target: MLP, args: {hidden: [48], dropout: 0.1}}
data: {target: Digits, args: {augment: true}}
steps: 400
batch_size: 64
optimizer: {target: adamw, lr: 3.0e-3}
log: {every: 10}
elastic: {enabled: true, snapshot_every: 5, join_after: 0}
parallel: {reduction: exact}
"""
SLOW = """
import pathlib
import time


class Slow:
    def on_update(self, step, metrics):
        time.sleep(0.01 if pathlib.Path(__file__).with_name("finish").exists() else 0.2)
"""

# compiles in a quarter of the time, and measures nothing
SIMPLE = (
    "--optimizer.target",
    "sgd",
    "--data.args.augment",
    "false",
)
SIMPLE += ("--model.args.dropout", "0")


class Job:
    """`jaxdp launch` of a config; its processes by rank."""

    def __init__(self, folder, processes, restart, *arguments, program=()):
        (folder / "config.yaml").write_text(CONFIG + "callbacks: [{target: slow.Slow}]\n")
        (folder / "slow.py").write_text(SLOW)
        self.directory = folder / "run"
        words = [
            *program,
            "train",
            "--config",
            folder / "config.yaml",
            "--run_dir",
            self.directory,
            *arguments,
        ]
        process = launched(folder, "-n", processes, "--restart", restart, *words)
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.launcher = subprocess.Popen(**process, **output, start_new_session=True)

    def pids(self):
        return children(self.launcher.pid)

    def coordinators(self):
        """Their process ids; any process may have started one, and may have died since."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_one = b"coordinator_process" in (entry / "cmdline").read_bytes()
                if is_one and (entry / "cwd").readlink() == self.directory.parent:
                    found.append(int(entry.name))
        return found

    def kill_coordinator(self):
        (found,) = self.coordinators()
        os.kill(found, signal.SIGKILL)

    def lines(self, name):
        file = self.directory / name
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, condition, seconds=300):
        """Wait for a condition, not for a time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.launcher.poll() is None and time.monotonic() < deadline, (
                self.launcher.communicate()[0]
            )
            time.sleep(0.05)

    def step(self):
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    def generations(self):
        """The numbers of processes of the generations that have made an update."""
        events = self.lines("events.jsonl")
        starts = [e for e in events if e["kind"] in ("start", "resume")]
        return [e["processes"] for e in starts]

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.pids()[rank], number)

    def ends(self):
        (self.directory.parent / "finish").touch()
        out, _ = self.launcher.communicate(timeout=200)
        assert self.launcher.returncode == 0, out
        return [line for line in self.lines("metrics.jsonl") if line["split"] == "final"][-1], out


def started(*arguments, **options):
    """A job that has made 20 updates."""
    job = Job(*arguments, **options)
    job.until(lambda: job.step() >= 20)
    return job


def children(launcher):
    """{rank that the launcher gave: process}."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        rank = [w.partition(b"=")[2] for w in words if w.startswith(b"JAXDP_PROCESS_ID=")]
        if rank and parent == launcher:
            found[int(rank[0])] = int(entry.name)
    return found


def alone(folder, *arguments):
    """The final record of one undisturbed process."""
    (folder / "config.yaml").write_text(CONFIG)
    words = [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        folder / "config.yaml",
        "--run_dir",
        folder / "alone",
    ]
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, words), *arguments], env=env, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "alone" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("processes", "rank"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)]
)
def test_after_a_kill_the_bits_are_those_of_one_device(tmp_path, processes, rank):
    short = (*SIMPLE, "--steps", "200")
    job = started(tmp_path, processes, 1, *short)
    job.kill(rank)
    job.until(
        lambda: job.generations()[1:][-1:] == [processes]
    )  # with or without a generation of one process fewer
    final, out = job.ends()
    assert f"generation 0 ends: rank {rank}" in out
    assert (
        final["step"] == 200 and final["params_sha256"] == alone(tmp_path, *short)["params_sha256"]
    )
    trained = [line["step"] for line in job.lines("metrics.jsonl") if line["split"] == "train"]
    assert trained == list(range(10, 201, 10))  # every update was made, and is in the metrics once


@pytest.mark.slow
@pytest.mark.mpi
def test_ctrl_c_in_a_terminal_saves(tmp_path):
    job = started(tmp_path, 2, 1)
    os.killpg(job.launcher.pid, signal.SIGINT)  # as a terminal does
    out, _ = job.launcher.communicate(timeout=300)
    assert job.launcher.returncode == 75 and "saved step" in out


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "layout",
    [("pmap", 1), ("pjit", 1), ("pjit", 2), ("pjit", 3), ("pjit", 3, "bucket")],
    ids=lambda x: "-".join(map(str, x)),
)
def test_sharded_state_survives(tmp_path, layout):
    """From the slices of the living, and the copy of the dead process's at its neighbour: there is
    no checkpoint.
    """
    backend, zero, *reduction = layout
    words = ["--parallel.backend", backend, "--parallel.zero", str(zero)]
    words += [word for name in reduction for word in ("--parallel.reduction", name)]
    job = started(tmp_path, 3, 0, *words)
    job.kill(1)
    job.until(lambda: job.generations() == [3, 2])
    job.kill(0)
    final, _ = job.ends()
    resumed = [event["step"] for event in job.lines("events.jsonl") if event["kind"] == "resume"]
    assert job.generations() == [3, 2, 1] and resumed[0] >= 10 and resumed[1] >= resumed[0]
    undisturbed = alone(tmp_path, *words[4:])
    if reduction:
        assert final["loss"] == pytest.approx(undisturbed["loss"], rel=1e-4)
    else:
        assert final["params_sha256"] == undisturbed["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("processes", [4, 2])
def test_a_job_continues_where_shard_size_fits_no_more(tmp_path, processes):
    sharded = ["--parallel.backend", "pjit", "--parallel.zero", "3", "--parallel.shard_size", "2"]
    job = started(tmp_path, processes, 0, *sharded)
    job.kill(1)
    final, _ = job.ends()
    assert (
        job.generations() == [processes, processes - 1]
        and final["params_sha256"] == alone(tmp_path)["params_sha256"]
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_one_process_more_than_microbatches_ends_alone(tmp_path):
    program = [sys.executable, "-c", "from jaxdp.cli import main; main()"]
    job = started(tmp_path, 2, 0, "--microbatches", "2", program=program)
    pid = job.pids()[1]
    words = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
    env = dict(word.split("=", 1) for word in words if "=" in word) | {
        "JAXDP_RESTARTS": "0",
        "JAXDP_PROCESS_ID": "1",
    }
    config = [
        "--config",
        tmp_path / "config.yaml",
        "--run_dir",
        job.directory,
        "--microbatches",
        "2",
    ]
    third = subprocess.run(
        [*program, "train", *config], env=env, cwd=tmp_path, text=True, capture_output=True
    )
    assert (
        third.returncode == 2 and "microbatches: 2 cannot be split over 3 devices" in third.stderr
    ), third.stderr
    final, _ = job.ends()
    assert (
        job.generations()[-1] == 2
        and final["params_sha256"] == alone(tmp_path, "--microbatches", "2")["params_sha256"]
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_slices_without_copy_come_from_the_checkpoint(tmp_path):
    words = ["--parallel.backend", "pjit", "--parallel.zero", "3", "--checkpoint.every", "10"]
    job = Job(tmp_path, 4, 0, *words)
    job.until(lambda: any(event["kind"] == "saved" for event in job.lines("events.jsonl")))
    for rank in (1, 2):  # the slices of rank 2, and the copy of them
        job.kill(rank)
    final, out = job.ends()
    resumed = [event["step"] for event in job.lines("events.jsonl") if event["kind"] == "resume"]
    assert out.count("no process has the state after update") == 1
    assert resumed and resumed[-1] % 10 == 0
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_two_killed_processes_of_a_sharded_gpt_rejoin(tmp_path):
    gpt = [
        "--model",
        "{target: GPT, args: {layers: 2, heads: 2, dim: 32, scan: false}}",
        "--loss",
        "{target: CausalLM}",
    ]
    gpt += [
        "--data",
        "{target: PythonSource, args: {length: 32, max_mb: 0.2}}",
        "--batch_size",
        "16",
        "--steps",
        "150",
    ]
    job = started(tmp_path, 4, 5, "--parallel.backend", "pjit", "--parallel.zero", "3", *gpt)
    job.kill(1)
    time.sleep(5)  # the schedule of the faults, not a condition
    job.kill(3)
    job.until(lambda: job.generations()[1:][-1:] == [4])
    final, _ = job.ends()
    assert final["params_sha256"] == alone(tmp_path, *gpt)["params_sha256"]


HANGS = """
import os, threading, time
from jaxdp.data.digits import Digits


class Hangs(Digits):
    def __init__(self, split="train", augment=False):
        super().__init__(split, augment=augment)
        self.reads = 0

    def read(self, indices):
        self.reads += threading.current_thread() is not threading.main_thread()  # the start reads too
        if self.reads == 30 and os.environ.get("JAXDP_PROCESS_ID") == "1" and os.environ["JAXDP_RESTARTS"] == "1":
            time.sleep(1000)
        return super().read(indices)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_process_hung_in_its_loader_ends_and_rejoins(tmp_path):
    """The others do not wait for it, and none of them ends in its place."""
    (tmp_path / "hangs.py").write_text(HANGS)
    job = Job(tmp_path, 3, 1, "--data.target", "hangs.Hangs", "--watchdog.step_timeout", "4")
    job.until(lambda: job.generations()[1:][-1:] == [3])
    final, out = job.ends()
    assert (
        "rank 1" in out
        and "is behind: waits for the data" in out
        and out.count("generation 0 ends: ") == 1
    ), out
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


MISSING = """
import os, pathlib
from jaxdp import UsageError
from jaxdp.data.digits import Digits


class Missing(Digits):
    def __init__(self, split="train", augment=False):
        if os.environ.get("JAXDP_RESTARTS") == "0":
            pathlib.Path(__file__).with_name("refused").touch()
            raise UsageError("data.args: there is nothing at /data")
        super().__init__(split, augment=augment)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_process_that_joins_without_data_ends_alone(tmp_path):
    (tmp_path / "missing.py").write_text(MISSING)
    job = started(tmp_path, 3, 1, "--data.target", "missing.Missing")
    job.kill(1)
    job.until(lambda: (tmp_path / "refused").exists() and len(job.pids()) == 2)
    final, out = job.ends()
    assert (
        "ends: rank 2" in out
        and "data.args: there is nothing at /data" in out
        and job.generations()[-1] == 2
    ), out
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_processes_end_with_their_launcher(tmp_path):
    job = started(tmp_path, 2, 1, *SIMPLE)
    pids = job.pids()
    job.launcher.kill()
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids.values()):
        time.sleep(0.05)
    out, _ = job.launcher.communicate()
    assert f"the process that started it ({job.launcher.pid} on that host) has ended" in out


DAMAGE = """
import os

import slow
from jaxdp.elastic.snapshots import Snapshots


class Damage(slow.Slow):
    def on_start(self, run):
        settle = Snapshots.settle

        def settle_and_flip(self):
            before = self.newest
            settle(self)
            newest = self.newest
            if os.environ["JAXDP_PROCESS_ID"] in DAMAGED and newest is not before:
                arrays = next(iter(newest.parts.values()))
                arrays[1] = arrays[1].copy()
                arrays[1].reshape(-1).view("uint8")[5] ^= 1 << 3

        Snapshots.settle = settle_and_flip
"""


LATE = """
import os
import pathlib
import signal

import jaxdp
from jaxdp.metrics.jsonl import JsonLines
from slow import Slow

write = JsonLines.write


def write_or_die(self, record):
    if record["step"] in (20, 30, 40) and not pathlib.Path("died").exists():
        if record["step"] == 40 and record["split"] == "train":
            pathlib.Path("died").touch()
            os.kill(jaxdp.current().pids[VICTIM], signal.SIGKILL)
        return
    write(self, record)


JsonLines.write = write_or_die
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("victim", [0, 2])
def test_no_record_is_lost_that_rank_0_has_not_written(tmp_path, victim):
    (tmp_path / "late.py").write_text(LATE.replace("VICTIM", str(victim)))
    callbacks = ("--callbacks", "[{target: late.Slow}]")
    job = Job(tmp_path, 3, 1, "--steps", "100", "--eval.every", "20", *callbacks)
    _, out = job.ends()
    assert "generation 0 ends" in out
    records = [(line["step"], line["split"]) for line in job.lines("metrics.jsonl")]
    expected = [(step, "train") for step in range(10, 101, 10)] + [
        (step, "eval") for step in range(20, 100, 20)
    ]
    assert sorted(records) == sorted([*expected, (100, "final")])
    trained = [step for step, split in records if split == "train"]
    assert trained == sorted(trained)


BROKEN = """
import pathlib

import jaxdp
from jaxdp.elastic import regroup
from slow import Slow


class Break(Slow):
    def on_update(self, step, metrics):
        super().on_update(step, metrics)
        if step == 40 and jaxdp.current().rank == 1 and not pathlib.Path("broken").exists():
            pathlib.Path("broken").touch()
            regroup.break_collectives()
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_broken_connection_ends_no_process(tmp_path):
    (tmp_path / "breaks.py").write_text(BROKEN)
    job = started(tmp_path, 3, 0, "--callbacks", "[{target: breaks.Break}]")
    before = job.pids()
    job.until(lambda: job.generations() == [3, 3])
    assert job.pids() == before
    final, out = job.ends()
    assert (
        "generation 0 ends: rank " in out
        and "has lost a connection, but no process has ended" in out
    )
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]
    assert "failed" not in [event["kind"] for event in job.lines("events.jsonl")]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("damaged", ["1", "01"])
def test_a_damaged_snapshot_is_named_and_another_used(tmp_path, damaged):
    """damaged: the processes whose snapshots have a flipped bit. If all survivors', the checkpoint
    is used.
    """
    (tmp_path / "damage.py").write_text(DAMAGE.replace("DAMAGED", repr(damaged)))
    job = started(
        tmp_path, 3, 0, "--callbacks", "[{target: damage.Damage}]", "--checkpoint.every", "10"
    )
    job.kill(2)
    job.until(lambda: job.generations() == [3, 2])
    final, out = job.ends()
    assert out.count("in this process is damaged (leaf 1 of") == len(damaged)
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_without_memory_for_copies_it_uses_checkpoints(tmp_path):
    """The hosts say that they have little memory; a process joins again, too."""
    (tmp_path / "little.py").write_text(
        "import slow\nfrom jaxdp.process import hosts\n\nhosts.free_memory = lambda: 1e3\nSlow = slow.Slow\n"
    )
    job = Job(tmp_path, 2, 1, "--callbacks", "[{target: little.Slow}]", "--checkpoint.every", "10")
    job.until(lambda: any(event["kind"] == "saved" for event in job.lines("events.jsonl")))
    job.kill(1)
    job.until(lambda: job.generations()[1:][-1:] == [2])
    final, out = job.ends()
    assert (
        "elastic: the copies of the state in memory need 173 kB on host" in out
        and "1 kB are free" in out
    ), out
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_with_another_reduction_the_curve_is_the_same(tmp_path):
    other = ["--parallel.reduction", "bucket"]
    job = started(tmp_path, 3, 0, *other, "--steps", "150")
    job.kill(1)
    final, _ = job.ends()
    assert final["loss"] == pytest.approx(
        alone(tmp_path, *other, "--steps", "150")["loss"], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_expelled(tmp_path, rank):
    """Rank 0 keeps its lock of the run directory while it is stopped."""
    job = started(tmp_path, 3, 0)
    stopped = job.pids()[rank]
    job.kill(rank, signal.SIGSTOP)
    job.until(lambda: job.generations() == [3, 2])
    os.kill(stopped, signal.SIGCONT)
    final, out = job.ends()
    assert f"rank {rank}" in out and "not been heard from" in out
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[:-1]
    ]
    assert steps == sorted(set(steps)), "an update was logged twice"
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_that_is_suspended_goes_on(tmp_path, monkeypatch):
    """All of its processes are stopped for longer than one of them may be silent; JAX would abort
    them.
    """
    monkeypatch.setenv("JAXDP_SILENCE", "4")
    job = started(tmp_path, 2, 0)
    suspended = [*job.pids().values(), *job.coordinators()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in suspended:
            os.kill(pid, number)
        time.sleep(20 if number == signal.SIGSTOP else 0)  # no condition: nothing happens meanwhile
    final, out = job.ends()
    assert job.generations() == [2] and "ended first" not in out
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("zero", ["1", "3"])
def test_a_second_kill_before_a_snapshot_is_recovered(tmp_path, zero):
    """Both recover the same update, from copies that were made by different processes."""
    sharded = [
        "--parallel.backend",
        "pjit",
        "--parallel.zero",
        zero,
        "--elastic.snapshot_every",
        "16",
    ]
    job = started(tmp_path, 4, 5, *sharded)

    def trained():
        return [event["kind"] for event in job.lines("events.jsonl")].count("first_update")

    for number, rank in enumerate((1, 2, 0), start=1):
        job.kill(rank)
        job.until(lambda number=number: trained() > number and job.generations()[-1] == 4)
    resumed = [event["step"] for event in job.lines("events.jsonl") if event["kind"] == "resume"]
    final, _ = job.ends()
    assert len(set(resumed)) < len(resumed), f"none recovered the same update again: {resumed}"
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_process_with_another_config_does_not_join(tmp_path):
    """It is named with the key, and the others continue in the next generation."""
    job = started(tmp_path, 2, 0, program=[sys.executable, "-m", "jaxdp"])
    environment = pathlib.Path(f"/proc/{job.pids()[1]}/environ").read_text().split("\0")
    env = dict(word.split("=", 1) for word in environment if "=" in word)
    words = [
        "train",
        "--config",
        tmp_path / "config.yaml",
        "--run_dir",
        tmp_path / "run",
        "--seed",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", *map(str, words)],
        env=env,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    job.until(lambda: len(job.generations()) > 1 and job.step() >= 60)
    final, out = job.ends()
    assert out.count("has seed=1, but rank 0") == 1 and set(job.generations()) == {2}, out
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_too_few_processes_end_with_75(tmp_path):
    job = started(tmp_path, 3, 0, "--elastic.min_processes", "3", "--elastic.join_timeout", "1")
    job.kill(1)
    (tmp_path / "finish").touch()
    out, _ = job.launcher.communicate(timeout=300)
    assert job.launcher.returncode == 75 and "elastic.min_processes: 3" in out


DIES_EARLY = """
import os, signal
from jaxdp.data.digits import Digits


class DiesEarly(Digits):
    def __init__(self, split="train", augment=False):
        if os.environ.get("JAXDP_PROCESS_ID") == "1" and os.environ["JAXDP_RESTARTS"] != "0":
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(split, augment=augment)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_of_one_process_lets_others_join(tmp_path):
    (tmp_path / "dies_early.py").write_text(DIES_EARLY)
    job = Job(tmp_path, 2, 2, "--data.target", "dies_early.DiesEarly")
    job.until(lambda: job.generations() == [1, 2])
    final, _ = job.ends()
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


DIES_CONNECTING = """
import os, signal
from jaxdp.process import private_jax

make_client = private_jax.make_client


def make_or_die(*args):
    if (os.environ["JAXDP_PROCESS_ID"], os.environ["JAXDP_RESTARTS"]) == ("1", "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return make_client(*args)


private_jax.make_client = make_or_die
from jaxdp.cli import main

main()
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_process_killed_before_it_connects_holds_no_others(tmp_path):
    """JAX's service waits for it; the others hear that the generation has ended."""
    program = [sys.executable, "-c", DIES_CONNECTING]
    job = Job(tmp_path, 3, 1, *SIMPLE, "--steps", "100", program=program)
    job.until(lambda: job.generations()[-1:] == [3])
    final, out = job.ends()
    assert "generation 0 ends: rank 1" in out
    assert final["params_sha256"] == alone(tmp_path, *SIMPLE, "--steps", "100")["params_sha256"]


OVERWRITES = """
import os, signal, sys
import jaxdp


class Dies:
    def on_update(self, step, metrics):
        if step == 25 and os.environ["JAXDP_RESTARTS"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


elastic = {"enabled": sys.argv[1] == "elastic"}
more = dict(batch_size=64, checkpoint={"every": 10}, run_dir="run", overwrite=True, elastic=elastic)
jaxdp.fit("MLP", "Digits", steps=40, callbacks=[Dies()], parallel={"reduction": "exact"}, **more)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["elastic", "restarted"])
def test_a_restarted_run_does_not_overwrite_itself(tmp_path, kind):
    (tmp_path / "script.py").write_text(OVERWRITES)
    job = launched(tmp_path, "-n", 2, "--restart", 1, sys.executable, "script.py", kind)
    for _ in range(2):  # the second job overwrites the run of the first
        done = subprocess.run(**job, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
        events = [e for e in map(json.loads, lines) if e["kind"] in ("start", "resume")]
        assert [e["kind"] for e in events] == ["start", "resume"] and events[1]["step"] in (10, 20)


OUTER = ("--outer.replicas", "4", "--outer.every", "10")


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("replicas", ["4", "2"])
def test_the_others_train_replicas_of_a_lost_process(tmp_path, replicas, monkeypatch):
    """From copies in memory; two replicas are each on both devices of a process."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    outer = ["--outer.replicas", replicas, "--outer.every", "10"]
    job = started(tmp_path, 2, 0, *outer)
    job.kill(1)
    final, _ = job.ends()
    resumed = [event["step"] for event in job.lines("events.jsonl") if event["kind"] == "resume"]
    assert job.generations() == [2, 1] and resumed[0] >= 10
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    assert final["params_sha256"] == alone(tmp_path, *outer)["params_sha256"]


AFTER_THE_FIRST = """
import os
import pathlib
import time

while (os.environ["JAXDP_RESTARTS"], os.environ["JAXDP_PROCESS_ID"]) == ("0", "2"):
    if " joins" in pathlib.Path("run/events.jsonl").read_text():
        break
    time.sleep(0.1)
from jaxdp.cli import main

main()
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("lost", [[1], [1, 2]], ids=["one", "two"])
def test_three_processes_wait_for_the_fourth_replica(tmp_path, lost):
    """Of two that were lost, the first that comes back waits too."""
    program = [sys.executable, "-c", AFTER_THE_FIRST]
    job = started(tmp_path, 4, 1, *OUTER, program=program)
    for rank in lost:
        job.kill(rank)
    job.until(lambda: len(job.generations()) > 1 and job.generations()[-1] == 4)
    assert job.generations() == [4, 4] or len(lost) > 1
    final, out = job.ends()
    assert final["params_sha256"] == alone(tmp_path, *OUTER)["params_sha256"]
    assert "outer.replicas: 4 cannot be split over 3 devices" in out


@pytest.mark.slow
@pytest.mark.mpi
def test_three_of_four_processes_do_not_wait_for_ever(tmp_path):
    job = started(tmp_path, 4, 0, *OUTER, "--elastic.join_timeout", "1")
    job.kill(1)
    out, _ = job.launcher.communicate(timeout=300)
    assert job.launcher.returncode == 75 and "no process joined (elastic.join_timeout: 1)" in out


@pytest.mark.slow
@pytest.mark.mpi
def test_a_process_is_killed_while_all_save(tmp_path):
    """Orbax's barriers would wait for the dead process."""
    job = started(tmp_path, 3, 0, "--checkpoint.every", "1")
    job.kill(1)
    job.until(lambda: job.generations() == [3, 2])
    job.kill(2)
    job.until(lambda: job.generations() == [3, 2, 1])
    final, _ = job.ends()
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_another_coordinator_replaces_a_killed_one(tmp_path):
    """In the same processes, from memory: none is started again, and there is no checkpoint."""
    job = started(tmp_path, 3, 0)
    job.kill_coordinator()
    job.until(lambda: job.generations() == [3, 3])
    job.kill(1)  # together with the second one
    job.kill_coordinator()
    job.until(lambda: job.generations() == [3, 3, 2])
    final, _ = job.ends()
    resumed = [event["step"] for event in job.lines("events.jsonl") if event["kind"] == "resume"]
    assert resumed[0] >= 10 and final["params_sha256"] == alone(tmp_path)["params_sha256"]


def first_updates(job):
    """How often the job has begun at the first update."""
    return [event["kind"] for event in job.lines("events.jsonl")].count("start")


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("seconds", [5, 20, 60])
@pytest.mark.parametrize("moment", ["start", "update", "regroup"])
def test_a_frozen_coordinator_does_not_end_the_job(tmp_path, moment, seconds):
    """After 10 s, processes of its host end it and start another one."""
    processes = {5: 2, 20: 3, 60: 4}[seconds]
    job = Job(tmp_path, processes, 2, *SIMPLE)
    if moment == "start":
        job.until(job.coordinators)
    else:
        job.until(lambda: job.step() >= 20)
    (coordinator,) = job.coordinators()
    if moment == "regroup":
        job.kill(1)
        time.sleep(0.2)  # the schedule of the faults
    os.kill(coordinator, signal.SIGSTOP)
    time.sleep(seconds)  # the length of the fault
    was_ended = coordinator not in job.coordinators()
    with contextlib.suppress(ProcessLookupError):
        os.kill(coordinator, signal.SIGCONT)
    job.until(lambda: job.step() >= 60)
    final, out = job.ends()
    assert (
        final["params_sha256"] == alone(tmp_path, *SIMPLE)["params_sha256"]
        and first_updates(job) == 1
    ), out
    assert was_ended == (seconds > 5), out


@pytest.mark.slow
@pytest.mark.mpi
def test_a_coordinator_killed_in_a_join_is_replaced(tmp_path):
    """Not after JAXDP_TIMEOUT, and none of them is blamed."""
    began = time.monotonic()
    job = Job(tmp_path, 3, 0, *SIMPLE)
    killed = set()
    while len(killed) < 2:
        for pid in set(job.coordinators()) - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    job.until(lambda: job.step() >= 20, 50)
    assert time.monotonic() - began < 55
    final, out = job.ends()
    assert (
        final["params_sha256"] == alone(tmp_path, *SIMPLE)["params_sha256"]
        and "found no rank 0" not in out
    )


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("processes", [2, 4])
def test_a_flood_of_connections_does_not_end_the_job(tmp_path, processes):
    """At the start, and while a killed process joins again."""
    job, counts = Job(tmp_path, processes, 2, *SIMPLE), []

    def flood():
        job.until(job.coordinators)
        ports = []
        while not ports:
            ports = listening(job.coordinators()[0])
        threads = [
            threading.Thread(target=lambda: counts.append(connect_often(ports, 10.0)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        return threads

    threads = flood()
    job.until(lambda: job.step() >= 20)
    threads += flood()
    job.kill(1)
    job.until(lambda: job.generations()[1:][-1:] == [processes])
    final, out = job.ends()
    for thread in threads:
        thread.join()
    assert final["params_sha256"] == alone(tmp_path, *SIMPLE)["params_sha256"], out
    assert sum(counts) > 10_000


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_process_with_the_state_is_awaited(tmp_path, processes, seed):
    """All others die while the job recovers, also those that start again; it is stopped for a
    while.
    """
    job, rng = started(tmp_path, processes, 6, *SIMPLE), random.Random(seed)
    pids = job.pids()
    spared = rng.randrange(processes)
    for rank in {*pids} - {spared}:
        os.kill(pids[rank], signal.SIGKILL)
        time.sleep(rng.uniform(0, 1))  # the schedule of the faults
    os.kill(pids[spared], signal.SIGSTOP)
    time.sleep(20)  # the length of the fault
    os.kill(pids[spared], signal.SIGCONT)
    job.until(lambda: job.generations()[1:][-1:] == [processes])
    final, out = job.ends()
    assert (
        final["params_sha256"] == alone(tmp_path, *SIMPLE)["params_sha256"]
        and first_updates(job) == 1
    ), out


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("every", ["10", "null"])
def test_a_job_that_has_lost_its_state_says_so(tmp_path, every):
    job = started(tmp_path, 2, 1, *SIMPLE, "--checkpoint.every", every)
    for pid in job.pids().values():
        os.kill(pid, signal.SIGKILL)
    job.until(lambda: len(job.generations()) > 1 and job.generations()[-1] == 2)
    final, out = job.ends()
    origin = (
        "its checkpoint of update " if every == "10" else "the first update: it has no checkpoint"
    )
    assert (
        "jaxdp: elastic: no process has the state after update" in out
        and f"continues from {origin}" in out
    ), out
    assert final["params_sha256"] == alone(tmp_path, *SIMPLE)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_survives_its_coordinator_and_half_of_it(
    tmp_path,
):
    """The new coordinator cannot know that the other half is dead, and not behind a cut network,
    until all come.
    """
    job = Job(tmp_path, 2, 3, *SIMPLE)
    job.until(lambda: job.step() >= 20)
    job.kill(1)
    job.kill_coordinator()
    job.until(lambda: job.generations()[1:][-1:] == [2])
    final, _ = job.ends()
    resumed = [event["step"] for event in job.lines("events.jsonl") if event["kind"] == "resume"]
    assert resumed[0] >= 10 and first_updates(job) == 1
    assert final["params_sha256"] == alone(tmp_path, *SIMPLE)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("rank", [1, 0])
def test_a_loop_of_ones_own_survives(tmp_path, rank):
    """The losses are those of the same loop without a fault."""
    command = [sys.executable, "-m", "jaxdp", "launch", "-n", "3", "--restart", "1"]
    command += [sys.executable, str(ROOT / "examples" / "elastic_loop.py")]
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "JAXDP_TIMEOUT": "60"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        out = []
        for line in launcher.stdout:
            out.append(line)
            if line.startswith("update 100 "):
                os.kill(children(launcher.pid)[rank], signal.SIGKILL)
        assert launcher.wait(60) == 0, "".join(out)
    losses = {
        int(line.split()[1]): float(line.split()[3]) for line in out if line.startswith("update ")
    }
    assert f"generation 0 ends: rank {rank}" in "".join(out)
    assert losses == pytest.approx(
        {100: 0.4652, 200: 0.2341, 300: 0.1928, 400: 0.1458, 500: 0.113, 600: 0.1304}, 1e-3
    )


@pytest.mark.slow
def test_a_job_that_is_not_elastic_is_told_to_the_loop():
    code = (
        "import jaxdp; jaxdp.init(); jaxdp.elastic.run(lambda state, commit: print('trains'), {})"
    )
    command = [sys.executable, "-m", "jaxdp", "launch", "-n", "2", sys.executable, "-c", code]
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "JAXDP_TIMEOUT": "60"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode and "trains" not in done.stdout, done
    assert (
        "elastic: this job is not elastic; first call jaxdp.init(group=jaxdp.elastic.Options())"
        in done.stderr
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_open_mpi_5_lets_the_others_continue(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG + "callbacks: [{target: slow.Slow}]\n")
    (tmp_path / "slow.py").write_text(SLOW)

    def read():
        file = tmp_path / "run" / "metrics.jsonl"
        return (
            [json.loads(x) for x in file.read_text().splitlines() if x.endswith("}")]
            if file.exists()
            else []
        )

    def during(launcher):
        while launcher.poll() is None and max((line["step"] for line in read()), default=0) < 20:
            time.sleep(0.05)
        ranks = [pid for pid in below(launcher.pid) if rank_of(pid) == 1]
        os.kill(max(ranks), signal.SIGKILL)
        (tmp_path / "finish").touch()

    words = [
        "-m",
        "jaxdp",
        "train",
        "--config",
        tmp_path / "config.yaml",
        "--run_dir",
        tmp_path / "run",
    ]
    words += ["--callbacks", "[{target: slow.Slow}]", "--steps", "100"]
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = mpirun(3, [*map(str, words)], env=env, options=["--enable-recovery"], during=during)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--enable-recovery" not in done.stdout + done.stderr
    assert "generation 0 ends: rank 1" in done.stderr + done.stdout
    final = read()[-1]
    assert (
        final["split"] == "final"
        and final["params_sha256"] == alone(tmp_path, "--steps", "100")["params_sha256"]
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_a_launcher_that_ends_all_processes_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = [
        "-m",
        "jaxdp",
        "train",
        "--config",
        tmp_path / "config.yaml",
        "--run_dir",
        tmp_path / "run",
        "--steps",
        "1",
    ]
    done = mpirun(2, [*map(str, words)])
    assert (
        done.returncode == 0
        and done.stderr.count("mpirun ends all processes when one is lost; add --enable-rec") == 1
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_slurm_lets_the_others_continue(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG + "callbacks: [{target: slow.Slow}]\n")
    (tmp_path / "slow.py").write_text(SLOW)
    words = [
        sys.executable,
        "-m",
        "jaxdp",
        "train",
        "--config",
        "config.yaml",
        "--run_dir",
        "run",
        "--steps",
        "100",
    ]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with Slurm() as slurm:
        options = ["--no-kill", "--kill-on-bad-exit=0", "-n", "3"]
        job = slurm.start("srun", *options, *words, cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
        while job.poll() is None and not (metrics.exists() and '"step": 20' in metrics.read_text()):
            time.sleep(0.05)
        (pid,) = (
            pid
            for pid in every_process()
            if rank_of(pid, b"SLURM_PROCID=") == 1 and is_training(pid)
        )
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "finish").touch()
        out, _ = job.communicate(timeout=300)
    assert "generation 0 ends: rank 1" in out
    final = json.loads(metrics.read_text().splitlines()[-1])
    assert final["params_sha256"] == alone(tmp_path, "--steps", "100")["params_sha256"]


LOOP = 'until "$@"; do [ $? = 75 ] && exit 75; sleep 1; done'  # that of docs/reliability.md


@contextlib.contextmanager
def on_each(hosts, folder, *arguments):
    """Start a process on each host, in a loop; return the loops, and whether update n is in the
    metrics.
    """
    (folder / "config.yaml").write_text(CONFIG + "callbacks: [{target: slow.Slow}]\n")
    (folder / "slow.py").write_text(SLOW)
    words = [
        sys.executable,
        "-m",
        "jaxdp",
        "train",
        "--config",
        folder / "config.yaml",
        "--run_dir",
        folder / "run",
    ]
    size, metrics = len(hosts.names), folder / "run" / "metrics.jsonl"
    env = {
        "JAXDP_COORDINATOR": f"{hosts.address(0)}:4711",
        "JAXDP_NUM_PROCESSES": str(size),
        "JAXDP_SECRET": "5" * 32,
    }
    env |= {
        "JAX_PLATFORMS": "cpu",
        "JAXDP_TIMEOUT": "60",
        "PYTHONPATH": f"{ROOT}:{folder}",
        "XLA_FLAGS": "",
    }
    loops = [
        subprocess.Popen(
            [*prefix, "sh", "-c", LOOP, "sh", *map(str, words), *arguments], text=True,
            env=os.environ | env | {"JAXDP_PROCESS_ID": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, prefix in enumerate(hosts.prefixes)
    ]  # fmt: skip

    def until(step):
        while loops[0].poll() is None and not (
            metrics.exists() and f'"step": {step},' in metrics.read_text()
        ):
            time.sleep(0.05)

    try:
        yield loops, until
    finally:
        for host, loop in enumerate(loops):
            hosts.kill(host)
            loop.communicate()


@pytest.mark.slow
@pytest.mark.mpi
def test_neither_half_of_a_cut_network_goes_on(tmp_path):
    """One half is not more than half of the processes, which may all be alive: the same run must
    not train twice.
    """
    with (
        TwoHosts(tmp_path) as hosts,
        on_each(hosts, tmp_path, "--elastic.join_timeout", "1") as (loops, until),
    ):
        until(20)
        hosts.cut(1)
        first = loops[0].communicate(timeout=300)[0]
        while "cannot be reached" not in (second := loops[1].stdout.readline()):
            assert second
    assert (
        loops[0].returncode == 75
        and "too few processes to continue: 1, with 1 of the 2 before" in first
    )
    assert "rank 0" in second and "cannot be reached for 20 s" in second


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_continues_after_a_healed_network_split(tmp_path):
    """The second host is declared dead, and then its process comes: it is on this side, so both
    continue.
    """
    with TwoHosts(tmp_path) as hosts, on_each(hosts, tmp_path) as (loops, until):
        until(20)
        hosts.split([1])
        first = []
        while not first or "generation 0 ends" not in first[-1]:
            first.append(loops[0].stdout.readline())
            assert first[-1], "".join(first)
        hosts.heal()
        (tmp_path / "finish").touch()
        outs = ["".join(first), ""]
        outs = [out + loop.communicate(timeout=200)[0] for out, loop in zip(outs, loops)]
    assert [loop.returncode for loop in loops] == [0, 0], outs
    final = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["params_sha256"] == alone(tmp_path)["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("elastic", ["true", "false"])
def test_with_outer_a_cut_of_30_s_only_delays_the_run(tmp_path, elastic):
    words = [
        "--outer.replicas",
        "2",
        "--outer.every",
        "10",
        "--elastic.enabled",
        elastic,
        "--steps",
        "100",
    ]
    with TwoHosts(tmp_path) as hosts, on_each(hosts, tmp_path, *words) as (loops, until):
        until(20)
        hosts.cut(1)
        time.sleep(30)  # the length of the fault, not a condition
        hosts.heal()
        outs = [loop.communicate(timeout=600)[0] for loop in loops]
    assert [loop.returncode for loop in loops] == [0, 0], outs
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [e["kind"] for e in events if e["kind"] in ("start", "resume", "failed")] == ["start"], (
        outs
    )
    final = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (
        final["step"] == 100 and final["params_sha256"] == alone(tmp_path, *words)["params_sha256"]
    )


def every_process():
    return [int(entry.name) for entry in pathlib.Path("/proc").glob("[0-9]*")]


def is_training(pid):
    return b"jaxdp\0train" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def below(pid):
    """All processes that a process has started."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [*map(int, children), *(p for child in children for p in below(int(child)))]


def rank_of(pid, variable=b"OMPI_COMM_WORLD_RANK="):
    try:
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [w.partition(b"=")[2] for w in words if w.startswith(variable)]
    return int(values[0]) if values else None
