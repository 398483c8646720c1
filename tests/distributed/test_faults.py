"""Faults, each in a real process tree: how it ends, how soon, what is said, and that nothing saved
is lost.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

import launch
from covering import first
from faulty_runs import argv, final, kept, when, written
from jaxdp.metrics.jsonl import read
from jaxdp.report.read import read_run
from jaxdp.train.loop import BEHIND
from two_hosts import TwoHosts

pytestmark = pytest.mark.mpi
MPI = launch.SUPPORT / "mpi"
DONE, PREEMPTED = 0, 75


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return written(tmp_path_factory.mktemp("config"))


def job(config, run_dir, what="none", which="openmpi5", np_=2, more=(), timeout=90, **fault):
    env = {"PYTHONPATH": str(MPI)}
    return launch.mpirun(np_, argv(config, run_dir, what, more=more, **fault), which, env, timeout)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = job(config, run_dir)
    assert done.returncode == DONE and not done.left, done.output
    return final(run_dir)[0], {
        r["step"]: r["loss"] for r in read(run_dir / "metrics.jsonl") if r["split"] == "train"
    }


def killed(rank):
    """What is said of a rank that was killed: by the others, by Open MPI, or by MPICH, which names
    its process.
    """
    ours = rf"rank {rank} \(host \S+\), process \d+, ended first, without an error"
    return rf"{ours}|process rank {rank} with[^(]*signal 9|PID \d+ RUNNING[^)]*: 9\n"


# what, where it is in the run, what someone says of it (under either launcher), the exit code
# (None: a failure's)
SEQUENCE = [
    ("SIGKILL", {"rank": 1, "at": 17}, killed(1), None),
    ("die in a save", {"rank": 0, "at": 2}, killed(0), None),
    (
        "SIGTERM",
        {"rank": 1, "at": 9},
        r"preempted by SIGTERM on rank 1, after update (\d+): saved step \1",
        PREEMPTED,
    ),
    (
        "raise",
        {"rank": 1, "at": 12},
        r"ValueError: the loader fails\nas the batch of step \d+ was .*\njaxdp: rank 1 \(host .*\) failed: ValueError",
        None,
    ),
    ("SIGKILL", {"rank": 0, "at": 2, "where": "test"}, killed(0), None),
    ("SIGUSR1,SIGTERM", {"rank": 0, "at": 8}, r"preempted by SIG\w+ on rank 0", PREEMPTED),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["openmpi5", "mpich"])
def test_a_run_with_all_faults_ends_in_the_same_digest(config, uninterrupted, tmp_path, which):
    """One run: after each fault the same command goes on, no more than one interval back."""
    run_dir, reached = tmp_path / "run", 0
    for what, fault, words, code in SEQUENCE:
        done = job(config, run_dir, what, which, **fault)
        assert not done.left, done.output
        assert re.search(words, done.output), done.output
        assert (
            done.returncode == code
            if code is not None
            else done.returncode not in (DONE, 2, PREEMPTED)
        ), done.output
        assert done.seconds < 40 and done.output.count("Traceback (most") == (what == "raise"), (
            done.output
        )
        said = [int(n) for n in re.findall(r"saved step (\d+)\n", done.stdout)]
        began = re.search(r"resumes after step (\d+)", done.stdout)
        assert int(began.group(1) if began else 0) == reached, done.output
        reached = max(kept(run_dir), default=0)
        assert set(said[-3:]) <= set(kept(run_dir)) or reached == 0, (said, kept(run_dir))
    done = job(config, run_dir, which=which)
    assert done.returncode == DONE and not done.left, done.output
    assert final(run_dir)[0]["params_sha256"] == uninterrupted[0]["params_sha256"]
    assert final(run_dir)[0]["loss"] == uninterrupted[0]["loss"]
    lines = [(r["split"], r["step"]) for r in read(run_dir / "metrics.jsonl")]
    assert sorted(lines) == sorted(
        [("train", s) for s in range(5, 61, 5)] + [("eval", 25), ("eval", 50), ("final", 60)]
    )
    losses = {
        r["step"]: r["loss"] for r in read(run_dir / "metrics.jsonl") if r["split"] == "train"
    }
    assert losses == uninterrupted[1]
    ends = [session["how"] for session in read_run(run_dir)["sessions"]]
    assert [ends[i] for i in (2, 5, 6)] == ["preempted", "preempted", "finished"] and ends[
        3
    ] != "finished"


KILLED = [("mpich", 1), ("mpich", 0), ("mpich", 2), ("openmpi5", 1)]


@pytest.mark.parametrize("killed", first(1, KILLED), ids=str)
def test_the_killed_rank_is_named_whatever_mpirun_says(config, tmp_path, killed):
    """MPICH kills the others some milliseconds after, and names any of them: the line is ours, and
    it stays on disk.
    """
    which, rank = killed
    done = job(config, tmp_path, "SIGKILL", which, np_=3, rank=rank, at=12)
    assert (
        done.returncode not in (DONE, 2, PREEMPTED, 124) and not done.left and done.seconds < 40
    ), done.output
    pid = json.loads((tmp_path / "env.json").read_text())["topology"]["pids"][rank]
    line = rf"rank {rank} \(host \S+\), process {pid}, ended first, without an error: killed or crashed"
    assert re.findall(rf"jaxdp: {line}\n", done.stderr) and done.stderr.count("ended first") == 1, (
        done.output
    )
    last = read(tmp_path / "events.jsonl")[-1]
    assert last["kind"] == "failed" and re.fullmatch(line, last["reason"]), last


@pytest.mark.slow
@pytest.mark.parametrize("which", ["openmpi5", "mpich"])
def test_a_stopped_process_is_named_by_the_watchdog(config, tmp_path, which):
    done = job(
        config, tmp_path, "SIGSTOP", which, rank=1, at=15, more=["--watchdog.step_timeout", "3"]
    )
    assert done.returncode not in (DONE, 2, PREEMPTED, 124) and not done.left, done.output
    watched = re.search(r"no progress for 3 s .*rank 1 \(host .*\) does not answer", done.stderr)
    silent = re.search(
        r"rank 1 \(host .*\) has not been heard from for 20 s", done.stderr
    )  # where it was in a save
    assert (watched and (tmp_path / "stacks" / "rank_0.txt").is_file()) or silent, done.output
    assert done.seconds < 45


@pytest.mark.slow
def test_a_sigterm_with_a_dead_peer_is_no_preemption(config, tmp_path):
    """Some launchers send SIGTERM to all when one has died: nobody is to wait for it."""
    done = job(config, tmp_path, "stop the next, then SIGTERM", "mpich", rank=0, at=17)
    assert (
        done.returncode not in (DONE, 2, PREEMPTED, 124) and not done.left and done.seconds < 40
    ), done.output
    words = r"rank 0 \(host \S+\) got SIGTERM, but rank 1 \(host \S+\) did not answer within 2 s: it is dying, so this"
    assert re.search(words, done.stderr) and "Traceback" not in done.output, done.output


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_loader_is_behind(config, tmp_path):
    done = job(
        config, tmp_path, "sleep", "mpich", rank=1, at=15, more=["--watchdog.step_timeout", "3"]
    )
    assert done.returncode in (1, 9), (
        done.output
    )  # hydra's own, of the rank that it kills, where it is quicker
    assert not done.left and done.seconds < 40, done.output
    assert re.search(
        r"rank 1 \(host .*\) is behind: waits for the data of update \d+ \(faulty.py:\d+ in fault\)",
        done.stderr,
    ), done.output
    stacks = (tmp_path / "stacks" / "rank_1.txt").read_text()
    assert "faulty.py" in stacks and (tmp_path / "stacks" / "rank_0.txt").is_file()


@pytest.mark.slow
def test_a_straggler_is_named_in_the_metrics(config, tmp_path):
    done = job(config, tmp_path, "slow", rank=1, at=1)
    assert done.returncode == DONE, done.output
    named = [r["straggler"] for r in read(tmp_path / "metrics.jsonl") if "straggler" in r]
    assert len(named) > 3 and set(named) == {1}


@pytest.mark.slow
def test_a_process_may_take_long_at_the_end(config, tmp_path):
    """JAX's processes would wait 20 s for each other, and then abort the one that is late."""
    (tmp_path / "late.py").write_text(
        "import time\nimport jaxdp\n\n\nclass Late:\n    def on_end(self, record):\n"
        "        time.sleep(25 if jaxdp.current().rank == 0 else 0)\n        print('has ended')\n"
    )
    arguments = argv(config, tmp_path / "run", more=["--callbacks", "[{target: late.Late}]"])
    done = launch.mpirun(2, arguments, "openmpi5", {"PYTHONPATH": f"{MPI}:{tmp_path}"}, 90)
    assert done.returncode == DONE and not done.left and done.stdout.count("has ended") == 2, (
        done.output
    )


