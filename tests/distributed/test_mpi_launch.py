"""Real processes find each other under every launcher at hand; what is set up wrongly ends in
seconds, in one line.
"""

import json
import os
import pathlib
import re
import socket
import sys

import pytest

from covering import only
from launch import ROOT, SUPPORT, Finished, mpirun, port, processes, ranks, require
from two_hosts import TwoHosts

pytestmark = pytest.mark.mpi
SCRIPT = str(SUPPORT / "mpi" / "context.py")
FAST = {"JAXDP_TIMEOUT": "3"}


def told(*jobs: Finished) -> list[dict]:
    """What the ranks printed, by rank; all jobs ended well and left nothing behind."""
    for job in jobs:
        assert job.returncode == 0 and not job.left, job.output
    lines = [
        json.loads(line) for job in jobs for line in job.stdout.splitlines() if line.startswith("{")
    ]
    return sorted(lines, key=lambda line: line["rank"])


def errors(*jobs: Finished) -> list[str]:
    """The errors that were printed, all ranks together. NullMonitor crashed or hung."""
    for job in jobs:
        assert not job.left, job.output
        assert "Traceback" not in job.stderr and "terminate called" not in job.stderr, job.output
    return [line for job in jobs for line in job.stderr.splitlines() if line.startswith("jaxdp: ")]


@pytest.mark.parametrize("which", only(["openmpi5", "mpich"], ["openmpi5", "openmpi4", "mpich"]))
def test_mpirun(which):
    lines = told(mpirun(2, [SCRIPT], which, timeout=60))
    assert [(x["rank"], x["size"], x["local_rank"], x["local_size"]) for x in lines] == [
        (0, 2, 0, 2),
        (1, 2, 1, 2),
    ]
    assert [x["total"] for x in lines] == [3.0, 3.0] and [x["is_root"] for x in lines] == [
        True,
        False,
    ]
    assert {x["launcher"] for x in lines} == {"hydra" if which == "mpich" else "openmpi"}


VARIABLES = {
    "jaxdp": lambda r, p: (
        {"JAXDP_COORDINATOR": f"127.0.0.1:{p}", "JAXDP_NUM_PROCESSES": "2", "JAXDP_PROCESS_ID": r},
        {},
    ),
    "explicit": lambda r, p: (
        {},
        {"init_method": f"tcp://localhost:{p}", "rank": int(r), "size": 2},
    ),
    "torchrun": lambda r, p: (
        {"MASTER_ADDR": "localhost", "MASTER_PORT": str(p), "RANK": r, "WORLD_SIZE": "2"},
        {},
    ),
    "slurm": lambda r, p: (
        {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": r,
            "SLURM_LOCALID": r,
            "SLURM_STEP_NODELIST": socket.gethostname(),
            "SLURM_JOB_ID": str(p),
        },
        {},
    ),
    "kubernetes": lambda r, p: (
        {
            "JOB_COMPLETION_INDEX": r,
            "JAXDP_NUM_PROCESSES": "2",
            "JAXDP_COORDINATOR": f"localhost:{p}",
        },
        {},
    ),
}


@pytest.mark.parametrize("launcher", only(["jaxdp"], VARIABLES))
def test_processes_started_by_hand(launcher):
    p = port()
    jobs = []
    environments, arguments = zip(*(VARIABLES[launcher](r, p) for r in "01"))
    if arguments[0]:
        prefixes = [["env"], ["env"]]
        argv = [
            "-c",
            f"import os,sys; sys.argv[1:] = [os.environ['ARGUMENTS']]; exec(open({SCRIPT!r}).read())",
        ]
        environments = [{"ARGUMENTS": json.dumps(a)} for a in arguments]
        jobs = processes(argv, environments, prefixes=prefixes)
    else:
        jobs = processes([SCRIPT], environments)
    lines = told(*jobs)
    assert [(x["rank"], x["local_rank"], x["local_size"]) for x in lines] == [(0, 0, 2), (1, 1, 2)]
    assert [x["total"] for x in lines] == [3.0, 3.0] and {x["launcher"] for x in lines} == {
        launcher
    }


@pytest.mark.slow
def test_alone():
    (line,) = told(*processes([SCRIPT], [{}], devices=2))
    assert (line["size"], line["local_size"], line["launcher"], line["devices"]) == (
        1,
        1,
        "none",
        2,
    )


