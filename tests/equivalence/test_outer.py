"""Local updates (`outer`): the numbers of logical replicas, on any number of devices, against an oracle of DiLoCo."""

import itertools
import shutil

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from cli_runs import jaxdp, records, write
from jaxdp.core.options import Forward, UpdateRule
from jaxdp.core.state import init_state
from jaxdp.core.step import make_step
from jaxdp.data.base import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.parallel import make_reduction
from jaxdp.parallel.outer import OuterRule, Replicas, assign_replicas, split_replicas
from jaxdp.parallel.placement import assign_microbatches
from launch import mpirun

MICROBATCHES, BATCH = 8, 20
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def build(devices, every, inner, outer, examples, replicas=4, reduction="xla", dtype="float32", batch_size=BATCH):
    """(strategy, program, i -> batch i on its devices)"""
    model = toys.MODELS["mlp"]()
    forward = Forward(model, SoftmaxCrossEntropy(), toys.uniform(dtype))
    rule = UpdateRule(inner)
    step = make_step(forward, rule)
    order = EpochOrder(len(examples["labels"]), batch_size, MICROBATCHES, 0, shuffle=False)
    first = {k: v[: order.examples_per_microbatch] for k, v in examples.items()}
    example = {"mask": np.ones(order.examples_per_microbatch, bool), **first}
    strategy = Replicas(
        lambda: init_state(forward, rule, MICROBATCHES, example),
        MICROBATCHES,
        make_reduction(reduction),
        OuterRule(replicas, every, outer, step.trainable),
        None,
        jax.devices()[:devices],
    )
    dataset = Arrays(**examples)
    batch = lambda i: strategy.shard_batch(read_batch(dataset, order, i, strategy.local_microbatches))
    return strategy, strategy.compile(step), batch


