"""The judgment of `oracle`, made once for each kind of run, and how far a run may be from it."""

import functools

import jax
import optax

import oracle
import toys
from jaxdp.run.components import REDUCTIONS

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
    return row["model"] != "mlp", place not in ("2", "3", "4")


# The extras have other arithmetics, and are named by their dotted paths.
FLOAT_REDUCTIONS = tuple(name for name, made in REDUCTIONS.items() if callable(made))
STRATEGIES = {
    "backend": ("pmap", "pjit"),
    "devices": (1, 2, 3, 4, 8),
    "microbatches": (8, 16),
    "accumulate": ("vmap", "scan"),
    "model": ("mlp", "resnet", "dropout"),
    "optimizer": ("adamw", "momentum"),
    "reduction": FLOAT_REDUCTIONS,
    "dtype": ("float32", "float64"),
}


def check_strategy(backend, devices, microbatches, accumulate, model, optimizer, reduction, dtype):
    with jax.enable_x64(dtype == "float64"):
        want = judged(model, optimizer, microbatches, dtype)
        _, state, metrics, *_ = toys.train(
            toys.MODELS[model](), toys.data(dtype=dtype), backend=backend, devices=devices, microbatches=microbatches,
            accumulate=accumulate, optimizer=optimizer, reduction=reduction, dtype=dtype, steps=STEPS,
        )  # fmt: skip
        error, where = toys.relative_error((state.params, state.model_state), want)
    assert error <= TOLERANCE[dtype], f"{where}: {error:.2e}"
    assert [int(m["weight"]) for m in metrics[:3]] == [20, 20, 13]
    assert all(m["nonfinite_grads"] == 0 for m in metrics)


PLACES = (
    "1",
    "2",
    "3",
    "4",
    "8",
    "8/4",
    "8/2",
)  # devices; devices / those that share one copy of the split state
STAGES = {
    "backend": ("pjit", "pmap"),
    "zero": (0, 1, 2, 3),
    "place": PLACES,
    "gradient_buffer": ("sharded", "replicated"),
    "accumulate": ("vmap", "scan"),
    "reduction": FLOAT_REDUCTIONS,
    "model": ("mlp", "resnet", "dropout", "blocks"),
    "microbatches": (8, 16),
    "optimizer": ("adamw", "momentum"),
    "dtype": ("float32", "float64"),
}


def allowed(row):
    """pmap has the stages 0 and 1 over all devices; only gradients that may be split come split or
    whole.
    """
    if row["backend"] == "pmap" and (row["zero"] > 1 or "/" in row["place"]):
        return False
    return row["zero"] > 1 or row["gradient_buffer"] == "sharded"


THINNED = STAGES | {  # without what the cover, or `test_equivalence`, has enough of
    "place": ("3", "4", "8", "8/4", "8/2"),
    "model": ("resnet", "blocks"),
    "dtype": ("float64",),
}


def thinned(row):
    few = row["microbatches"] == (16 if row["place"] in ("3", "4") else 8)
    split = row["zero"] > 0 or "/" not in row["place"]
    return allowed(row) and few and split and row["optimizer"] == "adamw"


def layout(place, zero, gradient_buffer):
    """Arguments of `toys.train`."""
    devices, _, shard_size = place.partition("/")
    arguments = {"zero": zero, "gradient_buffer": gradient_buffer}
    return {
        "devices": int(devices),
        "layout": arguments | ({"shard_size": int(shard_size)} if shard_size else {}),
    }


def check_stage(
    backend, zero, place, gradient_buffer, model, microbatches, optimizer, dtype, **settings
):
    with jax.enable_x64(dtype == "float64"):
        want = judged(model, optimizer, microbatches, dtype)
        _, state, metrics, *_ = toys.train(
            toys.MODELS[model](), toys.data(dtype=dtype), backend=backend, microbatches=microbatches,
            optimizer=optimizer, dtype=dtype, steps=STEPS, **layout(place, zero, gradient_buffer), **settings,
        )  # fmt: skip
        error, where = toys.relative_error((state.params, state.model_state), want)
    assert error <= TOLERANCE[dtype], f"{where}: {error:.2e}"
    assert [int(m["weight"]) for m in metrics[:3]] == [20, 20, 13]
    assert all(m["nonfinite_grads"] == 0 for m in metrics)
    return error
