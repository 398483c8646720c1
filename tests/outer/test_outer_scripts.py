"""The benchmark of local updates at its smallest."""

import pytest

from scripts import MLP, run_script, runs


@pytest.fixture
def script():
    return run_script


@runs("outer")
def test_outer(script):
    words = [*MLP, "--microbatches", 2, "--steps", 6, "--log.every", 2, "--every", 3]
    words += ["--launcher", ""]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    bucket, outer = script("outer", *words, env=flags)
    assert (bucket["way"], bucket["speed"], bucket["loss_vs"]) == ("bucket", 1.0, 0.0) and outer[
        "way"
    ] == "every 3"
    assert (
        outer["loss_vs"] == pytest.approx(outer["loss"] / bucket["loss"] - 1, abs=1e-4)
        and outer["ms"] > 0
    )


@pytest.mark.slow
def test_the_speed_of_outer_steps(script):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = [*MLP, "--microbatches", 2, "--every", 2, "--speed", 2, "--bucket_ms", 1000]
    words += ["--launcher", ""]
    [fast] = script("outer", *words, env=flags)
    assert "loss" not in fast and fast["speed"] == pytest.approx(1000 / fast["ms"], rel=0.05)
