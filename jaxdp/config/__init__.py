"""The config is a tree of typed dataclasses, and the only schema; each field says what it decides.

A field that changes the numbers of a run (loss curve, parameters) is made with `numbers`, one that changes only its
speed, memory or output with `speed`; `config.check` reads these marks. No jax is imported here.
"""

import copy
import dataclasses
import pathlib
from typing import Any, Literal


def _field(decides: str, default: Any) -> Any:
    if isinstance(default, list | dict) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata={"decides": decides})
    return dataclasses.field(default=default, metadata={"decides": decides})


def numbers(default: Any) -> Any:
    """A field that changes what is computed."""
    return _field("numbers", default)


def speed(default: Any) -> Any:
    """A field that changes only how fast, where, or what is written about it."""
    return _field("speed", default)


@dataclasses.dataclass(frozen=True)
class Target:
    """Something pluggable.

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
        target: MLP, CNN, ResNet9, ViT, LSTM, RNN, GPT, or the dotted path of any Flax (NNX or Linen) or Equinox module,
            a function that makes one, or a pair of functions (init, apply)
        args: its arguments, checked against its signature; --model.args.NAME VALUE sets one
    """


@dataclasses.dataclass(frozen=True)
class DataTarget(Target):
    """The training data.

    Args:
        target: Digits (embedded), PythonSource (the standard library's own), CIFAR10, MNIST, FashionMNIST, TextFile,
            TokenFile, PennTreebank, Documents, ImageFolder, HuggingFace, or the dotted path of any sized sequence of
            examples (docs/data.md)
        args: its arguments, e.g. root, the folder of the files; --data.args.NAME VALUE sets one
        order: shuffled anew for each epoch, or sequential: each row of a batch goes on in the same row of the next, for
            models that carry state from batch to batch; null means sequential for such models, else shuffled
        transform: run on the device: Mixup, or the dotted path of a function (example, key) -> example of training
            examples, or (example, key, train) -> example of all
        workers: processes that read the data; 0 reads it in a thread
        on_device: the whole set lives on every device, and batches are gathered there; for small ones
    """

    order: Literal["shuffled", "sequential"] | None = numbers(None)
    transform: Target | None = numbers(None)
    workers: int = speed(0)
    on_device: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class LossTarget(Target):
    """The loss.

    Args:
        target: SoftmaxCrossEntropy, CausalLM (with perplexity), MeanSquaredError, Contrastive, MultiTask, or the dotted
            path of a class or function
        args: its arguments; --loss.args.NAME VALUE sets one
    """

    target: str = numbers("SoftmaxCrossEntropy")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer and its learning-rate schedule.

    Args:
        target: sgd, adam, adamw, lamb, adafactor, lion, muon, or the dotted path of a function that returns
            an Optax transformation
        lr: the peak learning rate
        schedule: its shape after the warm-up
        warmup_steps: updates of linear warm-up from zero
        schedule_steps: the update at which the schedule ends; null means the last one
        final_lr: where the schedule ends, as a fraction of lr
        weight_decay: its strength
        no_decay: parameters whose path matches one of these regular expressions are not decayed
        clip_norm: gradients are scaled down to this global norm; null leaves them
        frozen: parameters whose path matches one of these regular expressions stay as they are
        lr_scale: regular expression to factor; the learning rate of a parameter is multiplied by the factor of the
            first one that its path matches
        ema: decay of a running average of the parameters, such as 0.999; null keeps none (see eval.ema)
        args: more arguments of the target (momentum, b1, b2, eps, ...)
    """

    target: str = numbers("adamw")
    lr: float = numbers(1e-3)
    schedule: Literal["constant", "cosine", "linear", "one_cycle"] = numbers("cosine")
    warmup_steps: int = numbers(0)
    schedule_steps: int | None = numbers(None)
    final_lr: float = numbers(0.0)
    weight_decay: float = numbers(0.0)
    no_decay: list[str] = numbers([r"(^|/)(bias|scale)$"])
    clip_norm: float | None = numbers(None)
    frozen: list[str] = numbers([])
    lr_scale: dict[str, float] = numbers({})
    ema: float | None = numbers(None)
    args: dict[str, Any] = numbers({})


@dataclasses.dataclass(frozen=True)
class Init:
    """What a run takes from init_from. Expressions go by path; BatchNorm's averages are below model_state/.

    Args:
        rename: regular expression to replacement, as re.sub takes them; the first that is found in a path of the source
            changes it
        load: parameters whose path matches one of these regular expressions are loaded, where the source has them
        skip: but none whose path matches one of these
        ema: take the source's running average of the parameters
    """

    rename: dict[str, str] = numbers({})
    load: list[str] = numbers([".*"])
    skip: list[str] = numbers([])
    ema: bool = numbers(False)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How the work is spread over the devices; none of it changes the numbers, but what is marked so.

    Args:
        backend: pmap, or jit over a mesh
        zero: ZeRO stage: 1 splits the optimizer state over the devices, 2 the gradients too, 3 the parameters too;
            pmap has 0 and 1
        reduction: xla sums leaf by leaf, bucket packs leaves into few large operands; auto takes bucket where CPU
            processes talk, else xla; exact gives the same bits on any number of devices (docs/exact.md); exact16 and
            exact8 do so with 2 and 1 bytes an element, rounded at random, which changes the numbers
        exact_group: microbatches that the exact reductions compute at once; this changes the numbers
        bucket_mb: size of a bucket in MB
        shard_size: devices that share one copy of what is split, such as those of a host; null means all
        gradient_buffer: stages 2 and 3 reduce gradients after each microbatch, into shards (sharded), or once, after
            all (replicated: fewer bytes to send under accumulate: scan, more memory)
        remat: what the backward pass computes again, block by block: none, full, all but matrix products (dots), all
            but those with weights (dots_no_batch); auto is none, and dots_no_batch where stage 3 gathers blocks or
            the reduction is exact and there are blocks
        accumulate: compute a device's microbatches all at once (vmap) or one after the other (scan, with the memory of
            one); auto takes vmap. The exact reductions take exact_group of them at once
        devices: use only the first so many devices of a single process; null uses all
        xla_preset: overlap sets XLA's own switches that let collectives overlap with the backward pass on several GPUs;
            default leaves XLA as it is (docs/performance.md)
    """

    backend: Literal["pmap", "pjit"] = speed("pmap")
    zero: int = speed(0)
    reduction: Literal["auto", "xla", "bucket", "exact", "exact16", "exact8"] = speed("auto")
    exact_group: int = numbers(1)
    bucket_mb: float = speed(25.0)
    shard_size: int | None = speed(None)
    gradient_buffer: Literal["sharded", "replicated"] = speed("sharded")
    remat: Literal["auto", "none", "full", "dots", "dots_no_batch"] = speed("auto")
    accumulate: Literal["auto", "vmap", "scan"] = speed("auto")
    devices: int | None = speed(None)
    xla_preset: Literal["default", "overlap"] = speed("default")

    @property
    def exact(self) -> bool:
        """Whether the bits are the same on any number of devices."""
        return self.reduction.startswith("exact")

    @property
    def exact_reduction(self) -> Literal["exact", "exact16", "exact8"]:
        """The reduction that gives the same bits: the configured one, if it does, else the widest."""
        return self.reduction if self.reduction in ("exact16", "exact8") else "exact"


