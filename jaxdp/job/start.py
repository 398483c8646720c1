"""What a run says of itself before its first update: to people, to its directory, and what had better be changed."""

import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from jaxdp import rundir
from jaxdp.analysis import memory
from jaxdp.assemble.identity import NOT_COMPARABLE
from jaxdp.config import Config
from jaxdp.distributed import gpus
from jaxdp.distributed.context import Context
from jaxdp.metrics.console import Console
from jaxdp.metrics.jsonl import JsonLines
from jaxdp.metrics.numbers import size
from jaxdp.metrics.writer import Many, Writer
from jaxdp.metrics.writers import make_writers
from jaxdp.report.writer import Reports
from jaxdp.targets import OF_SCRIPT
from jaxdp.training.run import Run

EMPTY, IDLE = 0.05, 0.1  # of the places of a batch, of the devices' time: more is worth a warning
TREES = {"params": "parameters", "grads": "gradients", "opt_state": "optimizer", "model_state": "model state"}


def start_writer(directory: pathlib.Path, config: Config, context: Context, run: Run, layout: dict[str, Any]) -> Writer:
    """Writes config.yaml and env.json, opens the writers, and says what begins; on root. layout: see `layout_of`."""
    devices = run.strategy.devices
    rundir.write_config(directory, dataclasses.asdict(config))
    rundir.write_env(
        directory,
        {
            "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
            "topology": {
                "processes": context.size,
                "local_processes": context.local_size,
                "hosts": list(context.hosts),
                "pids": list(context.pids),
            },
            "launcher": context.launcher,
            "backend": config.parallel.backend,
        },
    )
    facts = described(run, config, context, directory, layout)
    console = Console(run.steps, run.start, context.launcher == "none", {"title": directory.name, **facts})
    run.checkpoints.events.tell = console.happened
    console.advised = config.data.on_device  # which is what it would advise
    writer = Many(
        [
            JsonLines(directory / "metrics.jsonl", run.start, run.evaluated),
            console,
            Reports(directory),
            *make_writers(config.log.writers, directory, run.start, dataclasses.asdict(config)),
        ]
    )
    if console.panel is None:
        width = max(map(len, facts))
        writer.say("\n".join(f"{name:{width}}  {text}" for name, text in facts.items()))
    for text in advice(run, config):
        writer.say(f"warning: {text}")
    return writer


def described(
    run: Run, config: Config, context: Context, directory: pathlib.Path, layout: dict[str, Any]
) -> dict[str, str]:
    """The facts of a run, by name, each in a line."""
    devices, parallel, order, own = run.strategy.devices, config.parallel, run.train.cursor, config.optimizer
    evaluates = f"; evaluates on {len(run.eval.dataset):,}" if run.eval else ""
    hosts = f" on {len(set(context.hosts))} hosts" if len(set(context.hosts)) > 1 else ""
    rate = (
        f"{own.target}, of the script"
        if own.target.startswith(f"{OF_SCRIPT} ")
        else f"{own.target}, lr {own.lr:g} {own.schedule}"
    )
    together = f", {run.steps_per_call} a call" if run.steps_per_call > 1 else ""
    return {
        "run": f"{f'goes on after step {run.start}' if run.start else 'starts'} in {directory}",
        "model": f"{config.model.target}, {layout['parameters']:,} parameters",
        "data": f"{config.data.target}, {len(run.train.dataset):,} examples, {order.steps_per_epoch:,} updates an epoch"
        f"{evaluates}",
        "batch": f"{config.batch_size:,} examples in {config.microbatches} microbatches of "
        f"{order.examples_per_microbatch:,}",
        "optimizer": f"{rate}, {run.steps:,} updates{together}",
        "devices": f"{len(devices)} x {devices[0].device_kind} in {context.size} "
        f"process{'es' * (context.size > 1)}{hosts} ({context.launcher})",
        "layout": f"{parallel.backend}, zero {parallel.zero}{split(run, config)}; reduction {parallel.reduction}",
        "memory": memory_line(layout),
    }


