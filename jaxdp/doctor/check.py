"""Define a finding, and run the functions that yield findings. A function that raises or hangs is a finding too."""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxdp.errors import ReportedError, one_line

OK, WARNING, FAILURE = "ok", "warning", "failure"
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
