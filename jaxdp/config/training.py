"""Sections of the config: what is trained, and how; how a run is evaluated, logged, saved and kept alive."""

import copy
import dataclasses
from typing import Any, Literal

from jaxdp.config.values import Epochs


def _field(decides: str, default: Any, limits: dict[str, float]) -> Any:
    metadata = {"decides": decides, "limits": limits}
    if isinstance(default, list | dict) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def numbers(default: Any, **limits: float) -> Any:
    """Create a field that changes the numbers of a run.

    limits: of a number; `least` and `most` are allowed, `above` and `below` are not. example: a
    value, for the message."""
    return _field("numbers", default, limits)


def speed(default: Any, **limits: float) -> Any:
    """Create a field that changes only speed, memory or output. limits: see `numbers`."""
    return _field("speed", default, limits)


@dataclasses.dataclass(frozen=True)
class Target:
    """A pluggable component.

    Args:
        target: a built-in name, or the dotted path of any importable class or function
        args: its arguments, checked against its signature; --X.args.NAME VALUE sets one
    """

    target: str = numbers("")
    args: dict[str, Any] = numbers({})


@dataclasses.dataclass(frozen=True)
class ModelTarget(Target):
    """The model.

    Args:
        target: MLP, CNN, ResNet9, ViT, LSTM, RNN, GPT, HuggingFace (that of the folder in
            init_from), or the dotted path of any Flax (NNX or Linen) or Equinox module, a function
            that returns one, or a pair of functions (init, apply)
        args: its arguments, checked against its signature; --model.args.NAME VALUE sets one
    """


