"""Compare bits: train in every configuration with exact sums, and compare a digest of each result."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.checkpoint.digest import params_sha256
from jaxdp.core.state import Batch, TrainState
from jaxdp.core.step import Step
from jaxdp.distributed.hosts import listed
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.numbers import table
from jaxdp.parallel import Strategy
from jaxdp.split import path_string
from jaxdp.verify.configurations import Configuration

# configuration -> (its strategy, the step, batch number -> its batch on the strategy's devices)
Make = Callable[[Configuration], tuple[Strategy, Step, Callable[[int], Batch]]]


class Digests(NamedTuple):
    """What a configuration trained, as digests of the parameters, of all of the state and of each update's metrics.

    leaves: path -> digest, of the final state. changed: training changed a float of the parameters or of the optimizer
    state. refused: why nothing was trained, or "".
    """

    configuration: Configuration
    params: str = ""
    state: str = ""
    curve: tuple[str, ...] = ()
    leaves: dict[str, str] = {}
    changed: bool = False
    refused: str = ""
    seconds: float = 0.0


class ExactReport(NamedTuple):
    """differs: index -> where its bits first differ from the first one's. nothing: why nothing was compared, or ""."""

    digests: list[Digests]
    differs: dict[int, str]
    nothing: str

    @property
    def exact(self) -> bool:
        """Return whether configurations on several numbers of devices trained, and all have the same bits."""
        return not self.differs and not self.nothing


def compare_bits(
    make: Make,
    configurations: Sequence[Configuration],
    batches: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
) -> ExactReport:
    """Train the same updates in every configuration, and compare them to the bit.

    batches: the number of the batch of each update. Raises UsageError if no configuration can train.
    """
    digests = []
    for i, configuration in enumerate(configurations):
        one = train(make, configuration, batches)
        digests.append(one)
        outcome = one.refused or one.params[:16]
        progress(f"{i + 1}/{len(configurations)} {configuration.title}: {outcome}, {one.seconds:.1f} s")
    trained = {i: one for i, one in enumerate(digests) if not one.refused}
    if not trained:
        raise UsageError(digests[0].refused)
    first, *_ = trained.values()
    differs = {i: text for i, one in trained.items() if (text := first_difference(first, one))}
    nothing, counts = "", {one.configuration.devices for one in trained.values()}
    if not any(one.changed for one in trained.values()):
        nothing = (
            f"{len(batches)} updates changed no float of the parameters or the optimizer state (none was "
            "applied, or every gradient is zero); verify with data and --updates that train something"
        )
    elif len(counts) == 1:
        nothing = f"only {counts.pop()} device(s) could train; use --devices 2 or more, and 2 microbatches or more"
    return ExactReport(digests, differs, "" if differs else nothing)


def train(make: Make, configuration: Configuration, batches: Sequence[int]) -> Digests:
    began = time.monotonic()
    try:
        strategy, step, batch = make(configuration)
    except UsageError as error:
        return Digests(configuration, refused=one_line(error), seconds=time.monotonic() - began)
    state, program, curve = strategy.init(), strategy.compile(step), []
    before = trainable_digests(strategy.export(state))
    for i in batches:
        state, metrics = program.update(state, batch(i))
        curve.append(params_sha256(metrics))
    exported = strategy.export(state)
    names = ("params", "model_state", "opt_state", "guard", "ema", "carry", "exponents")
    parts = {name: part for name in names if (part := getattr(exported, name)) is not None}
    leaves = {path_string(p): params_sha256(x) for p, x in jax.tree_util.tree_leaves_with_path(parts)}
    params, whole, changed = params_sha256(exported.params), params_sha256(parts), trainable_digests(exported) != before
    return Digests(configuration, params, whole, tuple(curve), leaves, changed, "", time.monotonic() - began)


def trainable_digests(state: TrainState) -> list[str]:
    """Return the digest of each float of the parameters and of the optimizer state."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [params_sha256(x) for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]


def first_difference(first: Digests, other: Digests) -> str:
    """Return where two first differ, the update and the leaves at the end, or ""."""
    if (first.state, first.curve) == (other.state, other.curve):
        return ""
    update = next((i + 1 for i, (a, b) in enumerate(zip(first.curve, other.curve)) if a != b), None)
    when = f"from update {update} on" if update else "in the state alone"
    leaves = [leaf for leaf, digest in first.leaves.items() if other.leaves.get(leaf) != digest]
    leaves.sort(key=lambda leaf: not leaf.startswith("params/"))
    return f"{when}, in {listed(leaves, 3) or 'the metrics alone'}"


def as_text(report: ExactReport, title: str) -> str:
    """Return each configuration with its digest, and the verdict as the last line."""
    rows = []
    for i, one in enumerate(report.digests):
        note = f"FAILED: differs {report.differs[i]}" if i in report.differs else one.refused
        rows.append([*one.configuration.cells, one.params[:16] or "refused", note])
    heads = [*Configuration._fields, "params_sha256", ""]
    return "\n\n".join([title, "\n".join(table([heads, *rows])), verdict(report)])


def verdict(report: ExactReport) -> str:
    trained = [one for one in report.digests if not one.refused]
    number = len(report.digests) - len(trained)
    refused = f" ({number} more refused)" if number else ""
    if report.nothing:
        return f"not verified: {report.nothing}{refused}"
    if report.differs:
        return f"not exact: {len(report.differs)} of {len(trained)} configurations differ from the first{refused}"
    return f"exact: {len(trained)} configurations give the same bits{refused}; params_sha256 {trained[0].params}"


def as_json(report: ExactReport) -> dict[str, Any]:
    row = lambda i, one: {
        "configuration": one.configuration._asdict(),
        "params_sha256": one.params,
        "state_sha256": one.state,
        "refused": one.refused,
        "differs": report.differs.get(i, ""),
        "seconds": round(one.seconds, 2),
    }
    rows = [row(i, one) for i, one in enumerate(report.digests)]
    verdict = {"exact": report.exact, "nothing_compared": report.nothing}
    return {**verdict, "jax": jax.__version__, "configurations": rows}
