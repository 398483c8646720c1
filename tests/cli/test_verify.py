"""`jaxdp verify` passes what is right, and names the cause of what is not."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import elsewhere_cases
import launch
import oracle as plain_oracle
import toys
import verify_cases
from covering import only
from jaxdp.cli import load
from jaxdp.config import Config, Optimizer, Parallel
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models.base import Model
from jaxdp.parallel.reduction import xla
from jaxdp.run.components import REDUCTIONS, STAGES, Parts, make_parts
from jaxdp.train.state import TrainState
from jaxdp.train.step import Forward, UpdateRule
from jaxdp.verify import decisions, verify
from jaxdp.verify.oracle import (
    COMPARED,
    Oracle,
    Reference,
    Trained,
    difference,
    find_difference,
    make_oracle,
    train,
)
from jaxdp.verify.problem import (
    ONE_DEVICE,
    Configuration,
    Problem,
    Trial,
    check_memory,
    choose_configurations,
    is_meaningful,
    make_problem,
    make_trial,
    make_variant,
    pairs,
    settings,
)
from jaxdp.verify.verify_checks import check_same, dtype_of, find_facts
from sums_of_gradients import error_of_sum
from verify_cases import named
from verifying import CONFIG, PLANTED, command

ROOT = pathlib.Path(__file__).parents[2]
FAULTS = {
    "a mean": (["--loss.target", "planted.mean"], "the loss does not add up .*, as a mean does not: its sum differs"),
    "a mean of means": (["--loss.target", "planted.mean_of_means"], "the loss does not .*: its (sum|weight) differs"),
    "a loss without the mask": (["--loss.target", "planted.unmasked"], r"counts examples whose batch\['mask'\] is 0"),
    "a metric": (["--loss.target", "planted.mean_metric"], "does not add up .*: its metric 'accuracy' differs"),
    "a contrastive loss": (["--loss.target", "planted.contrastive"], "a loss that couples examples"),
    "our own BatchNorm over devices": (
        ["--model", "{target: CNN, args: {widths: [4], sync: true}}"],
        "^devices 4 backend pmap .*; if one device agrees",
    ),
    "NumPy's randomness": (["--model.args.fault", "numpy"], "random generator of their own"),
    "unmasked BatchNorm": (["--model.args.fault", "unmasked"], "counts padded examples: .*Norm_0/(mean|var) differs"),
    "integers that differ": (["--model.args.fault", "integer"], "microbatches disagree on integers"),
    "LAMB on slices": (
        ["--optimizer.target", "lamb", "--parallel.zero", "1"], "config asks for is refused: .*it is not elementwise",
    ),
    "a loss that overflows": (["--optimizer.target", "sgd", "--optimizer.lr", "1e200"], "the loss is not finite: "),
    "data that changes": (["--data.target", "planted.Restless"], "data is not a function .* inputs differs"),
}  # fmt: skip


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A function of command-line arguments: the report on the planted model, on four devices."""
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)

    def run(*argv, devices=4, **more):
        config = load(["--config", str(tmp_path / "config.yaml"), *argv], "verify")[0]
        return verify(make_problem(config), jax.devices()[:devices], **more)

    return run


@pytest.mark.slow
def test_a_good_config_is_verified_by_the_command(tmp_path):
    argv = [
        "--config",
        ROOT / "configs" / "digits_cnn.yaml",
        "--model.args.widths",
        "[4, 8]",
        "--optimizer.ema",
        "0.9",
    ]
    done = command(
        *argv, "--devices", 4, "--updates", 2, "--verify.strategies", 3, cwd=tmp_path, code=0
    )
    lines = done.stdout.splitlines()
    said = re.match(
        r"verified: 4 configurations agree with the oracle; at most, \S+ differs by (\S+); allowed",
        lines[-1],
    )
    assert said and float(said[1]) < 1e-12 and lines[1].startswith("4 x cpu; 2 updates of ")
    assert all(
        re.search(rf"^{name} +ok ", done.stdout, re.MULTILINE)
        for name in ("data", "repeat", "loss", "padding")
    )
    assert re.findall(r"^devices \d backend (p\w+)", done.stdout, re.MULTILINE) == [
        "pjit",
        "pmap",
        "pjit",
        "pmap",
    ]
    assert done.stderr.count("\n") >= 8


