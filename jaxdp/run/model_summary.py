"""The arrays of a model, from shapes alone: paths, shapes, dtypes, sizes, and which of them are
trained.
"""

import math
from typing import Any

import jax

from jaxdp.metrics.numbers import size, table
from jaxdp.split import path_string
from jaxdp.train.state import TrainState


def arrays(shapes: TrainState, trainable: Any) -> list[dict[str, Any]]:
    """Return a row for each parameter and each array of the model state. trainable: the parameters
    without the frozen ones.
    """
    trained = {path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(trainable)}
    rows = []
    for kind, tree in (("frozen", shapes.params), ("state", shapes.model_state)):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name, count = path_string(path), math.prod(x.shape)
            is_trained = kind == "frozen" and name in trained
            rows.append(
                {
                    "path": name,
                    "shape": list(x.shape),
                    "dtype": x.dtype.name,
                    "count": count,
                    "bytes": count * x.dtype.itemsize,
                    "kind": "trainable" if is_trained else kind,
                }
            )
    return rows


def totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of parameters, of those that are trained and frozen, and the bytes of all
    arrays.
    """

    def count(*kinds):
        return sum(row["count"] for row in rows if row["kind"] in kinds)

    return {
        "parameters": count("trainable", "frozen"),
        "trainable": count("trainable"),
        "frozen": count("frozen"),
        "bytes": sum(row["bytes"] for row in rows),
    }


def text(model: str, rows: list[dict[str, Any]]) -> str:
    """Return a table of the arrays with a line of totals. model: its name."""

    lines = [["", "", "shape", "dtype", "count", "size"]]
    for row in rows:
        columns = [row["path"], row["kind"], str(row["shape"]), row["dtype"]]
        lines.append([*columns, f"{row['count']:,}", size(row["bytes"])])
    total = totals(rows)
    parts = f"{total['trainable']:,} trainable, {total['frozen']:,} frozen"
    last = f"{model}: {total['parameters']:,} parameters ({parts}), {size(total['bytes'])}"
    return "\n".join([*table(lines, ">"), "", last])
