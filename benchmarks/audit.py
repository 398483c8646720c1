"""What the audit finds, what it names wrongly, and what it costs.

    python -m benchmarks.audit flips [--processes 4] [--flips 200] [--every 5] [--key value ...]
    python -m benchmarks.audit alarms [--updates 20000] [--every 1] [--config ...] [--key value ...]
    python -m benchmarks.audit cost [--config configs/gpt_3m.yaml] [--updates 60] [--key value ...]

`flips` injects single-bit flips (random kind, device, leaf, element, bit and update) one after the
other, on 4 devices of one process, or of 4 processes with `--processes 4`; after each, the state is
restored. A flip of a gradient or a product lasts until the next audit. `alarms` counts devices that
are named in an undisturbed run. `cost` measures the seconds of an audit and of an update. Other
arguments go to the config."""

import argparse
import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks import job
from jaxdp.extras import Extra
from jaxdp.train.observer import Observer

KINDS = ("grads", "output", "params", "opt_state")


def faults(count: int, every: int, seed: int) -> list[dict]:
    """One flip for each interval between two audits."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        kind = draw.choice(KINDS)
        repeat = kind in ("grads", "output")
        found.append(
            {
                "target": kind,
                "device": draw.randrange(4),
                "step": i * every + draw.randint(2, every),
                "until": (i + 1) * every + 1,
                "leaf": draw.randrange(64),
                "index": draw.randrange(1 << 20),
                "bit": draw.randrange(32),
                "repeat": repeat,
            }
        )
    return found


class Given(Extra):
    """An audit that is timed, between observers that were made before."""

    def __init__(self, config, before, after):
        super().__init__(config)
        self.given, self.seconds = (before, after), []

    def observers(self, training):
        from jaxdp.audit.auditor import Audit

        audit = Audit(training, self.config.audit.every, self.config.audit.action)
        setattr(audit, "check", self.timed(audit, audit.check))  # noqa: B010  # for mypy
        before, after = self.given
        return [*before, audit, *after]

    def timed(self, audit, check):
        def call():
            import jax

            # The time of updates that were sent before does not count.
            jax.block_until_ready(audit.progress.state)
            began = time.perf_counter()
            check()
            self.seconds.append(time.perf_counter() - began)

        return call


class Times(Observer):
    """The time after each update."""

    def __init__(self):
        self.found = []

    def after(self, updates, state, metrics):
        self.found.append(time.perf_counter())


def params_of(run, progress) -> str:
    """A digest of the parameters on the first device of this process."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves(run.strategy.export(progress.state).params)
    return hashlib.sha256(
        b"".join(np.asarray(x.addressable_shards[0].data).tobytes() for x in leaves)
    ).hexdigest()


class Restored(Observer):
    """Restores the state of the first update, one update after each audit: a fault that repeats
    ends before.
    """

    first: Any = None  # a TrainState, once there is one

    def __init__(self, every: int):
        self.every = every
        self.digests: list[str] = []

    def start(self, run, progress):
        self.run, self.progress = run, progress

    def after(self, updates, state, metrics):
        step = self.progress.step
        if step % self.every == 0 and self.first is not None:
            self.digests.append(params_of(self.run, self.progress))
        elif step % self.every == 1 and self.first is not None:
            self.restore()

    def restore(self) -> None:
        import jax
        import jax.numpy as jnp

        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        strategy, progress = self.run.strategy, self.progress
        step = strategy.export(progress.state).step
        progress.state = strategy.adopt(copy(self.first.replace(step=step)))


class Saved(Observer):
    """Saves the state that is restored, before the first fault."""

    def __init__(self, restored: Restored):
        self.restored = restored

    def start(self, run, progress):
        self.restored.start(run, progress)

    def after(self, updates, state, metrics):
        restored = self.restored
        if restored.first is None:
            restored.first = restored.run.strategy.export(state)
            restored.restore()  # to a copy: the next update overwrites it


