"""Decide from fingerprints which device computes wrongly: the majority is right, if each device
agrees with itself.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Groups = Sequence[Sequence[int]]  # the devices that must have equal fingerprints


class Verdict(NamedTuple):
    """devices: {device: the first leaf that differs}. certain: False if no majority shows which of
    them are right.

    unstable: the devices whose results differ when they compute them again. software: several are
    unstable, or the only device is in each run, so it is the program that is not deterministic.
    """

    devices: dict[int, int]
    certain: bool = True
    unstable: Sequence[int] = ()
    software: bool = False


def vote(prints: np.ndarray, groups: Sequence[Groups]) -> Verdict:
    """Compare the fingerprints [device, leaf] of each leaf inside each of its groups."""
    minority: dict[int, int] = {}
    undecided: dict[int, int] = {}
    for leaf in np.flatnonzero((prints != prints[0]).any(0)).tolist():
        for group in groups[leaf]:
            (value, most), *others = collections.Counter(
                prints[list(group), leaf].tolist()
            ).most_common()
            if others:
                outvoted = [d for d in group if 2 * most <= len(group) or prints[d, leaf] != value]
                for device in outvoted:
                    (minority if 2 * most > len(group) else undecided).setdefault(device, leaf)
    return Verdict(minority or undecided, bool(minority) or not undecided)


def judge(runs: Sequence[np.ndarray], groups: Sequence[Groups], state_leaves: int) -> Verdict:
    """Return the verdict on several runs of one computation, each [device, leaf]; the first leaves
    are the state's.

    A copy of the state that differs explains why its device computes other gradients, so it is
    judged first."""
    state = vote(runs[-1][:, :state_leaves], groups[:state_leaves])
    if state.devices and state.certain:
        return state
    changed = (np.stack(runs) != runs[0]).any(0)  # [device, leaf]
    unstable = np.flatnonzero(changed.any(1)).tolist()
    one_device = len(runs[0]) == 1 and len({run.tobytes() for run in runs}) == len(runs) > 2
    software = len(unstable) > 1 or one_device
    if unstable:
        first = {device: int(np.argmax(changed[device])) for device in unstable}
        return (
            state
            if state.devices and software
            else Verdict({} if software else first, True, unstable, software)
        )
    results = vote(runs[0], [*[()] * state_leaves, *groups[state_leaves:]])
    return state if state.devices and not (results.devices and results.certain) else results
