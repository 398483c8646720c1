"""The set for one NVIDIA GPU, in less than 8 minutes and without network; one JSON file to send
back.

    python -m benchmarks.gpu [--root FOLDER_OF_CIFAR10] [--repeats 7] [--tiny] [--out benchmarks/results]

Contenders run one after the other, each with the whole device; their curves are compared all the
same. What fails is named in the file, and the rest goes on; so is what the time did not suffice
for. PyTorch is taken from the Python that JAXDP_BENCH_TORCH names, from this one, or from
.venv-torch: from the first where it sees the GPU. --tiny: small models, also on CPU, to see that
everything runs."""

import argparse
import json
import os
import pathlib
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from benchmarks import harness, job
from benchmarks.gpu_bench import NO_TIME, Bench, printed
from benchmarks.run import ROOT, TORCH, make_material
from jaxdp.plan.hardware import peak_flops

TOLERANCE = 2e-2  # of curves in bfloat16
ACCURACY = 0.94  # of DAWNBench
CHECK = 5  # updates whose losses are compared
# Whether tiny: batch, tokens, layers, width.
GPT2 = {False: (64, 1024, 12, 768), True: (8, 64, 2, 96)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", default="random", help="of CIFAR-10; left out, random images")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        parser.error(f"--repeats: {options.repeats} gives no quartiles; at least 2")
    if options.root != "random" and not pathlib.Path(options.root).is_dir():
        parser.error(
            f"--root: {options.root!r} is no folder; name the one of CIFAR-10's batches, or leave it out"
        )
    signal.signal(signal.SIGTERM, lambda *_: stop())
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, {"tiny": options.tiny, **harness.machine(), "gpu": gpu()})
    bench.run("ceilings", ceilings)
    if not bench.device:
        print(
            "JAX finds no NVIDIA GPU here (see `ceilings` above); --tiny runs everything small on CPU",
            file=sys.stderr,
        )
        return 1
    bench.run("gpt2_124m", gpt2)
    bench.run("resnet9", resnet9)
    bench.run("seconds_to_94", seconds_to_94)
    bench.run("zero", zero)
    summarize(bench.found)
    print(f"all of it is in {options.out / 'gpu.json'}")
    parts = [part for part in bench.found.values() if isinstance(part, dict)]
    return int(
        any("failed" in own for part in parts for own in (part, *part.get("summary", {}).values()))
    )


def stop() -> NoReturn:
    raise KeyboardInterrupt


def gpu() -> str | None:
    """The device, its driver, its clocks and its division, as nvidia-smi has them."""
    keys = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current"
    try:
        words = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader"]
        return (
            subprocess.run(words, text=True, capture_output=True, timeout=20).stdout.strip() or None
        )
    except (OSError, subprocess.SubprocessError):
        return None


def ceilings(bench: Bench, own: dict[str, Any]) -> None:
    words = [sys.executable, "-m", "benchmarks.ceilings", *["--tiny"] * bench.tiny]
    own |= json.loads(printed(bench, words, bench.env).splitlines()[-1])
    bench.device = own["device"]
    own["peak_bf16_flops"] = peak_flops(bench.device, "bfloat16")


def gpt2_words(tiny: bool) -> list[str]:
    """The config: batch 64 x 1,024 in bfloat16, blocks one after the other."""
    batch, tokens, layers, dim = GPT2[tiny]
    words = [
        "configs/gpt2_124m.yaml",
        "--data.target",
        "benchmarks.data.RandomTokens",
        "--model.args.scan",
        "false",
    ]
    words += ["--data.args.length", str(tokens), "--batch_size", str(batch), "--microbatches", "1"]
    if tiny:
        words += [
            "--model.args.layers",
            str(layers),
            "--model.args.dim",
            str(dim),
            "--data.args.classes",
            "512",
        ]
        words += ["--model.args.num_classes", "512"]
    return words


def gpt2(bench: Bench, own: dict[str, Any]) -> None:
    words, (batch, tokens, layers, dim) = gpt2_words(bench.tiny), GPT2[bench.tiny]
    own["attention"] = bench.found["ceilings"].get("attention")
    if (
        own["attention"] == "cudnn" and not bench.tiny
    ):  # or it would be taken where it can, in silence
        words += ["--model.args.attention", "cudnn"]

    def flops(material: pathlib.Path) -> int:
        with np.load(material / "weights.npz") as stored:
            parameters = sum(
                stored[name].size for name in stored.files if not name.endswith("positions")
            )
        return batch * tokens * (6 * parameters + 12 * layers * dim * tokens)

    own["flops_by"] = (
        "6 N + 12 layers dim tokens (arXiv 2204.02311, appendix B), N without positions"
    )
    compared(bench, own, words, 2 if bench.tiny else 10, (batch * tokens, "tokens"), flops)