@pytest.mark.slow
def test_an_exception_in_loss_or_evaluation_ends_all(config, tmp_path):
    done = job(
        config, tmp_path / "loss", which="mpich", more=["--loss.target", "faulty.FailsInLoss"]
    )
    # It failed while it was traced; MPICH kills the others as soon as one has ended, and may report
    # that.
    assert done.returncode in (2, 9) and not done.left and done.seconds < 30, done.output
    assert (
        "jaxdp: loss: it failed at tests/support/mpi/faulty.py" in done.stderr
        and "Traceback" not in done.output
    )
    more = ["--checkpoint.asynchronous", "false"]  # the save of step 20 is then over
    done = job(config, tmp_path / "eval", "raise", rank=1, at=2, where="test", more=more)
    assert done.returncode == 1 and not done.left and done.seconds < 30, done.output
    assert (
        "rank 1" in done.stderr
        and done.output.count("Traceback (most") == 1
        and kept(tmp_path / "eval") == [10, 20]
    )


@pytest.mark.slow
def test_no_nonfinite_number_gets_into_the_state(config, tmp_path):
    done = job(config, tmp_path / "one", "nan", rank=1, at=7)
    assert done.returncode == DONE and "skipped 1" in done.stdout, done.output
    assert read(tmp_path / "one" / "metrics.jsonl")[-2]["skipped_updates"] == 1
    done = job(
        config,
        tmp_path / "all",
        "nan from now on",
        rank=0,
        at=14,
        more=["--nonfinite.max_consecutive", "4"],
    )
    assert done.returncode == 1 and "Traceback" not in done.output, done.output
    assert "updates 14 to 17 were not finite, 4 in a row" in done.stderr and kept(
        tmp_path / "all"
    ) == [10]
    found = json.loads((tmp_path / "all" / "halted.json").read_text())["updates"]
    assert list(found) == ["14", "15", "16", "17"] and {len(v) for v in found.values()} == {72}
    assert max(r["step"] for r in read(tmp_path / "all" / "metrics.jsonl")) <= 17 + BEHIND + 1, (
        done.output
    )
    done = job(config, tmp_path / "all")  # the data is mended
    assert done.returncode == DONE and "resumes after step 10" in done.stdout, done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["--steps_per_call", "3", "--parallel.backend", "pjit", "--parallel.zero", "2"]]
)
def test_a_label_that_is_no_class_ends_all_in_one_line(config, tmp_path, more):
    """Of one example, of which one rank reads the row, in the middle of an epoch."""
    done = job(
        config,
        tmp_path,
        "a label is 10",
        at=700,
        np_=3,
        more=[*more, "--steps", "4000", "--log.every", "1"],
    )
    assert done.returncode == 2 and not done.left and "Traceback" not in done.output, done.output
    line = r"loss: a label is 10, but the model's outputs are for 10 classes, 0 to 9; .* "
    line += r"\(in the batch of update (\d+)\)"
    (update,) = re.findall(line, done.output)
    assert max(r["step"] for r in read(tmp_path / "metrics.jsonl")) <= int(update) + BEHIND + 6, (
        done.output
    )


