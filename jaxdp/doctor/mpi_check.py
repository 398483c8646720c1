"""Check mpirun by a job of two processes: unless mpi4py loads the same MPI, they do not see each
other.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from jaxdp.doctor.findings import Check, failure, of_text, ok, warning
from jaxdp.errors import ReportedError, install
from jaxdp.process import hosts, imports, launchers, mpi

INSTALL = install("mpi")
# Open MPI 4 and 5 refuse more processes than cores.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
SECONDS = 10.0
AS_ROOT = (
    "run it as another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
)


def check_mpirun() -> Iterator[Check]:
    """Start two processes that exchange a message, with the mpirun on PATH."""
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    package = importlib.util.find_spec("mpi4py")
    if path is None or package is None:
        text = (
            "mpi4py is installed, but no mpirun is on PATH"
            if package
            else f"{path} needs mpi4py to start jaxdp"
        )
        none = "no MPI; several processes need mpirun, srun, torchrun or JAXDP_COORDINATOR"
        yield warning("mpirun", text, INSTALL) if path or package else ok("mpirun", none)
        return
    env = OVERSUBSCRIBE | {
        k: v for k, v in imports.for_module().items() if not k.startswith("JAXDP_")
    }
    command = [path, "-np", "2", sys.executable, "-P", "-m", "jaxdp.doctor.mpi_check"]
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS + 5,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield failure(
            "mpirun",
            f"{path} does not run: {error}",
            f"{INSTALL}, or put another mpirun first on PATH",
        )
        return
    if message := re.search(r"^jaxdp: (.+)", done.stderr, re.MULTILINE):
        yield of_text("mpi4py", f"{message[1]}, or put the mpirun of that library first on PATH")
    elif done.returncode:
        text = " ".join(re.sub(r"[-*]{3,}", "", done.stdout + done.stderr).split())
        library = (
            "see that message; for mpi4py's library, set MPI4PY_LIBMPI to the one of this mpirun"
        )
        fix = AS_ROOT if "as root" in text else library
        yield failure("mpirun", f"{path} -np 2 ends with code {done.returncode}: {text[:300]}", fix)
    else:
        yield ok(
            "mpirun",
            f"{path} starts processes that see each other, with {done.stdout.splitlines()[0]}",
        )


if __name__ == "__main__":
    try:
        world = launchers.discover()
        mpi.exchange(world, {"addresses": hosts.resolve(hosts.hostname())}, SECONDS)
        print(mpi.load(world).Get_library_version().splitlines()[0].strip(" \0"))
    except ReportedError as error:
        sys.exit(f"jaxdp: {error}")
