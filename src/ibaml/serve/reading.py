"""How does a dropped file become a vector and a thumbnail? One process decodes, a thread embeds."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from ibaml.serve.decoding import Decoders
from ibaml.serve.session import Read
from ibaml.tasks.embedding import Embed
from ibaml.tasks.errors import DataError

MOST = 4  # files read at once


class Reading:
    """Reads picture files for a `Session`, several at once; ``with`` ends its processes.

    Args:
        embed: a named backbone, as `ibaml predict` uses it: the vectors are the same.
    """

    def __init__(self, embed: Embed) -> None:
        self.at_once = min(MOST, torch.get_num_threads())
        self._embed = embed
        self._decoders = Decoders(self.at_once)

    def __enter__(self) -> Reading:
        self._decoders.start()
        self._embed(np.zeros((8, 8, 3), np.uint8))  # loads the weights once, before any thread asks
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._decoders.close()

    def __call__(self, data: bytes, name: str) -> Read:
        least = self._embed.least
        assert least is not None  # a named backbone says it
        with self._decoders.one() as decoder:
            found = decoder.decode(data, name, least)
        vectors, failures = self._embed.try_each([found.pixels])
        if failures:
            raise DataError(f"{name}: {failures[0]}")
        return Read(torch.from_numpy(vectors[0]), found.thumbnail)
