"""Compile the configs for GPUs and TPUs that are not here, and print what their compilers say, as
tables. Compiled, not run.

    python -m benchmarks.targets                       # every config for 8 and 64 H100 and 16 v5e
    python -m benchmarks.targets --scale               # GPT-2 124M and Llama 7B on up to 4,096 devices
    python -m benchmarks.targets --record [--scale]    # keeps results, writes the tables of RESULTS.md

The compilers are those of `make .targets/.done`. Each program is compiled by a process of its own,
whose peak memory is reported. Data sets that are not on this machine are files of noise: only their
shapes count. Models are cut in depth where a compile takes over a minute of a processor: see SHALLOW.

With --out, results are appended to a file of JSON lines, and those that it has are not compiled
again; --again compiles them. --record is --out benchmarks/targets.jsonl, and writes what that file has
between the marks of RESULTS.md: a program that is not in it is "not compiled".
"""

import argparse
import datetime
import gzip
import importlib.metadata
import json
import os
import pathlib
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.record import fill
from jaxdp.metrics.numbers import size

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "targets.jsonl"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
TARGETS = ("h100:8", "h100:8x8", "v5e:4x4")
BACKENDS = ("pjit", "pmap")
CONFIGS = tuple(sorted(file.stem for file in (ROOT / "configs").glob("*.yaml")))
LIMIT = 480  # seconds of a program
SHOWN = 200  # characters of the reason why a program is refused
SHALLOW = {("vit_cifar10", "v5e"): (2, 12)}
"""{(config, kind of device): (layers that are compiled, layers)} of the models that are cut in depth;
for those that scan their blocks, depth does not matter to a compiler."""
SIZES = ("h100:8x8", "h100:64x8", "h100:512x8", "v5p:16x16x16")
SCALE = {
    "GPT-2 124M, stage 0": ("gpt2_124m", "--parallel.backend", "pjit"),
    "GPT-2 124M, stage 3 in groups of 8": (
        *("gpt2_124m", "--parallel.backend", "pjit"),
        *("--parallel.zero", "3", "--parallel.shard_size", "8"),
    ),
    "Llama 7B, stage 3": ("llama_7b",),
    "Llama 7B, stage 3 in groups of 64": ("llama_7b", "--parallel.shard_size", "64"),
}


class Program(NamedTuple):
    """A program to compile. words: the name of its config, and arguments."""

    name: str
    target: str
    backend: str
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join([self.target, *self.words])


def configs(names: tuple[str, ...], targets: tuple[str, ...]) -> list[Program]:
    """Return the programs of the table of configs."""
    return [
        config_program(name, target, backend)
        for target in targets
        for backend in BACKENDS
        for name in names
    ]


def config_program(name: str, target: str, backend: str) -> Program:
    """Return the program of a config, with fewer layers if SHALLOW says so."""
    words, title = [name, "--parallel.backend", backend], name
    if cut := SHALLOW.get((name, target.partition(":")[0])):
        words += ["--model.args.layers", str(cut[0])]
        title = f"{name}, {cut[0]} of {cut[1]} layers"
    return Program(title, target, backend, tuple(words))


def scales() -> list[Program]:
    """Return the programs of the table of scale."""
    return [
        Program(name, target, "pjit", words) for name, words in SCALE.items() for target in SIZES
    ]


# --- A program, in a process of its own ----------------------------------------------


