"""How do images become a dataset of vectors? Each is embedded at full size, once, by the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ibaml.tasks.dataset import Dataset, group
from ibaml.tasks.embedding import Content, Embed, Progress
from ibaml.tasks.images import ImageError
from ibaml.tasks.sources.decode import Parts, Splitter, listed, made
from ibaml.tasks.vectors import key_of


def embed_images(
    name: str,
    parts: Parts,
    splitter: Splitter,
    embed: Embed,
    *,
    license: str = "unknown",
    progress: Progress | None = None,
) -> Dataset:
    """The vectors of image files; those that cannot be read are left out, with a `DataWarning`."""
    flat = listed(name, parts)
    contents = [b""] * len(flat)  # their digests

    def readers(stack: ExitStack) -> Iterator[Callable[[], tuple[str, Content]]]:
        opened = {}
        for at, (tree, entry) in enumerate(flat):
            if id(tree) not in opened:
                opened[id(tree)] = stack.enter_context(tree.reading())
            read = opened[id(tree)]

            def one(
                at: int = at, file: str = entry.file, read: Callable[[str], bytes] = read
            ) -> tuple[str, Content]:
                content = read(file)
                contents[at] = key_of(content)
                return file, content

            yield one

    with ExitStack() as stack:
        vectors, failures = embed.of_contents(readers(stack), len(flat), progress)
    if len(failures) == len(flat):
        raise ImageError(f"{name}: no image can be read; the first: {failures[0]}")
    digest = hashlib.sha256(embed.digest.encode())
    for (_, entry), content in zip(flat, contents, strict=True):
        digest.update(entry.label.encode(errors="surrogateescape") + b"\0" + content)
    kept = np.array([at for at in range(len(flat)) if at not in failures])
    order, _, _ = group([flat[at][1].label for at in kept])
    return made(
        name, parts, splitter, vectors[kept[order]], failures, license, digest.hexdigest(),
        embed=embed,
    )  # fmt: skip


def embedded(data: Dataset, embed: Embed, progress: Progress | None = None) -> Dataset:
    """The vectors of images that are decoded already."""
    digest = hashlib.sha256(f"{embed.digest} {data.digest}".encode()).hexdigest()
    vectors = embed(data.examples, progress=progress)
    return replace(data, examples=vectors, digest=digest, embed=embed)
