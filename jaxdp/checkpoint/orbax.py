"""Access to Orbax: imported late, with our time limit, and without its tracebacks."""

import functools
import logging
import pathlib
import sys
from typing import Any
from unittest import mock

from jaxdp.checkpoint import folders
from jaxdp.distributed import membership
from jaxdp.distributed.context import Context, current

TIMEOUT = 1200.0  # seconds for the files of one save
SLICE = 16 << 20  # bytes: smaller slices of replicated arrays are not made, since each is a program to compile


def orbax() -> Any:
    """Import Orbax at the first save or restore, so that the first update does not wait for it."""
    from orbax.checkpoint import v1

    return v1


def options() -> Any:
    """Return Orbax's context with our time limit, and without slices of small arrays."""
    context = orbax().Context()
    context.asynchronous.timeout_secs = int(TIMEOUT)
    context.array.saving.min_slice_bytes_for_replica_parallel = SLICE
    return context


def save(folder: pathlib.Path, tree: Any, attempt: str) -> Any:
    """Start to save a tree, with all processes; return Orbax's response.

    attempt: the same text on all processes, and another one for each save. It is in the name of Orbax's temporary
    folder: in an elastic job, a process may still write into that of a save which a lost process has interrupted.
    """
    from orbax.checkpoint._src.path import atomicity

    temporary = lambda path: path.parent / f"{path.name}{folders.TEMPORARY}-{attempt}"
    with options(), mock.patch.object(atomicity, "_get_tmp_directory", temporary, create=True):
        return orbax().save_async(folder, tree, overwrite=True)


def save_alone(folder: pathlib.Path, tree: Any) -> Any:
    """Start to save a tree from this process alone, while others save into folders of the same name on other hosts.

    tree: arrays that are replicated over one device of each process that saves.
    """
    from orbax.checkpoint.experimental.v1._src.saving import execution

    rank, context = current().rank, options()
    context.multiprocessing.primary_host = None  # each process that saves
    context.multiprocessing.active_processes = {rank}
    context.multiprocessing.barrier_sync_key_prefix = f"rank_{rank}"
    context.array.saving.use_replica_parallel = False  # would split an array over the processes that have it
    context.asynchronous.create_directories_asynchronously = False  # or one process could take another's signal
    # Orbax compares the paths by a collective of all processes, though some of them do not save.
    with mock.patch.object(execution, "_check_directory_consistency", lambda path: None, create=True), context:
        return orbax().save_async(folder, tree, overwrite=True)


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

    if membership.current():  # else the client is this process's own, and another save may wait for its signals
        get_signaling_client.cache_clear()
    counts = context.exchange("operations of Orbax", Operations.get_current_operation_id())
    while int(Operations.get_current_operation_id()) < max(map(int, counts)):
        Operations.next_operation_id()


@functools.cache
def silence_orbax() -> None:
    """Drop Orbax's tracebacks of a failed write and of its closed event loop: we report the failure in one line."""
    noise = ("_SignalingThread", "Global object size")
    logging.getLogger("absl").addFilter(lambda record: not any(words in str(record.msg) for words in noise))
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook
