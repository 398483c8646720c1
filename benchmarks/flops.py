"""Print the FLOPs of the products of an update, as the traced program has them; nothing is
compiled.

python -m benchmarks.flops --config configs/gpt_3m.yaml [--key value ...]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.cli import load
from jaxdp.data.prefetch import read_batches
from jaxdp.run.components import make_parts, make_the_step, set_jax, state_maker
from jaxdp.run.model_summary import count_flops
from jaxdp.train.step import Replica


def main(argv: list[str]) -> None:
    config, *_ = load(argv)
    set_jax(config)
    parts = make_parts(config)
    step, state = make_the_step(config, parts), jax.eval_shape(state_maker(config, parts))
    microbatches = np.arange(config.microbatches)
    batch = read_batches(parts.dataset, parts.order, [0], microbatches)

    def grads(s, b):
        return step.grads(s, b, Replica(jnp.asarray(microbatches)))

    print(count_flops(jax.make_jaxpr(grads)(state, batch)))


if __name__ == "__main__":
    main(sys.argv[1:])
