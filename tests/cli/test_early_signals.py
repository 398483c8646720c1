"""Signals in the first seconds of a command: it ends at once, with the code that asks to run it
again.
"""

import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest

from launch import ROOT

DIGITS = ["--config", str(ROOT / "configs" / "digits.yaml")]
HUNG = """
import pathlib, time
class Hung:
    def __init__(self, **args):
        pathlib.Path("hangs").touch()
        time.sleep(600)
"""


def start(argv, folder, **more):
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "XLA_FLAGS": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *argv], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, **more
    )


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def ended(process, code):
    out, err = process.communicate(timeout=100)
    assert process.returncode == code and "Traceback" not in err, (process.returncode, out, err)
    return out + err


def is_blocked(process, number):
    """Return whether the process has blocked a signal, as all commands do in their first
    milliseconds.
    """
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return (
        int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)
        >> (number - 1)
        & 1
    )


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("launch", "SIGTERM"),
        *(
            pytest.param("launch", name, marks=pytest.mark.slow)
            for name in ("SIGUSR1", "SIGHUP", "SIGINT")
        ),
        *(pytest.param("sweep", name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGHUP")),
        *(
            pytest.param("script", name, marks=pytest.mark.slow)
            for name in ("SIGTERM", "SIGUSR1", "SIGHUP")
        ),
    ],
)
def test_a_launch_stopped_at_once_asks_to_be_run_again(tmp_path, verb, name):
    number = getattr(signal, name)
    words = {
        "launch": ["launch", "-n", "2", "train", *DIGITS, "--run_dir", "run"],
        "sweep": ["sweep", *DIGITS, "--seed", "0,1"],
        "script": [
            "launch",
            "-n",
            "2",
            sys.executable,
            "-c",
            "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(600)",
        ],
    }[verb]
    with start(["-m", "jaxdp", *words], tmp_path) as process:
        wait_until(
            (tmp_path / "began").exists
            if verb == "script"
            else lambda: is_blocked(process, number),
            process,
        )
        process.send_signal(number)
        ended(process, 75)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.3, 0.6, 1.0, 1.5, 2.0, 3.0])
def test_a_launch_stopped_while_it_starts_processes(tmp_path, delay):
    """delay: seconds, since what is tried is the signal's arrival at any moment."""
    with start(
        [
            "-m",
            "jaxdp",
            "launch",
            "-n",
            "3",
            "train",
            *DIGITS,
            "--steps",
            "100000",
            "--run_dir",
            "run",
        ],
        tmp_path,
    ) as job:
        time.sleep(delay)
        job.send_signal(signal.SIGTERM)
        ended(job, 75)


@pytest.mark.parametrize(
    "what",
    [
        "data",
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("config", "nonce", "aliases", "two processes")
        ),
    ],
)
def test_a_signal_ends_a_start_that_hangs(tmp_path, what):
    (tmp_path / "hung.py").write_text(HUNG)
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text((ROOT / "configs" / "digits.yaml").read_text())
    more, began = [], (tmp_path / "hangs").exists
    job = [
        "-m",
        "jaxdp",
        *(["launch", "-n", "2"] if what == "two processes" else []),
        "train",
        "--config",
        str(config),
    ]
    if what in ("data", "two processes"):
        more = ["--data.target", "hung.Hung"]
    elif what == "config":
        config.unlink()
        os.mkfifo(config)
    elif what == "nonce":
        run_dir.mkdir()
        os.mkfifo(run_dir / ".nonce")
        began = (run_dir / ".lock").exists
    else:
        lines = ["a: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9)]
        config.write_text(
            "\n".join(["data:", "  args:", *(f"    {line}" for line in lines)]) + "\n"
        )
    with start([*job, "--run_dir", str(run_dir), *more], tmp_path) as process:
        if what in ("config", "aliases"):

            def catches():
                return not is_blocked(process, signal.SIGTERM) and "SigCgt" in status(
                    process, signal.SIGTERM
                )

            wait_until(catches, process)
        else:
            wait_until(began, process)
        process.send_signal(signal.SIGTERM)
        text = ended(process, 75)
    assert (
        text.count(
            "SIGTERM before the first update: nothing to save; run the same command to start again\n"
        )
        == 1
    )


def status(process, number):
    """Return the names of the signal sets in /proc of which a process's set has the signal."""
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    sets = [
        line.split() for line in lines if line.startswith("Sig") and not line.startswith("SigQ")
    ]
    return {name.rstrip(":") for name, bits in sets if int(bits, 16) >> (number - 1) & 1}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["launch", "-n", "2"]])
def test_a_run_saves_where_its_terminal_is_closed(tmp_path, launcher):
    """The terminal sends SIGHUP to all its processes, and nothing can be printed any more."""
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    words = [*launcher, "train", *DIGITS, "--steps", "1000000", "--run_dir", "run"]
    leads = [
        "import fcntl, os, sys, termios",
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)",
        "os.execv(sys.argv[1], sys.argv[1:])",
    ]
    command = [sys.executable, "-c", "\n".join(leads), sys.executable, "-m", "jaxdp", *words]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        os.set_blocking(ours, False)
        try:
            os.read(ours, 10000)
        except BlockingIOError:
            time.sleep(0.02)
    os.close(ours)
    assert process.wait(60) == 75
    assert [p for p in os.listdir(tmp_path / "run" / "checkpoints") if p.isdigit()]


@pytest.mark.slow
def test_under_nohup_a_run_survives_its_terminal(tmp_path):
    def ignore():
        return signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ["-m", "jaxdp", "train", *DIGITS, "--steps", "300", "--run_dir", "run"]
    with start(words, tmp_path, preexec_fn=ignore) as process:
        wait_until((tmp_path / "run" / "env.json").exists, process)
        process.send_signal(signal.SIGHUP)
        ended(process, 0)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["launch", "-n", "2", "train"], ["sweep"]])
def test_a_second_signal_ends_what_hangs(tmp_path, verb):
    """In a callback after an update: the first signal asks a process to save, which it cannot."""
    (tmp_path / "hung.py").write_text(
        "import pathlib, signal, time\nimport jaxdp\n\n\nclass Hung:\n"
        "    def after(self, updates, state, metrics):\n"
        "        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "        pathlib.Path(f'hangs{jaxdp.current().rank}').touch()\n        time.sleep(600)\n"
    )
    words = [*verb, *DIGITS, "--callbacks", "[hung.Hung]"]
    words += ["--seed", "0,1"] if verb == ["sweep"] else ["--run_dir", "run"]
    with start(["-m", "jaxdp", *words], tmp_path) as job:
        ranks = 2 if "launch" in verb else 1
        wait_until(lambda: len([*tmp_path.glob("hangs*")]) == ranks, job)
        for _ in range(2):
            job.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # two signals that are pending at once are one
        said = ended(job, 1)
        assert "a second signal: what has not ended in 10 s is killed" in said
