"""The same bits on any number of devices, shown for the user's own model: every way to train, and a digest of each."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.digest import params_sha256
from jaxdp.errors import UsageError, one_line
from jaxdp.parallel import STAGES, Strategy
from jaxdp.parallel.layout import ZERO
from jaxdp.split import path_string
from jaxdp.step import Batch, Step
from jaxdp.verify.report import table
from jaxdp.verify.subject import Row

HEADS = ("devices", "backend", "zero", "accumulator", "shard_size")
# row -> (its strategy, the step, batch number -> its batch on the strategy's devices)
Make = Callable[[Row], tuple[Strategy, Step, Callable[[int], Batch]]]


class Bits(NamedTuple):
    """What a row trained. digest: `params_sha256`; whole: of all of the state; curve: of each update's metrics."""

    row: Row
    digest: str = ""
    whole: str = ""
    curve: tuple[str, ...] = ()
    leaves: dict[str, str] = {}  # path -> digest, of the final state
    problem: str = ""
    seconds: float = 0.0


class Verdict(NamedTuple):
    """exact: all rows that are not refused have the same bits. differs: of each other row, where it first shows."""

    rows: list[Bits]
    exact: bool
    differs: dict[int, str]


def rows_of(most: int) -> list[Row]:
    """Every way to train on `most` devices; and on each smaller power of two its share of them, one device first."""
    ways: list[tuple[str, int, str, int | None]] = [
        (backend, zero, accumulator, None)
        for backend, stages in STAGES.items()
        for zero in stages
        for accumulator in (("split", "whole") if ZERO[zero].grads else ("split",))
    ]
    fewer = [2**i for i in range(most.bit_length() - 1)]
    rows = [
        Row(n, b, z, "exact", "one", a, k) for i, n in enumerate(fewer) for b, z, a, k in ways[i :: max(len(fewer), 3)]
    ]
    if most > 2:
        widest = max(STAGES, key=lambda name: STAGES[name])  # the one that can also split in groups
        ways += [(widest, zero, "split", most // 2) for zero in (1, 3)]
    return rows + [Row(most, b, z, "exact", "one", a, k) for b, z, a, k in ways]


def verify_bits(
    make: Make, most: int, batches: Sequence[int], say: Callable[[str], None] = lambda text: None
) -> Verdict:
    """Trains the same updates in every way that up to `most` devices allow, and compares them to the bit.

    batches: the number of the batch of each update. Raises UsageError where not even one device can train.
    """
    rows = rows_of(most)
    found = []
    for i, row in enumerate(rows):
        bits = train(make, row, batches)
        found.append(bits)
        say(f"{i + 1}/{len(rows)} {name_of(row)}: {bits.problem or bits.digest[:16]}, {bits.seconds:.1f} s")
    trained = [i for i, bits in enumerate(found) if not bits.problem]
    if not trained:
        raise UsageError(found[0].problem)
    first = found[trained[0]]
    differs = {i: difference(first, found[i]) for i in trained if found[i].whole != first.whole}
    return Verdict(found, not differs, differs)


def train(make: Make, row: Row, batches: Sequence[int]) -> Bits:
    began = time.monotonic()
    try:
        strategy, step, batch = make(row)
    except UsageError as error:
        return Bits(row, problem=one_line(error), seconds=time.monotonic() - began)
    state, program, curve = strategy.init(), strategy.lower(step), []
    for i in batches:
        state, metrics = program.update(state, batch(i))
        curve.append(params_sha256(metrics))
    exported = strategy.export(state)
    whole = {"params": exported.params, "model_state": exported.model_state, "opt_state": exported.opt_state}
    whole["guard"] = exported.guard
    whole |= {name: x for name in ("ema", "carry") if (x := getattr(exported, name)) is not None}
    leaves = jax.tree_util.tree_leaves_with_path(whole)
    by_leaf = {path_string(path): params_sha256(leaf) for path, leaf in leaves}
    return Bits(
        row, params_sha256(exported.params), params_sha256(whole), tuple(curve), by_leaf, "", time.monotonic() - began
    )


def difference(first: Bits, other: Bits) -> str:
    """Where two first differ: the update, and the leaves at the end."""
    update = next((i + 1 for i, (a, b) in enumerate(zip(first.curve, other.curve)) if a != b), None)
    when = f"from update {update} on" if update else "in the state alone"
    leaves = [leaf for leaf, digest in first.leaves.items() if other.leaves.get(leaf) != digest]
    leaves.sort(key=lambda leaf: not leaf.startswith("params/"))
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return f"{when}, in {', '.join(leaves[:3])}{more}"


def name_of(row: Row) -> str:
    return " ".join(f"{head} {cell}" for head, cell in zip(HEADS, cells_of(row)) if cell != "-")


def cells_of(row: Row) -> list[str]:
    values: dict[str, Any] = row._asdict() | ({} if row.zero > 1 else {"accumulator": None})
    return ["-" if values[head] is None else str(values[head]) for head in HEADS]


def as_text(verdict: Verdict, title: str, wide: bool = False) -> str:
    """Each way with its digest, and the verdict in the last line. wide: for a terminal."""
    notes = lambda i: f"FAILED: differs {verdict.differs[i]}" if i in verdict.differs else verdict.rows[i].problem
    cells = [[*cells_of(b.row), b.digest[:16] or "refused", notes(i)] for i, b in enumerate(verdict.rows)]
    return "\n".join([title, "", *table([*HEADS, "params_sha256", ""], cells, wide), "", sentence(verdict)])


def sentence(verdict: Verdict) -> str:
    trained = [bits for bits in verdict.rows if not bits.problem]
    refused = f" ({len(verdict.rows) - len(trained)} more refused)" if len(trained) < len(verdict.rows) else ""
    if verdict.exact:
        return f"exact: {len(trained)} ways to train give the same bits{refused}; params_sha256 {trained[0].digest}"
    return f"not exact: {len(verdict.differs)} of {len(trained)} ways to train differ from the first{refused}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    rows = [
        {
            "strategy": bits.row._asdict(),
            "params_sha256": bits.digest,
            "state_sha256": bits.whole,
            "problem": bits.problem,
            "differs": verdict.differs.get(i, ""),
            "seconds": round(bits.seconds, 2),
        }
        for i, bits in enumerate(verdict.rows)
    ]
    return {"exact": verdict.exact, "jax": jax.__version__, "rows": rows}
