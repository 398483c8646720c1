"""Every strategy, one by one, over all devices of all processes: `mpirun -np 2 python
tests/support/mpi/zero.py`.

Rank 0 prints one line of JSON: {strategy: the loss of each update, the last norm of the gradient,
and of some the loss of the averaged parameters}.
"""

import json
import pathlib
import sys
import warnings

import jax

import jaxdp

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import toys

# (backend, reduction, layout, model): scanned blocks where a stage works block by block
STRATEGIES = {
    "pmap 0": ("pmap", "bucket", {}, "mlp"),
    "pmap 1": ("pmap", "auto", {"zero": 1}, "mlp"),
    "pjit 0": ("pjit", "xla", {}, "mlp"),
    "pjit 1": ("pjit", "bucket", {"zero": 1}, "mlp"),
    "pjit 2": ("pjit", "xla", {"zero": 2}, "blocks"),
    "pjit 3": ("pjit", "auto", {"zero": 3}, "blocks"),
    "hybrid 3": ("pjit", "xla", {"zero": 3, "shard_size": 2}, "blocks"),
}
EVALUATED = ("pmap 1", "pjit 3")


def train(name, devices, evaluate):
    """What is printed of one strategy."""
    backend, reduction, layout, model = STRATEGIES[name]
    strategy, step, batch = toys.build(
        toys.MODELS[model](), toys.data(), backend=backend, reduction=reduction, layout=layout,
        devices=devices, accumulate="scan", ema=0.9, remat="full" if layout.get("zero") == 3 else "none",
    )  # fmt: skip
    state, program, numbers = strategy.init(), strategy.compile(step), []
    for i in range(5):
        state, metrics = program.update(state, batch(i))
        numbers.append(metrics["loss"])
    numbers.append(metrics["grad_norm"])
    if evaluate:
        sums = program.evaluate(strategy.averaged(state), batch(0))
        numbers.append(sums.loss / sums.weight)
    return list(map(float, numbers))


if __name__ == "__main__":
    warnings.simplefilter("error")
    context = jaxdp.init()
    curves = {name: train(name, jax.device_count(), name in EVALUATED) for name in STRATEGIES}
    if context.is_root:
        print(json.dumps(curves))
