"""The harness of the benchmarks: what is compared trains the same thing, and nobody drops out unseen."""

import argparse
import json
import pathlib
import sys

import pytest

from benchmarks import gpu, harness
from benchmarks.harness import Contender, Unfair

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ["--config", str(ROOT / "benchmarks/configs/digits_mlp.yaml"), "--steps", "45"]
CORES = [0]


def ours(name, folder, *more):
    return Contender(name, [*start("benchmarks.jaxdp_loop"), str(folder / name), *CONFIG, *more])


def start(module):
    return [sys.executable, "-m", "benchmarks.contender", module]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture
def material(tmp_path):
    from benchmarks.run import make_material

    make_material(tmp_path / "material", 45, CONFIG)
    return tmp_path / "material"


@pytest.mark.slow
def test_the_real_loop_and_one_by_hand_have_one_curve_and_are_timed(tmp_path, material):
    contenders = [
        ours("jaxdp", tmp_path),
        Contender("plain", [*start("benchmarks.plain.jit_loop"), str(material)]),
        Contender("flax", [*start("benchmarks.plain.nnx_loop"), str(material)]),
    ]
    found = harness.measure(contenders, tmp_path / "logs", updates=5, repeats=2, cores=CORES, timeout=60)
    assert json.loads(json.dumps(found))["repeats"] == 2
    for own in found["contenders"].values():
        assert len(own["seconds_per_update"]) == 2 and min(own["seconds_per_update"]) > 0
        assert own["cores"] == CORES and own["relative_loss_error"] < 1e-5
        assert len(own["losses"]) == 15 and own["losses"][-1] < own["losses"][0]
    speed = harness.ratio(found, "plain", "jaxdp")
    first, second = (found["contenders"][name]["seconds_per_update"] for name in ("jaxdp", "plain"))
    assert speed["of_medians"] == pytest.approx(sum(first) / sum(second))


@pytest.mark.slow
def test_a_contender_that_trains_something_else_is_refused_and_named(tmp_path):
    contenders = [ours("jaxdp", tmp_path), ours("slower", tmp_path, "--optimizer.lr", "9e-4")]
    with pytest.raises(Unfair, match=r"slower: its losses differ from those of jaxdp .* at update 2"):
        harness.measure(contenders, tmp_path / "logs", updates=2, repeats=2, cores=CORES, timeout=60)


@pytest.mark.slow
def test_a_contender_that_dies_is_named_with_its_last_words(tmp_path):
    contenders = [ours("jaxdp", tmp_path), ours("mistaken", tmp_path, "--optimizer.lr", "high")]
    with pytest.raises(Unfair, match=r"(?s)mistaken: it ended with code 1 before it began.*optimizer\.lr"):
        harness.measure(contenders, tmp_path / "logs", updates=2, repeats=2, cores=CORES, timeout=60)


def test_quartiles_and_the_worst_difference():
    assert harness.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert harness.worst([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert harness.worst([float("nan")], [1.0]) == float("inf")


def test_a_part_of_the_gpu_set_that_fails_is_named_and_an_interruption_loses_nothing(tmp_path):
    options = argparse.Namespace(tiny=True, root="random", repeats=2, out=tmp_path)
    bench = gpu.Bench(options, {})

    def interrupted(bench, own):
        own["first"] = 1.0
        raise KeyboardInterrupt

    bench.run("wrong", lambda bench, own: 1 / 0)
    with pytest.raises(KeyboardInterrupt):
        bench.run("long", interrupted)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["wrong"]["failed"] == "ZeroDivisionError: division by zero"
    assert kept["long"]["failed"].startswith("interrupted") and kept["long"]["first"] == 1.0
    options.tiny, bench.began = False, bench.began - gpu.BUDGET
    bench.run("late", interrupted)
    assert bench.found["late"]["left_out"].startswith("no time")


@pytest.mark.slow
def test_a_contender_of_the_gpu_set_that_fails_leaves_the_others_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "torch_python", lambda tiny: (sys.executable, "nowhere"))
    bench = gpu.Bench(argparse.Namespace(tiny=True, root="random", repeats=2, out=tmp_path), {"ceilings": {}})
    bench.run("gpt2_124m", gpu.gpt2)
    own = json.loads((tmp_path / "gpu.json").read_text())["gpt2_124m"]
    assert list(own["contenders"]) == ["jaxdp", "plain jit"] and "failed" not in own
    assert "torch compiled: it ended with code" in own["summary"]["torch compiled"]["failed"]
    for name in own["contenders"]:
        figures = own["summary"][name]
        assert figures["units_per_s"] > 0 and figures["relative_loss_error"] < gpu.TOLERANCE
        assert figures["flops_per_s"] == pytest.approx(own["flops_per_update"] * figures["units_per_s"] / 512)
    parameters = 512 * 96 + 2 * 12 * 96**2
    assert own["flops_per_update"] == pytest.approx(512 * 6 * (parameters + 2 * 2 * 96 * 64), rel=0.03)
    bench.run("seconds_to_94", gpu.seconds_to_94)
    assert bench.found["seconds_to_94"]["accuracy"] < 0.94 and not bench.found["seconds_to_94"]["reached"]
