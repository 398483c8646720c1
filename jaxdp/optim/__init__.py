"""An optimizer is an Optax transformation: a table row that names its parts, behind one learning-rate schedule.

What depends on a leaf's place in the tree goes by its path (decay, learning rates); what depends on a whole leaf cannot
be applied to slices of it, and `zero1`, which does that in anybody's pmapped loop, refuses it.
"""

from jaxdp.optim.elementwise import check_elementwise
from jaxdp.optim.muon import matrices
from jaxdp.optim.paths import decay_mask, scale_by_path, unmatched
from jaxdp.optim.schedule import SCHEDULES, Schedule, make_schedule
from jaxdp.optim.table import OPTIMIZERS, checked, make_optimizer
from jaxdp.optim.zero import zero1

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Schedule",
    "check_elementwise",
    "checked",
    "decay_mask",
    "make_optimizer",
    "make_schedule",
    "matrices",
    "scale_by_path",
    "unmatched",
    "zero1",
]
