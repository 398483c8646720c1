"""Check that an optimizer is elementwise: that updating slices of the parameters equals updating the full arrays.

The check is a probe: it updates small arrays of the same tree structure, in full and in halves, with gradients of many
magnitudes, so that clipping shows whatever its threshold is.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.errors import UsageError, one_line
from jaxdp.split import WHOLE, path_string, split_dims

Tree = Any
Arrays = list[np.ndarray]

# Gradient magnitude of each update, ascending: running averages of large gradients would hide later small ones.
SCALES = np.repeat([1e-12, 1e-6, 1.0, 1e6, 1e12], 2)
LOUDER = 8.0  # factor on alternating halves of every leaf, so that the norms of the halves differ clearly
TOLERANCE = 1e-4  # relative, in the L2 norm of a leaf: elementwise updates agree, mostly to the last bit
WIDE, NARROW, OTHER = 256, 16, 2  # caps: the two largest dims, the same of repeated leaves, and the other dims
BUDGET = 2**19  # elements of all wide leaves together


def check_elementwise(
    tx: optax.GradientTransformation,
    params: Tree,
    parts: int = 2,
    blocks: Sequence[str] = (),
    advice: str = "under pmap use an elementwise one, such as sgd, adam, adamw or lion (and clip before it), or the "
    "backend pjit",
    *,
    pad: bool = False,
) -> None:
    """Raise UsageError if `tx` updates slices of `params` differently from the full arrays, or fails on slices.

    params: arrays, tracers or ShapeDtypeStructs; only their paths, shapes and dtypes are used, and which of their dims
    are split over `parts` (see `split_dims`, also for blocks and pad). Rejects LAMB, LARS, Adafactor, Muon, clipping by
    a norm, gradient noise, skipping of non-finite updates, and any update that combines elements of a split leaf. Does
    not detect effects that need more elements than the probe has (such as a threshold for a norm over more than half a
    million updates). An update that takes `value` gets 1.0; an update that needs another argument is rejected. Takes
    about a second for 150 leaves, on the CPU; works while a caller is tracing; caches its answers.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    dims = jax.tree.leaves(split_dims(params, parts, blocks, pad))
    if all(dim == WHOLE for dim in dims):
        return
    leaves = [_Leaf(path_string(p), tuple(x.shape), x.dtype, dim) for (p, x), dim in zip(flat, dims, strict=True)]
    problem = _problem(tx, treedef, tuple(leaves), jax.config.values["jax_enable_x64"])
    if problem is not None:
        raise UsageError(f"optimizer: {problem}; {advice}")


class _Leaf(NamedTuple):
    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int


@functools.lru_cache(maxsize=32)
def _problem(tx: Any, treedef: Any, leaves: tuple[_Leaf, ...], x64: bool) -> str | None:
    """Return a sentence that describes the problem, or None."""
    try:
        for full, *halves in _updates(tx, treedef, _shrink(leaves), x64):
            errors = [
                max(_difference(_half(x, leaf.dim, i), half[n]) for i, half in enumerate(halves))
                for n, (x, leaf) in enumerate(zip(full, leaves, strict=True))
            ]
            worst = int(np.argmax(errors))
            if errors[worst] > TOLERANCE:
                return (
                    f"it is not elementwise: on slices of the parameters it updates {leaves[worst].path} differently "
                    f"(relative difference {errors[worst]:.2g})"
                )
    except Exception as error:
        return f"it fails on slices of the parameters: {type(error).__name__}: {one_line(error)}"
    return None


