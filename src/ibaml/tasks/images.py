"""How does one image file, in any format, become pixels of a known shape?"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ibaml import untrusted
from ibaml.extras import need
from ibaml.tasks.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Channels = Literal[1, 3]
FOREIGN = (".heic", ".heif", ".avif")  # of telephones: named in messages, not read
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")


class ImageError(DataError):
    """An image file that cannot be read; the message names the file and says why."""


def decode(data: bytes, name: str, size: int, channels: Channels = 3) -> np.ndarray:
    """The pixels of an image file, uint8 (channels, size, size).

    A picture that is not square is cropped at its center, then resized.
    """
    picture = open_picture(data, name, channels)
    return square(picture, size, channels)


def square(picture: Image.Image, size: int, channels: Channels = 3) -> np.ndarray:
    """The middle of a picture, uint8 (channels, size, size)."""
    from PIL import Image, ImageOps

    if picture.size != (size, size):
        picture = ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(picture, dtype=np.uint8)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def open_picture(
    data: bytes, name: str, channels: Channels = 3, *, least: int | None = None
) -> Image.Image:
    """The picture in an image file, RGB (or gray, for one channel).

    The content decides the format, not the file's name. EXIF rotation is applied; 16-bit
    gray is scaled to 8 bits; CMYK, palettes and alpha (on white) become RGB.

    Args:
        least: a side in pixels; a larger JPEG may then be decoded smaller, down to this side, which
            takes a fraction of the time.
    """
    need("PIL")
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # Pillow's own limit only warns; the limit below refuses
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        with opened as image:
            width, height = image.size
            smaller = least is not None and image.format == "JPEG"
            allowed = 2 * untrusted.PIXELS if smaller else untrusted.PIXELS
            if width * height > allowed:
                raise ImageError(
                    f"{name}: {width}×{height} pixels are more than the {allowed:,} allowed"
                )
            if least is not None and smaller:
                image.draft(None, (least, least))
            image.load()
            return plain(image, channels)
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        remedy = ": export it as JPEG" if name.lower().endswith(FOREIGN) else ""
        raise ImageError(
            f"{name}: not a readable image, its content is none of {', '.join(_FORMATS)}{remedy}"
        ) from error
    except Exception as error:  # a decoder may raise anything on a broken file
        raise ImageError(f"{name}: not a readable image ({error})") from error


def plain(image: Image.Image, channels: Channels = 3) -> Image.Image:
    """An open picture upright, with 8 bits and without alpha."""
    from PIL import ImageOps

    return _eight_bit(ImageOps.exif_transpose(image)).convert("L" if channels == 1 else "RGB")


def picture_of(array: np.ndarray, channels: Channels = 3) -> Image.Image:
    """A picture of uint8 pixels (H, W), (H, W, C) or (C, H, W)."""
    need("PIL")
    from PIL import Image

    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise DataError(
            f"an image is a path or uint8 (C, H, W) or (H, W[, C]), got {array.dtype} {array.shape}"
        )
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if 0 in array.shape or array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise DataError(
            f"an image has pixels, and 1 or 3 channels (4 with alpha); got {array.shape}"
        )
    picture = Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array)
    return _eight_bit(picture).convert("L" if channels == 1 else "RGB")


def read_file(path: Path) -> bytes:
    """The content of an image file that a person names."""
    try:
        return untrusted.content(path, untrusted.PICTURE)
    except untrusted.Refused as error:
        raise DataError(f"{path} {error}: name an image file") from error
    except FileNotFoundError as error:
        raise DataError(f"{path} is not there: name an image file") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _eight_bit(image: Image.Image) -> Image.Image:
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
