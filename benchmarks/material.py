"""What all opponents are given: the same weights, the same examples, the same batches, the same
rates.

    python -m benchmarks.material FOLDER UPDATES --config configs/gpt_3m.yaml --microbatches 1

FOLDER: weights.npz, arrays by path; inputs.npy and labels.npy [example, ...]; order.npy [update,
microbatch, place], the examples of each batch; rates.npy [update]; case.json. `Material` reads it,
with NumPy alone."""

import json
import pathlib
import sys

import numpy as np


class Material:
    """A folder as `main` writes it. rank: of `processes`, each with one microbatch of every batch."""

    def __init__(self, folder: str, rank: int = 0, processes: int = 1):
        root = pathlib.Path(folder)
        self.case = json.loads((root / "case.json").read_text())
        with np.load(root / "weights.npz") as stored:
            self.weights = {name: stored[name] for name in stored.files}
        self.inputs, self.labels = np.load(root / "inputs.npy"), np.load(root / "labels.npy")
        order = np.load(root / "order.npy")
        if order.shape[1] != processes:
            raise ValueError(
                f"{order.shape[1]} microbatches for {processes} processes; make the material anew"
            )
        self.order, self.rates = order[:, rank], np.load(root / "rates.npy")

    def batch(self, update: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) of this rank's share of an update, as they are stored."""
        chosen = self.order[update]
        return self.inputs[chosen], self.labels[chosen]


def narrow(array: np.ndarray) -> np.ndarray:
    """Integers in the fewest bytes that hold them."""
    return array.astype(np.min_scalar_type(int(array.max()))) if array.dtype.kind in "iu" else array


def main(folder: str, updates: int, argv: list[str]) -> None:
    import dataclasses

    import jax

    from benchmarks.data import pixels
    from jaxdp.checkpoint.weights import named
    from jaxdp.cli import load
    from jaxdp.run.components import make_parts, schedule_of, set_jax, state_maker
    from jaxdp.run.datasets import facts_of

    config, *_ = load([*argv, "--steps", str(updates), "--epochs", "null"])
    set_jax(config)
    parts = make_parts(config)
    state = jax.device_get(jax.jit(state_maker(config, parts))())
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    np.savez(root / "weights.npz", **named(state.params, state.model_state))
    everything = parts.dataset.read(np.arange(len(parts.dataset)))
    slots = np.arange(config.microbatches)
    rows = [parts.order.rows(step, slots) for step in range(updates)]
    assert all(mask.all() for _, mask in rows), (
        "a batch is not full: take a data set of benchmarks.data"
    )
    order = np.stack([indices for indices, _ in rows])
    np.save(root / "order.npy", order.astype(np.int32))
    for name in ("inputs", "labels"):
        np.save(root / f"{name}.npy", narrow(everything[name]))
    facts = facts_of(parts.dataset)
    rate = schedule_of(config, parts.steps)
    rates = jax.vmap(lambda step: jax.numpy.float32(rate(step)))(jax.numpy.arange(updates))
    np.save(root / "rates.npy", np.asarray(rates, np.float64))
    opt = dataclasses.asdict(config.optimizer)
    schedule = [
        opt["schedule"],
        opt["lr"],
        opt["schedule_steps"] or updates,
        opt["warmup_steps"],
        opt["final_lr"],
    ]
    case = {
        "model": dataclasses.asdict(config.model),
        "input_shape": facts["input_shape"],
        "classes": facts["num_classes"],
        "pixels": pixels(parts.dataset),
        "batch_size": config.batch_size,
        "updates": updates,
        "compute": config.precision.compute or config.precision.params,
        "label_smoothing": config.loss.args.get("label_smoothing", 0.0),
        "optimizer": {name: opt[name] for name in ("target", "weight_decay", "clip_norm", "args")},
        "schedule": schedule,
    }
    (root / "case.json").write_text(json.dumps(case))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
