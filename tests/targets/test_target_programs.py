"""Programs that the compilers of GPUs and TPUs make: compiled, not run.

The compilers are plug-ins in a folder of their own (`make targets`), since each process that finds
them loads them."""

import functools
import json
import os
import subprocess
import sys

import pytest

from launch import ROOT, environment
from target_requirements import requirements

PLUGINS = ROOT / ".targets"
INSTALLED = PLUGINS / ".done"  # for which JAX
MISSING = not INSTALLED.exists() or INSTALLED.read_text().strip() != requirements()
needs_compilers = pytest.mark.skipif(
    MISSING, reason="no compilers for targets of this JAX: make .targets/.done"
)

# A GPT that scans its blocks, whose products take as long on an H100 as their gradients' way.
SMALL = (
    *("--config", "configs/gpt_10m.yaml", "--parallel.backend", "pjit", "--batch_size", "64"),
    *("--model.args.layers", "6", "--model.args.dim", "512", "--model.args.scan", "true"),
    *("--microbatches", "8", "--data.args.length", "512", "--precision.compute", "bfloat16"),
)


def with_plugins(words, timeout=560):
    env = environment({"PYTHONPATH": f"{ROOT}:{PLUGINS}", "XLA_FLAGS": None}, 1)
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )


@functools.lru_cache(maxsize=4)
def compiled(target, *words, fault=None):
    planted = ("--fault", fault) if fault else ()
    script = ("tests/support/compile_for.py", target, *planted, *words)
    done = with_plugins(script)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(facts):
    """What each program must have."""
    assert facts["float64"] == 0, "numbers of 64 bits"
    assert not facts["callbacks"], f"the device waits for the host: {facts['callbacks']}"
    # Metrics are returned beside the state; a copy of it would be a share of its bytes.
    assert facts["copied"] < 0.01 * facts["state"] + 4096, "the state is copied"
    assert facts["peak"] < facts["memory"], "it does not fit"


def sent(facts, *kinds):
    """The elements of the large collectives of these kinds."""
    sizes = {"bfloat16": 2, "float16": 2}
    return sum(
        count * size / sizes.get(dtype, 4)
        for kind, dtype, count, size in facts["sent"]
        if kind in kinds
    )


# What an update sends, in elements for each parameter: all-reduce, reduce-scatter, all-gather.
TABLE = {0: (1, 0, 0), 1: (0, 1, 1), 2: (0, 1, 1), 3: (0, 1, 2)}


@needs_compilers
@pytest.mark.quick(1)
@pytest.mark.parametrize("zero", TABLE)
def test_a_stage_sends_the_tables_bytes_and_hides_them(zero):
    facts = compiled("h100:8", *SMALL, "--parallel.zero", str(zero))
    check(facts)
    kinds = "all-reduce", "reduce-scatter", "all-gather"
    shares = [sent(facts, kind) / facts["parameters"] for kind in kinds]
    assert shares == pytest.approx(TABLE[zero], abs=0.03), shares
    assert facts["hidden"] > HIDDEN[zero], facts["hidden"]


HIDDEN = {0: 0.5, 1: 0.3, 2: 0.3, 3: 0.3}


@needs_compilers
@pytest.mark.slow
def test_a_sum_after_the_loop_is_found():
    words = (*SMALL, "--parallel.zero", "0")
    late = compiled("h100:8", *words, fault="sum after the loop")
    assert late["hidden"] < HIDDEN[0], late["hidden"]


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"), [("float64", "64 bits"), ("not donated", "the state is copied")]
)
def test_a_planted_fault_is_found(fault, text):
    with pytest.raises(AssertionError, match=text):
        check(compiled("h100:8", *SMALL, "--parallel.zero", "0", fault=fault))


@needs_compilers
@pytest.mark.quick(1)
def test_attention_is_that_of_cudnn():
    """Its kernel is a custom call, compiled when it runs: there is no cuDNN here."""
    kernels = compiled("h100:8", *SMALL, "--parallel.zero", "0")["kernels"]
    layers, passes = 6, 1
    assert kernels["__cudnn$fmhaSoftmaxBackward"] == layers * passes, kernels
    assert kernels["__cudnn$fmhaSoftmax"] >= layers * passes, kernels


