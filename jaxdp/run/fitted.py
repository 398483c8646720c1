"""The result of `jaxdp.fit`: final metrics and parameters, and what a user does next with a trained
model.
"""

import contextlib
import dataclasses
import functools
import html
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.checkpoint.published import check_unchanged
from jaxdp.checkpoint.store import choose_step
from jaxdp.checkpoint.weights import MODEL_STATE, filled, from_checkpoint, on_host
from jaxdp.config import Config
from jaxdp.config.parsing import from_mapping
from jaxdp.config.training import Target
from jaxdp.config.validation import flatten
from jaxdp.data.dataset import Arrays, Dataset
from jaxdp.errors import UsageError, user_code
from jaxdp.extras import extras_of
from jaxdp.losses import compute_logits
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import is_evaluation, read
from jaxdp.metrics.numbers import number
from jaxdp.metrics.writer import NOT_METRICS, Record
from jaxdp.models.base import CARRY
from jaxdp.optim.evaluation import evaluation_arrays, evaluation_params
from jaxdp.process import compilation_cache, private_jax
from jaxdp.process.context import current
from jaxdp.run import rundir
from jaxdp.run.build import make_run
from jaxdp.run.components import Objects, Parts, jax_settings, make_parts, state_maker
from jaxdp.run.datasets import not_finite, shapes_of
from jaxdp.run.objects import name_it
from jaxdp.run.training_job import use_compilation_cache
from jaxdp.train.average import EMA, averaged_state
from jaxdp.train.carry import split_carry
from jaxdp.train.evaluate import evaluate
from jaxdp.train.state import TrainState
from jaxdp.train.step import LocalStep, Piece, Recipe, Replica

