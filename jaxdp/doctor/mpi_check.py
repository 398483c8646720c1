"""Check mpirun by a job of two processes: unless mpi4py loads the same MPI, they do not see each
other.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from jaxdp.doctor.findings import Check, failure, of_text, ok
from jaxdp.errors import ReportedError, install, one_line
from jaxdp.process import imports, launchers, mpi

INSTALL = install("mpi")
# Open MPI 4 and 5 refuse more processes than cores.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
SECONDS = 10.0
FIX = (
    "see that message; as root, set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; "
    "for mpi4py's library, set MPI4PY_LIBMPI to the one of this mpirun"
)


def check_mpirun() -> Iterator[Check]:
    """Start two processes that exchange a message, with the mpirun on PATH."""
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        yield ok("mpirun", f"not checked: it needs mpirun on PATH and mpi4py ({INSTALL})")
        return
    env = OVERSUBSCRIBE | imports.for_module()
    command = [path, "-np", "2", sys.executable, "-P", "-m", "jaxdp.doctor.mpi_check"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=SECONDS + 5)
    except subprocess.TimeoutExpired as error:
        fix = f"{INSTALL}, or put another mpirun first on PATH"
        yield failure("mpirun", f"{path} does not run: {error}", fix)
        return
    text = (done.stdout + done.stderr).decode(errors="replace")
    if message := re.search(r"^jaxdp: (.+)", text, re.MULTILINE):
        yield of_text("mpi4py", f"{message[1]}, or put the mpirun of that library first on PATH")
    elif done.returncode:
        text = one_line(re.sub("[-*]{3,}", "", text))[:300]
        yield failure("mpirun", f"{path} -np 2 ends with code {done.returncode}: {text}", FIX)
    else:
        yield ok("mpirun", f"{path} starts processes that see each other")


if __name__ == "__main__":
    try:
        mpi.exchange(launchers.discover(), {}, SECONDS)
    except ReportedError as error:
        sys.exit(f"jaxdp: {error}")
