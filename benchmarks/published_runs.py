"""Published training runs, with the addresses of what was read: sizes, hardware, layouts and rates,
as data.
"""

import math
from typing import NamedTuple, TypedDict

BF16, F32 = 2, 4  # bytes
SOURCES = {  # all read in November 2026
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "llm-foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "MaxText": "https://github.com/AI-Hypercomputer/maxtext, MaxText/configs/a3/llama_2_7b/README.md and *vm.sh",
    "MaxText v5e": "https://github.com/AI-Hypercomputer/maxtext, MaxText/configs/v5e/README.md and 16b.sh",
    "fms-fsdp": "https://github.com/foundation-model-stack/fms-fsdp, README.md and fms_fsdp/utils/config_utils.py",
    "Horovod": "https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst; images/s of one P100: "
    "https://www.tensorflow.org/performance/benchmarks; parameters: https://keras.io/api/applications",
    "Llama 3": "https://glennklockwood.com/garden/llama-3.1: a slide of the team; also arXiv 2407.21783, table 4",
    "PaLM": "arXiv 2204.02311, tables 1, 3, 22, in a digest; tokens/s: https://leonericsson.github.io/blog/2023-08-22-palm",
    "OLMo 2": "https://allenai.org/blog/olmo2-32B; batch and layout: github.com/allenai/OLMo-core, "
    "src/scripts/official/OLMo2/OLMo-2-0325-32B-train.py",
}


class Run(NamedTuple):
    """A published run. unit: of `published`: tokens/s or TFLOP/s of one device, or the scaling
    efficiency.

    hardware: a row of HARDWARE; inter: its bytes/s between hosts per device, where the run's
    network differs. params: all; outside: those of an embedding, which is in no product. sequences:
    of a microbatch on one device. recompute: FLOPs with rematerialization over those without.
    shard: devices that share the state; 1: replicated. model: devices that split a replica (tensor,
    pipeline), which the plan takes as free of traffic. reduce: bytes of a gradient on the wire.
    alone: seconds of an update on one device, published, instead of FLOPs. compiled: a compiler fuses
    the kernels between products (XLA, torch.compile). bucket: bytes of gradients that a collective
    waits for, where it reduces more than a block's. last: parameters of the last block, where it has
    more than the others. memory_bandwidth: bytes/s, where the devices are
    not those of `hardware`. tensor: devices that split each product of a block and exchange its
    inputs and outputs, `exchanges` arrays of [token, width] in a forward pass, over links of
    `tensor_bandwidth` bytes/s. bubble: time that a pipeline waits over that in which it computes."""

    source: str
    name: str
    hardware: str
    devices: int
    params: float
    published: float
    unit: str = "tokens/s"
    layers: int = 0
    width: int = 0
    length: int = 2048
    sequences: float = 1
    microbatches: int = 1
    recompute: float = 1.0
    shard: int = 1
    model: int = 1
    reduce: int = F32
    outside: float = 0.0
    inter: float | None = None
    alone: float | None = None
    per_host: int | None = None
    compiled: bool = False
    bucket: float = 0.0
    last: float = 0.0
    memory_bandwidth: float | None = None
    tensor: int = 1
    exchanges: int = 4
    tensor_bandwidth: float | None = None
    bubble: float = 0.0

    @property
    def family(self) -> str:
        return self.hardware.split("-")[0]


class Shape(TypedDict):
    """Fields of `Run` that all runs of a model share."""

    layers: int
    width: int
    length: int
    outside: float


