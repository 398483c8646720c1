"""What training means, written without jaxdp: real rows only, Python loops, one weighted loss,
plain Optax.

It shares no code with the step that it judges; an oracle that did could not see that code's faults.
"""

import jax
import jax.numpy as jnp
import optax


def train(forward, params, state, tx, data, *, steps, batch_size, microbatches, seed=0):
    """(params, state) after `steps` updates in the data's own order.

    forward(params, state, inputs[row, ...], key, places) -> (logits, state): `places` is the number of places of a
    microbatch, of which the first len(inputs) are real.
    """
    size = len(data["labels"])
    per_epoch = -(-size // batch_size)
    places = -(-batch_size // microbatches)
    opt_state = tx.init(params)

    def loss(params, state, piece, key):
        model_key, _ = jax.random.split(key)
        logits, state = forward(params, state, piece["inputs"], model_key, places)
        log_p = logits - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))
        return -jnp.sum(log_p[jnp.arange(len(piece["labels"])), piece["labels"]]), state

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    for step in range(steps):
        first = (step % per_epoch) * batch_size
        rows = {k: v[first : min(first + batch_size, size)] for k, v in data.items()}
        count = len(rows["labels"])
        total = average = None
        for m in range(min(microbatches, count)):  # those after have no rows
            piece = {k: v[m::microbatches] for k, v in rows.items()}
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), m)
            grads, new = gradient(params, state, piece, key)
            new = scale(new, len(piece["labels"]) / count)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            average = new if average is None else jax.tree.map(jnp.add, average, new)
        updates, opt_state = tx.update(scale(total, 1 / count), opt_state, params)
        params, state = optax.apply_updates(params, updates), average
    return params, state


def scale(tree, factor):
    return jax.tree.map(lambda x: x * factor, tree)


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def mlp(params, state, x, key, places):
    x = x.reshape(len(x), -1)
    x = jnp.maximum(dense(params["layers"]["0"], x), 0)
    return dense(params["head"], x), state


def dropout_mlp(params, state, x, key, places):
    x = x.reshape(len(x), -1)
    x = jnp.maximum(dense(params["layers"]["0"], x), 0)
    keep = jax.random.bernoulli(key, 0.75, (places, x.shape[1]))[: len(x)]
    return dense(params["head"], jnp.where(keep, x / 0.75, 0)), state


def _conv_bn(params, state, x):
    x = jax.lax.conv_general_dilated(
        x,
        params["conv"]["kernel"],
        (1, 1),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    mean = x.mean((0, 1, 2))
    var = ((x - mean) ** 2).mean((0, 1, 2))
    norm = params["norm"]
    y = (x - mean) / jnp.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
    averages = state["norm"]
    new = {
        "norm": {
            "mean": 0.9 * averages["mean"] + 0.1 * mean,
            "var": 0.9 * averages["var"] + 0.1 * var,
        }
    }
    return jnp.maximum(y, 0), new


def resnet(params, state, x, key, places):
    x, first = _conv_bn(params["stem"], state["stem"], x)
    p, s = params["residual"]["blocks"], state["residual"]["blocks"]
    y, a = _conv_bn(p["0"], s["0"], x)
    y, b = _conv_bn(p["1"], s["1"], y)
    x = (x + y).mean((1, 2))
    return dense(params["head"], x), {"stem": first, "residual": {"blocks": {"0": a, "1": b}}}


def blocks(params, state, x, key, places):
    """Tokens of the inputs, embedded and averaged, through residual blocks one after the other."""
    x = x.reshape(len(x), -1)
    x = params["embed"]["embedding"][jnp.clip(jnp.floor(2 * x + 4), 0, 7).astype(int)].mean(1)
    stack = params["blocks"]["stack"]
    for i in range(len(stack["up"]["bias"])):
        up, down = (
            {name: leaf[i] for name, leaf in stack[part].items()} for part in ("up", "down")
        )
        x = x + dense(down, jnp.maximum(dense(up, x), 0))
    return dense(params["head"], x), state


FORWARD = {"mlp": mlp, "resnet": resnet, "dropout": dropout_mlp, "blocks": blocks}
