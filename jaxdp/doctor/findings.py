"""Findings: the functions that yield them, of which one that raises or hangs is a finding too;
their text and JSON.
"""

import concurrent.futures
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jaxdp
from jaxdp.errors import one_line
from jaxdp.metrics.numbers import table
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
    hosts: list[str]


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
    match = re.fullmatch("(.+)[:;] (.+)", text)
    return failure(name, *match.groups()) if match else failure(name, text)


def run_checks(checks: Mapping[str, Iterable[Check]], seconds: float = LIMIT) -> list[Check]:
    """Run checks (generators) in threads, and return their findings in order. A check that raises,
    or is not done in time, is a failure.
    """
    pool = concurrent.futures.ThreadPoolExecutor(len(checks))
    futures = {name: pool.submit(list, findings) for name, findings in checks.items()}
    concurrent.futures.wait(futures.values(), seconds)
    results: list[Check] = []
    for name, future in futures.items():
        if not future.done():
            fix = "see what it waits for: a name server, a file system"
            results.append(failure(name, f"no answer within {seconds:g} s", fix))
        elif error := future.exception():
            text = f"the check itself failed: {type(error).__name__}: {one_line(error)}"
            results.append(failure(name, text, "see that message, or report it"))
        else:
            results += future.result()
    return results


def as_json(checks: Sequence[Check], hosts: Sequence[str]) -> dict[str, Any]:
    """Return {checks: [{name, found, fix, status, ranks}], ...}. hosts: the name of each rank's."""
    return {
        "jaxdp": jaxdp.__version__,
        "hosts": hosts,
        "checks": [check._asdict() for check in checks],
    }


def as_text(checks: Sequence[Check], hosts: Sequence[str]) -> str:
    """Return a line for each finding, and a second one for its fix. hosts: the name of each rank's."""
    names, size = list(dict.fromkeys(hosts)), len(hosts)
    where = names[0] if len(names) == 1 else f"{len(names)} hosts ({listed(names)})"
    rows = []
    for name, found, fix, status, ranks in checks:
        some = [f"{rank} (host {hosts[rank]})" for rank in ranks] if len(ranks) < size else []
        prefix = f"rank{'s' * (len(some) > 1)} {listed(some, 4)}: " if some else ""
        rows.append((status, name, f"{prefix}{found}"))
        if fix:
            rows.append(("", "", f"fix: {fix}"))
    counts = Counter(check.status for check in checks)
    head = f"jaxdp {jaxdp.__version__} doctor: {size} process{'es' * (size > 1)} on {where}"
    texts = [
        f"{count} {status}{'s' * (count > 1 and status != OK)}" for status, count in counts.items()
    ]
    return "\n".join([head, *table(rows), ", ".join(texts)])
