"""The loop that an expert writes by hand for one device: one jitted update, whose state is donated.

python -m benchmarks.plain.jit_loop MATERIAL
"""

import functools
import sys

import jax
import optax
from flax import nnx

from benchmarks.material import Material
from benchmarks.plain import common


def main(folder: str) -> None:
    material = Material(folder)
    case, tx = material.case, common.make_optimizer(material)
    prepare, judge = common.make_inputs(case), common.make_loss(case)
    graph, *states = nnx.split(common.make_model(material), nnx.Param, ...)
    params, rest = states

    @functools.partial(jax.jit, donate_argnums=(0,))
    def step(state, inputs, labels):
        params, rest, opt_state = state

        def loss(params):
            model = nnx.merge(graph, common.as_computed(params, case), rest, copy=True)
            loss, accuracy = judge(model(prepare(inputs)), labels)
            return loss, (accuracy, nnx.state(model, nnx.Not(nnx.Param)))

        (value, (accuracy, rest)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), (value, accuracy)

    state = (params, rest, tx.init(params))

    def update(i: int):
        nonlocal state
        state, metrics = step(state, *material.batch(i))
        return *metrics, state

    common.serve(update)


if __name__ == "__main__":
    main(sys.argv[1])
