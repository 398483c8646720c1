"""Padding changes no bit of exact sums."""

import functools

import pytest

import toys
from jaxdp import split
from jaxdp.checkpoint.leaves import params_sha256
from padded import ROWS, is_padded
from padded import train as train_padded


@pytest.fixture(autouse=True)
def no_leaf_is_small(monkeypatch):
    monkeypatch.setattr(split, "SMALL", 1)


def train(*layout, **settings):
    return train_padded(*layout, reduction="exact", **settings)


def digest(result):
    _, state, metrics, *_ = result
    return params_sha256(
        (state.params, state.opt_state, state.extra["ema"], [m["grad_norm"] for m in metrics])
    )


@functools.cache
def alone():
    return digest(train())


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "zero", "devices", "buffer"), ROWS)
def test_exact_sums_have_the_same_bits_with_padding(backend, zero, devices, buffer):
    """Parameters, optimizer state, average, and the norm by which gradients are clipped."""
    result = train(backend, zero, devices, buffer)
    assert result[3].share().replicated_bytes < 50 and is_padded(result[3])
    assert digest(result) == alone()


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "group"), [(3, None), (6, None), (6, 3)])
def test_padding_changes_no_bits_on_odd_device_counts(devices, group):
    model = toys.MODELS["mlp"]()
    result = train("pjit", 3, devices, group=group, model=model)
    assert is_padded(result[3]) and digest(result) == digest(train(model=model))
