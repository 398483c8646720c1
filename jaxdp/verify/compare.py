"""Compare trained states: the relative error of each leaf in the L2 norm, allowing for what rounding
alone changes. And the report, for a person or as JSON."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.leaves import all_fields_of, host
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.numbers import table
from jaxdp.models.base import CARRY
from jaxdp.process.hosts import listed
from jaxdp.split import leaves_by_path
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.state import TrainState
from jaxdp.train.step import UpdateRule
from jaxdp.verify.oracle import Curve, Trained
from jaxdp.verify.problem import FAILED, NOTE, OK, REFUSED, Check, Configuration

Tree = Any
Errors = dict[str, float]  # by path: part/of/the/state
COMPARED = ("params", "model_state", "opt_state", EMA, EMA_STATE, CARRY)
RATES = (1.0, 0.1, 0.01, 0.001)  # of the peak learning rate
ZERO = 1e3  # last digits of the whole gradient's norm: a gradient below is zero but for rounding
# A leaf may differ by MARGIN x what rounding moves it, at most by MOST. It is not compared if
# rounding moves it by more than COARSEST and 5 times the tolerance.
MARGIN, MOST, COARSEST = 10, 0.5, 1e-2


class Worst(NamedTuple):
    error: float
    leaf: str


class Reference(NamedTuple):
    """What the oracle trained, with `rule` at `rate` of the peak learning rate, and how far
    rounding moves each leaf.

    Args:
        moved: {leaf: the relative error that rounding causes}.
        uncompared: the same, of leaves that rounding moves too far to compare.
        zero: {trained leaf: elements whose gradient is zero but for rounding}, of leaves that are
            compared without these elements; if these are all, the leaf is in `uncompared`.
        unexplained: the part of `uncompared` that no such gradient explains.
        moving: the trained leaves that have a gradient and change.
    """

    trained: Trained
    rule: UpdateRule
    rate: float
    moved: Errors
    uncompared: Errors
    zero: dict[str, np.ndarray]
    unexplained: Errors
    moving: set[str]

    @property
    def compared(self) -> tuple[int, int]:
        """Return (the number of trained leaves that are compared, the number of trained leaves).

        A leaf that stands still does so in every configuration, so it does not count as compared.
        """
        return len(self.moving - self.uncompared.keys()), len(leaves(self.trained.grads[0]))

    def allowed(self, path: str, tolerance: float) -> float:
        apart = path in self.zero or path in self.uncompared
        return tolerance if apart else max(tolerance, min(MARGIN * self.moved.get(path, 0.0), MOST))

    def notes(self, tolerance: float) -> list[Check]:
        """Return notes on the leaves that are not compared, or not as closely as the others."""
        in_part = {path: self.moved[path] for path in self.zero if path not in self.uncompared}
        near = {
            path: error
            for path, error in self.moved.items()
            if self.allowed(path, tolerance) > tolerance
        }
        notes = {
            "not compared, because rounding alone moves them too far": self.uncompared,
            "compared without the elements whose gradient is zero but for rounding": in_part,
            f"compared with a margin of {MARGIN} times what rounding moves them, at most {MOST}": near,
        }
        return [
            Check("rounding", NOTE, f"{text}: {list_leaves(errors)}")
            for text, errors in notes.items()
            if errors
        ]

    def errors(self, state: TrainState, curve: Curve, tolerance: float) -> Errors:
        """Return the error of each leaf that is compared, scaled so that `tolerance` is what is
        allowed.
        """
        start, trained, own_curve, _ = self.trained
        curve = {name: curve[name] for name in curve if name in own_curve}
        got, want = flatten(state, curve, start), flatten(trained, own_curve, start)
        for path, zero in self.zero.items():
            if path in got and got[path].shape == zero.shape:
                got[path] = np.where(zero, want[path], got[path])
        return {
            path: error * tolerance / self.allowed(path, tolerance)
            for path, error in differences(got, want).items()
            if path not in self.uncompared
        }


def find_reference(
    train: Callable[[Tree, UpdateRule], Trained],
    make_rule: Callable[[float], UpdateRule],
    params: Tree,
    epsilon: float,
    tolerance: float,
) -> Reference:
    """Train three times, twice with parameters changed in their last digit: what differs is
    rounding.

    Lower the learning rate where training amplifies rounding, update by update, beyond what is
    compared.

    Args:
        train: (params, rule) -> what the oracle trains.
        epsilon: the last digit, relative.
    """
    rng = np.random.default_rng(0)

    def perturb(x):
        return x * (1 + epsilon * rng.choice([-1.0, 1.0], x.shape))

    def moves(one, *others):
        return {path: max(difference(x.get(path), one[path]) for x in others) for path in one}

    starts = [params, *(jax.tree.map(perturb, params) for _ in range(2))]
    for rate in RATES:
        rule = make_rule(rate)
        runs = [train(start, rule) for start in starts]
        moved = moves(*(flatten(run.state, run.curve) for run in runs))
        if np.median([*moved.values()]) <= max(tolerance / 100, 8 * epsilon):
            break
    trained, limit = runs[0], max(COARSEST, 5 * tolerance)
    one, *others = (flatten(run.state, run.curve, run.start) for run in runs)
    moved = moves(one, *others)
    too_far = {path: e for path, e in moved.items() if e > limit}
    zero = {}
    for path, elements in zero_gradients(trained.grads, epsilon).items():
        rest = [difference(np.where(elements, one[path], x[path]), one[path]) for x in others]
        if path in too_far and max(rest) <= limit:
            zero[path] = elements
    grads = [leaves({"params": tree}) for tree in trained.grads]
    return Reference(
        trained,
        rule,
        rate,
        moved,
        uncompared={p: e for p, e in too_far.items() if p not in zero or zero[p].all()},
        zero=zero,
        # Other leaves, such as the optimizer's, move with parameters whose gradient is zero.
        unexplained={
            p: e
            for p, e in too_far.items()
            if p not in zero and (not zero or p.startswith("params/"))
        },
        moving={p for p in grads[0] if np.any(one[p]) and any(np.any(x[p]) for x in grads)},
    )


def zero_gradients(grads: list[Tree], epsilon: float) -> dict[str, np.ndarray]:
    """Return {params/path: the elements whose gradient is zero, but for rounding, in every update}."""
    zero: dict[str, np.ndarray] = {}
    for tree in grads:
        with np.errstate(over="ignore"):
            norm = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(tree)))
        if not np.isfinite(norm):
            norm = 0.0  # nothing is small beside a gradient that overflows
        for path, x in leaves({"params": tree}).items():
            zero[path] = (np.abs(x) <= ZERO * epsilon * norm) & zero.get(path, True)
    return zero


def leaves(tree: Tree) -> dict[str, np.ndarray]:
    return {path: host(x) for path, x in leaves_by_path(tree).items()}


def flatten(state: TrainState, curve: Curve, start: Tree = None) -> dict[str, np.ndarray]:
    """Return what is compared of a state and its curve, by path.

    start: the first parameters; of parameters and their average, what changed since is compared: an
    update may be small beside them.
    """

    def change(x, before):
        return host(x) - host(before) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    trees = {k: tree for k, tree in all_fields_of(state).items() if k in COMPARED}
    for name in ("params", EMA) if start is not None else ():
        if name in trees:
            trees[name] = jax.tree.map(change, trees[name], start)
    return leaves({**trees, "curve": curve})


def differences(got: Tree, want: Tree) -> Errors:
    """Return {path: |got - want| / |want|} of every leaf."""
    got, want = leaves(got), leaves(want)
    return {path: difference(got.get(path), want.get(path)) for path in {**want, **got}}


def difference(got: np.ndarray | None, want: np.ndarray | None) -> float:
    """Return |got - want| / |want|; infinity where only one is finite, or anything but floats
    differs.
    """
    if got is None or want is None or got.shape != want.shape:
        return np.inf
    if not (jnp.issubdtype(want.dtype, jnp.inexact) and jnp.issubdtype(got.dtype, jnp.inexact)):
        return 0.0 if np.array_equal(got, want) else np.inf
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return np.inf
    got, want = (x[finite].astype(np.promote_types(x.dtype, np.float64)) for x in (got, want))
    # divided by the largest element, or their squares may overflow
    top = np.max([np.abs(got), np.abs(want)], initial=0.0) or 1.0
    size, apart = np.linalg.norm(want / top), np.linalg.norm(got / top - want / top)
    return float(apart / size) if size else np.inf if apart else 0.0


def worst(errors: Errors) -> Worst:
    return Worst(*max(((error, leaf) for leaf, error in errors.items()), default=(0.0, "")))


def list_leaves(errors: Errors) -> str:
    ordered = sorted(errors.items(), key=lambda item: -item[1])
    return listed((f"{path} ({error:.0e})" for path, error in ordered), 5)


class Result(NamedTuple):
    """What a configuration trained.

    verdict: OK, FAILED, or REFUSED as a run would be. value: the largest error, or a digest; "" if
    there is none. note: the leaf of this error, how the bits differ, or why there is no value.
    errors: of each compared leaf."""

    configuration: Configuration
    verdict: str
    value: str = ""
    note: str = ""
    errors: Errors = {}

    @property
    def outcome(self) -> str:
        return " ".join(word for word in (self.value[:16], self.verdict) if word not in ("", OK))


@dataclasses.dataclass
class Report:
    """What was compared, and the result. value: the name of the results' values. goal: of the
    comparison, in a word.

    setting: what was trained, and on what, in words. reference: what the oracle trained; None if a
    check failed before, or if bits are compared. causes: why it is not verified, or nothing.
    agreement: what verified configurations share."""

    setting: str
    value: str
    checks: list[Check] = dataclasses.field(default_factory=list)
    reference: Reference | None = None
    results: list[Result] = dataclasses.field(default_factory=list)
    causes: list[str] = dataclasses.field(default_factory=list)
    agreement: str = ""
    goal: str = "verified"

    @property
    def verified(self) -> bool:
        return not self.causes

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.verdict == FAILED]

    @property
    def passed(self) -> list[Result]:
        return [result for result in self.results if result.verdict == OK]

    @property
    def largest(self) -> Worst:
        return max((worst(result.errors) for result in self.results), default=Worst(0.0, ""))

    def run(
        self,
        train: Callable[[Configuration], Result],
        configurations: Sequence[Configuration],
        progress: Callable[[str], None],
    ) -> None:
        """Add the result of each configuration; progress: see `verify`."""
        for i, configuration in enumerate(configurations):
            began = time.monotonic()
            try:
                result = train(configuration)
            except UsageError as error:
                result = Result(configuration, REFUSED, note=one_line(error))
            except NotImplementedError as error:  # of a callback that jax.vmap cannot map
                text = f"{one_line(error)}; set parallel.accumulate to scan"
                result = Result(configuration, REFUSED, note=text)
            self.results.append(result)
            shown = f"{i + 1}/{len(configurations)} {configuration.title}: {result.outcome}"
            progress(f"{shown}, {time.monotonic() - began:.1f} s")

    def refusal(self, own: Configuration) -> list[str]:
        """Return why the run's own configuration was refused, if it was."""
        return [
            f"the configuration that the config asks for is refused: {r.note}"
            for r in self.results
            if r.configuration == own and r.verdict == REFUSED
        ]

    def as_text(self, title: str) -> str:
        """Return the checks, the configurations, and the verdict as the last line."""
        parts = [f"{title}\n{self.setting}"]
        if self.checks:
            parts.append("\n".join(table([("check", "verdict", "result"), *self.checks])))
        if self.results:
            rows = [[*r.configuration.cells, r.outcome, r.note] for r in self.results]
            parts.append("\n".join(table([[*Configuration._fields, self.value, ""], *rows])))
        return "\n\n".join([*parts, self.verdict()])

    def verdict(self) -> str:
        passed, failed = len(self.passed), len(self.failed)
        refused = len(self.results) - passed - failed
        more = f" ({refused} more refused)" if refused else ""
        if self.verified:
            return f"{self.goal}: {passed} configurations{more} {self.agreement}"
        differ = f"{failed} of {passed + failed} configurations differ{more}: " if failed else ""
        return f"not {self.goal}: {differ}{'; '.join(self.causes)}"

    def as_json(self, title: str) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "title": title,
            "setting": self.setting,
            self.goal: self.verified,
            "causes": self.causes,
            "jax": jax.__version__,
            "checks": [check._asdict() for check in self.checks],
            "configurations": [
                {
                    "configuration": r.configuration._asdict(),
                    "verdict": r.verdict,
                    self.value: r.value,
                    "note": r.note,
                }
                for r in self.results
            ],
        }


def describe(devices: Sequence[jax.Device]) -> str:
    processes = len({device.process_index for device in devices})
    return (
        f"{len(devices)} x {devices[0].device_kind}{f' in {processes} processes' * (processes > 1)}"
    )
