"""What a run says of its bytes is what its layout and its program have; nothing is compiled to know
it.
"""

import threading

import jax
import pytest

import toys
from jaxdp import errors
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.plan import prediction


@pytest.mark.parametrize(
    ("backend", "devices"),
    [
        ("pmap", 2),
        pytest.param("pmap", 4, marks=pytest.mark.slow),
        pytest.param("pjit", 4, marks=pytest.mark.slow),
        pytest.param("pmap", 1, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_has_run_tells_what_it_sends(backend, devices):
    model, examples = toys.MODELS["mlp"](), toys.data(40)
    strategy, step, _ = toys.build(model, examples, devices=devices, backend=backend)
    program, state = strategy.compile(step), strategy.init()
    read = read_batches(
        Arrays(**examples), EpochOrder(40, 20, 8, 0), [0], strategy.local_microbatches
    )
    batch = strategy.shard_batch(read)
    assert (
        prediction.of_compiled(program.lowered(state, batch), devices) is None
    )  # it would have to compile
    state, _ = program.update(state, batch)
    found = prediction.of_compiled(program.lowered(state, batch), devices)
    sizes = prediction.bytes_by_tree(strategy, step, read)
    params = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(strategy.export(state).params))
    assert sizes["params"] == sizes["grads"] == params
    assert sizes["batch"] == sum(x.nbytes for x in read.values()) / devices
    assert found is not None and found["peak"] > 2 * params
    if devices == 1:
        assert found["collectives"] == {}
    else:
        (sent,) = found["collectives"].values()
        assert params < sent["bytes"] < params + 100 and sent["wire"] == 2 * sent["bytes"]


def test_a_fault_is_recorded_though_a_listener_hangs(monkeypatch):
    monkeypatch.setattr(errors, "RECORDING", 0.2)
    heard, forever = [], threading.Event()
    listeners = [lambda text: 1 / 0, heard.append, lambda text: forever.wait()]
    for listener in listeners:
        errors.on_fault(listener)
    errors.record_fault("the end")
    for listener in listeners:
        errors.off_fault(listener)
    forever.set()
    errors.record_fault("nobody listens")
    assert heard == ["the end"]
