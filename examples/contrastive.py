"""Match the halves of a digit with a contrastive loss over the whole batch, equal on any number of
devices.

    python examples/contrastive.py
    mpirun -np 2 python examples/contrastive.py runs/contrastive_two

Each half is embedded separately. The loss pulls a left half to its own right half and away from the
others of the 120 examples in the batch, on any device. The accuracy is that of choosing one half
among 120, because the 360 examples of the test split form batches of 120. Chance is 0.008.
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import jaxdp
from jaxdp.losses import Contrastive


class Halves(nnx.Module):
    """Embed the halves of image[example, 8, 8, 1]: return (left, right), each [example, dim]."""

    def __init__(self, width: int = 128, dim: int = 32, *, rngs: nnx.Rngs):
        def tower():
            return nnx.Sequential(
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
