"""Scripts in processes that are forked from one that has imported JAX, as `jaxdp launch` forks its
ranks.

    python forked_scripts.py    # reads JSON lines {"words", "env", "cwd", "out"}, answers each with an exit code

words: what follows `python`. out: the file for stdout; stderr goes to OUT.errors. An import takes
more than a second of a core, so the commands of Python that a script starts by `benchmarks.job` are
forked as well."""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback

from benchmarks import job
from jaxdp.process.environment import tunables
from jaxdp.sweep.forked import preload

popen = job.start


class Forked:
    """A script in a forked process, in its own session; it has the methods of `subprocess.Popen`
    that jobs need.
    """

    def __init__(self, words, env, cwd, stdout, stderr):
        sys.stdout.flush()
        self.returncode, self.lock = None, threading.Lock()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            atexit._clear()  # of the process around, such as the end of its temporary folders
            os.setsid()
            os.environ.clear()
            os.environ.update(
                env, GLIBC_TUNABLES=tunables()
            )  # else a command starts itself again, to set it
            os.chdir(cwd)
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
                os.dup2(file, number)
            run(words)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        with self.lock:  # threads may wait for one process
            if self.returncode is None:
                child, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if child else None
        return self.returncode

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)


def run(words):
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def call(command, env, cwd=None):
    """`job.call` of a command of Python; a launcher before it is left out, and has one process."""
    words = [str(word) for word in command[len(command) - command[::-1].index(sys.executable) :]]
    if code := Forked(words, env, cwd or os.getcwd(), 2, 2).wait():
        raise subprocess.CalledProcessError(code, command)


def start(command, env, cwd=job.ROOT, **files):
    """`job.start`; what is not for this Python, or has pipes, is a real process."""
    if command[0] != sys.executable or any(isinstance(file, int) for file in files.values()):
        return popen(command, env, cwd, **files)
    return Forked(
        [*map(str, command[1:])], env, cwd, **{name: file.fileno() for name, file in files.items()}
    )


if __name__ == "__main__":
    preload()
    job.call, job.start = call, start
    for line in sys.stdin:
        request = json.loads(line)
        files = [
            os.open(f"{request['out']}{end}", os.O_WRONLY | os.O_CREAT, 0o600)
            for end in ("", ".errors")
        ]
        print(Forked(request["words"], request["env"], request["cwd"], *files).wait(), flush=True)
        for file in files:
            os.close(file)
