"""How are arrays read from an .npz that nobody vouches for? Numbers and texts, within limits."""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ibaml import untrusted
from ibaml.tasks.archive import is_zip, opened_zip, read_member
from ibaml.tasks.errors import DataError

_KINDS = "biufSU"  # truth, numbers, texts


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the wanted arrays that an .npz holds. Nothing in it is executed."""
    if not is_zip(path):
        with untrusted.opened(path) as file:
            alone = file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
        what = "an .npy of one array: save it by np.savez(path, x=…, y=…)" if alone else "no .npz"
        raise DataError(f"{path} is {what}")
    with opened_zip(path) as archive:
        held = {info.filename: info for info in archive.infolist()}
        if len(held) < len(archive.infolist()):
            raise DataError(f"{path}: refused, holds an array twice")
        return {
            name: _array(path, archive, name, held[f"{name}.npy"])
            for name in wanted
            if f"{name}.npy" in held
        }


def _array(path: Path, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    most = min(untrusted.ARRAY, max(untrusted.SPARSE, untrusted.RATIO * info.compress_size))
    if info.file_size > most:
        raise DataError(
            f"{path}: {name} unpacks to {info.file_size:,} bytes, and {most:,} are allowed"
        )
    try:
        data = read_member(archive, info.filename, most)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        reader = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in reader:
            raise ValueError(f"its version {version} is none that holds numbers or texts")
        shape, fortran, dtype = reader[version](stream)
    except Exception as error:  # the parser may raise anything on a broken header
        raise DataError(
            f"{path}: {name} is not a readable array ({untrusted.first_line(error)})"
        ) from error
    return _checked(f"{path}: {name}", shape, fortran, dtype, memoryview(data)[stream.tell() :])


def _checked(
    what: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any], data: memoryview
) -> np.ndarray:
    if dtype.kind not in _KINDS or dtype.itemsize == 0:
        raise DataError(f"{what} holds {dtype}, but only numbers and texts are read")
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise DataError(
            f"{what} says it is {dtype} {shape}, and holds {len(data):,} bytes: it is damaged"
        )
    array = np.frombuffer(data, dtype)
    if dtype.kind == "U":
        characters = np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder))
        if characters.max(initial=0) > sys.maxunicode:
            raise DataError(f"{what} holds what is no text: it is damaged")
    try:
        return array.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # more dimensions than numpy has
        raise DataError(f"{what} has the shape {shape} ({error})") from error
