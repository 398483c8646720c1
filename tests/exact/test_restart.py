"""The loops of docs/reliability.md, as they stand there, around runs that are stopped and killed: the
same bits result.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import uuid

import pytest

from launch import ROOT, environment, require
from launch import _survivors as survivors
from slow_runs import CONFIG, SLOW

PAGE, HOSTS = ((ROOT / "docs" / name).read_text() for name in ("reliability.md", "hosts.md"))
MARK = r"<!-- tested: exact/test_restart.py -->\n```sh\n(.*?)```"
ONE_LINE, LIMITED, ASKING = re.findall(MARK, PAGE, re.DOTALL)
(MPIRUN,) = re.findall(MARK, HOSTS, re.DOTALL)
COMMAND = "jaxdp train --config run.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restart")
    (folder / "slow_digits.py").write_text(SLOW)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


class Loop:
    """A shell with a loop of the page; the run that it starts is `launch train.py` in place of
    `jaxdp train`.
    """

    def __init__(self, script, folder, name, launch=(), more=()):
        self.run_dir = folder / name
        train = [
            *launch,
            sys.executable,
            str(ROOT / "train.py"),
            "--config",
            "run.yaml",
            "--run_dir",
            name,
            *more,
        ]
        assert COMMAND in script
        self.mark = uuid.uuid4().hex
        env = environment({"PYTHONPATH": str(folder)}, 1) | {"JAXDP_TEST_JOB": self.mark}
        self.shell = subprocess.Popen(
            ["bash", "-c", script.replace(COMMAND, " ".join(train))], cwd=folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def step(self):
        with contextlib.suppress(OSError, IndexError, json.JSONDecodeError):
            return json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def child(self):
        """What the shell runs: the run, or mpirun."""
        shell = self.shell.pid
        return int(pathlib.Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def wait_for(self, step):
        """Until the run has made so many updates."""
        deadline = time.monotonic() + 60
        while self.step() < step:
            assert self.shell.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def signal_at(self, step, number):
        """To the shell's child, as soon as the run has made so many updates."""
        self.wait_for(step)
        os.kill(self.child(), number)

    def output(self):
        """All that was printed, at the end; nothing of it runs on."""
        try:
            out = self.shell.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            os.killpg(self.shell.pid, signal.SIGKILL)
            out = "not ended after 60 s"
        assert not (left := survivors(self.mark)), (out, left)
        return out

    def digest(self):
        return json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])[
            "params_sha256"
        ]


@pytest.fixture(scope="module")
def reference(folder):
    """What the run ends in when nothing happens to it."""
    loop = Loop(ONE_LINE, folder, "reference")
    assert "params_sha256" in loop.output() and loop.shell.returncode == 0
    return loop.digest()


def check(loop, reference, preempted, begun):
    out = loop.output()
    assert loop.shell.returncode == 0, out
    assert out.count("preempted by ") == preempted and out.count("resumes after step") == begun, out
    assert loop.digest() == reference
    lines = [json.loads(line) for line in (loop.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 151))
    return out


@pytest.mark.slow
def test_the_line_starts_a_preempted_run_again(folder, reference):
    loop = Loop(ONE_LINE, folder, "line")
    loop.signal_at(15, signal.SIGTERM)
    loop.signal_at(70, signal.SIGUSR1)
    check(loop, reference, preempted=2, begun=2)


@pytest.mark.slow
def test_the_script_starts_a_killed_run_again_too(folder, reference):
    loop = Loop(LIMITED, folder, "script")
    loop.signal_at(50, signal.SIGKILL)
    loop.signal_at(90, signal.SIGTERM)
    check(loop, reference, preempted=1, begun=2)


def test_the_script_gives_up():
    """After five faults; at once where the config is bad."""
    for code, runs in ((1, 6), (2, 1)):
        script = LIMITED.replace(COMMAND, f"(echo run; exit {code})").replace("sleep 1", ":")
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20)
        assert done.returncode == code and done.stdout.count("run") == runs


def test_the_loop_around_mpirun_asks_if_the_run_ended(tmp_path):
    """mpirun ends with code 0 twice before the run is finished; at once where another job is alive
    there.
    """
    lines = ["", '{"step": 5, "split": "train"}', '{"step": 9, "split": "final"}']
    (tmp_path / "run").mkdir()
    (tmp_path / "mpirun").write_text(
        '#!/bin/sh\nn=$(cat n 2>/dev/null || echo 0)\necho $((n + 1)) >n\necho "started"\n'
        'cp "lines$n" run/metrics.jsonl 2>/dev/null || rm -f run/metrics.jsonl\nexit ${CODE:-0}\n'
    )
    (tmp_path / "mpirun").chmod(0o755)
    for n, line in enumerate(lines[1:], 1):
        (tmp_path / f"lines{n}").write_text(line + "\n")
    for code, runs in (("0", 3), ("2", 1)):
        (tmp_path / "n").unlink(missing_ok=True)
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": code}
        script = ["bash", "-c", ASKING.replace("sleep 1", ":")]
        done = subprocess.run(
            script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == int(code) and done.stdout.count("started") == runs, done


@pytest.mark.slow
def test_interrupting_the_script_saves_and_ends(folder):
    loop = Loop(LIMITED, folder, "interrupted", more=["--steps", "3000"])
    loop.wait_for(15)
    os.killpg(loop.shell.pid, signal.SIGINT)  # as a terminal does
    out = loop.output()
    assert (
        loop.shell.returncode == 130
        and "preempted by SIGINT" in out
        and out.count("starts in") == 1
    )


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which, number", [("openmpi5", signal.SIGUSR1), ("mpich", signal.SIGUSR1)])
def test_the_line_around_mpirun(folder, reference, which, number):
    free = [] if which == "mpich" else ["--bind-to", "none", "--oversubscribe"]
    loop = Loop(ONE_LINE, folder, which, [require(which), *free, "-np", "2"])
    loop.signal_at(40, number)
    check(loop, reference, preempted=1, begun=1)


@pytest.mark.slow
def test_the_batch_script_puts_the_job_back(folder):
    """That with mpirun, signalled as by Slurm; `test_slurm.py` runs that with srun."""
    launch = "mpirun --map-by ppr:8:node --bind-to none "
    assert launch in MPIRUN
    stub = 'SLURM_JOB_ID=7; scontrol() { echo "scontrol: $*"; }\n'
    loop = Loop(stub + MPIRUN.replace(launch, ""), folder, "mpirun")
    loop.wait_for(15)
    os.kill(loop.shell.pid, signal.SIGUSR1)
    out = loop.output()
    assert (
        loop.shell.returncode == 75
        and "preempted by SIGUSR1" in out
        and out.endswith("scontrol: requeue 7\n")
    ), out
