"""The harness of the benchmarks: what is compared trains the same thing, and nobody drops out unseen."""

import json
import pathlib
import sys

import pytest

from benchmarks import harness
from benchmarks.harness import Contender, Unfair

ROOT = pathlib.Path(__file__).parent.parent
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