@dataclasses.dataclass(frozen=True)
class Precision:
    """Number formats.

    Args:
        params: parameters and optimizer state
        compute: the forward and backward pass; left out, as params
        reduce: gradients while they are summed over devices; left out, as params
        matmul: jax_default_matmul_precision
        loss_scale: the mean loss is multiplied by it, and an update that overflows is skipped: a number stays, dynamic
            halves then, and grows; left out, dynamic where compute or reduce is float16, else none
        loss_scale_interval: updates without overflow after which a dynamic scale doubles
    """

    params: Literal["float32", "float64", "bfloat16"] = numbers("float32")
    compute: Literal["float32", "float64", "bfloat16", "float16"] | None = numbers(None)
    reduce: Literal["float32", "float64", "bfloat16", "float16"] | None = numbers(None)
    matmul: Literal["default", "high", "highest"] = numbers("default")
    loss_scale: float | Literal["dynamic"] | None = numbers(None)
    loss_scale_interval: int = numbers(2000)


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """Updates whose loss or gradients are not finite: each is skipped, and leaves everything as it was.

    Args:
        max_consecutive: so many of them in a row end the run
    """

    max_consecutive: int = speed(10)


@dataclasses.dataclass(frozen=True)
class Spike:
    """Updates whose loss is finite but too large.

    Args:
        factor: times the running mean of the losses before; more than that is a spike. null looks for none. It means
            little for losses that pass through zero
        decay: of the running mean
        after: good updates before anything is a spike
        action: the update is left out (skip), or the run goes back to a checkpoint and leaves out the batches since
            (rollback)
        max_rollbacks: one more ends the run
    """

    factor: float | None = numbers(None)
    decay: float = numbers(0.98)
    after: int = numbers(100)
    action: Literal["skip", "rollback"] = numbers("skip")
    max_rollbacks: int = numbers(3)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluation: every example exactly once.

    Args:
        every: updates between evaluations; null evaluates only at the end
        data: what to evaluate on; null means the test split of the training data, where it has one
        ema: evaluate the running average of the parameters (optimizer.ema)
    """

    every: int | None = speed(None)
    data: Target | None = speed(None)
    ema: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class Log:
    """What is written while training.

    Args:
        every: updates between two lines
        writers: where the numbers go beside the console and metrics.jsonl: TensorBoard, WandB, or {target, args} with
            the dotted path of one's own (docs/monitoring.md)
    """

    every: int = speed(50)
    writers: list[Any] = speed([])


@dataclasses.dataclass(frozen=True)
class Profile:
    """A trace for TensorBoard or Perfetto, in the run directory; SIGUSR2 asks for one of the next updates.

    Args:
        start: the first update traced; null traces none
        steps: how many
    """

    start: int | None = speed(None)
    steps: int = speed(5)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, in the run directory; there is always one at the end, and one on preemption.

    Args:
        every: updates between two; null saves none in between
        every_minutes: minutes between two, beside `every`
        asynchronous: it is written while training goes on; else training waits until it is there
        keep: how many of the last are kept
        keep_every: those after every so many updates are kept too, such as 10000
        best: the best one by this number of the evaluation, such as accuracy, is kept too; loss, NAME_loss (of a
            task), cross_entropy and perplexity are best when low, others when high
    """

    every: int | None = speed(None)
    every_minutes: float | None = speed(None)
    asynchronous: bool = speed(True)
    keep: int = speed(3)
    keep_every: int | None = speed(None)
    best: str | None = speed(None)


