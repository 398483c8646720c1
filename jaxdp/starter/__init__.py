"""`jaxdp train DATA`: a starter config, from what is found in a file or a folder.

The endings of files decide which data set reads them. What that finds decides the model and the loss:
the parts of a config in kinds.yaml. Nothing here needs JAX.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.config.validation import filled
from jaxdp.config.values import dump, load, read_file
from jaxdp.data.image_files import kind_of_name
from jaxdp.data.mixture import make_set
from jaxdp.data.npz import arrays_by_split, stored_arrays
from jaxdp.errors import UsageError
from jaxdp.metrics import safe_print
from jaxdp.process.launchers import discover
from jaxdp.tables.rows import read_frame

INPUTS = r"(?i)^(x|data|features?|images?)$"
LABELS = r"(?i)^(y|class(es)?|label|targets?)$"
ID = r"(?i)(.*[\W_])?id"
MANY = 64  # values of a column: texts with more are names or prose, numbers with more a quantity


class Door:
    """The starter config of data: no `Extra`, since it adds nothing to a run."""

    @staticmethod
    def complete(path: str, values: Any, is_quiet: bool) -> Any:
        """Return the keys of a config that trains on the data in `path`: `values`, which are nested,
        and those that it lacks. Print them, unless `is_quiet`, and not on other ranks than 0.

        Raises UsageError for data of which it is not clear what to learn."""
        kinds = load(read_file(Path(__file__).with_name("kinds.yaml")), "kinds.yaml")
        kind = kind_of(path, kinds)
        config = filled(values, kind)
        note = "# A starter config. Save it as mine.yaml for --config mine.yaml; --KEY VALUE sets any key."
        data = config["data"]
        args = data["args"]
        if data["target"] == "Table":
            note += choose_columns(path, args)
        elif data["target"] == "Npz" and "arrays" not in args:
            choose_arrays(path, data)
        args.setdefault(config.pop("path"), path)
        if "model" not in kind:
            dataset: Any = make_set("data", data, "train")
            labels = dataset.arrays.get("labels", np.array(None))
            is_several = labels.ndim == 2 and {*labels.flat} <= {0, 1}
            task = "several" if is_several else f"{labels.dtype.kind}{labels.ndim}"
            if task not in kinds:
                raise UsageError(
                    f"data.args.arrays: of {[*dataset.arrays]} in {path!r}, the labels are {labels.dtype}"
                    f"{[*labels.shape]}; classes are integers [example], numbers floats [example, 1], several labels "
                    "0 or 1 [example, label]; name the arrays as in {inputs: x_train, labels: y_train}"
                )
            model = kinds[f"inputs{len(dataset.input_shape)}"]
            config = filled(filled(config, kinds[task]), model)
            if is_several:
                config["model"]["args"].setdefault("num_classes", labels.shape[1])
        if not is_quiet and not discover().rank:
            safe_print.say(f"{note}\n{dump(config)}")
        return config


def kind_of(path: str, kinds: Any) -> Any:
    """Return the part of a config that reads most files of a path. Raises UsageError if none does."""
    file = Path(path)
    endings = [kind_of_name(x.name) for x in [file, *file.rglob("*")]]
    ending = max(kinds, key=endings.count)
    if ending not in endings or any(file.glob("config.*")):
        raise UsageError(
            f"DATA: {path!r} is not data of a known kind; give a table (.csv, .tsv, .parquet), images by class (a "
            "folder or .zip), arrays (.npz, or a folder of .npy), text (.txt, a folder of .txt, .jsonl) or tokens "
            "(.bin, or a folder of .bin); a config needs --config, and a run that goes on --run_dir"
        )
    return kinds[ending]


def choose_columns(path: str, args: Any) -> str:
    """Add the arguments of a `Table` that are not there; return a line about the other columns."""
    frame = read_frame(path)
    label = args.setdefault("label", "label")  # if there is none, `Table` lists the columns
    counts = frame.astype(str).nunique()

    def is_input(name):
        # Texts of few values, and whole numbers unless all differ, as those of an id.
        kinds = "f" if counts[name] == len(frame) else "iuf" if counts[name] > MANY else "iufbO"
        return frame[name].dtype.kind in kinds and not re.fullmatch(ID, f"{name}")

    columns = args.setdefault("columns", [x for x in frame if x != label and is_input(x)])
    is_quantity = counts.get(label, 0) > MANY and frame[label].dtype.kind in "iuf"
    args.setdefault("regression", bool(is_quantity))
    return f"\n# Left out, as an id or a text of more than {MANY} values: {sorted({*frame} - {label, *columns})}"


def choose_arrays(path: str, data: Any) -> None:
    """Add the argument `arrays` of an `Npz`, or choose `MedMNIST`, whose arrays have known names."""
    stored = stored_arrays(path)
    if "val_images" in stored and stored["train_labels"].dtype.kind in "iu":
        data["target"] = "MedMNIST"
        return
    train, _ = arrays_by_split(path, stored, None)
    data["args"]["arrays"] = {
        re.sub(INPUTS, "inputs", re.sub(LABELS, "labels", key)): name for key, name in train.items()
    }
