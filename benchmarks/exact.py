"""What the same bits on any number of devices cost: the exact reductions against bucket, side by
side.

    python -m benchmarks.exact --config configs/gpt_3m.yaml [--processes 2] [--devices 1] [--group 1] [--key value ...]

Each way to train is a job of its own, since exact mode sets JAX's environment; all wait while one
of them makes a few updates, in turn. Prints the medians and, of one process, the bytes that a
device sends per update, as the compiled programs say. processes: over mpirun, or over another line
of --launcher; devices: simulated, of each process; ways: some of `WAYS`, separated by commas (by
default without xla). Other arguments go to the config."""

import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any, Literal

WAYS: dict[str, Literal["auto", "vmap", "scan"]] = {
    "bucket": "vmap",
    "bucket loop": "scan",
    "exact": "auto",
    "exact16": "auto",
    "exact8": "auto",
    "xla": "vmap",
}
DEFAULT = [way for way in WAYS if way != "xla"]
UPDATES = 4


def work(way: str, argv: list[str]) -> None:
    """One job: compiles, then makes a few updates for every line on standard input, and prints how
    long they took.
    """
    from jaxdp.cli import load
    from jaxdp.exact import flags
    from jaxdp.process import environment

    config, *_ = load(argv)
    reduction = way.partition(" ")[0]
    group = config.parallel.exact_group if reduction.startswith("exact") else 1
    asked = dataclasses.replace(
        config.parallel, reduction=reduction, accumulate=WAYS[way], exact_group=group
    )
    config = dataclasses.replace(config, parallel=asked)
    if asked.in_groups:
        flags.set_flags()
    environment.enough_threads()

    import jax

    import jaxdp
    from jaxdp.data.prefetch import read_batches
    from jaxdp.plan.hlo import collectives
    from jaxdp.run.components import (
        make_parts,
        make_strategy,
        make_the_step,
        set_jax,
        state_maker,
    )

    context = jaxdp.init()
    set_jax(config)
    parts = make_parts(config)
    strategy = make_strategy(config, parts, state_maker(config, parts), jax.devices())
    program, state = strategy.compile(make_the_step(config, parts)), strategy.init()
    batch = strategy.shard_batch(
        read_batches(parts.dataset, parts.order, [0], strategy.local_microbatches)
    )
    sent = 0.0
    if context.size == 1:
        lowered = program.lowered(state, batch)
        for c in collectives(lowered.compile().as_text(), lowered.as_text()):
            sent += c.wire * (c.group_size - 1) / c.group_size  # by ring algorithms
    state, metrics = program.update(state, batch)
    found = {
        "sent": sent,
        "loss": float(metrics["loss"]),
        "devices": len(jax.devices()),
        "jax": jax.__version__,
    }
    if context.is_root:
        print(json.dumps(found), flush=True)
    while True:
        line = sys.stdin.readline().strip() if context.is_root else ""
        if context.exchange("go", line, timeout=3600)[context.root_rank] != "go":
            break
        began = time.perf_counter()
        for _ in range(UPDATES):
            state, metrics = program.update(state, batch)
        jax.block_until_ready((state, metrics))
        if context.is_root:
            print(json.dumps(1e3 * (time.perf_counter() - began) / UPDATES), flush=True)


def take(argv: list[str], name: str, default: Any) -> Any:
    """The value of --name, taken out of the arguments."""
    if f"--{name}" not in argv:
        return default
    i = argv.index(f"--{name}")
    _, value = argv.pop(i), argv.pop(i)
    return type(default)(value)


def main(argv: list[str]) -> None:
    from benchmarks import job  # `work` runs without it, on whatever host

    processes, devices, group = (
        take(argv, "processes", 1),
        take(argv, "devices", 1),
        take(argv, "group", 1),
    )
    launcher = shlex.split(take(argv, "launcher", shlex.join(job.mpirun(processes))))
    ways, repeats = take(argv, "ways", ",".join(DEFAULT)).split(","), take(argv, "repeats", 9)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    env = job.environment(XLA_FLAGS=flags, JAXDP_TIMEOUT="3600")
    jobs: dict[str, subprocess.Popen] = {}
    found = {}
    for way in ways:
        launch = launcher if processes > 1 else []
        more = ["--parallel.reduction", "exact", "--parallel.exact_group", str(group)]
        command = [*launch, sys.executable, __file__, "work", way, *argv, *more]
        jobs[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        found[way] = answer(jobs[way])
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in ways[:: 1 if repeat % 2 else -1]:
            tell(jobs[way], "go")
            times[way].append(answer(jobs[way]))
    for process in jobs.values():
        tell(process, "stop")
    for process in jobs.values():
        process.communicate()
    median = {way: statistics.median(t) for way, t in times.items()}
    result = {
        "arguments": " ".join(argv),
        "processes": processes,
        "devices": found[ways[0]]["devices"],
        "sent_bytes": {way: round(f["sent"]) for way, f in found.items()},
        "sent_ratio": {
            way: round(f["sent"] / found["bucket"]["sent"], 4)
            for way, f in found.items()
            if f["sent"]
        },
        "loss": {way: f["loss"] for way, f in found.items()},
        "median_ms": {way: round(m, 2) for way, m in median.items()},
        "updates_per_s": {way: round(1e3 / m, 2) for way, m in median.items()},
        "over_bucket": {way: round(median["bucket"] / m, 3) for way, m in median.items()},
        "jax": found[ways[0]]["jax"],
    }
    print(json.dumps(result))


def tell(job: subprocess.Popen, line: str) -> None:
    assert job.stdin is not None
    job.stdin.write(f"{line}\n")
    job.stdin.flush()


def answer(job: subprocess.Popen) -> Any:
    """The next line of JSON; Gloo also prints."""
    assert job.stdout is not None
    for line in job.stdout:
        if line.lstrip("-").startswith(("{", *"0123456789")):
            return json.loads(line)
    raise SystemExit(f"a job ended with code {job.wait()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
