"""Train the ResNet-9 of the Needle course project on CIFAR-10 for one epoch, in a hand-written
loop.

    python examples/needle_resnet9.py cifar-10-batches-py
    mpirun -np 2 --bind-to none python examples/needle_resnet9.py cifar-10-batches-py        (--fake needs no files)

It uses four calls: `init`, `partition_dataset`, `broadcast_parameters` and `distributed_optimizer`.
BatchNorm uses each rank's part of a batch. After an epoch, rank 0 broadcasts its running averages,
like DDP's buffers in PyTorch.

    epoch 0: 8.9 s, test accuracy 0.5175        # one process on 2 CPU cores, including 2 s of compilation
"""

import argparse
import time

import jax
import numpy as np
import optax

import jaxdp
from jaxdp.data.augment import standardize
from jaxdp.data.cifar10 import CIFAR10
from jaxdp.data.dataset import Arrays
from jaxdp.models import as_model
from jaxdp.models.resnet9 import ResNet9

BATCH = 128
model = as_model(lambda rngs: ResNet9(rngs=rngs))  # (init, apply): a Flax module as pure functions


def logits_of(params, averages, batch, train):
    return model.apply(
        params,
        averages,
        {"inputs": standardize(batch["inputs"], CIFAR10.mean, CIFAR10.std)},
        jax.random.key(0),
        train,
    )


@jax.jit
def backward(params, averages, batch):
    def loss_of(params):
        logits, new = logits_of(params, averages, batch, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), new

    return jax.value_and_grad(loss_of, has_aux=True)(params)


@jax.jit
def right(params, averages, batch):
    return (logits_of(params, averages, batch, train=False)[0].argmax(-1) == batch["labels"]).sum()


def read(folder, split):
    """Return a split of CIFAR-10, or random images if there is no folder."""
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
    params, averages = jaxdp.broadcast_parameters(model.init(jax.random.key(0), {}))
    adamw = optax.adamw(
        optax.linear_schedule(1e-2, 0.0, args.epochs * len(train)), weight_decay=1e-2
    )
    tx = jaxdp.distributed_optimizer(adamw)
    state, apply_updates = tx.init(params), jax.jit(optax.apply_updates)

    for epoch in range(args.epochs):
        began = time.monotonic()
        for batch in train:
            (_, averages), grads = backward(params, averages, batch)
            updates, state = tx.update(grads, state, params, weight=len(batch["labels"]))
            params = apply_updates(params, updates)
        jax.block_until_ready(params)
        seconds = time.monotonic() - began
        averages = jaxdp.broadcast_parameters(averages)
        counts = np.array(
            [(right(params, averages, batch), len(batch["labels"])) for batch in test]
        ).sum(0)
        mean = jaxdp.allreduce_metrics({"accuracy": counts[0] / counts[1]}, weight=counts[1])
        if context.is_root:
            print(f"epoch {epoch}: {seconds:.1f} s, test accuracy {mean['accuracy']:.4f}")


if __name__ == "__main__":
    main()
