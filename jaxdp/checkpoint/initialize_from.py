"""Initialize a run from arrays of another run or file: match them by name, load them, and rebuild
what follows.

Optimizer state and running average are computed from the loaded parameters.
`jaxdp.checkpoint.weights` opens a source; `jaxdp.run.initial_weights` applies this to the
config's `init_from` and `init`."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.checkpoint.published import Difference
from jaxdp.checkpoint.weights import MODEL_STATE, Weights, named
from jaxdp.errors import UsageError, nearest
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import kind
from jaxdp.process.hosts import listed
from jaxdp.split import path_string
from jaxdp.train.average import EMA, EMA_STATE, first_statistics
from jaxdp.train.state import TrainState

Tree = Any


class Match(NamedTuple):
    """pairs: {our name: theirs}; skipped: ours, not selected; unused: theirs, not selected."""

    pairs: dict[str, str]
    skipped: list[str]
    unused: list[str]


def match(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    source: str,
    *,
    rename: Mapping[str, str] | None = None,
    load: Sequence[str] = (".*",),
    skip: Sequence[str] = (),
    absent: Mapping[str, str] = MappingProxyType({}),
    hint: str = "",
) -> Match:
    """Match our arrays to theirs by name; both are {name: object with shape and dtype}. source:
    theirs, for messages.

    rename: {expression: replacement} as for `re.sub`; the first expression found in one of their
    names changes it. load, skip: expressions; they select the names, ours and theirs, that one of
    `load` matches and none of `skip`. absent: {our name: the tensor that it needs and the source
    lacks}. hint: more on why names may differ.

    Raises UsageError for an expression without a match, two names that become equal, a different
    shape or kind of dtype, if nothing is left to load, and for a selected name that is only ours or
    only theirs."""
    new_names = renamed(theirs, source, rename or {})
    names = {**ours, **new_names}
    for key, patterns, known in (("load", load, ours), ("skip", skip, names)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in known):
                raise UsageError(
                    f"init.{key}: {pattern!r} matches no parameter; a path is such as {near(pattern, ours)!r}"
                )
    selected = [name for name in names if matches(load, name) and not matches(skip, name)]
    pairs = {name: new_names[name] for name in selected if name in ours and name in new_names}
    lacking = [name for name in selected if name not in new_names]
    unused = [name for name in selected if name not in ours]
    if not pairs:
        fix = "widen init.load, or skip less"
        if lacking:
            other = near(lacking[0], new_names) if new_names else "none at all"
            fix = f"a path here is {lacking[0]!r}, there {other!r}; map them with init.rename"
        raise UsageError(f"init_from: {source} has none of the arrays to load; {fix}")
    check_fit(pairs, ours, theirs, source, hint)
    if lacking or unused:
        problems = []
        if lacking:
            needed = [f"{absent[x]!r} for {x!r}" if x in absent else repr(x) for x in lacking]
            problems.append(f"it has no {first_of(needed)}")
        if unused:
            labels = [repr(label_of(new_names[name], theirs)) for name in unused]
            problems.append(f"no parameter here is its {first_of(labels)}")
        pattern = "^" + re.escape((lacking + unused)[0]) + "$"
        fix = f"leave out what may differ with init.skip, such as {pattern!r}{hint}"
        other = "map them with init.rename, or " if lacking and unused else ""
        raise UsageError(
            f"init_from: {source} does not fit the model: {', and '.join(problems)}; {other}{fix}"
        )
    used = set(pairs.values())
    return Match(
        pairs,
        skipped=[name for name in ours if name not in pairs],
        unused=[name for name in theirs if name not in used],
    )


def matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of the others."""
    return f"{names[0]} (and {len(names) - 1} more)" if names[1:] else names[0]


def renamed(names: Iterable[str], source: str, rename: Mapping[str, str]) -> dict[str, str]:
    """Return {new name: name}. Raises UsageError for an expression without a match, and names that
    become equal.
    """
    names = list(names)
    for pattern in rename:
        if not any(re.search(pattern, name) for name in names):
            hint = f"; a path there is such as {near(pattern, names)!r}" if names else ""
            raise UsageError(f"init.rename: {pattern!r} matches nothing in {source}{hint}")
    new: dict[str, str] = {}
    for name in names:
        pattern = next((p for p in rename if re.search(p, name)), "")
        replacement = rename.get(pattern, "")
        try:
            other = re.sub(pattern, replacement, name) if pattern in rename else name
        except (re.error, IndexError) as error:
            raise UsageError(
                f"init.rename: {pattern!r} cannot be replaced by {replacement!r} ({error}); a group is such as "
                r"\1, in YAML inside single quotes or none"
            ) from None
        if other in new:
            raise UsageError(
                f"init.rename: {new[other]!r} and {name!r} of {source} both become {other!r}; narrow the expressions"
            )
        new[other] = name
    return new


def label_of(name: str, theirs: Mapping[str, Any]) -> str:
    """Return the name of their array in messages."""
    return str(getattr(theirs[name], "label", name))


