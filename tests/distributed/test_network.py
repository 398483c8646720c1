"""Strangers on the network: what they can reach, and what their garbage does to a job. All of it on
this machine.
"""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

import launch
from faulty_runs import final, kept, when, written
from jaxdp.errors import UsageError
from jaxdp.process import channel, hosts, joining, private_jax, protocol
from jaxdp.process.connection import NOBODY, Connection, Foreign
from launch import port, ranks
from two_hosts import TwoHosts

SCRIPT = str(launch.SUPPORT / "mpi" / "context.py")
ESCAPE = "\x1b]0;owned\x07\x1b[31m"
GARBAGE = [
    "", "no json", "null", "[]", "{}", "7", "[" * 100000, "9" * 6000, f'"{ESCAPE}"', "x" * 100000,
    '{"n": "x", "rank": 99, "text": 7}', '{"n": -1, "rank": -1, "passed": 1e99, "where": []}',
    '{"n": true, "rank": true}',
]  # fmt: skip


def test_the_coordinator_is_silent_if_rank_0_ends_soon():
    command = [sys.executable, "-P", "-m", "jaxdp.process.coordinator_process"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    settings = protocol.Settings(2, "secret", port(), "127.0.0.1", None, 60.0, 20.0)
    env = {**os.environ, "PYTHONPATH": str(launch.ROOT)}
    with subprocess.Popen(command, env=env, **pipes) as child:
        child.stdout.close()
        child.stdin.write(json.dumps(dataclasses.asdict(settings)).encode() + b"\n")
        child.stdin.close()
        assert child.stderr.read() == b"" and child.wait(60) == 0


@pytest.mark.parametrize("text", GARBAGE)
def test_a_value_of_the_wrong_shape_is_none(text):
    shape = {"n": range(1 << 53), "rank": range(4), "text?": str}
    assert channel.parse(text, shape) is None and channel.parse(text, protocol.FACTS) is None
    assert channel.integer(text) == (7 if text == "7" else None)


def test_a_value_of_the_right_shape():
    shape = {"n": range(8), "ok?": bool, "x?": float, "kind": ("a", None), "list": [{"s": str}]}
    text = {
        "n": 7,
        "kind": None,
        "x": 0.5,
        "list": [{"s": f"a{ESCAPE}\n", "more": 1}],
        "unknown": 1,
    }
    assert channel.parse(json.dumps(text), shape) == {
        "n": 7, "kind": None, "x": 0.5, "list": [{"s": "a?]0;owned??[31m?"}]
    }  # fmt: skip
    for wrong in (
        {"n": 8},
        {"n": True},
        {"kind": "b"},
        {"x": float("nan")},
        {"ok": 1},
        {"list": [{}]},
        {"list": {}},
    ):
        assert channel.parse(json.dumps({**text, **wrong}), shape) is None


@pytest.mark.parametrize(
    "host, one_host, address",
    [
        ("127.0.0.1", False, "127.0.0.1"), ("localhost", False, "127.0.0.1"), ("::1", False, "::1"),
        ("192.0.2.77", False, None), ("own-name", False, None), ("own-name", True, "127.0.1.1"),
    ],
)  # fmt: skip
def test_the_address_that_rank_0_listens_at(monkeypatch, host, one_host, address):
    resolve = hosts.resolve
    monkeypatch.setattr(
        hosts, "resolve", lambda name: ["127.0.1.1"] if name == "own-name" else resolve(name)
    )
    if host == "::1" and not hosts.is_own("::1"):
        pytest.skip("no IPv6 here")
    assert hosts.listening_address(host, one_host) == address


LISTENERS = """
import glob, os, jax, jaxdp
context = jaxdp.init()
jaxdp.broadcast(jax.numpy.ones(3))
own = [str(os.getpid()), *(p for f in glob.glob("/proc/self/task/*/children") for p in open(f).read().split())]
inodes = {os.readlink(f) for p in own for f in glob.glob(f"/proc/{p}/fd/*") if os.path.islink(f)}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        at, state, inode = (line.split()[i] for i in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in inodes:
            print("listens " + at.replace("0000000000000000FFFF0000", "") + chr(10), end="", flush=True)
context.barrier()
"""
LOOPBACK, ELSEWHERE = "0100007F", "00000000"


def listening(job):
    """The addresses, as the kernel writes them, that the job's Python processes listened at."""
    assert job.returncode == 0 and not job.left, job.output
    return re.findall(r"listens (\w+):", job.stdout)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", ["openmpi5", "mpich", "by hand"])
def test_a_job_on_one_host_cannot_be_reached(tmp_path, which):
    """Not even where the host's own name is its network address, which Gloo takes by itself."""
    with TwoHosts(tmp_path) as network:
        prefix = network.prefixes[0]
        if which == "by hand":
            env = ranks(2, f"localhost:{port()}")
            jobs = launch.processes(["-c", LISTENERS], env, prefixes=[prefix, prefix])
        else:
            free = [] if which == "mpich" else ["--bind-to", "none", "--oversubscribe"]
            command = [
                *prefix,
                launch.require(which),
                *free,
                "-np",
                "2",
                sys.executable,
                "-c",
                LISTENERS,
            ]
            jobs = launch.together([(command, {})], 60)
    at = [address for job in jobs for address in listening(job)]
    if which == "mpich":  # a rank inherits the socket of Hydra's own, which is not ours to bind
        at = [x for x in at if x != ELSEWHERE]
    assert len(at) == 4 and set(at) == {LOOPBACK}, (
        at
    )  # the coordinator, JAX's service, and Gloo in each rank


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_on_two_hosts_listens_at_its_set_address(tmp_path):
    with TwoHosts(tmp_path) as network:
        env = ranks(2, f"{network.address(0)}:12355")
        jobs = launch.processes(["-c", LISTENERS], env, prefixes=network.prefixes)
        chosen = socket.inet_aton(network.address(0))[::-1].hex().upper()
        other = socket.inet_aton(network.address(1))[::-1].hex().upper()
    assert [set(listening(job)) for job in jobs] == [
        {chosen},
        {other},
    ]  # the coordinator, JAX's service and Gloo; Gloo


ATTACK = """
import json, os, resource, socket, sys, time
host, port, until, texts = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.load(open(sys.argv[4]))
resource.setrlimit(resource.RLIMIT_NOFILE, (min(9000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
def connect():
    line = socket.socket()
    line.settimeout(2.0)
    line.connect((host, port))
    return line
def send(data):
    try:
        with connect() as line:
            line.sendall(data)
            line.settimeout(0.2)
            line.recv(100)
    except OSError:
        pass
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    try:
        connect().close()
        break
    except OSError:
        time.sleep(0.005)
for text in texts:
    send(text.encode())
    send(len(text).to_bytes(4, "big") + b"x" * 32 + text.encode())
for data in (b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\0" * 1000, b"\\xff" * 1000, b"\\0\\0\\0\\2" + b"x" * 32 + b"{}",
             b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n"):
    send(data)
lines = []
for _ in range(2000):
    try:
        lines.append(connect())
    except OSError:
        pass
print("connections", len(lines), flush=True)
open(sys.argv[5], "w").close()
while not os.path.exists(until) and time.monotonic() < deadline:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_garbage_and_2000_connections_do_no_harm(tmp_path):
    """They come while rank 1 is still missing, stay into the run, and come again then: the job ends
    as it should.
    """
    attacked, running = tmp_path / "attacked", tmp_path / "running"
    script = (
        "import jaxdp, os, time\n"
        f"while os.environ['JAXDP_PROCESS_ID'] == '1' and not os.path.exists({str(attacked)!r}): time.sleep(0.05)\n"
        "context = jaxdp.init()\n"
        f"open({str(running)!r}, 'w').close()\n"
        "for turn in range(60):\n"
        "    context.barrier(f'turn')\n"
        "    time.sleep(0.1)\n"
        "print('rank', context.rank, 'done')\n"
        "context.barrier('end')\n"
    )
    with TwoHosts(tmp_path) as network:
        env = ranks(2, f"{network.address(0)}:12355")
        until = tmp_path / "over"
        (tmp_path / "garbage").write_text(json.dumps(GARBAGE))
        attack = [
            sys.executable,
            "-c",
            ATTACK,
            network.address(0),
            "12355",
            str(until),
            tmp_path / "garbage",
            attacked,
        ]
        attackers = [
            subprocess.Popen([*network.prefixes[1], *attack], stdout=subprocess.PIPE, text=True)
        ]
        commands = [([*p, sys.executable, "-c", script], e) for p, e in zip(network.prefixes, env)]

        def again(process):
            attackers.append(
                subprocess.Popen([*network.prefixes[1], *attack], stdout=subprocess.PIPE, text=True)
            )

        jobs = launch.together(commands, 90, during=when(running.exists, again))
        until.touch()
        reached = [int(a.communicate(timeout=90)[0].split()[1]) for a in attackers]
    assert [j.returncode for j in jobs] == [0, 0] and not jobs[0].left, (
        jobs[0].output + jobs[1].output
    )
    assert "rank 0 done" in jobs[0].stdout and "rank 1 done" in jobs[1].stdout
    said = "".join(j.stderr for j in jobs)
    assert said.count("refused") == 1 and "refused a message from" in said and "\x1b" not in said, (
        said
    )  # one line
    assert reached[0] > 1500


SPOIL = f"""
import itertools, time
from jaxdp.process import membership, protocol
GARBAGE = {GARBAGE!r}
def spoil(context):
    member = membership.joined()
    values = [*GARBAGE, None, [], {{}}, -1, 1e99, True, [[[]]], {{"n": 1}}]
    for turn in range(5):
        for op, shape in protocol.OPERATIONS.items():
            for value in values if op not in ("leave", "fault", "announce", "log") else []:
                for field in [*shape, "none"]:
                    good = {{"name": "x", "text": "y", "key": "z", "turn": 0, "members": [0], "timeout": 0.0,
                             "seconds": 0.0, "note": {{}}, "await_responsive": False,
                             "suspended": False, "fault": "w"}}
                    good = {{name: good[name] for name in shape}}
                    member.connection.send(op=op, id=-1, **{{**good, field: value}})
        for value in values:
            member.connection.send(op=value, id=value)
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return written(tmp_path_factory.mktemp("config"))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("end", ["finishes", "is preempted", "fails"])
def test_garbage_in_every_operation(config, tmp_path, end):
    """From a rank that has the secret: the job trains, saves, and still ends by what really happens
    to it.
    """
    fault = {"what": "garbage", "rank": 1, "at": 5, "run_dir": str(tmp_path / "run")}
    if end == "fails":
        fault["then"] = "raise"
    data = [f"--data.args={json.dumps(fault)}", "--steps", "300" if end == "finishes" else "100000"]
    command = [
        "train.py",
        "--config",
        str(config),
        "--run_dir",
        str(tmp_path / "run"),
        *data,
        "--resume.force",
        "true",
    ]
    (tmp_path / "spoil.py").write_text(SPOIL)
    env = {"PYTHONPATH": f"{launch.SUPPORT / 'mpi'}:{tmp_path}"}
    during = None
    if end == "is preempted":

        def trained():
            return (tmp_path / "run" / "spoiled").exists()

        during = when(trained, lambda process: process.send_signal(signal.SIGUSR1))
    done = launch.mpirun(2, command, "mpich", env, 90, during=during)
    codes = {
        "finishes": (0,),
        "is preempted": (75,),
        "fails": (1, 9),
    }  # 9: mpirun killed rank 0 before it could end
    assert done.returncode in codes[end] and not done.left, done.output
    assert done.stderr.count("not a message of this job") == 1 and "\x1b" not in done.output, (
        done.output
    )
    if end == "fails":
        assert re.search(r"rank 1 \(host .*\) failed: ValueError: the loader fails", done.stderr), (
            done.output
        )
    else:
        assert kept(tmp_path / "run") and done.stderr.count("Traceback") == 0, done.output
    if end == "finishes":
        assert final(tmp_path / "run") and "could not be saved" not in done.output, done.output


REGISTER = """
import os, sys, time
from jaxlib import _jax
client = _jax.get_distributed_runtime_client(open(sys.argv[1]).read(), 1, init_timeout=10)
try:
    client.connect()
except Exception as error:
    print(error)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_who_reaches_jaxs_service(tmp_path):
    """From JAX 0.12 on, a stranger is refused. Before, the service has no authentication, as
    docs/hosts.md says: he may register as a rank, and the job continues.
    """
    running = tmp_path / "running"
    script = (
        "import jaxdp, time, jax._src.distributed as d\nc = jaxdp.init()\n"
        f"open({str(running)!r}, 'w').write(d.global_state.coordinator_address)\n"
        "for _ in range(300): c.barrier(); time.sleep(0.1)"
    )
    with TwoHosts(tmp_path) as network:
        commands = [
            ([*p, sys.executable, "-c", script], e)
            for p, e in zip(network.prefixes, ranks(2, f"{network.address(0)}:12355"))
        ]

        def register(process):
            stranger = [*network.prefixes[1], sys.executable, "-c", REGISTER, str(running)]
            subprocess.run(stranger, timeout=60, capture_output=True)

        jobs = launch.together(commands, 90, during=when(running.exists, register))
    assert all(j.returncode == 0 for j in jobs), [j.output for j in jobs]


@pytest.mark.skipif(not private_jax.service_has_tls(), reason="needs JAX 0.12")
def test_a_client_needs_the_secret():
    """Without it, its certificate is refused: JAX then ends its process, so it runs in another one."""
    address = f"127.0.0.1:{port()}"
    service = private_jax.start_service(address, 1, "s" * 64, 5)
    connect = "private_jax.make_client(sys.argv[1], 0, sys.argv[2], 5).connect()"
    register = f"from jaxdp.process import private_jax; {connect}"

    def code(secret):
        script = f"import os, sys; {register}; os._exit(7)"
        return subprocess.run(
            [sys.executable, "-c", script, address, secret], capture_output=True
        ).returncode

    assert code("s" * 64) == 7 != code("t" * 64)
    del service


@pytest.fixture
def served(tmp_path):
    """A coordinator of a job of 2 on this host: its settings, a `connect`, and what it prints."""
    errors, lines = tmp_path / "stderr", []
    errors.touch()
    settings = protocol.Settings(
        size=2, secret="s" * 64, port=port(), address="127.0.0.1", jax_host=None, timeout=60.0, silence=20.0,
        stderr=os.open(errors, os.O_WRONLY | os.O_APPEND),
    )  # fmt: skip

    def connect(rank, secret=settings.secret):
        facts = {
            **hosts.identity(), "outward": None, "rank": rank, "size": 2, "jaxdp": "1", "jax": "1", "jaxlib": "1",
            "python": "3", "gloo": True, "visible": None,
        }  # fmt: skip
        lines.append(Connection("127.0.0.1", settings.port, secret, 20.0, facts=facts))
        return lines[-1]

    joining.start_coordinator(settings, "here")
    yield settings, connect, errors
    child = joining._children.pop()
    child.kill()
    child.communicate()
    for line in lines:
        line.socket.close()


def admitted(line, rank):
    """Receive the answer to a first message, once all have come."""
    assert line.receive() == {"rank": rank}
    facts = protocol.unpack(line.receive()["members"])
    assert [one["rank"] for one in facts] == [0, 1] and all(
        {name for name in protocol.FACTS if not name.endswith("?")} <= one.keys() for one in facts
    )


def test_a_silent_host_is_not_named_as_another_program():
    """A program whose queue of connections is full answers as a host that is cut off does: not at
    all.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address), pytest.raises(TimeoutError) as error:
            Connection(*address, "s" * 64, 0.1)
    assert error.value.errno in NOBODY