@pytest.mark.slow
def test_a_fault_ends_with_code_1_and_the_cause_last(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "config.yaml").write_text(CONFIG)
    small = ["--config", "config.yaml", "--model.target", "MLP", "--model.args.hidden", "[8]"]
    done = command(*small, "--loss.target", "planted.mean", cwd=tmp_path, code=1)
    assert done.stdout.splitlines()[-1].startswith(
        "not verified: the loss does not add up over parts"
    )
    done = command(*small, "--loss.target", "planted.scalar", cwd=tmp_path, code=2)
    assert done.stderr.startswith("jaxdp: loss: it returned float64[]; a loss returns (sum")


REFUSING = """
import numpy as np
import planted
from jaxdp.errors import UsageError

def loss(outputs, batch):
    raise UsageError("loss: this loss needs labels")

class Net(planted.Net):
    def __call__(self, x, mask, train):
        raise UsageError("model: this model needs tokens")

class Rows(planted.Restless):
    def __getitem__(self, i):
        if i:
            raise UsageError("data: this file is damaged")
        return {"inputs": np.ones((4, 4, 1), np.float32), "labels": 0}
"""


@pytest.mark.slow
def test_a_usage_error_of_user_code_is_no_failed_check(judged, tmp_path):
    (tmp_path / "refusing.py").write_text(REFUSING)
    says = {
        "loss": ("loss", "loss: this loss needs labels"),
        "model": ("Net", "model: this model needs tokens"),
        "data": ("Rows", "data: this file is damaged"),
    }
    for section, (name, text) in says.items():
        with pytest.raises(UsageError, match=f"^{text}"):
            judged(f"--{section}.target", f"refusing.{name}")
    for fault in ("device", "sync", "count"):
        with pytest.raises(UsageError, match=r"^model: it uses the axis 'data' of the device mesh"):
            judged("--model.args.fault", fault)
    done = command(
        "--config", "config.yaml", "--loss.target", "refusing.loss", cwd=tmp_path, code=2
    )
    assert done.stderr.strip() == "jaxdp: loss: this loss needs labels" and not done.stdout


@pytest.mark.slow
def test_two_computations_are_compared_leaf_by_leaf():
    """Noise in a small leaf is found beside a large one."""
    rng, base = np.random.default_rng(0), toys.MODELS["mlp"]()

    def init(key, batch):
        params, state = base.init(key, batch)
        return {"small": jnp.ones(2), "net": params}, state

    def apply(params, state, batch, key, train):
        outputs, state = base.apply(params["net"], state, batch, key, train)
        scale = jax.pure_callback(lambda: rng.random(), jax.ShapeDtypeStruct((), jnp.float64))
        small = params["small"] - jax.lax.stop_gradient(params["small"])
        return outputs + 1e-13 * scale * jnp.sum(small), state

    with settings(jax.devices()[0]):
        one = problem(Model(init, apply))
        trial = make_trial(one, 2, 1)
        oracle = Oracle(one, trial, "float64")
        verdict, text = check_same(find_facts(oracle), find_facts(oracle), 1e-10)
    assert verdict == "FAILED" and "/small differs by" in text


@pytest.mark.slow
@pytest.mark.parametrize("fault", only(["unmasked BatchNorm", "LAMB on slices"], FAULTS))
def test_a_fault_is_caught_and_its_cause_named(judged, fault):
    argv, cause = FAULTS[fault]
    report = judged(*argv, updates=2)
    assert not report.verified
    assert re.search(cause, report.causes[0]), report.causes
    assert report.as_text("title").splitlines()[-1].startswith("not verified: ")


TINY = """
model: {target: verify_cases.pair}
data: {target: verify_cases.Data}
steps: 10
batch_size: 24
optimizer: {target: adam, lr: 1.0e-2}
verify: {strategies: 1}
"""
QUICK = (
    "model imported_count",
    "rate by devices",
    "data by neighbors",
    "evaluation by devices",
    "linen",
)


def cases(table):
    return [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in table]


def verified(tmp_path, argv, updates=1, devices=2):
    (tmp_path / "config.yaml").write_text(TINY)
    config = load(["--config", str(tmp_path / "config.yaml"), *argv], "verify")[0]
    return verify(make_problem(config), jax.devices()[:devices], updates=updates)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", cases(verify_cases.FAULTS))