def outside(config, run_dir, act, which="openmpi5", np_=2, more=()):
    """A job to which `act(its mpirun)` happens once it trains."""

    def wait_and_act(process):
        deadline = time.monotonic() + 60
        while not read(run_dir / "metrics.jsonl") and time.monotonic() < deadline:
            time.sleep(0.02)
        act(process)

    env = {"PYTHONPATH": str(MPI)}
    arguments = argv(config, run_dir, more=["--steps", "100000", *more])
    return launch.mpirun(np_, arguments, which, env, 90, during=wait_and_act)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [("openmpi5", signal.SIGUSR1), ("mpich", signal.SIGTERM)], ids=str)
def test_a_signal_to_mpirun_preempts(config, tmp_path, sent):
    which, number = sent
    done = outside(config, tmp_path, lambda mpirun: mpirun.send_signal(number), which)
    assert done.returncode == PREEMPTED and not done.left, done.output
    assert re.search(
        rf"preempted by {number.name} on rank \d, after update (\d+): saved step \1", done.stdout
    )


@pytest.mark.slow
def test_sigterm_to_open_mpi_promises_the_last_save(config, tmp_path):
    done = outside(config, tmp_path, lambda mpirun: mpirun.send_signal(signal.SIGTERM))
    assert done.returncode not in (DONE, 2) and not done.left, done.output
    said = [int(n) for n in re.findall(r"saved step (\d+)\n", done.stdout)]
    assert set(said[-3:]) <= set(kept(tmp_path))


