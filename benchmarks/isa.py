"""Whether exact mode has one digest on every processor, and what that costs.

    python -m benchmarks.isa [--models mlp,llama] [--processors default,AVX512,AVX2] [--devices 1,8] [--unpinned]
    python -m benchmarks.isa --speed [--models mlp,llama] [--repeats 9] [--key value ...]

A processor is an instruction set of XLA's `--xla_cpu_max_isa` (`default`: all that this one has), or
a model of QEMU, such as EPYC-Rome or SandyBridge, if `qemu-x86_64` is on the PATH: then libraries,
too, see another processor. Trains each model for a few updates in one job for each processor, on
these numbers of simulated devices, and prints a table of the digests of the parameters; the last
column says whether a row has one digest. unpinned: without the flags that give every processor the
same instructions and kernels (`FLAGS`).

speed: prints the milliseconds of an update, medians, with those flags and without, of two jobs that
take turns. Other arguments go to the config."""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import job
from benchmarks.exact import answer, tell, work

FLAGS = ("--xla_cpu_max_isa", "--xla_cpu_enable_platform_dependent_math")
INSTRUCTION_SETS = ("default", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16")
TEXT = {
    "data": {"target": "PythonSource", "args": {"length": 16, "max_mb": 0.02}},
    "loss": "CausalLM",
}
TRANSFORMER = {"layers": 2, "heads": 2, "dim": 32}
LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary", "tied": False, "bias": False}


class Experts(nnx.Module):
    """A mixture of four experts on the rows of an image [example, row, column, 1]; each row takes
    the outputs of two."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, *, rngs: nnx.Rngs):
        width = input_shape[1]
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate = nnx.Linear(width, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (4, width, 32)))
        self.down = nnx.Param(init(rngs.params(), (4, 32, width)))
        self.head = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., 0]
        best, chosen = jax.lax.top_k(self.gate(x), 2)
        share = jax.nn.one_hot(chosen, 4, dtype=x.dtype) * jax.nn.softmax(best)[..., None]
        hidden = nnx.gelu(jnp.einsum("brc,ech->breh", x, self.up[...]))
        out = jnp.einsum("breh,ehc,bre->brc", hidden, self.down[...], share.sum(-2))
        return self.head(self.norm(x + out).mean(1))


def images(target: Any, **args: Any) -> dict[str, Any]:
    return {"model": {"target": target, "args": args}, "data": "Digits"}


def text(target: str, **args: Any) -> dict[str, Any]:
    return {"model": {"target": target, "args": args}, **TEXT}


MODELS = {
    "mlp": images("MLP", hidden=[32, 32], dropout=0.1),
    "resnet9": images("ResNet9", width=4),
    "gpt2": text("GPT", **TRANSFORMER, dropout=0.1),
    "llama": text("GPT", **TRANSFORMER, **LLAMA, hidden=48),
    "lstm": text("LSTM", dim=16, hidden=16, layers=2),
    "vit": images("ViT", **TRANSFORMER, patch=4, dropout=0.1),
    "experts": images(Experts),
}
SPEED = {  # the words of `train.py` for models of a usual size
    "mlp": "--config configs/digits.yaml",
    "gpt2": "--config configs/gpt_3m.yaml",
    "llama": "--config configs/gpt_3m.yaml --model.args.norm rms --model.args.mlp swiglu "
    "--model.args.positions rotary --model.args.tied false --model.args.bias false",
    "resnet9": '--config configs/digits.yaml --model {"target":"ResNet9"}',
    "vit": '--config configs/digits.yaml --model {"target":"ViT","args":{"patch":2,"layers":4,"heads":4,"dim":64}}',
}


def unpin() -> None:
    """Take the flags of one digest on every processor out of those that exact mode sets."""
    from jaxdp.exact import flags

    flags.CPU = [flag for flag in flags.CPU if not flag.startswith(FLAGS)]


def digests(models: Sequence[str], devices: Sequence[int], steps: int) -> dict[str, str]:
    """Return the digest of the parameters {"model devices": SHA-256} after so many updates."""
    import jaxdp

    found = {}
    for model, number in itertools.product(models, devices):
        with tempfile.TemporaryDirectory() as folder:
            run_dir = pathlib.Path(folder) / "run"
            jaxdp.fit(
                **MODELS[model],
                optimizer={"target": "adamw", "lr": 3e-3, "clip_norm": 1.0},
                steps=steps,
                batch_size=16,
                microbatches=8,
                parallel={"reduction": "exact", "devices": number},
                run_dir=run_dir,
            )
            found[f"{model} {number}"] = job.records(run_dir)[-1]["params_sha256"]
    return found


def train_on(processor: str, devices: Sequence[int], words: Sequence[str]) -> dict[str, str]:
    """Return the digests of a job on this processor. Raises Failed."""
    flags = [f"--xla_force_host_platform_device_count={max(devices)}"]
    command = [sys.executable, "-m", "benchmarks.isa", *words]
    if processor not in INSTRUCTION_SETS:
        command = ["qemu-x86_64", "-cpu", processor, *command]
    elif processor != "default":
        flags.append(f"--xla_cpu_max_isa={processor}")
    env = job.environment(XLA_FLAGS=" ".join(flags), JAX_PLATFORMS="cpu")
    return json.loads(job.output(command, 7200.0, env).splitlines()[-1])


def table(
    models: Sequence[str], processors: Sequence[str], devices: Sequence[int], words: Sequence[str]
) -> None:
    """Print the digests, a row for each model and number of devices."""
    columns = [train_on(processor, devices, words) for processor in processors]
    print(f"| model | devices | {' | '.join(processors)} | one digest |")
    print("|---" * (len(processors) + 3) + "|")
    for model in models:
        first = {column[f"{model} {devices[0]}"] for column in columns}
        for number in devices:
            row = [column[f"{model} {number}"] for column in columns]
            equal = "yes" if first == {*row} and len(first) == 1 else "no"
            print(f"| {model} | {number} | {' | '.join(x[:12] for x in row)} | {equal} |")


def speed(model: str, repeats: int, more: Sequence[str]) -> dict[str, Any]:
    """Return what an update takes with the flags and without, in two jobs that take turns."""
    words = [*SPEED[model].split(), "--parallel.reduction", "exact", *more]
    jobs = {}
    for way in ("unpinned", "pinned"):
        command = [sys.executable, "-m", "benchmarks.isa", "work", way, *words]
        jobs[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=job.environment()
        )
        answer(jobs[way])
    times: dict[str, list[float]] = {way: [] for way in jobs}
    for repeat in range(repeats):
        for way in [*jobs][:: 1 if repeat % 2 else -1]:
            tell(jobs[way], "go")
            times[way].append(answer(jobs[way]))
    for process in jobs.values():
        tell(process, "stop")
        process.communicate()
    median = {way: statistics.median(ms) for way, ms in times.items()}
    return {
        "model": model,
        "median_ms": {way: round(ms, 2) for way, ms in median.items()},
        "speed": round(median["unpinned"] / median["pinned"], 3),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=lambda names: names.split(","))
    parser.add_argument("--processors", default="default,AVX512,AVX2")
    parser.add_argument("--devices", default="1,8")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--unpinned", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    args, more = parser.parse_known_args(argv)
    models = args.models or [*(SPEED if args.speed else MODELS)]
    if args.speed:
        for model in models:
            print(json.dumps(speed(model, args.repeats, more)), flush=True)
        return
    if args.unpinned and args.train:
        unpin()
    devices = [int(number) for number in args.devices.split(",")]
    if args.train:
        print(json.dumps(digests(models, devices, args.steps)))
        return
    table(models, args.processors.split(","), devices, [*argv, "--train"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        if sys.argv[2] == "unpinned":
            unpin()
        work("exact", sys.argv[3:])
    else:
        main(sys.argv[1:])