@pytest.mark.parametrize("late", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_mpi4py_is_missing(tmp_path, late):
    """late: the seconds by which rank 0, which prints, starts after rank 1, whose end makes mpirun
    kill it.
    """
    wait = (
        f"import os, time\n\ntime.sleep({late} * (os.environ.get('OMPI_COMM_WORLD_RANK') == '0'))\n"
    )
    (tmp_path / "sitecustomize.py").write_text(wait)
    package = tmp_path / "mpi4py" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    job = mpirun(2, [SCRIPT], env={"PYTHONPATH": path}, timeout=60)
    want = f"jaxdp: mpirun started 2 processes but mpi4py is not installed: pip install -e '{ROOT}[mpi]'"
    assert job.returncode == 2 and errors(job) == [want], job.output


@pytest.mark.slow
def test_collectives_over_mpi_are_refused():
    job = mpirun(2, [SCRIPT], env={"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}, timeout=60)
    (line,) = errors(job)
    assert (
        job.returncode == 2 and "jax_cpu_collectives_implementation: mpi does not work" in line
    ), job.output


@pytest.mark.slow
def test_mpi_collectives_of_one_rank_are_refused_there():
    both = ranks(2, f"127.0.0.1:{port()}", **FAST)
    both[1]["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "mpi"
    jobs = processes([SCRIPT], both, timeout=60)
    (line,) = errors(jobs[1])
    assert (
        jobs[1].returncode == 2 and "jax_cpu_collectives_implementation: mpi does not work" in line
    ), jobs[1].output


@pytest.mark.slow
def test_mpi4py_loads_another_mpi():
    require("openmpi5")
    library = pathlib.Path(sys.prefix) / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip("Open MPI's library is not in this environment")
    job = mpirun(2, [SCRIPT], "mpich", env={"MPI4PY_LIBMPI": str(library)}, timeout=60)
    (line,) = errors(job)
    assert job.returncode == 2, job.output
    assert all(
        x in line for x in ("started 2 processes", "mpi4py sees 1", "Open MPI v", "MPI4PY_LIBMPI")
    ), line


@pytest.mark.slow
def test_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        p = taken.getsockname()[1]
        jobs = processes([SCRIPT], ranks(2, f"127.0.0.1:{p}", **FAST), timeout=60)
    first, second = errors(jobs[0]), errors(jobs[1])
    assert [j.returncode for j in jobs] == [2, 1], [j.output for j in jobs]
    assert f"cannot listen on port {p}" in first[0] and "choose another" in first[0]
    assert f"127.0.0.1:{p}" in second[0] and "rank 1" in second[0]
    assert jobs[0].seconds < 20


@pytest.mark.slow
def test_another_server_at_the_coordinators_address():
    p = port()
    server = [
        sys.executable,
        "-c",
        f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={p}, bind='127.0.0.1')",
    ]
    from launch import together

    env = ranks(2, f"127.0.0.1:{p}", JAXDP_TIMEOUT="20")[1]
    wrapped = [
        sys.executable,
        "-c",
        f"import subprocess,sys; s=subprocess.Popen({server!r}, stdout=subprocess.PIPE); s.stdout.readline(); "
        f"r=subprocess.run([sys.executable,{SCRIPT!r}]).returncode; s.terminate(); s.wait(); sys.exit(r)",
    ]
    (job,) = together([(wrapped, env)], timeout=60)
    (line,) = errors(job)
    assert job.returncode == 2, job.output
    assert (
        f"127.0.0.1:{p} is not rank 0 of this job" in line
        and "another program has that port" in line
    )


@pytest.mark.slow
def test_the_coordinator_is_on_another_host():
    (job,) = processes([SCRIPT], ranks(2, f"192.0.2.77:{port()}", **FAST)[:1], timeout=60)
    (line,) = errors(job)
    assert job.returncode == 2 and "192.0.2.77" in line and "is not rank 0's host" in line, (
        job.output
    )


@pytest.mark.slow
def test_nobody_else_comes():
    p = port()
    (job,) = processes([SCRIPT], ranks(3, f"127.0.0.1:{p}", **FAST)[:1], timeout=60)
    assert errors(job) and "rank 1, 2 of 3 did not come within 3 s" in errors(job)[0], job.output
    assert job.returncode == 1


@pytest.mark.slow
def test_one_of_three_does_not_come():
    p = port()
    jobs = processes([SCRIPT], ranks(3, f"127.0.0.1:{p}", **FAST)[:2], timeout=60)
    assert [line for j in jobs for line in errors(j)] == errors(jobs[0])  # one prints for both
    assert "rank 2 of 3 did not come" in errors(jobs[0])[0]
    assert [j.returncode for j in jobs] == [1, 1]


@pytest.mark.slow
def test_no_coordinator():
    p = port()
    (job,) = processes([SCRIPT], ranks(2, f"127.0.0.1:{p}", **FAST)[1:], timeout=60)
    (line,) = errors(job)
    assert f"found no rank 0 at the coordinator's address 127.0.0.1:{p} within 3 s" in line, (
        job.output
    )
    assert job.returncode == 1


def test_world_sizes_that_disagree():
    p = port()
    one, other = ranks(3, f"127.0.0.1:{p}")[0], ranks(2, f"127.0.0.1:{p}")[1]
    jobs = processes([SCRIPT], [one, other], timeout=60)
    assert [j.returncode for j in jobs] == [2, 2] and not errors(jobs[1]), [j.output for j in jobs]
    (line,) = errors(jobs[0])
    assert "rank 1" in line and "has world size 2, but rank 0" in line and "has 3" in line
    assert max(j.seconds for j in jobs) < 45  # though the third of the three never comes


@pytest.mark.slow
def test_two_processes_with_one_rank():
    p = port()
    one, twice, _ = ranks(3, f"127.0.0.1:{p}")
    jobs = processes([SCRIPT], [one, twice, twice], timeout=60)
    assert [j.returncode for j in jobs] == [2, 2, 2], [j.output for j in jobs]
    (line,) = errors(*jobs)
    assert "two processes say they are rank 1" in line


@pytest.mark.slow
def test_two_processes_of_rank_0():
    one, other, _ = ranks(3, f"127.0.0.1:{port()}")
    jobs = processes([SCRIPT], [one, one, other], timeout=60)
    assert [j.returncode for j in jobs] == [2, 2, 2], [j.output for j in jobs]
    lines = errors(*jobs)
    assert lines and all("two processes say they are rank 0" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "variable"), [(1, "JAXDP_TIMEOUT"), (0, "JAXDP_SILENCE")])
def test_a_wrong_timeout_on_one_rank_ends_all_at_once(rank, variable):
    envs = ranks(2, f"127.0.0.1:{port()}")
    envs[rank][variable] = "soon"
    jobs = processes([SCRIPT], envs, timeout=60)
    (line,) = errors(*jobs)
    assert [j.returncode for j in jobs] == [2, 2] and line.startswith(
        f"jaxdp: rank {rank} (host "
    ), line
    assert line.endswith(f"): {variable}='soon' is not a number of seconds above 0")


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job():
    script = "import jaxdp; c = jaxdp.init(); c.barrier(); 1 / (1 - c.rank); c.barrier('never', timeout=60)"
    jobs = processes(["-c", script], ranks(2, f"127.0.0.1:{port()}"), timeout=60)
    assert [j.returncode for j in jobs] == [1, 1] and max(j.seconds for j in jobs) < 20, [
        j.output for j in jobs
    ]
    assert "ZeroDivisionError" in jobs[1].stderr
    assert (
        re.search(r"jaxdp: rank 0 .* ends: rank 1 .* failed: ZeroDivisionError", jobs[0].stderr)
        and "F1" not in jobs[0].stderr
    ), jobs[0].output


@pytest.mark.slow
@pytest.mark.parametrize("which", ["openmpi5", "mpich"])
def test_what_all_ranks_know_is_printed_by_one(which):
    script = "import jaxdp; c = jaxdp.init(); c.agree('no such file: x' if c.rank else None)"
    job = mpirun(3, ["-c", script], which, timeout=60)
    (line,) = errors(job)
    assert (
        job.returncode == 2
        and line.startswith("jaxdp: rank 1 (host ")
        and line.endswith("no such file: x")
    )


@pytest.mark.slow
def test_a_rank_that_never_calls_mpi_init():
    script = "import os, time; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and time.sleep(60); import jaxdp; jaxdp.init()"
    job = mpirun(2, ["-c", script], env={"JAXDP_TIMEOUT": "2"}, timeout=60)
    assert job.returncode == 1 and job.seconds < 15 and not job.left, job.output
    assert "in waits_until_every_rank_calls_mpi_init" in job.stderr, job.output


@pytest.mark.slow
def test_init_after_the_devices_were_used():
    script = "import jax; jax.devices(); import jaxdp; jaxdp.init(rank=0, size=2, coordinator='localhost:1')"
    (job,) = processes(["-c", script], [{}])
    assert job.returncode == 2 and job.stderr.startswith("jaxdp: jaxdp.init() comes too late"), (
        job.output
    )


@pytest.mark.slow
def test_two_hosts(tmp_path):
    require("openmpi5")
    with TwoHosts(tmp_path) as hosts:
        lines = told(hosts.mpirun([SCRIPT]))
        assert [(x["rank"], x["local_rank"], x["local_size"], x["hosts"]) for x in lines] == [
            (0, 0, 1, 2),
            (1, 0, 1, 2),
        ]
        assert [x["total"] for x in lines] == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("loopback", [0, 1])
def test_two_hosts_of_which_one_calls_itself_loopback(tmp_path, loopback):
    with TwoHosts(tmp_path, loopback=loopback) as hosts:
        jobs = processes(
            [SCRIPT], ranks(2, f"{hosts.address(0)}:12355"), timeout=30, prefixes=hosts.prefixes
        )
        (line,) = errors(*jobs)
        assert [j.returncode for j in jobs] == [2, 2], [j.output for j in jobs]
        name = hosts.names[loopback]
        assert (
            f"rank {loopback}: its host name {name} resolves to 127.0.1.1" in line
            and f"/etc/hosts of {name}" in line
        )
        if loopback == 1:
            require("openmpi5")
            job = hosts.mpirun([SCRIPT])
            assert job.returncode == 2 and errors(job) == [line], job.output