Tree = Any
SECTIONS = {"eval_data": "eval.data", "transform": "data.transform"}  # of arguments of `fit`


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Fitted:
    """The result of a run.

    final: the last record: loss, metrics, params_sha256. params, model_state, ema: trees of NumPy
    arrays, the same on every rank. params are those to evaluate, if the optimizer trains others
    (`jaxdp.optim.evaluation`). ema is None without `optimizer.ema`; ema_state: the model state that
    belongs to it. run_dir: the directory of metrics.jsonl and the checkpoints. config, objects: of
    the run; data and model are built from them again when first needed."""

    final: dict[str, Any]
    params: Tree
    model_state: Tree
    run_dir: pathlib.Path
    ema: Tree
    config: Config
    objects: Objects
    ema_state: Tree = None

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value}" for name, value in self._metrics().items())
        return f"Fitted({metrics}; {self._count():,} parameters; {self.run_dir})"

    def _repr_html_(self) -> str:
        rows = {**self._metrics(), "parameters": f"{self._count():,}", "run_dir": str(self.run_dir)}
        cells = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in rows.items()
        )
        return f"<table>{''.join(cells)}</table>"

    def _metrics(self) -> dict[str, str]:
        names = [name for name in self.final if name not in NOT_METRICS]
        names.sort(key=lambda name: name != "loss")
        shown = {name: number("loss", self.final[name]) for name in names}
        return {"step": f"{self.final['step']:,}", **shown}

    def _count(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.params))

    @property
    def history(self) -> dict[str, dict[str, list[float]]]:
        """Return the records of metrics.jsonl as columns: {"train": {"step": [...], "loss": [...],
        ...}, "eval": ...}.

        A number that a record lacks is NaN, so all lists of a split have one length. "eval" ends
        with the evaluation at the end of the run. Raises UsageError if this host cannot read the
        file, which rank 0 writes."""
        file = self.run_dir / "metrics.jsonl"
        if not file.is_file():
            raise UsageError(
                f"history: no {str(file)!r} on this host; rank 0 writes it: read it there, and do not remove run_dir"
            )
        records: dict[str, list[Record]] = {"train": [], "eval": []}
        lines = read(file)
        for record in lines:
            split = "eval" if is_evaluation(record, lines) else record.get("split")
            if split in records and record["step"] <= self.final["step"]:
                records[split].append(record)
        return {split: columns(lines) for split, lines in records.items()}

    @property
    def best(self) -> "Fitted":
        """Return the best checkpoint of the run, by the metric `checkpoint.best`; see `load`."""
        return open_checkpoint(self.run_dir, "best", self.objects)

    @functools.cached_property
    def model(self) -> Any:
        """Return the trained module, in evaluation mode, with `params` (not ema); call it on
        transformed inputs.

        Flax NNX: the module. Linen: the bound module. Equinox: the module, for one example; if it
        has state, (module, state). A pair of functions: `apply` with the parameters. Raises
        UsageError for a `jaxdp.models.base.Model`."""
        with settings(self.config):
            module = self._parts.forward.model.module
            if module is None:
                raise UsageError(
                    "model: a jaxdp.models.base.Model has no module; use predict, or its apply and params"
                )
            return module(*jax.tree.map(jnp.asarray, (self.params, self.model_state)))

    def predict(self, x: Any, *, batch_size: int = 256, ema: bool | None = None) -> Any:
        """Return the outputs of the trained model in evaluation mode, as NumPy arrays [example,
        ...].

        x: inputs[example, ...] of any number of rows, or a dict of arrays with the names of the
        training data. They get the data's transform, as in an evaluation. Runs on one device of
        this process, without the other processes. ema: use the running average of the parameters;
        None: if `eval.ema` is set. Raises UsageError for arrays that do not fit the training data.
        """
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise UsageError(f"predict: batch_size {batch_size!r} is not an integer of at least 1")
        with settings(self.config), user_code():
            rows = fitting(
                x if isinstance(x, Mapping) else {"inputs": x}, shapes_of(self._parts.dataset)
            )
            count = len(next(iter(rows.values())))
            size = min(batch_size, count)
            outputs = []
            trained = self._weights(ema)
            for start in range(0, count, size):
                # the last batch repeats the last row
                indices = np.minimum(np.arange(start, start + size), count - 1)
                output = self._forward(*trained, {k: x[indices] for k, x in rows.items()})
                if any(leaf.shape[:1] != (size,) for leaf in jax.tree.leaves(output)):
                    raise UsageError(
                        "predict: the model has an output without one row per example; use `model`"
                    )
                outputs.append(jax.device_get(output))
            return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *outputs)

    def evaluate(self, data: Any = None, *, ema: bool | None = None) -> Record:
        """Return the loss and metrics over a data set, as the run's own evaluation computes them:
        each example once.

        data: as `eval_data` of `fit`; None: the evaluation sets of the run. Loads the run's last
        checkpoint. Several processes: every one calls it. ema: see `predict`.
        """
        config, context = self.config, current()
        objects = {section: dict(named) for section, named in self.objects.items()}
        changes: dict[str, Any] = {"ema": config.eval.ema if ema is None else ema}
        if changes["ema"]:
            self._weights(True)
        if data is not None:
            changes |= {"data": Target(**name_it(objects, "eval.data", data)), "also": {}}
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, **changes))
        with settings(self.config):
            use_compilation_cache(config, context)
            run = make_run(config, self.run_dir, context, objects)
            if not run.data.eval:
                raise UsageError(
                    "evaluate: the run has no evaluation data; give a data set", rank=0
                )
            step = self.final["step"]
            strategy = run.strategy
            is_there = step in context.of_root("steps", run.checkpoints.steps)
            state = run.checkpoints.restore(step, strategy.abstract()) if is_there else None
            expected = self.final.get("params_sha256")
            if state is None or expected not in (None, params_sha256(state.params)):
                where = f"{str(self.run_dir)!r} no longer has this run's checkpoint of step {step}"
                raise UsageError(f"evaluate: {where}; call fit again", rank=0)
            record = evaluate(run, strategy.compile(run.step), strategy.adopt(state))
            if (problem := not_finite(run, record)) is not None and context.is_root:
                safe_print.say(f"warning: {problem[0]}")
            return record

    @property
    def data(self) -> Dataset:
        """Return the training data, such as a `Table`, whose `encode` makes inputs for `predict`."""
        return self._parts.dataset

    @functools.cached_property
    def _parts(self) -> Parts:
        return make_parts(self.config, self.objects)

    @functools.cached_property
    def _forward(self) -> Any:
        forward = self._parts.forward
        step = jnp.int32(self.final["step"])

        @jax.jit
        def run(params, model_state, batch):
            batch = {**batch, "mask": jnp.ones(len(next(iter(batch.values()))), bool)}
            key = jax.random.key(0)
            transform = forward.eval_transform
            seen = batch if transform is None else transform(batch, key, False)
            _, state = jax.eval_shape(forward.model.init, key, forward.policy.inputs(seen))
            carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), split_carry(state)[1])
            kept = {} if carry is None else {CARRY: carry}
            piece = Piece(batch, kept, jnp.int32(0))
            own = TrainState(
                step, params, model_state, None, seed=jnp.asarray(forward.seed, jnp.uint32)
            )
            recipe, alone = Recipe(forward, self._parts.rule), Replica(piece.number[None])
            local = LocalStep(recipe, own, alone, train=False)
            return compute_logits(local.compute_outputs(local.params(params), piece)[0])

        return run

    def _weights(self, ema: bool | None) -> tuple[Tree, Tree]:
        """Return (parameters, model state) to predict with. Raises UsageError if the run has no
        running average.
        """
        if not (self.config.eval.ema if ema is None else ema):
            return self.params, self.model_state
        if self.ema is None:
            raise UsageError(
                "ema: True, but the run has no running average; train with optimizer={'ema': 0.999, ...}"
            )
        return jax.tree.map(
            lambda average, x: average.astype(x.dtype), self.ema, self.params
        ), self.ema_state


