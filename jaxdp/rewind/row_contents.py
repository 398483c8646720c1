"""What a row is."""

from typing import Any

import numpy as np

from jaxdp.data.dataset import class_names

CHARACTERS = 60  # of a text


def describe(dataset: Any, example: int) -> str:
    """Return what an example is: the text of its tokens; or its label, if that is one number, and of a
    table its row and the inputs.
    """
    row = dataset.read(np.array([example]))
    if hasattr(dataset, "tokenizer"):
        return repr(dataset.tokenizer.decode(row["inputs"][0])[:CHARACTERS])
    words, label = "", np.asarray(row.get("labels", ()))
    if label.size == 1:
        names = class_names(dataset)
        words = f"label {names[int(label.item())] if names else label.item()}"
    if hasattr(dataset, "encode"):  # a `Table`
        columns = [f"{name} {x:g}" for name, x in zip(dataset.names, row["inputs"][0])]
        words += f"; row {dataset.rows[example]} of the table: {', '.join(columns)}"
    return words
