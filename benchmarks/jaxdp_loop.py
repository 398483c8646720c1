"""jaxdp as `jaxdp train` runs it: the real loop, with its watchdog, its reader and its metrics
file.

python -m benchmarks.jaxdp_loop FOLDER --config configs/gpt_3m.yaml [--key value ...]
"""

import dataclasses
import pathlib
import sys
from typing import Any

from benchmarks import contender
from jaxdp.cli import load, set_environment
from jaxdp.metrics.writer import Many, Writer
from jaxdp.process import environment


class Losses(Writer):
    """A writer that keeps the loss of every train record."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["split"] == "train":
            self.found.append(record["loss"])


def main(folder: str, argv: list[str]) -> None:
    environment.malloc()  # as the command does
    config, *_ = load(argv)
    set_environment(config)
    import jax

    import jaxdp
    from jaxdp.metrics.jsonl import JsonLines
    from jaxdp.process.monitor import RunMonitor
    from jaxdp.run.build import make_run
    from jaxdp.run.driver import Training
    from jaxdp.train.loop import fit
    from jaxdp.train.run import Progress

    context = jaxdp.init()
    directory = pathlib.Path(folder)
    if context.is_root:
        directory.mkdir(parents=True, exist_ok=True)
    run = make_run(config, directory, context)
    watch = RunMonitor(
        context, directory, config.watchdog.step_timeout, config.watchdog.straggler_factor
    )
    kept = Losses()
    lines = JsonLines(directory / "metrics.jsonl") if context.is_root else Writer()
    run.log.writer = Many([lines, kept])
    at = Progress(run.strategy.init())
    training = Training(run, at, watch=watch)
    training.program = run.strategy.compile(run.step)
    jax.block_until_ready(at.state)

    def advance(updates: int, **more: Any) -> None:
        options = dataclasses.replace(run.options, steps=at.step + updates, **more)
        training.run = dataclasses.replace(run, options=options)
        vars(training).pop("observers", None)  # made again, with these options
        fit(training.run, training.program, at, training.observers, training)
        jax.block_until_ready(at.state)

    def losses(updates: int) -> list[float]:
        kept.found.clear()
        advance(updates, log_every=1)
        return list(kept.found)

    def memory() -> dict[str, float]:
        device = run.strategy.devices[0]
        state = sum(
            s.data.nbytes
            for x in jax.tree.leaves(at.state)
            for s in x.addressable_shards
            if s.device == device
        )
        return {"state_bytes": state, "peak_bytes": peak()}

    def peak() -> float:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    contender.serve(losses, advance, memory)
    watch.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
