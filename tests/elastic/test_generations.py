"""Generations of an elastic job with a real coordinator: who joins, who is waited for, who hears what."""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import secrets
import threading
import time

import pytest

from benchmarks.clients import Client, facts
from jaxdp.elastic import states
from jaxdp.elastic.regroup import ElasticMembership, Options
from jaxdp.errors import PREEMPTED, DistributedError, GenerationEnded
from jaxdp.process import (
    connection,
    hosts,
    joining,
    protocol,
)
from jaxdp.process.connection import Connection
from jaxdp.process.generation import QUIET


@pytest.mark.parametrize("size", [1, 2, 9, 100])
class ElasticClient(Client, ElasticMembership):
    """A client of an elastic job."""


@pytest.fixture
def enter(request):
    """A function that enters the current generation of an elastic job of three, and exchanges a
    text there.
    """
    port, secret, members = hosts.free_port(), secrets.token_hex(16), []
    group = Options(join_after=getattr(request, "param", 0.0))
    more = {"generation": group.generation, "options": group.options()}
    settings = protocol.Settings(3, secret, port, "127.0.0.1", None, 60.0, 20.0, **more)

    def start():
        return joining.start_coordinator(
            dataclasses.replace(settings, stderr=os.open(os.devnull, os.O_WRONLY)), "here"
        )

    start()

    def enter(rank, prepare=None, **more):
        own = facts(rank, 3) | {"prepares": prepare is not None} | more
        job = connection.join("127.0.0.1", port, secret, own, 60.0, prepare=prepare)
        member = ElasticClient(job, 0, 20.0, None)
        members.append(member)
        member.start()
        texts = member.exchange("ranks", str(rank), range(member.size), 60.0)
        return member, job.generation, texts, [f.get("last") for f in job.facts]

    def kill_coordinator():
        child = joining._children.pop()
        child.kill()
        child.communicate()

    enter.start, enter.kill_coordinator, enter.address = (
        start,
        kill_coordinator,
        ("127.0.0.1", port, secret),
    )
    yield enter
    for member in members:
        leave(member)
        member.connection.socket.close()
    kill_coordinator()


def leave(member):
    member.ending.set()
    with contextlib.suppress(OSError):  # closed
        member.connection.socket.shutdown(2)


def regroup(member):
    with contextlib.suppress(GenerationEnded):  # its end may arrive before the answer
        member.request("regroup", fault="")


