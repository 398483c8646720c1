"""What is particular to `jaxdp.init(backend="mpi")`: how it starts, what it refuses, how it ends.
The tests of the collectives and of the five calls are in tests/distributed, for each backend."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxdp
from launch import BACKENDS, SUPPORT, Finished, mpirun, processes, ranks
from mpi import own_loop

MPI = [name for name in BACKENDS if name != "gloo"]
LOOP = """\
import os, signal, time, jaxdp, numpy as np
context = jaxdp.init(backend="mpi")
for step in range(1000):
    jaxdp.allreduce(np.ones(3, np.float32))
    if context.rank == 1 and step == 5:
        {fault}
"""


def last(job: Finished) -> str:
    """The error that was printed, which is one line."""
    lines = [line for line in job.stderr.splitlines() if line.startswith("jaxdp: ")]
    assert len(lines) == 1 and not job.left, job.output
    return lines[0]


def refusal(name):
    """What `init` says in a process that has not joined before."""
    program = f"import jaxdp\njaxdp.init(backend={name!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["mpj", "gloo", "nccl", "MPI", ""])
def test_another_backend_is_refused(name):
    assert f"backend: {name!r} is not known; give 'mpi', or" in refusal(name)


def test_it_needs_mpirun():
    assert re.search(r"another launcher \(none\): start .* with `mpirun", refusal("mpi"))


@pytest.mark.slow
@pytest.mark.mpi
def test_another_launcher_is_refused():
    jobs = processes(["-c", "import jaxdp; jaxdp.init(backend='mpi')"], ranks(2, "127.0.0.1:1"))
    for job in jobs:
        assert job.returncode == 2 and "another launcher (jaxdp)" in last(job), job.output


@pytest.mark.mpi
@pytest.mark.parametrize(
    "which", [x if x == "mpich" else pytest.param(x, marks=pytest.mark.slow) for x in MPI]
)
def test_each_mpi_connects_the_ranks(which):
    job = mpirun(2, [str(SUPPORT / "mpi" / "context.py"), '{"backend": "mpi"}'], which, timeout=60)
    assert job.returncode == 0 and not job.left and "Gloo" not in job.output, job.output
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert sorted((x["rank"], x["size"], x["local_rank"]) for x in lines) == [(0, 2, 0), (1, 2, 1)]
    assert [x["total"] for x in lines] == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", MPI)
def test_a_mesh_on_each_process_has_the_curve_of_one(which):
    job = mpirun(2, [own_loop.__file__, "meshes"], which, {"BACKEND": "mpi"}, devices=2)
    assert job.returncode == 0 and not job.left, job.output
    (got,) = json.loads(next(line for line in job.stdout.splitlines() if line.startswith("[[2")))
    np.testing.assert_allclose(got, own_loop.plain()[:21], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", MPI)
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("raise ValueError('a fault')", 1, "jaxdp: rank 1 (host HOST) failed: ValueError: a fault"),
        (
            "raise jaxdp.UsageError('x: 1 is bad; give 2')",
            2,
            "jaxdp: rank 1 (host HOST): x: 1 is bad; give 2",
        ),
        (
            "time.sleep(600)",
            1,
            "jaxdp: rank 1 did not come to allreduce(sum) within 3 s",
        ),
    ],
    ids=["error", "usage", "late"],
)
def test_a_rank_that_fails_is_named_and_ends_the_job(which, fault, code, words):
    script = LOOP.format(fault=fault)
    job = mpirun(3, ["-c", script], which, {"JAXDP_TIMEOUT": "3"}, timeout=60)
    assert job.returncode == code, job.output
    assert words.replace("HOST", jaxdp.current().hosts[0]) == last(job), job.output


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", MPI)
def test_mpirun_names_a_rank_that_is_killed(which):
    script = LOOP.format(fault="os.kill(os.getpid(), signal.SIGKILL)")
    job = mpirun(3, ["-c", script], which, timeout=60)
    assert job.returncode in (signal.SIGKILL, 128 + signal.SIGKILL) and not job.left, job.output
    named = "EXIT CODE: 9" if which == "mpich" else "process rank 1"
    assert named in job.output and job.seconds < 50, job.output


REFUSED = {
    "jaxdp.fit(str, (one, one), steps=1)": "backend: mpi serves loops of your own, and training needs JAX's",
    "jaxdp.init(backend='gloo')": "but this process already joined with init({'backend': 'mpi'})",
    "jaxdp.allreduce(one, 'men')": "rank 0: allreduce(men): op='men' is not one of sum, avg, prod",
    "update('batch')(one)": "axis_name: over MPI, 'batch' has the devices of this process alone",
    "membership.joined().put('a', 'b')": "backend: mpi has no coordinator, which 'put' needs",
}


@pytest.mark.slow
@pytest.mark.mpi
def test_what_needs_the_service_of_jax_is_refused():
    script = f"""\