def _updates(tx: Any, treedef: Any, leaves: list[_Leaf], x64: bool) -> Iterator[list[Arrays]]:
    """Yield, for each probe step, the updates from `tx` for the full arrays, the first halves and the second halves."""
    dims = [leaf.dim for leaf in leaves]
    rng = np.random.default_rng(0)
    steady = [_normal(rng, leaf) for leaf in leaves]  # a constant part: some optimizers adapt their step size to it
    extra = optax.with_extra_args_support(tx)
    options = {"xla_backend_optimization_level": 0}  # compilation takes most of the time
    update = jax.jit(lambda *args: extra.update(*args, value=1.0), compiler_options=options)

    def draw(step: int, scale: float) -> list[list[Tree]]:
        """Return random gradients: [[full], [first halves, second halves]]."""
        arrays = [_normal(rng, leaf) for leaf in leaves]
        for x, old, dim in zip(arrays, steady, dims, strict=True):
            np.add(x, old, out=x)
            for part, factor in (x, scale), (_half(x, dim, step % 2), LOUDER):
                np.multiply(part, factor, out=part, casting="unsafe")
        if step == len(SCALES):  # one NaN: an optimizer that skips non-finite updates skips one slice but not the other
            for x in [x for x, dim in zip(arrays, dims, strict=True) if dim != WHOLE and x.dtype.kind in "fc"][:1]:
                x.flat[0] *= np.nan
        halves = [[_half(x, dim, i) for x, dim in zip(arrays, dims, strict=True)] for i in range(2)]
        return [[treedef.unflatten(arrays)], [treedef.unflatten(half) for half in halves]]

    def init(params: list[Tree]) -> list[Tree]:
        with _settings(x64):
            return [tx.init(p) for p in params]

    def run(grads: list[Tree], states: list[Tree], params: list[Tree]) -> tuple[list[Arrays], list[Tree]]:
        with _settings(x64):
            pairs = [update(*args) for args in zip(grads, states, params, strict=True)]
            return [[np.asarray(u) for u in jax.tree.leaves(updates)] for updates, _ in pairs], [s for _, s in pairs]

    # Separate threads, because traces, meshes and settings made with `with` are thread-local.
    with ThreadPoolExecutor(2) as pool:
        params = draw(0, 1.0)
        states = list(pool.map(init, params))
        for step, scale in enumerate([*SCALES, 1.0]):
            results = list(pool.map(run, draw(step, scale), states, params))
            states = [state for _, state in results]
            yield [updates for group, _ in results for updates in group]


def _shrink(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """Return small leaves of the same kind; of leaves whose paths differ only by a number, the first is the largest."""
    seen, budget, small = set(), BUDGET, []
    for leaf in leaves:
        kind = (re.sub(r"\d+", "#", leaf.path), leaf.shape)
        wide = _capped(leaf, WIDE)
        size = int(np.prod(wide.shape))
        fits = kind not in seen and size <= budget
        budget -= size if fits else 0
        seen.add(kind)
        small.append(wide if fits else _capped(leaf, NARROW))
    return small


def _capped(leaf: _Leaf, cap: int) -> _Leaf:
    largest = sorted(range(len(leaf.shape)), key=lambda d: leaf.shape[d], reverse=True)[:2]
    shape = [min(n, cap if d in largest else OTHER) for d, n in enumerate(leaf.shape)]
    if leaf.dim != WHOLE:
        shape[leaf.dim] = max(shape[leaf.dim] // 2 * 2, 2)
    return leaf._replace(shape=tuple(shape))


def _normal(rng: np.random.Generator, leaf: _Leaf) -> np.ndarray:
    """Return normal numbers, float32 or complex64; zeros if the leaf's dtype is neither floating nor complex."""
    real = lambda: np.asarray(rng.standard_normal(leaf.shape, np.float32))
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return real() + np.complex64(1j) * real()
    return real() if jnp.issubdtype(leaf.dtype, jnp.floating) else np.zeros(leaf.shape, leaf.dtype)


def _half(x: np.ndarray, dim: int, index: int) -> np.ndarray:
    """Return a view of one half along the dim, or the full array if it is not split."""
    if dim == WHOLE:
        return x
    size = x.shape[dim] // 2
    return x[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a - b| / max(|a|, |b|) in the L2 norm; infinite if an element is finite in only one of them."""
    if a.tobytes() == b.tobytes():
        return 0.0
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return np.inf
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a[finite].astype(wide), b[finite].astype(wide)
    size = max(np.linalg.norm(a), np.linalg.norm(b))
    return float(np.linalg.norm(a - b) / size) if size else 0.0


@contextlib.contextmanager
def _settings(x64: bool) -> Iterator[None]:
    """Run on the CPU with the caller's x64 setting; disable NaN checks and transfer guards, which the probe trips."""
    with contextlib.ExitStack() as stack:
        for setting in (jax.enable_x64(x64), jax.debug_nans(False), jax.transfer_guard("allow")):
            stack.enter_context(setting)
        with contextlib.suppress(RuntimeError):  # there is no CPU backend
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield
