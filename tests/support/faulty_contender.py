"""A contender of the benchmarks without a model, which fails as its argument says: python
faulty_contender.py FAULT.
"""

import os
import signal
import socket
import sys
import threading
import time

from benchmarks import contender

RATE = 1e-4  # seconds an update
ANSWERS = {
    "garbage": b"\xff\xfe what?\n",
    "no seconds": b'{"seconds": "soon"}\n',
    "no time": b'{"seconds": 0}\n',
    "half": b"{",
}


def losses(fault: str, start: int, updates: int) -> list[float]:
    values = [2.0 / (i + 1) for i in range(start, start + updates)]
    if fault == "differs":  # as a channels_last layout did on one machine
        values = [x * (1 + 1.5e-4) if start + i >= 9 else x for i, x in enumerate(values)]
    if fault == "few losses":
        values = values[:-1] if updates > 1 else values
    return [float("nan")] * updates if fault == "nan" else values


def is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def spin() -> None:
    while True:
        pass


def main(fault: str) -> None:
    contender.take_place()
    if fault == "import":
        import a_package_that_is_not_installed  # type: ignore[import-not-found] # noqa: F401
    if fault == "exits":
        sys.exit(5)
    if fault == "begins late":
        time.sleep(600)
    if fault in ("no hello", "half a hello"):
        line = socket.create_connection(("127.0.0.1", int(os.environ[contender.ADDRESS])))
        line.sendall(b"what?\n" if fault == "no hello" else f'{{"name": "{fault}"}}\n'.encode())
        time.sleep(600)
    trained, turns = 0, 0

    def train(updates: int) -> list[float]:
        nonlocal trained
        trained += updates
        return losses(fault, trained - updates, updates)

    def run(updates: int) -> None:
        nonlocal turns
        turns += 1
        time.sleep(RATE * updates)
        if turns == 4 and fault == "crash":
            os._exit(3)
        if turns == 4 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if turns == 4 and fault == "hang":
            time.sleep(600)
        if turns == 4 and fault in ANSWERS:
            line = next(fd for fd in range(3, 64) if is_socket(fd))
            os.write(line, ANSWERS[fault])
            time.sleep(600)

    if fault == "busy":
        threading.Thread(target=spin, daemon=True).start()
    contender.serve(train, run)


if __name__ == "__main__":
    main(sys.argv[1])
