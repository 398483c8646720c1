"""Exact mode trains the same bits on any number of devices and processes, in every stage; and what
that is made of.

Bits of runs are compared in jobs of their own, which `jaxdp.exact.flags.set_flags` prepares before JAX
starts."""

import functools
import itertools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from cli_runs import DIGITS, curve, jaxdp, records, write
from covering import cover, first
from jaxdp.api import fit
from jaxdp.config import Config, Optimizer
from jaxdp.errors import UsageError
from jaxdp.exact import flags
from jaxdp.exact.rounding import as_written, fusion_barrier
from jaxdp.models import as_model
from jaxdp.models.mlp import MLP
from jaxdp.optim import OPTIMIZERS
from jaxdp.parallel.placement import assign_microbatches
from jaxdp.plan.hlo import collectives
from jaxdp.process import private_jax
from jaxdp.run.preflight import check_optimizer
from jaxdp.verify import compare_bits
from jaxdp.verify.problem import Configuration
from launch import Finished, mpirun, together

SCRIPT = str(pathlib.Path(__file__).with_name("exact_job.py"))
MODELS = ("dropout", "resnet", "lstm", "blocks", "gpt")
WAYS = (
    "pmap-0-{}-sharded",
    "pmap-1-{}-sharded",
    "pjit-0-{}-sharded",
    "pjit-1-{}-sharded",
    "pjit-2-{}-sharded",
)
WAYS += ("pjit-2-{}-replicated", "pjit-3-{}-sharded", "pjit-3-{}-replicated")

# --- the same bits
# --------------------------------------------------------------------------------------------------

COVER = {
    "dropout": ("pmap-0-1-sharded", "pmap-1-3-sharded", "pjit-3-5-sharded", "pjit-2-8/4-sharded"),
    "gpt": ("pmap-0-1-sharded", "pjit-2-2-sharded", "pjit-1-6/3-sharded", "pjit-3-7-sharded"),
    "resnet": ("pjit-0-1-sharded", "pjit-2-3-replicated", "pmap-1-8-sharded", "pjit-3-6/2-sharded"),
    "lstm": ("pmap-1-1-sharded", "pjit-0-5-sharded", "pjit-2-4-replicated", "pjit-3-7-replicated"),
    "blocks": ("pjit-1-1-sharded", "pjit-3-3-sharded", "pmap-0-6-sharded", "pjit-2-8/2-sharded"),
}
# fewer bytes, and microbatches in groups: other numbers, and the same on any number of devices
NARROW = {
    "dropout-exact16": ("pjit-0-1-sharded", "pmap-1-3-sharded", "pjit-2-8/4-replicated"),
    "blocks-exact8": ("pmap-0-1-sharded", "pjit-3-6-sharded", "pjit-2-5-replicated"),
    "resnet-exact/2": ("pjit-0-1-sharded", "pmap-1-3-sharded", "pjit-3-4/2-sharded"),
}
FAULTS = {  # each adds up in another order than one device; loops over 8 devices would not
    how: [f"dropout-pjit-0-{n}-sharded-adamw-{how}" for n in (1, devices)]
    for how, devices in (("vmap", 8), ("scan", 3))
}
PROCESSES = ("dropout-pmap-1-4-sharded", "dropout-pjit-2-4/2-replicated", "blocks-pjit-3-4-sharded")


def rows_of(model, ways, optimizer="adamw", how="exact"):
    return [f"{model}-{way}-{optimizer}-{how}" for way in ways]


def narrow_rows():
    return [
        row
        for name, ways in NARROW.items()
        for row in rows_of(*name.split("-")[:1], ways, how=name.split("-")[1])
    ]


def read(job: Finished):
    """{row: (digest, [[loss, norm] of each update])}"""
    assert job.returncode == 0 and not job.left, job.output
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def run(rows, devices=8, processes=1, timeout=1800.0):
    if processes == 1:
        return read(together([([sys.executable, SCRIPT, *rows], {})], timeout, devices)[0])
    return read(mpirun(processes, [SCRIPT, *rows], devices=devices, timeout=timeout))


def kind(row):
    """What must be equal is of the same model, optimizer and sum."""
    model, *_, optimizer, how = row.split("-")
    return model, optimizer, how


def differing(trained):
    """[(row, the first update whose loss or norm is another than that of the first row of its kind,
    or 'state')]
    """
    first, found = {}, []
    for row, (digest, numbers) in trained.items():
        want = first.setdefault(kind(row), (digest, numbers))
        if (digest, numbers) != want:
            found.append(
                (
                    row,
                    next(
                        (
                            i
                            for i, (a, b) in enumerate(zip(numbers, want[1], strict=True))
                            if a != b
                        ),
                        "state",
                    ),
                )
            )
    return found


def of_exact_sums(trained):
    return {row: got for row, got in trained.items() if "exact" in row}


@pytest.fixture(scope="module")
def trained():
    """Two jobs of eight devices at the same time: compiling is what takes the time."""
    jobs = [["dropout", "gpt"], ["resnet", "lstm", "blocks"]]
    rows = [[row for model in models for row in rows_of(model, COVER[model])] for models in jobs]
    rows[0] += [row for pair in FAULTS.values() for row in pair] + narrow_rows()[:3]
    rows[1] += narrow_rows()[3:]
    done = together(
        [([sys.executable, SCRIPT, *some], {}) for some in rows], timeout=1800, devices=8
    )
    return {row: got for job in done for row, got in read(job).items()}


