"""The loop of Flax's own examples: nnx.jit, nnx.Optimizer and a metric that adds up (examples/mnist
of flax).

python -m benchmarks.plain.nnx_loop MATERIAL
"""

import sys

import jax
from flax import nnx

from benchmarks import contender
from benchmarks.material import Material
from benchmarks.plain import common


def main(folder: str) -> None:
    material = Material(folder)
    prepare, judge = common.make_inputs(material.case), common.make_loss(material.case)
    model = common.make_model(material)
    optimizer = nnx.Optimizer(model, common.make_optimizer(material), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Average("accuracy")
    )

    @nnx.jit
    def step(model, optimizer, metrics, inputs, labels):
        def loss(model):
            return judge(model(prepare(inputs)), labels)

        (value, accuracy), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        metrics.update(loss=value, accuracy=accuracy)
        optimizer.update(model, grads)

    at = 0

    def run(updates: int) -> None:
        nonlocal at
        for _ in range(updates):
            step(model, optimizer, metrics, *material.batch(at))
            at += 1
        metrics.compute()
        jax.block_until_ready((nnx.state(model), nnx.state(optimizer)))

    def losses(updates: int) -> list[float]:
        found = []
        for _ in range(updates):
            metrics.reset()
            run(1)
            found.append(float(metrics.compute()["loss"]))
        return found

    contender.serve(losses, run)


if __name__ == "__main__":
    main(sys.argv[1])
