"""A plan says what a real run then allocates and moves."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial

import toys
from covering import first
from jaxdp.cli import load
from jaxdp.cli.plan import as_dict, read_bytes, read_stages, remarks
from jaxdp.config import Parallel
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.models.gpt import GPT
from jaxdp.parallel.layout import Sharding, Share
from jaxdp.plan.hardware import HARDWARE
from jaxdp.plan.hlo import summarize
from jaxdp.plan.prediction import Case, Memory, Plan, make_plan, predict, recommend
from jaxdp.run.build import changes_for
from jaxdp.run.components import STRATEGIES, make_reduction
from jaxdp.run.model_summary import count_flops
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step
from launch import in_process
from planning import run

TOKENS = 16
ROOT = pathlib.Path(__file__).parents[2]


def case(backend, zero, n, model=None, gradient_buffer="sharded", per_device=1, shard_size=None):
    model = model or as_model(lambda rngs: GPT((TOKENS,), 64, layers=2, heads=2, dim=32, rngs=rngs))
    tx, example = (
        optax.adamw(1e-3),
        {k: np.zeros((2, TOKENS), np.int32) for k in ("inputs", "labels")},
    )
    forward, rule = Forward(model, SoftmaxCrossEntropy()), UpdateRule(tx)
    make = Partial(lambda: init_state(forward, rule, n * per_device, example))
    strategy = STRATEGIES[backend](
        make, n * per_device, make_reduction("xla"), None, jax.devices()[:n],
        Sharding(zero, shard_size, gradient_buffer, model.blocks),
    )  # fmt: skip
    step = make_step(forward, rule, "scan" if per_device > 1 else "vmap")
    return Case(
        strategy,
        step,
        {**example, "mask": np.zeros(2, np.float32)},
        zero > 1 and gradient_buffer == "sharded",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", first(1, [("pmap", 1), ("pmap", 0), ("pjit", 1), ("pjit", 2), ("pjit", 3)]), ids=str
)
def test_state_bytes_are_those_of_a_real_run(where):
    backend, zero = where
    made = case(backend, zero, 8)
    memory = make_plan(made, zero).memory
    state = made.strategy.init()
    device = made.strategy.devices[3]

    def on_device(tree):
        return sum(
            s.data.nbytes
            for x in jax.tree.leaves(tree)
            for s in x.addressable_shards
            if s.device == device
        )

    assert memory.params == on_device(state.params)
    assert memory.opt_state == on_device(state.opt_state)
    batch = made.strategy.shard_batch(
        {k: np.zeros((8, *v.shape), v.dtype) for k, v in made.example.items()}
    )
    assert memory.batch == on_device(batch)
    assert memory.peak >= memory.params + memory.grads + memory.opt_state


@pytest.mark.slow
def test_what_is_moved_per_stage():
    P = 4 * sum(x.size for x in jax.tree.leaves(case("pjit", 0, 8).strategy.shapes.params))

    def wire(zero, **more):
        return sum(
            t.wire
            for t in summarize(
                list(make_plan(case("pjit", zero, 8, **more), zero).collectives)
            ).values()
        )

    assert wire(0) == pytest.approx(2 * P, rel=0.02)
    assert wire(1) == pytest.approx(2 * P, rel=0.02)
    assert wire(2, per_device=4) == pytest.approx(5 * P, rel=0.02)


def test_flops_are_those_of_the_products():
    def f(x, w):
        def step(x, _):
            return (jnp.tanh(x @ w), None)

        return jax.lax.scan(step, x, None, length=5)[0].sum()

    x, w = jnp.ones((3, 4)), jnp.ones((4, 4))
    assert count_flops(jax.make_jaxpr(f)(x, w)) == 5 * 2 * 3 * 4 * 4
    assert (
        count_flops(jax.make_jaxpr(jax.grad(f, 1))(x, w)) == 5 * 3 * 2 * 3 * 4 * 4
    )  # forward, and both operands
    again = count_flops(jax.make_jaxpr(jax.grad(jax.checkpoint(f), 1))(x, w))
    assert again == 5 * 4 * 2 * 3 * 4 * 4

    def branch(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ w)

    assert count_flops(jax.make_jaxpr(branch)(x, w)) == 2 * 2 * 3 * 4 * 4
    image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))

    def conv(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert count_flops(jax.make_jaxpr(conv)(image, kernel)) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", first(1, ["pjit", "pmap"]))
def test_flops_of_an_update_are_one_device_s(backend):
    """6 per parameter and token, and attention's: the published rule (Kaplan et al., arXiv
    2001.08361).
    """
    plan = make_plan(case(backend, 0, 8), 0)
    shapes = case(backend, 0, 8).strategy.shapes.params
    used = sum(x.size for x in jax.tree.leaves(shapes)) - shapes["positions"].size
    tokens, attention = 2 * TOKENS, 12 * 2 * 32 * TOKENS * 2 * TOKENS  # 12 layers dim T per token
    assert plan.flops == pytest.approx(6 * used * tokens + attention, rel=0.05)


@pytest.mark.slow
def test_the_lowest_stage_that_fits_is_recommended():
    plans = [make_plan(case("pjit", z, 8), z) for z in (0, 3)]
    assert plans[0].memory.peak > plans[1].memory.peak
    assert recommend(plans, plans[0].memory.peak).zero == 0
    assert recommend(plans, plans[1].memory.peak).zero == 3
    assert recommend(plans, 1) is None


@pytest.mark.slow
def test_more_bandwidth_is_never_slower():
    plan, fast = make_plan(case("pjit", 3, 8), 3), HARDWARE["h100-nvlink-ib400"]
    slow = fast._replace(intra_bandwidth=fast.intra_bandwidth / 10)
    a, b = predict(plan, fast, "float32"), predict(plan, slow, "float32")
    assert a["communication"] < b["communication"] and a["compute"] == b["compute"]
    assert 0 < b["efficiency"] < a["efficiency"] <= a["efficiency_overlap"] <= 1


@pytest.mark.slow
def test_a_model_without_blocks_is_gathered_in_full():
    assert not make_plan(case("pjit", 3, 2), 3).gathered_whole
    model = toys.MODELS["mlp"]()
    forward, rule = Forward(model, SoftmaxCrossEntropy()), UpdateRule(optax.sgd(0.1))
    make = Partial(lambda: init_state(forward, rule, 2, toys.data(2)))
    strategy = STRATEGIES["pjit"](
        make, 2, make_reduction("xla"), None, jax.devices()[:2], Sharding(3)
    )
    step = make_step(forward, rule)
    example = {**toys.data(2), "mask": np.zeros(2, np.float32)}
    assert make_plan(Case(strategy, step, example, True), 3).gathered_whole


def test_options_are_read():
    assert [read_bytes(t) for t in ("80GB", "80 gb", "80e9", "1.5KiB")] == [80e9, 80e9, 80e9, 1536]
    assert (
        read_stages("all", 2) == [0, 1, 2, 3]
        and read_stages("config", 2) == [2]
        and read_stages("1", 2) == [1]
    )
    for bad in ("much", "80 GBit", "0"):
        with pytest.raises(UsageError, match="not a number of bytes"):
            read_bytes(bad)
    with pytest.raises(UsageError, match="--zero: '4' is not 0"):
        read_stages("4", 0)


def test_stages_of_the_option_decide_what_is_checked():
    argv = [
        "--config",
        "configs/digits.yaml",
        "--parallel.backend",
        "pjit",
        "--parallel.shard_size",
        "2",
    ]
    for stages, zero in {"3": "0", "all": "0", "0": "3"}.items():
        config, _, options = load([*argv, "--zero", stages, "--parallel.zero", zero], "plan")
        assert config.parallel.shard_size == 2 and options["zero"] == stages
    for stages in ("0", "config"):
        with pytest.raises(UsageError, match="shard_size: 2 with zero: 0, which splits nothing"):
            load([*argv, "--zero", stages], "plan")


def test_what_a_run_must_set_for_a_stage():
    assert [changes_for(Parallel(), zero) for zero in (0, 1, 2)] == [{}, {}, {"backend": "pjit"}]
    split = Parallel("pjit", zero=3, shard_size=2, rules={"head": [None, "shard"]})
    assert changes_for(split, 3) == {} and changes_for(split, 0) == {
        "shard_size": None,
        "rules": {},
    }


@pytest.mark.slow
def test_a_gpt2_for_1024_devices_on_this_machine():
    """Hybrid ZeRO-2 in groups of 8: what is split is 1/8 of the formulas' bytes, whatever the
    number of devices.
    """
    arguments = ["--parallel.backend", "pjit", "--parallel.zero", "2", "--parallel.shard_size", "8"]
    done = run("--devices", "1024", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    (two,) = plan["plans"]
    P = 4 * plan["parameters"]
    assert plan["parameters"] == 124_466_688 and two["share"]["replicated"] == 0
    np.testing.assert_allclose(
        [two["memory"][k] / P for k in ("params", "grads", "opt_state")], [1, 1 / 8, 2 / 8], 1e-6
    )
    assert two["collectives"]["all-reduce"]["bytes"] == pytest.approx(P / 8, rel=0.02)
    assert plan["recommended"] is None and plan["examples"] == 1024 * 16
    assert any(
        "microbatches: 32 cannot be split over 1,024 devices" in note for note in plan["notes"]
    )
    assert int(re.findall(r"peak: (\d+) KiB", done.stderr)[0]) < 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--zero", "3"], ["\nzero 3 fits 80 GB (peak ", "B); it needs parallel.backend: pjit\n"]),
        (
            ["--zero", "3", "--json"],
            ['"needs": "parallel.backend: pjit"', '"zero 3 needs parallel.backend: pjit"'],
        ),
        (
            ["--memory", "1KB"],
            ["\nzero 0 does not fit 1 kB: zero 0 needs ", "; try --zero all, more devices, "],
        ),
        (
            ["--zero", "all", "--optimizer.target", "lamb"],
            [
                "\nzero 0 is the lowest stage that fits",
                "\nzero 1 is left out, since a run would refuse it: optimizer.t",
            ],
        ),
    ],
    ids=str,
)
def test_the_verdict_is_on_what_was_planned(argv, words):
    """Under pmap, a run refuses zero 1 with an optimizer that is not elementwise."""
    model = ["--model.args.hidden", "[16]", "--parallel.backend", "pmap"]
    done = in_process("plan", "--config", "configs/digits.yaml", *model, "--devices", "2", *argv)
    assert done.returncode == 0 and all(text in done.stdout for text in words), (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_a_loop_that_only_a_run_knows_is_reported():
    """An exact sum is tried again while it does not fit; its flags need a process of its own."""
    words = ["--devices", "2", "--model.args.hidden", "[16]", "--json"]
    plain = in_process("plan", "--config", "configs/digits.yaml", *words)
    exact = run(*words, "--parallel.reduction", "exact", config="digits")
    for done, is_known in ((plain, True), (exact, False)):
        plan = json.loads(done.stdout)
        loops = plan["plans"][0]["unknown_loops"]
        assert bool(loops) != is_known
        note = f"zero 0: only a run knows the iterations of {len(loops)} of its loops; each"
        assert any(text.startswith(note) for text in plan["notes"]) != is_known, plan["notes"]


def test_groups_in_an_unknown_syntax_are_reported():
    """XLA may print groups of devices in a new way; the plan then counts all devices as one."""
    plan = Plan(0, 2, 4, Memory(*[1.0] * 7), Share(0, 8, 0, 0), False, (), 1.0, [], [])
    config, *_ = load(["--config", "configs/digits.yaml"])
    hardware = HARDWARE["h100-nvlink-ib400"]
    for groups, is_known in (([], True), (["<0..1>", "<0..1>"], False)):
        changed = plan._replace(unknown_groups=groups)
        assert as_dict(changed)["unknown_groups"] == groups and plan.unknown_groups == []
        notes = remarks(config, [changed], hardware, "float32", 4, 2, 64)
        note = "zero 0: 2 collectives are between groups of devices in an unknown syntax, such as <0..1>; "
        assert any(text.startswith(note) for text in notes) != is_known, notes


def test_bad_options_are_one_line():
    for argv, words in {
        ("--devices", "0"): "--devices: 0 is too small",
        ("--hardware", "h100"): "did you mean",
        ("--memory", "lots"): "--memory: 'lots' is not a number of bytes",
        ("--zero", "9"): "--zero: '9' is not 0",
        ("--network", ""): "--network: '' is not a rate and a latency",
    }.items():
        done = in_process("plan", "--config", "configs/digits.yaml", *argv)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
