"""Five calls make a loop of one's own data-parallel, and its losses are those of one process."""

import json
import re
import runpy
import socket
import sys

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import data
from jaxdp.data import Digits
from jaxdp.interop.metrics import _mean
from jaxdp.interop.partition import check_sizes
from jaxdp.process.context import shutdown
from launch import BACKENDS, ROOT, SUPPORT, mpirun, port, processes, ranks, require, together
from mpi import own_loop

SCRIPT = SUPPORT / "mpi" / "own_loop.py"
PAGE = (ROOT / "docs" / "own_loop.md").read_text()
AXIS, N = "batch", 8


@pytest.fixture(scope="module")
def curve():
    return own_loop.plain()


def printed(job):
    assert job.returncode == 0 and not job.left, job.output
    return json.loads(next(line for line in job.stdout.splitlines() if line.startswith("[[2")))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_ranks_with_empty_batches_train_as_one(curve, backend):
    """And the rest of what `ranks` looks at: trees of all types, metrics, gradients, disagreements."""
    which, env = BACKENDS[backend]
    (got,) = printed(mpirun(3, [str(SCRIPT), "ranks"], which, env, devices=2))
    np.testing.assert_allclose(got, curve, rtol=1e-5)
    assert len(curve) == 42 and np.mean(curve[-21:]) < 0.7 * np.mean(curve[:21])


@pytest.mark.slow
@pytest.mark.mpi
def test_two_processes_of_two_devices_have_it_too(curve):
    """Through an axis of pmap over all four; and by jit over each one's own, with the mean between
    the processes.
    """
    axis, mesh = printed(mpirun(2, [str(SCRIPT), "devices"], devices=2))
    np.testing.assert_allclose(axis, curve, rtol=1e-5)
    np.testing.assert_allclose(mesh, curve[:21], rtol=1e-5)


