"""A writer for Weights & Biases: one W&B run per run directory, resumed with it."""

import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from jaxdp.errors import import_optional
from jaxdp.metrics.writer import Record, Writer


class WandB(Writer):
    """A writer that logs to Weights & Biases; mode: offline works without a network, for a later
    `wandb sync`.

    directory: the run directory, which stores the W&B run's id in wandb_id; config: the config to
    show; project, name, mode and others: as in `wandb.init`. Raises UsageError if wandb is not
    installed."""

    def __init__(
        self,
        directory: pathlib.Path,
        config: Mapping[str, Any] | None = None,
        project: str = "jaxdp",
        name: str | None = None,
        mode: str | None = None,
        **others: Any,
    ):
        wandb = import_optional("wandb", "log.writers: WandB", "wandb")
        file = directory / "wandb_id"
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if wandb.run is not None:  # of the script: `init` would return it
            others.setdefault("reinit", "create_new")
        self.run = wandb.init(
            project=project,
            name=name or directory.name,
            dir=str(directory),
            config=dict(config or {}),
            id=known
            or secrets.token_hex(4),  # else that of WANDB_RUN_ID, which may be another run's
            resume="allow",
            mode=mode,
            **others,
        )
        file.write_text(f"{self.run.id}\n", encoding="utf-8")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # W&B's step cannot decrease, but ours can

    def write(self, record: Record) -> None:
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        self.run.log(
            {"step": record["step"], **{f"{record['split']}/{k}": v for k, v in numbers.items()}}
        )
        if record["split"] == "final":
            self.run.summary.update({k: v for k, v in record.items() if k not in ("step", "split")})

    def close(self) -> None:
        self.run.finish()
