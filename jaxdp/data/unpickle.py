"""Reading a pickle need not run it: this one knows arrays, lists, dicts, strings and numbers, and refuses the rest.

NumPy's own classes are not called either. What a pickle says of them is checked by the stand-ins below, so that a
made-up shape or dtype is an error instead of a fault in NumPy's C code.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np


class _Dtype:
    """Stands for numpy.dtype: numbers only."""

    def __init__(self, code: str | bytes, *_flags: Any):
        name = code.decode() if isinstance(code, bytes) else str(code)
        if not re.fullmatch("[<>=|]?(b1|[iu][1248]|f[248])", name):
            raise ValueError(f"an array of dtype {name!r}; only numbers are read")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else str(state[1])
        self.dtype = np.dtype(order + self.dtype.str[1:])


class _Array:
    """Stands for an array that is named first and filled after, by a state of (version, shape, dtype, order, bytes)."""

    value: np.ndarray

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _from_buffer(raw, dtype, shape, "F" if fortran else "C")


def _from_buffer(raw: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Stands for codecs.encode, with which protocol 2 writes bytes: as latin-1, and in no other encoding."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin-1")


def _numpy(module: str) -> dict[tuple[str, str], Any]:
    return {
        (f"{module}.multiarray", "_reconstruct"): lambda *_prototype: _Array(),
        (f"{module}.multiarray", "scalar"): lambda dtype, raw: _from_buffer(raw, dtype, (), "C")[()],
        (f"{module}.numeric", "_frombuffer"): _from_buffer,
    }


_ALLOWED = {
    **_numpy("numpy.core"),
    **_numpy("numpy._core"),
    ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"it asks for {module}.{name}; only arrays, lists, dicts, strings and numbers are read")
        return _ALLOWED[module, name]


def load_arrays(path: Path) -> Any:
    """The content of a pickle (protocols 0 to 5, of Python 2 or 3) made of arrays, lists, dicts, str, bytes, numbers.

    Python 2 strings come as bytes. Raises ValueError for anything else in it, and what pickle and NumPy raise
    (UnpicklingError, EOFError, ...) for a file that is damaged or no pickle. Never imports or calls what a file names.
    """
    with path.open("rb") as file:
        return _arrays(_Unpickler(file, encoding="bytes").load())


def _arrays(value: Any) -> Any:
    """Puts arrays for their stand-ins."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return [_arrays(item) for item in value] if isinstance(value, list) else value
