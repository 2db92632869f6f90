"""Pictures for tests: drawings that a network for photographs tells apart, and hostile files."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
from PIL import Image, ImageDraw


def picture(kind: str, seed: int) -> Image.Image:
    """A drawing that a network for photographs tells apart."""
    rng = np.random.default_rng(seed)
    ground = tuple(int(v) for v in rng.integers(190, 255, 3))
    image = Image.new("RGB", (120, 90), ground)
    pen = ImageDraw.Draw(image)
    a, b = (int(v) for v in rng.integers(5, 25, 2))
    if kind == "disc":
        pen.ellipse((20 + a, 5 + b, 80 + a, 60 + b), (200, 30, 30))
    elif kind == "stripes":
        for x in range(a, 120, 18):
            pen.rectangle((x, 0, x + 8, 90), (20, 60, 160))
    elif kind == "dots":
        for x in range(a, 110, 20):
            for y in range(b, 85, 20):
                pen.ellipse((x, y, x + 9, y + 9), (20, 120, 40))
    else:  # noise: a class that is never shown
        image = Image.fromarray(rng.integers(0, 255, (90, 120, 3), dtype=np.uint8))
    return image


def jpeg(kind: str, seed: int) -> bytes:
    """Such a drawing as a file."""
    return _saved(picture(kind, seed), "JPEG")


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


# --- files that must be refused ------------------------------------------------------------------


def _png(width: int, height: int, rows: bytes, kind: int = 2) -> bytes:
    """A PNG of a size that its rows need not have."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _zip(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return packed.getvalue()


def _scans(side: int, count: int) -> bytes:
    """A progressive JPEG of little content and many scans, each of which costs time."""
    whole = _saved(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * count + whole[-2:]


SVG = (
    b"""<svg xmlns="http://www.w3.org/2000/svg"><script>document.title = "hostile"</script></svg>"""
)
HTML = b"<!doctype html><title>x</title><script>document.title = 'hostile'</script>"


def hostile() -> dict[str, bytes]:
    """Names and contents of files that are no photographs, or of which one would be harmed."""
    good, flat = jpeg("disc", 1), np.zeros((40, 40, 3), np.uint8)
    png, gif = (_saved(Image.fromarray(flat), kind) for kind in ("PNG", "GIF"))
    tiff = _saved(Image.fromarray(flat), "TIFF")
    return {
        "empty.jpg": b"",
        "bomb.png": _png(20_000, 20_000, bytes(20_000 * 3000)),
        "huge.png": _png(2**31 - 1, 2**31 - 1, b""),
        "nothing.png": _png(0, 0, b""),
        "short.png": _png(5000, 5000, bytes(100)),
        "cut.png": png[: len(png) // 2],
        "cut.jpg": good[:300],
        "cut.gif": gif[:20],
        "cut.tiff": tiff[: len(tiff) // 2],
        "start.jpg": b"\xff\xd8\xff\xe0" + bytes(500),
        "huge.jpg": good[: good.index(b"\xff\xc0") + 5] + b"\xff\xff\xff\xff"
        + good[good.index(b"\xff\xc0") + 9 :],
        "huge.gif": b"GIF89a\xff\xff\xff\xff\x00\x00\x00" + bytes(40),
        "huge.bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24,
                                        0, 0, 0, 0, 0, 0),
        "drawing.svg": SVG,
        "svg.png": SVG,
        "page.jpg": HTML,
        "polyglot.jpg": HTML + good,
        "photos.zip": _zip("photo.jpg", good),
        "zip.jpg": _zip("zeros", bytes(10**7)),
        "script.jpg": b"#!/bin/sh\nrm -rf ~\n",
        "print.ps.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "paper.pdf": b"%PDF-1.7\n1 0 obj<<>>endobj\n",
        "pickle.jpg": b"cos\nsystem\n(S'true'\ntR.",
        "floats.tiff": _saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"),
        "noise.webp": b"RIFF" + struct.pack("<I", 400) + b"WEBPVP8 " + bytes(400),
        "../../etc/passwd": b"root:x:0:0\n",
        "<img src=x onerror=alert(1)>.jpg": b"no picture",
        "two\nlines\r\x00\x1b[31m.jpg": b"no picture",
    }  # fmt: skip


def odd() -> dict[str, bytes]:
    """Names and contents that look hostile, and hold a photograph that can be read."""
    image = picture("disc", 2)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "<script>alert(1)</script>" * 500
    gif = _saved(Image.new("L", (2, 2)), "GIF")
    frame = gif[gif.index(b",") : -1]
    return {
        "frames.gif": gif[:-1] + 10_000 * frame + gif[-1:],
        "junk.jpg": _saved(image, "JPEG", exif=exif, icc_profile=bytes(range(256)) * 200),
        "tail.jpg": jpeg("disc", 3) + HTML,
        "really-a-png.jpg": _saved(picture("dots", 4), "PNG"),
        "<b onmouseover=alert(1)>bold</b>.png": _saved(picture("dots", 5), "PNG"),
        "../../up.jpg": jpeg("stripes", 6),
        "line\nbreak \u202egpj.exe.jpg": jpeg("stripes", 7),
        "x" * 3000 + ".jpg": jpeg("stripes", 8),
    }


def slow() -> bytes:
    """A small file that takes a decoder very long."""
    return _scans(6000, 4000)
