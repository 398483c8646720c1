"""The judgment of `oracle`, made once for each kind of run, and how far a run may be from it."""

import functools

import optax

import oracle
import toys

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
STEPS = 10


@functools.cache
def judged(model, optimizer, microbatches, dtype):
    """The oracle's (params, state) from the initial values that jaxdp makes on one device; 53
    examples in batches of 20, so that every third batch has 13 rows and, with 16 microbatches,
    three of them none."""
    first = toys.train(
        toys.MODELS[model](),
        toys.data(dtype=dtype),
        microbatches=microbatches,
        optimizer=optimizer,
        dtype=dtype,
        steps=0,
    )[0]
    tx, clip = toys.OPTIMIZERS[optimizer]
    tx = optax.chain(optax.clip_by_global_norm(clip), tx()) if clip else tx()
    return oracle.train(
        oracle.FORWARD[model], first.params, first.model_state, tx, toys.data(dtype=dtype),
        steps=STEPS, batch_size=20, microbatches=microbatches,
    )  # fmt: skip


def smallest(row):
    """Order rows by what they cost to compile, several devices before one."""
    place = str(row["devices"] if "devices" in row else row["place"])
    return row["model"] != "mlp", place not in ("2", "3", "4"), row["reduction"] == "exact"
