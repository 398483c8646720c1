"""The doctor finds what is planted, for real: each fault is a line with its fix, alone and among
ranks.
"""

import importlib.metadata
import json
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxdp.doctor import examine, resources, versions
from jaxdp.doctor.examine import SILENT
from jaxdp.doctor.findings import (
    FAILURE,
    OK,
    WARNING,
    as_json,
    as_text,
    failure,
    of_text,
    ok,
    run_checks,
)
from jaxdp.doctor.job import merge
from jaxdp.errors import UsageError
from launch import ROOT, environment, find, mpirun, port, processes, ranks, require
from two_hosts import TwoHosts

DOCTOR = ["-m", "jaxdp", "doctor"]
AFTER = (  # its argument is the run directory; another doctor may run elsewhere
    "import os, sys, time; {}; sys.argv[1:] = ['doctor', '--json', '--run_dir', *sys.argv[1:]]; "
    "from jaxdp.cli import main; main()"
)


def read(text, *names):
    """{name: [checks]} of what `--json` printed."""
    found = {}
    for check in json.loads(text)["checks"]:
        found.setdefault(check["name"], []).append(check)
    return [found.get(name, []) for name in names] if names else found


def bad(checks):
    return [check for check in checks if check["status"] != OK]


@pytest.mark.slow
def test_a_healthy_machine_passes_and_faults_are_found(tmp_path):
    """One examination each: with nothing wrong, and with all that may be wrong at once, side by
    side.
    """
    began = time.monotonic()
    well, ill = processes_of(tmp_path)
    assert well.returncode == 0 and time.monotonic() - began < 40, well.stdout + well.stderr
    found = read(well.stdout)
    assert all(check["status"] != FAILURE for checks in found.values() for check in checks)
    assert {
        "python",
        "jax",
        "jaxlib",
        "run_dir",
        "shared memory",
        "open files",
        "bindings",
        "devices",
    } <= set(found)
    assert (
        not find("openmpi5")
        or "starts processes that see each other" in found["mpirun"][0]["found"]
    )
    assert (
        found["devices"][0]["found"].startswith("2 x cpu")
        and "right" not in found["all-reduce"][0]["found"]
    )

    assert ill.returncode == 1, ill.stdout + ill.stderr
    found = read(ill.stdout)
    texts = [check["found"] for check in bad(found["environment"])]
    (aborted,) = bad(found["devices"])
    assert (
        "Unknown flag" in aborted["found"]
        and "remove the flag" in aborted["fix"]
        and "--xla_no_such_flag" in aborted["found"]
    ), aborted
    assert any("JAX_ENABLE_X64=1" in t for t in texts) and any("JAXDP_TIMOUT" in t for t in texts)
    assert "did you mean 'JAXDP_TIMEOUT'?" in [check["fix"] for check in found["environment"]]
    assert (
        found["open files"][0]["status"] == FAILURE
        and "64 at most" in found["open files"][0]["found"]
    )
    if find("openmpi5") and find("mpich"):
        (mismatch,) = bad(found["mpi4py"])
        assert (
            "started 2 processes, but mpi4py sees 1, since it loaded 'Open MPI v5"
            in mismatch["found"]
        ), mismatch
        assert mismatch["status"] == FAILURE and "MPI4PY_LIBMPI" in mismatch["fix"]