@pytest.fixture
def alone():
    """`init` of this process by itself, forgotten afterwards."""
    yield
    shutdown()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_prints_equal_losses_under_mpirun(alone, capsys, backend):
    runpy.run_path(str(ROOT / "examples" / "own_loop.py"), run_name="__main__")
    which, env = BACKENDS[backend]
    job = mpirun(2, [str(SUPPORT / "mpi" / "example.py"), "examples/own_loop.py"], which, env)
    assert job.returncode == 0 and not job.left, job.output
    texts = (capsys.readouterr().out, job.stdout)
    curves = [
        np.array(re.findall(r"update +(\d+)  loss ([\d.]+)  accuracy ([\d.]+)", t), float)
        for t in texts
    ]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5, atol=1e-6)
    assert curves[0].shape == (5, 3) and curves[0][-1, 1] < 0.5 < 2 < curves[0][0, 1]
    text = (ROOT / "examples" / "own_loop.py").read_text()
    assert set(re.findall(r"# (\d)\n", text)) == set("12345")
    documented = np.array(
        re.findall(r"    update +(\d+)  loss ([\d.]+)  accuracy ([\d.]+)", text), float
    )
    np.testing.assert_allclose(curves[0], documented, rtol=1e-3)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tutorial_on_each_backend_is_as_alone(alone, capsys, tmp_path, backend):
    """The lines of docs/coming_from.md, which name the backend themselves."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    section = page.partition("### The tutorial, line by line\n")[2]
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    plain = block.replace('jaxdp.init(backend="mpi")', "jaxdp.init()")
    exec(compile(plain, "docs/coming_from.md", "exec"), {})
    script = tmp_path / "tutorial.py"
    script.write_text(plain if backend == "gloo" else block)
    job = mpirun(2, [str(script)], BACKENDS[backend][0])
    assert plain != block and job.returncode == 0 and not job.left, job.output
    for line in ["rank 0 has data 1.0", "rank 1 has data 1.0", "rank 0 has total 2.0"]:
        assert job.stdout.count(line) == 1, job.output
    losses = [
        [float(x) for x in re.findall(r"^epoch \d  loss (.*)$", text, re.MULTILINE)]
        for text in (capsys.readouterr().out, job.stdout)
    ]
    assert len(losses[0]) == 3 and losses[0][2] < 1.0 < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


@pytest.mark.mpi
@pytest.mark.slow
def test_the_resnet_example_runs_with_and_without_mpi():
    alone = [sys.executable, "examples/needle_resnet9.py", "--fake"]
    two = [require("openmpi5"), "--bind-to", "none", "--oversubscribe", "-np", "2", *alone]
    for job in together([(alone, {}), (two, {})], timeout=180):
        assert job.returncode == 0 and not job.left, job.output
        (line,) = re.findall(r"epoch 0: [\d.]+ s, test accuracy ([\d.]+)\n", job.stdout)
        assert 0 <= float(line) < 0.3  # noise


@pytest.mark.slow
def test_the_blocks_of_the_page_run(alone, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space = {}
    for block in blocks:
        exec(compile(block, "docs/own_loop.md", "exec"), space)
        if block is blocks[0]:  # what is printed last is the loss of the whole set
            whole = float(space["loss_of"](space["params"], space["images"], space["labels"]))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert (
        len(blocks) == 4
        and len(losses) == 3
        and space["epoch"] == 1
        and losses[-1] == pytest.approx(whole, abs=1e-4)
    )
    assert losses == pytest.approx(
        [float(x) for x in re.findall(r"^epoch \d  loss (.*)$", PAGE, re.MULTILINE)], abs=1e-3
    )
    assert np.isfinite(jax.tree.leaves(space["params"])[0]).all()
    assert all(
        name in PAGE for name in ("partition_dataset", "broadcast_parameters", "allreduce_metrics")
    )


SOURCES = {  # the form of a batch is that of an example
    "pair of arrays": lambda x, y: (x, y),
    "list of two arrays": lambda x, y: [x, y],
    "dict of arrays": lambda x, y: {"a": x, "labels": y},
    "array": lambda x, y: x,
    "examples as pairs": lambda x, y: [(a, int(b)) for a, b in zip(x, y)],
    "examples as dicts": lambda x, y: [{"inputs": a} for a in x],
    "examples as arrays": lambda x, y: list(x),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_batch_has_the_form_of_an_example(name):
    x, y = np.arange(14, dtype=np.float32).reshape(7, 2), np.arange(7, dtype=np.int32)
    batches = list(jaxdp.partition_dataset(SOURCES[name](x, y), 3, shuffle=False))
    assert len(batches) == 3
    want = {"array": x, "examples as arrays": x, "dict of arrays": {"a": x, "labels": y}}
    want = (
        want
        | {"examples as dicts": {"inputs": x}}
        | dict.fromkeys(["pair of arrays", "list of two arrays", "examples as pairs"], (x, y))
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(lambda *b: np.concatenate(b), *batches),
        want[name],
    )
    assert jax.tree.structure(batches[0]) == jax.tree.structure(want[name])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0.7, 0.3], r"sizes: \[0.7, 0.3\] has 2 entries for 1 ranks; give one for each rank"),
        ([0.5], r"sizes: \[0.5\] add up to 0.5; they must add up to 1"),
        ([0], r"sizes\[0\]: 0 is not a part of a batch; give a number above 0, at most 1"),
    ],
)
def test_shares_that_are_none_are_refused(sizes, message):
    with pytest.raises(jaxdp.UsageError, match=message):
        jaxdp.partition_dataset(np.arange(9), 3, sizes=sizes)
    with pytest.raises(
        jaxdp.UsageError, match=r"sizes\[2\]: 0.01 of 32 examples is no row; make the batch larger"
    ):
        check_sizes([0.7, 0.29, 0.01], 3, 32)
    with pytest.raises(
        jaxdp.UsageError,
        match="sizes: the devices of a rank have equal shares; give sizes or devices",
    ):
        jaxdp.partition_dataset(np.arange(9), 3, sizes=[1], devices=2)


def test_the_shares_of_the_tutorial_split_each_batch():
    assert np.round(check_sizes([0.7, 0.2, 0.1], 3, 100) * 100).tolist() == [0, 70, 90, 100]
    everything = np.concatenate([*jaxdp.partition_dataset(np.arange(97), 24, sizes=[1.0])])
    assert (
        everything.tolist()
        == np.concatenate([*jaxdp.partition_dataset(np.arange(97), 24)]).tolist()
    )


def test_a_mixture_and_a_sized_stream_are_partitioned():
    mixture = data.Mixture(
        {"a": {"inputs": np.arange(30)}, "b": {"inputs": np.arange(1000, 1010)}}, {"a": 1, "b": 3}
    )
    rows = np.concatenate([batch["inputs"] for batch in jaxdp.partition_dataset(mixture, 8)])
    assert len(rows) == 40 and (rows >= 1000).sum() == 30
    stream = data.Stream(lambda: iter(range(100)), size=20)
    assert np.concatenate([x["inputs"] for x in jaxdp.partition_dataset(stream, 8)]).tolist() == [
        *range(20)
    ]
    with pytest.raises(
        jaxdp.UsageError, match="dataset: a stream needs a size to be partitioned by epoch"
    ):
        jaxdp.partition_dataset(data.Stream(lambda: iter(range(100))), 8)


def test_the_package_lists_what_there_is():
    assert {*jaxdp.__all__, "__version__"} <= {*dir(jaxdp)} and "fit" in dir(jaxdp)
    assert {*data.SOURCES} <= {*dir(data)}


def test_a_data_set_with_read_never_reads_zero_rows():
    class Strict(Digits):
        def read(self, indices):
            assert len(indices)
            return super().read(indices)

    batches = jaxdp.partition_dataset(Strict(), 500, shuffle=False)
    assert [len(b["labels"]) for b in batches] == [500, 500, 437]
    batches.numbers = np.array([-1])  # a rank without rows
    assert [b["inputs"].shape for b in batches] == [(0, 8, 8, 1)] * 3


def test_each_iteration_is_the_next_epoch_unless_set():
    batches = jaxdp.partition_dataset(np.arange(10), 4, seed=5)

    def run():
        return np.concatenate(list(batches)).tolist()

    first, second, third = run(), run(), run()
    assert sorted(first) == sorted(second) == list(range(10)) and first != second != third
    batches.set_epoch(1)
    assert [run(), run()] == [second, third]
    assert np.concatenate(list(jaxdp.partition_dataset(np.arange(10), 4, seed=6))).tolist() != first
    next(iter(batches))  # an iteration that is left early counts
    assert batches.epoch == 4


def test_dealt_to_devices_every_batch_has_one_shape():
    seen = []
    for (x, y), mask in jaxdp.partition_dataset(
        (np.arange(21) * 2.0, np.arange(21)), 10, devices=N
    ):
        assert x.shape == y.shape == mask.shape == (N, 2)
        np.testing.assert_array_equal(x, 2 * y)
        seen += y[mask].tolist()
    assert sorted(seen) == list(range(21)) and mask.sum() == 1


@pytest.mark.parametrize("examples", [1, 7, 12])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_sampler_gives_every_rank_equally_many(examples, size):
    def make(rank, **kw):
        return jaxdp.DistributedSampler(examples, rank=rank, size=size, seed=2, **kw)

    ranks = [list(make(r)) for r in range(size)]
    assert {len(r) for r in ranks} == {len(make(0))} == {-(-examples // size)}
    whole = np.stack(ranks, 1).reshape(-1)  # dealt in turn
    assert sorted(whole[:examples]) == list(range(examples))
    np.testing.assert_array_equal(
        whole, np.resize(whole[:examples], whole.size)
    )  # and then from the start again
    dropped = [list(make(r, drop_last=True)) for r in range(size)]
    np.testing.assert_array_equal(
        np.stack(dropped, 1).reshape(-1), whole[: examples // size * size]
    )
    plain = [list(make(r, shuffle=False)) for r in range(size)]
    np.testing.assert_array_equal(
        np.stack(plain, 1).reshape(-1), np.resize(np.arange(examples), whole.size)
    )


def test_a_sampler_keeps_its_order_until_set_epoch():
    sampler = jaxdp.DistributedSampler(range(50))
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first and sorted(sampler) == sorted(first)


def test_batches_of_indices_are_those_of_the_partition():
    """On every rank equally many lists, of which the last may be empty; nothing twice, nothing left
    out.
    """
    samplers = [jaxdp.DistributedSampler(21, seed=3, rank=r, size=3) for r in range(3)]
    batches = [s.batches(10) for s in samplers]
    for epoch, whole in zip(range(3), [jaxdp.partition_dataset(np.arange(21), 10, seed=3)] * 3):
        for s in samplers:
            s.set_epoch(epoch)
        ranks = [list(b) for b in batches]
        assert {len(r) for r in ranks} == {len(b) for b in batches} == {3}
        assert [len(r[-1]) for r in ranks] == [1, 0, 0]
        for one, *parts in zip(whole, *ranks):
            assert sorted(one) == sorted(np.concatenate(parts))
    dropped = jaxdp.DistributedSampler(21, drop_last=True, rank=1, size=3).batches(10)
    assert [len(b) for b in dropped] == [3, 3] and len(dropped) == 2


def test_alone_a_broadcast_gives_back_what_it_got():
    tree = own_loop.everything(1)
    assert jax.tree.map(own_loop.bits, jaxdp.broadcast_parameters(tree)) == jax.tree.map(
        own_loop.bits, tree
    )
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    state = jaxdp.broadcast_parameters(nnx.state(model))
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    # On several devices, as pmap and a local mesh leave them.
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (P(), P(AXIS)):
        placed = jax.device_put(np.arange(N, dtype=np.float32), jax.NamedSharding(mesh, spec))
        got = jaxdp.broadcast_parameters([placed])[0]
        assert got.sharding == placed.sharding and got.committed
        np.testing.assert_array_equal(got, placed)


GRADS = {"w": (3, 4), "scale": (), "half": (5,)}


def gradients(seed=0):
    """One tree for each of N devices [device, ...]."""
    rng = np.random.default_rng(seed)

    def make(shape):
        return jnp.asarray(rng.normal(size=(N, *shape)), jnp.float32)

    tree = jax.tree.map(make, GRADS, is_leaf=lambda x: isinstance(x, tuple))
    return tree | {"half": tree["half"].astype(jnp.bfloat16)}


@pytest.mark.parametrize("weights", [None, [3, 1, 0, 2, 5, 0, 1, 4]])
def test_over_an_axis_one_operand_averages_by_weight(weights):
    grads, tx = gradients(), jaxdp.distributed_optimizer(optax.sgd(1.0), AXIS)
    counts = np.ones(N) if weights is None else np.array(weights)
    grads = jax.tree.map(lambda g: g.at[counts == 0].set(np.nan), grads)

    def update(g, m):
        return tx.update(g, tx.init(g), **({} if weights is None else {"weight": m}))[0]

    mapped = jax.pmap(update, AXIS)
    updates = mapped(grads, jnp.asarray(counts, jnp.int32))

    def share(g):
        return (
            -np.tensordot(counts[counts > 0], np.asarray(g, np.float64)[counts > 0], 1)
            / counts.sum()
        )

    for name, got in updates.items():
        assert got.dtype == grads[name].dtype
        rtol = 1e-2 if name == "half" else 1e-5
        np.testing.assert_allclose(
            np.asarray(got, np.float64), [share(grads[name])] * N, rtol=rtol, atol=rtol / 10
        )
    text = mapped.lower(grads, jnp.asarray(counts, jnp.int32)).as_text()
    assert text.count("all_reduce") == 1  # of the halves too, as float32, and of the weight


def test_of_no_weight_at_all_the_gradients_are_zeros():
    grads = {"w": jnp.full(3, np.nan), "n": jnp.int32(4)}
    alone, axis = (jaxdp.distributed_optimizer(optax.identity(), name) for name in (None, AXIS))
    got = alone.update(grads, alone.init(grads), weight=0)[0]
    np.testing.assert_array_equal(got["w"], np.zeros(3))
    mapped = jax.pmap(lambda g, m: axis.update(g, axis.init(g), weight=m)[0], AXIS)
    got = mapped(jax.tree.map(lambda x: jnp.stack([x] * N), grads), jnp.zeros(N))
    np.testing.assert_array_equal(got["w"], np.zeros((N, 3)))
    np.testing.assert_array_equal(got["n"], np.full(N, 4))


@pytest.mark.slow
def test_alone_it_is_the_optimizer_itself():
    params = {"w": jnp.arange(4.0)}
    for tx in (
        optax.adam(0.1),
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.inject_hyperparams(optax.sgd)(0.1),
    ):
        own, state = jaxdp.distributed_optimizer(tx), tx.init(params)
        for weight in ({}, {"weight": 3}, {"weight": jnp.float32(2)}):
            want = tx.update(params, state, params)
            got = own.update(params, state, params, **weight)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
            state = want[1]
    search = jaxdp.distributed_optimizer(
        optax.scale_by_backtracking_linesearch(3)
    )  # takes a function

    def value_fn(p):
        return (p["w"] ** 2).sum()

    extra = {"value": value_fn(params), "grad": params, "value_fn": value_fn}
    updates, _ = search.update(params, search.init(params), params, **extra)
    assert np.isfinite(updates["w"]).all()


def mapped_with_vma(grads):
    tx = jaxdp.distributed_optimizer(optax.sgd(1.0), AXIS)
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    def update(w, x):
        grads = jax.grad(lambda w: (w * x).sum())(w)
        return tx.update(grads, tx.init(grads))[0]

    return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))(
        jnp.ones(()), grads
    )


WRONG = {
    "called inside jit": lambda g: jax.jit(lambda g: _update(None)(g))(g),
    "no axis 'batch' is mapped here": lambda g: _update(AXIS)(g),
    "weight: -1.0 is not a number of examples": lambda g: _update(None, weight=-1)(g),
    "weight: nan is not": lambda g: _update(None, weight=np.nan)(g),
    r"weight: of shape \(2,\); give one number": lambda g: _update(None, weight=np.ones(2))(g),
    "summed the gradients over 'batch' already; give it check_vma=False": lambda g: mapped_with_vma(
        g
    ),
    "batch_size: 0 is not positive": lambda g: jaxdp.partition_dataset(np.arange(3), 0),
    "batch_size: 2.0 is not an integer; give one": lambda g: jaxdp.partition_dataset(
        np.arange(3), 4 / 2
    ),
    "seed: None is not an integer; give one": lambda g: jaxdp.partition_dataset(
        np.arange(3), 2, None
    ),
    "devices: 0 is not positive": lambda g: jaxdp.partition_dataset(np.arange(3), 2, devices=0),
    "has no length": lambda g: jaxdp.partition_dataset(iter([1]), 2),
    "epoch: -1 is not a whole number": lambda g: jaxdp.partition_dataset(np.arange(3), 2).set_epoch(
        -1
    ),
    "epoch: 1.5 is not a whole number": lambda g: jaxdp.DistributedSampler(3).set_epoch(1.5),
    r"rank: 3 is not in \[0, 3\)": lambda g: jaxdp.DistributedSampler(3, rank=3, size=3),
    "dataset_or_size: 0 examples": lambda g: jaxdp.DistributedSampler(0),
    "dataset_or_size: the examples of a list_iterator cannot be counted": lambda g: (
        jaxdp.DistributedSampler(iter([1]))
    ),
    "the examples of a tuple cannot be counted; give their number": lambda g: (
        jaxdp.DistributedSampler((g, g))
    ),
    "the examples of a list cannot be counted; give their number": lambda g: (
        jaxdp.DistributedSampler([g, g])
    ),
    "the examples of a dict cannot be counted": lambda g: jaxdp.DistributedSampler({"x": g}),
    "the examples of a float cannot be counted": lambda g: jaxdp.DistributedSampler(10.7),
    "rank: 0.5 is not an integer; give one": lambda g: jaxdp.DistributedSampler(
        10, rank=0.5, size=3
    ),
    "seed: 'a' is not an integer": lambda g: jaxdp.DistributedSampler(10, seed="a"),
    "batch_size: 2.5 is not an integer": lambda g: jaxdp.DistributedSampler(10).batches(2.5),
    "sizes: 0.5 is not a list of numbers": lambda g: jaxdp.partition_dataset(
        np.arange(3), 2, sizes=0.5
    ),
    r"weight: 1e\+39 is not a number of examples": lambda g: _update(None, weight=1e39)(g),
    "weight: 1e-46 is not a number of examples": lambda g: _update(None, weight=1e-46)(g),
    "weight: -2.0 is not a number of": lambda g: jax.pmap(_update(AXIS, weight=-2), AXIS)(g),
    "float64 would be cut to float32": lambda g: _update(None)(np.ones(3)),
    "adam is not an Optax transformation; give one": lambda g: jaxdp.distributed_optimizer(
        optax.adam
    ),
    "'loss' is traced": lambda g: jax.jit(lambda x: jaxdp.allreduce_metrics({"loss": x}))(1.0),
    "'loss' is str, not a number": lambda g: jaxdp.allreduce_metrics({"loss": "1.5"}),
    "'loss' is complex128, not a number": lambda g: jaxdp.allreduce_metrics(
        {"loss": np.complex128(1j)}
    ),
    "'loss' is MaskedArray, not a number": lambda g: jaxdp.allreduce_metrics(
        {"loss": np.ma.array(1.0, mask=True)}
    ),
    "'loss' is bytes, not a number": lambda g: jaxdp.allreduce_metrics({"loss": b"3.5"}),
    "'loss' is datetime64, not a number": lambda g: jaxdp.allreduce_metrics(
        {"loss": np.datetime64("2020-01-01")}
    ),
    "allreduce_metrics: rank 0 .*: Comparator raised exception": lambda g: jaxdp.allreduce_metrics(
        {"a": 1.0, 2: 1.0}
    ),
    "broadcast_parameters: 'layer/bad' is a int of object": lambda g: jaxdp.broadcast_parameters(
        {"layer": {"bad": 2**70}}
    ),
    "broadcast_parameters: 'w' is a MaskedArray": lambda g: jaxdp.broadcast_parameters(
        {"w": np.ma.ones(3)}
    ),
    "broadcast_parameters: 'w' is a longdouble of float128": lambda g: jaxdp.broadcast_parameters(
        {"w": np.longdouble(1)}
    ),
    "'loss' is int, not a number": lambda g: jaxdp.allreduce_metrics({"loss": 2**1025}),
    r"'a/b' has shape \(8,\), not one number": lambda g: jaxdp.allreduce_metrics({"a": {"b": g}}),
    r"allreduce_metrics: rank 0 .* prefix_tree\['weight'\]": lambda g: jaxdp.allreduce_metrics(
        {"a": 1.0}, weight={"b": 1.0}
    ),
    r"allreduce_metrics: rank 0 .* prefix_tree\['weight'\] .*NoneType": lambda g: (
        jaxdp.allreduce_metrics({"a": 1.0}, weight=None)
    ),
    "weight: inf is not a number of examples": lambda g: jaxdp.allreduce_metrics(
        1.0, weight=np.inf
    ),
}


def _update(axis, **extra):
    tx = jaxdp.distributed_optimizer(optax.sgd(0.1), axis)
    return lambda g: tx.update(g, tx.init(g), **extra)


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_work_is_refused_in_a_line(words):
    with pytest.raises(jaxdp.UsageError, match=words) as error:
        WRONG[words](jnp.ones(N))
    assert "\n" not in str(error.value)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ends", "code", "expected"),
    [
        ("sys.exit(3)", 1, "jaxdp: rank 1 (host HOST) has ended before the others"),
        pytest.param(
            "raise KeyboardInterrupt", 130, "interrupted by Ctrl-C (SIGINT)", marks=pytest.mark.slow
        ),
    ],
    ids=["exit", "interrupt"],
)
def test_a_rank_that_leaves_a_collective_is_named(ends, code, expected):
    script = f"""
