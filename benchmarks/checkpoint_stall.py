"""How long an asynchronous save holds up the loop, against a synchronous one, which ends when the
state is durable.

    python benchmarks/checkpoint_stall.py [--millions 50] [--repeats 5] [--width 1000] [--directory FOLDER]

Two states: the parameters alone, and with Adam's two averages, three times as many numbers. In one
process, in turn: `save` and wait until it is durable; `save`, and updates meanwhile, which are
donated the arrays that are being written, as in the loop. A save may make the first update after it
wait, or copy: what that takes longer than an update beside no save is part of the stall. The other
updates while a save is written are compared with as many beside no save. Prints JSON: medians, and
least and most."""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxdp
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.train.state import TrainState

META: dict[str, Any] = {"config": {}}
NAMES = ("sync", "call", "first update", "until durable", "alone", "beside a save")


def make_state(millions: int, adam: bool, width: int) -> TrainState:
    """Random numbers, which do not compress, in arrays of 5 million for the width of 1,000."""

    def numbers(seed: int) -> dict[str, jax.Array]:
        shape = (5 * width, width)
        return {
            f"w{i}": jax.random.normal(jax.random.key(100 * seed + i), shape)
            for i in range(max(1, millions // 5))
        }

    params = numbers(0)
    count = jnp.zeros((), jnp.int32)
    opt = (optax.ScaleByAdamState(count, numbers(1), numbers(2)),) if adam else ()
    return jax.block_until_ready(
        TrainState(step=jnp.zeros((), jnp.int32), params=params, model_state={}, opt_state=opt)
    )


@jax.jit
def work(x: jax.Array) -> jax.Array:
    """A few matrix products, as long as a small update."""
    for _ in range(3):
        x = jnp.tanh(x @ x)
    return x


def make_update():
    def update(state: TrainState) -> TrainState:
        def floats(x):
            return x * 0.999 if jnp.issubdtype(x.dtype, jnp.floating) else x + 1

        return jax.tree.map(floats, state)

    return jax.jit(update, donate_argnums=0)


def timed(f, *args) -> float:
    began = time.perf_counter()
    f(*args)
    return time.perf_counter() - began


def measure(millions: int, adam: bool, repeats: int, directory: pathlib.Path, width: int) -> dict:
    state, update, x = make_state(millions, adam, width), make_update(), jnp.ones((width, width))
    checkpoints = Checkpoints(directory, keep=1)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    step = 0

    def save() -> None:
        nonlocal step
        step += 1
        checkpoints.save(step, state, META, lambda text: None)

    def save_and_wait() -> None:
        save()
        if failure := checkpoints.wait():
            raise SystemExit(failure)

    def make_one() -> float:
        nonlocal state
        began = time.perf_counter()
        state = update(state)
        jax.block_until_ready((state, work(x)))
        return time.perf_counter() - began

    for _ in range(2):
        make_one()
    save_and_wait()
    for repeat in range(repeats):
        for kind in ("sync", "async")[:: 1 if repeat % 2 else -1]:
            if kind == "sync":
                times["sync"].append(timed(save_and_wait))
                continue
            began = time.perf_counter()
            save()
            times["call"].append(time.perf_counter() - began)
            during = [make_one()]
            while checkpoints._thread is not None and checkpoints._thread.is_alive():
                during.append(make_one())
            if failure := checkpoints.wait():
                raise SystemExit(failure)
            times["until durable"].append(time.perf_counter() - began)
            times["first update"].append(during[0])
            times["beside a save"] += during[1:]
            times["alone"] += [make_one() for _ in during]

    def of(name):
        return {
            "median": round(1e3 * statistics.median(times[name])),
            "least": round(1e3 * min(times[name])),
            "most": round(1e3 * max(times[name])),
        }

    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    alone, sync = statistics.median(times["alone"]), statistics.median(times["sync"])
    stall = statistics.median(
        a + max(0.0, b - alone) for a, b in zip(times["call"], times["first update"])
    )
    return {
        "megabytes": round(size / 1e6, 1),
        "repeats": repeats,
        "ms": {name: of(name) for name in times},
        "stall_ms": round(1e3 * stall),
        "stall_share": round(stall / sync, 4),
        "slowdown": round(statistics.median(times["beside a save"]) / alone, 2),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--width", type=int, default=1000, help="of the arrays, and of the products of an update"
    )
    parser.add_argument(
        "--directory",
        type=pathlib.Path,
        default=None,
        help="where to; left out, a temporary folder",
    )
    args = parser.parse_args(argv)
    jaxdp.init()
    found = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for name, adam in (("parameters", False), ("parameters and Adam's averages", True)):
            found[name] = measure(
                args.millions, adam, args.repeats, pathlib.Path(folder) / f"{adam}", args.width
            )
    device = jax.devices()[0].device_kind
    print(
        json.dumps(
            {"device": device, "jax": jax.__version__, "millions": args.millions, "states": found}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
