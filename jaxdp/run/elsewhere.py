"""Call a function in a fresh process beside this one, with other surroundings.

What a config computes must not depend on its surroundings: the number of devices, the rank and the
number of processes, variables of launchers, the time zone, the order of hashes. So `jaxdp verify`
computes it in a process in which all of these are others, and compares.
"""

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from jaxdp.errors import ReportedError, cause
from jaxdp.process import context, imports, private_jax
from jaxdp.process.environment import COUNT

SLOW = 900.0  # seconds that the other process may take longer than this one
CODE = "import sys; sys.path.append({!r}); import jaxdp; sys.path[:] = {!r}; "
CODE += "from jaxdp.run.elsewhere import main; main()"
MORE = 3  # what is added to a rank and to a number of processes: another parity, also of a half
RANKS = """
RANK LOCAL_RANK GROUP_RANK ROLE_RANK NODE_RANK PROCESS_ID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK
OMPI_COMM_WORLD_NODE_RANK PMI_RANK PMI_LOCAL_RANK PMI_ID PMIX_RANK PALS_RANKID PALS_LOCAL_RANKID MPI_LOCALRANKID
MPI_RANK MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK SLURM_PROCID SLURM_LOCALID SLURM_NODEID FLUX_TASK_RANK
FLUX_TASK_LOCAL_ID JSM_NAMESPACE_RANK JSM_NAMESPACE_LOCAL_RANK JOB_COMPLETION_INDEX TPU_WORKER_ID CLOUD_TPU_TASK_ID
HOROVOD_RANK HOROVOD_LOCAL_RANK JAX_PROCESS_ID JAX_PROCESS_INDEX JAXDP_PROCESS_ID JAXDP_LOCAL_RANK
CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
"""
SIZES = """
WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE NNODES NUM_NODES NUM_PROCESSES NPROC_PER_NODE
OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE OMPI_UNIVERSE_SIZE PMI_SIZE PMI_LOCAL_SIZE PALS_LOCAL_SIZE
MPI_LOCALNRANKS MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_SIZE SLURM_NTASKS SLURM_NPROCS SLURM_NNODES
SLURM_JOB_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE
SLURM_GPUS_ON_NODE SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK FLUX_JOB_SIZE FLUX_JOB_NNODES JSM_NAMESPACE_SIZE
JSM_NAMESPACE_LOCAL_SIZE HOROVOD_SIZE HOROVOD_LOCAL_SIZE JAX_PROCESS_COUNT JAX_NUM_PROCESSES JAXDP_NUM_PROCESSES
JAXDP_LOCAL_SIZE PYTHON_CPU_COUNT
"""
# Variables that connect this process to its launcher, by their beginnings: the other process is not
# part of its job.
PIPES = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_SERVER")


@contextlib.contextmanager
def elsewhere(
    function: Callable[..., Any], *args: Any, devices: int
) -> Iterator[Callable[[], Any]]:
    """Call a function in a process with other surroundings, until the context ends.

    Yields a function that waits for the result and returns it, or a text that tells why there is
    none.

    Args:
        function, args: pickled, so of a module.
        devices: the number of simulated CPU devices.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(COUNT)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(PIPES)} | surroundings()
    variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*flags, f"{COUNT}={devices}"])}
    code = CODE.format(os.path.dirname(os.path.dirname(imports.PACKAGE)), sys.path)
    with tempfile.TemporaryFile() as request:
        pickle.dump((function, args), request)
        request.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
        )

    def result():
        try:
            answer, errors = child.communicate(timeout=SLOW)
        except subprocess.TimeoutExpired:
            return f"it did not end in {SLOW:g} s"
        if child.returncode == 0:
            return pickle.loads(answer)
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"the process ended with code {child.returncode}: {''.join(last)}"

    try:
        yield result
    finally:
        child.kill()
        child.communicate()


def surroundings() -> dict[str, str]:
    """Return environment variables with other values than in this process."""

    def other(name, least):
        value = os.environ.get(name, "")
        return str((int(value) if value.isdigit() else least) + MORE)

    changed = {name: other(name, 0) for name in RANKS.split()}
    changed |= {name: other(name, 1) for name in SIZES.split()}
    changed |= dict.fromkeys(("HOSTNAME", "HOST", "SLURMD_NODENAME"), "elsewhere")
    changed["PYTHONHASHSEED"] = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    changed["TZ"] = "OTHER-23:59"  # ahead of UTC: another local date
    return changed


def main() -> None:
    """Read a function from stdin, and write its result to what stdout was."""
    gc.set_threshold(100_000)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, args = imports.for_user(pickle.load, sys.stdin.buffer)
    rank, size = MORE, MORE + 1  # before any of the user's code is imported
    private_jax.number_process(rank, size)
    context._current = context.Context(rank, size, rank, size, "none", ("",) * size)
    try:
        result = function(*args)
    except ReportedError as error:
        result = str(error)
    except BaseException as error:
        result = f"it failed{cause(error)}"
    pickle.dump(result, answer)
    answer.flush()
    os._exit(0)  # threads and exit handlers of the user's may wait for something