def test_dependence_on_devices_time_or_chance_is_found(tmp_path, case):
    argv, cause = verify_cases.FAULTS[case]
    report = verified(tmp_path, argv)
    assert not report.verified and re.search(cause, report.causes[0]), report.causes
    assert not any(
        check.name == "padding" for check in report.checks
    )  # noise is not blamed on a mask


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case", ["optimizer from update 50, device_count", "order, GROUP_RANK", "length, WORLD_SIZE"]
)
def test_what_depends_on_the_surroundings_is_found(case):
    """What three updates on these devices do not show; all cases:
    `test_no_fault_is_missed_and_no_innocent_accused`.
    """
    report = elsewhere_cases.verified(elsewhere_cases.FAULTS[case], devices=2)
    expected = {
        "optimizer from update 50, device_count": "last update/.* differs",
        "order, GROUP_RANK": "the order of examples in update 1 is ",
        "length, WORLD_SIZE": r"the number of examples of data is \d+, not \d+;",
    }
    [cause] = report.causes
    assert re.match(f"in another process, .*, {expected[case]}", cause)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_no_fault_is_missed_and_no_innocent_accused(devices):
    """In a process with this number of devices."""
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(launch.SUPPORT)])
    argv = [sys.executable, str(launch.SUPPORT / "elsewhere_cases.py")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=3000)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # some cases print
    reports = {row["case"]: row for row in map(json.loads, lines)}
    assert len(elsewhere_cases.FAULTS) >= 40 <= len(elsewhere_cases.INNOCENT), done.stderr
    assert [case for case in elsewhere_cases.FAULTS if not reports[case]["failed"]] == []
    assert {
        case: reports[case] for case in elsewhere_cases.INNOCENT if reports[case]["failed"]
    } == {}
    alone = "nothing was compared but on 1 device"
    for case in elsewhere_cases.INNOCENT:
        assert [cause[: len(alone)] for cause in reports[case]["causes"]] == [alone] * (
            devices == 1
        ), case


@pytest.mark.slow
def test_a_callback_that_cannot_be_mapped_needs_scan():
    argv = named("model", "elsewhere_cases.between", what="callback, no method")
    report = elsewhere_cases.verified(argv, devices=2)
    assert re.search("asks for is refused: .*; set parallel.accumulate to scan", report.causes[0])
    assert not report.of("FAILED")
    assert elsewhere_cases.verified([*argv, "--parallel.accumulate", "scan"], devices=2).verified


