"""What keeps the coordinator and the checkpoints small with thousands of processes, and the
commands of performance.md.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pathlib
import secrets
import threading
import types

import jax
import pytest

from benchmarks.clients import Clients, facts
from jaxdp.checkpoint.store import Commit, PeerFailed
from jaxdp.process import (
    channel,
    compilation_cache,
    connection,
    generation,
    hosts,
    joining,
    membership,
    protocol,
)
from jaxdp.process.context import Context
from jaxdp.process.generation import Generation, Member
from launch import processes


@pytest.mark.parametrize("size", [1, 2, 9, 100])
def test_packed_facts(size):
    everyone = [facts(rank, size) for rank in range(size)]
    everyone[-1]["visible"] = None
    everyone[size // 2]["last"] = [3, 4]
    packed = json.loads(json.dumps({"members": protocol.pack(everyone)}))
    assert protocol.unpack(channel.checked(packed, protocol.ADMISSION)["members"]) == everyone


def test_facts_of_4096_processes_have_48_bytes_each():
    everyone = [facts(rank, 4096) for rank in range(4096)]
    packed = channel.encode({"members": protocol.pack(everyone)})
    assert len(packed.payload) < 4096 * 48 and len(json.dumps(everyone)) > 4096 * 320
    assert protocol.unpack(json.loads(packed.payload)["members"]) == everyone


def test_a_long_list_of_numbers_is_checked():
    shape = {"of": [range(-1, 5000)]}
    numbers = {"of": [*range(-1, 5000)]}
    assert channel.checked(numbers, shape) == numbers
    for wrong in (5000, -2, True, 1.0, None, "1"):
        assert channel.checked({"of": [*range(5000), wrong]}, shape) is None


def test_an_answer_is_encoded_once_for_all_members():
    answers, size = [], 4096
    exchanges = generation.Exchanges(set())
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


def test_a_rank_that_leaves_or_is_late_ends_exchanges():
    departed, answers = set(), []
    exchanges = generation.Exchanges(departed)

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
    keys, replies = generation.Keys(), []
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


FEW_FILES = """
import resource
from jaxdp.errors import UsageError
from jaxdp.process import joining, protocol

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
settings = protocol.Settings(4096, "secret", 1, "127.0.0.1", None, 60.0, 20.0)
try:
    joining.start_coordinator(settings, "here")
except UsageError as error:
    print(error)
"""


def test_a_coordinator_without_enough_files():
    """In a process of its own, which cannot raise the hard limit again."""
    (done,) = processes(["-c", FEW_FILES], [{}], timeout=60)
    words = "open 256 files, and the coordinator of 4096 processes needs 8292: raise the hard limit"
    assert done.returncode == 0 and words in done.stdout, done.output


def test_heartbeats_become_rare():
    assert [protocol.beat_interval(size) for size in (2, 1024, 4096)] == [1.0, 1.0, 4.0]


def test_a_message_names_a_few_of_many_ranks():
    assert hosts.listed([]) == "" and hosts.listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert hosts.listed(range(4096)) == "0, 1, 2, 3, 4, 5, 6, 7 and 4088 others"


def test_a_long_list_of_lost_ranks_is_a_fault_all_hear():
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
    assert channel.checked(fault, {"fault": str, "code": range(256)}) == {
        "fault": reported[0],
        "code": 1,
    }


@pytest.mark.parametrize(("processes", "limit"), [(256, compilation_cache.SIZE), (257, -1)])
def test_a_large_jobs_compilation_cache_has_no_lock(tmp_path, monkeypatch, processes, limit):
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