H100, A100 = "h100-nvlink-ib400", "a100-nvlink-ib200"
# outside: of the embedding [vocabulary, width].
LLAMA3_8B: Shape = {"layers": 32, "width": 4096, "length": 8192, "outside": 128256 * 4096}
LLAMA2_7B: Shape = {"layers": 32, "width": 4096, "length": 4096, "outside": 32000 * 4096}
MPT = {  # parameters, layers, width; layers and width follow from the table's FLOPs and parameters
    "1b": (1315950592, 24, 2048), "3b": (2651837440, 32, 2560), "7b": (6658859008, 32, 4096),
    "13b": (12853954560, 40, 5120), "30b": (29975214080, 48, 7168), "70b": (64862437376, 80, 8192),
}  # fmt: skip
# Rows with 2,048-token sequences, from 1b up in bfloat16 on H100, from 7b up on A100 40GB, in the
# tables' order: GPUs, sequences of a microbatch, microbatches, activation checkpointing, tokens/s
# of a GPU.
FOUNDRY = {
    H100: [
        ("70b", 64, 8, 4, 1, 1039), ("70b", 32, 2, 16, 1, 882),
        ("30b", 32, 14, 3, 1, 2308), ("30b", 16, 10, 3, 1, 2263), ("30b", 8, 3, 21, 1, 2002),
        ("13b", 64, 2, 1, 0, 4800), ("13b", 32, 2, 1, 0, 4811), ("13b", 16, 2, 1, 0, 4767), ("13b", 8, 2, 1, 0, 4792),
        ("7b", 8, 6, 1, 0, 10643),
        ("3b", 64, 6, 3, 0, 22525), ("3b", 32, 6, 3, 0, 23021), ("3b", 16, 10, 3, 0, 24142),
        ("1b", 64, 20, 1, 0, 44402), ("1b", 32, 20, 1, 0, 45130), ("1b", 16, 20, 1, 0, 46037),
        ("1b", 8, 14, 1, 0, 45455),
    ],
    A100: [
        ("70b", 128, 4, 1, 1, 376), ("70b", 64, 2, 1, 1, 276),
        ("30b", 128, 6, 1, 1, 865), ("30b", 32, 4, 1, 1, 857),
        ("13b", 128, 16, 1, 1, 1972), ("13b", 64, 16, 1, 1, 1976), ("13b", 32, 14, 1, 1, 1998),
        ("13b", 16, 10, 1, 1, 1993), ("13b", 8, 4, 16, 1, 1668),
        ("7b", 128, 18, 1, 1, 3623), ("7b", 64, 18, 1, 1, 3665), ("7b", 32, 18, 1, 1, 3725),
        ("7b", 16, 16, 1, 1, 3645), ("7b", 8, 12, 4, 1, 3679),
    ],
}  # fmt: skip


def foundry(
    hardware: str, size: str, devices: int, sequences: int, steps: int, remat: int, rate: int
) -> Run:
    params, layers, width = MPT[size]
    return Run(
        "llm-foundry", f"MPT {size}, {hardware[:4].upper()}", hardware, devices, params, rate, "tokens/s", layers,
        width, 2048, sequences, steps, 4 / 3 if remat else 1.0, devices, 1, BF16 if hardware == A100 else F32,
        memory_bandwidth=1.555e12 if hardware == A100 else None,
    )  # fmt: skip


def convolutional(
    name: str, params: float, images_per_second: float, efficiency: float, last: float
) -> Run:
    return Run(
        "Horovod", name, "p100-pcie-roce25", 512, params, efficiency, "efficiency", alone=64 / images_per_second,
        bucket=64 * 2**20, last=last,
    )  # fmt: skip