def trained(run_dir):
    return lambda: bool(read(run_dir / "metrics.jsonl"))


def cut_once_it_trains(hosts, run_dir, host):
    return when(
        lambda: (run_dir / "checkpoints").is_dir() and kept(run_dir),
        lambda process: hosts.cut(host),
    )


@pytest.mark.slow
def test_both_sides_of_a_cut_cable_name_the_other(config, tmp_path):
    """Without a launcher each side says what it can see: the other has gone silent, or cannot be
    reached.
    """
    with TwoHosts(tmp_path) as hosts:
        env = {"PYTHONPATH": str(MPI), "JAXDP_COORDINATOR": f"{hosts.address(0)}:29555"}
        commands = [
            (
                [
                    *prefix,
                    sys.executable,
                    *argv(config, tmp_path / "run", more=["--steps", "100000"]),
                ],
                {**env, "JAXDP_NUM_PROCESSES": "2", "JAXDP_PROCESS_ID": str(rank)},
            )
            for rank, prefix in enumerate(hosts.prefixes)
        ]
        began = []

        def cut(process):
            cut_once_it_trains(hosts, tmp_path / "run", 1)(process)
            began.append(time.monotonic())

        first, second = launch.together(commands, 120, during=cut)
        assert time.monotonic() - began[0] < 45 and not first.left, first.output + second.output
        assert first.returncode == 1 and second.returncode == 1, first.output + second.output
        name = [rf"rank {rank} \(host {host}\)" for rank, host in enumerate(hosts.names)]
        assert re.search(
            rf"jaxdp: {name[1]} has not been heard from for 20 s: killed, stopped, or cut off",
            first.stderr,
        )
        assert re.search(
            rf"jaxdp: {name[1]} ends: {name[0]} cannot be reached for 20 s: the network",
            second.stderr,
        )
    assert kept(tmp_path / "run")


