"""What a row is."""

import pathlib
from typing import Any

import numpy as np

from jaxdp.data.dataset import class_names
from jaxdp.data.image_folder import import_pillow

CHARACTERS = 60  # of a text


def describe(dataset: Any, example: int, folder: pathlib.Path) -> str:
    """Return what an example is: the text of its tokens, the inputs of a row of a table, or the path of
    the PNG that is written to the folder for an image; and its label, if that is one number.

    Raises UsageError for an image without Pillow.
    """
    row = dataset.read(np.array([example]))
    inputs, label = np.asarray(row.get("inputs", 0)), np.asarray(row.get("labels", ()))
    words = ""
    if label.size == 1:
        names = class_names(dataset)
        words = f"label {names[int(label.item())] if names else label.item()}; "
    if hasattr(dataset, "tokenizer"):
        return words + repr(dataset.tokenizer.decode(inputs[0])[:CHARACTERS])
    if hasattr(dataset, "encode"):  # a `Table`
        columns = [f"{name} {x:g}" for name, x in zip(dataset.names, inputs[0])]
        return f"{words}row {dataset.rows[example]} of the table: {', '.join(columns)}"
    if inputs.ndim == 4 and inputs.shape[-1] in (1, 3):
        folder.mkdir(exist_ok=True)
        file = folder / f"example_{example}.png"
        pixels = np.interp(inputs[0], (inputs.min(), inputs.max()), (0, 255))
        import_pillow("Image").fromarray(pixels.astype(np.uint8).squeeze()).save(file)
        words += str(file)
    return words