def split(run: Run, config: Config) -> str:
    """How much of the state is split, where it should be."""
    share = run.strategy.share()
    if run.strategy.parts < 2 or not config.parallel.zero:
        return ""
    whole = f", {share.whole} leaves that do not divide stay whole" if share.whole else ""
    return f": {share.split_bytes / max(share.total_bytes, 1):.1%} of the state split in {run.strategy.parts}{whole}"


def memory_line(layout: dict[str, Any]) -> str:
    """Return the bytes of a device by tree; layout.json has activations, once the program is compiled."""
    sizes = {TREES[name]: held for name, held in layout["bytes_per_device"].items() if name in TREES and held}
    total = sum(sizes.values())
    each = ", ".join(f"{name} {size(held)}" for name, held in sizes.items())
    return f"{size(total)} a device, without activations: {each}"


def advice(run: Run, config: Config) -> list[str]:
    """What wastes the devices, and what to set instead."""
    found = []
    devices, slots = run.strategy.table.shape
    batch, pieces, places = config.batch_size, config.microbatches, run.train.cursor.examples_per_microbatch
    empty = 1 - batch / (pieces * places)
    if empty > EMPTY:
        found.append(
            f"batch_size: {batch} leaves {pieces * places - batch} of {pieces * places} places of {pieces} "
            f"microbatches empty; {pieces * places} would fill them (this changes the numbers)"
        )
    if batch > (size := len(run.train.dataset)):
        found.append(
            f"batch_size: {batch} is beyond the {size} examples of the data: every update takes all of them, and "
            f"{batch - size} places are padding; make it {size} or smaller"
        )
    opt = config.optimizer
    horizon = min(run.steps, opt.schedule_steps or run.steps)
    if not opt.target.startswith(f"{OF_SCRIPT} ") and opt.warmup_steps > horizon:
        end = "the run ends" if horizon == run.steps else "optimizer.schedule_steps ends the schedule"
        found.append(
            f"optimizer.warmup_steps: {opt.warmup_steps}, but {end} after {horizon} updates: the warm-up is cut off "
            f"there, at {horizon / opt.warmup_steps:.0%} of lr; make it shorter"
        )
    idle = 1 - pieces / (devices * slots)
    if idle > IDLE:
        found.append(
            f"microbatches: {pieces} over {devices} devices are up to {slots} for one and fewer for others, which wait "
            f"{idle:.0%} of the time; {devices * slots} would be equal shares (this changes the numbers)"
        )
    if run.strategy.devices[0].platform == "cpu" and gpus.count() and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        found.append("there is a GPU, but JAX runs on the CPU; pip install 'jaxdp-trainer[cuda12]', or: jaxdp doctor")
    for key, text in run.meta.get("fingerprints", {}).items():
        if text.startswith(NOT_COMPARABLE):
            found.append(
                f"{key}: it cannot be compared with another ({text.removeprefix(NOT_COMPARABLE)}), so that this run is "
                "resumed with resume={'force': True} only; a dotted path, such as 'module.name', can be"
            )
    return found


def layout_of(run: Run, config: Config) -> dict[str, Any]:
    """What a device holds of the run, for layout.json."""
    strategy, order = run.strategy, run.train.cursor
    first = run.train.dataset.read(np.zeros(1, np.int64))
    places = (config.microbatches, order.examples_per_microbatch)
    batch = {name: jax.ShapeDtypeStruct((*places, *x.shape[1:]), x.dtype) for name, x in first.items()}
    batch.setdefault("mask", jax.ShapeDtypeStruct(places, np.dtype(bool)))
    split = config.parallel.zero > 1 and config.parallel.gradient_buffer == "sharded"
    sizes = memory.bytes_by_tree(strategy, run.step, batch, split)
    devices, slots = strategy.table.shape
    return {
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(strategy.shapes.params)),
        "devices": devices,
        "parts": strategy.parts,
        "slots": slots,
        "share": strategy.share()._asdict(),
        "bytes_per_device": {name: round(held) for name, held in sizes.items()},
        "program": None,
    }
