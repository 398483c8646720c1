"""An elastic training loop of your own: it continues when processes are lost, and when others join."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdp.elastic import regroup
from jaxdp.elastic.snapshots import Snapshot, find, receive
from jaxdp.errors import RunFailed, UsageError
from jaxdp.precision import is_key
from jaxdp.process import membership
from jaxdp.process.context import joined
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
    structure, (arrays, kinds) = jax.tree.structure(state), leaves_of(state)
    newest = first = snapshot_of(0, arrays)

    def train_generation(context):
        nonlocal newest
        agreement = Agreement(context)
        context.check_same("elastic: the state", kinds)
        found = find(context, [newest], 0)
        if found is None:
            raise RunFailed(
                "the copies of the state in all processes are damaged: faulty memory, or a bug in `train`"
            )
        newest = found.with_parts(dict(receive(context, found)))
        regroup.report_state()
        if not newest.step:
            sums = zip(kinds, first.checksums[WHOLE])
            context.check_same("elastic: the state", {name: f"checksum {n:x}" for name, n in sums})

        def commit(state):
            nonlocal newest
            now, new = leaves_of(state)
            for name in kinds | new:
                if new.get(name) != kinds.get(name):
                    raise UsageError(
                        f"commit: {name!r} is {new.get(name)}, but jaxdp.elastic.run got {kinds.get(name)}"
                    )
            newest = snapshot_of(newest.step + 1, now)
            if (request := agreement.point()) is not None:
                raise Stopped(**request)

        restored = list(map(restore, newest.parts[WHOLE], arrays, jax.tree.leaves(state)))
        return train(jax.tree.unflatten(structure, restored), commit)

    context = joined()
    context.agree(None)  # as processes of later generations do
    return regroup.run_generations(train_generation, context, lambda: None)


def leaves_of(state: State) -> tuple[list[np.ndarray], dict[str, str]]:
    """Return the leaves of a state as NumPy arrays, and by their paths dtype and shape of each.

    Raises UsageError if one is not an array or a number.
    """
    arrays, kinds = [], {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = path_string(path) or "state"
        is_number = isinstance(x, NUMBERS) and not isinstance(x, np.ma.MaskedArray)
        if not is_number or is_key(x) or np.asarray(x).dtype == object:
            raise UsageError(
                f"elastic: {name!r} of the state is a {type(x).__name__}; give arrays (of a key "
                "its jax.random.key_data), and numbers of at most 64 bits"
            )
        arrays.append(native(x))
        kinds[name] = described(arrays[-1])
    return arrays, kinds


def snapshot_of(step: int, arrays: list[np.ndarray]) -> Snapshot:
    """Return a snapshot with a copy of each array as uint8, which collectives can send whatever the
    dtype.
    """
    leaves = [np.frombuffer(x.tobytes(), np.uint8) for x in arrays]
    return Snapshot(step, {}, "", []).with_parts({WHOLE: leaves})


def restore(data: np.ndarray, like: np.ndarray, leaf: Any) -> Any:
    """Return an array like `like` from its bytes; a Python number if `leaf` is one."""
    x = data.view(like.dtype).reshape(like.shape)
    return type(leaf)(x.item()) if isinstance(leaf, int | float) else x.copy()
