"""How is an artefact laid out? One safetensors file: tensors, and a header of JSON that says what
they are. Nothing in it executes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ibaml._version import __version__
from ibaml.extras import need
from ibaml.files import write_whole

FORMAT = 1
_LARGEST = 16 << 30  # bytes; a larger file is refused unread
_READERS = {
    "learner": "ibaml.load",
    "posterior": "ibaml.load_posterior",
    "classifier": "`ibaml predict`, or ibaml.Classifier.load,",
    "prior": "ibaml.Prior.open",
}


class ArtifactError(ValueError):
    """A file cannot be written or read; the message says why, and what to do."""


def write_artifact(
    path: Path, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    need("safetensors")
    from safetensors.torch import save

    plain = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
    header = {
        "ibaml": kind, "format": str(FORMAT), "version": __version__, "facts": json.dumps(facts),
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(plain, header))
    except OSError as error:
        raise ArtifactError(f"{path} could not be written ({error.strerror or error})") from error
    return path


def read_artifact(path: Path, wanted: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    need("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise ArtifactError(f"{path} is larger than {_LARGEST >> 30} GiB")
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror or error})") from error
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        kind, number = header["ibaml"], int(header["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged, or not a file of ibaml") from error
    if number > FORMAT:
        raise ArtifactError(
            f"{path} was written by ibaml {header.get('version', '?')} in format {number}, but "
            f"this is ibaml {__version__}, which reads formats up to {FORMAT}: update ibaml"
        )
    if kind != wanted:
        reader = _READERS.get(kind, "nothing")
        raise ArtifactError(f"{path} holds a {kind}, not a {wanted}: {reader} reads it")
    try:
        tensors = load(content)
        facts = json.loads(header["facts"])
        if not isinstance(facts, dict):
            raise ValueError("no facts")
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        RecursionError,
    ) as error:
        raise ArtifactError(f"{path} is damaged ({error})") from error
    return facts, tensors
