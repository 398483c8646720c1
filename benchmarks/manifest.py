"""The manifest of a checkpoint by thousands of processes: what root does alone, and what every
process does.

    python -m benchmarks.manifest [--processes 64 1024 4096]

Writes as many files as Orbax does, each of a few bytes, into a temporary folder: the times are
those of names, not of data. Prints JSON lines: seconds, and the calls of the file system if strace
is installed."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from jaxdp.checkpoint import manifest

FILES = [
    "array_metadatas/process_{}",
    "ocdbt.process_{}/manifest.ocdbt",
    "ocdbt.process_{}/d/{:032x}",
]
SHARED = ["_METADATA", "_sharding", "manifest.ocdbt", f"d/{0:032x}"]


def make(folder: pathlib.Path, processes: int) -> None:
    for name in [*SHARED, *(name.format(r, r) for r in range(processes) for name in FILES)]:
        (folder / "state" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "state" / name).write_text(name)


def share(folder: pathlib.Path, processes: int) -> None:
    """Do what each process does to save."""
    names = json.loads((folder.parent / "names").read_text())[1::processes]
    manifest.digests(folder, names)
    manifest.flush(folder, names)


def write(folder: pathlib.Path, processes: int) -> None:
    files = {
        name: (1000, f"{i:064x}")
        for i, name in enumerate(json.loads((folder.parent / "names").read_text()))
    }
    files |= manifest.digests(folder, [*files][1::processes])
    manifest.write(folder, files, {})


PHASES: dict[str, Callable[[pathlib.Path, int], Any]] = {
    "list, by root": lambda folder, processes: manifest.list_files(folder),
    "digest and flush, by each": share,
    "write, by root": write,
    "read, by root": lambda folder, processes: manifest.read(folder),
    "read and check, by each": lambda folder, processes: manifest.problem(folder, 1, processes),
}


def calls(folder: pathlib.Path, processes: int, phase: str) -> int:
    """Return the number of calls of the file system in a phase, without those of an empty start."""
    count = []
    for what in ("", phase):
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--phase",
            what,
            str(folder),
            str(processes),
        ]
        trace = [
            "strace",
            "-f",
            "-qq",
            "-e",
            "trace=%file,fsync,getdents64",
            "-o",
            str(folder.parent / "trace"),
        ]
        subprocess.run([*trace, *command], check=True)
        count.append(len((folder.parent / "trace").read_text().splitlines()))
    return count[1] - count[0]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--phase", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.phase:
        phase, folder, processes = options.phase
        PHASES.get(phase, lambda *_: None)(pathlib.Path(folder), int(processes))
        return
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as top:
            folder = pathlib.Path(top).resolve() / "1000"
            make(folder, processes)
            names = manifest.list_files(folder)
            (folder.parent / "names").write_text(json.dumps(names))
            for phase, work in PHASES.items():
                began = time.perf_counter()
                work(folder, processes)
                result = {
                    "processes": processes,
                    "what": phase,
                    "s": round(time.perf_counter() - began, 4),
                }
                if shutil.which("strace"):
                    result["calls"] = calls(folder, processes, phase)
                print(json.dumps(result), flush=True)
            size = os.path.getsize(folder / manifest.NAME)
            print(
                json.dumps({"processes": processes, "files": len(names), "manifest_bytes": size}),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
