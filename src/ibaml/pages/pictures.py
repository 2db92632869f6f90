"""How does a picture become part of a page? As an address that holds it: nothing is fetched.

Pixels are written anew: what else a file held does not come along.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

from torch import Tensor

from ibaml import untrusted
from ibaml.extras import need
from ibaml.pages.blocks import Picture
from ibaml.tasks.errors import DataError

TILE = 96  # pixels of an example; larger ones are made smaller
_FIGURE = 1600  # width of a study's picture


def picture(pixels: Tensor, alt: str) -> Picture:
    """An example (C, H, W) with values in [0, 1]."""
    need("PIL")
    from PIL import Image

    array = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array)
    image.thumbnail((TILE, TILE))
    content = io.BytesIO()
    if image.mode == "L":
        image.save(content, "PNG", optimize=True)
        return _made(content, "image/png", alt, image.size)
    image.save(content, "JPEG", quality=80)
    return _made(content, "image/jpeg", alt, image.size)


def picture_file(path: Path, alt: str) -> Picture:
    """A picture in a file of anybody's."""
    need("PIL")
    from PIL import Image

    try:
        content = untrusted.content(path, untrusted.PICTURE)
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.width * image.height > untrusted.PIXELS:
                raise untrusted.Refused(f"has more than {untrusted.PIXELS:,} pixels")
            plain = image.convert("RGB")
    except (untrusted.Refused, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be shown: {untrusted.first_line(error)}") from error
    plain.thumbnail((_FIGURE, _FIGURE))
    few = plain.quantize(256, dither=Image.Dither.NONE)  # drawings have few colors
    written = io.BytesIO()
    few.save(written, "PNG", optimize=True)
    return _made(written, "image/png", alt, few.size)


def _made(content: io.BytesIO, kind: str, alt: str, size: tuple[int, int]) -> Picture:
    text = base64.b64encode(content.getvalue()).decode()
    return Picture(f"data:{kind};base64,{text}", alt, *size)
