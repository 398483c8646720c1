"""Optimizers: Optax transformations, listed in a table and driven by one learning-rate schedule.

Weight decay and Muon select parameters by their role in the model, learning-rate factors by path.
`zero1` shards the optimizer state in any pmapped loop; it updates slices of leaves, so it rejects
optimizers that need full leaves."""

from jaxdp.optim.elementwise import check_elementwise
from jaxdp.optim.optimizers import OPTIMIZERS, checked, decay_mask, make_optimizer, scale_by_path
from jaxdp.optim.roles import find_roles
from jaxdp.optim.schedule import SCHEDULES, make_schedule
from jaxdp.optim.zero import zero1

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "check_elementwise",
    "checked",
    "decay_mask",
    "find_roles",
    "make_optimizer",
    "make_schedule",
    "scale_by_path",
    "zero1",
]