def processes_of(tmp_path):
    """(an examination of this machine, one of this machine with faults), run side by side."""
    faults = {
        "XLA_FLAGS": "--xla_no_such_flag=1",
        "JAX_ENABLE_X64": "1",
        "JAXDP_TIMOUT": "5",
    }
    library = pathlib.Path(sys.prefix) / "lib" / "libmpi.so.40"
    if (
        mpich := find("mpich")
    ) and library.exists():  # its mpirun is first on PATH, and mpi4py loads Open MPI
        faults |= {
            "PATH": f"{os.path.dirname(mpich)}:{os.environ['PATH']}",
            "MPI4PY_LIBMPI": str(library),
        }
    jobs = []
    for env, before in (({}, ""), (faults, "ulimit -n 64; ")):
        command = (
            f'{before}exec "{sys.executable}" -m jaxdp doctor --json --run_dir "{tmp_path}/run"'
        )
        jobs.append(
            subprocess.Popen(
                ["sh", "-c", command], cwd=ROOT, env=environment(env, 2), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    done = []
    for job in jobs:
        out, err = job.communicate(timeout=100)
        done.append(subprocess.CompletedProcess(job.args, job.returncode, out, err))
    return done


def test_an_old_jax_is_named_with_the_bounds(tmp_path):
    """It cannot be imported either: the rest is examined all the same."""
    info = tmp_path / "jax-0.4.30.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.4.30\n")
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text('__version__ = "0.4.30"\n')
    env = environment({"PYTHONPATH": str(tmp_path)}, 1)
    done = subprocess.run(
        [sys.executable, *DOCTOR], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (at,) = [
        i
        for i, line in enumerate(lines)
        if re.match(r"failure +jax +0\.4\.30; jaxdp needs jax[<>]", line)
    ]
    assert "pip install -U 'jax<0.13,>=" in lines[at + 1]
    assert any(re.match("ok +shared memory", line) for line in lines) and "failure" in lines[-1]


def test_a_full_disk(tmp_path):
    """In a namespace of its own: a small file system that is full."""
    script = (
        "mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs disk && "
        "{ dd if=/dev/zero of=disk/x bs=1k count=2000 2>/dev/null; "
        f'PYTHONPATH={ROOT} exec "{sys.executable}" -c "$0"; }}'
    )
    code = """
import json, pathlib
from jaxdp.doctor import resources
checks = resources.check_run_dir(pathlib.Path("disk/run"))
print(json.dumps({"checks": [c._asdict() for c in checks]}))
"""
    (tmp_path / "disk").mkdir()
    command = ["unshare", "--mount", "sh", "-c", script, code]
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if "ermi" in done.stderr:
        pytest.skip(f"namespaces are not permitted here: {done.stderr.strip()}")
    (disk,) = read(done.stdout, "run_dir")[0]
    assert disk["status"] == FAILURE and "No space left on device" in disk["found"]
    assert "choose another --run_dir" in disk["fix"]


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_on_one_core(tmp_path):
    job = mpirun(2, ["-c", AFTER.format("os.sched_setaffinity(0, {0})"), str(tmp_path)])
    assert job.returncode == 0 and not job.left, job.output
    binding, reduced, launcher, joined = read(
        job.stdout, "bindings", "all-reduce", "launcher", "ranks"
    )
    assert binding[0]["status"] == WARNING and "ranks 0, 1" in binding[0]["found"], job.output
    assert "share core 0" in binding[0]["found"] and "--bind-to none" in binding[0]["fix"]
    assert "over 2 devices" in reduced[0]["found"]
    assert joined[0]["found"] == "2 processes have joined" and joined[0]["ranks"] == launcher[0][
        "ranks"
    ] == [0, 1]


@pytest.mark.slow
@pytest.mark.mpi
def test_an_mpi_that_is_not_mpirun_s(tmp_path):
    """Each rank believes that it is alone, as MPI goes, so they cannot join: rank 0 prints one
    list.
    """
    require("openmpi5")
    library = pathlib.Path(sys.prefix) / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip("Open MPI's library is not in this environment")
    job = mpirun(
        2,
        [*DOCTOR, "--json", "--run_dir", str(tmp_path)],
        "mpich",
        env={"MPI4PY_LIBMPI": str(library)},
    )
    assert job.returncode == 1 and not job.left, job.output
    (problem,) = bad(read(job.stdout, "ranks")[0])
    assert (
        "started 2 processes, but mpi4py sees 1" in problem["found"]
        and "libmpi.so.12" in problem["fix"]
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_a_host_whose_name_is_loopback_is_named(tmp_path):
    with TwoHosts(tmp_path, loopback=1) as hosts:
        job = hosts.mpirun([*DOCTOR, "--json", "--run_dir", str(tmp_path)])
        assert job.returncode == 1 and not job.left, job.output
        (line,) = bad(read(job.stdout, "ranks")[0])
        assert (
            line["status"] == FAILURE
            and f"give {hosts.names[1]} its network address" in line["fix"]
        )
        assert f"rank 1: its host name {hosts.names[1]} resolves to 127.0.1.1" in line["found"]


@pytest.mark.slow
@pytest.mark.mpi
def test_two_hosts_that_reach_each_other(tmp_path):
    with TwoHosts(tmp_path) as hosts:
        job = hosts.mpirun([*DOCTOR, "--json", "--run_dir", str(tmp_path)])
        assert job.returncode == 0 and not job.left, job.output
        network, reduced = read(job.stdout, "network", "all-reduce")
        assert [check["found"] for check in network] == ["1 other host reached"]
        assert network[0]["ranks"] == [0, 1] and "over 2 devices" in reduced[0]["found"]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_does_not_come_is_silent(tmp_path):
    """Every rank but that one prints that it waits."""
    script = AFTER.format("os.environ['OMPI_COMM_WORLD_RANK'] == '2' and time.sleep(60)")
    env = {"JAXDP_TIMEOUT": "10"}
    job = mpirun(3, ["-c", script, str(tmp_path)], env=env, timeout=60)
    assert job.returncode == 1 and job.seconds < 50 and not job.left, job.output
    (line,) = bad(read(job.stdout, "ranks")[0])
    assert "MPI_Init waits" in line["found"] and "does not print this line" in line["fix"]
    assert re.findall(r"rank (\d) \(host \S+\): MPI_Init waits", job.stderr) == ["1"]


@pytest.mark.slow
def test_a_rank_without_jax_is_named_and_prints_why(tmp_path):
    """It cannot join: rank 0 names it in its list, and it prints the cause."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('planted')\n")
    envs = ranks(2, f"127.0.0.1:{port()}", JAXDP_TIMEOUT="4")
    envs[1]["PYTHONPATH"] = str(tmp_path)
    first, second = processes([*DOCTOR, "--json", "--run_dir", str(tmp_path)], envs)
    assert first.returncode == 1 and first.seconds < 30 and not first.left, first.output
    (missing,) = bad(read(first.stdout, "ranks")[0])
    assert "rank 1 of 2 did not come within" in missing["found"]
    assert (
        "ImportError: planted" in second.stderr
        and not second.stdout
        and not list(tmp_path.glob(".jaxdp*"))
    )


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        command = [*DOCTOR, "--json", "--run_dir", str(tmp_path)]
        first, _ = processes(command, ranks(2, f"127.0.0.1:{number}", JAXDP_TIMEOUT="4"))
    (line,) = bad(read(first.stdout, "ranks")[0])
    assert first.returncode == 1 and not first.left, first.output
    assert f"rank 0 cannot listen on port {number}" in line["found"] and "another" in line["fix"]


@pytest.mark.slow
def test_a_rank_that_opens_no_devices_is_named(tmp_path):
    """It cannot join, and rank 0 prints what rank 1 reported as the cause."""
    envs = ranks(2, f"127.0.0.1:{port()}", JAXDP_TIMEOUT="20")
    envs[1]["JAX_PLATFORMS"] = "cuda"
    first, second = processes([*DOCTOR, "--json", "--run_dir", str(tmp_path)], envs)
    assert first.returncode == 1 and not first.left and not second.stdout, (
        first.output + second.output
    )
    (line,) = bad(read(first.stdout, "ranks")[0])
    assert (
        line["found"].startswith("rank 1 (host")
        and "JAX_PLATFORMS: 'cuda' cannot be used" in line["found"]
    ), line
    assert "set it to cpu" in line["fix"]


@pytest.mark.slow
def test_ranks_with_other_packages_are_named(tmp_path):
    info = tmp_path / "optax-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 99.0\n")
    both = ranks(2, f"127.0.0.1:{port()}", JAXDP_TIMEOUT="20")
    both[1]["PYTHONPATH"] = str(tmp_path)
    first, _ = processes([*DOCTOR, "--json", "--run_dir", str(tmp_path)], both)
    assert first.returncode == 1, first.output
    (line,) = bad(read(first.stdout, "versions")[0])
    assert "has optax=99.0, but rank 0" in line["found"] and line["ranks"] == [0]


def test_a_host_that_is_not_reached_is_named():
    """Of three hosts, one listens and one does not; a rank of the first host asks none of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        fact = {"boot": "1", "addresses": [], "network": "n", "outward": "127.0.0.1"}
        facts = [
            {**fact, "host": "a", "port": number},
            {**fact, "host": "b", "port": port()},
            {**fact, "host": "c", "port": number},
            {**fact, "host": "a", "port": port()},
        ]
        closed, reached = resources.check_reach(0, facts)
        assert closed.status == FAILURE and "rank 1 (host b) is not reached from a" in closed.found
        assert reached == ok("network", "1 other host reached")
        (other,) = resources.check_reach(1, facts[:2])
        assert other == reached
        assert [*resources.check_reach(3, [facts[3]] * 4)] == []


def test_a_check_that_raises_or_hangs_is_a_line():
    ended = threading.Event()

    def broken():
        yield ok("first", "well")
        raise UsageError("x: 3 is wrong: use 4")

    def slow():
        ended.wait()
        yield ok("slow", "well")

    checks = {"broken": broken(), "slow": slow(), "well": [ok("last", "well")]}
    try:
        raised, late, last = run_checks(checks, 0.3)
    finally:
        ended.set()
    assert raised.status == FAILURE and "UsageError: x: 3 is wrong: use 4" in raised.found
    assert late == failure("slow", "no answer within 0.3 s", late.fix)
    assert last == ok("last", "well")


def test_an_error_message_ends_in_its_fix():
    assert of_text("x", "x: 3 is wrong: use 4") == failure("x", "x: 3 is wrong", "use 4")
    assert of_text("x", "a: b; do c") == failure("x", "a: b", "do c")
    assert of_text("x", "broken") == failure("x", "broken")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"JAXDP_NUM_PROCESSES": "2"}, "JAXDP_PROCESS_ID is not set"),
        ({"JAXDP_TIMEOUT": "soon"}, "JAXDP_TIMEOUT='soon' is not a number of seconds above 0"),
    ],
)
def test_wrong_variables_are_an_error(env, text):
    """In the words of a run, which refuses them too."""
    done = subprocess.run(
        [sys.executable, *DOCTOR],
        cwd=ROOT,
        env=environment(env, 1),
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and text in line, done


ENDS = """
import json, os, time
from jaxdp.doctor import examine
from jaxdp.doctor.findings import Stage

def killed(send):
    os.kill(os.getpid(), 9)

def refused(send):
    print("noise", flush=True)
    send(Stage("imports", 9, [], ["a", "b"]))
    os.write(2, b"jaxdp: x: do y\\n")
    os._exit(2)

def broken(send):
    raise ValueError("planted")

def asleep(send):
    send(Stage("devices", 0.1, [], ["a"]))
    time.sleep(60)

for work in (killed, refused, broken, asleep):
    stage, failed = examine.follow(work)
    print(json.dumps([stage.name, failed.name, failed.found, failed.fix]))
"""


def test_how_the_process_that_joins_has_ended():
    """In a process without JAX, whose threads would not be in a fork; nor has the doctor's."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    killed, refused, broken, asleep = map(json.loads, ended.stdout.splitlines())
    assert killed[:3] == ["checks", "checks", "killed by SIGKILL"]
    assert refused == ["imports", "imports", "x", "do y"]
    assert broken[2] == f"{SILENT}: ValueError: planted"
    assert asleep[:3] == ["devices", "devices", "no answer within 0.1 s"]
    aborted = "F1123 20:00:00.000000 12 flags.cc:234] Unknown flag in XLA_FLAGS: --x\n"
    cause = "jaxdp: rank 1 (host b) ends: rank 0 (host a) has gone: see what it printed\n"
    assert "jaxlib does not know it" in examine.problem("devices", SILENT, aborted).fix
    failed = examine.problem("devices", SILENT, aborted + cause)
    assert failed == failure("devices", "rank 0 (host a) has gone", "see what it printed")


def cores(*sets, available=8, limit=math.inf):
    fact = {"host": "a", "boot": "1", "available": available, "limit": limit}
    other = {**fact, "host": "b", "cores": [0]}
    return [*({**fact, "cores": list(s)} for s in sets), other]


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        (cores(range(4), range(4, 8)), OK, "2 ranks with 8 cores"),
        (cores(range(8), range(8)), OK, "2 ranks with 8 cores"),
        (cores([0], [0]), WARNING, "ranks 0, 1 share core 0"),
        (cores([0, 1], [0], [1]), WARNING, "ranks 0, 1, 2 share 2 cores"),
        (cores([0], [1]), WARNING, "2 ranks with 2 cores of the host's 8"),
        (cores(range(8), limit=2.5), WARNING, "allows 2.5"),
        (cores(range(8), range(8), limit=1.0), WARNING, "1 processors' worth"),
    ],
)
def test_bindings(facts, status, text):
    check = resources.check_bindings(0, facts)
    assert check.status == status and text in check.found and bool(check.fix) == (status != OK)


def test_versions_that_do_not_fit():
    numpy = versions.installed("numpy")
    requirements = [
        "numpy>=99",
        "no-such-package>=1",
        'rich<1; extra == "mpi"',
        'jax<0.1; extra == "other"',
    ]
    wrong = {check.name: check for check in versions.unmet(requirements)}
    text = f"{numpy}; jaxdp needs numpy>=99"
    assert wrong["numpy"] == failure("numpy", text, "pip install -U 'numpy>=99'")
    assert "not installed" in wrong["no-such-package"].found
    assert "rich" in wrong and "jax" not in wrong
    assert not [*versions.unmet(importlib.metadata.requires(versions.JAXDP))]


def test_variables_that_surprise():
    env = {"JAX_DEBUG_NANS": "True", "JAXDP_TIMOUT": "5", "http_proxy": "p:1", "NPROC": "all"}
    checks = [*versions.check_settings(2, env)]
    assert {re.match(r"\w+", check.found)[0] for check in checks} == {*env}
    assert {check.status for check in checks} == {WARNING}
    fine = {
        "http_proxy": "p:1",
        "JAX_ENABLE_X64": "0",
        "JAXDP_SILENCE": "120",
        "JAXDP_RESTARTS": "0",
    }
    fine["JAXDP_BEGAN"] = "1.5"
    assert [c.status for c in versions.check_settings(1, fine)] == [OK]


def test_gpus_need_a_plug_in(tmp_path, monkeypatch):
    """A host as Linux shows it: devices in /dev, a plug-in among the installed packages."""

    def judge():
        return [(c.status, c.found) for c in versions.check_gpus(str(tmp_path))]

    if versions.plugins():
        pytest.skip("a plug-in is installed")
    assert judge() == [(OK, "none, and no plug-in for one")]
    (tmp_path / "nvidia0").touch()
    assert judge() == [
        (WARNING, "1 NVIDIA GPU, but JAX has no CUDA plug-in here: it would compute on the CPU")
    ]
    plant(tmp_path, "0.4.30")
    monkeypatch.syspath_prepend(tmp_path)
    (plugin,) = versions.check_gpus(str(tmp_path))
    assert plugin.status == FAILURE and "0.4.30, but jaxlib is" in plugin.found
    assert "jax[cuda12]==" in plugin.fix


def test_a_plug_in_needs_gpus(tmp_path, monkeypatch):
    if versions.plugins():
        pytest.skip("a plug-in is installed")
    jaxlib = versions.installed("jaxlib")
    plant(tmp_path, jaxlib)
    monkeypatch.syspath_prepend(tmp_path)
    (plugin,) = versions.check_gpus(str(tmp_path))
    assert plugin.status == WARNING and "there is no GPU" in plugin.found
    (tmp_path / "nvidia0").touch()
    (plugin,) = versions.check_gpus(str(tmp_path))
    assert plugin == ok("gpu", f"1 NVIDIA GPU, jax-cuda12-plugin {jaxlib}")


def plant(folder, version):
    """Make a folder of packages with a plug-in of this version."""
    info = folder / f"jax_cuda12_plugin-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: jax-cuda12-plugin\nVersion: {version}\n"
    (info / "METADATA").write_text(text)


def test_room_for_checkpoints(tmp_path):
    (check,) = resources.check_run_dir(tmp_path / "a" / "b")
    assert check.status in (OK, WARNING)
    (tmp_path / "file").write_text("")
    (check,) = resources.check_run_dir(tmp_path / "file")
    assert check.status == FAILURE and "Not a directory" in check.found
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".jaxdp")]


def test_what_ranks_have_in_common_is_one_line():
    """Of findings that are ok, and differ, that of rank 0."""
    first = [ok("jax", "0.10"), ok("memory", "3 GB free")]
    second = [ok("jax", "0.10"), ok("memory", "2 GB free"), failure("disk", "full", "make room")]
    assert merge([first, second, second]) == [
        ok("jax", "0.10", ranks=(0, 1, 2)),
        ok("memory", "3 GB free", ranks=(0,)),
        failure("disk", "full", "make room", ranks=(1, 2)),
    ]


def test_a_slow_all_reduce():
    timed = {"seconds": 0.01, "devices": 2, "sums": [3.0] * 4}

    def judged(**more):
        return resources.check_all_reduce(**{**timed, **more})

    assert judged().status == OK
    slow = judged(seconds=2.0)
    assert slow.status == WARNING and "less than 6 MB/s" in slow.found


def test_a_wrong_sum_on_any_device_is_seen():
    timed = resources.all_reduce()
    assert resources.check_all_reduce(**timed).status != FAILURE
    assert len(timed["sums"]) == 2 * timed["devices"] == 16
    for i, total in enumerate(timed["sums"]):
        for wrong in (total + 1, float("nan")):
            sums = [*timed["sums"][:i], wrong, *timed["sums"][i + 1 :]]
            checked = resources.check_all_reduce(**timed | {"sums": sums})
            assert checked.status == FAILURE and "the sum is wrong" in checked.found


def test_a_list_merges_what_ranks_have_in_common():
    disk = failure("disk", "full", "make room", ranks=(1,))
    examined = [ok("jax", "0.10", ranks=(0, 1)), disk, ok("all", "fine")], ["a", "b"]
    text = as_text(*examined).splitlines()
    assert text[1:] == [
        "ok       jax   0.10",
        "failure  disk  rank 1 (host b): full",
        "               fix: make room",
        "ok       all   fine",
        "2 ok, 1 failure",
    ]
    checks = as_json(*examined)["checks"]
    assert checks[1] == {
        "name": "disk",
        "status": "failure",
        "found": "full",
        "fix": "make room",
        "ranks": (1,),
    }