NARROW = {"bfloat16": ["--precision.compute", "bfloat16"]}
NARROW["float16"] = ["--precision.compute", "float16", "--precision.loss_scale", "dynamic"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
@pytest.mark.parametrize("dtype", sorted(NARROW, reverse=True))
def test_a_device_sums_gradients_in_float32(tmp_path, dtype, accumulate):
    (tmp_path / "config.yaml").write_text(elsewhere_cases.CONFIG)
    config = load(["--config", str(tmp_path / "config.yaml"), *NARROW[dtype]], "verify")[0]
    parts = make_parts(config)
    strategy, step = make_variant(
        config, parts, ONE_DEVICE._replace(accumulate=accumulate), jax.devices()[:1]
    )
    state = strategy.export(strategy.init())
    assert error_of_sum(parts, step, state) < 1e-6
    if dtype == "float16":  # some overflow alone, some only as a sum
        for power in range(16, 20):
            scale = state.loss_scale.replace(value=jnp.float32(2.0**power))
            assert error_of_sum(parts, step, state.replace(loss_scale=scale)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_a_run_is_verified_in_its_own_precision_too(dtype):
    report = elsewhere_cases.verified(NARROW[dtype], devices=4)
    [check] = [check for check in report.checks if check.name == f"in {dtype}"]
    assert (
        check.verdict == "ok"
        and "4 configurations skip the same updates" in check.text
        and report.verified
    )


def test_what_one_precision_alone_shows_is_reported():
    """Skipped updates, loss scales and losses that differ."""
    one = {"loss": 2.0, "skipped": 0, "loss_scale": 8.0}

    def judge(**other):
        curves = [one, {**one, **other}], [one, one]
        return find_difference(*(decisions(None, curve) for curve in curves), 0.01)

    assert judge() == judge(loss=2.002) == judge(accuracy=0.0) == ""
    assert judge(skipped=1) == "update 2/skipped is 1, not 0"
    assert judge(loss_scale=4.0) == "update 2/loss_scale is 4.0, not 8.0"
    assert judge(loss=np.nan) == "update 2/loss is nan, not 2.0"


@pytest.mark.slow
def test_an_evaluation_that_counts_padding_is_found(tmp_path):
    argv = [*verify_cases.named("model", "evaluated", plant="padding"), *verify_cases.EVALUATED]
    report = verified(tmp_path, [*argv, "--batch_size", "20"])
    assert len(report.causes) == 1 and "counts padded examples, in evaluation: " in report.causes[0]


@pytest.mark.slow
@pytest.mark.parametrize("size, verdict", [(24, "note"), (20, "FAILED")])
def test_padding_is_judged_where_it_is(tmp_path, size, verdict):
    """The evaluation has padding in both; of a model whose training alone counts it, that says
    nothing.
    """
    argv = [
        *verify_cases.named("model", "centered"),
        *verify_cases.EVALUATED,
        "--eval.data.args.size",
        "23",
    ]
    report = verified(tmp_path, [*argv, "--batch_size", str(size), "--microbatches", "4"])
    [check] = [check for check in report.checks if check.name == "padding"]
    assert check.verdict == verdict and "padded examples: outputs" in check.text


@pytest.mark.slow
def test_one_device_alone_verifies_nothing(tmp_path):
    report = verified(tmp_path, verify_cases.named("model", "pair"), devices=1)
    assert report.of("ok") and report.causes[0].startswith(
        "nothing was compared but on 1 device(s); use --devices 2"
    )


@pytest.mark.slow
@pytest.mark.parametrize("argv", [verify_cases.named("model", "stopped"), ["--optimizer.lr", "0"]])
def test_models_without_gradients_or_steps_do_not_pass(tmp_path, argv):
    report = verified(tmp_path, argv)
    assert report.reference.compared == (0, 4) and report.causes == [
        "no parameter was compared that training moves"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(verify_cases.GOOD))
def test_a_model_independent_of_the_host_is_verified(tmp_path, case):
    report = verified(
        tmp_path, verify_cases.GOOD[case], updates=3
    )  # two of lion may go there and back
    assert report.verified, report.causes
    judged, every = report.reference.compared
    uncompared = [path for path in report.reference.uncompared if path.startswith("params/")]
    assert len(uncompared) == (
        case in ("bias before BatchNorm", "attention")
    )  # of keys, too, a bias has no gradient
    assert judged and every - judged == len(uncompared) + (case == "unused parameter")
    assert (
        f"{judged} of {every} trained leaves compared" in report.as_text("title").splitlines()[-1]
    )


RANKS = {  # what a rank has of its own: (arguments, what is refused before training)
    "model": (
        verify_cases.named("model", "pair", plant="rank"),
        r"the gradients at tests/support/verify_cases.py:\d+=",
    ),
    "initial values": (verify_cases.named("model", "ranked"), "the initial state"),
    "optimizer": (verify_cases.named("optimizer", "rate_by_rank"), "the update"),
    "data": (verify_cases.named("data", "Data", plant="pid"), "data fingerprint="),
}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "case", [pytest.param(k, marks=[] if k == "model" else pytest.mark.slow) for k in RANKS]
)
def test_ranks_with_different_programs_are_refused(tmp_path, case):
    argv, cause = RANKS[case]
    done = on_ranks("train", tmp_path, *argv, "--run_dir", str(tmp_path / "run"))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.output
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("jaxdp: ")]
    assert re.search(rf"rank 1 \(host .*\) has {cause}", said), said


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "values", "fact"),
    [
        ("cpu_enable_fast_math", ("false", "true"), "XLA_FLAGS="),
        ("force_host_platform_device_count", ("1", "2"), "local devices=2"),
    ],
)
def test_ranks_with_other_compiler_options_are_refused(tmp_path, flag, values, fact):
    """Replicas that each rank updates by itself would drift apart; JAX fails where ranks have more
    devices.
    """
    code = "import os; rank = int(os.environ['OMPI_COMM_WORLD_RANK']); os.environ['XLA_FLAGS'] = "
    code += f"'--xla_{flag}=' + {values}[rank]; from jaxdp.cli import main; main()"
    (tmp_path / "config.yaml").write_text(TINY)
    argv = [
        "-c",
        code,
        "train",
        "--config",
        str(tmp_path / "config.yaml"),
        "--run_dir",
        str(tmp_path / "run"),
    ]
    done = launch.mpirun(2, argv, env={"PYTHONPATH": f"{ROOT}:{launch.SUPPORT}"}, timeout=300)
    assert (
        done.returncode == 2 and f"has {fact}" in done.stderr and "Traceback" not in done.stderr
    ), done.output


