"""The verb `report`: write one web page about run directories."""

import pathlib
import sys

from jaxdp.cli import Call
from jaxdp.errors import UsageError
from jaxdp.report import html
from jaxdp.report.read import Json, read_run
from jaxdp.report.table import SWEEP, ranked, table, write_csv
from jaxdp.run import rundir


def run(call: Call) -> None:
    """Write the page and print its path. Raises UsageError if a run cannot be read or the file
    cannot be written.
    """
    options = call.options
    paths = [pathlib.Path(run).expanduser() for run in options["run"]]
    if not paths:
        raise UsageError(
            "report: no run given; name run directories, e.g. jaxdp report runs/digits"
        )
    default = (paths[0] if len(paths) == 1 else pathlib.Path()) / rundir.REPORT
    # Of the directory of a sweep; "" for another directory.
    metrics = [rundir.entry(path / SWEEP, "metric", str, "") for path in paths]
    metric = options["metric"] or (metrics[0] if len({*metrics}) == 1 else "")
    paths = [
        run for path, sweep in zip(paths, metrics) for run in (sweep and runs_in(path)) or [path]
    ]
    run_by_path = read_runs(paths)
    runs = list(run_by_path.values())
    for run, name in zip(runs, names(list(run_by_path))):
        run["name"] = name
    runs = ranked(runs, metric) if metric else runs
    output = pathlib.Path(options["out"] or default).expanduser()
    if output.is_dir():
        raise UsageError(
            f"--out: {str(output)!r} is a directory; give the path of a file, such as {str(output / rundir.REPORT)!r}"
        )
    try:
        html.write(output, html.render(runs))
    except OSError as error:
        raise UsageError(
            f"--out: {str(output)!r} cannot be written ({error.strerror}); choose another file"
        ) from None
    about = (
        f"{output}  {output.stat().st_size / 1e3:,.0f} kB, {len(runs)} run{'s' * (len(runs) > 1)}"
    )
    if metric:
        print(table(runs, metric))
        if len(runs) > 1 and output.is_file():  # not a pipe
            rows = output.with_suffix(".csv")
            write_csv(rows, runs, metric)
            about += f"; the table in {rows}"
    print(about)


def runs_in(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file.parent for file in directory.glob("*/metrics.jsonl"))


def read_runs(directories: list[pathlib.Path]) -> dict[pathlib.Path, Json]:
    """Return the runs by directory. Of several paths, as from `runs/*`, skip those that are not
    runs, with a message. Raises UsageError if no run remains, or for a path that does not exist."""
    runs: dict[pathlib.Path, Json] = {}
    for directory in directories:
        try:
            inside = runs_in(directory)
            if inside and not (directory / "metrics.jsonl").exists():
                raise UsageError(
                    f"report: {str(directory)!r} contains {len(inside)} run{'s' * (len(inside) > 1)}; name those to "
                    f"show, or {directory}/*"
                )
            runs[directory] = read_run(directory, runs=len(directories))
        except UsageError as error:
            if len(directories) == 1 or not directory.exists():
                raise
            print(f"jaxdp: {str(error).rpartition('; ')[0]}; left out", file=sys.stderr)
    if not runs:
        raise UsageError(
            f"report: none of these {len(directories)} is a run with metrics; give directories of runs, such as "
            "runs/digits"
        )
    return runs


def names(directories: list[pathlib.Path]) -> list[str]:
    """Return the last part of each path, or as many last parts as make all names different."""
    parts = [directory.resolve().parts for directory in directories]
    for depth in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(p[-depth:]) for p in parts]
        if len(set(ends)) == len(ends):
            break
    return ends
