"""The verb `summary`: list the parameters of a config's model, without allocating them."""

import json

import jax

from jaxdp.cli import Call
from jaxdp.run import model_summary
from jaxdp.run.components import check_paths, describe_groups, make_parts, set_jax, state_maker


def run(call: Call) -> None:
    config = call.config
    set_jax(config)
    shapes = jax.eval_shape(state_maker(config, parts := make_parts(config)))
    check_paths(config, shapes.params)
    rows = model_summary.arrays(shapes, parts.rule.trainable(shapes.params))
    groups = describe_groups(config, parts, shapes.params)
    if call.options["json"]:
        facts = {
            "model": config.model.target,
            **model_summary.totals(rows),
            "groups": groups,
            "arrays": rows,
        }
        print(json.dumps(facts, indent=1))
    else:
        print(model_summary.text(config.model.target, rows))
        print(groups, end="\n" * bool(groups))
