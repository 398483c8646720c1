"""A check is a function of nothing that yields what it found; whatever happens to it becomes a line as well."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxdp.errors import Said, one_line

OK, WARNING, FAILURE = "ok", "warning", "failure"


class Check(NamedTuple):
    """name: of what was looked at. status: OK, WARNING or FAILURE. fix: what mends it; empty where all is well."""

    name: str
    status: str
    found: str
    fix: str = ""


Line = tuple[Check, tuple[int, ...]]
Checker = Callable[[], Iterable[Check]]


def ok(name: str, found: str) -> Check:
    return Check(name, OK, found)


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name, WARNING, found, fix)


def failure(name: str, found: str, fix: str) -> Check:
    return Check(name, FAILURE, found, fix)


def of_error(name: str, error: BaseException) -> Check:
    """An exception as a failure. The project's own errors end in the fix, after a colon or a semicolon."""
    text = one_line(error)
    if not isinstance(error, Said):
        return failure(name, f"the check itself failed: {type(error).__name__}: {text}", "report it with this line")
    at = max(text.rfind(": "), text.rfind("; "))
    return failure(name, text[:at], text[at + 2 :]) if at > 0 else failure(name, text, "")


def run_checks(checks: Mapping[str, Checker], seconds: float, more: Mapping[str, float] | None = None) -> list[Check]:
    """All of them side by side, each with `seconds` at most, or as `more` says; the results in the order of `checks`.

    One that raises is a failure, and one that does not end as well: a dead name server or network file system holds a
    thread for minutes, and no other check must wait for it.
    """
    found: dict[str, list[Check]] = {}

    def run(name: str, checker: Checker) -> None:
        lines: list[Check] = []
        try:
            lines.extend(checker())
        except BaseException as error:
            lines.append(of_error(name, error))
        found[name] = lines

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    began, lines = time.monotonic(), []
    for name, thread in zip(checks, threads):
        allowed = (more or {}).get(name, seconds)
        thread.join(max(0.0, began + allowed - time.monotonic()))
        slow = failure(name, f"no answer within {allowed:g} s", "see what it waits for: a name server, a file system")
        lines += found.get(name, [slow])
    return lines


class Examined(NamedTuple):
    """lines: (check, the ranks that found it; none for what concerns the job as a whole). hosts: by rank.

    stray: these are the lines of a rank that did not find rank 0, which waits for it and says so.
    """

    title: str
    lines: list[Line]
    size: int
    hosts: dict[int, str]
    stray: bool = False


def title(names: list[str], size: int) -> str:
    """Of so many processes on hosts with these names."""
    places = list(dict.fromkeys(names))
    where = places[0] if len(places) == 1 else f"{len(places)} hosts ({', '.join(places[:8])})"
    return f"{size} process{'es' * (size > 1)} on {where}"
