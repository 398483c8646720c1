"""Faults on purpose: a callback that kills or slows a process, or flips a bit, in a real run.

    --callbacks '[{target: tests.audit.planted_faults.PlantedFaults, args: {faults: "FAULTS"}}]'

FAULTS are separated by commas, as in "flip:grads:rank=1:step=50:bit=20:repeat=true,kill:rank=2":

    kill           the process is killed after update `step`
    slow           it is stopped for a share of each 10 ms: all its work takes `factor` times as long
    flip:grads     flip a bit of a gradient on one device in update `step`
    flip:output    flip a bit in the output of a matrix product or convolution
    flip:params    flip a bit in one device's copy of the parameters, after update `step`
    flip:opt_state, flip:snapshot    the same in the optimizer state, or in a snapshot in memory

`rank` selects the first device of a process, `device` one of all devices; `leaf`, `index` and
`bit` what to flip. With `repeat=true` it occurs after (in) all later updates, until `until`. An
audit computes with the flips of the next update.
"""

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit.program import mark_replaced, visit_products
from jaxdp.elastic.snapshots import Snapshots
from jaxdp.errors import UsageError
from jaxdp.exact.rounding import fusion_barrier
from jaxdp.split import DATA, data_axes
from jaxdp.train.observer import Observer
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import Batch, Sums, TrainState
from jaxdp.train.step import Replica, Step

TARGET = "tests.audit.planted_faults.PlantedFaults"
TARGETS = {
    "kill": ("",),
    "slow": ("",),
    "flip": ("grads", "output", "params", "opt_state", "snapshot"),
}
OPTIONS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("rank", "device", "step", "until", "leaf", "index", "bit"), int),
    "repeat": {"true": True, "false": False}.__getitem__,
    "factor": float,
}
PAUSES = """import os, signal, sys, time
pid, share = int(sys.argv[1]), 1 - 1 / float(sys.argv[2])
while os.getppid() == pid:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.01 * share)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.01 * (1 - share))
"""


@dataclasses.dataclass
class Fault:
    """A fault. step: the update after which it occurs (a flip of `grads` or `output`: during
    which), from then on until update `until` if `repeat`. device: among those of all processes;
    else the first one of `rank`.

    leaf, index, bit: what to flip, each modulo the number there is. factor: of the time of all
    computation."""

    kind: str
    target: str = ""
    rank: int = 0
    device: int = -1
    step: int = 1
    until: int = 1 << 30
    leaf: int = 0
    index: int = 0
    bit: int = 20
    repeat: bool = False
    factor: float = 1.3
    mine: bool | None = None  # it is of this process, whatever rank this has later
    local: int = 0  # its device among those of its process
    done: bool = False


def parse(text: str) -> list[Fault]:
    """Return the faults that a text describes. Raises UsageError."""
    return [_parse(entry) for entry in text.split(",")] if text else []


def _parse(text: str) -> Fault:
    kind, *words = text.strip().split(":")
    target = words.pop(0) if words and "=" not in words[0] else ""
    try:
        values = {name: OPTIONS[name](value) for name, value in (word.split("=") for word in words)}
        if target in TARGETS[kind] and all(
            value >= (name == "factor") for name, value in values.items()
        ):
            return Fault(kind, target, **values)
    except (KeyError, ValueError):
        pass
    flips = f"flip with one of {', '.join(TARGETS['flip'])}"
    raise UsageError(
        f"planted fault: {text!r} is not a fault: give kill, slow, or {flips}, then {', '.join(OPTIONS)}, as in "
        "flip:grads:rank=1:step=50:bit=20:repeat=true"
    )


@functools.cache
def of_this_process(text: str) -> list[Fault]:
    """Return the faults of a text, the same in all generations of an elastic job."""
    return parse(text)


def option(text: str) -> list[str]:
    """Return the words of a command line that plant faults; none for an empty text."""
    entry = {"target": TARGET, "args": {"faults": text}}
    return ["--callbacks", json.dumps([entry])] if text else []


