"""The verb `doctor`: check this machine, and print a list of findings."""

import json
import os
import pathlib
import subprocess
import sys
from typing import NoReturn

from jaxdp import config as schema
from jaxdp.cli import Call, load
from jaxdp.doctor.examine import examine
from jaxdp.doctor.report import as_json, as_text, failed
from jaxdp.errors import RunFailed


def run(call: Call) -> NoReturn:
    """Print the findings on rank 0, and end with code 1 if a check fails."""
    options = call.options
    path, directory = options["config"], options["run_dir"]
    config = load(["--config", path])[0] if path else schema.Config()
    if path and not directory:
        directory = schema.run_dir(config, path)
    needed = (lambda: checkpoint_bytes(path)) if path else None
    examined = examine(pathlib.Path(directory or "runs"), needed, config.compilation_cache)
    if examined is None:
        leave(0)
    color = sys.stdout.isatty() and examined.size == 1  # Open MPI gives its ranks a terminal even for a file or pipe
    text = json.dumps(as_json(examined), indent=1) if options["json"] else as_text(examined, color)
    print(text, file=sys.stderr if examined.stray else sys.stdout, flush=True)
    # On a code other than 0, mpirun would kill rank 0 before it has printed its list.
    leave(0 if examined.stray else int(failed(examined)))


def checkpoint_bytes(path: str) -> int:
    """Return the bytes of a checkpoint, computed in a subprocess, since this one must not import JAX."""
    command = [sys.executable, "-m", "jaxdp.cli.checkpoint_size", path]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise RunFailed(f"--config {path} cannot be built, so its checkpoint's size is not known: {last}")
    return int(done.stdout.split()[-1])


def leave(code: int) -> NoReturn:
    """End the process now, even if a check hangs in a thread, which cannot be ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
