"""Compare arrays by the relative error of each leaf, in the L2 norm. And the report of what was
compared, for a person or as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.leaves import all_fields_of, host
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.numbers import table
from jaxdp.models.base import CARRY
from jaxdp.split import leaves_by_path
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.state import TrainState
from jaxdp.verify.problem import Arrays, Configuration, Tree

OK, FAILED, NOTE, SKIPPED, REFUSED = "ok", "FAILED", "note", "skipped", "refused"
COMPARED = ("params", "model_state", "opt_state", EMA, EMA_STATE, CARRY)
Errors = dict[str, float]  # by path: part/of/the/state
Curve = list[dict[str, Any]]  # the metrics of each update


def leaves(trees: dict[str, Tree]) -> Arrays:
    """Return {name/path: array}, in the order of the names."""
    return {
        path: host(x)
        for name, tree in trees.items()
        for path, x in leaves_by_path({name: tree}).items()
    }


def flatten(state: TrainState, curve: Curve, start: Tree = None) -> Arrays:
    """Return what is compared of a state and its curve, by path.

    start: the first parameters; of parameters and their average, what changed since is compared: an
    update may be small beside them.
    """
    fields = {name: tree for name, tree in all_fields_of(state).items() if name in COMPARED}
    arrays = leaves({**fields, "curve": curve})
    before = leaves({"params": start, EMA: start})
    return {path: x - before[path] if path in before else x for path, x in arrays.items()}


def difference(got: np.ndarray | None, want: np.ndarray | None) -> float:
    """Return |got - want| / |want|; infinity where only one is finite, or anything but floats
    differs.
    """
    if got is None or want is None or got.shape != want.shape:
        return np.inf
    inexact = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (got, want))
    if not inexact or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return 0.0 if np.array_equal(got, want) else np.inf
    both = np.array([got, want], np.complex128)[:, np.isfinite(want)]
    # divided by the largest element, or their squares may overflow
    got, want = both / (np.abs(both).max(initial=0.0) or 1.0)
    size, apart = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(apart / size) if size else np.inf if apart else 0.0


def find_difference(got: Arrays, want: Arrays, tolerance: float) -> str:
    """Return the first leaf that differs by more than the tolerance, and how, or ""."""
    for path in {**want, **got}:
        x: Any = got.get(path)
        y: Any = want.get(path)
        if (error := difference(x, y)) > tolerance:
            if np.size(x) == np.size(y) == 1:
                return f"{path} is {x}, not {y}"
            return f"{path} differs by {error:.1e}"
    return ""


def no_progress(text: str) -> None:
    """Print nothing."""


class Check(NamedTuple):
    """What was compared.

    name: of a part of the run, or the title of a configuration. verdict: OK, FAILED, NOTE, SKIPPED,
    or REFUSED as a run would be; FAILED means that the problem is not verified. text: the result.
    error: the largest relative error of a leaf."""

    name: str
    verdict: str
    text: str
    error: float = 0.0


@dataclasses.dataclass
class Report:
    """What was compared, and the result.

    Args:
        setting: what was trained, and on what, in words.
        own: the run's configuration.
        goal: of the comparison, in a word.
        reference: what all results are compared with, trained on one device; None: the first result.
        agreement: what verified configurations share.
        checks: of the parts of the run.
        results: of the configurations.
    """

    setting: str
    own: Configuration
    goal: str = "verified"
    reference: Any = None
    agreement: str = ""
    checks: list[Check] = dataclasses.field(default_factory=list)
    results: dict[Configuration, Check] = dataclasses.field(default_factory=dict)

    def of(self, *verdicts: str) -> list[Configuration]:
        """Return the configurations with one of these verdicts."""
        return [c for c, result in self.results.items() if result.verdict in verdicts]

    @property
    def causes(self) -> list[str]:
        """Return why it is not verified, the most certain cause first, or nothing."""
        causes = [check.text for check in self.checks if check.verdict == FAILED]
        if self.own in self.of(REFUSED):
            text = self.results[self.own].text
            causes.append(f"the configuration that the config asks for is refused: {text}")
        numbers = {c.devices for c in self.of(OK, FAILED)}
        if self.reference:
            numbers.add(1)
        if self.results and len(numbers) == 1:
            causes.append(
                f"nothing was compared but on {numbers.pop()} device(s); use --devices 2 or more, and 2 "
                "microbatches or more"
            )
        for c in self.of(FAILED)[:1]:
            text = f"{c.title}: {self.results[c].text}; if one device agrees, the model may communicate "
            causes.append(f"{text}over devices (BatchNorm with sync: true)")
        return causes

    @property
    def verified(self) -> bool:
        return not self.causes

    @property
    def largest(self) -> Check:
        return max(self.results.values(), key=lambda result: result.error)

    def run(
        self,
        train: Callable[[Configuration], tuple[Any, ...]],
        configurations: Sequence[Configuration],
        progress: Callable[[str], None] = no_progress,
    ) -> None:
        """Add the result of each configuration. train: returns (verdict, text, error), see `Check`;
        progress: see `verify`."""
        for configuration in configurations:
            title = configuration.title
            try:
                result = train(configuration)
            except UsageError as error:
                result = REFUSED, one_line(error)
            except NotImplementedError as error:  # of a callback that jax.vmap cannot map
                result = REFUSED, f"{one_line(error)}; set parallel.accumulate to scan"
            except Exception as error:
                result = FAILED, f"{type(error).__name__}: {one_line(error)}"
            check = self.results[configuration] = Check(title, *result)
            progress(f"{len(self.results)}/{len(configurations)} {title}: {check.verdict}")

    def as_text(self, title: str) -> str:
        """Return the checks, the configurations, and the verdict as the last line."""
        rows = [check[:3] for check in [*self.checks, *self.results.values()]]
        lines = table([("check", "verdict", "result"), *rows])
        return "\n".join([title, self.setting, "", *lines, "", self.verdict()])

    def verdict(self) -> str:
        passed, failed, refused = (len(self.of(x)) for x in (OK, FAILED, REFUSED))
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
            "checks": [dict(zip(("name", "verdict", "text"), check)) for check in self.checks],
            "configurations": [
                {"configuration": c._asdict(), "verdict": result.verdict, "text": result.text}
                for c, result in self.results.items()
            ],
        }


def describe(devices: Sequence[jax.Device]) -> str:
    processes = len({device.process_index for device in devices})
    return (
        f"{len(devices)} x {devices[0].device_kind}{f' in {processes} processes' * (processes > 1)}"
    )
