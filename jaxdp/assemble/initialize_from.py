"""Initialization of a run from another run's parameters; misfits are reported before anything is read."""

import pathlib

import optax

from jaxdp.assemble.run import on_all_ranks
from jaxdp.checkpoint.initialize_from import begin_with, describe, match
from jaxdp.checkpoint.weights import as_published, locate, named, open_weights
from jaxdp.config import Config
from jaxdp.core.state import TrainState
from jaxdp.distributed.context import Context
from jaxdp.parallel.integer_sums import remembering
from jaxdp.parallel.outer import Replicas, with_replicas
from jaxdp.precision import is_key
from jaxdp.training.run import Run


def initialize_from(run: Run, config: Config, context: Context, tx: optax.GradientTransformation) -> Run:
    """Return the run with the initial state of `init_from` and `init`; tx: its optimizer. Raises UsageError on every
    rank."""
    path, init, strategy = config.init_from, config.init, run.strategy
    assert path is not None
    local = on_all_ranks(context, lambda: str(locate(path)))
    source = pathlib.Path(context.of_root("init_from", lambda: local))  # ranks may differ while its run is going on
    weights = on_all_ranks(context, lambda: open_weights(source, init.ema))
    context.check_same("init_from", weights.facts)
    shapes = named(strategy.shapes.params, strategy.shapes.model_state)
    ours = {name: x for name, x in shapes.items() if not is_key(x)}
    if not init.rename:  # expressions apply to the file's own names
        weights = on_all_ranks(context, lambda: as_published(weights, source, ours))
    matched = on_all_ranks(
        context,
        lambda: match(ours, weights.arrays, weights.title, rename=init.rename, load=init.load, skip=init.skip),
    )

    def begin(run: Run) -> TrainState:
        run.log.writer.say(
            "\n".join(filter(None, [describe(matched, ours, weights.title, weights.rows), weights.note]))
        )
        trainable, strategy = run.step.trainable, run.strategy
        if not isinstance(strategy, Replicas):
            return begin_with(strategy, weights, matched.pairs, tx, trainable)
        one = lambda state: remembering(lambda: state, trainable)() if config.parallel.exact else state
        complete = lambda state: with_replicas(one(state), strategy.rule)
        return begin_with(strategy, weights, matched.pairs, tx, trainable, complete)

    return run.replace(begin=begin)