@pytest.mark.mpi
@pytest.mark.slow
def test_the_processes_of_a_job_verify_together(tmp_path):
    done = on_ranks("verify", tmp_path, "--updates", "1", "--verify.strategies", "3")
    assert done.returncode == 0 and done.stdout.count("verified: ") == 1, done.output  # one report
    assert (
        "2 x cpu in 2 processes" in done.stdout and "4 of 4 trained leaves compared" in done.stdout
    )
    assert re.findall(r"^devices (\d) backend", done.stdout, re.MULTILINE)[1:] == ["2"] * 3
    for case, (argv, cause) in RANKS.items():
        done = on_ranks("verify", tmp_path, *argv)
        assert done.returncode == 2 and "verified" not in done.stdout, (case, done.output)
        assert re.search(rf"^jaxdp: .*rank 1 \(host .*\) has {cause}", done.stderr, re.MULTILINE), (
            case,
            done.output,
        )


def on_ranks(verb, tmp_path, *argv):
    (tmp_path / "config.yaml").write_text(TINY)
    path = f"{ROOT}:{launch.SUPPORT}"
    argv = ["-m", "jaxdp", verb, "--config", str(tmp_path / "config.yaml"), *argv]
    return launch.mpirun(2, argv, env={"PYTHONPATH": path}, timeout=300)


@pytest.mark.slow
def test_a_right_model_passes_with_notes_on_precision(judged):
    report = judged("--optimizer.target", "lamb", updates=1)
    assert report.verified and {c.name for c in report.checks} >= {
        "data",
        "repeat",
        "loss",
        "padding",
    }
    report = judged("--model.args.fault", "narrow", updates=2)
    assert report.verified and "allowed 1e-05" in report.agreement
    assert report.reference.largest[0] > 1e-9
    assert "the model and the loss compute in float32" in report.setting


def looped(x):
    """A loop with a state in float32: no model that contains it can be traced in float64."""
    return jax.lax.fori_loop(0, 2, lambda _, total: total + x, jnp.zeros(x.shape, jnp.float32))


@pytest.mark.parametrize(
    ("dtype", "between"),
    [
        ("float64", lambda x: x * np.ones(toys.CLASSES, np.float32)),  # casts it to float64
        ("float32", looped),
        ("bfloat16", lambda x: looped(x.astype(jnp.bfloat16).astype(x.dtype))),
    ],
)
def test_the_least_precise_dtype_of_a_model_is_found(dtype, between):
    def init(key, batch):
        return {"kernel": jax.random.normal(key, (batch["inputs"][0].size, toys.CLASSES))}, {}

    def apply(params, state, batch, key, train):
        return between(batch["inputs"].reshape(len(batch["inputs"]), -1) @ params["kernel"]), state

    with settings(jax.devices()[0]):
        fixed = problem(Model(init, apply))
        assert dtype_of(make_oracle(fixed, make_trial(fixed, 4, 1))) == dtype


NOISE = "params/Dense_0/bias"


@pytest.mark.slow
def test_a_gradient_of_rounding_noise_is_named_apart(judged):
    report = judged("--model.args.fault", "noise")
    assert report.verified and {
        p for p in report.reference.uncompared if p.startswith("params/")
    } == {NOISE}
    assert any(
        c.name == "rounding" and re.match(f"not compared, .*{NOISE}", c.text) for c in report.checks
    )
    assert "5 of 6 trained leaves compared" in report.as_text("title").splitlines()[-1]
    assert report.reference.largest[0] < 1e-11  # the running mean moves with the bias
    whole_steps = ["--optimizer.args.eps", "1e-30"]  # Adam makes steps even of gradients of 1e-18
    # half of this bias goes into the norm, and the other half does not
    report = judged("--model.args.fault", "part", *whole_steps)
    mean = "model_state/batch_stats/BatchNorm_0/mean"
    assert report.verified and {NOISE, mean} <= report.reference.uncompared
    assert report.reference.compared == (5, 6)