@pytest.mark.slow
def test_a_cut_cable_ends_open_mpi_with_keepalive_set(config, tmp_path):
    """By itself mpirun waits minutes for its daemon on the lost host; it names the host, and ends
    with code 0.

    The same command then resumes at once: what is left of the job ends with mpirun, and is waited
    for."""
    look = [("time", 5), ("intvl", 2), ("probes", 3)]
    options = [x for name, n in look for x in ("--prtemca", f"oob_tcp_keepalive_{name}", str(n))]
    with TwoHosts(tmp_path) as hosts:
        more, env = ["--steps", "100000"], {"PYTHONPATH": str(MPI)}
        cut = cut_once_it_trains(hosts, tmp_path / "run", 1)
        last = (
            f"$(( $(ls {tmp_path}/run/checkpoints | grep -x '[0-9]*' | sort -n | tail -n 1) + 20 ))"
        )
        again = shlex.join([sys.executable, *argv(config, tmp_path / "run")]) + f" --steps {last}"
        done = hosts.mpirun(
            argv(config, tmp_path / "run", more=more), 200, env, cut, options, then=again
        )
        assert done.returncode == DONE and done.seconds < 100, done.output
        assert re.search(rf"lost communication[\s\S]*on node {hosts.names[1]}", done.output), (
            done.output
        )
        assert "resumes after step" in done.stdout and final(tmp_path / "run"), done.output


def alone(config, run_dir, *more, env=None, code=0, during=None):
    """One process, without a launcher."""
    command = [sys.executable, *argv(config, run_dir, more=more)]
    environment = launch.environment({"PYTHONPATH": str(MPI), **(env or {})}, 1)
    process = subprocess.Popen(
        command,
        cwd=launch.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if during:
        threading.Thread(target=during, args=(process,), daemon=True).start()
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    assert process.returncode == code, out + err
    return out, err


@pytest.mark.slow
def test_two_interrupts_leave_at_once(config, tmp_path):
    def twice(process):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)

    # It waits in its loader, so that the first cannot be followed yet.
    keys = ["--data.args", json.dumps({"what": "sleep", "at": 8}), "--steps", "1000"]
    _, err = alone(config, tmp_path, *keys, code=1, during=when(trained(tmp_path), twice))
    assert (
        "SIGINT: saves, then ends" in err
        and "a second SIGINT: ends at once" in err
        and "Traceback" not in err
    )


@pytest.mark.slow
def test_preempted_before_the_first_update(config, tmp_path):
    def began():
        return (tmp_path / "env.json").is_file()

    out, err = alone(
        config, tmp_path, code=75, during=when(began, lambda p: p.send_signal(signal.SIGTERM))
    )
    assert (
        "SIGTERM before the first update: nothing to save" in err or "saved step" in out
    )  # if it had begun by then


@pytest.mark.slow
def test_two_runs_in_one_directory(config, tmp_path):
    second = []

    def try_another(process):
        _, err = alone(config, tmp_path, "--steps", "100000", code=2)
        second.append(err)
        process.send_signal(signal.SIGTERM)

    alone(
        config, tmp_path, "--steps", "100000", code=75, during=when(trained(tmp_path), try_another)
    )
    assert re.fullmatch(
        r"jaxdp: run_dir: '.*' is in use by process \d+ on \S+ since .*; wait .*\n", second[0]
    ), second


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 2 MB."""
    if os.geteuid():
        pytest.skip("a file system of one's own needs root to be mounted")
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def logged(config, run_dir, log, meanwhile, *more):
    """One process whose output goes to a file; `meanwhile` is called when its first checkpoint is
    there.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *argv(config, run_dir, more=more)], cwd=launch.ROOT,
            env=launch.environment({"PYTHONPATH": str(MPI)}, 1), stdout=file, stderr=file,
        )  # fmt: skip
        when(lambda: "saved step 10\n" in log.read_text(), meanwhile)(process)
        code = process.wait(90)
    text = log.read_text()
    assert "Traceback" not in text, text
    return code, text


