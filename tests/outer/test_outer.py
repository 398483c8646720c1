"""Local updates (`outer`): the numbers of logical replicas, on any number of devices, against an
oracle of DiLoCo.
"""

import functools
import itertools
import shutil
import types

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial

import toys
from cli_runs import ended, jaxdp, records, write
from jaxdp.cli import load
from jaxdp.config import Config, Outer
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.optim.optimizers import master_copy, with_master
from jaxdp.outer import Door
from jaxdp.outer.replicas import OuterRule, Replicas
from jaxdp.parallel.placement import ordered_devices
from jaxdp.run.components import make_parts, make_reduction, make_strategy, state_maker
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step
from launch import mpirun

MICROBATCHES, BATCH = 8, 20
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def build(
    devices, every, inner, outer, examples,
    replicas=4, reduction="xla", dtype="float32", batch_size=BATCH, model="mlp", ema=None, between=None,
    microbatches=MICROBATCHES,
):  # fmt: skip
    """(strategy, program, i -> batch i on its devices)"""
    model = toys.MODELS[model]()
    forward = Forward(model, SoftmaxCrossEntropy(), toys.uniform(dtype))
    rule = UpdateRule(inner, ema_decay=ema)
    step = make_step(forward, rule._replace(ema_decay=None))
    order = EpochOrder(len(examples["labels"]), batch_size, microbatches, 0, shuffle=False)
    first = {k: v[: order.examples_per_microbatch] for k, v in examples.items()}
    example = {"mask": np.ones(order.examples_per_microbatch, bool), **first}
    strategy = Replicas(
        Partial(lambda: init_state(forward, rule, microbatches, example)),
        microbatches,
        make_reduction(reduction),
        OuterRule(
            replicas,
            every,
            forward,
            UpdateRule(outer, ema_decay=ema and ema**every),
            make_reduction(between or reduction),
        ),
        jax.devices()[:devices],
    )
    dataset = Arrays(**examples)

    def batch(i):
        return strategy.shard_batch(read_batches(dataset, order, [i], strategy.local_microbatches))

    return strategy, strategy.compile(step), batch


@pytest.mark.slow
def test_replicas_start_from_one_float32_master_copy():
    """The shared copy moves as float32 parameters do, whose replicas compute in bfloat16 of their
    own.
    """
    examples, inner, outer = toys.data(), optax.sgd(1e-3, 0.9), optax.sgd(0.7, 0.9, nesterov=True)
    ends = []
    for devices in (1, 4):
        strategy, program, batch = build(
            devices, 2, with_master(inner), with_master(outer), examples, dtype="bfloat16"
        )
        state = strategy.init()
        first = jax.tree.map(np.array, strategy.export(state).params)
        for i in range(6):
            state, _ = program.update(state, batch(i))
        last, replicas = strategy.export(state), strategy.export(state).opt_state.replicas
        copies = master_copy(replicas.params, replicas.opt_state)
        shared = master_copy(last.params, last.opt_state.outer)
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape)),
            copies,
            shared,
        )
        moved = jax.tree.map(lambda x, y: float((x != y.astype(np.float32)).mean()), shared, first)
        assert min(jax.tree.leaves(moved)) > 0.6  # not of a hidden unit that is always 0
        ends.append(shared)
    assert toys.relative_error(ends[1], ends[0])[0] < 1e-6


