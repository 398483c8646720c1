"""The verb `predict`: predict the rows of a table with a run whose data was a `Table`."""

import pathlib

import numpy as np
from scipy.special import softmax

from jaxdp.cli import Call
from jaxdp.cli.export import run_directory
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
    frame = read_frame(options["data"], "--data")
    outputs = np.asarray(fitted.predict(fitted.data.encode(frame)), np.float64)
    names = getattr(fitted.data, "class_names", None)
    if names is None:
        outputs = outputs * fitted.data.scale + fitted.data.center  # type: ignore[attr-defined]
        frame["predicted"] = outputs.reshape(len(frame))
        found = f"mean {frame['predicted'].mean():.6g}"
    else:
        frame["predicted"] = np.array(names)[outputs.argmax(-1)]
        for name, share in zip(names, softmax(outputs, -1).T):
            frame[f"p_{name}"] = share
        counts = frame["predicted"].value_counts()
        found = ", ".join(f"{counts[name]:,} {name}" for name in counts.index)
    output = pathlib.Path(options["output"]).expanduser()
    write = frame.to_parquet if output.suffix == ".parquet" else frame.to_csv
    try:
        write(output, index=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another"
        ) from None
    print(f"{len(frame):,} rows of update {fitted.final['step']}: {found}; written to {output}")
