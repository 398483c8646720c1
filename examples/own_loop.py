"""A training loop for one device, made data-parallel by five calls, which are numbered in the code.

    python examples/own_loop.py        mpirun -np 2 python examples/own_loop.py        (srun, torchrun, ... as well)

A batch has 50 examples over all processes; the last of an epoch has one. The losses do not depend
on the number of processes:

    update   0  loss 2.353443  accuracy 0.1600
    update  25  loss 1.544138  accuracy 0.6600
    update  50  loss 0.854653  accuracy 0.8800
    update  75  loss 0.507742  accuracy 0.9400
    update 100  loss 0.395061  accuracy 0.9400
"""

import numpy as np
import optax
from flax import nnx

import jaxdp
from jaxdp.data import Digits

EXAMPLES, EPOCHS, BATCH = 1001, 5, 50


def loss_of(model, images, labels):
    logits = model(images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


@nnx.jit
def backward(model, images, labels):
    return nnx.value_and_grad(loss_of, has_aux=True)(model, images, labels)


def main() -> None:
    context = jaxdp.init()  # 1
    data = Digits().read(np.arange(EXAMPLES))
    images = data["inputs"].reshape(EXAMPLES, 64) / np.float32(16)
    batches = jaxdp.partition_dataset((images, data["labels"]), BATCH)  # 2
    rngs = nnx.Rngs(context.rank)  # different weights on each rank, until 3
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
    nnx.update(model, jaxdp.broadcast_parameters(nnx.state(model)))  # 3
    # 4
    optimizer = nnx.Optimizer(model, jaxdp.distributed_optimizer(optax.adam(3e-3)), wrt=nnx.Param)
    update = 0
    for _ in range(EPOCHS):
        for x, y in batches:
            (loss, accuracy), grads = backward(model, x, y)
            optimizer.update(model, grads, weight=len(y))  # 4
            if update % 25 == 0:
                # 5
                mean = jaxdp.allreduce_metrics({"loss": loss, "accuracy": accuracy}, weight=len(y))
                if context.is_root:  # 1
                    print(
                        f"update {update:3d}  loss {mean['loss']:.6f}  accuracy {mean['accuracy']:.4f}"
                    )
            update += 1


if __name__ == "__main__":
    main()
