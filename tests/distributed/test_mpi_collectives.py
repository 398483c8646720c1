"""The eager collectives, in one job of four real processes; and alone, where they must give the same answers."""

import numpy as np
import pytest

from launch import ROOT, SUPPORT, mpirun, processes

pytestmark = pytest.mark.mpi
TABLE = """\
rank                            0    1    2    3
before                          1    2    3    4
allreduce(x)                   10   10   10   10
groups=[[0, 1], [2, 3]]         3    3    7    7
groups=[[0, 1, 2], [3]]         6    6    6    4
groups=[[0, 1, 2]]              6    6    6    4
"""


@pytest.mark.slow
def test_every_collective_against_numpy_on_four_processes():
    job = mpirun(4, [str(SUPPORT / "mpi" / "collectives.py")], timeout=180, devices=2)
    assert job.returncode == 0, job.output
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("rank "))
    assert [line.rpartition(" ")[0] for line in lines] == [f"rank {r}: OK" for r in range(4)], job.output
    assert min(int(line.rpartition(" ")[2]) for line in lines) >= 700, job.output
    assert not job.left


def test_the_example_prints_rafs_table():
    job = mpirun(4, ["examples/allreduce.py"], timeout=60)
    assert job.returncode == 0, job.output
    assert TABLE in job.stdout, job.output
    documented = (ROOT / "examples" / "allreduce.py").read_text()
    assert all(line in documented for line in TABLE.splitlines())


@pytest.mark.slow
def test_the_example_runs_alone():
    (job,) = processes(["examples/allreduce.py"], [{}])
    assert job.returncode == 0, job.output
    assert job.stdout.splitlines()[-1].split() == ["allreduce(x)", "1"]


def test_alone_every_collective_is_the_identity():
    import jaxdp

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for op in ("sum", "prod", "min", "max", "avg"):
        assert np.array_equal(jaxdp.allreduce(x, op), x)
        assert np.array_equal(jaxdp.reduce_scatter(x, op), x)
        assert np.array_equal(jaxdp.reduce(x, op=op), x)
    for call in (jaxdp.allgather, jaxdp.broadcast, jaxdp.gather, jaxdp.scatter, jaxdp.all_to_all):
        assert np.array_equal(call(x), x)
    first, second = jaxdp.allreduce([x, np.int32(3)], groups=[])
    assert np.array_equal(first, x) and second == 3
    with pytest.raises(jaxdp.UsageError, match="float64"):
        jaxdp.allreduce(np.ones(3))
    with pytest.raises(jaxdp.UsageError, match="itself"):
        jaxdp.send(x, 0)
