"""Sections of the config that say how a run is evaluated, logged, saved and kept alive."""

import dataclasses
from typing import Any, Literal

from jaxdp.config.training import Target, speed


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluation: every example exactly once.

    Args:
        every: updates between evaluations; null evaluates only at the end
        data: the data to evaluate on; null means the test split of the training data, if it has one
        also: further sets by name, {NAME: {target, args}}; their metrics are NAME/loss, ...
        ema: evaluate the running average of the parameters (optimizer.ema)
    """

    every: int | None = speed(None, least=1)
    data: Target | None = speed(None)
    also: dict[str, Any] = speed({})
    ema: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class Log:
    """Logging during training.

    Args:
        every: updates between two records
        writers: further outputs besides the console and metrics.jsonl: TensorBoard, WandB, or
            {target, args} with the dotted path of your own (docs/monitoring.md)
    """

    every: int = speed(50, least=1)
    writers: list[Any] = speed([])


@dataclasses.dataclass(frozen=True)
class Profile:
    """A trace for TensorBoard or Perfetto, in the run directory; SIGUSR2 starts one at the next
    updates.

    Args:
        start: the first update to trace; null traces none
        steps: the number of updates to trace
    """

    start: int | None = speed(None, least=0)
    steps: int = speed(5, least=1)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, in the run directory; there is always one at the end, and one on preemption.

    Args:
        every: updates between two checkpoints; null saves only the last one
        every_minutes: minutes between two checkpoints, in addition to `every`
        asynchronous: write while training continues; else training waits until the checkpoint is
            complete
        keep: the number of latest checkpoints to keep
        keep_every: keep those at multiples of this number of updates too, such as 10000
        best: keep the best one by this metric of the evaluation too, such as accuracy
        mode: whether that metric is best at its min or its max; null means min if its name contains
            loss, perplexity, error, entropy, mse or mae, else max
        local: hosts share no file system: each keeps all of the state in its own run directory
            (docs/hosts.md)
    """

    every: int | None = speed(None, least=1)
    every_minutes: float | None = speed(None, above=0)
    asynchronous: bool = speed(True)
    keep: int = speed(3, least=1)
    keep_every: int | None = speed(None, least=1)
    best: str | None = speed(None)
    mode: Literal["min", "max"] | None = speed(None)
    local: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class Resume:
    """Another start in the same directory resumes the run from its latest checkpoint.

    Args:
        force: resume even if the config now has other values that change the numbers
    """

    force: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Continue in the same processes when one of several is lost, and admit others while training
    (docs/elastic.md).

    Args:
        enabled: a lost process does not end the others
        min_processes: fewer processes wait for others, and end with code 75 after join_timeout
        snapshot_every: updates between two copies of the state in memory, those since the last one
            being repeated; auto is as many as make the copies take a hundredth of the time, and at
            least those of 0.4 s
        join_timeout: seconds to wait for enough processes
        join_after: seconds of training before the processes stop for others that wait to join them
    """

    enabled: bool = speed(False)
    min_processes: int = speed(1, least=1)
    snapshot_every: int | Literal["auto"] = speed("auto", least=1)
    join_timeout: float = speed(60.0, above=0)
    join_after: float = speed(15.0, least=0, most=600)


@dataclasses.dataclass(frozen=True)
class Watchdog:
    """A watchdog that ends a run without progress, and names slow processes.

    Args:
        step_timeout: seconds that an update may take (without compilation; for several in one call,
            each) before all processes write their stacks and the run ends; null waits for ever
        straggler_factor: name a process in the metrics if its own work between updates, such as
            waiting for its data, takes this many times as long as that of the others
        slow_factor: name a process whose devices take this many times as long as those of the
            others to compute a microbatch; null never measures it (docs/audit.md)
    """

    step_timeout: float | None = speed(600.0, above=0)
    straggler_factor: float = speed(2.0, least=1)
    slow_factor: float | None = speed(1.2, above=1, example=1.2)


@dataclasses.dataclass(frozen=True)
class Audit:
    """Let all devices compute the same microbatch, and name those that compute wrongly
    (docs/audit.md).

    Args:
        every: updates between two audits; null makes none
        action: on a wrong device, warn; stop the job; or expel its process, and continue without it
            from the last audited state (needs elastic.enabled)
    """

    every: int | None = speed(None, least=1)
    action: Literal["warn", "stop", "expel"] = speed("warn")


@dataclasses.dataclass(frozen=True)
class Verify:
    """Smaller sizes for `jaxdp verify`; no other command reads them.

    Args:
        model_args: arguments that replace those in model.args, such as layers and dim
        data_args: arguments that replace those in data.args, such as length
        strategies: the number of strategies to try, the config's own first; null tries all that are
            needed
    """

    model_args: dict[str, Any] = speed({})
    data_args: dict[str, Any] = speed({})
    strategies: int | None = speed(None, least=1)