@pytest.mark.slow
def test_a_full_disk_under_the_run_directory(config, tmp_path):
    """Saves fail, the run goes on, and the first one that finds room is kept."""
    log = tmp_path / "log"
    with small_disk(tmp_path / "disk") as disk:

        def fill(process):
            with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            when(
                lambda: "could not be saved" in log.read_text(),
                lambda process: (disk / "ballast").unlink(),
            )(process)

        code, text = logged(config, disk / "run", log, fill, "--steps", "300")
        failed = [
            int(n)
            for n in re.findall(
                r"checkpoint (\d+) could not be saved: no space left on the device", text
            )
        ]
        assert code == 0 and failed, text
        assert re.search(rf"could not be saved: .*; the last one is {failed[0] - 10}, ", text), text
        assert kept(disk / "run") == [280, 290, 300]
        steps = [r["step"] for r in read(disk / "run" / "metrics.jsonl") if r["split"] == "train"]
        assert steps == list(range(5, 301, 5))  # what could not be written was written later


@pytest.mark.slow
def test_a_run_directory_that_becomes_read_only(config, tmp_path):
    with small_disk(tmp_path / "disk") as disk:

        def remount(how):
            return subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)

        alone(config, disk / "run", "--steps", "20")
        remount("ro")
        _, err = alone(config, disk / "run", "--steps", "40", code=2)
        assert re.fullmatch(
            r"jaxdp: run_dir: cannot write in '.*': Read-only file system; choose .*\n", err
        )
        remount("rw")
        out, _ = alone(config, disk / "run", "--steps", "40")
        assert "resumes after step 20" in out and kept(disk / "run")[-1] == 40


@pytest.mark.slow
def test_a_run_resumes_over_a_symlink_and_a_torn_line(config, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    alone(config, tmp_path / "link", "--steps", "20")
    with (tmp_path / "real" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "split": "tra')
    out, _ = alone(config, tmp_path / "real", "--steps", "40")
    assert "resumes after step 20" in out
    steps = [r["step"] for r in read(tmp_path / "link" / "metrics.jsonl") if r["split"] == "train"]
    assert steps == list(range(5, 41, 5))


@pytest.mark.slow
def test_damage_is_named_and_the_save_before_it_used(config, tmp_path, uninterrupted):
    alone(config, tmp_path, "--steps", "40", "--optimizer.schedule_steps", "60")
    data = max(
        (tmp_path / "checkpoints" / "40").rglob("*"),
        key=lambda p: p.stat().st_size if p.is_file() else 0,
    )
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    out, _ = alone(config, tmp_path, "--optimizer.schedule_steps", "60")
    assert (
        "checkpoint 40 is damaged" in out
        and "set aside as 40.damaged" in out
        and "resumes after step 30" in out
    )
    assert final(tmp_path)[0]["loss"] == pytest.approx(uninterrupted[0]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("jump", [1e7, -1e7])
def test_a_clock_that_jumps_changes_nothing(config, tmp_path, jump):
    """What is measured uses the monotonic clock; checkpoints are known by their step, not by their
    dates.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nreal, began = time.time, time.monotonic()\n"
        f"time.time = lambda: real() + ({jump} if time.monotonic() - began > 2.0 else 0)\n"
    )
    alone(config, tmp_path / "run", "--steps", "400", env={"PYTHONPATH": f"{tmp_path}:{MPI}"})
    os.utime(tmp_path / "run" / "checkpoints" / "380", (4e9, 4e9))
    assert kept(tmp_path / "run") == [380, 390, 400] and final(tmp_path / "run")
    assert "finished" in alone(config, tmp_path / "run", "--steps", "400")[0]


@pytest.mark.slow
def test_a_config_that_changes_the_numbers_says_which(config, tmp_path):
    alone(config, tmp_path, "--steps", "20")
    command = ["train.py", "--config", str(config), "--run_dir", str(tmp_path), "--data.args={}"]
    environment = launch.environment({"PYTHONPATH": str(MPI)}, 1)
    refused = subprocess.run(
        [sys.executable, *command, "--seed", "3", "--optimizer.lr", "0.5"],
        cwd=launch.ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "seed: 0 -> 3; " in refused.stderr and "optimizer.lr: 0.01 -> 0.5" in refused.stderr
    assert "--resume.force true" in refused.stderr
