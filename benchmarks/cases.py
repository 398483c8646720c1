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
    they may differ. None: reported only."""

    kind: str
    a: str
    b: str
    bound: float | None = None


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
            Claim("microseconds", "jaxdp", "plain jit", 100.0),
            Claim("microseconds", "jaxdp", "plain jit, malloc", 100.0),
            Claim("microseconds", "jaxdp, 16 a call", "plain jit", 20.0),
            Claim("microseconds", "jaxdp pjit", "plain jit", 100.0),
            Claim("speed", "jaxdp", "flax nnx"),
        ),
        updates=1600,
    ),
    Case(
        "overhead_wide",
        "benchmarks/configs/wide_mlp.yaml",
        (OURS, PLAIN, TUNED),
        (
            Claim("overhead", "jaxdp", "plain jit", 0.02),
            Claim("overhead", "jaxdp", "plain jit, malloc", 0.02),
        ),
        updates=30,
    ),
    Case(
        "gpt_1",
        "configs/gpt_3m.yaml",
        (OURS, PJIT, PLAIN, TUNED, FLAX, EAGER, COMPILED),
        (
            Claim("overhead", "jaxdp", "plain jit", 0.02),
            Claim("overhead", "jaxdp", "plain jit, malloc", 0.02),
            Claim("within", "jaxdp", "jaxdp pjit"),
            Claim("speed", "jaxdp", "torch", 1.0),
            Claim("speed", "jaxdp", "torch compiled"),
            Claim("speed", "jaxdp", "flax nnx"),
        ),
        updates=4,
        check=8,
        per_update=(2048, "tokens"),
    ),
    Case(
        "gpt_2",
        "configs/gpt_3m.yaml",
        (OURS, LEAVES, PACKED, PACKED_TUNED, DDP),
        (
            Claim("speed", "jaxdp", "torch DDP", 1.05),
            Claim("speed", "jaxdp", "plain shard_map, packed"),
            Claim("speed", "jaxdp", "plain shard_map, packed, malloc"),
            Claim("speed", "jaxdp", "plain shard_map, leaves"),
        ),
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
            Claim("microseconds", "jaxdp", "plain jit", 100.0),
            Claim("microseconds", "jaxdp", "plain jit, malloc", 100.0),
            Claim("within", "jaxdp", "jaxdp pjit"),
            Claim("speed", "jaxdp", "torch", 0.9),
            Claim("speed", "jaxdp", "torch channels_last", 0.9),
            Claim("speed", "jaxdp", "flax nnx"),
        ),
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
            Claim("speed", "jaxdp", "torch DDP", 0.9),
            Claim("speed", "jaxdp", "torch DDP channels_last", 0.9),
            Claim("speed", "jaxdp", "torch DDP, no buffers", 0.9),
            Claim("speed", "jaxdp", "torch DDP channels_last, no buffers", 0.9),
            Claim("speed", "jaxdp", "plain shard_map, packed"),
            Claim("speed", "jaxdp", "plain shard_map, packed, malloc"),
            Claim("speed", "jaxdp", "plain shard_map, leaves"),
        ),
        updates=60,
        check=8,
        args=IMAGES,
        processes=2,
        per_update=(128, "images"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Script:
    """A measurement with a program of its own, which prints JSON; claims: (number in it, 'at least'
    or 'at most', bound). root: it takes the folder of CIFAR-10."""

    name: str
    command: Sequence[str]
    claims: tuple[tuple[str, str, float], ...]
    processes: int = 1
    root: bool = False


SCRIPTS: tuple[Script, ...] = (
    Script("backends", ("-m", "benchmarks.backends"), (("difference", "at most", 0.03),)),
    Script(
        "small_tensors",
        ("benchmarks/small_tensors.py",),
        (("ratio", "at least", 20.0),),
        processes=2,
    ),
    Script(
        "feeding",
        ("-m", "benchmarks.feeding"),
        (("times", "at least", 5.0), ("waiting_share", "at most", 0.01)),
        root=True,
    ),
    Script("start", ("-m", "benchmarks.start"), (("share", "at most", 0.50),)),
)

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
        (("ratio", "at least", 0.0),),
        processes=2,
    ),
)
