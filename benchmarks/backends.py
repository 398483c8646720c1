"""pmap against pjit without ZeRO: the same updates in one process, turn by turn.

    python -m benchmarks.backends [--repeats 16] [--tiny] [--key value ...]

Each turn is some updates of the real loop's program on one batch, ABBA; a ratio is that of
neighbouring turns. Prints JSON: the median ratio of each config with its quartiles, and the largest
difference from 1. Other arguments go to the config.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxdp
from benchmarks.harness import quartiles
from benchmarks.job import ROOT
from jaxdp.cli import load
from jaxdp.process import environment
from jaxdp.run.build import make_run

# config: (updates a turn, what differs)
CASES: dict[str, tuple[int, list[str]]] = {
    "benchmarks/configs/digits_mlp.yaml": (400, []),
    "configs/cifar10_resnet9.yaml": (
        40,
        ["--data.target", "benchmarks.data.Images", "--data.args.root", "random"],
    ),
    "configs/gpt_3m.yaml": (2, []),
}


def turn_of(
    config: str, backend: str, more: list[str], updates: int, folder: str
) -> Callable[[], float]:
    """A function that makes so many updates, and gives the seconds that they took."""
    keys = [
        "--parallel.backend",
        backend,
        "--microbatches",
        "1",
        "--epochs",
        "null",
        "--steps",
        "100",
        *more,
    ]
    run = make_run(
        load(["--config", str(ROOT / config), *keys])[0], pathlib.Path(folder), jaxdp.init()
    )
    program, state = run.strategy.compile(run.step), run.strategy.init()
    with run.data.train.batches(0, 1, run.strategy) as batches:
        _, batch = next(iter(batches))

    def turn() -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(updates):
            state, _ = program.update(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - began

    return turn


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="the first config, and few updates")
    options, words = parser.parse_known_args(argv)
    environment.malloc()
    found: dict[str, dict[str, Any]] = {}
    for config, (updates, more) in list(CASES.items())[: 1 if options.tiny else None]:
        with tempfile.TemporaryDirectory() as folder:
            turns = {
                name: turn_of(config, name, [*more, *words], 2 if options.tiny else updates, folder)
                for name in ("pmap", "pjit")
            }
            for turn in turns.values():  # compiles
                turn()
            ratios = []
            for i in range(options.repeats):
                order = ["pmap", "pjit"][:: -1 if i % 2 else 1]
                took = {name: turns[name]() for name in order}
                ratios.append(took["pmap"] / took["pjit"])
        found[config] = {
            "pmap by pjit": statistics.median(ratios),
            "quartiles": list(quartiles(ratios)),
        }
    difference = max(abs(1 - own["pmap by pjit"]) for own in found.values())
    print(json.dumps({"configs": found, "difference": difference}))


if __name__ == "__main__":
    main(sys.argv[1:])
