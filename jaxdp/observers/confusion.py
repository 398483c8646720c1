"""An observer that writes the confusion matrix of each evaluation as a table."""

from collections.abc import Mapping
from typing import Any

from jaxdp.data.dataset import class_names
from jaxdp.errors import UsageError
from jaxdp.metrics.numbers import table
from jaxdp.run import rundir
from jaxdp.train.observer import Observer
from jaxdp.train.state import SUMS


class Confusion(Observer):
    """Write `confusion.txt` in the run directory after each evaluation: a row for each class, with the
    number of its examples that are predicted as each. A set of `eval.also` has its own,
    `confusion_NAME.txt`. Needs the metric `ConfusionMatrix` of the loss `Measured`; raises UsageError
    without it."""

    def start(self, run: Any, progress: Any) -> None:
        self.run = run

    def evaluated(self, step: int, record: Mapping[str, Any]) -> None:
        matrices = {name: x for name, x in record.items() if f"{SUMS}confusion" in name}
        if not matrices:
            raise UsageError(
                "callbacks: Confusion needs loss: {target: Measured, args: {metrics: [ConfusionMatrix]}}"
            )
        for name, counts in matrices.items() if self.run.checkpoints.context.is_root else ():
            part, _, _ = name.rpartition("/")
            file = self.run.log.directory / f"confusion{'_' * bool(part)}{part}.txt"
            titles = class_names(self.run.data.train.dataset) or [*map(str, range(len(counts)))]
            rows = [[title, *map("{:.0f}".format, row)] for title, row in zip(titles, counts)]
            text = [f"update {step}: a row for each class, a column for each prediction"]
            rundir.write(file, "\n".join([*text, *table([["", *titles], *rows], ">"), ""]))
