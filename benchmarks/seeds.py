"""Needle's two models: ResNet-9 on CIFAR-10 and an LSTM on the Penn Treebank, on several numbers of
processes.

    python -m benchmarks.seeds resnet9 --root FOLDER_OF_CIFAR10 [--processes 1,2,4] [--epochs 2] [--key value ...]
    python -m benchmarks.seeds lstm --root FOLDER [--processes 1,2] [--epochs 13] [--key value ...]

FOLDER has ptb.train.txt, ptb.valid.txt and ptb.test.txt. Evaluates after each epoch. Prints for
each number of processes, one after the other: the seconds of an epoch of training (the median,
without the first, which compiles), the test metrics after each epoch, and the digest of the final
parameters. Other arguments go to the config."""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

from benchmarks import job

MODELS = {"resnet9": ("cifar10_resnet9", "accuracy", 128), "lstm": ("ptb_lstm", "perplexity", 20)}


def batches(model: str, root: str, batch_size: int) -> int:
    """Return the updates of an epoch."""
    from jaxdp.data.cifar10 import CIFAR10
    from jaxdp.data.text import PennTreebank
    from jaxdp.data.windows import Windows

    dataset = CIFAR10(root, "train", False) if model == "resnet9" else PennTreebank(root)
    assert model == "resnet9" or isinstance(dataset, Windows)
    return -(-len(dataset) // batch_size)


def train(processes: int, config: str, argv: list[str]) -> list[dict]:
    """Train once; return the records of metrics.jsonl."""
    launcher = job.mpirun(processes) if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        return job.train(["--config", config, *argv], pathlib.Path(folder) / "run", launcher)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--root", required=True)
    parser.add_argument(
        "--processes", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2, 4]
    )
    parser.add_argument("--epochs", type=int, default=2)
    args, more = parser.parse_known_args(argv)
    name, metric, batch_size = MODELS[args.model]
    updates = batches(args.model, args.root, batch_size)
    options = ["--data.args.root", args.root, "--epochs", str(args.epochs)]
    options += ["--eval.every", str(updates), "--log.every", str(updates), *more]
    for processes in args.processes:
        records = train(processes, f"{job.ROOT}/configs/{name}.yaml", options)
        times = [
            r["step_time_ms"] for r in records if r["split"] == "train" and "step_time_ms" in r
        ]
        final = next(r for r in reversed(records) if r["split"] == "final")
        result = {
            "model": args.model,
            "processes": processes,
            "updates_per_epoch": updates,
            "epoch_s": round(statistics.median(times[1:] or times) * updates / 1e3, 2),
            metric: [round(r[metric], 4) for r in records if r["split"] in ("eval", "final")],
            "params_sha256": final.get("params_sha256", "")[:16],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
