"""A preset sets what XLA knows, and only where several GPUs are there."""

import json
import os

import pytest

from jaxdp import environment, xla_presets


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """The environment of a host with two, and caches of its own; it is put back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_pipelined_all_gather=false")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.slow
def test_a_flag_that_xla_does_not_know_is_found_and_the_others_are_kept():
    assert xla_presets.probe({**xla_presets.OVERLAP, "--xla_no_such_flag": "true"}) == {"--xla_no_such_flag"}


def remember(known):
    file = environment.user_cache() / f"xla_flags-{xla_presets._versions()}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(known))


def test_what_was_probed_is_set_beside_what_is_set_already(two_gpus):
    missing = "--xla_gpu_enable_while_loop_double_buffering"
    remember({name: name != missing for name in xla_presets.OVERLAP})
    assert xla_presets.use("overlap", local_gpus=2) is None  # it was said when it was found out
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[0] == "--xla_gpu_enable_pipelined_all_gather=false" and len(flags) == len(xla_presets.OVERLAP) - 1
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags and not any(missing in flag for flag in flags)


def test_nothing_is_set_where_it_would_do_nothing(two_gpus, monkeypatch):
    before = os.environ["XLA_FLAGS"]
    assert xla_presets.use("default", local_gpus=2) is None
    assert xla_presets.use("overlap", devices=1, local_gpus=2) is None
    assert xla_presets.use("overlap", local_gpus=1) is None and xla_presets.use("overlap", local_gpus=0) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert xla_presets.use("overlap", local_gpus=2) is None and os.environ["XLA_FLAGS"] == before


def test_a_flag_whose_name_begins_that_of_another_is_set(two_gpus):
    environment.add_flag("--xla_gpu_enable_pipelined_all=true")
    environment.add_flag("--xla_gpu_enable_pipelined_all_gather=true")  # is set already
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_pipelined_all_gather=false --xla_gpu_enable_pipelined_all=true"


def test_what_cannot_be_tried_is_left_out_and_said(two_gpus, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonexistent")
    said = xla_presets.use("overlap", local_gpus=2)
    assert said is not None and "could not open the devices" in said and "latency" not in os.environ["XLA_FLAGS"]
