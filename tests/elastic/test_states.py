"""The state machine of elastic jobs: all orders of what may happen to three processes.

Real are the states, simulated the processes (`elastic_world`). Each order with up to two faults is
walked, as far as it leads to a world that was not seen yet."""

import collections
import pickle

import pytest

from elastic_world import FAULTS, LIMITS, World
from jaxdp.elastic import states


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    for name, ticks in LIMITS.items():
        monkeypatch.setattr(states, name, ticks)


def begun(hosts, faults, kinds, **options):
    """Three processes that have connected, and hear that their first generation has formed."""
    world = World(hosts, faults, kinds, **options)
    for slot in range(3):
        world.do("connect", slot)
    return world


def walk(first):
    """Walk all worlds that may follow; return their number, and that of the steps between them.

    In each world, at most one generation trains, and it was formed of a process with the newest
    state that can come. From each one, without further faults, some steps lead to one in which each
    process that lives trains, or has ended with a message."""
    seen, queue = {first.key(): 0}, collections.deque([(0, pickle.dumps(first, -1))])
    before, well, steps, came_by = [[]], [], 0, [(None, None)]

    def path(index):
        names = []
        while index:
            index, event = came_by[index]
            names.append(event)
        return names[::-1]

    while queue:
        index, stored = queue.popleft()
        world = pickle.loads(stored)
        if world.is_well():
            well.append(index)
        for event in world.events():
            world, steps = pickle.loads(stored), steps + 1
            try:
                world.do(*event)
                world.active()
                assert not world.left_out(), f"a newer state is left out: {world.left_out()}"
            except AssertionError as error:
                raise AssertionError(f"{error}: {[*path(index), event]}") from error
            key = world.key()
            if key not in seen:
                seen[key] = len(seen)
                queue.append((seen[key], pickle.dumps(world, -1)))
                before.append([])
                came_by.append((index, event))
            if event[0] not in FAULTS:
                before[seen[key]].append(index)
    reached, todo = {*well}, well
    while todo:
        for index in before[todo.pop()]:
            if index not in reached:
                reached.add(index)
                todo.append(index)
    stuck = [index for index in range(len(seen)) if index not in reached]
    assert not stuck, f"{len(stuck)} worlds are stuck: {path(stuck[0])}"
    return len(seen), steps


@pytest.mark.parametrize(
    ("kinds", "faults", "worlds"),
    [
        (("kill", "reset", "kill coordinator"), 2, 10_000),
        (("kill", "hang"), 2, 10_000),
        (FAULTS, 1, 1_000),
        pytest.param(FAULTS, 2, 100_000, marks=pytest.mark.slow),
    ],
    ids=["connections", "late", "each", "two of all"],
)
def test_all_orders(kinds, faults, worlds):
    seen, steps = walk(begun("abc", faults, kinds))
    print(f"{seen} worlds, {steps} steps")
    assert worlds < seen < steps


def test_none_awaits_a_new_process_hung_without_state():
    """Its heartbeats go on: it may be in a collective with one that was killed."""
    world = begun("aaa", 4, FAULTS)

    def settle():
        while rest := [x for x in world.events() if x[0] in ("connect", "hear", "prepared")]:
            world.do(*rest[0])

    def ticks_until(trains):
        for ticks in range(20):
            settle()
            if [x.slot for x in world.active()] == trains:
                return ticks
            world.do("tick", 0)
            for name, slot in world.events():
                if name in ("collective fails", "regroup"):
                    world.do(name, slot)
        raise AssertionError("they do not train")

    ticks_until([0, 1, 2])
    for slot in range(3):
        world.do("open", slot)
    world.do("kill", 2)
    ticks_until([0, 1])
    for slot in range(2):
        world.do("open", slot)
    world.do("restart", 2)
    ticks_until([0, 1, 2])
    for slot in range(2):
        world.do("open", slot)
    world.do("hang", 2)
    world.do("kill", 1)
    assert ticks_until([0]) <= LIMITS["WINDOW"] + 1 < LIMITS["LATE"]


@pytest.mark.parametrize(
    ("method", "wrong", "text"),
    [
        ("has_newest_state", lambda self: True, "a newer state is left out"),
        ("form", lambda self: None, "worlds are stuck"),
    ],
)
def test_a_wrong_machine_is_found(monkeypatch, method, wrong, text):
    monkeypatch.setattr(states.Machine, method, wrong)
    with pytest.raises(AssertionError, match=text):
        walk(begun("abc", 1, FAULTS))
