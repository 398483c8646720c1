"""Whether input keeps up: what CIFAR-10's pipeline gives without a step, what the step takes, how
long the loop waits.

    python -m benchmarks.feeding [--root FOLDER_OF_CIFAR10] [--updates 300] [--repeats 5] [--key value ...]

The pipeline: batches read and put on the device by the loop's own source, and augmented there.
Prints JSON. Other arguments go to the config.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax

import jaxdp
from benchmarks.job import ROOT
from jaxdp.cli import load
from jaxdp.data.cifar10 import CIFAR10
from jaxdp.metrics.writer import Writer
from jaxdp.run.build import make_run
from jaxdp.run.driver import Training
from jaxdp.train.loop import fit
from jaxdp.train.run import Progress


class Waits(Writer):
    """A writer that keeps what the records say of waiting for input."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def write(self, record: dict[str, Any]) -> None:
        if "input_wait" in record:
            self.found.append(record["input_wait"])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", default="random")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    options, more = parser.parse_known_args(argv)
    config, *_ = load(
        [
            *(
                "--config",
                str(ROOT / "configs/cifar10_resnet9.yaml"),
                "--data.target",
                "benchmarks.data.Images",
            ),
            *(
                "--data.args.root",
                options.root,
                "--data.args.augment",
                "true",
                "--microbatches",
                "1",
            ),
            *("--epochs", "null", "--steps", "100000", *more),
        ]
    )
    n, examples = options.updates, config.batch_size * options.updates
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(config, pathlib.Path(folder), jaxdp.init())
        at = Progress(run.strategy.init())
        training = Training(run, at)
        training.program = run.strategy.compile(run.step)
        dataset: Any = run.data.train.dataset
        assert isinstance(dataset, CIFAR10)

        def images(batch):
            return {"inputs": batch["inputs"].reshape(-1, *dataset.input_shape)}

        augment = jax.jit(lambda batch, key: dataset.transform(images(batch), key, True))
        key = jax.random.key(0)

        def fed() -> float:
            with run.data.train.batches(0, n, run.strategy) as batches:
                began = time.perf_counter()
                for _, batch in batches:
                    last = augment(batch, key)
                jax.block_until_ready(last)
                return examples / (time.perf_counter() - began)

        def trained() -> tuple[float, float]:
            waits: Any = Waits()
            options = dataclasses.replace(run.options, steps=at.step + n, log_every=10)
            training.run = dataclasses.replace(run, options=options)
            run.log.writer = waits
            began = time.perf_counter()
            vars(training).pop("observers", None)  # made again, with these options
            fit(training.run, training.program, at, training.observers, training)
            jax.block_until_ready(at.state)
            return examples / (time.perf_counter() - began), statistics.mean(waits.found)

        fed(), trained()
        rows = [(fed(), *trained()) for _ in range(options.repeats)]
    supply, demand, waiting = (statistics.median(column) for column in zip(*rows))
    print(
        json.dumps(
            {
                "pipeline_examples_per_s": supply,
                "training_examples_per_s": demand,
                "times": supply / demand,
                "waiting_share": waiting,
                "samples": rows,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
