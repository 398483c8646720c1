"""The set for one NVIDIA GPU, in less than 8 minutes and without network; one JSON file to send back.

    python -m benchmarks.gpu [--root FOLDER_OF_CIFAR10] [--repeats 7] [--tiny] [--out benchmarks/results]

Contenders run one after the other, each with the whole device; their curves are compared all the same. PyTorch is taken
from the Python that JAXDP_BENCH_TORCH names. --tiny: small models, also on CPU, to see that everything runs.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.run import ROOT, make_material, torch_python

TOLERANCE = 2e-2  # of curves in bfloat16
SECTION = 150.0  # seconds that a contender may take for any answer


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="random", help="of CIFAR-10; left out, random images")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"tiny": options.tiny, **harness.machine()}
    sections: dict[str, Callable[[argparse.Namespace], Any]] = {
        "ceilings": ceilings,
        "gpt2_124m": lambda options: compared(options, *gpt2(options)),
        "resnet9": lambda options: compared(options, *resnet9(options)),
        "seconds_to_94": seconds_to_94,
        "zero": zero,
    }
    for name, section in sections.items():
        began = time.monotonic()
        try:
            found[name] = section(options)
        except (harness.Unfair, subprocess.SubprocessError, OSError) as error:
            found[name] = {"failed": str(error)}
        found[name]["took_s"] = time.monotonic() - began
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {json.dumps({k: v for k, v in found[name].items() if k != 'contenders'})}", flush=True)
    summarize(found)
    print(f"all of it is in {options.out / 'gpu.json'}")
    return int(any("failed" in part for part in found.values() if isinstance(part, dict)))


def ceilings(options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.ceilings", *["--tiny"] * options.tiny]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=SECTION)
    if done.returncode:
        raise harness.Unfair(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def gpt2(options: argparse.Namespace) -> tuple[list[str], int, int]:
    """(words of the config, updates of a repeat, tokens of an update): batch 64 x 1,024 in bfloat16."""
    size = (8, 64, 2) if options.tiny else (64, 1024, 10)
    words = ["configs/gpt2_124m.yaml", "--data.target", "benchmarks.data.RandomTokens", "--model.args.scan", "false"]
    words += ["--data.args.length", str(size[1]), "--batch_size", str(size[0]), "--microbatches", "1"]
    if options.tiny:
        words += ["--model.args.layers", "2", "--model.args.dim", "96", "--data.args.classes", "512"]
        words += ["--model.args.num_classes", "512"]
    return words, size[2], size[0] * size[1]


def resnet9(options: argparse.Namespace) -> tuple[list[str], int, int]:
    """DAWNBench's, 512 images of an update; no augmentation, which PyTorch would do in other ways."""
    batch = 32 if options.tiny else 512
    words = ["configs/cifar10_resnet9_fast.yaml", "--data.target", "benchmarks.data.Images", "--microbatches", "1"]
    words += ["--data.args.root", options.root, "--data.args.augment", "false", "--batch_size", str(batch)]
    words += ["--data.args.examples", str(97 * 512)]
    return [*words, *["--model.args.width", "8"] * options.tiny], 2 if options.tiny else 90, batch


def compared(options: argparse.Namespace, words: list[str], updates: int, units: int) -> dict[str, Any]:
    """jaxdp, plain JAX and compiled PyTorch, with units a second, memory, and the FLOPs of an update."""
    check = 5
    repeats = 2 if options.tiny else options.repeats
    total, torch = check + (repeats + 1) * (updates + 1), torch_python()
    config = ["--config", str(ROOT / words[0]), *words[1:], "--optimizer.warmup_steps", "2"]
    found: dict[str, Any] = {"contenders": {}}
    with tempfile.TemporaryDirectory() as folder:
        material = pathlib.Path(folder) / "material"
        make_material(material, total, config)
        own = [f"{folder}/run", *config, "--steps", str(total), "--epochs", "null"]
        commands = {"jaxdp": ["jaxdp_loop", *own], "plain jit": ["plain.jit_loop", str(material)]}
        if torch is not None:
            device = "cuda" if shutil.which("nvidia-smi") else "cpu"
            options_of = ["--compile", "--device", device, "--layout", "channels_last"]
            commands["torch compiled"] = ["torch_ddp.train", str(material), *options_of]
        else:
            found["left_out"] = "torch compiled: no PyTorch; name its Python in JAXDP_BENCH_TORCH"
        for name, (module, *args) in commands.items():
            python = torch if module.startswith("torch") else sys.executable
            job = [str(python), "-m", "benchmarks.contender", f"benchmarks.{module}", *args]
            measured = harness.measure(
                [harness.Contender(name, job)],
                pathlib.Path(folder) / "logs",
                updates=updates,
                repeats=repeats,
                check=check,
                timeout=SECTION,
                idle=float("inf"),
            )
            found["contenders"] |= measured["contenders"]
        found["flops_per_update"] = flops(config)
    losses = {name: own["losses"] for name, own in found["contenders"].items()}
    harness.compare(losses, TOLERANCE)
    for name, each in found["contenders"].items():
        found[name] = {
            "units_per_s": units / each["median"],
            "flops_per_s": found["flops_per_update"] / each["median"],
            "compile_s": each["first_update_s"],
            "memory": each["memory"][0],
        }
    return found