@needs_compilers
@pytest.mark.slow
def test_exact_sums_are_of_integers():
    words = (*SMALL, "--parallel.reduction", "exact", "--precision.compute", "float32")
    facts = compiled("h100:8", *words)
    check(facts)
    floats = [x for x in facts["sent"] if x[1].startswith(("float", "bfloat")) and x[3] > 1024]
    assert facts["sent"] and not floats, floats


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_tpu(zero):
    facts = compiled("v5e:2x4", *SMALL, "--parallel.zero", str(zero))
    check(facts)
    assert facts["sent"] and facts["kernels"]["product"] > 6


CONFIGS = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
NEED_DATA = (
    "cifar10_airbench",
    "cifar10_resnet9",
    "cifar10_resnet9_fast",
    "fashion_mnist_cnn",
    "mnist_mlp",
    "ptb_lstm",
    "vit_cifar10",
)
SHALLOW = {  # a compile of the whole model takes minutes
    "gpt2_medium": ("--model.args.layers", "4"),
    "gpt2_large": ("--model.args.layers", "4"),
    "gpt2_xl": ("--model.args.layers", "4"),
    "llama_7b": ("--model.args.layers", "2"),
}


@needs_compilers
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["pjit", "pmap"])
@pytest.mark.parametrize("target", ["h100:8", "h100:8x8", "v5e:4x4"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_compiles(config, target, backend):
    if config in NEED_DATA and not (ROOT / "data").exists():
        pytest.skip("the config needs its data set")
    words = ("--config", f"configs/{config}.yaml", *SHALLOW.get(config, ()))
    if "zero:" in (ROOT / "configs" / f"{config}.yaml").read_text() and backend == "pmap":
        pytest.skip("the config has a stage of pjit")
    check(compiled(target, *words, "--parallel.backend", backend))


# --- The command ---------------------------------------------------------------------


def plan(*words, **more):
    return with_plugins(("-m", "jaxdp", "plan", *words), **more)


@needs_compilers
@pytest.mark.slow
def test_the_command_reports_the_schedule_and_draws_it(tmp_path):
    page = tmp_path / "plan.html"
    done = plan(*SMALL, "--target", "h100:2x4", "--json", "--output", str(page))
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    [figures] = content["plans"]
    assert content["devices"] == 8 and figures["compiled_by"] == "the compiler of the target"
    assert 0 < figures["hidden_share"] <= 1 and 0 < figures["mfu"] < 1
    assert figures["peak_bytes"] == figures["memory"]["peak"] > 0
    assert figures["step_seconds"] == figures["seconds"]["expected"] > 0
    drawn = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    [schedule] = drawn["plans"]
    assert len(schedule["events"]) > 100 and schedule["kernels"]["all-reduce"] > 0
    assert figures["unknown_loops"] == figures["unknown_groups"] == []


@needs_compilers
@pytest.mark.slow
def test_a_schedule_has_times_without_a_peak():
    """TPUs state no rate for float16, so that there is no share of the peak."""
    words = ("--config", "configs/digits.yaml", "--precision.compute", "float16")
    done = plan(*words, "--target", "v5e:2x2", "--json")
    assert done.returncode == 0, done.stderr
    [figures] = json.loads(done.stdout)["plans"]
    assert figures["step_seconds"] == figures["schedule"]["seconds"] > 0
    assert figures["mfu"] is None


def test_without_a_compiler_a_plan_is_simulated(tmp_path):
    env = environment({"PYTHONPATH": str(ROOT), "XLA_FLAGS": None}, 1)
    words = ["plan", "--config", "configs/digits.yaml", "--target", "v5e:2x4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    content = json.loads(done.stdout)
    assert content["plans"][0]["compiled_by"] == "XLA for CPU, simulated devices"
    assert content["devices"] == 8 and content["notes"][0].startswith("not compiled for v5e:2x4")
    assert "libtpu is not installed" in content["notes"][0], content["notes"]


@needs_compilers
@pytest.mark.slow
def test_a_crashed_compiler_leaves_the_cpus_figures():
    env = environment({"PYTHONPATH": f"{ROOT}:{PLUGINS}:{ROOT}/tests/support/crashing"}, 1)
    words = ["plan", "--config", "configs/digits.yaml", "--target", "h100:8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", *words],
        cwd=ROOT,
        env={**env, "JAXDP_TEST_CRASH": "1"},
        capture_output=True,
        text=True,
    )
    content = json.loads(done.stdout)
    assert "planted crash" in content["notes"][0], content["notes"]
    assert content["plans"][0]["memory"]["peak"] > 0 and os.path.exists(PLUGINS)
