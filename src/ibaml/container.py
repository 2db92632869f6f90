"""How is an artefact laid out? One safetensors file: tensors, and a header of JSON that says what
they are. Nothing in it executes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ibaml import untrusted
from ibaml._version import __version__
from ibaml.extras import need
from ibaml.files import write_whole

FORMAT = 1
MISFITS = (  # what parts of a file that do not fit together raise
    KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, ArithmeticError,
    MemoryError,
)  # fmt: skip
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
    from safetensors.torch import load

    try:
        content = untrusted.content(path, untrusted.ARTIFACT)
    except untrusted.Refused as error:
        raise ArtifactError(f"{path} cannot be read: it {error}") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror or error})") from error
    try:
        header = untrusted.header_of(content)
        kind, number = str(header["ibaml"]), int(header["format"])
    except (ValueError, KeyError, TypeError) as error:
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
        facts = untrusted.parsed_json(header["facts"])
        if not isinstance(facts, dict):
            raise ValueError("no facts")
    except Exception as error:  # the parser may raise anything on a broken file
        raise ArtifactError(f"{path} is damaged ({untrusted.first_line(error)})") from error
    return facts, tensors