@dataclasses.dataclass(frozen=True)
class DataTarget(Target):
    """The training data.

    Args:
        target: Digits (embedded), PythonSource (that of the standard library), CIFAR10, MNIST,
            FashionMNIST, Npz, TextFile, TokenFile, PackedTokens, PennTreebank, Documents,
            ImageFolder, ImageTable, ImageZip, MedMNIST, HuggingFace, Table, Mixture (of
            several sets), Balanced, Stream (an iterable), or the dotted
            path of any sized sequence of examples (docs/data.md)
        args: its arguments, e.g. root, the folder of the files; --data.args.NAME VALUE sets one
        order: shuffled, differently in each epoch, or sequential: each row of a batch continues in
            the same row of the next, for models that carry state between batches; null means
            sequential for such models, else shuffled
        transform: runs on the device: Mixup, or the dotted path of a function (example, key) ->
            example for training examples, or (example, key, train) -> example for all
        workers: the number of processes that read the data; 0 reads it in this one
        on_device: store the full data set on every device, and gather batches there; for small data
            sets
    """

    order: Literal["shuffled", "sequential"] | None = numbers(None)
    transform: Target | None = numbers(None)
    workers: int = speed(0, least=0)
    on_device: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class LossTarget(Target):
    """The loss.

    Args:
        target: SoftmaxCrossEntropy, CausalLM (with perplexity), MeanSquaredError, Contrastive,
            MultiTask, or the dotted path of a class or function
        args: its arguments; --loss.args.NAME VALUE sets one
    """

    target: str = numbers("SoftmaxCrossEntropy")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer and its learning-rate schedule.

    Args:
        target: sgd, adam, adamw, lamb, adafactor, lion, muon, or the dotted path of a function that
            returns an Optax transformation
        lr: the peak learning rate
        schedule: the learning rate after the warm-up; constant, cosine, linear, one_cycle, or
            {target, args} with the dotted path of a function that returns an Optax schedule
            (docs/own_model.md)
        warmup_steps: updates of linear warm-up from zero
        schedule_steps: the update at which the schedule ends; null means the last one
        final_lr: the learning rate at the end of the schedule, as a fraction of lr
        weight_decay: the coefficient of weight decay
        no_decay: parameters whose path matches one of these regular expressions are not decayed;
            auto: by their role in the model, kernels and tables are, biases, scales, shifts and
            other vectors are not (docs/models.md)
        clip_norm: gradients are scaled down to this global norm; null disables clipping
        frozen: parameters whose path matches one of these regular expressions are not updated
        lr_scale: regular expression to factor; the learning rate of a parameter is multiplied by
            the factor of the first one that its path matches
        ema: decay of a running average of the parameters and of the floats of the model state
            (BatchNorm), such as 0.999; null for no average (see eval.ema)
        args: more arguments of the target (momentum, b1, b2, eps, ...)
    """

    target: str = numbers("adamw")
    lr: float = numbers(1e-3, least=0)
    schedule: dict[str, Any] | str = numbers("cosine")
    warmup_steps: int = numbers(0, least=0, most=2**31 - 1)
    schedule_steps: int | None = numbers(None, least=1, most=2**31 - 1)
    final_lr: float = numbers(0.0, least=0)
    weight_decay: float = numbers(0.0, least=0)
    no_decay: list[str] | Literal["auto"] = numbers("auto")
    clip_norm: float | None = numbers(None, above=0)
    frozen: list[str] = numbers([])
    lr_scale: dict[str, float] = numbers({})
    ema: float | None = numbers(None, above=0, below=1, example=0.999)
    args: dict[str, Any] = numbers({})


@dataclasses.dataclass(frozen=True)
class Init:
    """The parameters to load from init_from, selected by path. BatchNorm's averages are below
    model_state/.

    Args:
        rename: regular expression to replacement, as in re.sub; the first expression found in a
            path of the source renames it
        load: load parameters whose path matches one of these regular expressions; the source must
            have them
        skip: do not load parameters whose path matches one of these, here or in the source
        ema: load the source's running average of the parameters
        changed: arguments of the model, such as rotary_base, that may differ from the source's
            although they change what the loaded parameters compute
    """

    rename: dict[str, str] = numbers({})
    load: list[str] = numbers([".*"])
    skip: list[str] = numbers([])
    ema: bool = numbers(False)
    changed: list[str] = numbers([])


EXACT = {name: f"jaxdp.exact.integer_sums.{name}" for name in ("exact", "exact16", "exact8")}
"""The reductions of `jaxdp.exact`, by the names that `parallel.reduction` has for them."""


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Distribution of the work over the devices; only the marked keys change the numbers.

    Args:
        backend: pmap, or jit over a mesh
        zero: ZeRO stage: 1 splits the optimizer state over the devices, 2 the gradients too, 3 the
            parameters too; pmap has 0 and 1
        reduction: xla sums leaf by leaf, bucket packs leaves into few large operands; auto selects
            bucket between processes on CPU, else xla; exact gives the same bits on any number of
            devices (docs/exact.md); exact16 and exact8 do so with 2 and 1 bytes an element and
            stochastic rounding, which changes the numbers; or the dotted path of your own
            (docs/exact.md#your-own-reduction)
        exact_group: number of microbatches that the exact reductions compute at once; this changes
            the numbers
        bucket_mb: size of a bucket in MB
        shard_size: number of devices over which the state is sharded, such as those of a host; null
            means all
        rules: 'shard' or null for each dim of the parameters whose path an expression matches, such
            as {'^embed/': [null, shard]}: shard them along that dim; all null: replicate them. By
            default jaxdp selects it
        gradient_buffer: stages 2 and 3 reduce gradients after each microbatch, into shards
            (sharded), or once, after all (replicated: fewer bytes to send under accumulate: scan,
            more memory)
        remat: what the backward pass recomputes in each block: none, full, all but matrix products
            (dots), all but those with weights (dots_no_batch); auto is none, or dots_no_batch if
            stage 3 gathers blocks or the reduction is exact and there are blocks
        accumulate: compute a device's microbatches all at once (vmap) or one after the other (scan,
            with the memory of one); auto is vmap. The exact reductions compute exact_group of them
            at once, and computations in 16 bits always one after the other
        devices: use only this many devices of a single process; null uses all
    """

    backend: Literal["pmap", "pjit"] = speed("pmap")
    zero: int = speed(0, least=0, most=3)
    reduction: str = speed("auto")
    exact_group: int = numbers(1)
    bucket_mb: float = speed(25.0, above=0)
    shard_size: int | None = speed(None, least=2)
    rules: dict[str, list[Any]] = speed({})
    gradient_buffer: Literal["sharded", "replicated"] = speed("sharded")
    remat: Literal["auto", "none", "full", "dots", "dots_no_batch"] = speed("auto")
    accumulate: Literal["auto", "vmap", "scan"] = speed("auto")
    devices: int | None = speed(None, least=1)

    @property
    def in_groups(self) -> bool:
        """Return whether a device computes its microbatches in groups, one after the other, rounded
        alike on any number of devices."""
        return self.reduction in EXACT


@dataclasses.dataclass(frozen=True)
class OuterOptimizer(Target):
    """The optimizer of the outer step; its gradient is the mean parameter change of the replicas,
    negated.

    Args:
        target: a name as in optimizer.target
        lr: learning rate
        args: more arguments of the target
    """

    target: str = numbers("sgd")
    lr: float = numbers(0.7, least=0)
    args: dict[str, Any] = numbers({"momentum": 0.5, "nesterov": True})


