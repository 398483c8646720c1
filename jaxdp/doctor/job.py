"""Join the job and check it: `python -m jaxdp.doctor.job DIRECTORY`, a process that `examine` starts and follows.

It reads one line: the findings and facts of this rank. It prints one before each stage (imports, ranks, network,
devices, all-reduce): its name, the seconds that it may take, the findings so far, and the names of the ranks' hosts.
"""

import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.distributed import hosts, membership
from jaxdp.doctor import bindings, collective, devices, network, resources, versions
from jaxdp.doctor.check import LIMIT, OK, Check, Line, ok, run_checks


def main(directory: pathlib.Path) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not a stage
    imports = list(versions.check_imports())
    report = json.loads(sys.stdin.readline())
    checks = [*(Check(*check) for check in report["checks"]), *imports]
    names: Sequence[str] = ()

    def stage(name: str, seconds: float, lines: list[Line]) -> None:
        print(json.dumps([name, seconds, lines, names]), file=out, flush=True)

    lines = [(check, (report["rank"],)) for check in checks]
    stage("ranks", 2 * report["timeout"] + 10, lines)
    import jax

    from jaxdp.distributed import context as contexts

    context = contexts.init() if report["join"] else contexts.Context()
    names = context.hosts if context.size > 1 else ()
    stage("network", 2 * LIMIT + report["timeout"], lines)
    more, link = check_between(context, directory, report["facts"])
    reports = gather(context, "checks", {**report["facts"], "checks": [*checks, *more]})
    lines = merge(reports)
    if reports:
        lines += [(check, ()) for check in (*bindings.check_bindings(reports), *versions.check_same(reports))]
    stage("devices", LIMIT, lines)
    opened = devices.open_devices()
    if jax.device_count() > 1:
        stage("all-reduce", LIMIT, lines)
        opened["timed"] = collective.all_reduce(opened["platform"])
    facts = {name: report["facts"][name] for name in ("host", "boot")}
    reports = gather(context, "devices", {**facts, **opened, "checks": list(devices.check_devices(opened))})
    lines += merge(reports)
    if reports:
        lines += [(check, ()) for check in devices.check_sharing(reports)]
        if "timed" in opened:
            count = len({hosts.key(fact) for fact in reports.values()})
            how = opened["platform"], opened["kind"], count, link, context.size
            lines += [(check, ()) for check in collective.check_collective(opened["timed"], *how)]
    stage("", 0, lines)
    contexts.leave(0)


def check_between(context: Any, directory: pathlib.Path, facts: dict[str, Any]) -> tuple[list[Check], float | None]:
    """Check what lies between the ranks; return the findings, and the bytes per second of the slowest link."""
    if context.size == 1:
        return [], None
    port = network.listen()
    shared = {name: facts[name] for name in ("host", "boot", "addresses", "outward", "marker")}
    texts = context.exchange("facts", json.dumps({**shared, "port": port}))
    everyone = {rank: json.loads(text) for rank, text in enumerate(texts)}
    several = len({hosts.key(fact) for fact in everyone.values()}) > 1
    speeds: list[float] = []
    marker = resources.Marker(directory, 0, everyone[0]["marker"])
    checks = run_checks(
        {
            "network": functools.partial(network.check_reach, context.rank, everyone, speeds),
            "run_dir": functools.partial(marker.check_shared, several),
        }
    )
    context.barrier("network")
    if not several and context.rank == 0:  # alone, so that no other check slows it down
        speeds = [max(network.speed("127.0.0.1", port) for _ in range(3))]
    return [ok("ranks", f"{context.size} processes have joined"), *checks], min(speeds, default=None)


def gather(context: Any, name: str, value: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return every rank's value on rank 0, and an empty dict on the others."""
    if context.size == 1:
        return {0: value}
    member = membership.joined()
    member.put(f"{name} {context.rank}", json.dumps(value))
    context.barrier(name)
    ranks = range(context.size if context.rank == 0 else 0)
    return {rank: json.loads(member.get(f"{name} {rank}") or "{}") for rank in ranks}


def merge(reports: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """Return every finding once, with its ranks. What is ok on a host may differ in numbers from rank to rank."""
    merged: dict[Check, list[int]] = {}
    same: dict[tuple[object, ...], Check] = {}
    for rank, report in reports.items():
        for check in (Check(*fields) for fields in report["checks"]):
            if check.status == OK:
                check = same.setdefault((hosts.key(report), check.name, re.sub(r"[\d.]+", "", check.found)), check)
            merged.setdefault(check, []).append(rank)
    return [(check, tuple(ranks)) for check, ranks in merged.items()]


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
