"""The eager collectives, in one job of four real processes; and alone, where they must give the
same answers.
"""

import numpy as np
import pytest

from launch import BACKENDS, ROOT, SUPPORT, mpirun, port, processes, ranks

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
@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_on_four_processes_equal_numpy(backend):
    which, env = BACKENDS[backend]
    job = mpirun(4, [str(SUPPORT / "mpi" / "collectives.py")], which, env, 180, devices=2)
    assert job.returncode == 0, job.output
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("rank "))
    assert [line.rpartition(" ")[0] for line in lines] == [f"rank {r}: OK" for r in range(4)], (
        job.output
    )
    assert min(int(line.rpartition(" ")[2]) for line in lines) >= 700, job.output
    assert not job.left


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_prints_rafs_table(backend):
    which, env = BACKENDS[backend]
    job = mpirun(4, [str(SUPPORT / "mpi" / "example.py"), "examples/allreduce.py"], which, env, 60)
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


@pytest.mark.slow
def test_ranks_in_different_calls_say_so_and_end_all():
    """Also one that waits inside JAX for a rank which has ended with an error."""
    script = """\
import jax, jaxdp, numpy
rank, devices = jaxdp.init().rank, jax.devices()
if rank == 2:
    jax.pmap(lambda x: jax.lax.psum(x, "i"), "i")(numpy.ones(1))
jaxdp.recv(1) if rank == 0 else jaxdp.allreduce(1.0)
"""
    jobs = processes(["-c", script], ranks(3, f"127.0.0.1:{port()}", JAXDP_TIMEOUT="5"))
    errors = "".join(job.stderr for job in jobs)
    assert [job.returncode for job in jobs] == [1, 1, 1], errors
    assert (
        "jaxdp: rank 1 did not come to send from rank 1 to rank 0 within 5 s\n" in jobs[0].stderr
    ), errors
    assert "jaxdp: rank 0, 2 did not come to allreduce(sum) within 5 s\n" in jobs[1].stderr, errors
    assert "has ended with code 1: see what it printed" in errors


@pytest.mark.slow
def test_a_rank_may_be_early_and_a_late_one_is_named():
    script = """\
import time, numpy, jax.numpy as jnp, jaxdp
context = jaxdp.init()
params = {"w": numpy.asarray(jnp.arange(3.0)) if context.is_root else numpy.zeros(3, "float32")}
print(jaxdp.broadcast_parameters(params)["w"].tolist(), flush=True)
if context.rank == 1:
    time.sleep(600)
jaxdp.partition_dataset(numpy.arange(9), 3)
"""
    jobs = processes(["-c", script], ranks(2, f"127.0.0.1:{port()}", JAXDP_TIMEOUT="5"))
    errors = "".join(job.stderr for job in jobs)
    assert all("[0.0, 1.0, 2.0]" in job.stdout.splitlines() for job in jobs), errors
    assert (
        "jaxdp: rank 1 did not come to 'check_same partition_dataset' within 5 s\n"
        in jobs[0].stderr
    ), errors
