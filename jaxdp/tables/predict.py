"""The verb `predict`: predict the rows of a table with a run whose data was a `Table`."""

import pathlib
from collections import Counter

import numpy as np
from scipy.special import softmax

from jaxdp.cli import Call
from jaxdp.cli.export import run_directory
from jaxdp.data.image_files import counted
from jaxdp.errors import UsageError, one_line
from jaxdp.run.fitted import load
from jaxdp.tables.rows import read_frame


def run(call: Call) -> None:
    """Write the table with the columns `predicted`, and `p_CLASS` of each class."""
    options = call.options
    directory = run_directory(options["run_dir"])
    if not options["data"]:
        raise UsageError("--data: missing; give a table, e.g. --data new.csv")
    fitted = load(directory, options["step"] or "last")
    if not hasattr(fitted.data, "encode"):
        raise UsageError(
            f"--run_dir: {str(directory)!r} was not trained on a Table; in Python, jaxdp.load({str(directory)!r})"
            ".predict takes arrays"
        )
    inputs = fitted.data.encode(options["data"], "--data")
    # As it is written: 00042 stays so.
    frame = read_frame(options["data"], "--data", dtype=str, keep_default_na=False)
    outputs = np.asarray(fitted.predict(inputs), np.float64)
    names = getattr(fitted.data, "class_names", None)
    if names is None:
        outputs = outputs * fitted.data.scale + fitted.data.center  # type: ignore[attr-defined]
        columns = {"predicted": outputs.ravel()}
        found = f"mean {outputs.mean():.6g}"
    else:
        columns = {"predicted": np.array(names)[outputs.argmax(-1)]}
        columns |= {f"p_{name}": share for name, share in zip(names, softmax(outputs, -1).T)}
        found = counted(Counter(columns["predicted"]))
    for name in {*frame} & {*columns}:
        raise UsageError(f"--data: it has a column {name!r}, as the output will; rename it")
    frame = frame.assign(**columns)
    output = pathlib.Path(options["output"]).expanduser()
    write = frame.to_parquet if output.suffix == ".parquet" else frame.to_csv
    try:
        if output.exists():
            raise ValueError("it exists")
        write(output, index=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another"
        ) from None
    print(f"{len(frame):,} rows of update {fitted.final['step']}: {found}; written to {output}")
