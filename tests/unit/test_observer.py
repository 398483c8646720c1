"""Observers: who is called, in which order, and what they may ask for."""

import pytest

import toys
from jaxdp.process.monitor import Monitor
from jaxdp.train.observer import Observer, Observers
from plain_runs import fit, make_run


class Noting(Observer):
    """Notes its calls in a list that it shares with others."""

    def __init__(self, name, calls, wanted=()):
        self.name, self.calls, self.wanted = name, calls, wanted

    def before(self, updates, batch):
        self.calls.append((self.name, "before", updates[-1]))

    def wants(self, step):
        return self.wanted

    def pause(self, step, last):
        self.calls.append((self.name, "pause", step, last))

    def end(self, step):
        self.calls.append((self.name, "end", step))


class Watch(Noting, Monitor):
    """In the place of a run's monitor."""


def test_they_are_called_in_order_and_end_in_reverse():
    calls = []
    observers = Observers([Noting("a", calls, ("save",)), Noting("b", calls, ("save", "pause"))])
    observers.before(range(1, 3), None)
    observers.end(2)
    assert calls == [("a", "before", 2), ("b", "before", 2), ("b", "end", 2), ("a", "end", 2)]
    assert observers.wants(2) == {"save", "pause"} and observers.names == ["a", "b"]


def test_a_method_not_overridden_is_never_called(monkeypatch):
    observers = Observers([Observer(), Noting("a", [])])

    def refuse(self, *args):
        raise AssertionError

    for point in ("start", "reading", "before", "after", "saved", "finished", "end"):
        monkeypatch.setattr(Observer, point, refuse)
    observers.start(None, None)
    observers.before(range(1, 2), None)
    observers.after(range(1, 2), None, {})
    observers.end(1)


@pytest.mark.parametrize("wanted, saved", [("pause", [4]), ("save", [1, 2, 3, 4])])
def test_what_an_observer_wants_comes_after_a_pause(tmp_path, wanted, saved):
    calls = []
    run = make_run(tmp_path, toys.MODELS["mlp"](), steps=4, watch=Watch("a", calls, (wanted,)))
    run.run.checkpoints.keep = 9
    fit(run)
    assert run.checkpoints.steps() == saved
    pauses = [call[2:] for call in calls if call[1] == "pause"]
    assert pauses == [(1, False), (2, False), (3, False), (4, True)]
    assert calls[-1] == ("a", "end", 4)
