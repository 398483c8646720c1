"""Checks that the tests of the program and those of an extra make with parameters of their own."""

import jax
import numpy as np
import pytest

import toys
from cli_runs import DIGITS
from jaxdp.cli import load
from jaxdp.config import validation
from jaxdp.errors import UsageError
from jaxdp.parallel.placement import assign_microbatches
from jaxdp.plan.prediction import make_plan
from jaxdp.run.build import is_padded, make_case
from jaxdp.run.components import make_parts


def check_shared_programs(backend, devices, reduction, zero, tmp_path):
    """Programs depend on no seed, and the initial parameters do."""
    settings = {
        "backend": backend,
        "devices": devices,
        "reduction": reduction,
        "layout": {"zero": zero},
    }
    programs, initial = [], []
    for seed in (0, 1):
        strategy, step, batch = toys.build(
            toys.MODELS["dropout"](), toys.data(), seed=seed, **settings
        )
        jax.config.update("jax_dump_ir_to", str(tmp_path / str(seed)))  # of what is compiled
        try:
            state = strategy.init()
        finally:
            jax.config.update("jax_dump_ir_to", None)
        initial.append(jax.device_get(strategy.export(state).params))
        (file,) = (tmp_path / str(seed)).glob("*_jit_full_compile.mlir")
        program = strategy.compile(step)
        lowered = (
            program.lowered(state, batch(0)),
            program.evaluate.lower(state, batch(0)),
        )
        programs.append([file.read_text(), *(part.as_text() for part in lowered)])
    assert programs[0] == programs[1]
    assert toys.relative_error(*initial)[0] > 0.1


def check_averaged_statistics(**settings):
    strategy, step, batch = toys.build(
        toys.of_all_kinds(), toys.data(), devices=8, ema=0.75, sequential=True, **settings
    )
    state, update = strategy.init(), strategy.compile(step).update
    want = np.array(strategy.export(state).model_state["mean"])
    for i in range(4):
        state, _ = update(state, batch(i))
        exported = strategy.export(state)
        want = 0.75 * want + 0.25 * np.array(exported.model_state["mean"])
    np.testing.assert_allclose(exported.extra["ema_state"]["mean"], want, rtol=1e-6)
    assert exported.extra["ema_state"]["calls"] is None
    seen = strategy.export(strategy.averaged(state))
    np.testing.assert_array_equal(seen.model_state["mean"], exported.extra["ema_state"]["mean"])
    assert int(seen.model_state["calls"]) == 4


def check_padding(keys, devices, offset, padded):
    """A mask is part of the batches exactly where one of them may have padding."""
    config = validation.resolve(load([*DIGITS, *keys])[0])
    parts = make_parts(config)
    table = assign_microbatches(config.microbatches, devices)
    assert is_padded(config, parts, table, offset) == padded
    slots = np.arange(config.microbatches)
    seen = [parts.order.rows(step + offset, slots)[1].all() for step in range(parts.steps)]
    assert padded or all(seen)


def check_refused(argv, words):
    """A config is refused in a line."""
    with pytest.raises(UsageError) as error:
        load([*DIGITS, *argv])
    text = str(error.value)
    assert all(w in text for w in words) and "\n" not in text


def check_figures(*more):
    """Their loops over microbatches or replicas have a length that is known at run time only."""

    def figures(*argv):
        config = load(["--config", "configs/digits.yaml", *argv])[0]
        plan = make_plan(make_case(config, make_parts(config), 0, 4, jax.devices()[:2]), 0)
        return plan.flops, sum(c.count * c.bytes for c in plan.collectives)

    (flops, sent), (usual_flops, usual_sent) = figures(*more), figures()
    assert flops == usual_flops and sent == pytest.approx(usual_sent, rel=0.02)
