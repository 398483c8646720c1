"""ZeRO stage 1 in a hand-written `pmap` loop: `zero1` around the optimizer replaces `lax.pmean`.

    python examples/zero1.py        on GPUs if there are any, else on 8 simulated devices

Each device stores the Adam moments of its eighth of the parameters (the last bias, 10 numbers, is
not divisible by 8):

    update    loss
         0   2.373
        50   0.139
       100   0.110
       150   0.051
    optimizer state: 19,284 bytes per device; 153,684 unsplit
"""

import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Enough threads for simulated devices that wait in several collectives.
os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import digits
from jaxdp.optim import zero1

adamw = optax.adamw(3e-3, weight_decay=1e-2)
tx = zero1(adamw, "batch")


def loss(params, x, y):
    logits = (
        jax.nn.relu(x @ params["kernel1"] + params["bias1"]) @ params["kernel2"] + params["bias2"]
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
def update(params, state, x, y):
    # No pmean(grads): `tx.update` reduces them.
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "batch")


def main() -> None:
    devices, rng = jax.device_count(), np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), np.float32)

    whole = {"kernel1": normal(64, 256), "bias1": np.zeros(256, np.float32)}
    whole |= {"kernel2": normal(256, 10), "bias2": np.zeros(10, np.float32)}
    params = jax.tree.map(lambda x: jnp.stack([x] * devices), whole)
    state = jax.pmap(tx.init, "batch")(params)

    data = digits.Digits().read(np.arange(1437))
    print("update    loss")
    for i in range(151):
        rows = rng.choice(1437, (devices, 256 // devices))
        x = data["inputs"][rows].reshape(*rows.shape, 64) / np.float32(16)
        params, state, value = update(params, state, x, data["labels"][rows])
        if i % 50 == 0:
            print(f"{i:6d} {value[0]:7.3f}")

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    unsplit = size(jax.eval_shape(adamw.init, whole))
    print(f"optimizer state: {size(state) // devices:,} bytes per device; {unsplit:,} unsplit")


if __name__ == "__main__":
    main()
