"""Findings: the functions that yield them, of which one that raises or hangs is a finding too;
their text and JSON.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jaxdp
from jaxdp.errors import ReportedError, one_line
from jaxdp.process.hosts import listed

OK, WARNING, FAILURE = "ok", "warning", "failure"
LIMIT = 20.0  # seconds for a check of this machine, for importing JAX, and for opening its devices


class Check(NamedTuple):
    """A finding. fix: what the user should do; empty if nothing. ranks: whose it is; none if it is
    the job's.
    """

    name: str
    found: str
    fix: str = ""
    status: str = OK
    ranks: tuple[int, ...] = ()


class Stage(NamedTuple):
    """A part of an examination. name: what it does, for at most `seconds`; "" at the end. checks:
    the findings so far. hosts: the name of each rank's.
    """

    name: str
    seconds: float
    checks: list[Check]
    rank: int
    hosts: list[str]


Checker = Callable[[], Iterable[Check]]
ok = Check
warning = functools.partial(Check, status=WARNING)
failure = functools.partial(Check, status=FAILURE)


def graded(name: str, value: float, least: float, enough: float, found: str, fix: str) -> Check:
    """Return a failure if `value` is below `least`, a warning if it is below `enough`, else ok."""
    if value >= enough:
        return ok(name, found)
    return (failure if value < least else warning)(name, found, fix)


def of_text(name: str, text: str) -> Check:
    """Return an error message of jaxdp as a failure. Such a message ends in the fix, after a colon
    or a semicolon.
    """
    at = max(text.rfind(": "), text.rfind("; "))
    return failure(name, text[:at], text[at + 2 :]) if at > 0 else failure(name, text, "")


def run_checks(checks: Mapping[str, Checker], seconds: float = LIMIT) -> list[Check]:
    """Run checks concurrently, and return their findings in order. A check that is not done in time
    is a failure.
    """
    slow = f"no answer within {seconds:g} s", "see what it waits for: a name server, a file system"
    results = {name: [failure(name, *slow)] for name in checks}

    def run(name, checker):
        findings: list[Check] = []
        try:
            findings.extend(checker())
        except ReportedError as error:
            findings.append(of_text(name, one_line(error)))
        except BaseException as error:
            text = f"the check itself failed: {type(error).__name__}: {one_line(error)}"
            findings.append(failure(name, text, "report it with this line"))
        results[name] = findings

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [check for name in checks for check in results[name]]


def as_json(checks: Sequence[Check], hosts: Sequence[str]) -> dict[str, Any]:
    """Return {checks: [{name, found, fix, status, ranks}], ...}. hosts: the name of each rank's."""
    return {
        "jaxdp": jaxdp.__version__,
        "hosts": [*hosts],
        "checks": [check._asdict() for check in checks],
    }


def as_text(checks: Sequence[Check], hosts: Sequence[str]) -> str:
    """Return a line for each finding, and a second one for its fix. hosts: the name of each rank's."""
    names, size = list(dict.fromkeys(hosts)), len(hosts)
    where = names[0] if len(names) == 1 else f"{len(names)} hosts ({listed(names)})"
    text = [f"jaxdp {jaxdp.__version__} doctor: {size} process{'es' * (size > 1)} on {where}"]
    width = max(len(check.name) for check in checks)
    for name, found, fix, status, ranks in checks:
        some = [f"{rank} (host {hosts[rank]})" for rank in ranks] if len(ranks) < size else []
        prefix = f"rank{'s' * (len(some) > 1)} {listed(some, 4)}: " if some else ""
        text.append(f"{status:7}  {name:{width}}  {prefix}{found}")
        text += [f"{'':7}  {'':{width}}  fix: {fix}"] if fix else []
    count = Counter(check.status for check in checks)
    counts = [f"{count[s]} {s}{'s' * (count[s] > 1)}" for s in (WARNING, FAILURE) if count[s]]
    return "\n".join([*text, ", ".join([f"{count[OK]} ok", *counts])])
