"""The benchmarks of elastic training at their smallest."""

import os
import shutil

import pytest

from scripts import HIDDEN, MLP, run_script, runs


@pytest.fixture
def script():
    return run_script


@runs("elastic_cost")
def test_elastic_cost(script):
    words = ["--processes", 1, "--repeats", 1, "--steps", 3, "--log.every", 1]
    [result] = script("elastic_cost", *MLP, *words)
    assert result["ratio"] == pytest.approx(result["with_ms"] / result["without_ms"], rel=0.1)
    assert result["standard_error_us"] is None and result["without_ms"] > 0


@runs("elastic_recovery")
def test_elastic_recovery(script):
    words = [
        "--data.target",
        "benchmarks.data.SlowDigits",
        "--data.args.sleep",
        0.02,
        "--parallel.reduction",
        "bucket",
    ]
    one, last = script(
        "elastic_recovery", *MLP, *words, "--processes", 1, "--kills", 1, "--warm", 0
    )
    assert 0 < one["update"] <= one["complete"] and last["median"] == one and last["kills"] == 1


@runs("elastic_soak")
def test_elastic_soak(script):
    model = [*HIDDEN, "--data.args.augment", "false", "--model.args.dropout", 0]
    times = ["--minutes", 0.01, "--every", 0.5, "--healthy", 0.3, "--steps", 100]
    [result] = script("elastic_soak", "--processes", 1, "--ways", "elastic", *times, *model)
    assert result["number"] >= 1 and result["generations"] >= 2 and result["longest"]["kill"][0] > 0
    assert result["code"] == 0 and result["every_update_once"] and result["equal_to_one_device"]


@runs("elastic_hosts")
def test_elastic_hosts(script):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        assert "no network namespaces here" in script("elastic_hosts", "--hosts", 2, code=1)
        return
    model = [*HIDDEN, "--data.args.augment", "false", "--model.args.dropout", 0]
    words = ["--hosts", 2, "--minutes", 0.06, "--pause", 0.1, "--faults", "kill"]
    # A process that comes back after the end waits for this long; one that gives up too early
    # starts again.
    *faults, result = script("elastic_hosts", *words, *model, env={"JAXDP_TIMEOUT": "20"})
    assert all(result["checks"].values()) and {fault["fault"] for fault in faults} == {"kill"}
    assert result["codes"]["0"] >= 1  # a process that comes back after the last update finds no job
    assert result["generations"][0] == 2 and len(result["generations"]) >= 2
