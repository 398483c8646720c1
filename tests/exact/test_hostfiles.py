"""The commands of docs/hosts.md: with a hostfile, Open MPI and MPICH start one process on each of
two hosts; torchrun.

Intel MPI has MPICH's commands: `pip install --no-deps --prefix .impi impi-rt`, then pytest -k mpich
with JAXDP_TEST_MPICH_PREFIX=.impi and `.impi/bin` first in PATH.
"""

import json

import pytest

from cli_runs import DIGITS, jaxdp, records
from launch import port, processes, require
from two_hosts import TwoHosts

SHORT = ["--steps", "12", "--parallel.reduction", "exact"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The digest of the parameters that one process computes on one device."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    jaxdp(*DIGITS, *SHORT, "--parallel.devices", "1", "--run_dir", run_dir)
    return records(run_dir, "final")[0]["params_sha256"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", ["openmpi5", "mpich"])
def test_two_hosts_of_a_hostfile_equal_one_process(tmp_path, alone, which):
    require(which)
    with TwoHosts(tmp_path) as hosts:
        job = hosts.from_hostfile(
            which, ["train.py", *DIGITS, *SHORT, "--run_dir", str(tmp_path / "run")]
        )
    assert job.returncode == 0 and not job.left, job.output
    topology = json.loads((tmp_path / "run" / "env.json").read_text())["topology"]
    assert topology["hosts"] == hosts.names, topology
    (final,) = records(tmp_path / "run", "final")
    assert final["step"] == 12 and final["params_sha256"] == alone


@pytest.mark.slow
def test_two_agents_of_torchrun_equal_one_process(tmp_path, alone):
    pytest.importorskip("torch", reason="pip install torch")
    rendezvous = [
        "--nnodes",
        "2",
        "--nproc_per_node",
        "1",
        "--rdzv_id",
        "1",
        "--rdzv_backend",
        "c10d",
    ]
    command = ["-m", "torch.distributed.run", *rendezvous, "--rdzv_endpoint", f"127.0.0.1:{port()}"]
    train = ["train.py", *DIGITS, *SHORT, "--run_dir", str(tmp_path / "run")]
    agents = processes([*command, *train], [{}, {}], timeout=300)
    assert [agent.returncode for agent in agents] == [0, 0], [agent.output for agent in agents]
    assert records(tmp_path / "run", "final")[0]["params_sha256"] == alone
    assert json.loads((tmp_path / "run" / "env.json").read_text())["topology"]["processes"] == 2