class PlantedFaults(Observer):
    """The faults of a run. faults: a text, or a list for this run alone."""

    def __init__(self, faults: str | list[Fault]):
        self.faults = of_this_process(faults) if isinstance(faults, str) else faults

    def start(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress

    def change_step(self, run: Run, progress: Progress) -> Step:
        """Find the devices of the faults; return the step with the flips of gradients and products."""
        self._find_devices(run, progress.start)
        flips = [f for f in self.faults if f.target in ("grads", "output") and f.device >= 0]
        return with_flips(run.step, flips) if flips else run.step

    def _find_devices(self, run: Run, start: int) -> None:
        context, devices, faults = run.checkpoints.context, run.strategy.devices, self.faults

        def of(rank):
            return [i for i, d in enumerate(devices) if d.process_index == rank]

        for fault in faults:
            if fault.mine is None:  # in later generations of an elastic job the ranks are others
                if not start and (fault.rank >= context.size or fault.device >= len(devices)):
                    raise UsageError(
                        f"planted fault: rank {fault.rank}, device {fault.device}, but there are "
                        f"{context.size} ranks with {len(devices)} devices; count from 0",
                        rank=0,
                    )
                rank = (
                    devices[fault.device].process_index
                    if 0 <= fault.device < len(devices)
                    else fault.rank
                )
                fault.mine = context.rank == rank and (fault.repeat or start < fault.step)
                fault.local = of(rank).index(fault.device) if fault.device in of(rank) else 0
        texts = context.exchange(
            "faults", json.dumps([fault.local if fault.mine else None for fault in faults])
        )
        for i, fault in enumerate(faults):
            locals_ = {rank: json.loads(text)[i] for rank, text in enumerate(texts)}
            places = [of(rank)[local] for rank, local in locals_.items() if local is not None]
            fault.device = places[0] if places else -1

    def after(self, updates: range, state: TrainState, metrics: Any) -> None:
        """Do what is due after these updates. An audit of them comes later."""
        for fault in self.faults:
            if fault.mine and not fault.done and updates[-1] >= fault.step:
                fault.done = not fault.repeat or fault.kind == "slow"
                self._do(fault)

    def _do(self, fault: Fault) -> None:
        progress = self.progress
        if fault.kind == "kill":
            jax.block_until_ready(progress.state)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "slow":
            subprocess.Popen(
                [sys.executable, "-P", "-c", PAUSES, str(os.getpid()), str(fault.factor)]
            )
        elif fault.target in ("params", "opt_state"):
            device = self.run.strategy.devices[fault.device]
            flipped = flip_copy(getattr(progress.state, fault.target), fault, device)
            progress.state = progress.state.replace(**{fault.target: flipped})
        elif fault.target == "snapshot":
            # A run gives its snapshots to no callback; other objects may pretend to be any class.
            snapshots: Any = next((x for x in gc.get_objects() if type(x) is Snapshots), None)
            fault.done = snapshots is not None and snapshots.newest is not None
            if fault.done:
                arrays = next(iter(snapshots.newest.parts.values()))
                i = fault.leaf % len(arrays)
                arrays[i] = flipped_array(arrays[i], fault)


def with_flips(step: Step, faults: Sequence[Fault]) -> Step:
    """Return the step with flips in its gradients and products."""

    def grads(view: Any, batch: Batch, replica: Replica) -> Sums:
        def f(view, batch):
            return step.grads(view, batch, replica)

        if outputs := [fault for fault in faults if fault.target == "output"]:
            f = flip_products(f, outputs)
        sums = fusion_barrier(f(view, batch), view.step)
        leaves, treedef = jax.tree.flatten(sums.grads)
        for fault in faults:
            if fault.target == "grads":
                i = fault.leaf % len(leaves)
                leaves[i] = flip(leaves[i], fault, view.step)
        return sums._replace(grads=jax.tree.unflatten(treedef, leaves))

    return step._replace(grads=grads)


def all_axes() -> Any:
    """Return the axes of all devices inside a program, those of logical replicas too."""
    try:
        jax.lax.axis_size(("outer", DATA))
    except NameError:
        return data_axes()
    return ("outer", DATA)


def flip(x: jax.Array, fault: Fault, step: jax.Array) -> jax.Array:
    """Flip the fault's bit inside a program, if this is its device and update; `step`: of the
    updates before it.
    """
    axes = all_axes()
    if axes is None:  # a rehearsal
        return x
    now = (step + 1 >= fault.step) & (step + 1 <= (fault.until if fault.repeat else fault.step))
    size = 8 * x.dtype.itemsize
    kind = f"uint{size}"
    hit = (jax.lax.axis_index(axes) == fault.device) & now
    mask = jnp.where(hit, np.asarray(1 << fault.bit % size, kind), np.zeros((), kind))
    bits = jax.lax.bitcast_convert_type(x.reshape(-1), kind)
    i = fault.index % bits.size
    return jax.lax.bitcast_convert_type(bits.at[i].set(bits[i] ^ mask), x.dtype).reshape(x.shape)


def number_of_products(f: Callable, *args: Any) -> int:
    visited = visit_products(f, lambda _, x: (x, jnp.uint32(0)))
    return len(jax.eval_shape(visited, *args)[1])


def flip_products(f: Callable, faults: Sequence[Fault]) -> Callable:
    """Wrap f(view, ...): flip bits in the outputs of its products."""

    def run(view: Any, *args: Any) -> Any:
        count = number_of_products(f, view, *args)
        if not count:
            raise UsageError(
                "planted fault: flip:output, but the gradient has no product; use flip:grads"
            )

        def visit(number: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            for fault in faults:
                if fault.leaf % count == number:
                    x = mark_replaced(flip(fusion_barrier(x, view.step), fault, view.step))
            return x, jnp.uint32(0)

        return visit_products(f, visit)(view, *args)[0]

    return run


def flip_copy(tree: Any, fault: Fault, device: jax.Device) -> Any:
    """Flip the fault's bit in the copy, or the shard, that one device of this process has of a
    float leaf.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    i = floats[fault.leaf % len(floats)]
    x = leaves[i]
    parts = [
        jax.device_put(flipped_array(np.asarray(s.data), fault), device)
        if s.device == device
        else s.data
        for s in x.addressable_shards
    ]
    leaves[i] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    return jax.tree.unflatten(treedef, leaves)


def flipped_array(x: np.ndarray, fault: Fault) -> np.ndarray:
    copy = np.array(x)
    data = copy.reshape(-1).view(np.uint8)
    bit = fault.index % copy.size * 8 * copy.itemsize + fault.bit % (8 * copy.itemsize)
    data[bit // 8] ^= np.uint8(1 << bit % 8)
    return copy
