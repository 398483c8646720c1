"""Flags for GPUs: what XLA knows is set, and only where several GPUs are there."""

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


def test_a_flag_unknown_to_xla_leaves_the_others():
    assert environment.libraries()
    assert environment.unknown_flags([environment.GPU_FLAG, "--xla_no_such_flag"]) == {
        "--xla_no_such_flag"
    }


@pytest.mark.slow
def test_xla_accepts_the_flags_for_gpus(monkeypatch):
    flags = f"{environment.GPU_FLAG}=true"
    run = [sys.executable, "-c", "import jax; jax.devices()"]
    assert subprocess.run(run, env={**os.environ, "XLA_FLAGS": flags}, timeout=300).returncode == 0


def test_a_flag_that_is_set_already_is_kept(two_gpus):
    before = os.environ["XLA_FLAGS"]
    assert environment.set_gpu_flag(local_gpus=2) is None and os.environ["XLA_FLAGS"] == before


def test_a_flag_is_set_beside_others(two_gpus, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    assert environment.set_gpu_flag(local_gpus=2) is None
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == ["--xla_dump_to=here", "--xla_gpu_enable_pipelined_all_gather=true"]


def test_a_flag_that_is_left_out_is_named(two_gpus, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(environment, "unknown_flags", set)
    message = environment.set_gpu_flag(local_gpus=2)
    assert message == (
        "XLA_FLAGS: this XLA does not know --xla_gpu_enable_pipelined_all_gather, which is left out"
    )
    assert not os.environ["XLA_FLAGS"]


def test_nothing_is_set_where_it_would_do_nothing(two_gpus, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert environment.set_gpu_flag(devices=1, local_gpus=2) is None
    assert environment.set_gpu_flag(local_gpus=1) is None
    assert environment.set_gpu_flag(local_gpus=0) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment.set_gpu_flag(local_gpus=2) is None and not os.environ["XLA_FLAGS"]


def test_a_flag_that_is_a_prefix_of_another_is_set(two_gpus):
    environment.add_flag("--xla_gpu_enable_pipelined_all=true")
    environment.add_flag("--xla_gpu_enable_pipelined_all_gather=true")  # is set already
    assert (
        os.environ["XLA_FLAGS"]
        == "--xla_gpu_enable_pipelined_all_gather=false --xla_gpu_enable_pipelined_all=true"
    )