import sys, jax, numpy, jaxdp
rank, add = jaxdp.init().rank, jax.pmap(lambda x: jax.lax.psum(x, "data"), axis_name="data")
for step in range(1000):
    numpy.asarray(add(numpy.ones((jax.local_device_count(), 4), "float32")))
    if rank == 1 and step == 3:
        {ends}
"""
    jobs = processes(["-c", script], ranks(2, f"127.0.0.1:{port()}"))
    assert jobs[0].returncode == code, jobs[0].stderr
    assert (
        expected.replace("HOST", socket.gethostname()) in jobs[0].stderr
        and "Traceback" not in jobs[0].stderr
    )


@pytest.mark.slow
def test_an_optimizer_gets_extra_arguments_and_modules():
    plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    for tx in (
        optax.MultiSteps(plateau, 1),
        optax.MultiSteps(plateau, 1).gradient_transformation(),
        plateau,
    ):
        own, state = jaxdp.distributed_optimizer(tx), tx.init(jnp.ones(2))
        for value in (1.0, 2.0, 3.0, 4.0):
            updates, state = own.update(jnp.ones(2), state, jnp.ones(2), value=value)
        assert np.abs(updates).max() < 1
    model = equinox.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))  # its activation is a function
    tx, own = optax.adamw(1e-2), jaxdp.distributed_optimizer(optax.adamw(1e-2))
    grads = equinox.filter_grad(lambda m: jax.vmap(m)(jnp.ones((2, 2))).sum())(model)
    state = tx.init(equinox.filter(model, equinox.is_array))
    got, want = (jax.tree.leaves(x.update(grads, state, model)[0]) for x in (own, tx))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_weights_are_as_wide_as_numbers_are():
    with jax.enable_x64(True):
        tx, weights = jaxdp.distributed_optimizer(optax.identity(), AXIS), np.linspace(0.1, 0.9, N)
        grads = np.linspace(-1, 2, N)
        mean = jax.pmap(lambda g, w: tx.update(g, tx.init(g), weight=w)[0], AXIS)(grads, weights)
        np.testing.assert_allclose(mean, np.full(N, np.average(grads, weights=weights)), rtol=1e-14)


def test_a_batch_is_int64_where_one_example_needs_it():
    rows = [(np.float32(i), np.int64(2**40 * (i == 1))) for i in range(4)]
    (batch,) = jaxdp.partition_dataset(rows, 4, shuffle=False)
    assert batch[1].tolist() == [0, 2**40, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, -1.0])
def test_a_bad_traced_weight_makes_the_update_nan(bad):
    tx = jaxdp.distributed_optimizer(optax.identity(), AXIS)
    weights = jnp.ones(N).at[3].set(bad)
    got = jax.pmap(lambda g, m: tx.update(g, tx.init(g), weight=m)[0], AXIS)(
        jnp.ones((N, 2)), weights
    )
    assert np.isnan(got).all()


def test_the_mean_of_metrics_is_exact():
    """Where the sum overflows, too."""
    assert _mean([(1.0, 1.7e308)] * 3) == 1.7e308
    assert _mean([(10.0, 1e308), (10.0, 1e308), (10.0, 1.0)]) == pytest.approx(
        1e308 / 1.5, rel=1e-15
    )
    assert _mean([(5e-324, 0.1)]) == 0.1
    assert _mean([(1.0, 0.1)] * 10) == 0.1
    assert _mean([(1.0, np.inf), (1.0, 1.0)]) == np.inf and np.isnan(
        _mean([(1.0, np.inf), (2.0, -np.inf)])
    )


def test_metrics_alone_are_floats():
    got = jaxdp.allreduce_metrics(
        {"a": jnp.float32(0.5), "b": [np.int64(3)], "c": jnp.ones((1,))}, weight=7
    )
    assert got == {"a": 0.5, "b": [3.0], "c": 1.0} and all(
        type(x) is float for x in jax.tree.leaves(got)
    )
    assert np.isnan(jaxdp.allreduce_metrics(2.0, weight=0))
    got = jaxdp.allreduce_metrics({"a": 2.0, "b": np.nan}, weight={"a": 3, "b": 0})
    assert got["a"] == 2 and np.isnan(got["b"])


def test_who_was_started_with_others_must_join_them(monkeypatch):
    monkeypatch.setattr("jaxdp.process.context._current", None)  # an earlier test may have joined
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    for call in (
        lambda: jaxdp.partition_dataset(np.zeros(4), 2),
        lambda: jaxdp.DistributedSampler(4),
    ):
        with pytest.raises(
            jaxdp.UsageError, match=r"call jaxdp.init\(\) first: there are 2 processes"
        ):
            call()