import jaxdp, numpy as np, optax
from jaxdp.process import membership
context, one = jaxdp.init(backend="mpi"), np.ones(3, np.float32)
assert jaxdp.init() is context and context.backend == "mpi"
def update(axis):
    return lambda grads: jaxdp.distributed_optimizer(optax.sgd(1.0), axis).update(grads, None)
for call, words in {REFUSED!r}.items():
    try:
        eval(call)
    except jaxdp.UsageError as error:
        assert words in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError(call)
context.barrier("done")
print("all refused")
"""
    job = mpirun(2, ["-c", script], timeout=60)
    assert job.returncode == 0 and job.stdout.count("all refused") == 2, job.output


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", MPI)
def test_memory_that_is_not_of_numpy_is_sent_too(which):
    """Arrays of JAX by their addresses, as on a GPU whose memory MPI reads: here in that of the CPU."""
    script = """\
import jax.numpy as jnp, jaxdp
rank, here = jaxdp.init(backend="mpi").rank, (0, 1)
from jaxdp.mpi.mpi_collectives import run
x = [jnp.full((1, 5), rank + 1.0), jnp.arange(4, dtype=jnp.bfloat16)[None] + rank]
a, b = run("allreduce", "sum", x, here)
assert a.tolist() == [[3.0] * 5] and b.dtype == jnp.bfloat16 and b.tolist() == [[1, 3, 5, 7]]
assert [y.tolist() for y in run("broadcast", 1, x, here)] == [[[2.0] * 5], [[1, 2, 3, 4]]]
assert run("allgather", None, x, here)[1].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
assert run("allreduce", "max", x, here)[0].tolist() == [[2.0] * 5]
rows = [jnp.arange(6.0).reshape(2, 3) + rank]
assert run("scatter", 0, rows, here)[0].tolist() == [[0, 1, 2], [3, 4, 5]][rank : rank + 1]
assert run("reduce_scatter", "sum", rows, here)[0].tolist() == [[1, 3, 5], [7, 9, 11]][rank : rank + 1]
assert x[0].tolist() == [[rank + 1.0] * 5]
print("all sent")
"""
    job = mpirun(2, ["-c", script], which, timeout=60)
    assert job.returncode == 0 and job.stdout.count("all sent") == 2, job.output


@pytest.mark.slow
@pytest.mark.mpi
def test_inside_jit_the_mean_is_that_of_mpi4jax():
    """Or the lack of it is said in a line."""
    script = """\
import jax, jax.numpy as jnp, jaxdp, optax
rank, tx = jaxdp.init(backend="mpi").rank, jaxdp.distributed_optimizer(optax.sgd(1.0))
grads = {"a": jnp.arange(3.0) + rank, "b": jnp.full(2, 1.0 + rank, jnp.bfloat16), "n": jnp.int32(7)}
def update(grads, weight):
    return tx.update(grads, tx.init(grads), weight=weight)[0]
eager, compiled = update(grads, rank + 1), jax.jit(update)(grads, rank + 1)
assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all() and x.dtype == y.dtype, eager, compiled))
assert jax.numpy.isnan(jax.jit(update)(grads, -1.0)["a"]).all()
print("all equal")
"""
    job = mpirun(2, ["-c", script], timeout=60)
    try:
        import mpi4jax  # noqa: F401
    except ImportError:
        assert job.returncode == 2 and "inside jit, MPI needs mpi4jax" in job.stderr, job.output
    else:
        assert job.returncode == 0 and job.stdout.count("all equal") == 2, job.output
