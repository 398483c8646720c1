"""An elastic training loop of your own: it continues when processes are lost, and when others join."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdp.elastic import regroup
from jaxdp.elastic.regroup import run_generations
from jaxdp.elastic.snapshots import Snapshot, find, receive
from jaxdp.errors import RunFailed, UsageError
from jaxdp.precision import is_key
from jaxdp.process import membership
from jaxdp.process.context import Context, joined
from jaxdp.process.monitor import Agreement, Stopped
from jaxdp.process.signature import described, native
from jaxdp.split import WHOLE, path_string

T = TypeVar("T")
State = Any  # a pytree of arrays and numbers
NUMBERS = np.ndarray | np.generic | jax.Array | int | float


def run(train: Callable[[State, Callable[[State], None]], T], state: State) -> T:
    """Return `train(state, commit)`, which is called again when processes are lost, and when others
    join.

    Call `jaxdp.init(group=jaxdp.elastic.Options())` first, and start the processes with `jaxdp
    launch --restart`. state: a pytree of arrays and numbers, the same on all processes. In each
    generation of the job, `train` gets the newest state that any process has committed, as NumPy
    arrays; `jaxdp.current()` gives its rank and size. It must make all of its device arrays and
    compiled functions again, and all collectives belong inside it.

    `commit(state)` copies a replicated state to host memory, waiting for it. All processes call it
    equally often: after each update, or each few updates, which are then made again. It raises when
    the processes must regroup.

    The model is Horovod's `hvd.elastic.run`. Raises UsageError if a leaf is not an array or a
    number, and for several processes that are not elastic.
    """
    if regroup.current() is None and membership.current() is not None:
        raise UsageError(
            "elastic: this job is not elastic; first call jaxdp.init(group=jaxdp.elastic.Options())"
        )
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    names, leaves = [path_string(path) or "state" for path, _ in paths], jax.tree.leaves(state)
    for name, x in zip(names, leaves):
        if is_key(x):
            kind = "key (give its jax.random.key_data)"
        elif (
            not isinstance(x, NUMBERS)
            or isinstance(x, np.ma.MaskedArray)
            or np.asarray(x).dtype == object
        ):
            kind = type(x).__name__
        else:
            continue
        raise UsageError(
            f"elastic: {name!r} of the state is a {kind}; give arrays, and numbers of at most 64 bits"
        )
    arrays = [native(x) for x in leaves]
    newest = first = snapshot_of(0, arrays)

    def train_generation(context: Context) -> T:
        nonlocal newest
        agreement = Agreement(context)
        found = find(context, [newest], 0)
        if found is None:
            raise RunFailed(
                "the copies of the state in all processes are damaged: faulty memory, or a bug in `train`"
            )
        newest = found.snapshot.with_parts(dict(receive(context, found)))
        if newest.meta != first.meta:
            raise UsageError(f"elastic: the state is {first.meta}, but the job has {newest.meta}")
        regroup.report_state()
        if not newest.step:
            sums = zip(names, map(described, arrays), first.checksums[WHOLE])
            context.check_same(
                "elastic: the state", {name: f"{kind}, checksum {n:x}" for name, kind, n in sums}
            )

        def commit(state: State) -> None:
            nonlocal newest
            new: Any = jax.tree.structure(state)
            if new != structure:
                raise UsageError(
                    f"commit: the state is {new}, but jaxdp.elastic.run got {structure}"
                )
            now = [native(x) for x in jax.tree.leaves(state)]
            for name, x, like in zip(names, now, arrays):
                if described(x) != described(like):
                    raise UsageError(
                        f"commit: {name!r} is {described(x)}, but jaxdp.elastic.run got {described(like)}"
                    )
            newest = snapshot_of(newest.step + 1, now)
            if (request := agreement.point()) is not None:
                raise Stopped(**request)

        restored = list(map(restore, newest.parts[WHOLE], arrays, leaves))
        return train(jax.tree.unflatten(structure, restored), commit)

    context = joined()
    context.agree(None)  # as processes of later generations do
    return run_generations(train_generation, context, lambda: None)


def snapshot_of(step: int, arrays: list[np.ndarray]) -> Snapshot:
    """Return a snapshot with a copy of each array as uint8, which collectives can send whatever the
    dtype.
    """
    leaves = [np.frombuffer(x.tobytes(), np.uint8) for x in arrays]
    meta = ", ".join(map(described, arrays))
    return Snapshot(step, {}, meta, [WHOLE] * len(leaves)).with_parts({WHOLE: leaves})


def restore(data: np.ndarray, like: np.ndarray, leaf: Any) -> Any:
    """Return an array like `like` from its bytes; a Python number if `leaf` is one."""
    x = data.view(like.dtype).reshape(like.shape)
    return type(leaf)(x.item()) if isinstance(leaf, int | float) else x.copy()