@dataclasses.dataclass(frozen=True)
class Outer:
    """Local updates for slow networks: replicas train alone, and average their parameter changes
    (docs/outer.md).

    Args:
        replicas: the number of logical replicas, which divides microbatches; 1 means ordinary
            training
        every: updates between two outer steps
        optimizer: the optimizer of the outer step
        reduction: how the differences between replicas are sent; by default as in
            parallel.reduction
    """

    replicas: int = numbers(1, least=1)
    every: int = numbers(1, least=1)
    optimizer: OuterOptimizer = numbers(OuterOptimizer())
    reduction: Literal["exact", "exact16", "exact8"] | None = numbers(None)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Number formats.

    Args:
        params: dtype of parameters
        compute: dtype of the forward and backward pass; by default that of params
        reduce: dtype of the gradient reduction over devices; by default that of params, at least
            float32; a narrower one rounds by the number of devices
        state: dtype of the optimizer's state; by default that of params, at least float32: an
            update too small for bfloat16 parameters is added to the lower halves of a float32 copy,
            which the state has (docs/numbers.md#precision)
        matmul: jax_default_matmul_precision
        loss_scale: factor of the mean loss; an update that overflows is skipped. A number stays
            constant; dynamic is halved after an overflow, and grows; by default dynamic if compute
            or reduce is float16, else none
        loss_scale_interval: updates without overflow after which a dynamic scale doubles
    """

    params: Literal["float32", "float64", "bfloat16"] = numbers("float32")
    compute: Literal["float32", "float64", "bfloat16", "float16"] | None = numbers(None)
    reduce: Literal["float32", "float64", "bfloat16", "float16"] | None = numbers(None)
    state: Literal["float32", "float64", "bfloat16"] | None = numbers(None)
    matmul: Literal["default", "high", "highest"] = numbers("default")
    loss_scale: float | Literal["dynamic"] | None = numbers(None, most=2**126, above=0)
    loss_scale_interval: int = numbers(2000, least=1, most=2**31 - 1)

    @property
    def widest(self) -> Literal["float32", "float64"]:
        """The dtype of sums: that of the parameters, at least float32."""
        return "float64" if self.params == "float64" else "float32"


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """Updates whose loss or gradients are not finite: they are skipped, and change nothing.

    Args:
        max_consecutive: number of consecutive ones that ends the run
    """

    max_consecutive: int = speed(10, least=1, most=2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Spike:
    """Updates whose loss is finite but too large.

    Args:
        factor: a loss above this factor times the running mean of earlier losses is a spike; null
            disables the check. Not suitable for losses that pass through zero
        decay: decay of the running mean
        after: good updates before the first loss that can be a spike
        action: skip skips the update; rollback returns to an earlier state and skips the batches
            since then
        every: updates between two states that a rollback can return to, each saved as a checkpoint;
            before the first one it returns to the start
        max_rollbacks: the number of rollbacks allowed; one more ends the run
    """

    factor: float | None = numbers(None, above=1, example=3)
    decay: float = numbers(0.98, above=0, below=1, example=0.98)
    after: int = numbers(100, least=1, most=2**31 - 1)
    action: Literal["skip", "rollback"] = numbers("skip")
    every: int = numbers(100, least=1)
    max_rollbacks: int = numbers(3, least=0)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluation: every example exactly once.

    Args:
        every: updates between evaluations, or epochs, such as 1 epoch; null evaluates only at the
            end
        data: the data to evaluate on; null means the test split of the training data, if it has one
        also: further sets by name, {NAME: {target, args}}; their metrics are NAME/loss, ...
        ema: evaluate the running average of the parameters (optimizer.ema)
    """

    every: int | Epochs | None = speed(None, least=1)
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
        every: updates between two checkpoints, or epochs, such as 1 epoch; null saves only the last
            one
        every_minutes: minutes between two checkpoints, in addition to `every`
        asynchronous: write while training continues; else training waits until the checkpoint is
            complete
        keep: the number of latest checkpoints to keep
        keep_every: keep those at multiples of this number of updates too, such as 10000
        best: keep the best one by this metric of the evaluation too, such as accuracy
        mode: whether that metric is best at its min or its max; null means min if a word of its
            name is loss, perplexity, error, entropy, mse, rmse, mae, mape, nll, brier or distance,
            and max if one is acc, accuracy, precision, recall, f1, auc, iou, miou, dice, bleu,
            rouge or r2; others need it, and names with words of both kinds
        local: hosts share no file system: each keeps all of the state in its own run directory
            (docs/hosts.md)
        mirror: where finished checkpoints are copied to, such as s3://bucket/runs, and from where a
            run in an empty directory continues (docs/reliability.md#another-disk)
    """

    every: int | Epochs | None = speed(None, least=1)
    every_minutes: float | None = speed(None, above=0)
    asynchronous: bool = speed(True)
    keep: int = speed(3, least=1)
    keep_every: int | None = speed(None, least=1)
    best: str | None = speed(None)
    mode: Literal["min", "max"] | None = speed(None)
    local: bool = speed(False)
    mirror: str | None = speed(None)


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
    (docs/reliability.md#elastic-training).

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
    """

    step_timeout: float | None = speed(600.0, above=0)
    straggler_factor: float = speed(2.0, least=1)


@dataclasses.dataclass(frozen=True)
class Audit:
    """Let all devices compute the same microbatch, and name those that compute wrongly
    (docs/reliability.md#audit).

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
