"""What exact sums of fewer bytes do to training: loss curves of each reduction, side by side, of several seeds.

    python benchmarks/exact_curves.py --config configs/gpt_3m.yaml --steps 1000 [--seeds 3] [--first 0] [...]

Prints, for each reduction, the mean of the last 50 training losses and the final loss of every seed; how far the first
50 losses are from bucket's, relative; and the share of updates that were computed twice. Other arguments go to the
config.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.exact import take
from benchmarks.job import ROOT

REDUCTIONS = ("bucket", "exact", "exact16", "exact8")


def train(argv: list[str], reduction: str, seed: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """The records of one run."""
    command = [sys.executable, "train.py", *argv, "--seed", str(seed), "--parallel.reduction", reduction]
    command += ["--run_dir", str(folder), "--log.every", "1", "--checkpoint.every", "null"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main(argv: list[str]) -> None:
    first = take(argv, "first", 0)
    seeds = range(first, first + take(argv, "seeds", 3))
    curves: dict[str, list[list[float]]] = {name: [] for name in REDUCTIONS}
    finals: dict[str, list[float]] = {name: [] for name in REDUCTIONS}
    again: dict[str, list[float]] = {name: [] for name in REDUCTIONS}
    with tempfile.TemporaryDirectory() as top:
        for seed in seeds:
            for name in REDUCTIONS:
                records = train(argv, name, seed, pathlib.Path(top) / f"{name}-{seed}")
                updates = [record for record in records if record["split"] == "train"]
                curves[name].append([record["loss"] for record in updates])
                finals[name].append(next(r["loss"] for r in records if r["split"] == "final"))
                again[name].append(statistics.mean(record.get("recomputed", 0) for record in updates))
    apart = lambda name, seed: max(
        abs(a / b - 1)
        for a, b in zip(curves[name][seed - first][:50], curves["bucket"][seed - first][:50], strict=True)
    )
    table = {
        name: {
            "last_losses": [round(statistics.mean(curve[-50:]), 5) for curve in curves[name]],
            "final_losses": [round(loss, 5) for loss in finals[name]],
            "first_50_apart": [float(f"{apart(name, seed):.2g}") for seed in seeds],
            "recomputed": [round(share, 5) for share in again[name]],
            "updates": len(curves[name][0]),
        }
        for name in REDUCTIONS
    }
    print(json.dumps({"arguments": " ".join(argv), "reductions": table}))


if __name__ == "__main__":
    main(sys.argv[1:])
