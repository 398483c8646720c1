"""What the audit finds, what it names wrongly, and what it costs.

    python -m benchmarks.audit flips [--processes 4] [--flips 200] [--every 5] [--key value ...]
    python -m benchmarks.audit alarms [--updates 20000] [--every 1] [--config ...] [--key value ...]
    python -m benchmarks.audit slow [--repeats 20] [--updates 150] [--factor 1.3] [--cause stop] [--key value ...]
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
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import job
from jaxdp.extras import Extra

SLOW = [
    "--model.args.hidden",
    "[1024, 1536]",
    "--batch_size",
    "800",
    "--microbatches",
    "2",
    "--optimizer.target",
    "sgd",
]
SLOW += ["--log.every", "1", "--eval.every", "null"]
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
    """Checks that were made before."""

    def __init__(self, config, checks):
        super().__init__(config)
        self.checks = checks

    def observers(self, training):
        return [self.checks]


class Timed:
    """A check of the loop, with the seconds that it takes."""

    def __init__(self, check):
        self.inner, self.is_due, self.seconds = check, check.is_due, []

    def check(self, run, progress, batch):
        import jax

        jax.block_until_ready(
            progress.state
        )  # the time of updates that were sent before does not count
        began, args = time.perf_counter(), (run, progress, batch)
        self.inner.check(*args)
        self.seconds.append(time.perf_counter() - began)


def params_of(run, progress) -> str:
    """A digest of the parameters on the first device of this process."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves(run.strategy.export(progress.state).params)
    return hashlib.sha256(
        b"".join(np.asarray(x.addressable_shards[0].data).tobytes() for x in leaves)
    ).hexdigest()


class Restored:
    """Restores the state of the first update, one update after each audit: a fault that repeats
    ends before.
    """

    saved: Any = None  # a TrainState, once there is one

    def __init__(self, every: int):
        self.every = every
        self.digests: list[str] = []

    def is_due(self, run, progress, last=False) -> bool:
        return progress.step % self.every < 2 and self.saved is not None

    def check(self, run, progress, batch) -> None:
        if progress.step % self.every == 0:
            self.digests.append(params_of(run, progress))
        else:
            self.restore(run, progress)

    def restore(self, run, progress) -> None:
        import jax
        import jax.numpy as jnp

        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        step = run.strategy.export(progress.state).step
        progress.state = run.strategy.adopt(copy(self.saved.replace(step=step)))


class Saved:
    """Saves the state that is restored, before the first fault."""

    def __init__(self, restored: Restored):
        self.restored = restored

    def is_due(self, run, progress, last=False) -> bool:
        return self.restored.saved is None

    def check(self, run, progress, batch) -> None:
        self.restored.saved = run.strategy.export(progress.state)
        self.restored.restore(run, progress)  # to a copy: the next update overwrites it


def worker(args: argparse.Namespace, more: list[str]) -> None:
    """Train with an audit, and write what it named and how long it took."""
    from jaxdp.audit.checks import make_checks
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
    config = resolve(
        dataclasses.replace(config, watchdog=dataclasses.replace(config.watchdog, slow_factor=None))
    )
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
    checks = make_checks(training, config.audit.every, config.audit.action, None)
    [audit] = checks.checks
    timed = Timed(audit)
    after = [Restored(args.every)] if args.mode == "flips" else []
    open_collectives(context)
    updates: list[float] = []
    timer = Timed(audit)
    timer.is_due = lambda run, progress, last=False: updates.append(time.perf_counter())
    checks.checks = [*map(Saved, after), timed, *after, timer]
    training.extras = [Given(config, checks)]
    training.train()
    if context.is_root:
        gaps = [b - a for a, b in itertools.pairwise(updates)]
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


def slow(args: argparse.Namespace, more: list[str]) -> dict:
    """Two processes, each on a core; from half of the run on, rank 1 is slowed, or all are.

    cause: `stop` stops a process for a share of each 10 ms; `load` runs another program on its
    core; `all` stops both; `none` neither.
    """
    from tests.audit.planted_faults import option

    at = args.updates // 2
    ranks = {"stop": [1], "all": [0, 1]}.get(args.cause, [])
    fault = ",".join(f"slow:rank={rank}:factor={args.factor}:step={at}" for rank in ranks)
    counts: collections.Counter = collections.Counter()
    delays, times, factors = [], [], []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            pinned = [
                "sh",
                "-c",
                'exec taskset -c $JAXDP_PROCESS_ID "$0" "$@"',
                sys.executable,
                "-m",
                "jaxdp",
                "train",
            ]
            words = [
                "--config",
                args.config,
                "--steps",
                str(args.updates),
                "--run_dir",
                f"{folder}/run",
                *SLOW,
                *option(fault),
                *more,
            ]
            env = job.environment(XLA_FLAGS="")
            training = subprocess.Popen(
                [sys.executable, "-m", "jaxdp", "launch", "-n", "2", *pinned, *words],
                cwd=job.ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            metrics = pathlib.Path(folder) / "run/metrics.jsonl"
            if args.cause == "load":
                while training.poll() is None and steps_of(metrics) < at:
                    time.sleep(0.05)
                at_load = steps_of(metrics)
                load = subprocess.Popen(
                    ["taskset", "-c", "1", sys.executable, "-c", "while True: pass"]
                )
            assert training.wait() == 0
            if args.cause == "load":
                load.kill()
                load.wait()
            events = list(
                map(
                    json.loads, (pathlib.Path(folder) / "run/events.jsonl").read_text().splitlines()
                )
            )
            named = [(e["step"], e["rank"]) for e in events if e["kind"] == "slow"]
            factors += [(e["step"], *e["ms"]) for e in events if e["kind"] == "probe"]
            lines = metrics.read_text().splitlines()
            times += [
                record["step_time_ms"]
                for record in map(json.loads, lines)
                if "step_time_ms" in record
            ]
        began = at_load if args.cause == "load" else at
        after = [
            step - began
            for step, rank in named
            if rank == 1 and step > began and args.cause in ("stop", "load")
        ]
        counts["slow process named"] += bool(after)
        counts["within 20 updates"] += bool(after) and after[0] <= 20
        counts["other names"] += len(named) - len(after)
        delays += after[:1]
        print(json.dumps(counts), named, factors[-12:], file=sys.stderr, flush=True)
    facts = {"step_time_ms": round(statistics.median(times), 1), "measurements": len(factors)}
    return {**counts, "delays": delays, **facts}


def steps_of(metrics: pathlib.Path) -> int:
    """The last update in metrics.jsonl."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1]).get("step", 0) if lines else 0


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("flips", "alarms", "cost", "slow"))
    defaults = {
        "config": "configs/digits.yaml",
        "processes": 1,
        "flips": 200,
        "part": 25,
        "every": 5,
        "updates": 200,
    }
    for name, default in (
        defaults | {"seed": 0, "folder": "", "repeats": 20, "factor": 1.3, "cause": "stop"}
    ).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args, more = parser.parse_known_args(argv)
    if args.folder:
        worker(args, more)
        return
    result = {"flips": flips, "alarms": alarms, "cost": cost, "slow": slow}[args.mode](args, more)
    print(json.dumps({**{k: v for k, v in vars(args).items() if k != "folder"}, **result}))


if __name__ == "__main__":
    main(sys.argv[1:])
