"""What exact sums of fewer bytes do to training: loss curves of each reduction, side by side, of
several seeds.

    python -m benchmarks.exact_curves --config configs/gpt_3m.yaml --steps 1000 [--seeds 3] [--first 0]
        [--reductions bucket,exact,exact16,exact8] [--key value ...]

Prints, for each reduction, the mean of the last 50 training losses and the final loss of every
seed; how far the first 50 losses are from bucket's, relative; and the share of updates that were
computed twice. Other arguments go to the config.
"""

import json
import pathlib
import statistics
import sys
import tempfile

from benchmarks import job
from benchmarks.exact import take

REDUCTIONS = ("bucket", "exact", "exact16", "exact8")


def main(argv: list[str]) -> None:
    first = take(argv, "first", 0)
    seeds = range(first, first + take(argv, "seeds", 3))
    reductions = take(argv, "reductions", ",".join(REDUCTIONS)).split(",")
    curves: dict[str, list[list[float]]] = {name: [] for name in reductions}
    finals: dict[str, list[float]] = {name: [] for name in reductions}
    again: dict[str, list[float]] = {name: [] for name in reductions}
    with tempfile.TemporaryDirectory() as top:
        for seed in seeds:
            for name in reductions:
                words = [*argv, "--seed", str(seed), "--parallel.reduction", name]
                words += ["--log.every", "1", "--checkpoint.every", "null"]
                records = job.train(words, pathlib.Path(top) / f"{name}-{seed}")
                updates = [record for record in records if record["split"] == "train"]
                curves[name].append([record["loss"] for record in updates])
                finals[name].append(next(r["loss"] for r in records if r["split"] == "final"))
                again[name].append(
                    statistics.mean(record.get("recomputed", 0) for record in updates)
                )

    def apart(name, seed):
        return max(
            abs(a / b - 1)
            for a, b in zip(
                curves[name][seed - first][:50], curves["bucket"][seed - first][:50], strict=True
            )
        )

    table = {
        name: {
            "last_losses": [round(statistics.mean(curve[-50:]), 5) for curve in curves[name]],
            "final_losses": [round(loss, 5) for loss in finals[name]],
            "first_50_apart": [float(f"{apart(name, seed):.2g}") for seed in seeds],
            "recomputed": [round(share, 5) for share in again[name]],
            "updates": len(curves[name][0]),
        }
        for name in reductions
    }
    print(json.dumps({"arguments": " ".join(argv), "reductions": table}))


if __name__ == "__main__":
    main(sys.argv[1:])
