"""Runs with `mpi/faulty.py`'s data, with a fault to order, and what they leave."""

import json
import time

from jaxdp.metrics.jsonl import read

CONFIG = """
model: {target: MLP, args: {hidden: [16]}}
data: {target: faulty.Faulty}
steps: 60
batch_size: 72
microbatches: 4
optimizer: {target: adamw, lr: 1.0e-2}
log: {every: 5}
eval: {every: 25}
checkpoint: {every: 10}
"""


def written(folder):
    """`CONFIG` as a file."""
    path = folder / "faulty.yaml"
    path.write_text(CONFIG)
    return path


def argv(config, run_dir, what="none", rank=0, at=0, where="train", more=()):
    fault = {"what": what, "rank": rank, "at": at, "where": where, "run_dir": run_dir}
    keys = [f"--data.args={json.dumps(fault, default=str)}"]
    return [
        "train.py",
        "--config",
        str(config),
        "--run_dir",
        str(run_dir),
        *keys,
        "--resume.force",
        "true",
        *more,
    ]


def final(run_dir):
    return [r for r in read(run_dir / "metrics.jsonl") if r["split"] == "final"]


def kept(run_dir):
    return sorted(
        int(p.name) for p in (run_dir / "checkpoints").iterdir() if (p / "manifest.json").is_file()
    )


def when(condition, act):
    def during(process):
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        act(process)

    return during
