"""The verb `doctor`: check this machine, and print a list of findings."""

import json
import pathlib
import sys

from jaxdp.cli import Call
from jaxdp.doctor.examine import examine
from jaxdp.doctor.findings import FAILURE, as_json, as_text


def run(call: Call) -> None:
    """Print the findings on rank 0, and end with code 1 if a check fails. The other ranks end with
    0: on any other code, mpirun would end rank 0 before it has printed its list.
    """
    examined = examine(pathlib.Path(call.options["run_dir"]))
    if examined is not None:
        as_data = call.options["json"]
        print(json.dumps(as_json(*examined), indent=1) if as_data else as_text(*examined))
        sys.exit(int(any(check.status == FAILURE for check in examined[0])))
