"""The data-parallel example of the Needle course project: ResNet-9 on CIFAR-10, one epoch, in a loop of its own.

    python examples/needle_resnet9.py cifar-10-batches-py
    mpirun -np 2 --bind-to none python examples/needle_resnet9.py cifar-10-batches-py        (--fake needs no files)

Its four calls are these: `init`, `partition_dataset`, `broadcast_parameters` and the distributed optimizer. Each rank
normalizes by its own part of a batch; at the end rank 0's running averages go to all, as its buffers do in PyTorch.

    epoch 0: 10.1 s, test accuracy 0.5221
"""

import argparse
import time

import numpy as np
import optax
from flax import nnx

import jaxdp
from jaxdp.data.augment import standardize
from jaxdp.data.base import Arrays
from jaxdp.data.cifar10 import CIFAR10, MEAN, STD
from jaxdp.models.resnet9 import ResNet9

BATCH = 128


def loss_of(model, batch):
    logits = model(standardize(batch["inputs"], MEAN, STD))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


@nnx.jit
def backward(model, batch):
    return nnx.value_and_grad(loss_of)(model, batch)


@nnx.jit
def right(model, batch):
    return (model(standardize(batch["inputs"], MEAN, STD)).argmax(-1) == batch["labels"]).sum()


def read(folder, split):
    """The data set, or noise in its place: what is learned from it is nothing, at the same speed."""
    if folder:
        return CIFAR10(folder, split)
    rng, count = np.random.default_rng(0), 500 if split == "train" else 200
    images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    return Arrays(inputs=images, labels=rng.integers(0, 10, count, np.int32))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", help="cifar-10-batches-py, or the folder above it")
    parser.add_argument("--fake", action="store_true", help="random images")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    if not args.folder and not args.fake:
        parser.error("give the folder of CIFAR-10's Python batches, or --fake")

    context = jaxdp.init()
    train = jaxdp.partition_dataset(read(args.folder, "train"), BATCH)
    test = jaxdp.partition_dataset(read(args.folder, "test"), 1000, shuffle=False)
    model = ResNet9(rngs=nnx.Rngs(0))
    nnx.update(model, jaxdp.broadcast_parameters(nnx.state(model)))
    adamw = optax.adamw(optax.linear_schedule(1e-2, 0.0, args.epochs * len(train)), weight_decay=1e-2)
    optimizer = nnx.Optimizer(model, jaxdp.distributed_optimizer(adamw), wrt=nnx.Param)

    for epoch in range(args.epochs):
        began = time.monotonic()
        model.train()
        for batch in train:
            _, grads = backward(model, batch)
            optimizer.update(model, grads, weight=len(batch["labels"]))
        seconds = time.monotonic() - began
        nnx.update(model, jaxdp.broadcast_parameters(nnx.state(model, nnx.BatchStat)))
        model.eval()
        counts = np.array([(right(model, batch), len(batch["labels"])) for batch in test]).sum(0)
        mean = jaxdp.allreduce_metrics({"accuracy": counts[0] / counts[1]}, weight=counts[1])
        if context.is_root:
            print(f"epoch {epoch}: {seconds:.1f} s, test accuracy {mean['accuracy']:.4f}")


if __name__ == "__main__":
    main()
