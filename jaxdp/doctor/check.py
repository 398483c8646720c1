"""Define a check: a function without arguments that yields findings. A check that raises or hangs is a finding too."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxdp.errors import ReportedError, one_line

OK, WARNING, FAILURE = "ok", "warning", "failure"


class Check(NamedTuple):
    """A finding. name: what was checked. fix: what the user should do; empty if nothing."""

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


def graded(name: str, value: float, least: float, enough: float, found: str, fix: str) -> Check:
    """Return a failure if `value` is below `least`, a warning if it is below `enough`, else ok."""
    if value >= enough:
        return ok(name, found)
    return Check(name, FAILURE if value < least else WARNING, found, fix)


def of_error(name: str, error: BaseException) -> Check:
    """Return an exception as a failure. The project's own errors end in the fix, after a colon or a semicolon."""
    text = one_line(error)
    if not isinstance(error, ReportedError):
        return failure(name, f"the check itself failed: {type(error).__name__}: {text}", "report it with this line")
    at = max(text.rfind(": "), text.rfind("; "))
    return failure(name, text[:at], text[at + 2 :]) if at > 0 else failure(name, text, "")


def run_checks(checks: Mapping[str, Checker], seconds: float, more: Mapping[str, float] | None = None) -> list[Check]:
    """Run checks concurrently and return their findings in the order of `checks`.

    A dead name server or network file system can block a thread for minutes, so a check that takes longer than
    `seconds` (or than its limit in `more`) is reported as a failure and no longer waited for.
    """
    results: dict[str, list[Check]] = {}

    def run(name: str, checker: Checker) -> None:
        lines: list[Check] = []
        try:
            lines.extend(checker())
        except BaseException as error:
            lines.append(of_error(name, error))
        results[name] = lines

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    began, lines = time.monotonic(), []
    for name, thread in zip(checks, threads):
        allowed = (more or {}).get(name, seconds)
        thread.join(max(0.0, began + allowed - time.monotonic()))
        slow = failure(name, f"no answer within {allowed:g} s", "see what it waits for: a name server, a file system")
        lines += results.get(name, [slow])
    return lines
