"""What keeps the coordinator and the checkpoints small with thousands of processes, and the
commands of scale.md.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import resource
import secrets
import threading
import time
import types

import jax
import pytest

from benchmarks.clients import Client, Clients, facts
from jaxdp.checkpoint.commit import Commit, PeerFailed
from jaxdp.elastic import sockets, states
from jaxdp.elastic.regroup import ElasticMembership, Options
from jaxdp.errors import PREEMPTED, DistributedError, GenerationEnded, UsageError
from jaxdp.process import (
    channel,
    compilation_cache,
    connection,
    exchange,
    hosts,
    joining,
    membership,
    messages,
    protocol,
)
from jaxdp.process.connection import Connection
from jaxdp.process.context import Context
from jaxdp.process.generation import QUIET, Generation, Member


@pytest.mark.parametrize("size", [1, 2, 9, 100])
def test_packed_facts(size):
    everyone = [facts(rank, size) for rank in range(size)]
    everyone[-1]["visible"] = None
    everyone[size // 2]["last"] = [3, 4]
    packed = json.loads(json.dumps({"members": protocol.pack(everyone)}))
    assert protocol.unpack(messages.checked(packed, protocol.ADMISSION)["members"]) == everyone


def test_the_facts_of_4096_processes_have_48_bytes_each():
    everyone = [facts(rank, 4096) for rank in range(4096)]
    packed = channel.encode({"members": protocol.pack(everyone)})
    assert len(packed.payload) < 4096 * 48 and len(json.dumps(everyone)) > 4096 * 330
    assert protocol.unpack(json.loads(packed.payload)["members"]) == everyone


def test_a_long_list_of_numbers_is_checked():
    shape = {"of": [range(-1, 5000)]}
    numbers = {"of": [*range(-1, 5000)]}
    assert messages.checked(numbers, shape) == numbers
    for wrong in (5000, -2, True, 1.0, None, "1"):
        assert messages.checked({"of": [*range(5000), wrong]}, shape) is None


def test_an_answer_is_encoded_once_for_all_members():
    answers, size = [], 4096
    exchanges = exchange.Exchanges(set())
    for rank in range(size):
        assert len(answers) == 0

        def reply(answer):
            return answers.append(answer("agree 0"))

        exchanges.add(rank, range(size), reply, "agree", 0, "x" * (rank == 7), 60.0, False)
    assert (
        len(answers) == size and len({id(answer) for answer in answers}) == 1 and not exchanges.open
    )
    answer = json.loads(answers[0].payload)
    assert answer["kinds"] == ["", "x"] and [i for i, kind in enumerate(answer["of"]) if kind] == [
        7
    ]
    assert answer["id"] == "agree 0"


def test_an_exchange_ends_with_a_rank_that_has_left_or_is_late():
    departed, answers = set(), []
    exchanges = exchange.Exchanges(departed)

    def add(rank, turn, timeout):
        return exchanges.add(
            rank,
            range(3),
            lambda answer: answers.append(json.loads(answer(str(rank)).payload)),
            "a",
            turn,
            "t",
            timeout,
            False,
        )

    add(0, 0, 60.0)
    add(2, 0, 60.0)
    departed.add(1)
    exchanges.remove_rank(1)
    add(1, 0, 60.0)  # too late
    assert answers == [{"id": "0", "left": [1]}, {"id": "2", "left": [1]}, {"id": "1", "left": [1]}]
    add(0, 1, 60.0)
    assert answers[3:] == [{"id": "0", "left": [1]}]
    departed.clear()
    add(2, 2, 0.0)
    exchanges.expire(lambda rank: True)
    assert answers[4:] == [{"id": "2", "missing": [0, 1], "texts": {"2": "t"}}]


def test_keys_wait_for_their_texts():
    keys, replies = exchange.Keys(), []
    for key, timeout in (("a", 60.0), ("a", 0.0), ("b", 1e-9), ("a", 60.0)):
        keys.get(key, timeout, lambda text, key=key: replies.append((key, text)))
    assert replies == [("a", None)]
    keys.expire()
    assert replies[1:] == [("b", None)]
    keys.put("a", "t")
    keys.put("b", "u")
    assert replies[2:] == [("a", "t"), ("a", "t")] and not keys.waiting


def test_a_message_to_all_is_sealed_for_each():
    message = channel.encode({"x": 1})
    sent, received = [
        [channel.to_rank("secret", b"nonce", bytes([i])) for i in range(2)] for _ in range(2)
    ]
    frames = [sealer.seal(message) for sealer in sent]
    assert frames[0] != frames[1] and frames[0] != sent[0].seal(
        message
    )  # of another connection; the second one

    def opened(i, frame):
        return received[i].open(frame[: channel.HEAD], frame[channel.HEAD :])

    assert [opened(i, frame) for i, frame in enumerate(frames)] == [{"x": 1}] * 2
    with pytest.raises(channel.Refused, match="secret"):
        opened(0, frames[0])


def test_a_coordinator_without_enough_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    settings = protocol.Settings(4096, "secret", 1, "127.0.0.1", None, 60.0, 20.0)
    with pytest.raises(
        UsageError, match="open 4096 files, and the coordinator of 4096 processes needs 8292"
    ):
        joining.start_coordinator(settings, "here")


def test_heartbeats_become_rare():
    assert [protocol.beat_interval(size) for size in (2, 1024, 4096)] == [1.0, 1.0, 4.0]


def test_a_message_names_a_few_of_many_ranks():
    assert hosts.listed([]) == "" and hosts.listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert hosts.listed(range(4096)) == "0, 1, 2, 3, 4, 5, 6, 7 and 4088 others"


def test_the_ranks_of_a_lost_switch_are_a_fault_that_is_heard():
    """Their names together are longer than a text that a rank accepts."""
    reported, frames = [], []
    settings = protocol.Settings(1000, "secret", 1, "127.0.0.1", None, 60.0, 20.0)
    coordinator = types.SimpleNamespace(
        settings=settings, report=reported.append, done=threading.Event()
    )

    async def lose() -> None:
        generation = Generation(coordinator)
        generation.admitted = True
        for rank in range(1000):
            sealer = channel.to_rank("secret", b"", b"")
            member = Member(
                generation, facts(rank, 1000), types.SimpleNamespace(write=frames.append), sealer
            )
            generation.members[rank], member.silent = member, 19.95 * (rank >= 500)
        generation.check_silence(0.1)

    asyncio.run(lose())
    assert (
        len(frames) == 1000
        and "rank 507 (host node00063.cluster) and 492 others have not been heard" in reported[0]
    )
    fault = channel.to_rank("secret", b"", b"").open(
        frames[0][: channel.HEAD], frames[0][channel.HEAD :]
    )
    assert messages.checked(fault, {"fault": str, "code": range(256)}) == {
        "fault": reported[0],
        "code": 1,
    }


@pytest.mark.parametrize(("processes", "limit"), [(256, compilation_cache.SIZE), (257, -1)])
def test_the_compilation_cache_of_a_large_job_has_no_lock(tmp_path, monkeypatch, processes, limit):
    before = compilation_cache.settings()
    try:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE", raising=False)
        jax.config.update(compilation_cache.FOLDER, None)
        assert compilation_cache.use(str(tmp_path), processes) is None
        folder = pathlib.Path(jax.config.values[compilation_cache.FOLDER])
        assert folder.is_dir() and (folder.name == "unlimited") == (limit == -1)
        assert jax.config.values["jax_compilation_cache_max_size"] == limit
    finally:
        compilation_cache.leave(before)


@pytest.fixture
def clients():
    """Clients of a real coordinator, in threads of this process."""
    size, port, secret = 40, hosts.free_port(), secrets.token_hex(16)
    settings = protocol.Settings(
        size, secret, port, "127.0.0.1", None, 60.0, 20.0, os.open(os.devnull, os.O_WRONLY)
    )
    joining.start_coordinator(settings, "here")
    clients = Clients(port, secret, range(size), size)
    clients.join()
    clients.members.sort(key=lambda member: member.rank)
    yield clients
    for member in clients.members:
        member.ending.set()
        with contextlib.suppress(OSError):  # closed by a test
            member.connection.socket.shutdown(2)
    child = joining._children.pop()
    assert child.wait(20.0) == 0
    child.communicate()


def test_many_clients_exchange_and_hear_of_a_death(clients):
    clients.exchange(0)
    clients.exchange(8)
    clients.kill()
    assert len(clients.heard()) == clients.size - 1


def test_a_save_sends_each_process_few_messages(clients, monkeypatch):
    own = threading.local()
    for name in ("joined", "current"):
        monkeypatch.setattr(membership, name, lambda: own.member)

    def save(member):
        own.member = member
        before, commit = member.messages, Commit(Context(member.rank, clients.size))
        share = commit.scatter("files", [f"of {rank}" for rank in range(clients.size)])
        digests = commit.gather("digests", share)
        assert commit.scatter("durable", [""] * clients.size) == ""
        return share, digests, member.messages - before

    def fail(member):
        own.member = member
        commit = Commit(Context(member.rank, clients.size))
        if member.rank == 7:
            commit.report_failure("no space")
        with pytest.raises(PeerFailed, match="rank 7: no space"):
            commit.gather("digests", "") if member.rank == 0 else commit.scatter("files", [])
        return True

    with concurrent.futures.ThreadPoolExecutor(clients.size) as pool:
        results = [*pool.map(save, clients.members)]
        failed = [*pool.map(fail, clients.members[:1] + clients.members[2:])]  # rank 1 never comes
    shares, digests, counts = zip(*results)
    assert list(shares) == digests[0] == [f"of {rank}" for rank in range(clients.size)]
    assert not any(digests[1:]) and max(counts[1:]) < 20 and all(failed)


def test_coordinators_that_come_and_go_refuse_nobody():
    """A process that waits to join sees each of them greet it and end."""
    port, gone, ended = hosts.free_port(), threading.Event(), []

    def come_and_go():
        for number in range(4):
            with hosts.listen("127.0.0.1", port) as server, server.accept()[0] as client:
                client.sendall(channel.MAGIC + secrets.token_bytes(channel.NONCE))
                client.recv(1 << 16)
            gone.clear()
            ended.append(number)
            gone.wait()

    def absent(seconds):
        gone.set()
        if len(ended) == 4:
            raise StopIteration

    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    with pytest.raises(StopIteration):
        connection.join("127.0.0.1", port, "secret", facts(1, 3), 60.0, absent)
    thread.join()


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
    sockets.spare(port)

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


def test_the_facts_and_exchanges_of_the_next_generation(enter):
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


def test_a_new_process_prepares_before_the_others_stop_for_it(enter):
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


def test_a_process_that_prepares_hears_that_the_job_has_ended(enter):
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
def test_a_process_that_the_others_need_is_not_asked_to_prepare(enter):
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
def test_the_others_do_not_stop_for_a_new_process_before_join_after(enter):
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
        second[1][0].announce("waiting", "")
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
def test_a_coordinator_in_the_place_of_another_waits_for_survivors_that_are_busy(enter, busy):
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
def test_a_process_that_is_stopped_while_it_waits_is_not_admitted(enter):
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


def test_a_new_process_trains_alone_if_all_others_are_dead(enter):
    """Nobody can be on the other side of a cut network."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [*pool.map(enter, range(3))]
        alone = pool.submit(enter, 0, pid=1 << 30)
        for member, *_ in first:
            leave(member)
        assert alone.result(60.0)[1:] == (1, ["0"], [None])


@pytest.mark.parametrize("code", [0, PREEMPTED])
def test_a_process_that_waits_is_told_that_the_job_has_ended(enter, code):
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
