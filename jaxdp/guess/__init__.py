"""`jaxdp train DATA`: the config of a first run, from what is found in a file or a folder.

The endings of the files decide which data set reads them, and what it finds in them decides which
configs of this folder fit. So `jaxdp train DATA` becomes a `jaxdp train --config ...` as any other.
Nothing here needs JAX.
"""

import json
import re
from pathlib import Path
from statistics import mode

import numpy as np

from jaxdp import data
from jaxdp.cli.parse import parse
from jaxdp.config.values import argument, dump
from jaxdp.data.image_files import kind_of_name
from jaxdp.data.npz import arrays_by_split, stored_arrays
from jaxdp.errors import UsageError, suggest
from jaxdp.extras import Extra
from jaxdp.metrics import safe_print
from jaxdp.process.launchers import discover
from jaxdp.tables.rows import is_number, read_frame
from jaxdp.targets import bind, parameters

# A data set and the endings of its files, as `kind_of_name` has them.
ENDINGS = {
    "Table": ".csv .tsv .parquet",
    "ImageFolder": "image",
    "ImageZip": ".zip",
    "Npz": ".npz .npy",
    "TextFile": ".txt",
    "Documents": ".jsonl",
    "TokenFile": ".bin",
}
KNOWN = (
    "give a table (.csv, .tsv, .parquet), images by class (a folder or .zip), arrays (.npz, or a folder of .npy), text "
    "(.txt, .jsonl) or tokens (.bin, or a folder of .bin)"
)
LABEL = "labels?|target|class|y"
NOTE = "# A first config. Save it as mine.yaml for --config mine.yaml. --KEY VALUE sets any key."
ARGS = "data.args."
MANY = 64  # values of a column: texts with more are names or prose, numbers with more a quantity


class Door(Extra):
    """The guess of a config."""

    def arguments(self, path: str, *others: str) -> list[str]:
        """Return arguments of `jaxdp train` that train on the data in `path`, with `others`; print
        their config, but not on other ranks than 0. Raises UsageError."""
        options, pairs = parse(others, "train")
        if files := options["config"]:
            raise UsageError(f"command line: {path!r} and --config {files[0]}; give one of them")
        args = {x[len(ARGS) :]: argument(text) for x, text in pairs if x.startswith(ARGS)}
        name, notes = data_set_of(path), NOTE
        if name == "Table":
            frame = read_frame(path)
            counts = frame.nunique()
            usable = [
                x for x in frame if counts[x] > 1 and (counts[x] <= MANY or is_number(frame[x]))
            ]
            named = [x for x in frame if re.fullmatch(LABEL, x.strip(), re.I)]
            label = args.setdefault("label", [*named, frame.columns[-1]][0])
            if label not in usable:
                raise UsageError(
                    f"data.args.label: {label!r} is no column of classes or numbers; choose one of {usable[:8]}"
                )
            args.setdefault("columns", [x for x in usable if x != label])
            args.setdefault("regression", bool(counts[label] > MANY))
            others_of = [x for x in frame if x not in usable]
            notes += (
                f"\n# The label is {label!r}; --data.args.label NAME sets another. Constants, and texts of more than "
                f"{MANY} values, are no inputs: {others_of}. regression: true predicts a number, false one of the "
                "values."
            )
        elif name == "Npz":
            stored = stored_arrays(path)
            train, _ = arrays_by_split(path, stored, None)
            names = sorted(train.values(), key=lambda x: stored[x].size)
            if "val_images" in stored:
                name = "MedMNIST"
            elif len(names) < 2:
                raise UsageError(
                    f"DATA: {path!r} has only {names}; inputs and labels are two arrays"
                )
            else:
                args.setdefault("arrays", {"inputs": names[-1], "labels": names[0]})
        source = getattr(data, name)
        args[next(iter(parameters(source)))] = path
        parts = ["language"]
        if name in ("TextFile", "Documents", "TokenFile"):
            args.setdefault("length", 128)
        else:
            if name.startswith("Image"):
                args.setdefault("size", 64)
            dataset = bind("data", source, args)()
            labels = getattr(dataset, "arrays", vars(dataset))["labels"]
            _, counts = np.unique(labels, return_counts=True)
            parts = ["images" if len(dataset.input_shape) == 3 else "rows"]
            if name.startswith("Image"):
                parts = ["large_images"]
            if labels.dtype.kind == "f":
                parts = ["quantity"]
            elif 10 * min(counts) * len(counts) < len(labels):
                parts.append("uneven")
                notes += (
                    f"\n# Classes are uneven: the rarest has {min(counts):,} of {len(labels):,} examples. macro_f1 "
                    "counts all equally, and the data set Balanced draws all equally (docs/data.md#uneven-classes)."
                )
        files = [Path(__file__).with_name(f"{part}.yaml") for part in parts]
        if not options["print_config"] and not discover().rank:
            content = "".join(file.read_text(encoding="utf-8") for file in files)
            safe_print.say(f"{notes}\n{content}{dump({'data': {'target': name, 'args': args}})}")
        return [
            f"--run_dir=runs/{Path(path).absolute().stem}",
            *(f"--config={file}" for file in files),
            f"--data.target={name}",
            *(f"--{ARGS}{key}={json.dumps(value)}" for key, value in args.items()),
            *others,
        ]


def data_set_of(path: str) -> str:
    """Return the data set that reads a path. Raises UsageError if none does."""
    file = Path(path).expanduser()
    if not file.exists():
        siblings = map(str, file.parent.glob("*"))
        raise UsageError(
            f"DATA: {path!r} does not exist; {suggest(path, siblings, otherwise=KNOWN)}"
        )
    if any(file.glob("config.*")):
        raise UsageError(
            f"DATA: {path!r} has a config, as a run or a model: --run_dir continues a run, --init_from starts from a "
            "model; move the file elsewhere if these are data"
        )
    kinds = [kind_of_name(x.name) for x in [file, *file.rglob("*")]]
    names = [name for kind in kinds for name, x in ENDINGS.items() if kind in x.split()]
    if not names:
        raise UsageError(f"DATA: {path!r} has no data of a kind that is known; {KNOWN}")
    return mode(names)
