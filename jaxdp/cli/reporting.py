"""The verb `report`: run directories as one page."""

import pathlib
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.report import html
from jaxdp.report.read import read_run
from jaxdp.report.writer import NAME


def report(options: dict[str, Any]) -> None:
    """Writes the page, and says where. Raises UsageError where a run cannot be read or the file not be written."""
    directories = [pathlib.Path(run) for run in options["run"]]
    if not directories:
        raise UsageError("report: no run given; name run directories, e.g. jaxdp report runs/digits")
    for directory in directories:
        inside = sorted(file.parent for file in directory.glob("*/metrics.jsonl"))
        if inside and not (directory / "metrics.jsonl").exists():
            raise UsageError(
                f"report: {str(directory)!r} holds {len(inside)} run{'s' * (len(inside) > 1)}; name those to show, "
                f"or {directory}/*"
            )
    runs = [read_run(directory) for directory in directories]
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


def names(directories: list[pathlib.Path]) -> list[str]:
    """Of each its last part, or as much of its end as tells it from the others."""
    parts = [directory.resolve().parts for directory in directories]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(p[-depth:]) for p in parts]
        if len(set(found)) == len(found):
            break
    return found
