"""A run directory belongs to one process: a live one is respected at once, one that is ending is
waited for.
"""

import contextlib
import io
import os
import subprocess
import sys
import time
from concurrent import futures

import pytest

from jaxdp import errors
from jaxdp.errors import UsageError
from jaxdp.metrics.jsonl import Events, JsonLines
from jaxdp.process.context import Context
from jaxdp.process.watchdog import Watchdog
from jaxdp.report import html
from jaxdp.run import rundir

HOLDER = """
import pathlib, sys, time
from jaxdp.run import rundir
from jaxdp.process import mpi
mpi.ancestors = lambda: [(int(pid), pathlib.Path("mpirun")) for pid in sys.argv[2:]]
held, problem = rundir.lock(pathlib.Path(sys.argv[1]))
assert not problem, problem
print("held", flush=True)
for line in sys.stdin:
    rundir.mark_ending()
    print("ending", flush=True)
"""


@contextlib.contextmanager
def holder(directory, *starters):
    command = [sys.executable, "-c", HOLDER, str(directory), *map(str, starters)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_live_holder_is_respected_at_once(tmp_path, capsys):
    with holder(tmp_path) as process:
        began = time.monotonic()
        held, problem = rundir.lock(tmp_path)
        assert held is None and time.monotonic() - began < 5 and not capsys.readouterr().err
        assert (
            f"is in use by process {process.pid} on " in problem and "wait for its end" in problem
        )


@pytest.mark.parametrize("why", ["it says so", "its mpirun has ended"])
def test_a_holder_that_is_ending_is_waited_for(tmp_path, monkeypatch, why):
    # Not `capsys`, which loses what a thread writes while it is read.
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with holder(tmp_path, *([dead_process()] if "mpirun" in why else [])) as process:
        if "says" in why:
            process.stdin.write("end\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ending\n"
        monkeypatch.setattr(rundir, "WAIT", 0.3)
        while not said.getvalue():  # the time may be over at the first look: nothing is waited for
            held, problem = rundir.lock(tmp_path)
            assert held is None and "is in use by process" in problem
        monkeypatch.setattr(rundir, "WAIT", 60.0)
        with futures.ThreadPoolExecutor(1) as pool:
            locked = pool.submit(rundir.lock, tmp_path)
            while said.getvalue().count("\n") < 2:  # until it is waited for
                assert not locked.done()
            process.kill()
            held, problem = locked.result()
        assert held is not None and problem is None
        held.close()
    lines = said.getvalue().splitlines()
    assert len(lines) == 2 and all("which is ending: waiting for it" in line for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\udcff\udcfe",
        "process 7 on a since then\n",
        "[" * 100000,
        '{"name": 1}',
        '{"ending": true}',
    ],
)
def test_a_lock_file_with_anything_in_it(tmp_path, text):
    (tmp_path / ".lock").write_bytes(os.fsencode(text))
    held, problem = rundir.lock(tmp_path)
    assert problem is None and rundir.Owner.read(held).name.startswith("process ")
    held.seek(0)
    held.close()
    (tmp_path / ".lock").write_bytes(os.fsencode(text))
    with (tmp_path / ".lock").open("a+", errors="replace") as file:
        assert rundir.Owner.read(file) == rundir.Owner()


def test_a_job_takes_the_directory_of_its_stopped_rank(tmp_path, monkeypatch):
    """And keeps it when that rank wakes and ends; a child of its process is another job."""
    (tmp_path / ".nonce").write_text("of this job")
    with holder(tmp_path) as stopped:
        monkeypatch.setattr(rundir, "_nonce", (os.getppid(), "of this job"))
        assert "is in use by" in rundir.lock(tmp_path)[1]
        monkeypatch.setattr(rundir, "_nonce", (os.getpid(), "of this job"))
        held, problem = rundir.lock(tmp_path)
        assert held is not None and problem is None
        stopped.stdin.write("end\n")
        stopped.stdin.flush()
        assert stopped.stdout.readline() == "ending\n"
        stopped.kill()
        stopped.wait()
        other = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True, text=True
        )
        assert (
            f"is in use by process {os.getpid()} on " in other.stderr
            and "which is ending" not in other.stderr
        )
        held.close()


def test_a_full_disk_keeps_files_of_an_earlier_start(small_disk):
    """A run that resumes, or that other processes continue, continues; a first start says what is
    wrong.
    """
    rundir.write_config(small_disk, {"steps": 1})
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    rundir.write_config(small_disk, {"steps": 2})
    with pytest.raises(
        UsageError, match=r"run_dir: cannot write in '.*': No space left on device; choose another"
    ):
        rundir.write_env(small_disk, {})
    assert (small_disk / "config.yaml").read_text() == "steps: 1\n"
    assert {path.name for path in small_disk.iterdir()} == {"config.yaml", "filler"}


def append(directory):
    writer = JsonLines(directory / "metrics.jsonl")
    writer.write({"step": 1, "split": "train"})
    writer.close()


def lock(directory):
    file, _ = rundir.make(directory)
    if file is not None:
        file.close()


def write_stacks(directory):
    watchdog = Watchdog(Context(hosts=("a",)), directory, None)
    watchdog.stop()
    (directory / "stacks").mkdir(exist_ok=True)
    watchdog._write_stacks()


WRITERS = {
    ".lock": lock,
    ".nonce": lock,
    "metrics.jsonl": append,
    "events.jsonl": lambda directory: Events(directory).note("start"),
    "events.jsonl of a coordinator": lambda directory: errors.append_fault(
        str(directory / "events.jsonl"), "lost"
    ),
    "config.yaml": lambda directory: rundir.write_config(directory, {"steps": 1}),
    "config.yaml.PID.tmp": lambda directory: rundir.write_config(directory, {"steps": 1}),
    "stacks/rank_0.txt": write_stacks,
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_file_of_a_run_is_written_through_a_link(tmp_path, name):
    """Another user may have prepared it in a shared folder, to any file that this user may write."""
    directory, other = tmp_path / "run", tmp_path / "other"
    (directory / "stacks").mkdir(parents=True)
    other.write_text("of somebody\n")
    (directory / name.partition(" ")[0].replace("PID", str(os.getpid()))).symlink_to(other)
    WRITERS[name](directory)
    assert other.read_text() == "of somebody\n"


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    file, problem = rundir.make(tmp_path)
    assert file is None and problem.endswith(
        ".lock' is a link, through which a run does not write; remove it, or choose another"
    )
    assert not (tmp_path / "other").exists()


def test_a_report_is_private_until_its_owner_shows_it(tmp_path):
    html.write(tmp_path / "report.html", "page")
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600, "it contains git.diff"
    (tmp_path / "report.html").chmod(0o644)
    html.write(tmp_path / "report.html", "page 2")
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644
    if os.getuid() == 0:
        (tmp_path / "link.html").symlink_to(tmp_path / "other.html")
        os.chown(tmp_path / "link.html", 1000, 1000, follow_symlinks=False)
        html.write(tmp_path / "link.html", "page 3")
        assert not (tmp_path / "other.html").exists() and not (tmp_path / "link.html").is_symlink()