def worker(args: argparse.Namespace, more: list[str]) -> None:
    """Train with an audit, and write what it named and how long it took."""
    from jaxdp.cli import load
    from jaxdp.config.validation import resolve
    from jaxdp.exact import flags
    from jaxdp.metrics.jsonl import NoEvents
    from jaxdp.parallel.placement import open_collectives
    from jaxdp.process import context as distributed
    from jaxdp.run.build import make_run
    from jaxdp.run.callbacks import Callbacks
    from jaxdp.run.driver import Training
    from jaxdp.train.run import Progress
    from tests.audit.planted_faults import Fault, PlantedFaults

    flags.set_flags()
    context = distributed.init()
    steps = args.updates if args.mode != "flips" else args.flips * args.every
    words = ["--config", args.config, "--steps", str(steps), "--audit.every", str(args.every)]
    config, *_ = load(
        [*words, "--parallel.reduction", "exact", "--optimizer.schedule", "constant", *more]
    )
    config = resolve(config)
    named: list[dict] = []

    class Log(NoEvents):
        def note(self, kind, step=None, **facts):
            if kind in ("audit", "audit_failed"):
                named.append({"kind": kind, "step": step, **facts})

    folder = pathlib.Path(args.folder)
    run = make_run(config, folder, context)
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, eval={}),
        options=dataclasses.replace(run.options, log_every=10**9),
    )
    run.log.events = Log()
    wanted = (
        faults(args.flips, args.every, args.seed) if args.mode == "flips" and args.seed >= 0 else []
    )
    callbacks = Callbacks([PlantedFaults([Fault("flip", **fault) for fault in wanted])], context)
    run = callbacks.change_step(run, progress := Progress())
    training = Training(run, progress, callbacks)
    after = [Restored(args.every)] if args.mode == "flips" else []
    open_collectives(context)
    times = Times()
    timed = Given(config, [*map(Saved, after)], [*after, times])
    training.extras = [timed]
    training.train()
    if context.is_root:
        gaps = [b - a for a, b in itertools.pairwise(times.found)]
        digests = [digest for restored in after for digest in restored.digests]
        result = {"named": named, "audits": timed.seconds, "updates": gaps, "digests": digests}
        (folder / "result.json").write_text(json.dumps(result))
    distributed.shutdown()


def measured(args: argparse.Namespace, more: list[str], devices: int) -> dict:
    """What `worker` writes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.audit", args.mode, "--folder", folder]
        for name in ("flips", "every", "seed", "updates", "config"):
            words += [f"--{name}", str(getattr(args, name))]
        launch = (
            [sys.executable, "-m", "jaxdp", "launch", "-n", str(args.processes)]
            if args.processes > 1
            else []
        )
        flags = f"--xla_force_host_platform_device_count={devices}"
        job.call([*launch, *words, *more], job.environment(XLA_FLAGS=flags), job.ROOT)
        return json.loads((pathlib.Path(folder) / "result.json").read_text())


def flips(args: argparse.Namespace, more: list[str]) -> dict:
    counts: collections.Counter = collections.Counter()
    total, args.flips, args.seed = args.flips, args.part, -1
    undisturbed = measured(args, more, 4 if args.processes == 1 else 1)["digests"]
    for part in range(-(-total // args.part)):
        args.seed = part
        found = measured(args, more, 4 if args.processes == 1 else 1)
        for i, fault in enumerate(faults(args.part, args.every, part)):
            interval = range(i * args.every + 1, (i + 1) * args.every + 1)
            devices = {
                e["device"]
                for e in found["named"]
                if e["kind"] == "audit_failed" and e["step"] in interval
            }
            verdict = (
                "right" if devices == {fault["device"]} else "wrong" if devices else "not named"
            )
            if verdict == "not named":
                verdict += ", parameters " + (
                    "as without" if found["digests"][i] == undisturbed[i] else "changed"
                )
            if verdict != "right":
                print(
                    json.dumps([fault, [e for e in found["named"] if e["step"] in interval]]),
                    file=sys.stderr,
                )
            counts[f"{fault['target']}: {verdict}"] += 1
        print(json.dumps(counts), flush=True)
    return dict(sorted(counts.items()))


def alarms(args: argparse.Namespace, more: list[str]) -> dict:
    found = measured(args, more, 4 if args.processes == 1 else 1)
    return {"updates": args.updates, "audits": len(found["audits"]), "named": found["named"]}


def cost(args: argparse.Namespace, more: list[str]) -> dict:
    found = measured(args, more, 4 if args.processes == 1 else 1)
    audit = statistics.median(found["audits"][1:])
    update = statistics.median(found["updates"][1:])
    share = audit / update / 100
    return {
        "audit_ms": round(1e3 * audit, 2),
        "update_ms": round(1e3 * update, 2),
        "share_at_100": round(share, 5),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("flips", "alarms", "cost"))
    defaults = {
        "config": "configs/digits.yaml",
        "processes": 1,
        "flips": 200,
        "part": 25,
        "every": 5,
        "updates": 200,
    }
    for name, default in (defaults | {"seed": 0, "folder": ""}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args, more = parser.parse_known_args(argv)
    if args.folder:
        worker(args, more)
        return
    result = {"flips": flips, "alarms": alarms, "cost": cost}[args.mode](args, more)
    print(json.dumps({**{k: v for k, v in vars(args).items() if k != "folder"}, **result}))


if __name__ == "__main__":
    main(sys.argv[1:])
