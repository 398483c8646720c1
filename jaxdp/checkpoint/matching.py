"""Which arrays of a run begin as which of another's: a pure function of names, shapes and expressions.

An array's name is its path (a/b/c); that of the model state (BatchNorm's running averages) begins with `model_state/`,
so that one set of expressions serves both.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.split import path_string

MODEL_STATE = "model_state/"
SHOWN = 8  # names in a line


class Match(NamedTuple):
    """pairs: {our name: theirs}; missing: ours that they don't have; skipped: ours not asked for; unused: theirs."""

    pairs: dict[str, str]
    missing: list[str]
    skipped: list[str]
    unused: list[str]


def named(params: Any, model_state: Any) -> dict[str, Any]:
    """{name: leaf} of both trees."""
    trees = (("", params), (MODEL_STATE, model_state))
    return {
        f"{prefix}{path_string(path)}": leaf
        for prefix, tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def match(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    source: str,
    *,
    rename: Mapping[str, str] | None = None,
    load: Sequence[str] = (".*",),
    skip: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Match:
    """Ours and theirs by name; both are {name: what has shape and dtype}, and source says where theirs are from.

    rename: expression to replacement, as `re.sub` takes them; the first that is found in one of their names changes it.
    names: {their name: ours} of a layout that is known, in its place. load, skip: expressions; loaded is what one of
    `load` is found in, and none of `skip`. Raises UsageError for an expression that is found nowhere, names that become
    one, another shape or kind of number, and where nothing is left.
    """
    new_names = renamed(theirs, source, rename or {}) if names is None else {names.get(n, n): n for n in theirs}
    for key, patterns in (("load", load), ("skip", skip)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in ours):
                raise UsageError(
                    f"init.{key}: {pattern!r} matches no parameter; a path is such as {near(pattern, ours)!r}"
                )
    found = lambda patterns, name: any(re.search(pattern, name) for pattern in patterns)
    asked = [name for name in ours if found(load, name) and not found(skip, name)]
    pairs = {name: new_names[name] for name in asked if name in new_names}
    if not pairs:
        fix = "widen init.load, or skip less"
        if asked:
            other = near(asked[0], new_names) if new_names else "none at all"
            fix = f"a path here is {asked[0]!r}, there {other!r}; map them with init.rename"
        raise UsageError(f"init_from: {source} has nothing of what is to be loaded; {fix}")
    check_fit({name: (ours[name], theirs[other], other) for name, other in pairs.items()}, source)
    used = set(pairs.values())
    return Match(
        pairs,
        missing=[name for name in asked if name not in pairs],
        skipped=[name for name in ours if name not in set(asked)],
        unused=[name for name in theirs if name not in used],
    )


def renamed(names: Iterable[str], source: str, rename: Mapping[str, str]) -> dict[str, str]:
    """{new name: name}. Raises UsageError for an expression that is found nowhere, and names that become one."""
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


def check_fit(pairs: Mapping[str, tuple[Any, Any, str]], source: str) -> None:
    """UsageError for the first of {our name: (ours, theirs, their name)} that cannot begin as the other."""
    wrong = []
    for name, (own, other, their_name) in pairs.items():
        there = f"{source} as {their_name!r}" if their_name != name else source
        if tuple(own.shape) != tuple(other.shape):
            wrong.append((name, f"has shape {tuple(other.shape)} in {there}, but {tuple(own.shape)} here"))
        elif kind(own.dtype) != kind(other.dtype):
            wrong.append((name, f"is {other.dtype} in {there}, but {own.dtype} here"))
    if wrong:
        name, problem = wrong[0]
        more = f" (and {len(wrong) - 1} more do not fit)" if wrong[1:] else ""
        raise UsageError(
            f"init_from: {name!r} {problem}{more}; leave it as initialized with init.skip, such as "
            f"{'^' + re.escape(name) + '$'!r}"
        )


def kind(dtype: Any) -> str:
    """What may be cast into another of its kind without a loss of meaning."""
    kinds = {"float": jnp.floating, "integer": jnp.integer, "bool": jnp.bool_}
    if isinstance(dtype, str):  # a name that nothing here can read
        return dtype
    return next((name for name, group in kinds.items() if jnp.issubdtype(dtype, group)), str(dtype))


def describe(found: Match, ours: Mapping[str, Any], source: str, rows: Mapping[str, int] | None = None) -> str:
    """What was loaded, what was not, and what was not used, for people. rows: {their name: how many are loaded} of
    those that have fewer than ours."""
    lines, loaded = [], list(found.pairs)
    of_model = lambda names: [name for name in names if name.startswith(MODEL_STATE)]
    count = f"{len(loaded) - len(of_model(loaded))} of {len(ours) - len(of_model(ours))} parameters"
    if of_model(ours):
        count += f", {len(of_model(loaded))} of {len(of_model(ours))} arrays of the model state"
    elements = 0
    for name, theirs in found.pairs.items():
        first, *rest = ours[name].shape or (1,)
        elements += (rows or {}).get(theirs, first) * math.prod(rest)
    lines.append(f"loaded {count}, {elements:,} elements, from {source}")
    for what, names in (
        ("left as initialized, not in it", found.missing),
        ("left as initialized, skipped", found.skipped),
        ("not used of it", found.unused),
    ):
        if names:
            lines.append(f"  {what}: {shortly(names)}")
    return "\n".join(lines)


def shortly(names: Sequence[str]) -> str:
    """The first few of them, and how many there are more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def near(pattern: str, names: Iterable[str]) -> str:
    """The name most like it."""
    names = list(names)
    return (difflib.get_close_matches(pattern, names, 1, 0.1) or names)[0]
