"""A safe unpickler: reads arrays, lists, dicts, strings and numbers, rejects everything else, and never runs code.

It does not call NumPy's own classes either: the stand-ins below check their arguments, so that an invalid shape or
dtype raises an error instead of crashing NumPy's C code.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np


class _Dtype:
    """A stand-in for numpy.dtype that permits only numbers."""

    def __init__(self, code: str | bytes, *_flags: Any):
        name = code.decode() if isinstance(code, bytes) else str(code)
        if not re.fullmatch("[<>=|]?(b1|[iu][1248]|f[248])", name):
            raise ValueError(f"an array of dtype {name!r}; only numbers are read")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else str(state[1])
        self.dtype = np.dtype(order + self.dtype.str[1:])


class _Array:
    """A stand-in for an array that is created first and filled later from (version, shape, dtype, order, bytes)."""

    value: np.ndarray

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _from_buffer(raw, dtype, shape, "F" if fortran else "C")


def _from_buffer(raw: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Replace codecs.encode, which protocol 2 uses for bytes, always as latin-1. Raises ValueError for others."""
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
    ("numpy", "ndarray"): None,  # only an argument of _reconstruct
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"it asks for {module}.{name}; only arrays, lists, dicts, strings and numbers are read")
        return _ALLOWED[module, name]


def load_arrays(path: Path) -> Any:
    """Load a pickle (protocols 0 to 5, of Python 2 or 3) of arrays, lists, dicts, str, bytes and numbers.

    Python 2 strings become bytes. Raises ValueError for any other content, and the errors of pickle and NumPy
    (UnpicklingError, EOFError, ...) for an invalid file. Never imports or calls anything that the file names.
    """
    with path.open("rb") as file:
        return _arrays(_Unpickler(file, encoding="bytes").load())


def _arrays(value: Any) -> Any:
    """Replace stand-ins by their arrays."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return [_arrays(item) for item in value] if isinstance(value, list) else value
