"""The state of the GPU measurement: what was found, the time that is left, and the file that is
always up to date.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks import job

SECTION = 150.0  # seconds that a contender may take for any answer
BUDGET = 460.0  # seconds in which all is begun and, but for what is under way, over
LEAST = 25.0  # seconds that are left, or a part is not begun
NO_TIME = f"no time: {BUDGET:.0f} s are over"


@dataclasses.dataclass
class Bench:
    """One measurement of everything. found: what will be in the file; device: as JAX names it, once
    it is known.
    """

    options: argparse.Namespace
    found: dict[str, Any]
    began: float = dataclasses.field(default_factory=time.monotonic)
    device: str = ""

    @property
    def tiny(self) -> bool:
        return self.options.tiny

    @property
    def env(self) -> dict[str, str]:
        """For what computes on the device: a GPU that JAX cannot use is an error there, not a CPU."""
        return {} if self.tiny else {"JAX_PLATFORMS": "cuda"}

    def left(self) -> float:
        return BUDGET - (time.monotonic() - self.began)

    def is_over(self) -> bool:
        """Whether there is no time left to begin anything."""
        return self.left() < LEAST and not self.tiny

    def limit(self, most: float = SECTION) -> float:
        """Seconds for what is begun now."""
        return most if self.tiny else max(LEAST, min(most, self.left()))

    def save(self) -> None:
        file = self.options.out / "gpu.json"
        file.with_suffix(".part").write_text(json.dumps(self.found, indent=1) + "\n")
        file.with_suffix(".part").replace(file)

    def run(self, name: str, part: Callable[["Bench", dict[str, Any]], None]) -> None:
        """Fills in found[name]; what fails is named there, and so is an interruption, which ends
        all.
        """
        own = self.found[name] = {}
        began = time.monotonic()
        try:
            if self.is_over():
                own["left_out"] = NO_TIME
            else:
                part(self, own)
        except Exception as error:
            own["failed"] = f"{type(error).__name__}: {error}"
        except BaseException as error:
            own["failed"] = f"interrupted ({type(error).__name__})"
            raise
        finally:
            own["took_s"] = time.monotonic() - began
            self.save()
            shown = {k: v for k, v in own.items() if k not in ("contenders", "plan")}
            print(f"{name}: {json.dumps(shown)}", flush=True)


def printed(bench: Bench, words: list[str], env: dict[str, str]) -> str:
    """Return what a program prints. Raises Failed."""
    return job.output(words, bench.limit(), job.environment(**env))