@dataclasses.dataclass(frozen=True)
class Resume:
    """Running again in the same directory goes on where it stands.

    Args:
        force: go on although the config now has other values that change the numbers
    """

    force: bool = speed(False)


@dataclasses.dataclass(frozen=True)
class Watchdog:
    """What ends a run that does not move, and names what slows it down.

    Args:
        step_timeout: seconds that an update may take (compilation apart; of several in one call, each may) before all
            processes write down where they are and the run ends; null waits for ever
        straggler_factor: a process whose own work between updates, such as waiting for its data, takes so many times
            that of the others is named in the metrics
    """

    step_timeout: float | None = speed(600.0)
    straggler_factor: float = speed(2.0)


@dataclasses.dataclass(frozen=True)
class Verify:
    """What `jaxdp verify` makes smaller; nothing else reads it.

    Args:
        model_args: arguments that take the place of those in model.args, such as layers and dim
        data_args: the same for data.args, such as length
        strategies: try only so many of them, the config's own first; null tries all it takes
    """

    model_args: dict[str, Any] = speed({})
    data_args: dict[str, Any] = speed({})
    strategies: int | None = speed(None)


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run.

    Args:
        seed: decides initialization, data order, dropout and augmentation
        run_dir: where everything goes; null means runs/NAME of the config. Running again there resumes
        steps: updates to make (or give epochs)
        epochs: passes over the training data (or give steps)
        batch_size: examples per update, over all devices
        microbatches: how many pieces a batch is dealt into; at least the number of devices
        compilation_cache: where compiled programs are kept for the next start: a folder, auto for one among the user's
            caches, or null for none; JAX_COMPILATION_CACHE_DIR goes before (docs/performance.md)
        steps_per_call: updates in one compiled call, for small models; what is due between two updates (evaluation,
            save) is made between calls, by single updates up to there
        callbacks: objects that the loop calls at known points: EarlyStopping, or {target, args} with the dotted path of
            your own (docs/callbacks.md)
        init_from: start from the parameters of another run's directory, of one of its checkpoints, or of a .safetensors
            file (docs/finetune.md); null initializes them
    """

    seed: int = numbers(0)
    run_dir: str | None = speed(None)
    steps: int | None = numbers(None)
    epochs: float | None = numbers(None)
    batch_size: int = numbers(128)
    microbatches: int = numbers(8)
    compilation_cache: str | None = speed("auto")
    steps_per_call: int = speed(1)
    init_from: str | None = numbers(None)
    init: Init = numbers(Init())
    model: ModelTarget = numbers(ModelTarget())
    data: DataTarget = numbers(DataTarget())
    loss: LossTarget = numbers(LossTarget())
    optimizer: Optimizer = numbers(Optimizer())
    parallel: Parallel = speed(Parallel())
    precision: Precision = numbers(Precision())
    nonfinite: Nonfinite = speed(Nonfinite())
    spike: Spike = numbers(Spike())
    eval: Eval = speed(Eval())
    log: Log = speed(Log())
    profile: Profile = speed(Profile())
    checkpoint: Checkpoint = speed(Checkpoint())
    resume: Resume = speed(Resume())
    watchdog: Watchdog = speed(Watchdog())
    callbacks: list[Any] = speed([])
    verify: Verify = speed(Verify())


def run_dir(config: Config, path: str | None) -> pathlib.Path:
    """The run directory: as given, or runs/NAME after the config file."""
    return pathlib.Path(config.run_dir or f"runs/{pathlib.Path(path).stem if path else 'run'}")
