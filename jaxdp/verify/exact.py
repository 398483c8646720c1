"""Compare bits: train in every configuration with exact sums, and compare each result with the
first one.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.config import Config
from jaxdp.errors import UsageError
from jaxdp.extras import door
from jaxdp.parallel.strategy import Strategy
from jaxdp.process.hosts import listed
from jaxdp.run.components import make_parts, set_jax
from jaxdp.run.preflight import check_optimizer
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step
from jaxdp.verify.compare import leaves
from jaxdp.verify.configurations import (
    Configuration,
    choose_configurations,
    clip,
    configuration_of,
)
from jaxdp.verify.problem import FAILED, OK, make_variant, smaller
from jaxdp.verify.trained import read_local, run_updates
from jaxdp.verify.verdict import Report, Result, describe

# configuration -> (its strategy, the step, batch number -> its batch on the strategy's devices)
Make = Callable[[Configuration], tuple[Strategy, Step, Callable[[int], Batch]]]


def exactly(config: Config) -> Config:
    """Return the config in exact mode, with the smaller arguments of `verify`. Raises UsageError."""
    door("exact", "--exact")
    from jaxdp.exact import in_exact_mode

    return in_exact_mode(smaller(config))


def verify_exactly(
    config: Config, devices: int, updates: int, progress: Callable[[str], None]
) -> Report:
    """Compare the bits of a config in exact mode, on its first batches and the last of an epoch,
    maybe incomplete.

    devices: the most to use; in a job of several processes all are used.
    """
    set_jax(config)
    parts = make_parts(config)
    used = jax.devices()
    if jax.process_count() == 1:
        used = used[: min(devices, config.microbatches // config.parallel.exact_group)]

    def make(configuration):
        strategy, step = make_variant(config, parts, configuration, used)
        check_optimizer(config, strategy, parts.rule.tx, step)
        return strategy, step, functools.partial(read_local, parts.order, parts.dataset, strategy)

    last = parts.order.steps_per_epoch - 1
    batches = [*(min(i, last) for i in range(updates - 1)), last]
    trained = f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    own = clip(configuration_of(config), used)
    return compare_bits(make, own, used, batches, trained, progress)


def compare_bits(
    make: Make,
    own: Configuration,
    devices: Sequence[jax.Device],
    batches: Sequence[int],
    trained: str,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Train the same updates in every configuration on these devices, and compare them to the bit.

    own: that of the run. batches: the number of the batch of each update. trained: what the updates
    train on, in words. Raises UsageError if no configuration can train.
    """
    report = Report(
        f"{describe(devices)}; {len(batches)} updates of {trained}", "params_sha256", goal="exact"
    )
    first: dict[str, np.ndarray] = {}
    changed: list[bool] = []

    def run(configuration):
        strategy, step, batch = make(configuration)
        state = strategy.init()
        before = digest_of_floats(strategy.export(state))
        final, curve = run_updates(strategy, step, state, map(batch, batches))
        changed.append(digest_of_floats(final) != before)
        bits = {**leaves(final), **leaves({"curve": curve})}
        if not first:
            first.update(bits)
        difference = first_difference(first, bits)
        digest = params_sha256(final.params)
        return Result(configuration, FAILED if difference else OK, digest, difference)

    report.run(run, choose_configurations(own, devices, exact=True), progress)
    compared = report.passed + report.failed
    if not compared:
        raise UsageError(report.results[0].note)
    report.agreement = f"give the same bits; params_sha256 {compared[0].value}"
    report.causes = [f"{r.configuration.title}: {r.note}" for r in report.failed[:1]]
    report.causes += report.refusal(own)
    counts = {result.configuration.devices for result in compared}
    if not any(changed):
        report.causes = [
            f"{len(batches)} updates changed no float of the parameters or the optimizer state (none was applied, or "
            "every gradient is zero); verify with data and --updates that train something"
        ]
    elif len(counts) == 1:
        report.causes.append(
            f"only {counts.pop()} device(s) could train; use --devices 2 or more, and 2 microbatches or more"
        )
    return report


def digest_of_floats(state: TrainState) -> str:
    """Return the digest of the floats of the parameters and of the optimizer state."""
    arrays = jax.tree.leaves((state.params, state.opt_state))
    return params_sha256([x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)])


def first_difference(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """Return where two first differ, the update and the leaves at the end, or ""."""

    def same(x, y):
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())

    differing = [path for path in first if path not in other or not same(first[path], other[path])]
    if not differing:
        return ""
    pairs = [zip(first[path], other[path]) for path in differing if path.startswith("curve/")]
    updates = [i for pair in pairs for i, (x, y) in enumerate(pair, 1) if not same(x, y)]
    when = f"from update {min(updates)} on" if updates else "in the state alone"
    differing.sort(key=lambda path: not path.startswith("params/"))
    return f"differs {when}, in {listed(differing, 3)}"
