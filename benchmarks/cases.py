"""What is compared, and what is claimed of it: one row a case."""

import dataclasses
from collections.abc import Sequence

JAXDP, JIT, NNX, SHARD = "jaxdp_loop", "plain.jit_loop", "plain.nnx_loop", "plain.shard_map_loop"
TORCH = "torch_ddp.train"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One contender of a case. args: of the config for jaxdp, of the script for the others. malloc:
    as jaxdp has it.
    """

    name: str
    script: str
    args: tuple[str, ...] = ()
    malloc: bool = False


@dataclasses.dataclass(frozen=True)
class Claim:
    """kind: 'speed', a at least `bound` times as fast as b; 'overhead', a at most `bound` of a
    share slower than b; 'microseconds', at most so many more an update; 'within', a share by which
    they may differ. `bound` is the goal; None: reported only. `stated`: what docs/performance.md
    says, at least so many times as fast (kind 'speed').
    """

    kind: str
    a: str
    b: str
    bound: float | None = None
    stated: float | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A config, overrides of it, who trains it, how long, and what is claimed. per_update: (number,
    unit).

    check: updates of which the losses must be equal to `tolerance`. Rounding grows: Adam's first
    steps have the size of the rate where a gradient is next to nothing, so ResNet-9's curves are
    compared over fewer."""

    name: str
    config: str
    contenders: tuple[Entry, ...]
    claims: tuple[Claim, ...]
    updates: int
    args: tuple[str, ...] = ()
    processes: int = 1
    check: int = 15
    tolerance: float = 1e-4
    per_update: tuple[int, str] = (1, "updates")
    title: str = ""


OURS = Entry("jaxdp", JAXDP)
PLAIN = Entry("plain jit", JIT)
TUNED = Entry("plain jit, malloc", JIT, malloc=True)
FLAX = Entry("flax nnx", NNX)
PACKED = Entry("plain shard_map, packed", SHARD, ("--reduce", "packed"))
PACKED_TUNED = Entry("plain shard_map, packed, malloc", SHARD, ("--reduce", "packed"), malloc=True)
LEAVES = Entry("plain shard_map, leaves", SHARD, ("--reduce", "leaves"))
EAGER = Entry("torch", TORCH)
LAST = Entry("torch channels_last", TORCH, ("--layout", "channels_last"))
COMPILED = Entry("torch compiled", TORCH, ("--compile",))
DDP = Entry("torch DDP", TORCH)
DDP_LAST = Entry("torch DDP channels_last", TORCH, ("--layout", "channels_last"))
# Without those of BatchNorm, which jaxdp averages over the processes, and DDP by default sends from
# rank 0.
DDP_BARE = Entry("torch DDP, no buffers", TORCH, ("--no-broadcast_buffers",))
DDP_LAST_BARE = Entry(
    "torch DDP channels_last, no buffers", TORCH, (*DDP_LAST.args, "--no-broadcast_buffers")
)

SIXTEEN = Entry("jaxdp, 16 a call", JAXDP, ("--steps_per_call", "16"))
PJIT = Entry("jaxdp pjit", JAXDP, ("--parallel.backend", "pjit"))

IMAGES = ("--data.target", "benchmarks.data.Images")

