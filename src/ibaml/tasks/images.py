"""How does one image file, in any format, become pixels of a known shape?"""

from __future__ import annotations

import io
import warnings
from typing import Literal

import numpy as np

from ibaml.extras import need

Channels = Literal[1, 3]
MAX_PIXELS = 64_000_000  # a larger picture is refused before it is decoded
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")


class ImageError(ValueError):
    """An image file that cannot be read; the message names the file and says why."""


def decode(data: bytes, name: str, size: int, channels: Channels = 3) -> np.ndarray:
    """The pixels of an image file, uint8 (channels, size, size).

    The content decides the format, not the file's name. EXIF rotation is applied; 16-bit
    gray is scaled to 8 bits; CMYK, palettes and alpha (on white) become RGB; a picture that is not
    square is cropped at its center, then resized.
    """
    need("PIL")
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow's own limit only warns; the limit below refuses
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        with opened as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(
                    f"{name}: {width}×{height} pixels are more than the {MAX_PIXELS:,} allowed"
                )
            image.load()
            upright = ImageOps.exif_transpose(image)
            pixels = _eight_bit(upright).convert("L" if channels == 1 else "RGB")
            if pixels.size != (size, size):
                pixels = ImageOps.fit(pixels, (size, size), Image.Resampling.BILINEAR)
            array = np.asarray(pixels, dtype=np.uint8)
    except ImageError:
        raise
    except Exception as error:  # a decoder may raise anything on a broken file
        raise ImageError(f"{name}: not a readable image ({error})") from error
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _eight_bit(image):  # type: ignore[no-untyped-def]
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its floating-point pixels have no known scale: save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image, dtype=np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise ValueError("its pixels have more than 16 bits")
        return Image.fromarray((values // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer)
    return image
