"""Which right half belongs to which left half? A loss over the whole batch, the same on any number of devices.

    python examples/contrastive.py
    mpirun -np 2 python examples/contrastive.py runs/contrastive_two

Each half of a digit is embedded separately; an example's left half is to be nearer to its own right half than to those
of all the 120 examples of the batch, wherever they are computed. By chance accuracy would be 0.008. Of the 360 examples
of the test split every batch has 120, so that the accuracy printed is that of one choice among 120.
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import jaxdp
from jaxdp.losses import Contrastive


class Halves(nnx.Module):
    """image[example, 8, 8, 1] -> (embedding of the left half, of the right half), each [example, dim]."""

    def __init__(self, width: int = 128, dim: int = 32, *, rngs: nnx.Rngs):
        tower = lambda: nnx.Sequential(
            nnx.Linear(32, width, rngs=rngs), nnx.relu, nnx.Linear(width, width, rngs=rngs), nnx.relu,
            nnx.Linear(width, dim, rngs=rngs),
        )  # fmt: skip
        self.left, self.right = tower(), tower()

    def __call__(self, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        left, right = jnp.split(image, 2, axis=2)
        return self.left(left.reshape(len(image), -1)), self.right(right.reshape(len(image), -1))


def main() -> None:
    fitted = jaxdp.fit(
        model=Halves,
        loss=Contrastive(temperature=0.1),
        data="Digits",
        optimizer={"target": "adamw", "lr": 3e-3, "weight_decay": 1e-2},
        steps=600,
        batch_size=120,
        run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/contrastive",
        log={"every": 100},
    )
    if jaxdp.current().is_root:
        print(f"a half finds the other among 120: {fitted.final['accuracy']:.3f} of the time")


if __name__ == "__main__":
    main()
