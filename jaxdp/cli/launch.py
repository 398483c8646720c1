"""The verb `launch`: start the processes of a job on this host, and restart those that die."""

import contextlib
import dataclasses
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

from jaxdp.cli import Call
from jaxdp.cli.option_table import VERBS
from jaxdp.errors import INTERRUPTED, PREEMPTED, UsageError
from jaxdp.process import hosts
from jaxdp.process.signals import end_after_second, handled, start_verb

FINAL = (0, 2, PREEMPTED)  # exit codes after which a process is not started again
PAUSE = 30.0  # seconds before a restart, at most
ALONE = 2.0  # seconds that the others of a process run on before its end is reported
BRIEF = 5.0  # seconds; a process that has run for longer is started again at once


@dataclasses.dataclass
class Process:
    """One process of the job: a verb of jaxdp, or a program. restarts: how many are left."""

    words: list[str]
    environment: dict[str, str]
    restarts: int

    def __post_init__(self) -> None:
        self.pause, self.began = 0.0, time.time()  # seconds before the next restart; since 1970
        self.restart_at: float | None  # when the next restart is due
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()
        self.restart_at = None
        environment = self.environment | {"JAXDP_RESTARTS": str(self.restarts)}
        self.child: subprocess.Popen[bytes]
        if self.words[0] in VERBS:
            self.child = start_verb(self.words, environment)
        else:
            self.child = subprocess.Popen(self.words, env=environment)

    def code(self) -> int | None:
        """Return the exit code, or None if the process runs or is to run again; start it again when
        that is due.
        """
        code = self.child.poll()
        if self.restart_at is None and code not in (None, *FINAL) and self.restarts > 0:
            self.restarts -= 1
            if time.monotonic() - self.started > BRIEF:
                self.pause = 0.0
            self.restart_at = time.monotonic() + self.pause
            self.pause = min(PAUSE, 2 * self.pause or 1.0)
        if (restart_at := self.restart_at) is None:
            return code
        if time.monotonic() >= restart_at:
            with contextlib.suppress(
                OSError
            ):  # not enough memory, for example: this has cost a restart
                self.environment["JAXDP_BEGAN"] = str(self.began)
                self.start()
        return None

    def stop(self) -> None:
        """Do not start this process again."""
        self.restarts = 0
        self.restart_at = None


def run(call: Call) -> None:
    """Start the processes, wait for their end, and exit with the code of the job.

    The command is a verb of jaxdp or a program. Each process gets its rank, the number of
    processes, the coordinator's address and the job's secret in its environment, and the name of a
    file: a job that may lose processes writes to it. Raises UsageError if there is no command."""
    command = call.options["command"]
    count = call.options["processes"]
    if not command:
        raise UsageError(
            "launch: no command given; e.g. jaxdp launch -n 2 train --config configs/digits.yaml"
        )
    environment = {
        **os.environ,
        "JAXDP_COORDINATOR": f"127.0.0.1:{hosts.free_port()}",
        "JAXDP_NUM_PROCESSES": str(count),
        "JAXDP_LOCAL_SIZE": str(count),
        "JAXDP_SECRET": os.environ.get("JAXDP_SECRET") or secrets.token_hex(32),
    }
    processes = list[Process]()
    asked = list[int]()

    def send(process: Process, number: int) -> None:
        if number != signal.SIGUSR2:
            process.stop()
        if number != signal.SIGINT:  # a terminal sends it to the processes too, which save
            process.child.send_signal(number)

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        for process in processes:
            send(process, number)
        end_after_second(asked)

    for number in handled():
        signal.signal(number, forward)
    try:
        with tempfile.NamedTemporaryFile() as losses:
            environment["JAXDP_LOSSES"] = losses.name
            for rank in map(str, range(count)):
                own = environment | {"JAXDP_PROCESS_ID": rank, "JAXDP_LOCAL_RANK": rank}
                before = len(asked)
                if not {*asked} - {signal.SIGUSR2}:
                    processes.append(Process(command, own, call.options["restart"]))
                    for number in asked[before:]:  # that came while it was started
                        send(processes[-1], number)
            code = wait(processes, losses)
            # A script that has not called jaxdp yet ends by the signal itself.
            stopped = not processes or any(
                -number in [p.code() for p in processes] for number in asked
            )
            sys.exit(PREEMPTED if stopped and code not in FINAL else code)
    except OSError as error:
        raise UsageError(f"launch: {command[0]!r} cannot be started: {error.strerror}") from None
    finally:  # if one cannot be started, the others would wait for it
        for process in processes:
            process.child.kill()


def wait(processes: list[Process], losses: IO[bytes]) -> int:
    """Wait until no process runs or is to run again; return the code of the job: 0, 2, 75, 130 or
    1.

    The job has succeeded if all processes have. losses: a file that is not empty if it may have
    lost some before the first one succeeded; of the others, more than half must have succeeded.
    """
    last, ended = processes, dict[int, float]()
    while None in (codes := [process.code() for process in processes]):
        if 0 in codes or PREEMPTED in codes:  # the job has finished, or has saved
            for process in processes:
                process.stop()
        else:
            last = [process for process, code in zip(processes, codes) if code is None]
        for rank, code in enumerate(codes):
            if (
                code not in (None, 0, PREEMPTED)
                and ended.setdefault(rank, time.monotonic()) < time.monotonic() - ALONE
            ):
                ended[rank] = math.inf
                how = f"with code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
                print(f"jaxdp: launch: rank {rank} has ended {how}; others run", file=sys.stderr)
        time.sleep(0.1)
    if set(codes) == {0} or (
        losses.read() and 2 * [process.code() for process in last].count(0) > len(last)
    ):
        return 0
    return next((code for code in (*FINAL[1:], INTERRUPTED) if code in codes), 1)