def compile_one(target_name: str, words: list[str]) -> dict[str, Any]:
    """Compile the update of a config for a target; return its figures, or why it is refused."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.monitoring

    from jaxdp.api import set_environment
    from jaxdp.cli.parse import load
    from jaxdp.errors import UsageError
    from jaxdp.plan import chips
    from jaxdp.plan.hardware import rate
    from jaxdp.plan.prediction import predict

    spent: dict[str, float] = {}

    def add(event: str, duration_secs: float, **_: str | int) -> None:
        spent[event] = spent.get(event, 0.0) + duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    began = time.perf_counter()
    try:
        target = chips.read_target(target_name)
        chips.check_plugin(target)
        config, *_ = load(words)
        set_environment(config)
        chips.allow_compilers()
        hardware, devices = target.hardware, target.devices
        per_device = -(-max(config.microbatches, devices) // devices)
        with tempfile.TemporaryDirectory() as folder:
            log = os.path.join(folder, "log")
            stages = [config.parallel.zero]
            plans, notes = chips.compile_here(config, target, stages, per_device, log)
    except (UsageError, chips.CompilerFailed) as error:
        return {"refused": str(error)}
    if not plans:
        return {"refused": notes[0]}
    [plan] = plans
    precision = config.precision
    dtype = rate(precision.compute or precision.params, precision.matmul, hardware.flops)
    seconds = predict(plan, hardware, dtype)["expected"]
    assert plan.schedule is not None
    return {
        "compile_seconds": spent["/jax/core/compile/backend_compile_duration"],
        "seconds": time.perf_counter() - began,
        "processor_seconds": sum(os.times()[:4]),  # with those of ptxas
        "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "peak_bytes": plan.memory.peak,
        "fits": plan.memory.peak <= hardware.memory,
        "step_seconds": seconds,
        "hidden_share": plan.schedule.hidden_share,
        "mfu": plan.flops / seconds / hardware.flops[dtype],
        "devices": devices,
    }


def compile_apart(program: Program, data: pathlib.Path) -> dict[str, Any]:
    """Return what `compile_one` returns in another process, or how that ended; and the date."""
    made = {"date": f"{datetime.date.today()}", "versions": versions()}
    name, *more = program.words
    words = ["--config", f"configs/{name}.yaml", *noise_for(name, data), *more]
    paths = [str(ROOT), str(ROOT / ".targets"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "XLA_FLAGS": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.targets", "--one", program.target, *words],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {**made, "refused": f"not compiled in {LIMIT} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {**made, "refused": f"its process ended with {done.returncode}: {last}"}
    return {**made, **json.loads(done.stdout.splitlines()[-1])}


def versions() -> str:
    """Return the versions of JAX and of the compilers in `.targets`."""
    compilers = sorted(x.stem.replace("-", " ") for x in (ROOT / ".targets").glob("*.dist-info"))
    return ", ".join([f"jax {importlib.metadata.version('jax')}", *compilers])


# --- Data: noise in the formats of the data sets --------------------------------------


def noise_for(name: str, folder: pathlib.Path) -> list[str]:
    """Return arguments that give a config's data set, if it reads files, files of noise."""
    from benchmarks.gpu import noise

    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    if "path: input.txt" in text:
        file = folder / "input.txt"
        file.write_text("To be, or not to be, that is the question.\n" * 1000)
        return ["--data.args.path", str(file)]
    kind = re.findall(r"target: (CIFAR10|MNIST|FashionMNIST|PennTreebank)\b", text)
    if not kind:
        return []
    root = folder / kind[0]
    if not root.exists() and kind[0] == "CIFAR10":
        noise(root, 512)
    elif not root.exists() and kind[0] == "PennTreebank":
        root.mkdir()
        for split in ("train", "valid", "test"):
            (root / f"ptb.{split}.txt").write_text(" a b c d e f g h i \n" * 400)
    elif not root.exists():
        root.mkdir()
        for split in ("train", "t10k"):
            images, labels = np.zeros((512, 28, 28), np.uint8), np.arange(512) % 10
            write_idx(root / f"{split}-images-idx3-ubyte.gz", images)
            write_idx(root / f"{split}-labels-idx1-ubyte.gz", labels.astype(np.uint8))
    inner = "data.args." * ("target: Augmented" in text)  # the data set of another one
    return [f"--data.args.{inner}root", str(root)]