@pytest.mark.slow
def test_a_failure_names_what_failed_strategies_share(judged, monkeypatch):
    good = xla()
    lossy = good._replace(
        reduce=lambda tree, axes: jax.tree.map(lambda x: 0.5 * x, good.reduce(tree, axes))
    )
    monkeypatch.setitem(REDUCTIONS, "bucket", lambda *args, **more: lossy)
    report = judged("--optimizer.target", "sgd", "--verify.strategies", "4", updates=1)
    assert not report.verified and "reduction bucket" in report.causes[0]
    assert {c.reduction for c in report.of("FAILED")} == {"bucket"}


def problem(model, dataset=None, parallel=Parallel()):  # noqa: B008
    dataset = dataset or Arrays(**toys.data())
    adam = Optimizer(target="adamw", lr=0.01, weight_decay=0.1, no_decay=[])
    config = Config(optimizer=adam, parallel=parallel)
    forward, order = Forward(model, SoftmaxCrossEntropy()), EpochOrder(len(dataset), 32, 8, 0)
    rule = UpdateRule(optax.adamw(0.01, weight_decay=0.1))
    return Problem(config, Parts(forward, rule, dataset, {}, order, 100, False, None))


@pytest.mark.slow
def test_every_kind_of_state_is_compared(judged):
    more = [
        "--optimizer.clip_norm",
        "0.5",
        "--optimizer.ema",
        "0.9",
        "--optimizer.frozen",
        "[head/bias]",
    ]
    more += [
        "--model.target",
        "verify_cases.recurrent",
        "--data.target",
        "verify_cases.shaped",
        "--batch_size",
        "16",
    ]
    report = judged(*more, "--optimizer.weight_decay", "0.1", "--verify.strategies", "2")
    # The mean over a microbatch counts padding, which the check of padding finds; everything else
    # agrees.
    assert [c.verdict for c in report.checks][:4] == ["ok", "ok", "ok", "FAILED"] and len(
        report.causes
    ) == 1
    assert not report.of("FAILED") and report.reference.largest[0] < 1e-13
    trained = report.reference.trained
    errors = report.reference.errors(trained.state, trained.curve)
    assert {path.split("/")[0] for path in errors} == {*COMPARED, "curve"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "resnet", "dropout"])
def test_the_oracle_agrees_with_an_independent_one(model):
    forward = {
        "mlp": plain_oracle.mlp,
        "resnet": plain_oracle.resnet,
        "dropout": plain_oracle.dropout_mlp,
    }[model]
    data = toys.data(48, dtype="float64")
    with settings(jax.devices()[0]):
        made, tx = toys.MODELS[model](), optax.adamw(1e-2, weight_decay=0.1)
        cursor = EpochOrder(48, 16, 8, 0, shuffle=False)
        batches = [read_batches(Arrays(**data), cursor, [i], np.arange(8)) for i in range(3)]
        trial = Trial(batches, cursor)
        oracle = Oracle(problem(made, Arrays(**data)), trial, "float64")
        params, state = oracle.first.params, oracle.first.model_state
        got = train(oracle, params).state
        want = plain_oracle.train(
            forward, params, state, tx, data, steps=3, batch_size=16, microbatches=8
        )
        assert toys.relative_error((got.params, got.model_state), want)[0] < 1e-12


def test_every_value_of_every_factor_meets_every_stage():
    devices, own = jax.devices()[:8], Configuration(8, "pjit", 3, "bucket", "scan", "replicated", 2)
    rows = choose_configurations(own, devices)
    assert (
        rows[0].devices == 1
        and rows[1] == own
        and len(rows) <= 19
        and len(set(rows)) == len(rows)
        and all(map(is_meaningful, rows))
    )
    met = set().union(*map(pairs, rows))
    stages = {(name, zero) for name, zeros in STAGES.items() for zero in zeros}
    for factor, values in {
        "devices": (8, 3),
        "reduction": ("xla", "bucket"),
        "accumulate": ("vmap", "scan"),
    }.items():
        assert {(("stage", s), (factor, v)) for s in stages for v in values} <= met
    split = {
        (("stage", ("pjit", zero)), ("gradient_buffer", a))
        for zero in (2, 3)
        for a in ("sharded", "replicated")
    }
    groups = {
        (("stage", ("pjit", zero)), ("shard_size", n)) for zero in (1, 2, 3) for n in (None, 4)
    }
    assert split | groups <= met
    assert choose_configurations(Configuration(1, "pmap"), devices[:1])[0].devices == 1


