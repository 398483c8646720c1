"""The config: a tree of typed dataclasses, which is the only schema.

A field that changes the numbers of a run (loss curve, parameters) is created with `numbers`, one
that changes only speed, memory or output with `speed`; `config.check` reads these marks. This
module does not import JAX."""

import dataclasses
from typing import Any

from jaxdp.config.training import (
    Audit,
    Checkpoint,
    DataTarget,
    Elastic,
    Eval,
    Init,
    Log,
    LossTarget,
    ModelTarget,
    Nonfinite,
    Optimizer,
    Outer,
    Parallel,
    Precision,
    Profile,
    Resume,
    Spike,
    Verify,
    Watchdog,
    numbers,
    speed,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run.

    Args:
        seed: seed of initialization, data order, dropout and augmentation
        run_dir: the directory for all output; null means runs/NAME of the config. Another start
            there resumes the run
        steps: the number of updates (or give epochs)
        epochs: passes over the training data (or give steps)
        batch_size: examples per update, over all devices; or a schedule of them, such as
            {0: 64, 1000: 128}: 64 in each of the first 1000 updates, and 128 in those after update
            1000 (docs/numbers.md#batch-sizes-that-change)
        microbatches: the number of microbatches that a batch is split into; at least the number of
            devices
        compilation_cache: the folder that stores compiled programs for the next start, auto for one
            in the user's cache directory, or null for none; JAX_COMPILATION_CACHE_DIR takes
            precedence (docs/performance.md)
        steps_per_call: updates in one compiled call, for small models; evaluations and saves that
            are due inside a call are reached by single updates, and a stream of unknown length is
            read by them
        callbacks: objects that the loop calls at defined points: EarlyStopping, or {target, args}
            with the dotted path of your own (docs/callbacks.md)
        init_from: start from the parameters of another run's directory, of one of its checkpoints,
            or of a .safetensors file or a folder of them (docs/finetune.md); null initializes them
    """

    seed: int = numbers(0, least=0, most=2**32 - 1)
    run_dir: str | None = speed(None)
    steps: int | None = numbers(None, least=1, most=2**31 - 1)
    epochs: float | None = numbers(None, most=2**31 - 1, above=0)
    batch_size: int | dict[int, int] = numbers(128, least=1, most=2**31 - 1)
    microbatches: int = numbers(8, least=1, most=2**20)
    compilation_cache: str | None = speed("auto")
    steps_per_call: int = speed(1, least=1, most=2**16)
    init_from: str | None = numbers(None)
    init: Init = numbers(Init())
    model: ModelTarget = numbers(ModelTarget())
    data: DataTarget = numbers(DataTarget())
    loss: LossTarget = numbers(LossTarget())
    optimizer: Optimizer = numbers(Optimizer())
    parallel: Parallel = speed(Parallel())
    outer: Outer = numbers(Outer())
    precision: Precision = numbers(Precision())
    nonfinite: Nonfinite = speed(Nonfinite())
    spike: Spike = numbers(Spike())
    eval: Eval = speed(Eval())
    log: Log = speed(Log())
    profile: Profile = speed(Profile())
    checkpoint: Checkpoint = speed(Checkpoint())
    resume: Resume = speed(Resume())
    watchdog: Watchdog = speed(Watchdog())
    elastic: Elastic = speed(Elastic())
    audit: Audit = speed(Audit())
    callbacks: list[Any] = speed([])
    verify: Verify = speed(Verify())

    @property
    def largest_batch(self) -> int:
        """Return the batch size, the largest of several."""
        sizes = self.batch_size
        return max(sizes.values()) if isinstance(sizes, dict) else sizes

    @property
    def extras(self) -> dict[str, str]:
        """Return {folder of `jaxdp.extras`: the key and the value that ask for it}, in the order in
        which they see a run."""
        texts = {
            "staged": f"batch_size: {self.batch_size}" * isinstance(self.batch_size, dict),
            "mirror": f"checkpoint.mirror: {self.checkpoint.mirror}" * bool(self.checkpoint.mirror),
            "exact": f"parallel.reduction: {self.parallel.reduction}" * self.parallel.in_groups,
            "outer": f"outer.replicas: {self.outer.replicas}" * (self.outer.replicas > 1),
            "audit": f"audit.every: {self.audit.every}" * (self.audit != Audit()),
            "elastic": "elastic.enabled: true" * self.elastic.enabled,
        }
        return {name: text for name, text in texts.items() if text}