def write_idx(file: pathlib.Path, array: np.ndarray) -> None:
    """Write bytes in the format of MNIST."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    file.write_bytes(gzip.compress(header + array.tobytes()))


# --- Tables ----------------------------------------------------------------------------


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def cells(result: dict[str, Any]) -> list[str]:
    """Return the columns of a compiled program."""
    share = result["hidden_share"]
    return [
        size(result["peak_bytes"]) + ("" if result["fits"] else ": does not fit"),
        duration(result["step_seconds"]),
        "-" if share is None else f"{round(share, 3) + 0.0:.0%}",  # no -0
        f"{result['mfu']:.1%}",
    ]


FIGURES = ("peak of a device", "update", "hidden", "MFU")
Results = dict[str, dict[str, Any]]


def row_of(result: dict[str, Any] | None, times: list[str]) -> list[str]:
    """Return times and figures of a result, or the reason why there are none."""
    if result is None or "refused" in result:
        reason = "not compiled" if result is None else f"no: {result['refused'][:SHOWN]}"
        return [reason.replace("|", "/"), *[""] * (len(times) + len(FIGURES) - 1)]
    return [*times, *cells(result)]


def seconds_of(result: dict[str, Any] | None) -> str:
    """Return the seconds of the compiler, and those of processors in all."""
    if result is None or "refused" in result:
        return "-"
    return f"{result['compile_seconds']:.0f} s ({result['processor_seconds']:.0f})"


def under_pmap(plain: dict[str, Any] | None, result: dict[str, Any] | None) -> str:
    """Return what pmap makes of a program, beside pjit."""
    first, *more = row_of(result, [])
    if result is None or "refused" in result:
        return first
    if plain is None or "refused" in plain or cells(plain) != cells(result):
        return "; ".join([first, *more])
    return "the same"


def table(programs: list[Program], results: Results, scale: bool) -> str:
    """Return the results of programs as a table, in markdown. Those of configs have a row for both
    backends.
    """
    times = ["compile (processor time)", *["its memory"] * scale]
    dates = sorted(results[x.key]["date"] for x in programs if x.key in results)
    made = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    header = [f"compiled {made}".strip(), "target", *times, *FIGURES]
    header += [] if scale else ["compile under pmap", "its figures"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for program in programs:
        if program.backend != BACKENDS[0]:
            continue
        result = results.get(program.key)
        shown = [seconds_of(result)]
        if scale:
            shown.append(f"{result['rss'] / 1e9:.1f} GB" if result and "rss" in result else "-")
        columns = [program.name, program.target, *row_of(result, shown)]
        if not scale:
            other = results.get(program.key.replace(*BACKENDS))
            columns += [seconds_of(other), under_pmap(result, other)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def tables(results: Results) -> dict[str, str]:
    """Return {name of the mark: what stands there}: the tables of configs and of scale."""
    parts = [(configs(CONFIGS, TARGETS), False), (scales(), True)]
    made = [table(programs, results, scale) for programs, scale in parts]
    return {"compiled": "\n\n".join(made)}


def read_results(file: pathlib.Path) -> Results:
    """Return the newest result of each program in a file of JSON lines."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", action="store_true", help="the table of scale")
    parser.add_argument("--only", help="programs whose arguments match a regular expression")
    parser.add_argument("--out", type=pathlib.Path, help="a file of JSON lines")
    parser.add_argument("--again", action="store_true", help="compile those that --out has as well")
    parser.add_argument(
        "--record", action="store_true", help=f"--out {RECORD.name}; write the page"
    )
    parser.add_argument("--one", metavar="TARGET", help="compile one config in this process")
    options, words = parser.parse_known_args(argv)
    if options.one:
        print(json.dumps(compile_one(options.one, words)))
        return
    out = RECORD if options.record else options.out
    programs = scales() if options.scale else configs(CONFIGS, TARGETS)
    programs = [x for x in programs if re.search(options.only or "", x.key)]
    results = read_results(out) if out else {}
    missing = [x for x in programs if options.again or x.key not in results]
    with tempfile.TemporaryDirectory() as folder:
        for program in missing:
            results[program.key] = compile_apart(program, pathlib.Path(folder))
            print(program.key, results[program.key], file=sys.stderr, flush=True)
            if out:
                with out.open("a") as file:
                    file.write(json.dumps({"key": program.key, **results[program.key]}) + "\n")
    print(table(programs, results, options.scale))
    if options.record:
        fill(PAGE, "targets", tables(results))


if __name__ == "__main__":
    main(sys.argv[1:])
