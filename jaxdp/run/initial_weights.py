"""Initialization of a run from another run's parameters; misfits are reported before anything is
read.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.checkpoint.initialize_from import (
    Match,
    begin_with,
    check_differences,
    describe,
    match,
    matches,
)
from jaxdp.checkpoint.weights import Weights, as_published, locate, named, open_weights
from jaxdp.config import Config
from jaxdp.extras import extras_of
from jaxdp.precision import is_key
from jaxdp.process.context import Context
from jaxdp.run.build import on_all_ranks
from jaxdp.run.components import Objects, Parts
from jaxdp.run.source_model import compare
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState


def initialize_from(
    run: Run, config: Config, context: Context, parts: Parts, objects: Objects
) -> Callable[[], TrainState]:
    """Return a function that computes the initial state of `init_from` and `init`. parts, objects:
    of the run. Raises UsageError on every rank."""
    path = config.init_from
    strategy = run.strategy
    assert path is not None
    local = on_all_ranks(context, lambda: str(locate(path)))
    # ranks may differ while its run is going on
    source = pathlib.Path(context.of_root("init_from", lambda: local))
    weights = on_all_ranks(context, lambda: open_weights(source, config.init.ema))
    context.check_same("init_from", weights.facts)
    shapes = named(strategy.shapes.params, strategy.shapes.model_state)
    weights, matched, text = on_all_ranks(
        context, lambda: fitted(config, parts, objects, weights, source, shapes)
    )

    def begin() -> TrainState:
        run.log.writer.say(text)
        rule = parts.rule

        def complete(state: TrainState) -> TrainState:
            for extra in extras_of(config):
                state = extra.initial_state(lambda state=state: state, parts)()
            return strategy.completed(state)

        return begin_with(strategy, weights, matched.pairs, rule.tx, rule.trainable, complete)

    return begin


def fitted(
    config: Config,
    parts: Parts,
    objects: Objects,
    weights: Weights,
    source: pathlib.Path,
    shapes: Mapping[str, Any],
) -> tuple[Weights, Match, str]:
    """Match weights with our parameters, and their model with ours. shapes: {our name: object with
    shape and dtype}.

    Return (the weights, their names and ours, lines about what is loaded and what is not).

    Raises UsageError if an array that `init` selects is missing, does not fit or is not used, and
    if the models differ in an argument that changes the outputs.
    """
    init = config.init
    ours = {name: x for name, x in shapes.items() if not is_key(x)}
    if not init.rename:  # expressions apply to the file's own names
        weights = as_published(weights, source, ours)
    compared = compare(config, parts, objects, weights, source, ours)
    matched = match(
        ours,
        weights.arrays,
        weights.title,
        rename=init.rename,
        load=init.load,
        skip=init.skip,
        absent=weights.absent,
        hint=compared.hint,
    )
    differences = [
        x for x in compared.differences if x.name != "tied" or not matches(init.skip, "head/kernel")
    ]
    accepted = check_differences(differences, init.changed, weights.title)
    loaded = describe(matched, ours, weights.title, weights.rows)
    return (
        weights,
        matched,
        "\n".join(filter(None, [loaded, weights.note, accepted, compared.note])),
    )
