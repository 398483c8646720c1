"""The benchmarks of exact sums at their smallest."""

import pytest

from scripts import HIDDEN, MLP, run_script, runs


@pytest.fixture
def script():
    return run_script


@runs("exact")
def test_exact(script):
    words = ["--ways", "bucket,exact8", "--repeats", 1, "--devices", 2, "--microbatches", 2]
    [result] = script("exact", *MLP, *words)
    assert (
        result["devices"] == 2
        and result["over_bucket"]["bucket"] == 1.0
        and result["median_ms"]["exact8"] > 0
    )
    assert result["loss"]["exact8"] == pytest.approx(result["loss"]["bucket"], rel=1e-5)
    elements = 64 * 8 + 8 + 8 * 10 + 10
    assert 4 * elements <= result["sent_bytes"]["bucket"] < 5 * elements


@runs("exact_curves")
def test_exact_curves(script):
    words = ["--microbatches", 4, "--steps", 3, "--seeds", 1, "--reductions", "bucket,exact"]
    [result] = script("exact_curves", *MLP, *words)
    bucket, exact = (result["reductions"][name] for name in ("bucket", "exact"))
    assert bucket["updates"] == exact["updates"] == 3 and bucket["first_50_apart"] == [0.0]
    assert exact["first_50_apart"][0] < 1e-5 and exact["last_losses"] == pytest.approx(
        bucket["last_losses"], abs=2e-5
    )


@runs("isa")
def test_isa(script):
    words = ["--models", "mlp", "--devices", 2, "--steps", 2]
    head, rule, *rows = script("isa", *words, "--processors", "default,AVX2")
    assert head == "| model | devices | default | AVX2 | one digest |"
    assert rule.count("|") == head.count("|")
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[:2] for row in cells] == [["mlp", "2"]]
    assert {row[4] for row in cells} == {"yes"}
    assert len({digest for row in cells for digest in row[2:4]}) == 1

    [result] = script("isa", "--speed", "--models", "mlp", "--repeats", 1, *HIDDEN)
    assert result["model"] == "mlp" and result["speed"] > 0
    assert result["median_ms"]["pinned"] > 0 and result["median_ms"]["unpinned"] > 0