def oracle(params, examples, every, outer_steps, inner, outer, replicas=4):
    """The shared parameters after some outer steps: rows by Python loops, plain Optax, nothing of
    jaxdp.
    """

    def loss(params, x, y):
        x = jnp.maximum(
            x.reshape(len(x), -1) @ params["layers"]["0"]["kernel"] + params["layers"]["0"]["bias"],
            0,
        )
        logits = x @ params["head"]["kernel"] + params["head"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

    @jax.jit
    def advance(params, moments, x, y):
        updates, moments = inner.update(jax.grad(loss)(params, x, y), moments, params)
        return optax.apply_updates(params, updates), moments

    size, own = len(examples["labels"]), MICROBATCHES // replicas
    moments, outer_state = [inner.init(params)] * replicas, outer.init(params)
    for block in range(outer_steps):
        ends = []
        for r in range(replicas):
            mine = params
            for step in range(block * every, (block + 1) * every):
                start = step % -(-size // BATCH) * BATCH
                rows = np.arange(start, min(start + BATCH, size))
                rows = np.concatenate(
                    [rows[m::MICROBATCHES] for m in range(r * own, (r + 1) * own)]
                )
                mine, moments[r] = advance(
                    mine, moments[r], examples["inputs"][rows], examples["labels"][rows]
                )
            ends.append(mine)
        mean = jax.tree.map(lambda p, *ends: p - sum(ends) / replicas, params, *ends)
        updates, outer_state = outer.update(mean, outer_state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.quick(1)
@pytest.mark.parametrize("devices", [2, 1, 4, 8])
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


@functools.cache
def moved(between):
    """How far three updates and an outer step move the parameters."""
    strategy, program, batch = build(
        4, 3, optax.adam(1e-2), optax.sgd(1.0), toys.data(64), between=between
    )
    state = strategy.init()
    start = jax.tree.map(np.array, state.params)
    for i in range(3):
        state, _ = program.update(state, batch(i))
    return jax.tree.map(lambda x, y: np.asarray(x) - y, state.params, start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "between, least, most", [("exact8", 1e-4, 0.05), ("exact16", 1e-7, 1e-3), ("exact", 0, 1e-6)]
)
def test_differences_may_use_fewer_bits_than_gradients(between, least, most):
    assert least <= toys.relative_error(moved(between), moved(None))[0] < most


@pytest.mark.slow
def test_an_outer_step_each_update_is_plain_training():
    """If the inner optimizer is SGD and the outer one takes the mean."""
    examples = toys.data(64)
    strategy, program, batch = build(4, 1, optax.sgd(0.1), optax.sgd(1.0), examples, batch_size=16)
    state = strategy.init()
    for i in range(8):
        state, _ = program.update(state, batch(i))
    settings = {"devices": 2, "batch_size": 16, "optimizer": (optax.sgd(0.1), None)}
    _, ordinary, *_ = toys.train(toys.MODELS["mlp"](), examples, steps=8, **settings)
    assert toys.relative_error(state.params, ordinary.params)[0] < 1e-5


@pytest.mark.slow
def test_an_outer_step_averages_state_by_element(monkeypatch):
    """Squares from 1e-30 to 1e30 in one leaf, and infinities."""
    monkeypatch.setitem(toys.MODELS, "tracking", toys.tracking)
    states = []
    for devices, between in ((1, None), (1, "exact"), (4, "exact"), (4, "exact8")):
        strategy, program, batch = build(
            devices,
            1,
            optax.sgd(0.1),
            optax.sgd(1.0),
            toys.data(),
            between=between,
            model="tracking",
        )
        states.append(
            jax.tree.map(np.array, program.update(strategy.init(), batch(0))[0].model_state)
        )
    assert np.isinf(states[0]["least"]).any() and np.isfinite(states[0]["least"]).any()
    for state in states[1:]:
        for name, x in states[0].items():
            np.testing.assert_allclose(state[name].real, x.real, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(state[name].imag, x.imag, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_outer_step_averages_batch_norm_statistics():
    strategy, program, batch = build(
        2, 2, optax.sgd(0.1), optax.sgd(1.0), toys.data(), model="resnet"
    )
    alone, other, _ = build(2, 100, optax.sgd(0.1), optax.sgd(1.0), toys.data(), model="resnet")
    state, without = strategy.init(), alone.init()
    for i in range(2):
        state, without = program.update(state, batch(i))[0], other.update(without, batch(i))[0]
    ends = without.opt_state.replicas.model_state
    assert max(np.ptp(x, 0).max() for x in map(np.asarray, jax.tree.leaves(ends))) > 1e-3
    mean = jax.tree.map(lambda x: np.asarray(x).mean(0, dtype=x.dtype), ends)
    for shared in (
        state.model_state,
        jax.tree.map(lambda x: x[3], state.opt_state.replicas.model_state),
    ):
        assert toys.relative_error(shared, mean)[0] < 1e-5


@pytest.mark.slow
def test_statistics_are_always_sent_in_32_bits():
    states = []
    for between in ("exact8", "exact"):
        strategy, program, batch = build(
            2, 2, optax.sgd(0.1), optax.sgd(1.0), toys.data(), model="resnet", between=between
        )
        state = strategy.init()
        for i in range(2):
            state, _ = program.update(state, batch(i))
        states.append(state)
    assert toys.relative_error(states[0].model_state, states[1].model_state)[0] == 0
    assert toys.relative_error(states[0].params, states[1].params)[0] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_the_average_is_that_of_the_shared_parameters(devices):
    """An outer step moves it as far as two updates would."""
    strategy, program, batch = build(
        devices, 2, optax.sgd(0.1), optax.sgd(1.0), toys.data(), ema=0.9
    )
    state = strategy.init()
    ema = jax.tree.map(np.array, state.params)
    for i in range(6):
        state, _ = program.update(state, batch(i))
        if i % 2:
            ema = jax.tree.map(lambda e, p: 0.81 * e + 0.19 * np.asarray(p), ema, state.params)
        assert toys.relative_error(state.extra["ema"], ema)[0] < 1e-6
    assert toys.relative_error(strategy.averaged(state).params, ema)[0] < 1e-6


@pytest.mark.slow
def test_a_counter_is_equal_after_one_replica_skips(monkeypatch):
    mlp = toys.MODELS["mlp"]()

    def init(key, batch):
        return (mlp.init(key, batch)[0], {"calls": jnp.zeros((), jnp.int32)})

    def apply(params, state, *args):
        return (mlp.apply(params, {}, *args)[0], {"calls": state["calls"] + 1})

    monkeypatch.setitem(toys.MODELS, "counting", lambda: mlp._replace(init=init, apply=apply))
    examples = toys.data()
    examples["inputs"][0] = np.nan  # of the first microbatch of the first batch
    strategy, program, batch = build(
        4, 2, optax.sgd(0.1), optax.sgd(1.0), examples, model="counting"
    )
    state = strategy.init()
    for i in range(2):
        state, _ = program.update(state, batch(i))
    assert [int(shard.data) for shard in state.model_state["calls"].addressable_shards] == [1] * 4


@pytest.mark.slow
def test_a_replica_without_examples_keeps_its_state():
    examples = toys.data(
        BATCH + 3
    )  # the second batch has one example in each of the first three microbatches
    strategy, program, batch = build(4, 5, optax.sgd(0.1), optax.sgd(1.0), examples)
    state, _ = program.update(strategy.init(), batch(0))
    before = jax.tree.map(np.array, state.opt_state.replicas)
    after = program.update(state, batch(1))[0].opt_state.replicas
    changed = jax.tree.map(lambda x, y: (x != y).reshape(4, -1).any(1), before.params, after.params)
    assert np.any(jax.tree.leaves(changed), 0).tolist() == [True, True, False, False]
    assert after.guard.skipped.tolist() == [0, 0, 1, 1] and after.guard.in_a_row.tolist() == [0] * 4


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
        (e.params["axes"], inside)
        for e, inside in eqns(jaxpr)
        if "axes" in e.params and e.primitive.name[0] == "p"
    ]
    assert any("outer" in axes for axes, inside in over if inside)
    assert not any("outer" in axes for axes, inside in over if not inside)


def test_each_microbatch_is_computed_once():
    """Also in uneven shares: of 12, on 2 or 8 devices with 4 replicas."""
    optimizer, examples = optax.sgd(0.1), toys.data()
    for replicas, devices in itertools.product((2, 4), (1, 2, 4, 8)):
        strategy, *_ = build(
            devices, 1, optimizer, optimizer, examples, replicas=replicas, microbatches=12
        )
        table = strategy.assignment
        assert sorted(table[table >= 0]) == list(range(12)) and len(table) == devices


def test_replicas_that_devices_cannot_share_are_refused():
    door = Door(Config(outer=Outer(replicas=4)))
    with pytest.raises(
        UsageError, match=r"outer\.replicas: 4 cannot be split over 3 devices; use a number"
    ):
        door.strategy(None, None, None, jax.devices()[:3])
    assert [n for n in range(1, 13) if not door.misfit(n)] == [1, 2, 4, 8, 12]


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abba"])
def test_processes_of_one_host_share_a_replica(hosts):
    """In any order of the launcher's, with two devices in each process."""
    devices = [types.SimpleNamespace(process_index=i % 4, id=i) for i in (5, 0, 3, 6, 1, 7, 2, 4)]
    ordered = ordered_devices(devices, hosts)
    assert [hosts[d.process_index] for d in ordered] == [*"aaaabbbb"]
    assert [d.process_index for d in ordered][::2] == [d.process_index for d in ordered][1::2]


CONFIG = """
model: {target: MLP, args: {hidden: [16], dropout: 0.1}}
data: {target: Digits, args: {augment: true}}
steps: 12
batch_size: 50
optimizer: {target: adamw, lr: 3.0e-3, clip_norm: 1.0}
outer: {replicas: 4, every: 3}
parallel: {reduction: exact}
"""
FLOATS = ("--parallel.reduction", "auto")  # exact sums need flags that are set before JAX starts


def digest(tmp_path, *argv, devices=1, run="run"):
    jaxdp("--config", write(tmp_path, CONFIG), "--run_dir", tmp_path / run, *argv, devices=devices)
    return records(tmp_path / run, "final")[0]["params_sha256"]


@pytest.mark.slow
def test_the_bits_are_the_same_on_other_devices(tmp_path):
    assert digest(tmp_path) == digest(tmp_path, devices=8, run="eight")


@pytest.mark.parametrize("path, also", [
    ("outer.replicas: 3", "microbatches to a multiple of 3"),
    ("outer.every: 5", "does not divide the 12 updates"),
    ("outer.every: 20", "set steps to 20"),
    ("outer.reduction: bucket", "exact16"),
    ("parallel.zero: 1", "does not work with outer.replicas: 4"),
    ("outer.optimizer.target: no", "is neither built in nor a dotted path"),
    ("outer.optimizer.args.momentum: high", "outer.optimizer"),
    ("outer.optimizer.args.weight_decay: 0.1", "sgd takes no such argument"),
    ("outer.optimizer.args.learning_rate: 0.1", "it is set by outer.optimizer.lr; set that"),
])  # fmt: skip
def test_bad_input_gets_one_line(tmp_path, path, also):
    key, _, value = path.partition(": ")
    argv = ("train", "--config", write(tmp_path, CONFIG), "--run_dir", tmp_path / "run", *FLOATS)
    done = ended(*argv, f"--{key}", value, code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("jaxdp: ")]
    assert line.startswith(f"jaxdp: {key.rpartition('.args')[0] or key}") and also in line


def test_more_replicas_than_its_bits_sum_are_refused(tmp_path):
    argv = ("train", "--config", write(tmp_path, CONFIG), "--run_dir", tmp_path / "run", *FLOATS)
    argv += ("--microbatches", "19", "--outer.replicas", "19", "--outer.reduction", "exact8")
    done = ended(*argv, code=2)
    assert (
        "jaxdp: outer.replicas: 19 with outer.reduction: exact8 leave too few bits for each; use at"
        in done.stderr
    )


def made(*argv):
    config, *_ = load(
        [
            "--config",
            "configs/gpt_3m.yaml",
            "--outer.replicas",
            "2",
            "--model.args.layers",
            "2",
            *argv,
        ]
    )
    parts = make_parts(config)
    return make_strategy(config, parts, state_maker(config, parts), jax.devices()[:1]).rule


def test_the_outer_optimizer_gets_the_models_blocks():
    assert made(
        "--outer.optimizer.target", "adam"
    ).update.tx  # the default arguments are those of sgd
    rule = made(
        "--outer.optimizer.target", "muon", "--outer.optimizer.lr", "1", "--model.args.scan", "true"
    )
    tx = rule.update.tx
    state = tx.init(
        params := {"blocks": {"stack": jnp.ones((2, 4, 4))}, "head": jnp.ones((2, 4, 4))}
    )
    updates, _ = tx.update(params, state, params)
    assert rule.forward.model.blocks == ("blocks/stack",)
    assert (
        np.linalg.matrix_rank(updates["blocks"]["stack"][0]) == 1 and np.ptp(updates["head"]) == 0
    )


def test_a_model_with_carried_state_is_refused(tmp_path):
    recurrent = (
        "--config",
        "configs/ptb_lstm.yaml",
        "--data.target",
        "PythonSource",
        "--data.args",
        "{length: 16}",
    )
    done = ended(
        "train",
        *recurrent,
        "--microbatches",
        "8",
        "--outer.replicas",
        "2",
        "--run_dir",
        tmp_path / "run",
        code=2,
    )
    assert "outer.replicas: the model carries state from batch to batch" in done.stderr


@pytest.mark.slow
def test_a_stream_end_counts_the_updates_it_loses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "import numpy as np\n\ndef rows():\n    yield from [(np.ones(4, np.float32), np.int32(1))] * 265"
    (tmp_path / "few.py").write_text(text)
    stream = (
        "--data.target",
        "Stream",
        "--data.args",
        "{source: few.rows}",
        "--model.args.num_classes",
        "2",
    )
    done = ended(
        "train",
        "--config",
        write(tmp_path, CONFIG),
        "--run_dir",
        tmp_path / "run",
        *FLOATS,
        *stream,
    )
    assert "training ends after update 5 of 12\n" in done.stdout
    assert (
        "the last 2 updates came after the last outer step, and changed no parameters\n"
        in done.stdout
    )


@pytest.mark.slow
def test_a_run_resumes_only_with_as_many_replicas(tmp_path):
    constant = (*FLOATS, "--optimizer.schedule", "constant")
    digest(tmp_path, *constant, "--steps", "3")
    argv = ("--config", tmp_path / "config.yaml", "--run_dir", tmp_path / "run", *constant)
    done = ended("train", *argv, "--outer.replicas", "2", code=2)
    assert "outer.replicas: 4 -> 2" in done.stderr


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(tmp_path):
    """Of ordinary training, with an average, on any number of devices."""
    source = digest(tmp_path, "--outer.replicas", "1", "--steps", "3", run="source")
    argv = ("--init_from", tmp_path / "source", "--optimizer.ema", "0.9", "--eval.ema", "true")
    assert digest(tmp_path, *argv, "--optimizer.lr", "0", run="still") == source
    assert digest(tmp_path, *argv) == digest(tmp_path, *argv, devices=8, run="eight") != source


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["exact", "exact16", "exact8"])
def test_fewer_bytes_and_a_resume_keep_equal_bits(tmp_path, reduction):
    other = ("--parallel.reduction", reduction)
    one = digest(tmp_path, *other)
    for devices, backend in ((2, "pmap"), (4, "pjit"), (8, "pmap")):
        assert (
            digest(
                tmp_path, *other, "--parallel.backend", backend, devices=devices, run=f"{devices}"
            )
            == one
        )


@pytest.mark.slow
def test_a_run_resumed_on_other_devices_has_equal_bits(tmp_path):
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
    argv = [
        "--config",
        write(tmp_path, CONFIG),
        "--run_dir",
        tmp_path / "run",
        "--parallel.backend",
        backend,
    ]
    done = mpirun(number, ["train.py", *map(str, argv)])
    assert done.returncode == 0, done.output
    assert records(tmp_path / "run", "final")[0]["params_sha256"] == digest(tmp_path, run="one")


def with_inputs(tmp_path, bad):
    """Return the arguments of a run with 2 replicas, whose update u reads example 4 r + u in row r,
    the replica's of rows 0 to 3 or 4 to 7. bad[example]: its inputs are not finite."""
    inputs = np.where(bad[:, None], np.nan, np.ones((32, 4))).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.arange(32) % 3)
    data = f"data: {{target: Npz, args: {{path: {tmp_path / 'data.npz'}, test_fraction: 0}}, order: sequential}}"
    text = CONFIG.replace("data: {target: Digits, args: {augment: true}}", data).replace(
        "replicas: 4", "replicas: 2"
    )
    return [
        "--config",
        write(tmp_path, text),
        "--run_dir",
        tmp_path / "run",
        "--batch_size",
        "8",
        *FLOATS,
    ]


@pytest.mark.slow
@pytest.mark.mpi
def test_all_processes_halt_if_one_replica_does(tmp_path):
    """The losses that each process sees are those of its own replicas."""
    argv = with_inputs(tmp_path, np.arange(32) // 4 >= 4)
    done = mpirun(2, ["train.py", *map(str, argv), "--nonfinite.max_consecutive", "1"], timeout=120)
    assert done.returncode == 1 and "updates 1 to 1 were not finite" in done.output, done.output


@pytest.mark.slow
def test_no_checkpoint_of_a_halted_replica_is_used(tmp_path):
    """Rows 4 to 7 are bad in updates 1 and 2, row 0 in update 4: only the second replica halts."""
    row, update = np.divmod(np.arange(32), 4)
    argv = with_inputs(tmp_path, (row >= 4) & (update < 2) | (row == 0) & (update == 3))
    argv += ["--outer.every", "4", "--checkpoint.every", "3", "--nonfinite.max_consecutive", "2"]
    for _ in range(2):  # the second start would resume from the checkpoint
        done = ended("train", *argv, code=1)
        assert (
            "updates 1 to 2 were not finite, 2 in a row" in done.stderr
            and "there is no checkpoint" in done.stderr
        )
        assert (
            "checkpoint 3 has a replica that halted at update 2; set aside as 3.halted"
            in done.stdout
        )


@pytest.mark.slow
def test_spikes_of_two_replicas_roll_back_once(tmp_path):
    """The first replica's loss is a spike in update 6, the second one's in update 8; a checkpoint
    lies between them.
    """
    row, update = np.divmod(np.arange(128), 16)
    bad = (row == 0) & (update == 5) | (row == 4) & (update == 7)
    inputs = np.where(bad[:, None], 1e4, np.ones((128, 4))).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=2 * bad.astype(int))
    data = f"data: {{target: Npz, args: {{path: {tmp_path / 'data.npz'}, test_fraction: 0}}, order: sequential}}"
    text = CONFIG.replace("data: {target: Digits, args: {augment: true}}", data).replace(
        "replicas: 4", "replicas: 2"
    )
    argv = [
        "--config",
        write(tmp_path, text),
        "--run_dir",
        tmp_path / "run",
        "--batch_size",
        "8",
        *FLOATS,
    ]
    argv += [
        "--outer.every",
        "4",
        "--steps",
        "12",
        "--checkpoint.every",
        "3",
        "--optimizer.clip_norm",
        "null",
    ]
    argv += ["--spike", "{factor: 50, after: 2, action: rollback, every: 4, max_rollbacks: 1}"]
    done = ended("train", *argv)
    assert "the loss of update 8 is a spike: back to step 4" in done.stdout, done.output
    assert (
        "checkpoint 6 has a replica that halted at update 6; set aside as 6.halted" in done.stdout
    )