def resnet9(bench: Bench, own: dict[str, Any]) -> None:
    """DAWNBench's, 512 images of an update; no augmentation, which PyTorch would do in other ways."""
    batch = 32 if bench.tiny else 512
    words = [
        "configs/cifar10_resnet9_fast.yaml",
        "--data.target",
        "benchmarks.data.Images",
        "--microbatches",
        "1",
    ]
    words += [
        "--data.args.root",
        bench.options.root,
        "--data.args.augment",
        "false",
        "--batch_size",
        str(batch),
    ]
    words += ["--data.args.examples", str(97 * 512), *["--model.args.width", "8"] * bench.tiny]
    own["flops_by"] = "the products of the traced program"
    compared(
        bench,
        own,
        words,
        2 if bench.tiny else 90,
        (batch, "images"),
        lambda _: counted(bench, words),
    )


def compared(
    bench: Bench,
    own: dict[str, Any],
    words: list[str],
    updates: int,
    units: tuple[int, str],
    flops: Callable[[pathlib.Path], int],
) -> None:
    """jaxdp, plain JAX and compiled PyTorch, with units a second, memory, and FLOPs; what fails
    leaves the others.
    """
    repeats = 2 if bench.tiny else bench.options.repeats
    total = CHECK + (repeats + 1) * (updates + 1)
    config = ["--config", str(ROOT / words[0]), *words[1:], "--optimizer.warmup_steps", "2"]
    own |= {"unit": units[1], "units_per_update": units[0], "contenders": {}, "summary": {}}
    with tempfile.TemporaryDirectory() as folder:
        material = pathlib.Path(folder) / "material"
        make_material(material, total, config)
        own["flops_per_update"] = None
        try:
            own["flops_per_update"] = flops(material)
        except job.Failed as error:
            own["flops_failed"] = str(error)
        commands = {
            "jaxdp": [
                "jaxdp_loop",
                f"{folder}/run",
                *config,
                "--steps",
                str(total),
                "--epochs",
                "null",
            ],
            "plain jit": ["plain.jit_loop", str(material)],
        }
        torch, device = torch_python(bench.tiny)
        if torch is not None:
            layout = ["--compile", "--device", device, "--layout", "channels_last"]
            commands["torch compiled"] = ["torch_ddp.train", str(material), *layout]
        else:
            own["left_out"] = (
                f"torch compiled: no PyTorch that sees the GPU; name its Python in {TORCH}"
            )
        for name, (module, *args) in commands.items():
            python = torch if module.startswith("torch") else sys.executable
            command = [str(python), "-m", "benchmarks.contender", f"benchmarks.{module}", *args]
            try:
                if bench.is_over():
                    raise job.Failed(NO_TIME)
                measured = harness.measure(
                    [job.Contender(name, command, env=bench.env)],
                    pathlib.Path(folder) / "logs",
                    updates=updates,
                    repeats=repeats,
                    check=CHECK,
                    timeout=bench.limit(),
                    idle=float("inf"),
                )
            except (job.Failed, OSError) as error:
                own["summary"][name] = {"failed": str(error)}
            else:
                own["contenders"] |= measured["contenders"]
                own["summary"][name] = summary(bench, own, name)
            bench.save()


def summary(bench: Bench, own: dict[str, Any], name: str) -> dict[str, Any]:
    """A contender's figures, and how its curve differs from that of the first."""
    found = own["contenders"][name]
    first = own["contenders"][next(iter(own["contenders"]))]
    rate = own["flops_per_update"] and own["flops_per_update"] / found["median"]
    peak = bench.found["ceilings"].get("peak_bf16_flops")
    product = bench.found["ceilings"].get("bf16_matmul_flops")
    found["relative_loss_error"] = error = harness.worst(found["losses"], first["losses"])
    different = {
        "failed": f"its losses differ by {error:.1e}, more than {TOLERANCE}: it trains something else"
    }
    return {
        "units_per_s": own["units_per_update"] / found["median"],
        "flops_per_s": rate,
        "mfu": rate and peak and rate / peak,
        "of_measured_product": rate and product and rate / product,
        "compile_s": found["first_update_s"],
        "memory": found["memory"][0],
        "relative_loss_error": error,
    } | (different if error > TOLERANCE else {})


