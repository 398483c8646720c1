"""A pmapped loop of your own that continues when processes are killed, and when others join.

    jaxdp launch -n 3 --restart 5 python examples/elastic_loop.py

Kill a process of it (not the one that launches): the others continue within seconds, and it joins
them again."""

import functools

import jax
import numpy as np
import optax

import jaxdp
from jaxdp.data import Digits

data = Digits().read(np.arange(1437))
images, labels, tx = (
    data["inputs"].reshape(-1, 64) / np.float32(16),
    data["labels"],
    optax.adam(1e-2),
)


def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(
        x @ params["kernel"] + params["bias"], y
    ).mean()


def train(state, commit):
    context, devices = jaxdp.current(), jax.local_device_count()

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, None, 0, 0), out_axes=None)
    def update(params, moments, x, y):
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_of)(params, x, y), "data")
        updates, moments = tx.update(grads, moments, params)
        return loss, optax.apply_updates(params, updates), moments

    params, moments = state["params"], state["moments"]
    for step in range(state["step"], 600):
        # Depends on the step alone.
        rows = np.random.default_rng(step).permutation(len(labels))[:60]
        mine = np.array_split(rows, context.size)[context.rank].reshape(devices, -1)
        loss, params, moments = update(params, moments, images[mine], labels[mine])
        if context.is_root and step % 100 == 99:
            print(f"update {step + 1}  loss {loss:.4f}  {context.size} processes", flush=True)
        # Last: it may end this call of train().
        commit({"step": step + 1, "params": params, "moments": moments})


jaxdp.init(group=jaxdp.elastic.Options())
params = {"kernel": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
jaxdp.elastic.run(train, {"step": 0, "params": params, "moments": tx.init(params)})
