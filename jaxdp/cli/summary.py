"""The verb `summary`: list the parameters of a config's model, without allocating them."""

import json

import jax

from jaxdp.analysis import summary
from jaxdp.assemble.components import check_paths, make_parts, set_jax, state_maker
from jaxdp.cli import Call


def run(call: Call) -> None:
    config = call.config
    set_jax(config)
    shapes = jax.eval_shape(state_maker(config, make_parts(config)))
    check_paths(config, shapes.params)
    rows = summary.arrays(shapes, config.optimizer.frozen)
    if call.options["json"]:
        print(json.dumps({"model": config.model.target, **summary.totals(rows), "arrays": rows}, indent=1))
    else:
        print(summary.text(config.model.target, rows))
