"""Draws scaling.json: a curve is the median with quartiles, and beside it what growth in proportion
would be.

pip install matplotlib
python -m benchmarks.plots benchmarks/results/scaling.json benchmarks/plots
"""

import json
import pathlib
import statistics
import sys

import matplotlib
from matplotlib import pyplot


def main(source: str, target: str) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "jaxdp"
    folder = pathlib.Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for name, points in json.loads(pathlib.Path(source).read_text())["curves"].items():
        x = [int(key) for key in points]
        middle = [1e3 * statistics.median(samples) for samples in points.values()]
        cuts = [
            statistics.quantiles(samples, n=4, method="inclusive") for samples in points.values()
        ]
        below, above = ([abs(1e3 * c[i] - m) for c, m in zip(cuts, middle)] for i in (0, 2))
        figure, axes = pyplot.subplots(figsize=(4, 3), layout="constrained")
        axes.errorbar(x, middle, yerr=[below, above], marker="o", capsize=3, label="measured")
        axes.plot(x, [middle[0] * v / x[0] for v in x], ":", color="gray", label="in proportion")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=LABELS.get(name, name),
            ylabel="ms an update",
            xticks=x,
        )
        axes.set_xticks(x, [str(v) for v in x])
        axes.minorticks_off()
        axes.legend(frameon=False)
        figure.savefig(folder / f"{name.replace(', ', '_')}.svg", metadata={"Date": None})
        pyplot.close(figure)


LABELS = {
    "parameters": "width (parameters grow with its square)",
    "batch": "examples",
    "devices": "simulated devices",
}

if __name__ == "__main__":
    main(*sys.argv[1:3])
