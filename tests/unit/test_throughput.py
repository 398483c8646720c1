"""What a run says of its speed: model FLOPs as they are counted and by formula, peaks by device,
and goodput.
"""

import json
import threading
import time

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from jaxdp.config.parsing import from_mapping
from jaxdp.data.dataset import Arrays
from jaxdp.errors import UsageError
from jaxdp.metrics.console import Console
from jaxdp.metrics.meter import Meter, goodput, throughput
from jaxdp.models.attention import fused
from jaxdp.plan.hardware import peak_flops
from jaxdp.run import rundir
from jaxdp.run.components import make_parts, make_the_step, set_jax, state_maker
from jaxdp.run.model_summary import count_flops
from jaxdp.run.preflight import rehearse
from plain_runs import fit, make_run, metering

LAYERS, DIM, TOKENS = 3, 128, 32
GPT = {
    "model": {"target": "GPT", "args": {"layers": LAYERS, "heads": 4, "dim": DIM}},
    "data": {"target": "PythonSource", "args": {"length": TOKENS}},
    "loss": {"target": "CausalLM"},
    "steps": 2,
    "batch_size": 12,
    "microbatches": 4,
}


def rehearsed(**more):
    """(FLOPs of an example, the shapes of the parameters) of the model in `GPT`."""
    config = from_mapping({**GPT, **more}, "test")
    set_jax(config)
    parts = make_parts(config)
    make_state = state_maker(config, parts)
    flops, _ = rehearse(config, parts, make_the_step(config, parts), make_state)
    return flops, jax.eval_shape(make_state).params


@pytest.mark.parametrize(
    ("name", "value"), [("threefry_partitionable", False), ("default_prng_impl", "rbg")]
)
def test_settings_of_jax_that_change_numbers_are_named(name, value):
    before = jax.config.values[f"jax_{name}"]
    jax.config.update(f"jax_{name}", value)
    try:
        with pytest.raises(UsageError, match=f"jax_{name}: {value!r} .*; set it to {before!r}"):
            set_jax(from_mapping(GPT, "test"))
    finally:
        jax.config.update(f"jax_{name}", before)


@pytest.mark.slow
def test_the_flops_of_a_gpt_are_those_of_the_formula():
    """6 N + 12 layers dim tokens (arXiv 2204.02311, appendix B), N without positions."""
    flops, params = rehearsed()
    used = sum(x.size for x in jax.tree.leaves(params)) - params["positions"].size
    assert flops / TOKENS == pytest.approx(6 * used + 12 * LAYERS * DIM * TOKENS, rel=0.02)
    assert rehearsed(parallel={"remat": "full"})[0] == pytest.approx(
        flops, rel=1e-6
    )  # no more for computing it twice
    assert rehearsed(microbatches=2)[0] == flops


