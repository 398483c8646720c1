"""The audit (reliability.md) on simulated devices of one process: who is named, who is not, and what is
refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import planted_faults
import toys
from cli_runs import DIGITS
from jaxdp.audit import program
from jaxdp.audit.auditor import Audit
from jaxdp.audit.program import fingerprint, judge
from jaxdp.cli import load
from jaxdp.data.dataset import Arrays
from jaxdp.data.stream import StreamEnded
from jaxdp.errors import RunFailed, UsageError
from jaxdp.metrics.jsonl import Events, read
from jaxdp.models.base import Model
from jaxdp.parallel.layout import Sharding
from jaxdp.run.callbacks import Callbacks, StopTraining
from jaxdp.split import DATA
from jaxdp.train.run import Progress
from plain_runs import Given, fit, make_run

NDIM = {"inputs": 1 + len(toys.SHAPE), "labels": 1}


def audited(
    tmp_path, fault="", every=2, action="warn", backend="pmap", devices=4, model=None, **settings
):
    """(the final record or the error, the run, its events)"""
    tmp_path.mkdir(exist_ok=True)
    settings = {"steps": 8, "log_every": 8, **settings}
    run = make_run(tmp_path, model or toys.MODELS["dropout"](), backend, devices, **settings)
    run = run.replace(events=Events(tmp_path), directory=tmp_path)
    planted = planted_faults.PlantedFaults(planted_faults.parse(fault))
    callbacks = Callbacks([planted, *settings.get("callbacks", Callbacks()).callbacks])
    changed = callbacks.change_step(run.run, Progress(start=settings.get("start", 0)))
    run = run.replace(
        step=changed.step,
        callbacks=callbacks,
        extras=[Given(lambda training: Audit(training, every, action))],
    )
    try:
        result, _ = fit(run)
    except RunFailed as error:
        result = error
    return result, run, read(tmp_path / "events.jsonl")


def failures(events):
    return [(e["step"], e["device"], e["leaf"]) for e in events if e["kind"] == "audit_failed"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "int8"]),
    st.integers(0, 10**6),
)
def test_every_flipped_bit_changes_the_fingerprint(dtype, seed):
    x = np.asarray(jnp.asarray(np.random.default_rng(seed).normal(size=(3, 5)) * 50, dtype))
    flipped = planted_faults.flipped_array(
        x, planted_faults.Fault("flip", index=seed % 97, bit=seed % 31)
    )
    assert (x.view(np.uint8) != flipped.view(np.uint8)).sum() == 1
    assert int(fingerprint(jnp.asarray(x))) != int(fingerprint(jnp.asarray(flipped)))


def test_places_signs_and_keys_count_in_a_fingerprint():
    differ = [[1.0, 2.0], [2.0, 1.0], [-0.0, 0.0], [0.0, 0.0], [1.0, 2.0, 0.0]]
    assert len({int(fingerprint(jnp.array(x))) for x in differ}) == len(differ)
    assert int(fingerprint(jax.random.key(1))) != int(fingerprint(jax.random.key(2)))
    assert int(fingerprint(jnp.array([True, False]))) != int(fingerprint(jnp.array([True, True])))
    assert int(fingerprint(jnp.array([1 + 2j]))) != int(fingerprint(jnp.array([2 + 1j])))


ALL = [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("runs", "devices", "certain", "software"),
    [
        ([[[7, 1], [7, 1], [7, 1], [7, 1]]], {}, True, False),
        ([[[7, 1], [7, 1], [7, 2], [7, 1]]] * 4, {2: 1}, True, False),  # a gradient
        (
            [[[7, 1], [8, 3], [7, 1], [7, 1]]] * 4,
            {1: 0},
            True,
            False,
        ),  # a copy of the state
        (
            [[[7, 1], [7, 1], [7, 2], [7, 2]]] * 4,
            {0: 1, 1: 1, 2: 1, 3: 1},
            False,
            False,
        ),  # no majority
        ([[[7, 1], [7, 9], [7, 1], [7, 1]], *[[[7, 1]] * 4] * 3], {1: 1}, True, False),  # once
        ([[[7, i], [7, i + 9], [7, 50 + i], [7, 99 + i]] for i in range(4)], {}, True, True),
        (
            [[[7, i], [7, i + 9], [8, 50 + i], [7, 99 + i]] for i in range(4)],
            {2: 0},
            True,
            False,
        ),  # and a wrong copy
    ],
)
def test_the_majority_is_right(runs, devices, certain, software):
    verdict = judge([np.array(run, np.uint32) for run in runs], [ALL, ALL], 1)
    assert (verdict.devices, verdict.certain, verdict.software) == (devices, certain, software)


def test_one_device_is_compared_in_time():
    def run(value):
        return np.array([[7, value]], np.uint32)

    assert not judge([run(1), run(1)], [[[0]], [[0]]], 1).devices
    assert judge([run(1), run(2), run(1), run(1), run(1)], [[[0]], [[0]]], 1).devices == {0: 1}
    assert judge([run(i) for i in range(5)], [[[0]], [[0]]], 1).software


FLIPS = [
    ("flip:grads:device=2:step=4:repeat=true:bit=0:index=5", 2, "grads/", 4),
    pytest.param(
        "flip:output:device=3:step=4:repeat=true",
        3,
        ("grads/", "product "),
        4,
        marks=pytest.mark.slow,
    ),
    ("flip:params:device=1:step=3:bit=9:leaf=2", 1, "params/", 4),
    pytest.param(
        "flip:opt_state:device=0:step=3:leaf=3",
        0,
        ("params/", "opt_state/"),
        4,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["pmap", pytest.param("pjit", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fault", "device", "leaf", "step"), FLIPS, ids=lambda x: str(x)[:12])
def test_a_flipped_bit_is_named_with_its_device(tmp_path, backend, fault, device, leaf, step):
    _, run, events = audited(tmp_path, fault, backend=backend)
    first, *_ = named = failures(events)
    assert first[:2] == (step, device)
    assert first[2].startswith(leaf) and {d for _, d, _ in named} == {device}
    warnings = [text for text in run.log.writer.said if "audit after" in text]
    assert len(warnings) == 1 and f"device {device} (cpu {device} of this process)" in warnings[0]


def test_a_pass_after_a_failed_audit_restores_no_trust(tmp_path):
    _, run, events = audited(
        tmp_path, "flip:grads:device=2:step=5:until=6:repeat=true:bit=0:index=5"
    )
    assert {step for step, *_ in failures(events)} == {4} and run.checkpoints.trusted == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pmap", pytest.param("pjit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps_per_call", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_audit_of_healthy_devices_changes_nothing(tmp_path, backend, steps_per_call):
    model = toys.MODELS["resnet" if backend == "pjit" else "dropout"]()
    final, run, events = audited(
        tmp_path / "a", "", 1, "stop", backend, 4, model, steps_per_call=steps_per_call
    )
    plain = make_run(
        tmp_path / "b", model, backend, 4, steps=8, log_every=8, steps_per_call=steps_per_call
    )
    assert final["params_sha256"] == fit(plain)[0]["params_sha256"]
    assert not failures(events) and not [text for text in run.log.writer.said if "devices" in text]


def test_a_fault_is_of_one_device_of_all_replicas():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("outer", DATA))

    def flip(x):
        return planted_faults.flip(x, planted_faults.Fault("flip", device=5), jnp.int32(0))

    x = jax.shard_map(flip, mesh=mesh, in_specs=P(), out_specs=P(("outer", DATA)), check_vma=False)(
        jnp.ones(1)
    )
    assert np.flatnonzero(np.asarray(x) != 1).tolist() == [5]


@pytest.mark.slow
def test_carried_state_is_audited(tmp_path):
    assert not failures(audited(tmp_path, "", model=toys.lstm_model())[2])


@pytest.mark.slow
def test_stop_ends_the_run_and_sets_checkpoints_aside(tmp_path):
    error, run, events = audited(tmp_path, FLIPS[2][0], 4, "stop", save_every=1)
    assert isinstance(error, RunFailed) and "device 1" in str(error) and "params/" in str(error)
    folders = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert run.checkpoints.steps() == [] and "3.suspect" in folders and failures(events)[0][0] == 4
    error, run, _ = audited(
        tmp_path / "later", "flip:params:device=1:step=6", 4, "stop", save_every=1
    )
    assert run.checkpoints.steps()[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 2], ids=["never audited before", "audited before"])
def test_audited_checkpoints_from_before_a_resume_stay(tmp_path, every):
    audited(tmp_path, "", every, steps=5, save_every=1)
    error, run, _ = audited(
        tmp_path, "flip:params:device=1:step=6", 2, "stop", save_every=1, start=5
    )
    assert isinstance(error, RunFailed)
    assert run.checkpoints.steps() == ([4, 5] if every else [])


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_no_resumed_audits(tmp_path):
    _, run, _ = audited(tmp_path, "", 2, steps=4, save_every=1)
    (run.checkpoints.directory / str(run.checkpoints.steps()[0]) / "manifest.json").write_text("{")
    result, run, _ = audited(tmp_path, "", 2, "stop", save_every=1, start=4)
    assert not isinstance(result, RunFailed) and run.checkpoints.trusted == run.options.steps


class Stop:
    """A callback that ends training at the first evaluation."""

    def on_eval(self, step, metrics):
        raise StopTraining("enough")


class Ending(Arrays):
    """A stream of three batches."""

    batches = 0

    def read(self, indices):
        self.batches += 1
        if self.batches > 3:
            raise StreamEnded("it ends")
        return super().read(indices)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["callback", "stream"])
def test_a_run_that_ends_early_is_audited_at_its_end(tmp_path, kind):
    stop = {"eval_every": 3, "held_out": toys.data(20), "callbacks": Callbacks([Stop()])}
    settings = stop if kind == "callback" else {"train": Ending(**toys.data(60))}
    _, _, events = audited(tmp_path, "flip:params:device=1:step=3", 100, **settings)
    assert [step for step, *_ in failures(events)] == [3]


@pytest.mark.slow
def test_two_devices_are_named_as_a_pair(tmp_path):
    error, *_ = audited(tmp_path, "flip:grads:device=1:repeat=true", 2, "stop", devices=2)
    assert (
        "device 0" in str(error)
        and "device 1" in str(error)
        and "unknown which of them is wrong" in str(error)
    )


def noisy():
    """A model with an operation that is not deterministic."""
    plain = toys.dropout_model()

    def apply(params, model_state, batch, key, train):
        outputs, state = plain.apply(params, model_state, batch, key, train)

        def draw():
            return np.float32(np.random.default_rng().normal())

        return outputs * (1 + jax.pure_callback(draw, jax.ShapeDtypeStruct((), np.float32))), state

    return Model(plain.init, apply)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_random_model_is_blamed_once_and_no_device(tmp_path, devices):
    _, run, events = audited(
        tmp_path, "", 1, "stop", devices=devices, model=noisy(), accumulate="scan"
    )
    warnings = [text for text in run.log.writer.said if "not deterministic" in text]
    assert len(warnings) == 1 and not failures(events)
    assert [e["step"] for e in events if e["kind"] == "audit"] == [1]


@pytest.mark.slow
def test_leaves_with_one_copy_are_reported(tmp_path):
    run = make_run(tmp_path)
    strategy = type(run.strategy)(
        run.strategy.make, 8, run.strategy.reduction, None, jax.devices()[:4], Sharding(zero=1)
    )
    run = run.replace(strategy=strategy)
    fit(run.replace(extras=[Given(lambda training: Audit(training, 3, "warn"))]))
    said = [text for text in run.log.writer.said if "one copy only" in text]
    assert len(said) == 1 and "parallel.zero" in said[0]


@pytest.mark.parametrize(
    "text",
    ["flip", "flip:weights:step=1", "kill:now", "flip:grads:step=x", "flip:grads:repeat=yes", "halt:rank=0",
     "flip:grads:step=-1", "slow:bits=3", "slow:factor=0.5", ","],
)  # fmt: skip
def test_a_wrong_fault_is_refused_in_one_line(text):
    with pytest.raises(
        UsageError, match=r"^planted fault: .* is not a fault: give kill, slow, or flip .*"
    ) as error:
        planted_faults.parse(text)
    assert "\n" not in str(error.value)


def test_a_fault_of_a_rank_beyond_the_job_is_refused(tmp_path):
    with pytest.raises(
        RunFailed, match=r"planted fault: rank 4, device -1, but there are 1 ranks with 4 devices"
    ):
        audited(tmp_path, "flip:grads:rank=4")


def test_several_faults():
    flip, kill = planted_faults.parse(
        "flip:grads:rank=1:step=50:bit=20:repeat=true,kill:rank=1:step=50"
    )
    assert (flip.target, flip.rank, flip.step, flip.bit, flip.repeat) == ("grads", 1, 50, 20, True)
    assert (kill.kind, kill.rank, kill.step, kill.repeat) == ("kill", 1, 50, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--audit.every", "100"],
            r"audit.every: 100 with reduction: auto, .*set parallel.reduction to exact",
        ),
        (["--audit.every", "0", "--parallel.reduction", "exact"], r"audit.every: 0 is too small"),
        (
            ["--audit.action", "expel", "--audit.every", "5", "--parallel.reduction", "exact"],
            r"audit.action: expel, .*set elastic.enabled to true, or use stop",
        ),
        (
            ["--audit.action", "stop"],
            r"audit.action: stop, but audit.every is null; set it, such as 100",
        ),
        (
            ["--watchdog.slow_factor", "1.2"],
            r"watchdog.slow_factor is now called watchdog.straggler_factor",
        ),
    ],
)
def test_a_config_that_cannot_be_audited_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        load([*DIGITS, *arguments])


@pytest.mark.slow
def test_products_in_a_scan_are_visited():
    w = jax.random.normal(jax.random.key(0), (3, 4, 4))

    def f(x, w):
        return jax.nn.relu(
            jax.lax.scan(lambda x, w: (jnp.einsum("i,ij->j", x, w), x.sum()), x, w)[0] @ w[0]
        )

    grads = jax.grad(lambda w: f(jnp.ones(4), w).sum())

    def print_of(number, x):
        return (x, fingerprint(x))

    result, prints = jax.jit(program.visit_products(grads, print_of))(w)
    np.testing.assert_array_equal(result, jax.jit(grads)(w))
    assert len(prints) == planted_faults.number_of_products(grads, w) > 3

    def flipped(number, x):
        return (program.mark_replaced(x.at[0].set(-x[0])) if number == 0 else x), jnp.uint32(0)

    def replaced(w):
        return program.visit_products(grads, flipped)(w)[0]

    changed = jax.jit(program.visit_products(replaced, print_of))(w)[1]
    assert {int(x) for x in changed} != {int(x) for x in prints} and len(changed) == len(prints) + 1