def test_facts_and_exchanges_of_the_next_generation(enter):
    """Its ranks have other numbers, and some of their facts are of one rank only."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = [*pool.map(enter, range(3))]
        assert [x[1:] for x in first] == [(0, ["0", "1", "2"], [None] * 3)] * 3
        leave(first[0][0])
        assert first[1][0].has_ended(60.0) and first[2][0].has_ended(60.0)
        assert not first[1][0].report_fault("what another process has caused")
        second = [*pool.map(lambda rank: enter(rank, last=[0, 3]), (1, 2))]
    assert [x[1:] for x in second] == [(1, ["1", "2"], [[0, 3]] * 2)] * 2 and [
        x[0].rank for x in second
    ] == [0, 1]


def test_a_new_process_prepares_before_the_others_stop(enter):
    """Nor does a generation that forms meanwhile wait for it."""
    began, may_end, asked = threading.Event(), threading.Event(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [*pool.map(enter, range(3))]
        new = pool.submit(enter, 0, lambda: (began.set(), may_end.wait()), pid=1 << 30)
        assert began.wait(60)
        leave(first[0][0])
        assert first[1][0].has_ended(60.0) and first[2][0].has_ended(60.0)
        second = [member for member, *_ in pool.map(lambda rank: enter(rank, last=[0, 3]), (1, 2))]
        assert [(member.rank, member.size) for member in second] == [(0, 2), (1, 2)]
        assert second[0].announced("join") is None
        second[0].on("join", lambda rank, title: asked.set())
        may_end.set()
        assert asked.wait(60)
        regroup(second[0])
        assert all(member.has_ended(60.0) for member in second)
        third = [
            *pool.map(lambda rank: enter(rank, last=[1, 2], pid=facts(rank + 1, 3)["pid"]), (0, 1))
        ]
        assert [x[0].rank for x in [*third, new.result()]] == [0, 1, 2] and new.result()[1] == 2


def test_a_preparing_process_hears_that_the_job_ended(enter):
    """Although it has sent heartbeats to the coordinator that ended, which resets the connection."""
    began, may_end = threading.Event(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [*pool.map(enter, range(3))]
        new = pool.submit(enter, 0, lambda: (began.set(), may_end.wait()), pid=1 << 30)
        assert began.wait(60)
        for member, *_ in first:
            member.leave()
            leave(member)
        joining._children[-1].wait(60)
        while "heartbeats of a process that joins" in {
            thread.name for thread in threading.enumerate()
        }:
            time.sleep(0.05)
        may_end.set()
        with pytest.raises(
            DistributedError, match="the job ended before this process could join"
        ) as error:
            new.result()
        assert error.value.code == 0


@pytest.mark.slow
def test_a_process_that_others_need_prepares_nothing(enter):
    """One of three cannot continue alone if the others may be alive, until a process comes from the
    host of one.
    """

    def prepare():
        return pytest.fail("this process was asked to prepare")

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = [*pool.map(lambda rank: enter(rank, boot=str(rank)), range(3))]
        for member, *_ in first[1:]:
            member.ending.set()  # it sends no heartbeats any more
        assert first[0][0].has_ended(120.0)
        last = pool.submit(enter, 0, boot="0", last=[0, 3])
        new = pool.submit(enter, 1, prepare, boot="1", pid=1 << 30)
        assert last.result()[1] == new.result()[1] == 1 and last.result()[0].rank == 0


@pytest.mark.parametrize("enter", [math.inf], indirect=True, ids=["join_after"])
def test_no_stop_for_a_new_process_before_join_after(enter):
    """A generation that forms for another reason admits it; so does one that cannot train without
    it.
    """
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [*pool.map(enter, range(3))]
        new = pool.submit(enter, 0, pid=1 << 30)
        silent = first[1][0].silent()["silent"]  # which takes three heartbeats
        assert not silent and not new.done() and first[1][0].announced("join") is None
        leave(first[0][0])
        assert first[1][0].has_ended(60.0) and first[2][0].has_ended(60.0)
        second = [*pool.map(lambda rank: enter(rank, last=[0, 3]), (1, 2)), new.result()]
        assert [x[0].rank for x in second] == [0, 1, 2] and [x[1] for x in second] == [1] * 3
        asked, late = threading.Event(), pool.submit(enter, 0, pid=1 << 29)
        second[0][0].on("join", lambda rank, title: asked.set())
        second[1][0].connection.send(op="waits")
        assert asked.wait(60) and not late.done()
        regroup(second[0][0])
        last = [
            pool.submit(enter, x[0].rank, last=[1, 3], pid=x[0].job.facts[x[0].rank]["pid"])
            for x in second
        ]
        assert [x.result()[0].rank for x in [*last, late]] == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_others_wait_for_a_survivor_that_is_busy(enter):
    """A process that has just started would otherwise be rank 0, without the state, while the
    others are alive.
    """
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = [*pool.map(enter, range(3))]
        leave(first[0][0])
        assert first[1][0].has_ended(60.0) and first[2][0].has_ended(60.0)
        second = [pool.submit(enter, 0, pid=1 << 30)]
        assert not concurrent.futures.wait(second, states.WINDOW + 2).done
        second += [pool.submit(enter, rank, last=[0, 3]) for rank in (1, 2)]
    assert [x.result()[0].rank for x in second] == [2, 0, 1] and {
        x.result()[1] for x in second
    } == {1}


@pytest.mark.slow
@pytest.mark.parametrize("busy", [1, 2])
def test_a_new_coordinator_waits_for_busy_survivors(enter, busy):
    """One of two alone would be too few to continue, and the one that compiles for longer would
    come as a new one.
    """
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = [*pool.map(enter, range(3))]
        enter.kill_coordinator()
        assert all(member.has_ended(60.0) for member, *_ in first)
        enter.start()
        for member, *_ in first[: 3 - busy]:
            leave(member)  # as it does to report

        def report(rank):
            return pool.submit(enter, rank, last=[0, 3])

        second = [report(rank) for rank in range(3 - busy)]
        assert not concurrent.futures.wait(second, states.WINDOW + 2).done
        second += [report(rank) for rank in range(3 - busy, 3)]
    assert [x.result()[0].rank for x in second] == [0, 1, 2] and {
        x.result()[1] for x in second
    } == {1}


@pytest.mark.slow
def test_a_process_stopped_in_waiting_is_not_admitted(enter):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [*pool.map(enter, range(3))]
        waits = {**facts(0, 3), "pid": 1 << 30}
        stopped = Connection(*enter.address, 60.0, facts=waits)  # it sends no heartbeat
        with stopped.socket, pytest.raises(ConnectionError):
            stopped.receive()
        alive = pool.submit(enter, 0, pid=1 << 29)
        assert not concurrent.futures.wait([alive], 2 * QUIET).done
        leave(first[2][0])
        assert first[0][0].has_ended(60.0)
        second = [pool.submit(enter, rank, last=[0, 3]) for rank in range(2)]
    assert [x.result()[0].rank for x in [*second, alive]] == [0, 1, 2]


def test_a_new_process_trains_alone_if_others_are_dead(enter):
    """Nobody can be on the other side of a cut network."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [*pool.map(enter, range(3))]
        alone = pool.submit(enter, 0, pid=1 << 30)
        for member, *_ in first:
            leave(member)
        assert alone.result(60.0)[1:] == (1, ["0"], [None])


@pytest.mark.parametrize("code", [0, PREEMPTED])
def test_a_waiting_process_hears_that_the_job_ended(enter, code):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, joins = [*pool.map(enter, range(3))], threading.Event()
    late = Connection(*enter.address, 60.0, facts={**facts(0, 3), "pid": 1 << 30})
    first[0][0].on("join", lambda rank, text: joins.set())
    assert joins.wait(60.0)
    for rank, (member, *_) in enumerate(first):
        member.leave(0 if rank else code)  # as if rank 0 prints for all
        leave(member)
    with late.socket:
        assert late.receive() == {
            "error": "the job ended before this process could join",
            "code": code,
        }