def test_two_processes_of_one_rank_are_named_to_all(served):
    _, connect, _ = served
    for line in [connect(rank) for rank in (1, 1, 0)]:
        assert "two processes say they are rank 1" in line.receive()["error"]


def test_a_process_that_comes_too_late_says_so(served):
    _, connect, _ = served
    connect(1), connect(0)
    late = connect(1).receive()
    assert "rank 1 (host" in late["error"] and "comes too late" in late["error"]
    assert (late["rank"], late["code"]) == (1, 1)  # 1: a launcher starts it again


def test_a_stranger_with_another_secret_is_refused(served):
    _, connect, errors = served
    for wrong in ("t" * 64, "", "s" * 63):
        with pytest.raises(Foreign, match="it has another secret"):
            connect(1, wrong).receive()
    for rank, line in enumerate([connect(rank) for rank in (0, 1)]):
        admitted(line, rank)
    assert errors.read_text().count("refused a message from 127.0.0.1: wrong secret") == 1


def test_a_recorded_message_is_refused(served):
    """On another connection, and twice on the same one."""
    settings, connect, errors = served
    first = connect(0)
    recorded = []
    first.socket = Recorder(first.socket, recorded)
    second = connect(1)
    admitted(second, 1)
    admitted(first, 0)
    first.send(op="fault", id="1", text="recorded", code=1)
    assert first.receive()["fault"] == "recorded" and second.receive()["fault"] == "recorded"
    assert errors.read_text() == ""
    stranger = connect(1, "no secret")
    with pytest.raises(OSError):
        stranger.receive()
    with socket.create_connection(("127.0.0.1", settings.port), 20.0) as replayed:
        replayed.recv(1000)
        replayed.sendall(recorded[-1])
        assert replayed.recv(1000) == channel.REFUSAL and replayed.recv(1000) == b""
    assert first.receive() == {"first": True, "id": "1"}
    first.socket.sendall(recorded[-1])
    with pytest.raises(OSError):
        first.receive()
    assert "refused a message from 127.0.0.1: wrong secret" in errors.read_text()