# Between hosts: an A3 High of Google Cloud has four 200 Gbit/s cards for eight GPUs, an A3 Mega
# eight; fms-fsdp's hosts share 400 and 800 Gbit/s. torchtitan's "selective" recomputes every other
# product, OLMo 2 feed-forward (84 % of all products); fms-fsdp's other runs recompute a share that
# is not given. ResNet-101 is not in the P100's table: the mean time of ResNet-50 and -152, with as
# many blocks less and more.
#
# torchtitan's H100 have 2.4 TB/s, llm-foundry's A100 40GB 1.555 (NVIDIA's data sheet). MaxText joins
# all-reduces up to 1 GiB on GPUs (16vm.sh); on TPUs it scans its blocks, so gradients exist after
# the last of them; 16b.sh scales 16 layers of width 2048 to 32 of 4096. Horovod joins up to 64 MiB.
# Llama 3 splits products over 8 GPUs and blocks over 16 with a stage of each block (8 on a GPU): of M
# sequences, it waits 15/(8 M) (arXiv 2407.21783, 3.3.2). PaLM's 12 chips are an axis of a torus, two
# of six links; attention and feed-forward of a block are parallel, 18432 wide: 3 times 12288.
RUNS = [
    *(
        Run(
            "torchtitan", "Llama 3.1 8B", H100, devices, 8.03e9, rate, sequences=2, recompute=7 / 6, shard=devices,
            compiled=True, memory_bandwidth=2.4e12, **LLAMA3_8B,
        )
        for devices, rate in ((8, 6667), (128, 6514))
    ),
    *(foundry(hardware, *row) for hardware, rows in FOUNDRY.items() for row in rows),
    *(
        Run(
            "MaxText", "Llama 2 7B", H100, 8 * n, 6.74e9, t, "TFLOP/s", sequences=4, shard=8, inter=12.5e9,
            compiled=True, bucket=2**30, **LLAMA2_7B,
        )
        for n, t in ((1, 492), (2, 422), (4, 407), (8, 409), (16, 375))
    ),
    *(
        Run(
            "MaxText v5e", "16B", "tpu-v5e", 256 * n, 16e9, rate, "TFLOP/s", 32, 4096, 2048, 6, recompute=4 / 3,
            shard=256, compiled=True, bucket=math.inf,
        )
        for n, rate in ((1, 120), (2, 117), (4, 117), (8, 115), (16, 111), (32, 108))
    ),
    *(
        Run(
            "fms-fsdp", f"Llama 2 {name}, {hardware[:4].upper()}", hardware, devices, params, rate, "tokens/s",
            layers, width, 4096, 2, 1, recompute, shard or devices, 1, BF16, 32000 * width, inter,
        )
        for hardware, devices, inter, rates in ((A100, 128, 6.25e9, (3700, 700)), (H100, 96, 12.5e9, (7500, 1550)))
        for (name, params, layers, width, recompute, shard), rate in zip(
            [("7B", 6.738e9, 32, 4096, 1.0, 8), ("34B", 33.74e9, 48, 8192, 4 / 3, 0)], rates
        )
    ),
    convolutional("ResNet-101", 44.7e6, 2 / (1 / 219 + 1 / 91.8), 0.90, 2048 * 1000),
    convolutional("VGG-16", 138.4e6, 154, 0.68, 25088 * 4096 + 4096 * 4096 + 4096 * 1000),
    convolutional("Inception V3", 23.9e6, 142, 0.90, 2048 * 1000),
    *(
        Run(
            "Llama 3", f"405B, {length:,} tokens", H100, devices, 405e9, rate, "TFLOP/s", 126, 16384, length,
            16 * 2**20 / devices / length, 1, 1.0, 8192 // 128 if devices == 8192 else 128, 128, F32,
            tensor=8, bubble=15 / (8 * sequences),
        )
        for devices, length, rate, sequences in (
            (8192, 8192, 430, 32), (16384, 8192, 400, 16), (16384, 131072, 380, 16),
        )
    ),
    Run(
        "PaLM", "540B", "tpu-v4", 6144, 540.35e9, 0.462 * 275, "TFLOP/s", 118, 48 * 256, 2048, 2048 / 6144,
        1, 4.10 / 3.28, 256, 12, per_host=3072, compiled=True, tensor=12, exchanges=3, tensor_bandwidth=90e9,
    ),
    Run(
        "OLMo 2", "32B", H100, 1024, 32e9, 1800, "tokens/s", 64, 5120, 4096, 2, 1, 1.28, 64, inter=25e9, compiled=True,
    ),
]  # fmt: skip

# The same runs of fms-fsdp with torch.compile, from a later state of the page: neither fitted nor
# judged, they show what `compiled` is worth.
COMPILED = [
    run._replace(compiled=True, published=rate)
    for run in RUNS
    for name, rate in (("Llama 2 7B, A100", 4550), ("Llama 2 7B, H100", 9600))
    if (run.source, run.name) == ("fms-fsdp", name)
]
