"""Access to Orbax: imported late, with our time limit, and without its tracebacks."""

import functools
import logging
import sys
from typing import Any

TIMEOUT = 1200.0  # seconds for the files of one save


def orbax() -> Any:
    """Import Orbax at the first save or restore, so that the first update does not wait for it."""
    from orbax.checkpoint import v1

    return v1


def options() -> Any:
    """Return Orbax's context with our time limit."""
    context = orbax().Context()
    context.asynchronous.timeout_secs = int(TIMEOUT)
    return context


@functools.cache
def silence_orbax() -> None:
    """Drop Orbax's tracebacks of a failed write and of its closed event loop: we report the failure in one line."""
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in str(record.msg))
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook
