"""How are datasets read that come as pickles? By their opcodes; no pickle is ever loaded.

A pickle is a program. Those of CIFAR-100 and miniImageNet use few of its instructions: dictionaries
of texts, of lists of numbers, and of arrays of numbers. These are followed here; any other is
refused. An array is its bytes, its shape and one of a few types of numbers, so that nothing of
numpy's is called with values of the file. No list or dictionary is taken from the memo, so what is
made is a tree, no larger than the file.
"""

from __future__ import annotations

import io
import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ibaml import untrusted
from ibaml.tasks.errors import DataError

_RECONSTRUCT, _SCALAR, _FROM_BUFFER, _ENCODE = "_reconstruct", "scalar", "_frombuffer", "encode"
_NAMES = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", _ENCODE),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core")
      for name in (_RECONSTRUCT, _SCALAR)),
    *((f"numpy.{core}.numeric", _FROM_BUFFER) for core in ("core", "_core")),
}  # fmt: skip
_NUMBERS = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Mark:
    """Where the items of a container begin on the stack."""


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass(frozen=True)
class _Type:
    """A type of numbers, little-endian."""

    code: str


@dataclass
class _Array:
    """An array whose content is yet to come."""

    content: np.ndarray | None = None


_LEAVES = (int, str, bytes, type(None), _Name, _Type)  # bool is an int