def flops(config: list[str]) -> int:
    """Of an update's products, as the traced program has them; on CPU, since the device may be in use."""
    program = """
import sys
import jax
import numpy as np
from jaxdp.build.parts import make_parts, make_the_step, set_jax, state_maker
from jaxdp.cli import load
from jaxdp.data.prefetch import read_batch
from jaxdp.flops import count_flops
config, *_ = load(sys.argv[1:])
set_jax(config)
parts = make_parts(config)
step, state = make_the_step(config, parts), jax.eval_shape(state_maker(config, parts))
batch = read_batch(parts.dataset, parts.cursor, 0, np.arange(config.microbatches))
print(count_flops(jax.make_jaxpr(lambda s, b: step.grads(s.view, b, np.arange(config.microbatches)))(state, batch)))
"""
    words = [sys.executable, "-c", program, *config]
    done = subprocess.run(
        words, cwd=ROOT, env=harness.environment(JAX_PLATFORMS="cpu"), text=True, capture_output=True, timeout=SECTION
    )
    if done.returncode:
        raise harness.Unfair(done.stderr[-2000:])
    return int(done.stdout.split()[-1])


def seconds_to_94(options: argparse.Namespace) -> dict[str, Any]:
    """The published recipe as its config has it, with real images only: seconds of training and the accuracy."""
    if options.root == "random" and not options.tiny:
        return {"left_out": "no CIFAR-10; name its folder with --root"}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "train.py",
            "--config",
            "configs/cifar10_resnet9_fast.yaml",
            "--run_dir",
            f"{folder}/run",
        ]
        if options.tiny:
            words += ["--data.target", "benchmarks.data.Images", "--data.args.root", "random", "--epochs", "null"]
            words += ["--steps", "3", "--batch_size", "32", "--model.args.width", "8", "--data.args.examples", "640"]
        else:
            words += ["--data.args.root", options.root]
        began = time.perf_counter()
        done = subprocess.run(
            words, cwd=ROOT, env=harness.environment(), text=True, capture_output=True, timeout=2 * SECTION
        )
        if done.returncode:
            raise harness.Unfair(done.stderr[-2000:])
        lines = [json.loads(line) for line in (pathlib.Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["split"] == "train" and "step_time_ms" in line]
    training = statistics.median(line["step_time_ms"] for line in steps) * lines[-1]["step"] / 1e3 if steps else None
    return {"all_s": time.perf_counter() - began, "training_s": training, "accuracy": lines[-1].get("accuracy")}


def zero(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of the state on each of eight devices by stage, as `jaxdp plan` compiles it without them."""
    words = [*gpt2(options)[0], "--microbatches", "8", "--devices", "8", "--zero", "all", "--json"]
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", *words]
    done = subprocess.run(command, cwd=ROOT, env=harness.environment(), text=True, capture_output=True, timeout=SECTION)
    if done.returncode:
        raise harness.Unfair(done.stderr[-2000:])
    return {"plan": json.loads(done.stdout[done.stdout.index("{") :])}


def summarize(found: dict[str, Any]) -> None:
    """MFU against the peak that the data sheet gives, and against the product that was measured."""
    from jaxdp.hardware import HARDWARE

    kind = found["ceilings"].get("device", "").lower()
    peak = next((row.flops["bfloat16"] for name, row in HARDWARE.items() if name.partition("-")[0] in kind), None)
    measured = found["ceilings"].get("bf16_matmul_flops")
    for section, unit in (("gpt2_124m", "tokens"), ("resnet9", "images")):
        for name in found[section].get("contenders", {}):
            own = found[section][name]
            shares = [f"{own['flops_per_s'] / measured:.1%} of the measured product"] if measured else []
            shares += [f"MFU {own['flops_per_s'] / peak:.1%}"] if peak else []
            print(f"  {section:10} {name:15} {own['units_per_s']:12,.0f} {unit}/s  {', '.join(shares)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