class Recorder:
    """A socket that remembers what was sent."""

    def __init__(self, inner, sent):
        self.inner, self.sent = inner, sent

    def sendall(self, data):
        self.sent.append(data)
        self.inner.sendall(data)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_rank_cannot_speak_for_another(served):
    """The author of a fault or an announcement is the rank of the connection, whatever the message
    says.
    """
    _, connect, _ = served
    lines = [connect(rank) for rank in (0, 1)]
    for rank, line in enumerate(lines):
        admitted(line, rank)
    lines[1].send(op="announce", id=1, name="stop 0", text="{}", rank=0)
    assert lines[0].receive() == {"announced": "stop 0", "rank": 1, "text": "{}"}
    lines[1].send(op="fault", id=2, text="forged", code=1, rank=0)
    assert lines[0].receive() == {"fault": "forged", "code": 1, "rank": 1}


def test_an_elastic_operation_is_refused_in_other_jobs(served):
    _, connect, errors = served
    lines = [connect(rank) for rank in (0, 1)]
    for rank, line in enumerate(lines):
        admitted(line, rank)
    lines[1].send(op="regroup", id="1")
    assert lines[1].receive() == {"id": "1", "refused": True}
    lines[1].send(op="get", id="2", key="k", timeout=0.0)
    assert lines[1].receive() == {"id": "2", "text": None}
    assert errors.read_text().count("refused an operation of rank 1: regroup") == 1


def test_the_secret_of_a_user(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXDP_SECRET", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    secret = channel.shared_secret()
    path = tmp_path / "jaxdp" / "secret"
    assert (
        len(secret) == 64
        and channel.shared_secret() == secret
        and path.stat().st_mode & 0o777 == 0o600
    )
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others can read this secret"):
        channel.shared_secret()
    monkeypatch.setenv("JAXDP_SECRET", "chosen")
    assert channel.shared_secret() == "chosen"
    monkeypatch.delenv("JAXDP_SECRET")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    with pytest.raises(UsageError, match=r"cannot be stored there .*: set JAXDP_SECRET"):
        channel.shared_secret()
