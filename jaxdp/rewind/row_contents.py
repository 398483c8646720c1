"""What a row is."""

from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, class_names

CHARACTERS = 60  # of a text


def describe(dataset: Any, example: int) -> str:
    """Return what an example is: the text of its tokens; or its label, if that is one number, and its
    row of the file, if a part of the file is a split.
    """
    row = dataset.read(np.array([example]))
    if hasattr(dataset, "tokenizer"):
        return repr(dataset.tokenizer.decode(row["inputs"][0])[:CHARACTERS])
    words, label = "", np.asarray(row.get("labels", ()))
    if label.size == 1:
        names = class_names(dataset)
        words = f"label {names[int(label.item())] if names else label.item()}"
    if isinstance(dataset, Arrays) and dataset.rows is not None:
        words += f"; row {dataset.rows[example]} of the file, counted from 0"
    return words