def torch_python(tiny: bool) -> tuple[str | None, str]:
    """(the first Python whose PyTorch sees the GPU, cuda); with `tiny` any PyTorch will do, on cpu."""
    asked = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    named = [os.environ[TORCH]] if TORCH in os.environ else []
    any_of_them = None
    for python in [*named, sys.executable, str(ROOT / ".venv-torch" / "bin" / "python")]:
        if shutil.which(python) is None:
            continue
        code = subprocess.run([python, "-c", asked], capture_output=True).returncode
        if code == 0:
            return python, "cuda"
        any_of_them = any_of_them or (python if code == 3 else None)
    return (any_of_them, "cpu") if tiny else (None, "cpu")


def counted(bench: Bench, words: list[str]) -> int:
    """FLOPs of an update's products, as the traced program has them; on CPU, since the device may
    be in use.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.flops",
        "--config",
        str(ROOT / words[0]),
        *words[1:],
    ]
    return int(printed(bench, command, {"JAX_PLATFORMS": "cpu"}).split()[-1])


def seconds_to_94(bench: Bench, own: dict[str, Any]) -> None:
    """The config of 24 epochs as it is, with real images only: seconds of training, and the
    accuracy they lead to.
    """
    if bench.options.root == "random" and not bench.tiny:
        own["left_out"] = "no CIFAR-10; name its folder with --root"
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "train.py", "--config", "configs/cifar10_resnet9_fast.yaml"]
        root = (
            noise(pathlib.Path(folder) / "noise")
            if bench.options.root == "random"
            else bench.options.root
        )
        words += ["--run_dir", f"{folder}/run", "--data.args.root", root]
        if bench.tiny:
            words += ["--epochs", "null", "--steps", "3", "--log.every", "1", "--eval.every", "3"]
            words += ["--batch_size", "32", "--model.args.width", "8"]
        began = time.perf_counter()
        printed(bench, words, bench.env)
        own["all_s"] = time.perf_counter() - began
        lines = [
            json.loads(line)
            for line in (pathlib.Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    final = next(line for line in lines if line["split"] == "final")
    steps = [
        line["step_time_ms"]
        for line in lines
        if line["split"] == "train" and "step_time_ms" in line
    ]
    own["training_s"] = statistics.median(steps) * final["step"] / 1e3 if steps else None
    own["accuracy"] = final["accuracy"]
    own["reached"] = own["accuracy"] >= ACCURACY


def noise(folder: pathlib.Path, images: int = 64) -> str:
    """Files like CIFAR-10's, each with a few random images."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        planes = draw.integers(0, 256, (images, 3072), np.uint8)
        (folder / name).write_bytes(
            pickle.dumps({"data": planes, "labels": draw.integers(0, 10, images).tolist()})
        )
    return str(folder)


def zero(bench: Bench, own: dict[str, Any]) -> None:
    """Bytes of the state on each of eight devices by stage, as `jaxdp plan` compiles it without
    them.
    """
    words = [
        *gpt2_words(bench.tiny),
        "--microbatches",
        "8",
        "--devices",
        "8",
        "--zero",
        "all",
        "--json",
    ]
    text = printed(bench, [sys.executable, "-m", "jaxdp", "plan", "--config", *words], {})
    own["plan"] = json.loads(text[text.index("{") :])


def summarize(found: dict[str, Any]) -> None:
    """A line for each contender: MFU is against the peak that the data sheet gives."""
    for section in ("gpt2_124m", "resnet9"):
        for name, own in found[section].get("summary", {}).items():
            if "units_per_s" not in own:
                continue
            shares = (
                [f"{own['of_measured_product']:.1%} of the measured product"]
                if own["of_measured_product"]
                else []
            )
            shares += [f"MFU {own['mfu']:.1%}"] if own["mfu"] else []
            shares += [f"not comparable: {own['failed']}"] if "failed" in own else []
            unit = found[section]["unit"]
            print(
                f"  {section:10} {name:15} {own['units_per_s']:12,.0f} {unit}/s  {', '.join(shares)}"
            )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