@pytest.mark.slow
@pytest.mark.xdist_group("trained")
def test_every_model_has_one_digest_in_every_stage(trained):
    exact = of_exact_sums(trained)
    assert not (wrong := differing(exact)), wrong
    assert len({digest for digest, _ in exact.values()}) == len(MODELS) + len(NARROW)
    for _, numbers in exact.values():
        losses = [float.fromhex(loss) for loss, _ in numbers]
        assert len(set(losses)) == 6 and np.isfinite(losses).all()


@pytest.mark.slow
@pytest.mark.xdist_group("trained")
def test_exact_losses_are_near_those_of_float_sums(trained):
    def losses(row):
        return np.array([float.fromhex(loss) for loss, _ in trained[row][1]])

    usual = losses(FAULTS["scan"][0])
    np.testing.assert_allclose(losses(rows_of("dropout", COVER["dropout"])[0]), usual, rtol=1e-5)
    np.testing.assert_allclose(losses(narrow_rows()[0]), usual, rtol=1e-2)
    blocks, eight = losses(rows_of("blocks", COVER["blocks"])[0]), losses(narrow_rows()[3])
    np.testing.assert_allclose(eight, blocks, rtol=0.15)


def test_the_cover_has_all_devices_models_and_stages():
    split = {model: [way.split("-") for way in ways] for model, ways in COVER.items()}
    counts = {
        model: [int(place.partition("/")[0]) for _, _, place, _ in ways]
        for model, ways in split.items()
    }
    assert set().union(*counts.values()) == set(range(1, 9))
    for model, ways in split.items():
        assert (
            1 in counts[model]
            and any(n % 2 for n in counts[model] if n > 1)
            and max(counts[model]) >= 6
        )
        assert {int(zero) for _, zero, _, _ in ways} == {0, 1, 2, 3}
    everywhere = {
        f"{backend}-{zero}-{{}}-{how}" for ways in split.values() for backend, zero, _, how in ways
    }
    assert everywhere == set(WAYS) and set(split) == set(MODELS)


@pytest.mark.slow
@pytest.mark.xdist_group("trained")
def test_an_ordinary_sum_does_not_pass_for_exact(trained):
    """The same rows, but for the reduction: what is compared does see another order of adding up."""
    for one, more in FAULTS.values():
        assert [row for row, _ in differing({row: trained[row] for row in (one, more)})] == [more]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.xdist_group("trained")
def test_two_processes_of_two_devices_are_one_device(trained):
    together = run([f"{row}-adamw-exact" for row in PROCESSES], devices=2, processes=2, timeout=600)
    assert len(together) == len(PROCESSES)
    assert not (wrong := differing(of_exact_sums(trained) | together)), wrong


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.xdist_group("trained")
@pytest.mark.parametrize(
    ("processes", "devices", "rows"),
    [
        (
            3,
            1,
            ("dropout-pmap-1-3-sharded-adamw-exact", "blocks-pjit-3-3-sharded-adamw-exact8"),
        ),  # shares of 3, 3 and 2
        (4, 1, ("dropout-pjit-2-4-sharded-adamw-exact16", "lstm-pmap-0-4-sharded-adamw-exact")),
    ],
)
def test_uneven_shares_of_processes_equal_one_device(trained, processes, devices, rows):
    together = run(rows, devices, processes, timeout=600)
    assert len(together) == len(rows)
    assert not (wrong := differing(of_exact_sums(trained) | together)), wrong


def everywhere(*counts):
    """Every way, on these numbers of devices; hybrid too where a stage under pjit splits anything."""
    for n, way in itertools.product(counts, WAYS):
        groups = [
            k
            for k in (2, 4)
            if k < n and n % k == 0 and way.startswith("pjit") and "-0-" not in way
        ]
        yield from (way.format(place) for place in (n, *(f"{n}/{k}" for k in groups)))


@functools.cache
def alone(model, optimizer="adamw"):
    """What one process of one device trains."""
    return run(rows_of(model, ["pjit-0-1-sharded"], optimizer), devices=1)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "ways"), [("resnet", 58), ("gpt", 58)])
def test_every_layout_on_any_devices_equals_one_device(model, ways):
    got = run(rows_of(model, everywhere(1, 2, 3, 5, 7, 8)), timeout=3600)
    assert len(got) == ways
    assert not (wrong := differing(alone(model) | got)), wrong


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("processes", "devices", "model"),
    [
        (2, 1, "resnet"),
        (2, 1, "gpt"),
        (3, 1, "resnet"),
        (3, 2, "gpt"),
        (4, 1, "dropout"),
        (4, 2, "blocks"),
    ],
)
def test_stages_over_processes_are_one_device(processes, devices, model):
    n = processes * devices
    group = n if n == 3 else n // 2
    few = [
        f"pmap-1-{n}-sharded",
        f"pjit-0-{n}-sharded",
        f"pjit-2-{n}/{group}-sharded",
        f"pjit-3-{n}-sharded",
    ]
    ways = [way.format(n) for way in WAYS] if n == 2 else few
    got = run(rows_of(model, ways), devices, processes)
    assert not (wrong := differing(alone(model) | got)), wrong


