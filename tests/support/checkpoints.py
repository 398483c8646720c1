"""What saves and restores a state in every way, and one string for all that it holds."""

import hashlib

import jax
import optax
from jax.tree_util import Partial

import toys
from jaxdp.checkpoint.leaves import host as host_array
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.parallel.layout import Sharding
from jaxdp.run.components import STRATEGIES, make_reduction
from jaxdp.split import path_string
from jaxdp.train.step import Forward, UpdateRule, init_state

WAYS = [("pmap", 0), ("pmap", 1), ("pjit", 0), ("pjit", 1), ("pjit", 2), ("pjit", 3)]
META = {"config": {}, "data_fingerprint": "x"}


def strategy(way, devices, model, scaling=None):
    backend, zero = way
    examples = toys.data(24)
    forward = Forward(model, SoftmaxCrossEntropy(), loss_scaling=scaling)
    rule = UpdateRule(optax.adam(1e-2), ema_decay=0.9)
    make = Partial(lambda: init_state(forward, rule, 8, {k: v[:3] for k, v in examples.items()}))
    return STRATEGIES[backend](
        make, 8, make_reduction("xla"), None, jax.devices()[:devices], Sharding(zero)
    )


def digest(state):
    """One string for all leaves of an exported state; every process must call."""
    leaves = sorted(
        (path_string(p), host_array(x)) for p, x in jax.tree_util.tree_leaves_with_path(state)
    )
    return hashlib.sha256(
        b"".join(f"{p}{x.dtype}{x.shape}".encode() + x.tobytes() for p, x in leaves)
    ).hexdigest()
