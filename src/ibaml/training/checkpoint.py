"""How is state kept in a file? As tensors and a JSON header, checked and never executed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ibaml import untrusted
from ibaml.extras import need

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint is damaged, or was not made by ibaml."""


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """A safetensors file of the tensors, with the facts and a digest in its header."""
    need("safetensors")
    from safetensors.torch import save

    # copies, because safetensors refuses shared memory: shared tensors are stored twice
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    header = {
        "format": str(FORMAT),
        "facts": json.dumps(facts),
        "digest": _digest(plain, json.dumps(facts)),
    }
    return save(plain, header)


def unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file that `pack` made; a damaged file raises `CheckpointError`."""
    need("safetensors")
    from safetensors.torch import load

    try:
        header = untrusted.header_of(content)
        tensors = load(content)
        text, digest, version = header["facts"], header["digest"], header["format"]
        if version != str(FORMAT):
            raise CheckpointError(f"it has format {version}, and this ibaml reads {FORMAT}")
        if _digest(tensors, text) != digest:
            raise CheckpointError("its content does not match its digest")
        facts = untrusted.parsed_json(text)
        if not isinstance(facts, dict):
            raise ValueError("no facts")
    except CheckpointError:
        raise
    except Exception as error:  # the parser may raise anything on a broken file
        reason = untrusted.first_line(error)
        raise CheckpointError(f"it is damaged or not a checkpoint of ibaml ({reason})") from error
    return tensors, facts


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    hashed = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        t = tensors[name]
        hashed.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        hashed.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with PREFIX/, named without it."""
    start = f"{prefix}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