SAMPLE = (
    "pmap-0-7-sharded",
    "pmap-1-2-sharded",
    "pjit-0-5-sharded",
    "pjit-1-8/2-sharded",
    "pjit-2-4-sharded",
    "pjit-3-3-sharded",
)
VARIANTS = {  # a way for each, beside one device; and, of twelve microbatches, more
    "sixteen": ("pjit-3-6-sharded",),
    "float64": ("pjit-2-3-sharded",),
    "frozen": ("pmap-1-5-sharded",),
    "guarded": ("pjit-1-8/2-sharded",),
    "twelve": ("pmap-0-5-sharded", "pjit-2-8-replicated"),
    "wide": ("pjit-3-3-sharded",),
}


@pytest.mark.slow
def test_other_batches_have_one_digest_on_any_devices():
    rows = [rows_of(variant, ("pjit-0-1-sharded", *ways)) for variant, ways in VARIANTS.items()]
    jobs = [[row for some in half for row in some] for half in (rows[::2], rows[1::2])]
    done = together(
        [([sys.executable, SCRIPT, *some], {}) for some in jobs], timeout=1800, devices=8
    )
    got = {row: got for job in done for row, got in read(job).items()}
    assert len(got) == 13 and not (wrong := differing(got)), wrong


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", [*VARIANTS, "wide.bfloat16", "twelve.float16"])
def test_every_other_size_in_every_stage(variant):
    got = run(rows_of(variant, SAMPLE))
    assert not (wrong := differing(alone(variant) | got)), wrong


LAYERS = ("dropout", "resnet", "convolutions", "blocks", "gpt", "lstm", "gru", "experts", "large")
PRECISIONS = ("float32", "bfloat16", "all_bfloat16", "float16", "static_float16")


@pytest.mark.slow
def test_narrow_floats_are_the_same_on_any_devices():
    """Where XLA would leave out roundings by what it fuses; and where a loss scale falls and rises."""
    ways = {
        "dropout.bfloat16": ("pjit-2-5-sharded",),
        "blocks.all_bfloat16": ("pjit-3-3-sharded",),
        "dropout.float16": ("pmap-1-6-sharded",),
    }
    got = run(
        [row for model, some in ways.items() for row in rows_of(model, ("pjit-0-1-sharded", *some))]
    )
    assert not (wrong := differing(got)), wrong
    assert len({digest for digest, _ in got.values()}) == len(ways)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("model", LAYERS)
def test_every_layer_in_any_precision_has_one_digest(model):
    """One device, and three other ways: every one of `SAMPLE` for some precision."""
    rows = []
    for i, precision in enumerate(PRECISIONS):
        ways = ("pjit-0-1-sharded", *(SAMPLE[(2 * i + k) % len(SAMPLE)] for k in range(3)))
        rows += rows_of(f"{model}.{precision}", ways)
    got = run(rows)
    assert not (wrong := differing(got)), wrong
    assert len({digest for digest, _ in got.values()}) == len(PRECISIONS)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.mpi
@pytest.mark.parametrize("model", LAYERS)
def test_every_layer_has_one_digest_on_two_processes(model):
    """Two processes of one device, or of two, and one device by itself."""
    names = [f"{model}.{precision}" for precision in PRECISIONS]
    ways = (
        "pmap-1-2-sharded",
        "pjit-3-2-sharded",
        "pjit-2-2-replicated",
        "pjit-0-2-sharded",
        "pmap-0-2-sharded",
    )
    rows = [rows_of(name, [way])[0] for name, way in zip(names, ways)]
    base = run([rows_of(name, ["pjit-0-1-sharded"])[0] for name in names], devices=1)
    assert not (wrong := differing(base | run(rows, devices=1, processes=2))), wrong


@pytest.mark.slow
def test_a_bfloat16_convolution_has_one_digest(tmp_path):
    """XLA leaves out roundings where it fuses, unless excess precision is off; and it fuses another
    way in stage 2.
    """
    base = [
        "--config",
        "configs/digits_cnn.yaml",
        "--precision.compute",
        "bfloat16",
        "--parallel.reduction",
        "exact",
    ]
    base += ["--epochs", "null", "--steps", 4]
    pmap = [*base, "--run_dir", tmp_path / "pmap", "--parallel.backend", "pmap"]
    pjit = [
        *base,
        "--run_dir",
        tmp_path / "pjit",
        "--parallel.backend",
        "pjit",
        "--parallel.zero",
        2,
    ]
    devices = [{"XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"} for n in (4, 3)]
    argvs = [[sys.executable, "train.py", *map(str, argv)] for argv in (pmap, pjit)]
    jobs = together(list(zip(argvs, devices)), 600)
    assert all(job.returncode == 0 for job in jobs), "\n".join(job.output for job in jobs)
    assert (
        len({records(tmp_path / name, "final")[-1]["params_sha256"] for name in ("pmap", "pjit")})
        == 1
    )


