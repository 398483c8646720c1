"""Access to Orbax: imported late, with our time limit, and without its tracebacks."""

import functools
import logging
import pathlib
import sys
from typing import Any

from jaxdp.distributed.context import Context, current

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


def load(folder: pathlib.Path, targets: Any) -> Any:
    """Return the tree in a folder of Orbax, as `targets` (abstract arrays) say. All processes call it."""
    prepare(current())
    return orbax().load(folder, targets)


def prepare(context: Context) -> None:
    """Let Orbax work in this generation of an elastic job, though it began in another one, or not on all processes.

    It keeps a client of JAX's service, which an earlier generation has left. The names of its barriers have a count of
    its operations; each process counts its own, so a process that has joined would wait in other barriers.
    """
    from orbax.checkpoint._src.futures.signaling_client import get_signaling_client
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator as Operations

    get_signaling_client.cache_clear()
    counts = context.exchange("operations of Orbax", Operations.get_current_operation_id())
    while int(Operations.get_current_operation_id()) < max(map(int, counts)):
        Operations.next_operation_id()


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
