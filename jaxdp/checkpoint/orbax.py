"""Access to Orbax: imported late, with our time limit, and without its tracebacks.

A first checkpoint is read back before it is reported: what Orbax stores must be what it was given.
"""

import functools
import logging
import pathlib
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint.folders import MARK
from jaxdp.checkpoint.leaves import host, path_in
from jaxdp.checkpoint.manifest import Meta
from jaxdp.precision import is_key
from jaxdp.process import membership
from jaxdp.process.context import Context, current
from jaxdp.split import leaves_by_path

TIMEOUT = 1200.0  # seconds for the files of one save
STATE = "state"  # Orbax's name, in its folder, of the arrays
# Bytes: smaller slices of replicated arrays are not made, since each is a program to compile.
SLICE = 16 << 20


def orbax() -> Any:
    """Import Orbax at the first save or restore, so that the first update does not wait for it."""
    from orbax.checkpoint import v1

    return v1


def import_all() -> None:
    """Import what a save and a restore need."""
    orbax(), literal_path()


@functools.cache
def literal_path() -> Any:
    """Return the class of Orbax's paths, without the meaning that it gives to some names of
    folders.

    A pattern is joined to the path of the folder, which is then a pattern too: "lr=[1e-3]" has a
    character class. And /gs, /s3, /az and /hf are stores in a network, not folders.
    """
    from etils import epath

    class LiteralPath(type(epath.Path("/"))):  # type: ignore[misc]
        _uri_scheme = None

        def glob(self, pattern: str) -> Iterator[Any]:
            return map(type(self), pathlib.Path(self).glob(pattern))

    return LiteralPath


def options() -> Any:
    """Return Orbax's context with our time limit, without slices of small arrays, and with paths
    that are literal.
    """
    context = orbax().Context()
    context.asynchronous.timeout_secs = int(TIMEOUT)
    context.array.saving.min_slice_bytes_for_replica_parallel = SLICE
    context.file.path_class = literal_path()
    return context


def alone() -> Any:
    """Return Orbax's context for this process alone, while others do not call it, or have folders
    of their own.
    """
    rank, context = current().rank, options()
    context.multiprocessing.primary_host = None  # each process that calls it
    context.multiprocessing.active_processes = {rank}
    context.multiprocessing.barrier_sync_key_prefix = f"rank_{rank}"
    return context


def save(folder: pathlib.Path, tree: Any) -> Any:
    """Start to save a tree, with all processes; return Orbax's response."""
    with options():
        return orbax().save_async(folder, tree, overwrite=True)


def save_alone(folder: pathlib.Path, tree: Any) -> Future[None]:
    """Start to save a tree from this process alone, while others save into folders of the same name
    on other hosts; return what `save` does.

    tree: arrays that are replicated over one device of each process that saves, which no update
    donates.

    `save` compares the paths by a collective of all processes, though some of them do not save. So
    the former interface of Orbax writes the arrays. Its folder becomes a part of one as of `save`.
    """
    import orbax.checkpoint as former

    processes = former.options.MultiprocessingOptions(
        primary_host=None,  # each process that calls it
        active_processes={current().rank},
        barrier_sync_key_prefix=f"rank_{current().rank}",
    )
    # It would split an array over the processes that have it.
    arrays = former.type_handlers.ArrayHandler(
        primary_host=None, replica_id=None, use_replica_parallel=False
    )
    registry = former.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handler = former.PyTreeCheckpointHandler(
        multiprocessing_options=processes, type_handler_registry=registry
    )
    checkpointer = former.Checkpointer(handler, multiprocessing_options=processes)

    def write():
        folder.mkdir(parents=True, exist_ok=True)
        checkpointer.save(literal_path()(folder / STATE), args=former.args.PyTreeSave(tree))
        (folder / "_CHECKPOINT_METADATA").write_text("{}", encoding="utf-8")
        (folder / MARK).touch()

    return ThreadPoolExecutor(1).submit(write)


def load(folder: pathlib.Path, targets: Any) -> Any:
    """Return the tree in a folder of Orbax, as `targets` (abstract arrays) say. All processes call
    it.
    """
    prepare(current())
    with options():
        return orbax().load(folder, targets)


def described(folder: pathlib.Path) -> Any:
    """Return the tree in a folder of Orbax, with the shape and the dtype of each array."""
    with options():
        return orbax().metadata(folder).metadata


def by_path(tree: Any, meta: Meta) -> dict[str, Any]:
    """Return {path in the state: leaf} of a tree of Orbax. meta: of the checkpoint."""
    return {path_in(meta, key): x for key, x in jax.tree_util.tree_leaves_with_path(tree)}


def choose(tree: Any, meta: Meta, targets: Mapping[str, Any]) -> Any:
    """Return the targets of `load` for the leaves of a tree of Orbax at the paths in `targets`."""

    def target(key, _):
        return targets.get(path_in(meta, key), orbax().PLACEHOLDER)

    return jax.tree_util.tree_map_with_path(target, tree)


def prepare(context: Context) -> None:
    """Let Orbax work in this generation of processes, though it began in another one, or not
    on all processes.

    It keeps a client of JAX's service, which an earlier generation has left. The names of its
    barriers have a count of its operations; each process counts its own, so a process that has
    joined would wait in other barriers."""
    from orbax.checkpoint._src.futures.signaling_client import get_signaling_client
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator as Operations

    if (
        membership.current()
    ):  # else the client is this process's own, and another save may wait for its signals
        get_signaling_client.cache_clear()
    counts = context.exchange("operations of Orbax", Operations.get_current_operation_id())
    while int(Operations.get_current_operation_id()) < max(map(int, counts)):
        Operations.next_operation_id()


@functools.cache
def silence_orbax() -> None:
    """Drop Orbax's tracebacks of a failed write and of its closed event loop: we report the failure
    in one line.
    """
    noise = ("_SignalingThread", "Global object size")
    logging.getLogger("absl").addFilter(
        lambda record: not any(words in str(record.msg) for words in noise)
    )
    previous = sys.unraisablehook

    def hook(unraisable):
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook


LARGEST = 1 << 22  # bytes of the array that is compared


def sample(tree: Any) -> tuple[str, np.ndarray]:
    """Return (path, values) of the largest array up to `LARGEST` that this process has, if possible
    of a parameter.
    """
    leaves = leaves_by_path(tree)
    sizes = {
        path: x.nbytes
        for path, x in leaves.items()
        if x.nbytes <= LARGEST
        and not is_key(x)
        and (x.is_fully_replicated or x.is_fully_addressable)
    }
    path = max(sizes, key=lambda path: (path.startswith("params"), sizes[path]))
    return path, np.array(host(leaves[path]))


def read_back(folder: pathlib.Path, meta: Meta, sample: tuple[str, np.ndarray]) -> None:
    """Read the names and shapes of a checkpoint, and one array. Raises ValueError if they are not
    what was saved.

    Only this process reads. meta: of the checkpoint. sample: see there.
    """
    path, values = sample
    tree = described(folder)
    stored = {name: list(x.shape) for name, x in by_path(tree, meta).items()}
    for name in sorted({*meta["state"], *stored}):
        dtype, saved = meta["state"].get(name, ("", None))
        shape = stored.get(name)
        if shape and dtype.startswith("key<"):  # Orbax stores the data of a random key
            shape = shape[: len(saved)]
        if shape != saved:
            raise ValueError(f"read back, {name!r} has shape {shape} instead of {saved}")
    with alone():
        loaded = by_path(orbax().load(folder, choose(tree, meta, {path: values})), meta)
    if np.asarray(loaded[path]).tobytes() != values.tobytes():
        raise ValueError(f"read back, {path!r} has other values")
