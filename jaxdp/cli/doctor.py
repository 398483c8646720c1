"""The verb `doctor`: check this machine, and print a list of findings."""

import json
import os
import pathlib
import sys
from typing import NoReturn

from jaxdp.cli import Call
from jaxdp.doctor.examine import examine
from jaxdp.doctor.findings import FAILURE, as_json, as_text


def run(call: Call) -> NoReturn:
    """Print the findings on rank 0, and end with code 1 if a check fails."""
    examined = examine(pathlib.Path(call.options["run_dir"]))
    if (
        examined is None
    ):  # on a code other than 0, mpirun would end rank 0 before it has printed its list
        leave(0)
    print(json.dumps(as_json(*examined), indent=1) if call.options["json"] else as_text(*examined))
    leave(int(any(check.status == FAILURE for check in examined[0])))


def leave(code: int) -> NoReturn:
    """End the process now, even if a check hangs in a thread, which cannot be ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
