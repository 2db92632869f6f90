"""How are datasets read that come as pickles? Without running anything they contain."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from ibaml.tasks.errors import DataError

_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
}


class _Restricted(pickle.Unpickler):
    """Arrays, numbers, strings and containers; any other class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(f"refused: the pickle asks for {module}.{name}, which is not data")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def unpickle(data: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a pickle of arrays, its keys as text."""
    try:
        value = _Restricted(io.BytesIO(data), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:
        raise DataError(f"{name}: not a readable pickle ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{name}: holds a {type(value).__name__}, but a dictionary is needed")
    return {_text(k): v for k, v in value.items()}


def array(value: Any, name: str, dims: int) -> np.ndarray:
    """The value, if it is a uint8 array of this many dimensions; else a `DataError`."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != dims:
        kind = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value)
        raise DataError(f"{name}: images must be a uint8 array of {dims} dimensions, got {kind}")
    return value


def _text(key: Any) -> Any:
    return key.decode("latin-1") if isinstance(key, bytes) else key


def texts(values: Any) -> list[str]:
    return [str(_text(v)) for v in values]