@pytest.mark.slow
def test_every_optimizer_has_one_digest_where_allowed():
    """What looks beyond an element works on whole arrays, on any number of devices."""
    rows = []
    for optimizer, way in {
        "lion": "pjit-3-6-sharded",
        "lamb": "pmap-0-5-sharded",
        "muon": "pjit-0-7-sharded",
    }.items():
        model = "blocks" if optimizer == "muon" else "dropout"
        rows += rows_of(model, ("pjit-0-1-sharded", way), optimizer)
    got = run(rows)
    assert len(got) == 6 and not (wrong := differing(got)), wrong


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", [name for name in toys.OPTIMIZERS if name != "adamw"])
def test_every_optimizer_has_one_digest_in_its_stages(optimizer):
    model = "blocks" if optimizer == "muon" else "dropout"
    whole = [way for way in everywhere(1, 2, 3, 7, 8) if "-0-" in way]
    got = run(rows_of(model, SAMPLE if optimizer in ("momentum", "lion") else whole, optimizer))
    assert not (wrong := differing(alone(model, optimizer) | got)), wrong


# What `exact_job` has; the second row of names combines elements, so it needs full arrays.
ELEMENTWISE = ("adamw", "momentum", "lion", "schedule_free", "injected", "multi_steps")
COMBINING = ("lamb", "adafactor", "muon", "prodigy", "sam")


def is_allowed(row):
    return (
        (row["optimizer"] in ELEMENTWISE or "-0-" in row["way"])
        and (row["optimizer"] != "muon" or row["model"] == "blocks")
        and (row["how"] != "exact/2" or row["devices"] <= 4)
    )


@functools.cache
def matrix():
    """{number of devices: rows} until any two values meet: of the layers, the optimizers, the
    precisions, the reductions, the layouts and the numbers of devices."""
    rows = cover(
        is_allowed, model=LAYERS, optimizer=ELEMENTWISE + COMBINING, precision=PRECISIONS,
        how=("exact", "exact16", "exact8", "exact/2"), way=WAYS, devices=(2, 3, 5, 8),
    )  # fmt: skip
    by_devices = {}
    for row in rows:
        name, way = f"{row['model']}.{row['precision']}", row["way"].format(row["devices"])
        [text] = rows_of(name, [way], row["optimizer"], row["how"])
        by_devices.setdefault(row["devices"], []).append(text)
    return by_devices


def on_one_device(row):
    model, *_, optimizer, how = row.split("-")
    [text] = rows_of(model, ["pjit-0-1-sharded"], optimizer, how)
    return text


# One command for all of them, about 40 minutes on two cores:
# pytest tests/exact/test_exact.py -m exhaustive -k every_pair -n 2 --dist load
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("processes", "devices", "part"),
    [(p, n, part) for p, n in ((2, 2), (3, 3), (1, 5), (1, 8)) for part in range(6)],
)
def test_every_pair_of_settings_has_one_digest(processes, devices, part):
    """On two and three processes of a device each, and on five and eight devices of one process."""
    rows = matrix()[devices][part::6]
    base = run(dict.fromkeys(map(on_one_device, rows)), devices=1)
    got = run(rows, devices // processes, processes)
    assert len(got) == len(rows) > 0
    assert not (wrong := differing(base | got)), wrong


CONFIG = """
model: {target: MLP, args: {hidden: [36], dropout: 0.2}}
data: {target: Digits, args: {augment: true}}
steps: 10
batch_size: 300
optimizer: {target: adamw, lr: 3.0e-2, weight_decay: 0.1, clip_norm: 1.0, schedule_steps: 10, ema: 0.5}
parallel: {reduction: exact}
eval: {every: 4, ema: true}
log: {every: 1}
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_resumed_twice_has_one_devices_digest(tmp_path):
    """Stopped after 5 of 10 updates on 8 devices under pjit, stage 2, and after 7 on 3 devices
    under pmap; then one device in each of two processes. The fifth batch of an epoch is short."""
    base = ["train.py", "--config", str(write(tmp_path, CONFIG)), "--run_dir"]

    def devices(n):
        return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"}

    stage_2 = [
        "--steps",
        "5",
        "--parallel.backend",
        "pjit",
        "--parallel.zero",
        "2",
        "--steps_per_call",
        "4",
    ]
    split, whole = [*base, str(tmp_path / "run"), *stage_2], [*base, str(tmp_path / "whole")]
    pmap = [*base, str(tmp_path / "run"), "--parallel.backend", "pmap"]
    jobs = together(
        [([sys.executable, *split], devices(8)), ([sys.executable, *whole], devices(1))],
        timeout=600,
    )
    jobs += together([([sys.executable, *pmap, "--steps", "7"], devices(3))], timeout=600)
    jobs.append(mpirun(2, [*pmap, "--parallel.zero", "1"], timeout=600))
    assert all(job.returncode == 0 and not job.left for job in jobs), "\n".join(
        job.output for job in jobs
    )
    assert "resumes after step 5" in jobs[-2].stdout and "resumes after step 7" in jobs[-1].stdout

    assert len(curve(tmp_path / "whole")) == 10
    np.testing.assert_array_equal(curve(tmp_path / "run"), curve(tmp_path / "whole"))

    def evaluated(name):
        return {
            r["step"]: (r["loss"], r["accuracy"])
            for r in records(tmp_path / name)
            if r["split"] in ("eval", "final")
        }

    assert evaluated("run") == evaluated("whole") and list(evaluated("run")) == [4, 8, 10]
    assert evaluated("run")[10][1] > 0.3
    digests = [records(tmp_path / name, "final")[-1]["params_sha256"] for name in ("run", "whole")]
    assert digests[0] == digests[1] and len(digests[0]) == 64


# --- the initial state
# ----------------------------------------------------------------------------------------------


def normalized(key):
    """Weights that depend on each other: the partitioner would divide these sums over the devices."""
    one, two = jax.random.normal(key, (2, 24, 48))
    norm = jnp.linalg.norm(two, axis=1, keepdims=True)
    return {
        "softmax": jax.nn.softmax(one),
        "unit": two / norm,
        "product": one @ two.T,
        "step": jnp.log(jnp.exp(one[0])),
    }


def initial(backend, devices, zero, reduction="exact", shard_size=None):
    """The initial parameters and averages."""
    model = as_model(
        (
            normalized,
            lambda params, x: x.reshape(len(x), -1) @ params["unit"][:, :3].repeat(2, 0)[:32],
        )
    )
    strategy, *_ = toys.build(
        model, toys.data(), backend=backend, devices=devices, reduction=reduction, ema=0.9,
        layout={"zero": zero, "shard_size": shard_size},
    )  # fmt: skip
    state = strategy.export(strategy.init())
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.extra["ema"]))]


@pytest.mark.slow
def test_dependent_initial_weights_equal_one_devices():
    whole = initial("pmap", 1, 0)
    for where in (("pmap", 3, 1), ("pjit", 8, 3, "exact", 4)):
        assert initial(*where) == whole, where
    assert initial("pjit", 8, 3, "bucket") != whole


# --- rounding as written
# --------------------------------------------------------------------------------------------


def rounded(f, *args):
    return jax.jit(lambda step, *args: as_written(f, step)(*args))(0, *args)


def uneven(*shape):
    """Numbers of many magnitudes."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, size=shape)).astype(np.float32)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_product_is_rounded_before_it_is_added(dtype):
    a, b, c = draw(3, 10_000).astype(jnp.dtype(dtype))

    def f(a, b, c):
        return (a * b + c, jnp.square(a) - c, a**3 + b)

    with jax.enable_x64(dtype == "float64"):
        got = rounded(f, a, b, c)
    for y, want in zip(got, (a * b + c, a * a - c, a * a * a + b), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, want)
    if dtype != "float64":
        once = (a.astype(float) * b.astype(float) + c.astype(float)).astype(a.dtype)
        assert (once != a * b + c).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_division_by_a_scalar_uses_its_reciprocal(dtype):
    """Also where the scalar was made an array of equal entries, and inside functions jitted for
    themselves.
    """
    x, s = draw(10_000).astype(jnp.dtype(dtype)), draw(1)[0].astype(jnp.dtype(dtype))
    inner = jax.jit(lambda x, s: (x / s, jax.jit(lambda x: x / jnp.full(x.shape, s))(x)))
    with jax.enable_x64(dtype == "float64"):
        got = [*rounded(lambda x, s: inner(x, s), x, s), rounded(lambda x, s: x / s + x, x, s)]
    reciprocal = np.ones((), x.dtype) / s
    product = x * reciprocal
    for y, want in zip(got, (product, product, product + x), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, want)
    assert (product != x / s).any()


def test_a_scalar_and_an_array_are_divided_as_ever():
    x, s = draw(10_000), np.float32(0.3)
    scalar, array = rounded(lambda s, x: (s / x[0], x / x[::-1]), s, x)
    np.testing.assert_array_equal(scalar, s / x[0])
    np.testing.assert_array_equal(array, x / x[::-1])


def derived(f):
    """f with a derivative of its own."""
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


WITHIN = {
    "jit": lambda f: jax.jit(f),
    "cond": lambda f: (
        lambda *args: jax.lax.cond(args[0][0] < 9, f, lambda *_: jnp.zeros(10_000), *args)
    ),
    "other branch": lambda f: (
        lambda *args: jax.lax.cond(args[0][0] > 9, lambda *_: jnp.zeros(10_000), f, *args)
    ),
    "checkpoint": jax.checkpoint,
    "custom_jvp": derived,
    "vmap": jax.vmap,
    "jit in cond in jit": lambda f: jax.jit(WITHIN["cond"](jax.jit(f))),
}


@pytest.mark.parametrize("within", WITHIN)
def test_functions_inside_are_rounded_as_written_too(within):
    a, b, c = draw(3, 10_000)
    np.testing.assert_array_equal(
        rounded(WITHIN[within](lambda a, b, c: a * b + c), a, b, c), a * b + c
    )


def test_what_settles_is_as_it_was():
    tree = {
        "x": uneven(50),
        "n": np.arange(3),
        "yes": np.array([True, False]),
        "none": None,
        "zero": np.float32(-0.0),
    }
    got = jax.jit(lambda step, tree: fusion_barrier(tree, step))(0, tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert [x.tobytes() for x in jax.tree.leaves(jax.device_get(got))] == [
        np.asarray(x).astype(y.dtype).tobytes()
        for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True)
    ]


def test_integers_and_none_leaves_are_not_rounded():
    n, x = np.arange(-5, 5, dtype=np.int32), draw(10)

    def f(tree, nothing):
        values, indices = jax.lax.top_k(tree["x"], 3)  # one operation, two results
        assert nothing is None
        return {
            "n": tree["n"] * 7 // 3,
            "top": values * 2,
            "at": indices,
            "none": None,
            "even": tree["n"] % 2 == 0,
        }

    got, want = rounded(f, {"n": n, "x": x}, None), f({"n": n, "x": x}, None)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)


# --- what it needs, and refuses
# -------------------------------------------------------------------------------------


NAMES = "algsimp,reshape-mover,cpu-parallel-task-assigner"
PASSES = f"--xla_disable_hlo_passes={NAMES}"
CPU = (
    "--xla_cpu_experimental_ynn_fusion_type=individual_dot --xla_cpu_max_isa=AVX "
    "--xla_cpu_enable_platform_dependent_math=false --xla_allow_excess_precision=false"
)
GPU = "--xla_gpu_deterministic_ops=true --xla_allow_excess_precision=false"


@pytest.fixture
def closed(monkeypatch):
    """JAX as if it had not opened its devices yet."""
    monkeypatch.setattr(private_jax, "backends_initialized", lambda: False)


@pytest.fixture
def variables(monkeypatch, closed):
    """(XLA_FLAGS, the number of GPUs) -> XLA_FLAGS after `flags.set_flags`."""

    def after(given, gpus=0):
        monkeypatch.setattr(flags, "gpu_count", lambda: gpus)
        monkeypatch.setenv("XLA_FLAGS", given)
        flags.set_flags()
        flags.check_flags()
        return os.environ["XLA_FLAGS"]

    return after


def test_the_environment_keeps_the_users_own_flags(variables, monkeypatch):
    off = "--xla_disable_hlo_passes="
    assert variables("") == f"{PASSES} {CPU}"
    mine = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"
    assert variables(mine) == f"{mine} {PASSES} {CPU}"
    theirs = f"--xla_a=1 {off}dce,cse --xla_b=2"  # passes to disable add up
    assert variables(theirs) == f"{theirs} {PASSES} {CPU}"
    done = f"{off}dce {PASSES} {CPU}"
    assert variables(done) == done
    assert variables(f"{done} --xla_a=1") == f"{off}dce --xla_a=1 {PASSES} {CPU}"
    monkeypatch.delenv("XLA_FLAGS")
    flags.set_flags()
    assert os.environ["XLA_FLAGS"] == f"{PASSES} {CPU}"


def test_a_repeated_flag_does_not_undo_exact_modes_own(variables):
    """The last one wins."""
    name = "--xla_allow_excess_precision"
    for given in (f"{name}=false {name}=true", f"{name}=true", name, f"{CPU} {name}=true"):
        after = variables(f"{given} --xla_a=1").split()
        assert [x for x in after if x.startswith(name)][-1] == f"{name}=false"


def test_a_gpus_environment_asks_for_deterministic_ops(variables):
    assert variables("--xla_a=1", gpus=1) == f"--xla_a=1 {GPU}"
    other = "--xla_gpu_deterministic_ops=false"
    assert variables(other, gpus=1) == f"{other} {GPU}"


