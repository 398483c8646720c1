"""The loop that an expert writes by hand for many devices: `shard_map` over a mesh, and `pmean` of
the gradients.

    python -m benchmarks.plain.shard_map_loop MATERIAL [--reduce leaves|packed]

leaves: one operand for each of them, as XLA combines it; packed: all of them, and the metrics, in
one."""

import argparse
import functools
import os

import jax
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import contender
from benchmarks.material import Material
from benchmarks.plain import common


def leaves(tree):
    return jax.lax.pmean(tree, "data")


def packed(tree):
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, "data"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("material")
    parser.add_argument("--reduce", default="leaves", choices=["leaves", "packed"])
    options = parser.parse_args()
    rank, processes = contender.rank(), contender.processes()
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, processes, rank)
    material = Material(options.material, rank, processes)
    case, tx = material.case, common.make_optimizer(material)
    prepare, judge = common.make_inputs(case), common.make_loss(case)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    reduce = {"leaves": leaves, "packed": packed}[options.reduce]
    graph, *states = nnx.split(common.make_model(material), nnx.Param, nnx.RngState, ...)
    params, rng, rest = states

    @functools.partial(jax.jit, donate_argnums=(0,))
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    def step(state, batch):
        params, rest, opt_state = state
        inputs, labels = batch

        def loss(params):
            model = nnx.merge(graph, common.as_computed(params, case), rng, rest, copy=True)
            loss, accuracy = judge(model(prepare(inputs)), labels)
            return loss, (accuracy, nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))

        (value, (accuracy, rest)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        grads, rest, metrics = reduce((grads, rest, (value, accuracy)))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), metrics

    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    put = functools.partial(jax.make_array_from_process_local_data, whole)
    state = jax.tree.map(put, jax.device_get((params, rest, tx.init(params))))

    def update(i: int):
        nonlocal state
        batch = tuple(jax.make_array_from_process_local_data(split, x) for x in material.batch(i))
        state, metrics = step(state, batch)
        return *metrics, state

    common.serve(update)


if __name__ == "__main__":
    main()
