"""A preset sets what XLA knows, and only where several GPUs are there."""

import os
import subprocess
import sys

import pytest

from jaxdp.process import environment


@pytest.fixture
def two_gpus(monkeypatch):
    """The environment of a host with two; it is put back."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_pipelined_all_gather=false")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_flag_that_xla_does_not_know_is_found_and_the_others_are_kept():
    assert environment.libraries()
    assert environment.unknown_flags([*environment.OVERLAP, "--xla_no_such_flag"]) == {
        "--xla_no_such_flag"
    }


@pytest.mark.slow
def test_xla_accepts_the_flags_of_a_preset(monkeypatch):
    flags = " ".join(f"{name}={value}" for name, value in environment.OVERLAP.items())
    run = [sys.executable, "-c", "import jax; jax.devices()"]
    assert subprocess.run(run, env={**os.environ, "XLA_FLAGS": flags}, timeout=300).returncode == 0


def test_flags_are_set_beside_those_that_are_set_already(two_gpus, monkeypatch):
    missing = "--xla_gpu_enable_while_loop_double_buffering"
    monkeypatch.setattr(environment, "unknown_flags", lambda names: {missing})
    message = environment.use_preset("overlap", local_gpus=2)
    assert (
        message == f"parallel.xla_preset: overlap without {missing}, which this XLA does not know"
    )
    flags = os.environ["XLA_FLAGS"].split()
    assert (
        flags[0] == "--xla_gpu_enable_pipelined_all_gather=false"
        and len(flags) == len(environment.OVERLAP) - 1
    )
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags and not any(
        missing in flag for flag in flags
    )


def test_nothing_is_set_where_it_would_do_nothing(two_gpus, monkeypatch):
    before = os.environ["XLA_FLAGS"]
    assert environment.use_preset("default", local_gpus=2) is None
    assert environment.use_preset("overlap", devices=1, local_gpus=2) is None
    assert (
        environment.use_preset("overlap", local_gpus=1) is None
        and environment.use_preset("overlap", local_gpus=0) is None
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (
        environment.use_preset("overlap", local_gpus=2) is None
        and os.environ["XLA_FLAGS"] == before
    )


def test_a_flag_whose_name_begins_that_of_another_is_set(two_gpus):
    environment.add_flag("--xla_gpu_enable_pipelined_all=true")
    environment.add_flag("--xla_gpu_enable_pipelined_all_gather=true")  # is set already
    assert (
        os.environ["XLA_FLAGS"]
        == "--xla_gpu_enable_pipelined_all_gather=false --xla_gpu_enable_pipelined_all=true"
    )