@pytest.mark.parametrize(
    ("features", "works"), [("avx avx2 fma bmi2", True), ("sse4_2 avx fma4 f16c", False)]
)
def test_a_processor_without_fma_is_refused(features, works, variables, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {features} xsave\n", encoding="utf-8")
    monkeypatch.setattr(flags, "Path", lambda name: tmp_path / pathlib.Path(name).name)
    monkeypatch.setattr(flags.platform, "machine", lambda: "x86_64")
    if works:
        assert variables("") == f"{PASSES} {CPU}"
    else:
        with pytest.raises(UsageError, match=r"exact needs a processor with FMA; use bucket here$"):
            variables("")


def test_unfit_flags_are_refused_with_what_to_call(monkeypatch, closed):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    with pytest.raises(
        UsageError,
        match=r"XLA_FLAGS='--xla_a=1 --xla_disable_hlo_passes=algsimp,.* the environment",
    ):
        flags.check_flags()
    flags.set_flags()
    flags.check_flags()


def test_fit_is_refused_if_devices_were_opened_before(monkeypatch, tmp_path):
    """What XLA has read from the environment, it has read: setting it now would look right and
    change nothing.
    """
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    images = toys.data()
    with pytest.raises(
        UsageError, match=r"call jaxdp.exact.flags.set_flags.. before JAX opens its devices$"
    ):
        fit(
            "MLP",
            (images["inputs"], images["labels"]),
            steps=1,
            run_dir=tmp_path,
            parallel={"reduction": "exact"},
        )
    assert os.environ["XLA_FLAGS"] == "--xla_a=1" and not any(tmp_path.iterdir())


FEW_MICROBATCHES = "cannot be split over {} devices; set microbatches to {} or more"


@pytest.mark.parametrize("backend", ["pmap", "pjit"])
def test_more_devices_than_groups_are_refused(backend):
    def build(n, **more):
        return toys.build(toys.MODELS["mlp"](), toys.data(), backend=backend, devices=n, **more)

    with pytest.raises(UsageError, match=f"microbatches: 6 {FEW_MICROBATCHES.format(7, 7)}"):
        build(7, microbatches=6, reduction="exact")
    with pytest.raises(
        UsageError,
        match=f"microbatches: 8 in groups of 2 {FEW_MICROBATCHES.format(5, 10)} .*most 4",
    ):
        build(5, reduction="exact16", group=2)
    assert build(4, reduction="exact", group=2)[0].assignment.shape == (4, 2)


@pytest.mark.parametrize("devices", range(1, 7))
@pytest.mark.parametrize("group", [1, 2, 3])
def test_each_group_of_microbatches_is_on_one_device(devices, group):
    table = assign_microbatches(6 * group, devices, group)
    groups = table.reshape(devices, -1, group)
    real = groups[groups[..., 0] >= 0]
    np.testing.assert_array_equal(real.reshape(-1), np.arange(6 * group))
    np.testing.assert_array_equal(real[:, 0] % group, 0)
    assert (groups[groups[..., 0] < 0] == -1).all()


@pytest.mark.slow
def test_fewer_microbatches_than_devices_are_one_line(tmp_path):
    argv = ["--config", write(tmp_path, CONFIG), "--run_dir", tmp_path / "run", "--microbatches", 2]
    said = jaxdp(*argv, code=2, devices=3).stderr.strip()
    assert f"microbatches: 2 {FEW_MICROBATCHES.format(3, 3)}" in said and "\n" not in said


BEYOND = {  # an element: what an update of it depends on
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: OPTIMIZERS["muon"](1e-2),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}
beyond = functools.cache(
    lambda optimizer: BEYOND[optimizer]()
)  # one object: what was found out of it is remembered
TWENTY = as_model(
    lambda rngs: MLP((12,), 20, (20,), rngs=rngs)
)  # 4 divides its dims, and 8 does not


def refusal(model, optimizer, backend, zero, devices, reduction="exact"):
    """What `build` says of the optimizer, or None."""
    tx = beyond(optimizer)
    strategy, step, _ = toys.build(
        model, toys.data(), backend=backend, devices=devices, reduction=reduction,
        optimizer=(tx, None), layout={"zero": zero},
    )  # fmt: skip
    try:
        check_optimizer(Config(optimizer=Optimizer(target=optimizer)), strategy, tx, step)
    except UsageError as error:
        return str(error)


PLACES = [("pmap", 1), ("pjit", 1), ("pjit", 3)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("optimizer", BEYOND)
@pytest.mark.parametrize(("backend", "zero"), PLACES)
def test_a_split_optimizer_must_be_elementwise(optimizer, backend, zero):
    """On one device too: it would not give what eight do."""
    model = toys.MODELS["mlp"]()
    for devices in (1, 8):
        said = refusal(model, optimizer, backend, zero, devices)
        assert said.startswith(f"optimizer.target: {optimizer}: it is not elementwise: "), said
        assert "adamw or lion" in said
    assert refusal(model, optimizer, backend, 0, 8) is None
    assert backend == "pmap" or refusal(model, optimizer, backend, zero, 8, "bucket") is None


@pytest.mark.parametrize(("backend", "zero"), PLACES)
def test_a_split_on_few_devices_must_be_elementwise(backend, zero):
    assert "not elementwise" in str(refusal(TWENTY, "lamb", backend, zero, devices=2))


@pytest.mark.slow
def test_the_command_refuses_lamb_in_one_line(tmp_path):
    config = write(tmp_path, CONFIG.replace("adamw", "lamb"))
    argv = [
        "--config",
        config,
        "--run_dir",
        tmp_path / "run",
        "--parallel.zero",
        1,
        "--parallel.backend",
        "pjit",
    ]
    said = jaxdp(*argv, code=2, devices=2).stderr.strip()
    assert (
        "optimizer.target: lamb: it is not elementwise" in said
        and "or zero: 0" in said
        and "\n" not in said
    )


def test_complex_parameters_are_refused_by_name():
    def init(key):
        return {"phase": jax.random.normal(key, (32, 3), jnp.complex64)}

    model = as_model((init, lambda params, x: jnp.abs(x.reshape(len(x), -1) @ params["phase"])))
    with pytest.raises(UsageError, match=r"parameter 'phase' is complex64.*; store its real"):
        toys.build(model, toys.data(), reduction="exact")


# --- what was not compared is not verified
# --------------------------------------------------------------------------


def report(updates=2, devices=(1, 2), scale=1.0):
    """Of the rows without shards on one and two devices, or on one of these numbers, of a model of
    three numbers.
    """

    def apply(params, x):
        return scale * jnp.broadcast_to(params["w"], (len(x), 3))

    model = as_model((lambda key: {"w": jnp.ones(3)}, apply))

    def make(row):
        if row.zero or row.devices not in devices:
            raise UsageError("not here")
        settings = {"backend": row.backend, "devices": row.devices, "reduction": row.reduction}
        strategy, step, batch = toys.build(
            model, toys.data(), **settings, optimizer=(optax.sgd(0.1), None)
        )

        def train(state, numbers):
            program, curve = strategy.compile(step), []
            for number in numbers:
                state, metrics = program.update(state, batch(number))
                curve.append(metrics)
            return jax.device_get((strategy.export(state), curve))

        return strategy, train

    own = Configuration(2, "pmap", reduction="exact")
    return compare_bits(make, own, jax.devices()[:2], range(updates), "toys")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ({"updates": 0}, "0 updates trained nothing"),
        ({"scale": np.nan, "devices": (1,)}, "2 updates trained nothing"),  # each is skipped
        ({"scale": 0.0, "devices": (1,)}, "2 updates trained nothing"),
        ({"devices": (2,)}, "nothing was compared but on 2 device"),
    ],
)
def test_equal_rows_that_trained_nothing_do_not_pass(case, says):
    found = report(**case)
    assert not found.verified and not found.of("FAILED") and not found.as_json("title")["exact"]
    assert found.as_text("title").splitlines()[-1].startswith(f"not exact: {says}")