def make_fitted(final: Record, state: TrainState, config: Config, objects: Objects) -> Fitted:
    """Copy an exported state to the host. Every rank calls it."""

    def on_host(tree):
        return jax.device_get(jax.tree.map(readable, tree))

    arrays = on_host(evaluation_arrays(state.opt_state))
    ema = on_host(state.extra.get(EMA))
    return Fitted(
        final,
        params=jax.tree.map(np.asarray, evaluation_params(on_host(state.params), arrays)),
        model_state=on_host(state.model_state),
        run_dir=pathlib.Path(str(config.run_dir)),
        ema=ema,
        config=config,
        objects=objects,
        ema_state=None if ema is None else on_host(averaged_state(state)),
    )


def load(run_dir: str | pathlib.Path, step: int | str = "last", **objects: Any) -> Fitted:
    """Return a checkpoint of a run directory as `fit` returns a run: predict, evaluate, model, params.

        jaxdp.load("runs/digits", step="best").predict(images)

    step: the number of an update, "last", or "best": by the metric of `checkpoint.best`. objects:
    those that a script gave to `fit`, by its arguments: model, data, loss, optimizer, eval_data,
    transform. Every process loads for itself. Raises UsageError for a run without this checkpoint,
    or whose model is another one.
    """
    named: dict[str, dict[str, Any]] = {}
    given = {}
    for name, value in objects.items():
        section = SECTIONS.get(name, name)
        given[f"{section}.target"] = name_it(named, section, value).get("target")
    fitted = open_checkpoint(pathlib.Path(run_dir).expanduser(), str(step), named)
    saved = flatten(fitted.config)
    for key, target in given.items():
        if saved.get(key) != target:
            raise UsageError(f"{key}: {target}, but the run has {saved.get(key)}; give that one")
    return fitted


def open_checkpoint(directory: pathlib.Path, wanted: str, objects: Objects) -> Fitted:
    """See `load`."""
    checkpoint = directory / "checkpoints" / str(choose_step(directory, wanted, "step"))
    weights = from_checkpoint(checkpoint, False, "run_dir")
    config = config_here(weights.meta["config"], str(checkpoint))
    with settings(config), rundir.inside(weights.meta.get("folder")), user_code():
        parts = make_parts(config, objects)
        check_unchanged(weights.meta)
        shapes = jax.eval_shape(state_maker(config, parts))

    def trees(weights):
        """Return (parameters, model state)."""
        arrays, title = on_host(weights), weights.title
        params = filled(shapes.params, arrays, title)
        return params, filled(shapes.model_state, arrays, title, MODEL_STATE)

    params, model_state = trees(weights)
    ema, ema_state = None, None
    if config.optimizer.ema is not None:
        ema, ema_state = trees(from_checkpoint(checkpoint, True, "run_dir"))
    evaluated = {"step": int(checkpoint.name), **weights.meta.get("metrics", {})}
    fitted = Fitted(evaluated, params, model_state, directory, ema, config, objects, ema_state)
    # Built here, where relative paths are those of the run.
    fitted.__dict__["_parts"] = parts
    return fitted


def config_here(saved: dict[str, Any], title: str) -> Config:
    """Return the config of a run for the devices of this process, and set what its extras need."""
    config = from_mapping(saved, title)
    for extra in extras_of(config):
        extra.set_environment()
    devices = min(jax.device_count(), config.microbatches)
    parallel = dataclasses.replace(config.parallel, devices=devices)
    return dataclasses.replace(config, parallel=parallel)


@contextlib.contextmanager
def settings(config: Config) -> Iterator[None]:
    """Use the config's settings of JAX inside this context; then restore them, how JAX lowers
    operations, and the settings of the compilation cache."""
    cache = compilation_cache.settings()
    try:
        with jax_settings(config), private_jax.usual_lowerings():
            yield
    finally:
        compilation_cache.leave(cache)


def readable(x: Any) -> Any:
    """Return the array, replicated if this process cannot read all of it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)


def columns(records: list[Record]) -> dict[str, list[float]]:
    """Return records as columns of numbers, NaN where a record lacks one."""
    numbers = [
        {k: float(v) for k, v in r.items() if k not in ("split", "params_sha256")} for r in records
    ]
    names = dict.fromkeys(name for record in numbers for name in record)
    return {name: [record.get(name, math.nan) for record in numbers] for name in names}


def fitting(
    batch: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]
) -> dict[str, np.ndarray]:
    """Return the arrays in the dtypes of the training data. Raises UsageError if they do not fit
    it.

    shapes: {name: (shape [1, ...], dtype)} of an example.
    """
    rows = {}
    for name, value in Arrays(**batch).arrays.items():
        if name not in shapes:
            raise UsageError(
                f"predict: the training data has no {name!r}, only {sorted(shapes)}; rename the array"
            )
        shape, dtype = shapes[name]
        # Integers may wrap, and floats become infinite.
        fits = np.can_cast(value.dtype, dtype, "same_kind") and np.allclose(
            cast := value.astype(dtype), value, 0.1, equal_nan=True
        )
        if value.ndim != len(shape) or not fits:
            raise UsageError(
                f"predict: {name!r} is {value.dtype}{list(value.shape)}, but the model was trained on rows of {dtype}"
                f"{list(shape[1:])}; give it rows like those"
            )
        rows[name] = cast
    return rows
