"""Check that mpirun and the library that mpi4py loads are of one MPI: otherwise each rank believes that it is alone."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

from jaxdp.distributed import mpi
from jaxdp.doctor.check import Check, failure, of_text, ok, warning
from jaxdp.doctor.versions import installed

INSTALL = "pip install 'jaxdp-trainer[mpi]'"
PATTERNS = (  # the version in the output of `mpirun --version`, or in the version text of a library
    ("openmpi", r"(?:Open MPI\)?|OpenRTE\)|prte|PRRTE\)?)[ :v]*(\d+\.\d+[.\w]*)"),
    ("hydra", r"HYDRA build details:\s+Version:\s*(\d+\.\d+[.\w]*)"),
    ("hydra", r"MPICH Version:\s*(\d+\.\d+[.\w]*)"),
    ("hydra", r"Intel\(R\) MPI Library.*?(\d{4}[.\w]*)"),
)
LIBRARY = """
import sys
from jaxdp.distributed import mpi, world
from jaxdp.errors import UsageError
try:
    print(mpi.load(world.World(0, 1, launcher=sys.argv[1])).Get_library_version().splitlines()[0].strip(" \\0"))
except UsageError as error:
    sys.exit(f"jaxdp: {error}")
"""


def flavour(text: str) -> tuple[str, str]:
    """Return (launcher, version) of an MPI from its version text; ("", "") for an unknown one."""
    for launcher, pattern in PATTERNS:
        if match := re.search(pattern, text, re.DOTALL):
            return launcher, match[1]
    return "", ""


def output_of(*command: str) -> str:
    """Return what a command prints. Raises OSError if it does not start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "no answer within 10 s"
    return f"{done.stdout}{done.stderr}".strip()


def fits(launcher: str, version: str, library: str) -> bool:
    """Return whether the library belongs to that mpirun.

    Releases of one major version of Open MPI work together, and so do all of MPICH and Intel MPI.
    """
    loaded, number = flavour(library)
    return loaded == launcher and (launcher != "openmpi" or number.split(".")[0] == version.split(".")[0])


def check_mpirun(launched: bool = False, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check mpirun against mpi4py's library.

    launched: it started this process. Otherwise check the mpirun on PATH, and whether it would start.
    """
    starters = [exe.with_name("mpirun") for _, exe in mpi.ancestors() if exe.name in mpi.STARTERS] if launched else []
    path = next((str(p) for p in starters if p.exists()), None) or shutil.which("mpirun") or shutil.which("mpiexec")
    package = installed("mpi4py")
    if path is None:
        if package is None:
            yield ok("mpirun", "no MPI; several processes need mpirun, srun, torchrun or JAXDP_COORDINATOR")
        else:
            yield warning("mpirun", "mpi4py is installed, but no mpirun is on PATH", f"{INSTALL}, or set PATH")
        return
    try:
        text = output_of(path, "--version")
    except OSError as error:
        yield failure("mpirun", f"{path} does not run: {error}", f"{INSTALL}, or put another mpirun first on PATH")
        return
    launcher, version = flavour(text)
    if not launcher:
        text = f"{path} is neither Open MPI nor MPICH: {text.splitlines()[:1]}"
        yield warning("mpirun", text, "set JAXDP_COORDINATOR, JAXDP_NUM_PROCESSES and JAXDP_PROCESS_ID yourself")
        return
    family = mpi.FAMILY[launcher].partition(" or Intel")[0]
    yield ok("mpirun", f"{family} {version}, {path}")
    prefix = "PRTE" if int(version.split(".")[0]) >= 5 else "OMPI"
    variables = [f"{prefix}_ALLOW_RUN_AS_ROOT", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"]
    if launcher == "openmpi" and not launched and os.geteuid() == 0 and not all(map(env.get, variables)):
        fix = f"--allow-run-as-root, or set {' '.join(f'{name}=1' for name in variables)}"
        yield warning("mpirun", "Open MPI's mpirun refuses to run as root, which this is", fix)
    if package is None:
        yield warning("mpi4py", "not installed: ranks under mpirun could not meet", INSTALL)
        return
    library = output_of(sys.executable, "-c", LIBRARY, launcher)
    if fits(launcher, version, library):
        yield ok("mpi4py", f"loads {library}")
    elif not flavour(library)[0]:
        lines = library.splitlines() or ["it crashes when it loads its library"]
        yield of_text("mpi4py", lines[-1].removeprefix("jaxdp: "))
    else:
        text = f"mpi4py loads {library!r}, but {path} is {family} {version}: each rank may believe that it is alone"
        fix = f"put that library's mpirun first on PATH, or set MPI4PY_LIBMPI to mpirun's own {mpi.LIBRARY[launcher]}"
        yield (warning if launched else failure)("mpi4py", text, fix)
