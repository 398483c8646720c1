"""A transformation may be applied to slices of the parameters if it does to a slice what it does there to the whole.

Whether one does is found out by trying: small arrays of the same tree structure, whole and in halves, and gradients
of every size, so that a clip shows wherever its threshold is.
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

# The size of the gradients, update by update: from small to large, since a mean would hide a small one after a large.
SCALES = np.repeat([1e-12, 1e-6, 1.0, 1e6, 1e12], 2)
LOUDER = 8.0  # one half of every leaf against the other, now this and now that, so that their norms are far apart
TOLERANCE = 1e-4  # relative, in the L2 norm of a leaf: what is elementwise rounds alike, mostly to the last bit
WIDE, NARROW, OTHER = 256, 16, 2  # caps: the two largest dims, the same of repeated leaves, and the other dims
BUDGET = 2**19  # elements of all wide leaves together


def check_elementwise(
    tx: optax.GradientTransformation,
    params: Tree,
    parts: int = 2,
    blocks: Sequence[str] = (),
    advice: str = "under pmap use an elementwise one, such as sgd, adam, adamw or lion (and clip before it), or the "
    "backend pjit",
) -> None:
    """Raises UsageError where `tx` updates slices of `params` in another way than the whole, or fails on them.

    params: arrays, tracers or ShapeDtypeStructs; only their paths, shapes and dtypes count, and which of their dims
    are split over `parts` (see `split_dims`, also for blocks). Refused are LAMB, LARS, Adafactor, Muon, clipping by a
    norm, gradient noise, skipping of non-finite updates, and all else that looks beyond an element, where that element
    is in a leaf that is split; what only shows beyond the probe's size (a threshold for a norm over more than half a
    million updates) is not seen. An update that takes `value` gets 1.0; one that needs another argument is refused.
    About a second for 150 leaves, on the CPU, also while something else is being traced; an answer is remembered.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(params)
    dims = jax.tree.leaves(split_dims(params, parts, blocks))
    if all(dim == WHOLE for dim in dims):
        return
    leaves = [_Leaf(path_string(p), tuple(x.shape), x.dtype, dim) for (p, x), dim in zip(found, dims, strict=True)]
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
    """What is wrong, in words, or None."""
    try:
        for whole, *halves in _updates(tx, treedef, _shrink(leaves), x64):
            errors = [
                max(_difference(_half(x, leaf.dim, i), half[n]) for i, half in enumerate(halves))
                for n, (x, leaf) in enumerate(zip(whole, leaves, strict=True))
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
    """Update by update, what `tx` gives for the whole, for the first halves and for the second halves."""
    dims = [leaf.dim for leaf in leaves]
    rng = np.random.default_rng(0)
    steady = [_normal(rng, leaf) for leaf in leaves]  # a direction that stays: some learn their step size from one
    extra = optax.with_extra_args_support(tx)
    options = {"xla_backend_optimization_level": 0}  # compiling is what takes the time
    update = jax.jit(lambda *args: extra.update(*args, value=1.0), compiler_options=options)

    def draw(step: int, scale: float) -> list[list[Tree]]:
        """[[whole], [first halves, second halves]]"""
        arrays = [_normal(rng, leaf) for leaf in leaves]
        for x, old, dim in zip(arrays, steady, dims, strict=True):
            np.add(x, old, out=x)
            for part, factor in (x, scale), (_half(x, dim, step % 2), LOUDER):
                np.multiply(part, factor, out=part, casting="unsafe")
        if step == len(SCALES):  # in one place only: what then skips the update does so for that slice alone
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

    # In threads of their own: what is being traced, meshes and settings by `with` belong to the thread they are in.
    with ThreadPoolExecutor(2) as pool:
        params = draw(0, 1.0)
        states = list(pool.map(init, params))
        for step, scale in enumerate([*SCALES, 1.0]):
            found = list(pool.map(run, draw(step, scale), states, params))
            states = [state for _, state in found]
            yield [updates for group, _ in found for updates in group]


def _shrink(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """Small leaves of the same kind; of those whose paths differ only by a number, the first is the largest."""
    seen, left, small = set(), BUDGET, []
    for leaf in leaves:
        kind = (re.sub(r"\d+", "#", leaf.path), leaf.shape)
        wide = _capped(leaf, WIDE)
        size = int(np.prod(wide.shape))
        fits = kind not in seen and size <= left
        left -= size if fits else 0
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
    """Normal numbers of float32 or complex64; zeros where the leaf is neither real nor complex."""
    real = lambda: np.asarray(rng.standard_normal(leaf.shape, np.float32))
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return real() + np.complex64(1j) * real()
    return real() if jnp.issubdtype(leaf.dtype, jnp.floating) else np.zeros(leaf.shape, leaf.dtype)


def _half(x: np.ndarray, dim: int, index: int) -> np.ndarray:
    """A view of one half along the dim; all of it where it is not split."""
    if dim == WHOLE:
        return x
    size = x.shape[dim] // 2
    return x[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| over the larger of |a| and |b|, in the L2 norm; infinite where only one of them is finite."""
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
    """On the CPU, as the caller computes, and nothing that forbids what the probe is made of."""
    with contextlib.ExitStack() as stack:
        for setting in (jax.enable_x64(x64), jax.debug_nans(False), jax.transfer_guard("allow")):
            stack.enter_context(setting)
        with contextlib.suppress(RuntimeError):  # no CPU backend beside the other
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield
