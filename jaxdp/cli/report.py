"""The verb `report`: run directories as one page."""

import pathlib
import sys

from jaxdp.cli import Call
from jaxdp.errors import UsageError
from jaxdp.report import html
from jaxdp.report.read import Json, read_run
from jaxdp.report.writer import NAME


def run(call: Call) -> None:
    """Writes the page, and says where. Raises UsageError where a run cannot be read or the file not be written."""
    options = call.options
    given = [pathlib.Path(run) for run in options["run"]]
    if not given:
        raise UsageError("report: no run given; name run directories, e.g. jaxdp report runs/digits")
    for directory in given:
        inside = sorted(file.parent for file in directory.glob("*/metrics.jsonl"))
        if inside and not (directory / "metrics.jsonl").exists():
            raise UsageError(
                f"report: {str(directory)!r} holds {len(inside)} run{'s' * (len(inside) > 1)}; name those to show, "
                f"or {directory}/*"
            )
    found = read_runs(given)
    directories, runs = list(found), list(found.values())
    for run, name in zip(runs, names(directories)):
        run["name"] = name
    default = directories[0] / NAME if len(runs) == 1 else pathlib.Path(NAME)
    output = pathlib.Path(options["out"]) if options["out"] else default
    if output.is_dir():
        raise UsageError(
            f"--out: {str(output)!r} is a directory; give the path of a file, such as {str(output / NAME)!r}"
        )
    try:
        html.write(output, html.render(runs))
    except OSError as error:
        raise UsageError(f"--out: {str(output)!r} cannot be written ({error.strerror}); choose another file") from None
    print(f"{output}  {output.stat().st_size / 1e3:,.0f} kB, {len(runs)} run{'s' * (len(runs) > 1)}")


def read_runs(directories: list[pathlib.Path]) -> dict[pathlib.Path, Json]:
    """The runs by directory. Of several, as a shell makes of `runs/*`, what is there and is no run is said, and left
    out. Raises UsageError where nothing is left, and for what is not there."""
    found: dict[pathlib.Path, Json] = {}
    for directory in directories:
        try:
            found[directory] = read_run(directory)
        except UsageError as error:
            if len(directories) == 1 or not directory.exists():
                raise
            print(f"jaxdp: {str(error).rpartition('; ')[0]}; left out", file=sys.stderr)
    if not found:
        raise UsageError(
            f"report: none of these {len(directories)} is a run with metrics; give directories of runs, such as "
            "runs/digits"
        )
    return found


def names(directories: list[pathlib.Path]) -> list[str]:
    """Of each its last part, or as much of its end as tells it from the others."""
    parts = [directory.resolve().parts for directory in directories]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(p[-depth:]) for p in parts]
        if len(set(found)) == len(found):
            break
    return found