def check_fit(
    pairs: Mapping[str, str],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    source: str,
    hint: str,
) -> None:
    """Raise UsageError for the first of `pairs` {our name: theirs} with another shape or kind of
    dtype. hint: see `match`."""
    wrong = []
    for name, other in pairs.items():
        here, there, label = ours[name], theirs[other], label_of(other, theirs)
        origin = f"{source} as {label!r}" if label != name else source
        if tuple(here.shape) != tuple(there.shape):
            problem = f"has shape {tuple(there.shape)} in {origin}, but {tuple(here.shape)} here"
        elif kind(here.dtype) != kind(there.dtype):
            problem = f"is {there.dtype} in {origin}, but {here.dtype} here"
        else:
            continue
        wrong.append((name, problem))
    if wrong:
        name, problem = wrong[0]
        more = f" (and {len(wrong) - 1} more do not fit)" if wrong[1:] else ""
        raise UsageError(
            f"init_from: {name!r} {problem}{more}; leave it as initialized with init.skip, such as "
            f"{'^' + re.escape(name) + '$'!r}{hint}"
        )


def check_differences(
    differences: Iterable[Difference], changed: Sequence[str], source: str
) -> str:
    """Return a line about the differences of the models that `init.changed` names; raise UsageError
    for any other, and for a name that is none."""
    first = {difference.name: difference for difference in reversed([*differences])}
    for name in changed:
        if name not in first:
            raise UsageError(f"init.changed: {name!r} does not differ from {source}; leave it out")
    if wrong := [difference for name, difference in first.items() if name not in changed]:
        names = first_of([difference.name for difference in wrong])
        raise UsageError(
            f"init_from: {wrong[0].problem}, so the loaded parameters would compute something else; {wrong[0].fix}, or "
            f"accept it with init.changed: {names}"
        )
    return (
        f"  differs from the source, as init.changed says: {', '.join(changed)}" if changed else ""
    )


def describe(
    result: Match, ours: Mapping[str, Any], source: str, rows: Mapping[str, int] | None = None
) -> str:
    """Describe in text which arrays were loaded, skipped, and not used. rows: {their name: number
    of loaded rows} of arrays with fewer rows than ours."""
    lines, loaded = [], list(result.pairs)

    def of_model(names):
        return [name for name in names if name.startswith(MODEL_STATE)]

    count = f"{len(loaded) - len(of_model(loaded))} of {len(ours) - len(of_model(ours))} parameters"
    if of_model(ours):
        count += f", {len(of_model(loaded))} of {len(of_model(ours))} arrays of the model state"
    elements = 0
    for name, theirs in result.pairs.items():
        first, *rest = ours[name].shape or (1,)
        elements += (rows or {}).get(theirs, first) * math.prod(rest)
    lines.append(f"loaded {count}, {elements:,} elements, from {source}")
    for title, names in (
        ("left as initialized, skipped", result.skipped),
        ("not used from the source", result.unused),
    ):
        if names:
            lines.append(f"  {title}: {listed(names)}")
    return "\n".join(lines)


def near(pattern: str, names: Iterable[str]) -> str:
    """Return the name most similar to the pattern."""
    names = list(names)
    return nearest(pattern, names, 0.1) or names[0]


def begin_with(
    strategy: Strategy,
    weights: Weights,
    pairs: Mapping[str, str],
    tx: optax.GradientTransformation,
    trainable: Callable[[Tree], Tree],
    complete: Callable[[TrainState], TrainState] = lambda state: state,
) -> TrainState:
    """Return the initial state, with the arrays in `pairs` {our name: theirs} loaded, sharded and
    cast to our dtypes.

    The other arrays are initialized as usual, and so are the rows that an array of `weights.rows`
    does not have. Optimizer state and running average are computed from the resulting parameters.
    complete: adds what the strategy and extras need beside that of ordinary training.
    """
    abstract = strategy.abstract()
    rows = weights.rows
    state = strategy.export(strategy.init()).replace(opt_state=None, extra={})
    initial = named(state.params, state.model_state)
    values = {name: x for name, x in initial.items() if pairs.get(name) in {None, *rows}}
    del initial
    state = state.replace(params=None, model_state=None)  # free memory before loading
    like = named(abstract.params, abstract.model_state)
    loaded = weights.read({theirs: like[ours] for ours, theirs in pairs.items()})
    for ours, theirs in pairs.items():
        values[ours] = (
            _merge_rows(rows[theirs], loaded[theirs], values[ours])
            if theirs in rows
            else loaded[theirs]
        )

    def fill(tree, prefix=""):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: values[prefix + path_string(path)], tree
        )

    state = state.replace(
        params=fill(abstract.params), model_state=fill(abstract.model_state, MODEL_STATE)
    )

    def derive(state: TrainState) -> tuple[Tree, dict[str, Tree]]:
        # An update donates all of the state, so no two arrays may share memory.
        state = jax.tree.map(jnp.copy, state)
        extra = {}
        if (like := abstract.extra.get(EMA)) is not None:
            extra[EMA] = jax.tree.map(lambda p, e: p.astype(e.dtype), state.params, like)
        if EMA_STATE in abstract.extra:
            extra[EMA_STATE] = first_statistics(state.model_state)
        state = complete(state.replace(opt_state=tx.init(trainable(state.params)), extra=extra))
        return state.opt_state, state.extra

    shardings = jax.tree.map(lambda x: x.sharding, (abstract.opt_state, abstract.extra))
    opt_state, extra = jax.jit(derive, out_shardings=shardings)(state)
    return strategy.adopt(state.replace(opt_state=opt_state, extra=extra))


def _merge_rows(rows: int, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new` in the first `rows` rows and `old` in the rest, with their common sharding."""

    def choose(new, old):
        inside = jnp.arange(len(new)).reshape(-1, *(1,) * (new.ndim - 1)) < rows
        return jnp.where(inside, new, old)

    return jax.jit(choose, out_shardings=new.sharding)(new, old)