@pytest.fixture
def gpu(monkeypatch):
    """JAX traces as it does on a GPU whose cuDNN has the kernel."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda least: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda other: False)


def test_the_products_of_cudnns_attention_are_counted(gpu):
    """2 forward and 4 backward, the mask aside."""
    x, product = jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16), 2 * 8 * 4 * 256 * 256 * 64

    def attend(*x):
        return fused(*x).astype(jnp.float32).sum()

    assert count_flops(jax.make_jaxpr(attend)(x, x, x)) == 2 * product
    assert count_flops(jax.make_jaxpr(jax.grad(attend, (0, 1, 2)))(x, x, x)) == 6 * product


@pytest.mark.slow
def test_a_gpt_with_cudnns_attention_is_rehearsed(gpu):
    args = {**GPT["model"]["args"], "attention": "cudnn"}
    model, bf16 = {"target": "GPT", "args": args}, {"compute": "bfloat16"}
    flops, params = rehearsed(model=model, precision=bf16)
    used = sum(x.size for x in jax.tree.leaves(params)) - params["positions"].size
    assert flops / TOKENS == pytest.approx(6 * used + 12 * LAYERS * DIM * TOKENS, rel=0.02)
    with pytest.raises(
        UsageError, match=r"model.args.attention: 'cudnn' needs bfloat16 .*, not float32 on gpu"
    ):
        rehearsed(model=model)


@pytest.mark.parametrize(
    "kind, compute, matmul, peak",
    [
        ("NVIDIA H200", "bfloat16", "default", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "float32", "default", 494.7e12),
        ("NVIDIA H100 80GB HBM3", "float32", "highest", 66.9e12),
        (
            "NVIDIA H100 PCIe",
            "bfloat16",
            "default",
            None,
        ),  # slower, and no sheet of it is in the table
        ("NVIDIA A100-SXM4-80GB", "float16", "default", 312e12),
        ("NVIDIA L4", "bfloat16", "default", 121e12),
        ("NVIDIA L40S", "bfloat16", "default", None),
        ("TPU v4", "bfloat16", "default", 275e12),
        ("TPU v5 lite", "float32", "default", 197e12),
        ("TPU v5p", "bfloat16", "default", 459e12),
        ("TPU v6 lite", "bfloat16", "default", 918e12),
        ("TPU v4", "float32", "highest", None),
        ("NVIDIA H200", "float64", "default", None),
        ("cpu", "float32", "default", None),
    ],
)
def test_peaks_by_kind_of_device(kind, compute, matmul, peak):
    assert peak_flops(kind, compute, matmul) == (peak and pytest.approx(peak))


def test_a_record_of_an_interval():
    per_example = throughput(tokens=128, flops=3e9, peak=4e12)
    assert {name: 640 * x for name, x in per_example.items()} == pytest.approx(
        {"tokens_per_s": 81_920, "model_flops_per_s": 1.92e12, "mfu": 0.48}
    )
    assert throughput(None, None, 4e12) == {}
    assert throughput(None, 3e9, None) == {"model_flops_per_s": 3e9}


def test_goodput_is_of_the_time_since_the_first_start(tmp_path):
    """5 updates of 0.4 s and, after a restart, 5 of 0.2 s, in 10 s; evaluations and what came
    before are not work.
    """
    file, now = tmp_path / "metrics.jsonl", time.time()
    records = [
        {"step": 5, "split": "train", "step_time_ms": 400.0},
        {"step": 5, "split": "eval", "loss": 1.0},
        {"step": 10, "split": "train", "step_time_ms": 200.0},
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert goodput(file, now - 10)["goodput"] == pytest.approx(0.3, rel=0.01)
    assert goodput(tmp_path / "none.jsonl", now - 10) == {}


def test_a_run_directory_keeps_when_it_began(tmp_path):
    rundir.write_env(tmp_path, {})
    began = json.loads((tmp_path / "env.json").read_text())["began"]
    assert abs(began - time.time()) < 60
    (tmp_path / "env.json").write_text(json.dumps({"began": began - 1000}))
    rundir.write_env(tmp_path, {"launcher": "none"})
    assert rundir.began(tmp_path) == began - 1000


def test_the_console_shows_it(capsys):
    record = {
        "step": 2,
        "split": "train",
        "loss": 1.0,
        "examples_per_s": 2e3,
        "tokens_per_s": 2.5e5,
        "mfu": 0.412,
    }
    Console(2).write({**record, "input_wait": 0.25})
    Console(2).write({"step": 2, "split": "final", "goodput": 0.9, "input_wait": 0.01})
    lines = capsys.readouterr().out.splitlines()
    told = " ".join(lines[0].split())
    assert told.endswith(
        "loss 1.0000 examples/s 2,000 tokens/s 250,000 MFU 41.2% waits for data 25%"
    )
    assert " ".join(lines[1].split()).endswith("goodput 90.0%")


COMPILES = 0.5  # seconds


def timed(records, groups, every, paused=()):
    """{step: milliseconds} as recorded, of calls of 20 ms an update, where the first of each length
    compiles.
    """
    seen = set()

    def call(updates):
        time.sleep(0.02 * len(updates) + COMPILES * (len(updates) not in seen))
        seen.add(len(updates))
        return {"loss": jnp.zeros(len(updates) if len(updates) > 1 else ())}

    with metering(Meter(records, every, groups[-1][-1], {})) as meter:
        for updates in groups:
            meter.reading(updates[0] - 1)
            meter.before(updates, {"mask": np.ones((len(updates), 10))})
            meter.after(updates, None, call(updates))
            if updates[-1] in paused:
                meter.pause(updates[-1], False)
                time.sleep(COMPILES)
        meter.flush()
    return {r["step"]: r["step_time_ms"] for r in records if "step_time_ms" in r}


@pytest.mark.slow
def test_compiling_is_no_time_of_an_update():
    """Calls of two updates and of one: the first of each compiles; and what runs in a pause is not
    counted either.
    """
    found = timed(
        Lines(), [range(i, i + 2) for i in range(1, 13, 2)] + [range(13, 14)], 4, paused=(6, 8)
    )
    assert list(found) == [4, 8, 12], found  # of 13 there is the first alone
    assert all(20 <= ms < 100 for ms in found.values()), found


def test_updates_before_and_after_a_pause_are_counted():
    """Every third update is slow, and a pause follows another: the record's time is still the mean
    of all three.
    """
    records = Lines()
    with metering(Meter(records, 3, 6, {})) as meter:
        for updates in (range(i, i + 1) for i in range(1, 7)):
            meter.reading(updates[0] - 1)
            meter.before(updates, {"mask": np.ones((len(updates), 10))})
            time.sleep(0.3 if updates[0] % 3 == 0 else 0.0)
            meter.after(updates, None, {"loss": jnp.zeros(())})
            if updates[0] == 5:
                meter.pause(5, False)
                time.sleep(COMPILES)
        meter.flush()
    assert len(records) == 2 and 90 <= records[1]["step_time_ms"] < 200, records


class Hanging:
    """A number that a device computes once `goes_on` is set."""

    def __init__(self):
        self.goes_on, self.read = threading.Event(), threading.Event()

    def is_ready(self):
        return self.goes_on.is_set()

    def block_until_ready(self):
        return self

    def __array__(self, *args, **more):
        self.goes_on.wait()
        self.read.set()
        return np.zeros(())


def test_a_record_after_the_end_is_not_written(monkeypatch):
    """Of a generation of an elastic job that has ended: another process has written it meanwhile."""
    monkeypatch.setattr("jaxdp.metrics.meter.LAST_WORDS", 0.1)
    records, loss = Lines(), Hanging()
    with metering(Meter(records, 1, 4, {})) as meter:
        for update, metric in ((1, jnp.zeros(())), (2, loss)):
            meter.reading(update - 1)
            meter.before(range(update, update + 1), {"mask": np.ones(10)})
            meter.after(range(update, update + 1), None, {"loss": metric})
    loss.goes_on.set()
    assert loss.read.wait(20.0)
    while meter.queue.unfinished_tasks > 1:  # the last one ends the thread
        time.sleep(0.01)
    assert [r["step"] for r in records] == [1]


def test_a_late_record_takes_no_time_off_the_next():
    """Its writer is at work, and sees the end of what it writes of, while the next program
    compiles.
    """
    began = time.perf_counter()
    found = timed(Late(), [range(1, 4), range(4, 7), range(7, 8), range(8, 9)], 1)
    others = time.perf_counter() - began - 2 * COMPILES
    assert list(found) == [4, 5, 6, 8] and all(ms >= 15 for ms in found.values()), found
    assert sum(found.values()) < 1e3 * others, (
        found,
        others,
    )  # compiling is in none of them, however slow the machine


def test_an_interval_of_one_call_is_timed(tmp_path):
    """Also where an evaluation follows each."""
    run = make_run(
        tmp_path,
        toys.MODELS["mlp"](),
        held_out=toys.data(20),
        steps=12,
        steps_per_call=4,
        log_every=4,
    )
    fit(run.replace(eval_every=4))
    train = [r for r in run.log.writer.records if r["split"] == "train"]
    assert ["step_time_ms" in r for r in train] == [False, True, True]


class Lines(list):
    def write(self, record):
        self.append(record)


class Late(Lines):
    def write(self, record):
        time.sleep(0.05)
        super().write(record)


class Slow(Arrays):
    """Data that takes a while."""

    seconds = 0.0

    def read(self, indices):
        time.sleep(self.seconds)
        return super().read(indices)


def test_the_share_of_time_in_waiting_for_data(tmp_path):
    data = Slow(**toys.data(60))
    run = make_run(tmp_path, toys.MODELS["mlp"](), train=data, steps=12, log_every=4)
    data.seconds = 0.05
    fit(run)
    waits = [r["input_wait"] for r in run.log.writer.records if "input_wait" in r]
    assert len(waits) == 3 and all(0.5 <= w <= 1 for w in waits[1:]), waits
