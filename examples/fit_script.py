"""Train a custom model, loss and data set from a script on all devices.

python examples/fit_script.py
mpirun -np 2 python examples/fit_script.py runs/fit_two
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdp


class Net(nnx.Module):
    """Map x[example, 2] to y[example]."""

    def __init__(self, width: int = 64, *, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(2, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))[:, 0]


def absolute_error(outputs, batch):
    """Return the sum, the weight and no metrics; the mask is 0 for padding."""
    mask = batch["mask"]
    errors = jnp.where(mask != 0, jnp.abs(outputs - batch["labels"]), 0)
    return jnp.sum(errors * mask), jnp.sum(mask), {}


def main() -> None:
    x = np.random.default_rng(0).normal(size=(5000, 2)).astype(np.float32)
    y = np.sin(2 * x[:, 0]) * x[:, 1]
    fitted = jaxdp.fit(
        model=Net,
        loss=absolute_error,
        data=(x[:4000], y[:4000]),
        eval_data=(x[4000:], y[4000:]),
        optimizer=optax.adam(optax.cosine_decay_schedule(3e-3, 600)),
        steps=600,
        batch_size=100,
        run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/fit_script",
        log={"every": 100},
    )
    if jaxdp.current().is_root:
        print(f"mean absolute error {fitted.final['loss']:.4f}")


if __name__ == "__main__":
    main()
