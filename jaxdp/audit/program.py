"""One microbatch, computed by every device alike: a fingerprint of each gradient, and of each leaf
of the state.

A fingerprint is 32 bits, made on the device. Each word of a leaf is mixed with its position by a
bijection (the finalizer of MurmurHash3), and the results are summed, so every flipped bit changes
it.

Products are looked at one by one: an output that is masked later, by a ReLU or dropout, or rounded
away, leaves no trace in the gradients. A vote decides which device computes wrongly: the majority is
right, if each device agrees with itself.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_leaves_with_path

from jaxdp.exact.products import WINDOW
from jaxdp.optim.interpreter import Rule, bind, evaluate, interpret, scan_counts
from jaxdp.parallel.placement import converter, of_device
from jaxdp.parallel.reduction import order_of
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key
from jaxdp.split import fit, path_string
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Replica, Step

Visit = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]
PRODUCTS = ("dot_general", "conv_general_dilated")
REPLACED = (
    "replaced_product"  # the name of an output that a visit replaced: it is the one to look at
)


def visit_products(f: Callable, visit: Visit) -> Callable:
    """Wrap f: return (its result, the second results of visit(number, output) -> (output, uint32
    []) of all products).

    In a scan, a product is visited in each iteration, and its results are summed. Other loops are
    not entered."""

    def run(*args: Any) -> tuple[Any, list[jax.Array]]:
        results: list[jax.Array] = []
        return interpret(f, args, _rule(visit, results)), results

    return run


def mark_replaced(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, REPLACED)


def _rule(visit: Visit, results: list[jax.Array]) -> Rule:
    """Return the rule of an interpreter that adds the result of each visit."""

    def rule(equation: Any, inputs: list[Any]) -> list[Any] | None:
        name, params, first = equation.primitive.name, equation.params, len(results)
        if name in PRODUCTS or params.get("name") == REPLACED:
            out = bind(equation, inputs)
            out[0], result = visit(first, out[0])
            results.append(result)
            return out
        if name != "scan":
            return None
        consts, carries = scan_counts(params)

        def body(carry: Any, pieces: Any) -> Any:
            more: list[jax.Array] = []
            inner = _rule(lambda number, x: visit(first + number, x), more)
            out = evaluate(params["jaxpr"], [*inputs[:consts], *carry, *pieces], inner)
            return out[:carries], (out[carries:], more)

        start, pieces = inputs[consts : consts + carries], inputs[consts + carries :]
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacked, more) = jax.lax.scan(body, start, pieces, **options)
        results.extend(x.sum(0, dtype=jnp.uint32) for x in more)
        return [*carry, *stacked]

    return rule


Groups = Sequence[Sequence[int]]  # the devices that must have equal fingerprints


class Verdict(NamedTuple):
    """devices: {device: the first leaf that differs}. certain: False if no majority shows which of
    them are right.

    unstable: the devices whose results differ when they compute them again. software: several are
    unstable, or the only device is in each run, so it is the program that is not deterministic.
    """

    devices: dict[int, int]
    certain: bool = True
    unstable: Sequence[int] = ()
    software: bool = False


def vote(prints: np.ndarray, groups: Sequence[Groups]) -> Verdict:
    """Compare the fingerprints [device, leaf] of each leaf inside each of its groups."""
    minority: dict[int, int] = {}
    undecided: dict[int, int] = {}
    for leaf, alike in enumerate(groups):
        for group in alike:
            counts = collections.Counter(prints[list(group), leaf].tolist())
            [(value, most)] = counts.most_common(1)
            decided = 2 * most > len(group)
            for device in group:
                if not decided or prints[device, leaf] != value:
                    (minority if decided else undecided).setdefault(device, leaf)
    return Verdict(minority or undecided, bool(minority) or not undecided)


def judge(runs: Sequence[np.ndarray], groups: Sequence[Groups], state_leaves: int) -> Verdict:
    """Return the verdict on several runs of one computation, each [device, leaf]; the first leaves
    are the state's.

    A copy of the state that differs explains why its device computes other gradients, so it is
    judged first."""
    state = vote(runs[-1][:, :state_leaves], groups[:state_leaves])
    if state.devices and state.certain:
        return state
    changed = (np.stack(runs) != runs[0]).any(0)  # [device, leaf]
    unstable = np.flatnonzero(changed.any(1)).tolist()
    one_device = len(runs[0]) == 1 and len({run.tobytes() for run in runs}) == len(runs) > 2
    software = len(unstable) > 1 or one_device
    if software:
        return state if state.devices else Verdict({}, True, unstable, True)
    if unstable:
        [device] = unstable
        return Verdict({device: int(np.argmax(changed[device]))}, True, unstable)
    results = vote(runs[0], [*[()] * state_leaves, *groups[state_leaves:]])
    return state if state.devices and not (results.devices and results.certain) else results


class Probe:
    """The program of a strategy's devices. ndim: {entry of a batch: its number of dims in one
    microbatch}.
    """

    def __init__(self, strategy: Strategy, step: Step, ndim: dict[str, int]):
        self.strategy, self.step, self.ndim = strategy, step, ndim
        self.names: list[str] = []  # of the fingerprints: first those of the state
        self.axes = strategy.mesh.axis_names
        stored = strategy.abstract(padded=True).replace(kept={})
        self.specs = jax.tree.map(lambda x: x.sharding.spec, stored).replace(kept=P())
        self._compute = jax.jit(self._fingerprints, static_argnums=0)

    def fingerprints(self, state: TrainState, batch: Batch) -> jax.Array:
        """Return uint32[device, leaf], each row on its device: of the device's own state, and of
        its gradients.

        All devices compute one microbatch, another one after each update.
        """
        exported = self.strategy.export(state, padded=True)

        def full(x: jax.Array, like: Any) -> jax.Array:
            if x.is_fully_replicated:
                return x
            return converter(fit, self.strategy.replicated, like.shape)(x)

        def spec(x):
            return getattr(getattr(x, "sharding", None), "spec", P())

        params = jax.tree.map(full, exported.params, self.strategy.shapes.params)
        specs = tuple((name, spec(x)) for name, x in sorted(batch.items()))
        return self._compute(specs, exported, params, batch)

    def _fingerprints(
        self, specs: tuple, state: TrainState, params: Any, batch: Batch
    ) -> jax.Array:
        seed = jnp.asarray(self.strategy.seed)
        key = next(key for key in self.ndim if key in batch)
        # Before those of an example: device, update, local microbatch.
        dims = batch[key].ndim - self.ndim[key]
        order, local = order_of(self.strategy.assignment), self.strategy.assignment.shape[1]

        def compute(state: TrainState, params: Any, batch: Batch) -> jax.Array:
            number = (fingerprint(state.step) % len(order)).astype(jnp.int32)
            device, position = jnp.divmod(jnp.asarray(order, jnp.int32)[number], local)

            def select(x: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x.reshape(-1, *x.shape[dims:]), position, 1)
                return of_device(x, self.axes, device)

            kept = jax.tree.map(lambda x: x[number][None], state.kept)
            own = state.replace(params=params, kept=kept, opt_state=None, seed=seed)

            def grads(state: TrainState, batch: Batch, number: jax.Array) -> Any:
                return self.step.grads(state, batch, Replica(number))

            visit = visit_products(grads, lambda _, x: (x, fingerprint(x)))
            sums, products = visit(own, jax.tree.map(select, batch), number[None])
            own_leaves = tree_leaves_with_path(state.replace(kept={}))
            flat = [*own_leaves, *tree_leaves_with_path(sums)]
            self.names = [path_string(path) for path, _ in flat]
            self.names += [f"product {i}" for i in range(len(products))]
            prints = [fingerprint(x) for _, x in flat]
            return jnp.array([*prints, *products], jnp.uint32)[None]

        mesh, in_specs, out_specs = self.strategy.mesh, (self.specs, P(), dict(specs)), P(self.axes)
        mapped = jax.shard_map(
            compute, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped(state, params, batch)


@jax.jit  # traced once for each shape
def fingerprint(x: jax.Array) -> jax.Array:
    """Return a number, uint32 [], that every flipped bit of x changes."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    kind = f"uint{8 * min(x.dtype.itemsize, 4)}"  # 8 bytes become two words
    words = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32).reshape(-1)
    words = words + jax.lax.iota(jnp.uint32, words.size) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = (words ^ words >> shift) * np.uint32(factor)
    if words.size > WINDOW:  # XLA on CPU fuses short sums with what computes their inputs
        rows = jnp.pad(words, (0, -words.size % WINDOW)).reshape(-1, WINDOW)
        words = rows.sum(1, dtype=jnp.uint32)
    return words.sum(dtype=jnp.uint32)