def unpickle(data: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a pickle of arrays, its keys as text."""
    try:
        value = _Reader().read(data)
    except untrusted.Refused as error:
        raise DataError(f"{name}: refused, the pickle {error}") from error
    except Exception as error:  # instructions that do not fit together
        reason = untrusted.first_line(error)
        raise DataError(f"{name}: not a readable pickle ({reason})") from error
    if not isinstance(value, dict):
        raise DataError(f"{name}: holds a {type(value).__name__}, but a dictionary is needed")
    return {_text(k): v for k, v in value.items()}


class _Reader:
    """Follows the instructions, with a stack and a memo of leaves."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if number >= untrusted.OPCODES:
                raise untrusted.Refused(f"has more than {untrusted.OPCODES:,} instructions")
            if opcode.name == "STOP":
                (value,) = self._stack
                return _finished(value)
            self._do(opcode.name, argument)
        raise ValueError("it ends early")

    def _do(self, what: str, argument: Any) -> None:
        stack = self._stack
        if what in _VALUES:
            stack.append(argument)
        elif what in _CONSTANTS:
            stack.append(_CONSTANTS[what])
        elif what in ("BINSTRING", "SHORT_BINSTRING"):  # of Python 2
            stack.append(argument.encode("latin-1"))
        elif what == "BYTEARRAY8":
            stack.append(bytes(argument))
        elif what in _TUPLES:
            self._tuple([stack.pop() for _ in range(_TUPLES[what])][::-1])
        elif what == "TUPLE":
            self._tuple(self._items())
        elif what == "MARK":
            stack.append(_Mark())
        elif what in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if what == "EMPTY_DICT" else [])
        elif what in ("APPEND", "APPENDS"):
            self._append([stack.pop()] if what == "APPEND" else self._items())
        elif what in ("SETITEM", "SETITEMS"):
            self._set([stack.pop(), stack.pop()][::-1] if what == "SETITEM" else self._items())
        elif what == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif what == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(_named(module, name))
        elif what == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_called(function, arguments))
        elif what == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif what in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            at = len(self._memo) if argument is None else argument
            self._memo[at] = stack[-1]
        elif what in ("BINGET", "LONG_BINGET"):
            value = self._memo[argument]
            if not isinstance(value, _LEAVES):
                raise untrusted.Refused("uses a container twice, which no dataset's does")
            stack.append(value)
        elif what not in ("PROTO", "FRAME"):
            raise untrusted.Refused(f"has the instruction {what}, which no dataset's has")

    def _items(self) -> list[Any]:
        """What lies above the last mark."""
        items = []
        while not isinstance(item := self._stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _tuple(self, items: list[Any]) -> None:
        for one in items:
            if not isinstance(one, _LEAVES) and not (isinstance(one, tuple) and _flat(one)):
                raise untrusted.Refused("nests tuples, which no dataset's does")
        self._stack.append(tuple(items))

    def _append(self, items: list[Any]) -> None:
        if not all(isinstance(one, int | str | bytes) for one in items):
            raise untrusted.Refused("has a list of other things than numbers or texts")
        if not isinstance(self._stack[-1], list):
            raise ValueError("items without a list")
        self._stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict) or len(items) % 2:
            raise ValueError("keys without a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, int | str | bytes):
                raise untrusted.Refused("has a key that is no number or text")
            inner = value.values() if isinstance(value, dict) else ()
            if any(isinstance(one, dict) for one in inner):
                raise untrusted.Refused("nests dictionaries deeper than two")
            self._stack[-1][key] = _finished(value)


def _flat(items: tuple[Any, ...]) -> bool:
    return all(isinstance(one, _LEAVES) for one in items)


def _finished(value: Any) -> Any:
    """A value that may be kept in a dictionary: an array must be filled by then."""
    if isinstance(value, _Array):
        if value.content is None:
            raise ValueError("an array without content")
        return value.content
    if isinstance(value, _Name | _Type | _Mark):
        raise ValueError("a name where a value is needed")
    return value


def _named(module: Any, name: Any) -> _Name:
    if (module, name) not in _NAMES:
        raise untrusted.Refused(f"asks for {module}.{name}, which is not data")
    return _Name(name)


def _called(function: Any, arguments: Any) -> Any:
    """What one of the few known functions returns; it is not called."""
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise ValueError("a call of what is no function")
    if function.name == "dtype":
        code = _text(arguments[0])
        if code not in _NUMBERS:
            raise untrusted.Refused(f"has an array of {code!r}, and only whole numbers are read")
        return _Type(code)
    if function.name == _RECONSTRUCT:
        return _Array()
    if function.name == _FROM_BUFFER:
        content, kind, shape, order = arguments
        return _Array(_array(shape, kind, order == "F", content))
    if function.name == _SCALAR:
        kind, content = arguments
        return int(_array((1,), kind, False, content)[0])
    if function.name == _ENCODE:  # how Python 3 writes bytes for Python 2
        text, encoding = arguments
        if encoding not in ("latin1", "latin-1"):
            raise ValueError(f"bytes in the encoding {encoding!r}")
        return text.encode("latin-1")
    raise ValueError(f"a call of {function.name}")


def _build(target: Any, state: Any) -> None:
    """Fill an array; the state of a type of numbers must say nothing new."""
    if isinstance(target, _Type):
        expected = (None, None, None, -1, -1, 0)  # no fields, no size of its own, no flags
        if not isinstance(state, tuple) or state[2:8] != expected or len(state) != 8:
            raise untrusted.Refused("changes the inside of a type of numbers")
        if _text(state[1]) not in ("<", "|"):
            raise untrusted.Refused("has big-endian numbers")
    elif isinstance(target, _Array) and target.content is None:
        _, shape, kind, fortran, content = state
        target.content = _array(shape, kind, bool(fortran), content)
    else:
        raise ValueError("a state of what has none")


def _array(shape: Any, kind: Any, fortran: bool, content: Any) -> np.ndarray:
    if not isinstance(kind, _Type) or not isinstance(content, bytes):
        raise ValueError("an array of no known type")
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"an array of the shape {shape}")
    array = np.frombuffer(content, f"<{kind.code}")
    if math.prod(shape) != array.size:
        raise ValueError(f"an array of the shape {shape} with {array.size:,} numbers")
    return array.reshape(shape, order="F" if fortran else "C")


def array(value: Any, name: str, dims: int) -> np.ndarray:
    """The value, if it is a uint8 array of this many dimensions; else a `DataError`."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != dims:
        kind = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value)
        raise DataError(f"{name}: images must be a uint8 array of {dims} dimensions, got {kind}")
    return value


def numbers(value: Any, name: str) -> list[int]:
    """The value, if it is a list (or an array) of whole numbers; else a `DataError`."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise DataError(f"{name} must be a list of whole numbers")
    return value


def texts(value: Any, name: str) -> list[str]:
    """The value, if it is a list of texts; else a `DataError`."""
    if not isinstance(value, list) or not all(isinstance(one, str | bytes) for one in value):
        raise DataError(f"{name} must be a list of texts")
    return [str(_text(one)) for one in value]


def _text(key: Any) -> Any:
    return key.decode("latin-1") if isinstance(key, bytes) else key
