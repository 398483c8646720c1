"""Data-parallel strategies, by name: each joins this table, and the contract tests of the table cover it."""

from collections.abc import Callable

from jaxdp.parallel.base import Program, Strategy
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.pmap import PMap

STRATEGIES: dict[str, Callable[..., Strategy]] = {"pmap": PMap, "pjit": PJit}
STAGES = {"pmap": (0, 1), "pjit": (0, 1, 2, 3)}
"""The ZeRO stages of each."""

__all__ = ["STAGES", "STRATEGIES", "PJit", "PMap", "Program", "Strategy"]