@pytest.mark.slow
def test_equal_rows_of_several_device_counts_pass():
    found = report()
    assert found.verified and len(found.of("ok")) == 3
    said = found.as_text("title").splitlines()[-1]
    assert said.startswith(
        "exact: 3 configurations (6 more refused) give the same bits; params_sha256 "
    )
    with pytest.raises(UsageError, match="not here"):
        report(devices=())


# --- bytes
# ----------------------------------------------------------------------------------------------------------

WIDE = as_model(
    lambda rngs: MLP(toys.SHAPE, toys.CLASSES, (3200,), rngs=rngs)
)  # 115,000 parameters
BYTES = {"exact": (0.95, 1.02), "exact16": (0.45, 0.52), "exact8": (0.22, 0.27)}


@functools.cache
def moved(reduction, slots, zero, place="8", gradient_buffer="sharded", backend="pjit"):
    """The collectives of an update, of its compiled program alone."""
    devices, _, shard_size = place.partition("/")
    strategy, step, _ = toys.build(
        WIDE, toys.data(), backend=backend, devices=int(devices), microbatches=int(devices) * slots, bucket_mb=25.0,
        reduction=reduction, accumulate="scan" if reduction == "bucket" else "vmap", optimizer=(optax.sgd(0.1), None),
        layout={"zero": zero, "gradient_buffer": gradient_buffer, "shard_size": int(shard_size or 0) or None},
    )  # fmt: skip
    example = {"inputs": np.zeros((1, *toys.SHAPE), np.float32), "labels": np.zeros(1, np.int32)}
    arguments = strategy.argument_shapes({**example, "mask": np.zeros(1, np.float32)})
    lowered = strategy.compile(step).lowered(*arguments)
    compiled = lowered.compile({"xla_backend_optimization_level": 0})  # of no matter to collectives
    return collectives(compiled.as_text(), lowered.as_text())


def sent(reduction, slots, *where, **more):
    """Bytes that one device sends; the only loop whose length the run alone knows is over attempts,
    and counts once.
    """
    return sum(map(ring, moved(reduction, slots, *where, **more)))


def ring(c):
    """Bytes that a device sends per run with ring algorithms (Patarasuk & Yuan 2009)."""
    return c.wire * (c.group_size - 1) / c.group_size


SENT = [({"zero": 0}, 1), ({"zero": 3}, 2)]
ALSO = [({"zero": 1}, 2), ({"zero": 2}, 1)]
ALSO += [({"zero": zero, "backend": "pmap"}, 2) for zero in (0, 1)] + [
    ({"zero": 3, "place": "8/2"}, 2)
]
ALSO += [
    ({"zero": 2, "gradient_buffer": "replicated", "place": "8/4"}, 4),
    ({"zero": 3, "place": "5"}, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "slots"), [*SENT, *ALSO], ids=str)
def test_exact_mode_sends_what_buckets_do(where, slots):
    exact, bucket = (sent(reduction, slots, **where) for reduction in ("exact", "bucket"))
    assert 0.95 < exact / bucket <= 1.02, (exact, bucket)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", BYTES)
@pytest.mark.parametrize("place", first(1, ["8", "3"]))
def test_gradients_are_one_all_reduce_of_integers(reduction, place):
    least, most = BYTES[reduction]
    share = sent(reduction, 1, 0, place) / sent("bucket", 1, 0, place)
    assert least < share <= most, share
    found = moved(reduction, 1, 0, place)
    assert {c.kind for c in found} == {"all-reduce"} and {c.dtype for c in found} <= {
        "uint32",
        "int32",
    }
    assert sum(c.bytes > 4096 for c in found) == 1


@pytest.mark.slow
def test_exact_sums_start_from_another_runs_parameters(tmp_path):
    words = [*DIGITS, "--epochs", "null", "--steps", "3", "--eval.every", "null"]
    jaxdp(*words, "--run_dir", tmp_path / "first")
    digests = []
    for devices in (1, 2):
        more = ["--parallel.reduction", "exact", "--init_from", tmp_path / "first"]
        run_dir = tmp_path / f"exact {devices}"
        jaxdp(*words, *more, "--run_dir", run_dir, devices=devices)
        [final] = records(run_dir, "final")
        digests.append(final["params_sha256"])
    [before] = records(tmp_path / "first", "final")
    assert digests[0] == digests[1] != before["params_sha256"]
