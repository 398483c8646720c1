"""Findings: the functions that yield them, of which one that raises or hangs is a finding too; their text and JSON."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jaxdp
from jaxdp.distributed.hosts import listed
from jaxdp.errors import ReportedError, one_line

OK, WARNING, FAILURE = "ok", "warning", "failure"
COLORS = {OK: "\x1b[32m", WARNING: "\x1b[1;33m", FAILURE: "\x1b[1;31m"}
LIMIT = 20.0  # seconds for a check of this machine, for importing JAX, and for opening its devices


class Check(NamedTuple):
    """A finding. name: what was checked. fix: what the user should do; empty if nothing."""

    name: str
    found: str
    fix: str = ""
    status: str = OK


Checker = Callable[[], Iterable[Check]]
Line = tuple[Check, tuple[int, ...]]  # a finding and its ranks; no ranks if it concerns the whole job
ok = Check
warning = functools.partial(Check, status=WARNING)
failure = functools.partial(Check, status=FAILURE)


def graded(name: str, value: float, least: float, enough: float, found: str, fix: str) -> Check:
    """Return a failure if `value` is below `least`, a warning if it is below `enough`, else ok."""
    return ok(name, found) if value >= enough else (failure if value < least else warning)(name, found, fix)


def of_text(name: str, text: str) -> Check:
    """Return an error message of jaxdp as a failure. Such a message ends in the fix, after a colon or a semicolon."""
    at = max(text.rfind(": "), text.rfind("; "))
    return failure(name, text[:at], text[at + 2 :]) if at > 0 else failure(name, text, "")


def run_checks(checks: Mapping[str, Checker], seconds: float = LIMIT) -> list[Check]:
    """Run checks concurrently, and return their findings in order. A check that is not done in time is a failure."""
    slow = f"no answer within {seconds:g} s", "see what it waits for: a name server, a file system"
    results = {name: [failure(name, *slow)] for name in checks}

    def run(name: str, checker: Checker) -> None:
        lines: list[Check] = []
        try:
            lines.extend(checker())
        except ReportedError as error:
            lines.append(of_text(name, one_line(error)))
        except BaseException as error:
            text = f"the check itself failed: {type(error).__name__}: {one_line(error)}"
            lines.append(failure(name, text, "report it with this line"))
        results[name] = lines

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [check for name in checks for check in results[name]]


class Examined(NamedTuple):
    """The findings of a job. hosts: names by rank."""

    lines: list[Line]
    size: int
    hosts: dict[int, str]

    def statuses(self) -> Counter[str]:
        """Return the number of findings of each status."""
        return Counter(check.status for check, _ in self.lines)


def as_json(examined: Examined) -> dict[str, Any]:
    """Return {checks: [{name, status, found, fix; of several processes, rank, ranks, hosts}], failures, ...}."""
    checks = []
    for check, ranks in examined.lines:
        checks.append(check._asdict())
        if ranks and examined.size > 1:
            names = list(dict.fromkeys(examined.hosts[rank] for rank in ranks))
            checks[-1] |= {"rank": ranks[0], "ranks": list(ranks), "hosts": names}
    return {
        "jaxdp": jaxdp.__version__,
        "processes": examined.size,
        "hosts": list(dict.fromkeys(examined.hosts.values())),
        "failures": examined.statuses()[FAILURE],
        "warnings": examined.statuses()[WARNING],
        "checks": checks,
    }


def as_text(examined: Examined, color: bool = False) -> str:
    """Return a line for each finding, and a second one for its fix."""
    names, size, count = list(dict.fromkeys(examined.hosts.values())), examined.size, examined.statuses()
    where = names[0] if len(names) == 1 else f"{len(names)} hosts ({listed(names)})"
    text = [f"jaxdp {jaxdp.__version__} doctor: {size} process{'es' * (size > 1)} on {where}"]
    width = max(len(check.name) for check, _ in examined.lines)
    for check, ranks in examined.lines:
        status = f"{COLORS[check.status]}{check.status:7}\x1b[0m" if color else f"{check.status:7}"
        some = [f"{rank} (host {examined.hosts[rank]})" for rank in ranks] if len(ranks) < size else []
        prefix = f"rank{'s' * (len(some) > 1)} {listed(some, 4)}: " if some else ""
        text.append(f"{status}  {check.name:{width}}  {prefix}{check.found}")
        text += [f"{'':7}  {'':{width}}  fix: {check.fix}"] if check.fix else []
    counts = [f"{count[s]} {s}{'s' * (count[s] > 1)}" for s in (WARNING, FAILURE) if count[s]]
    return "\n".join([*text, ", ".join([f"{count[OK]} ok", *counts])])