CPU: tuple[Case, ...] = (
    Case(
        "overhead_mlp",
        "benchmarks/configs/digits_mlp.yaml",
        (OURS, PJIT, SIXTEEN, PLAIN, TUNED, FLAX),
        (
            Claim("speed", "jaxdp", "plain jit", stated=0.65),
            Claim("speed", "jaxdp, 16 a call", "plain jit", stated=0.85),
            Claim("microseconds", "jaxdp", "plain jit", 100.0),
            Claim("microseconds", "jaxdp", "plain jit, malloc", 100.0),
            Claim("microseconds", "jaxdp, 16 a call", "plain jit", 20.0),
            Claim("microseconds", "jaxdp pjit", "plain jit", 100.0),
            Claim("speed", "jaxdp", "flax nnx", stated=1.5),
        ),
        title="an MLP of 0.3 to 0.6 ms an update",
        updates=1600,
    ),
    Case(
        "overhead_wide",
        "benchmarks/configs/wide_mlp.yaml",
        (OURS, PLAIN, TUNED),
        (
            Claim("speed", "jaxdp", "plain jit", stated=0.95),
            Claim("overhead", "jaxdp", "plain jit", 0.02),
            Claim("overhead", "jaxdp", "plain jit, malloc", 0.02),
        ),
        title="an MLP of 8.5M parameters",
        updates=30,
    ),
    Case(
        "gpt_1",
        "configs/gpt_3m.yaml",
        (OURS, PJIT, PLAIN, TUNED, FLAX, EAGER, COMPILED),
        (
            Claim("speed", "jaxdp", "plain jit", stated=1.1),
            Claim("overhead", "jaxdp", "plain jit", 0.02),
            Claim("overhead", "jaxdp", "plain jit, malloc", 0.02),
            Claim("within", "jaxdp", "jaxdp pjit"),
            Claim("speed", "jaxdp", "torch", 1.0, stated=0.8),
            Claim("speed", "jaxdp", "torch compiled"),
            Claim("speed", "jaxdp", "flax nnx", stated=1.1),
        ),
        title="a GPT of 3.2M parameters",
        updates=4,
        check=8,
        per_update=(2048, "tokens"),
    ),
    Case(
        "gpt_2",
        "configs/gpt_3m.yaml",
        (OURS, LEAVES, PACKED, PACKED_TUNED, DDP),
        (
            Claim("speed", "jaxdp", "torch DDP", 1.05, stated=0.9),
            Claim("speed", "jaxdp", "plain shard_map, packed", stated=1.1),
            Claim("speed", "jaxdp", "plain shard_map, packed, malloc"),
            Claim("speed", "jaxdp", "plain shard_map, leaves"),
        ),
        title="the same GPT, two processes",
        updates=4,
        check=8,
        processes=2,
        per_update=(2048, "tokens"),
    ),
    Case(
        "resnet9_1",
        "configs/cifar10_resnet9.yaml",
        (OURS, PJIT, PLAIN, TUNED, FLAX, EAGER, LAST),
        (
            Claim("speed", "jaxdp", "plain jit", stated=0.85),
            Claim("microseconds", "jaxdp", "plain jit", 100.0),
            Claim("microseconds", "jaxdp", "plain jit, malloc", 100.0),
            Claim("within", "jaxdp", "jaxdp pjit"),
            Claim("speed", "jaxdp", "torch", 0.9),
            Claim("speed", "jaxdp", "torch channels_last", 0.9, stated=1.0),
            Claim("speed", "jaxdp", "flax nnx", stated=1.1),
        ),
        title="Needle's ResNet-9, batch 128",
        updates=120,
        check=10,
        args=IMAGES,
        per_update=(128, "images"),
    ),
    Case(
        "resnet9_2",
        "configs/cifar10_resnet9.yaml",
        (OURS, LEAVES, PACKED, PACKED_TUNED, DDP, DDP_LAST, DDP_BARE, DDP_LAST_BARE),
        (
            Claim("speed", "jaxdp", "torch DDP", 0.9, stated=1.0),
            Claim("speed", "jaxdp", "torch DDP channels_last", 0.9),
            Claim("speed", "jaxdp", "torch DDP, no buffers", 0.9),
            Claim("speed", "jaxdp", "torch DDP channels_last, no buffers", 0.9),
            Claim("speed", "jaxdp", "plain shard_map, packed", stated=0.75),
            Claim("speed", "jaxdp", "plain shard_map, packed, malloc"),
            Claim("speed", "jaxdp", "plain shard_map, leaves"),
        ),
        title="the same ResNet-9, two processes",
        updates=60,
        check=8,
        args=IMAGES,
        processes=2,
        per_update=(128, "images"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number in what a script prints (`name`, with dots into its dicts), 'at least' or 'at most' a
    bound, the goal. text: what the number is. stated: the bound that docs/performance.md states.
    """

    name: str
    word: str
    bound: float
    text: str = ""
    stated: float | None = None


@dataclasses.dataclass(frozen=True)
class Script:
    """A measurement with a program of its own, which prints JSON. root: it takes the folder of
    CIFAR-10.
    """

    name: str
    command: Sequence[str]
    claims: tuple[Figure, ...]
    processes: int = 1
    root: bool = False


SCRIPTS: tuple[Script, ...] = (
    Script(
        "backends",
        ("-m", "benchmarks.backends"),
        (Figure("difference", "at most", 0.03, "pmap and pjit differ by a share of"),),
    ),
    Script(
        "small_tensors",
        ("benchmarks/small_tensors.py",),
        (
            Figure(
                "ratio",
                "at least",
                20.0,
                "400 tensors of 1,000 floats: a bucket, a psum of the tree",
                9.0,
            ),
        ),
        processes=2,
    ),
    Script(
        "feeding",
        ("-m", "benchmarks.feeding"),
        (
            Figure(
                "times", "at least", 5.0, "batches are made as many times as fast as needed", 5.0
            ),
            Figure(
                "waiting_share",
                "at most",
                0.01,
                "share of the time that the loop waits for them",
                0.01,
            ),
        ),
        root=True,
    ),
    Script(
        "start",
        ("-m", "benchmarks.start"),
        (
            Figure(
                "share", "at most", 0.50, "second start by the first, the largest of three configs"
            ),
        ),
    ),
)

GPT = ("--config", "configs/gpt_3m.yaml")

# Too long for `make bench`; `python -m benchmarks.run --only NAME --record` measures one of them.
LONG: tuple[Script, ...] = (
    Script(
        "exact_gpt",
        (
            "-m",
            "benchmarks.exact",
            *GPT,
            "--processes",
            "2",
            "--ways",
            "bucket,exact,exact16,exact8",
        ),
        tuple(
            Figure(f"over_bucket.{way}", "at least", 0.9, f"GPT, two processes: {way}, bucket")
            for way in ("exact", "exact16", "exact8")
        ),
    ),
    Script(
        "audit_cost",
        ("-m", "benchmarks.audit", "cost", "--every", "5", "--updates", "300"),
        (
            Figure(
                "share_at_100",
                "at most",
                0.01,
                "share of the time that an audit each 100 updates takes",
            ),
        ),
    ),
    Script(
        "elastic_cost",
        ("-m", "benchmarks.elastic_cost"),
        (Figure("ratio", "at most", 1.02, "GPT, two processes: with elastic training, without"),),
    ),
    Script(
        "elastic_recovery",
        ("-m", "benchmarks.elastic_recovery", "--config", "configs/digits.yaml"),
        (Figure("median.update", "at most", 2.0, "seconds from a kill to the next new update"),),
    ),
    Script(
        "elastic_soak",
        (
            "-m",
            "benchmarks.elastic_soak",
            "--ways",
            "elastic",
            "--processes",
            "4",
            "--minutes",
            "10",
        ),
        (Figure("goodput", "at least", 0.8, "a kill each 10 s for 10 minutes: goodput"),),
    ),
    Script(
        "token_file",
        ("benchmarks/token_file.py",),
        (
            Figure(
                "read.ratio_to_copy.cold",
                "at least",
                0.05,
                "new windows of 20 GB of tokens, a copy",
            ),
        ),
    ),
    Script(
        "workers",
        ("benchmarks/workers.py",),
        (Figure("ratio", "at least", 1.0, "JPEGs by two worker processes, by a thread"),),
    ),
)

CASES: tuple[Case | Script, ...] = (*CPU, *SCRIPTS)  # of `make bench`

# Every loop and a job of two processes, in seconds: they run, and train the same thing.
SMALLEST: tuple[Case | Script, ...] = (
    Case(
        "smallest",
        "benchmarks/configs/digits_mlp.yaml",
        (OURS, PLAIN, FLAX, LEAVES, EAGER),
        (Claim("speed", "jaxdp", "plain jit"), Claim("overhead", "jaxdp", "torch", 10.0)),
        updates=2,
        check=3,
        args=(
            *("--model.args.hidden", "[8]", "--data.args.examples", "128"),
            *(
                "--optimizer.schedule",
                "cosine",
                "--optimizer.warmup_steps",
                "2",
            ),  # every contender follows it
        ),
    ),
    Script(
        "smallest_processes",
        ("-m", "benchmarks.collectives", "--repeats", "1", "--bytes", "64"),
        (Figure("ratio", "at least", 0.0),),
        processes=2,
    ),
)