def state_of(params):
    return TrainState(np.zeros((), np.int32), params, {}, {})


TOO_FAR = "not compared, because rounding alone moves them too far: params/b"


@pytest.mark.parametrize("gradient", ["noise", "zero", "zero in part"])
def test_only_a_zero_gradient_may_go_unjudged(gradient):
    rng, rounding = (
        np.random.default_rng(0),
        {"noise": 1.0, "zero": 1e-17, "zero in part": 1e-17}[gradient],
    )

    def trained(params):
        grads = {"a": np.ones(3), "b": rounding * rng.normal(size=3)}
        if gradient == "zero in part":
            grads["b"] = np.array([*grads["b"][:2], 1.0])
        moved = {k: params[k] - 0.1 * np.sign(g) for k, g in grads.items()}
        return Trained(state_of(params), state_of(moved), [{"loss": np.ones(())}], [grads])

    params = {"a": np.ones(3), "b": np.array([1.0, 2.0, 3.0])}
    while True:  # until the signs of two gradients differ
        found = Reference(trained, params, 1e-16, 1e-10)
        if found.uncompared:
            break
    assert found.uncompared == {"params/b"}
    wrong = [text for verdict, text in found.notes if verdict == "FAILED"]
    assert [text[: len(TOO_FAR)] for text in wrong] == [TOO_FAR] * (gradient == "noise")
    assert found.compared == (1, 2) and "params/b" not in found.allowed


def test_parameters_are_compared_by_what_they_move():
    """An update of twice the size is found where it is small beside the parameters, and the model
    is not precise.
    """

    def trained(params, times=1.0):
        noise = 1 + 0.01 * np.sin(1e4 * params["a"])
        moved = state_of({"a": params["a"] - 1e-3 * times * noise})
        return Trained(state_of(params), moved, [{"loss": np.ones(())}], [params])

    params = {"a": np.linspace(1.0, 2.0, 50)}
    found = Reference(trained, params, 2**-7, 0.05)
    assert found.compared == (1, 1)
    assert found.errors(found.trained.state, [{"loss": np.ones(())}])["params/a"] == 0
    assert found.errors(trained(params, 2.0).state, [{"loss": np.ones(())}])["params/a"] > 0.05


def test_errors_are_relative_in_the_norm_of_a_leaf():
    one = np.array([3.0, 4.0])
    assert difference(one + np.array([0.0, 5e-3]), one) == pytest.approx(1e-3)
    assert difference(one * 0, one * 0) == 0 and difference(one, one * 0) == np.inf
    assert difference(np.array([np.nan, 4.0]), one) == np.inf and difference(None, one) == np.inf
    assert difference(np.array([1, 2]), np.array([1, 3])) == np.inf


def test_too_large_or_small_cases_name_what_to_set(monkeypatch):
    small = problem(toys.MODELS["mlp"]())
    with settings(jax.devices()[0]):
        monkeypatch.setattr("jaxdp.process.hosts.free_memory", lambda: 1e3)
        with pytest.raises(
            UsageError,
            match=r"verify.model_args: the model and its optimizer need .* --verify.model_args.layers 2",
        ):
            check_memory(small, jax.devices()[:4])
    few = problem(toys.MODELS["mlp"](), Arrays(**toys.data(5)))
    with pytest.raises(UsageError, match="data: 5 examples cannot be split into 8 microbatches"):
        verify(few, jax.devices()[:4])
    wrong = problem(toys.MODELS["mlp"](), parallel=Parallel(backend="pjit", zero=1, shard_size=3))
    with pytest.raises(UsageError, match=r"parallel.shard_size: 3 does not split 4 devices"):
        verify(wrong, jax.devices()[:4])


@pytest.mark.slow
def test_language_models_are_verified_small():
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        if "PythonSource" not in file.read_text():
            continue
        config = load(["--config", str(file)], "verify")[0]
        made = make_problem(config)
        example = {"inputs": jnp.zeros((2, *made.parts.dataset.input_shape), jnp.int32)}
        params = jax.eval_shape(made.parts.forward.model.init, jax.random.key(0), example)[0]
        assert sum(x.size for x in jax.tree.leaves(params)) < 1e6, file
        assert made.parts.dataset.input_shape == (32,)