def oracle(params, examples, every, outer_steps, inner, outer, replicas=4):
    """The shared parameters after some outer steps: rows by Python loops, plain Optax, nothing of jaxdp."""

    def loss(params, x, y):
        x = jnp.maximum(x.reshape(len(x), -1) @ params["layers"]["0"]["kernel"] + params["layers"]["0"]["bias"], 0)
        logits = x @ params["head"]["kernel"] + params["head"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

    size, own = len(examples["labels"]), MICROBATCHES // replicas
    moments, outer_state = [inner.init(params)] * replicas, outer.init(params)
    for block in range(outer_steps):
        ends = []
        for r in range(replicas):
            mine = params
            for step in range(block * every, (block + 1) * every):
                start = step % -(-size // BATCH) * BATCH
                rows = np.arange(start, min(start + BATCH, size))
                rows = np.concatenate([rows[m::MICROBATCHES] for m in range(r * own, (r + 1) * own)])
                grads = jax.grad(loss)(mine, examples["inputs"][rows], examples["labels"][rows])
                updates, moments[r] = inner.update(grads, moments[r], mine)
                mine = optax.apply_updates(mine, updates)
            ends.append(mine)
        mean = jax.tree.map(lambda p, *ends: p - sum(ends) / replicas, params, *ends)
        updates, outer_state = outer.update(mean, outer_state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_parameters_are_those_of_the_oracle(devices):
    with jax.enable_x64(True):
        examples = toys.data(dtype=np.float64)
        inner, outer = optax.adamw(1e-2, weight_decay=0.1), optax.sgd(**NESTEROV)
        strategy, program, batch = build(devices, 2, inner, outer, examples, dtype="float64")
        state = strategy.init()
        expected = oracle(jax.tree.map(jnp.copy, state.params), examples, 2, 3, inner, outer)
        for i in range(6):
            state, metrics = program.update(state, batch(i))
        assert toys.relative_error(state.params, expected)[0] < 1e-10
        assert int(metrics["halted"]) == 0 and int(state.step) == 6


def test_with_an_outer_step_after_each_update_it_is_ordinary_training():
    """If the inner optimizer is SGD and the outer one takes the mean."""
    examples = toys.data(64)
    strategy, program, batch = build(4, 1, optax.sgd(0.1), optax.sgd(1.0), examples, batch_size=16)
    state = strategy.init()
    for i in range(8):
        state, _ = program.update(state, batch(i))
    settings = {"devices": 2, "batch_size": 16, "optimizer": (optax.sgd(0.1), None)}
    _, ordinary, *_ = toys.train(toys.MODELS["mlp"](), examples, steps=8, **settings)
    assert toys.relative_error(state.params, ordinary.params)[0] < 1e-5


def eqns(jaxpr, inside=False):
    """(equation, whether it is in a branch)"""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, jex.Jaxpr | jex.ClosedJaxpr):
                    inner = inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner
                    yield from eqns(inner, inside or eqn.primitive.name == "cond")


def test_replicas_communicate_in_outer_steps_alone():
    strategy, program, batch = build(8, 5, optax.sgd(0.1), optax.sgd(1.0), toys.data())
    jaxpr = jax.make_jaxpr(program.update)(strategy.init(), batch(0)).jaxpr
    over = [
        (e.params["axes"], inside) for e, inside in eqns(jaxpr) if "axes" in e.params and e.primitive.name[0] == "p"
    ]
    assert any("outer" in axes for axes, inside in over if inside)
    assert not any("outer" in axes for axes, inside in over if not inside)


def test_each_microbatch_is_computed_once():
    for replicas, devices, per in itertools.product((1, 2, 4), (1, 2, 4, 8), (2, 3)):
        parts, _ = split_replicas(replicas, devices)
        if devices // parts > per:
            continue
        table = assign_replicas(assign_microbatches(per, devices // parts), replicas, parts)
        assert sorted(table[table >= 0]) == list(range(replicas * per)) and len(table) == devices
    with pytest.raises(UsageError, match=r"outer\.replicas: 4 cannot be split over 3 devices; use 2 devices"):
        split_replicas(4, 3)


CONFIG = """
model: {target: MLP, args: {hidden: [16], dropout: 0.1}}
data: {target: Digits, args: {augment: true}}
steps: 12
batch_size: 50
optimizer: {target: adamw, lr: 3.0e-3, clip_norm: 1.0}
outer: {replicas: 4, every: 3}
parallel: {reduction: exact}
"""


def digest(tmp_path, *argv, devices=1, run="run"):
    jaxdp("--config", write(tmp_path, CONFIG), "--run_dir", tmp_path / run, *argv, devices=devices)
    return records(tmp_path / run, "final")[0]["params_sha256"]


def test_the_bits_are_the_same_on_other_devices(tmp_path):
    assert digest(tmp_path) == digest(tmp_path, devices=8, run="eight")


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["exact", "exact16", "exact8"])
def test_the_bits_are_the_same_with_fewer_bytes_and_after_a_resume(tmp_path, reduction):
    other = ("--parallel.reduction", reduction)
    one = digest(tmp_path, *other)
    for devices, backend in ((2, "pmap"), (4, "pjit"), (8, "pmap")):
        assert digest(tmp_path, *other, "--parallel.backend", backend, devices=devices, run=f"{devices}") == one


@pytest.mark.slow
def test_a_run_that_is_resumed_on_other_devices_ends_with_the_same_bits(tmp_path):
    """It loses its last checkpoint, and resumes between two outer steps."""
    constant = ("--optimizer.schedule", "constant", "--checkpoint.every", "4")
    one = digest(tmp_path, *constant)
    digest(tmp_path, *constant, "--steps", "6", devices=2, run="parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "6")
    digest(tmp_path, *constant, "--steps", "9", devices=8, run="parts")
    assert digest(tmp_path, *constant, run="parts") == one


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("backend", ["pmap", "pjit"])
def test_the_bits_are_the_same_in_several_processes(tmp_path, number, backend):
    argv = ["--config", write(tmp_path, CONFIG), "--run_dir", tmp_path / "run", "--parallel.backend", backend]
    done = mpirun(number, ["train.py", *map(str, argv)])
    assert done.returncode == 0, done.output
    assert records(tmp_path / "run", "final")[0]["params_sha256"] == digest(tmp_path, run="one")
