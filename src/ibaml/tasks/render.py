"""Where does a few-shot image dataset come from if nothing may be downloaded?

From the DejaVu fonts that matplotlib carries: a class is a character, an image is that character
in one face with a small affine jitter, and the splits are different scripts.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ibaml.seeding import mix

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

REFERENCE_DIGEST = "616eae6169800f4e1d4a817f57d00aa2a25651e3df7945ebe88da344016dd140"
"""Digest of ``render_glyphs()`` where the published results were measured."""

FACES = 12
LEAST_FACES = 4
SPLIT_OF_SCRIPT = {
    "Cyrillic": "val",
    "Georgian": "test",
    "Armenian": "test",
    "Hebrew": "test",
    "Lao": "test",
}
"""Every script that is not named here belongs to "train"."""

_SPLITS = ("train", "val", "test")
_ALPHABETS = {
    "ARABIC": "Arabic",
    "ARABIC-INDIC": "Arabic",
    "ARMENIAN": "Armenian",
    "BRAILLE": "Braille",
    "CANADIAN": "Canadian Aboriginal",
    "COPTIC": "Coptic",
    "CYRILLIC": "Cyrillic",
    "EXTENDED": "Arabic",
    "GEORGIAN": "Georgian",
    "GREEK": "Greek",
    "HEBREW": "Hebrew",
    "LAO": "Lao",
    "LATIN": "Latin",
    "LISU": "Lisu",
    "OLD": "Old Italic",
}
_KINDS = {
    "Sm": "Mathematics",
    "Sc": "Currency",
    "L": "Other letters",
    "N": "Numbers",
    "P": "Punctuation",
    "S": "Symbols",
}

_GLYPH_SHARE = 0.75  # larger side of the ink, as a share of the image, before jitter
_OVERSAMPLING = 2  # images are drawn this much finer, then averaged down
_ALIKE = 0.05  # squared difference, as a share of the ink's energy, that reads as identical
_ROTATION = math.radians(12)
_SCALES = (0.85, 1.1)
_SHEAR = 0.15
_SHIFT = 2 / 28  # share of the image


@dataclass(frozen=True)
class RenderedGlyphs:
    """Images grouped by class, with the classes of each split.

    Args:
        images: uint8 (N, 1, size, size), ink bright on black.
        labels: int64 (N,), the class index of each image, non-decreasing.
        classes: a readable and unique name per class.
        scripts: the script of each class.
        splits: "train", "val" and "test", each with its class indices; no class is in two splits.
        digest: sha256 of the images' bytes, which identifies this rendering.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    scripts: tuple[str, ...]
    splits: dict[str, tuple[int, ...]]
    digest: str


@dataclass(frozen=True)
class _Glyph:
    """One character with its un-jittered master image in each face that has it."""

    code: int
    script: str
    masters: dict[int, Image]

    @property
    def split(self) -> str:
        return SPLIT_OF_SCRIPT.get(self.script, "train")


def render_glyphs(size: int = 28, per_class: int = 20, seed: int = 0) -> RenderedGlyphs:
    """Render the whole dataset; equal arguments give equal images.

    Args:
        size: height and width of an image in pixels, at least 12. Small images have fewer classes,
            because more characters look alike in them.
        per_class: images per class; a smaller number gives the first images of a larger one.
        seed: seed of the draws of faces and jitter.
    """
    if size < 12:
        raise ValueError(f"size must be at least 12 pixels for a glyph to be readable, got {size}")
    if per_class < 1:
        raise ValueError(f"per_class must be at least 1, got {per_class}")
    glyphs = _one_per_appearance(_all_glyphs(size))
    images = np.concatenate([_instances(glyph, per_class, seed) for glyph in glyphs])
    return RenderedGlyphs(
        images=images[:, None],
        labels=np.repeat(np.arange(len(glyphs), dtype=np.int64), per_class),
        classes=tuple(f"{unicodedata.name(chr(g.code))} (U+{g.code:04X})" for g in glyphs),
        scripts=tuple(g.script for g in glyphs),
        splits={
            split: tuple(i for i, g in enumerate(glyphs) if g.split == split) for split in _SPLITS
        },
        digest=hashlib.sha256(images.tobytes()).hexdigest(),
    )


def known_rendering(digest: str) -> bool:
    """Whether these images are those that the published results were measured on.

    Another version of FreeType, Pillow, the fonts or Unicode may draw slightly different ones.
    """
    return digest == REFERENCE_DIGEST


# Which characters


def _script(code: int) -> str | None:
    """The script of a distinct base character, None for any other character.

    Every character with a decomposition is left out: accented letters, and the ligatures,
    superscripts and presentation forms that repeat a letter in another place or style.
    """
    character = chr(code)
    category = unicodedata.category(character)
    name = unicodedata.name(character, "")
    if not name or category[0] in "CMZ" or unicodedata.decomposition(character):
        return None
    first_word = name.split()[0]
    if first_word in _ALPHABETS and not name.endswith(" CROSS"):
        return _ALPHABETS[first_word]
    if "ARROW" in name:
        return "Arrows"
    return _KINDS.get(category) or _KINDS[category[0]]


def _face_paths() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = sorted(p for p in folder.glob("DejaVu*.ttf") if "Display" not in p.name)
    if len(paths) != FACES:
        raise FileNotFoundError(
            f"{FACES} DejaVu fonts are needed in {folder}, found {len(paths)}; "
            "restore them with: pip install --force-reinstall matplotlib"
        )
    return paths


def _all_glyphs(size: int) -> list[_Glyph]:
    """Every base character that enough faces draw, ordered by split and then by code point."""
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    masters: dict[int, dict[int, Image]] = {}
    for face, path in enumerate(_face_paths()):
        with TTFont(path, lazy=True) as font:
            names = font.getBestCmap()
        for code, glyph_name in names.items():
            if glyph_name == ".notdef" or _script(code) is None:
                continue
            master = _master(path, chr(code), size * _OVERSAMPLING)
            if master is not None:
                masters.setdefault(code, {})[face] = master
    glyphs = [
        _Glyph(code, script, faces)
        for code, faces in masters.items()
        if len(faces) >= LEAST_FACES and (script := _script(code)) is not None
    ]
    return sorted(glyphs, key=lambda g: (_SPLITS.index(g.split), g.code))


def _one_per_appearance(glyphs: list[_Glyph]) -> list[_Glyph]:
    """The first of every set of glyphs that look alike, so that no two splits share an image."""
    alike = np.zeros((len(glyphs), len(glyphs)), dtype=bool)
    for face in range(FACES):
        members = np.array([i for i, g in enumerate(glyphs) if face in g.masters], dtype=int)
        if len(members):
            alike[np.ix_(members, members)] |= _look_alike(
                _shrunk([glyphs[i].masters[face] for i in members])
            )
    is_first = np.zeros(len(glyphs), dtype=bool)
    for i in range(len(glyphs)):
        is_first[i] = not (alike[i] & is_first).any()
    return [glyph for glyph, keep in zip(glyphs, is_first, strict=True) if keep]


def _look_alike(images: np.ndarray) -> np.ndarray:
    """Which pairs of images differ by no more than anti-aliasing does.

    With six bits a pixel the sums are exact in float32 (up to 64 × 64 pixels), so that every
    machine finds the same pairs.
    """
    flat = (images.reshape(len(images), -1) >> 2).astype(np.float32)
    difference = flat @ flat.T
    energy = difference.diagonal().copy()
    difference *= -2
    difference += energy
    difference += energy[:, None]
    return np.asarray((difference < _ALIKE * energy) & (difference < _ALIKE * energy[:, None]))


# How one is drawn


@cache
def _font(path: Path, points: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(str(path), points, layout_engine=ImageFont.Layout.BASIC)


def _ink(path: Path, character: str, points: int) -> Image | None:
    """The image of a character, cropped to its ink; None if it has none."""
    from PIL import Image, ImageDraw

    font = _font(path, points)
    left, top, right, bottom = font.getbbox(character)
    canvas = Image.new("L", (math.ceil(right - left) + 2, math.ceil(bottom - top) + 2))
    ImageDraw.Draw(canvas).text((1 - left, 1 - top), character, fill=255, font=font)
    box = canvas.getbbox()
    return canvas.crop(box) if box else None


def _master(path: Path, character: str, size: int) -> Image | None:
    """The character's ink, centered in a square and filling most of it; None if blank."""
    from PIL import Image

    side = _GLYPH_SHARE * size
    points = 2 * size
    ink = _ink(path, character, points)
    if ink is None:
        return None
    while (
        max(ink.size) < side and points < 64 * size
    ):  # small signs are drawn in a larger size, not enlarged
        points *= 2
        ink = _ink(path, character, points) or ink
    zoom = side / max(ink.size)
    width, height = (max(1, round(zoom * length)) for length in ink.size)
    master = Image.new("L", (size, size))
    master.paste(
        ink.resize((width, height), Image.Resampling.BOX),
        ((size - width) // 2, (size - height) // 2),
    )
    return master


def _shrunk(fine: list[Image]) -> np.ndarray:
    """Oversampled images averaged down to their final size (n, size, size)."""
    stack = np.stack([np.asarray(image) for image in fine])
    size = stack.shape[1] // _OVERSAMPLING
    blocks = stack.reshape(len(fine), size, _OVERSAMPLING, size, _OVERSAMPLING)
    total = sum(
        blocks[:, :, i, :, j].astype(np.uint16)
        for i in range(_OVERSAMPLING)
        for j in range(_OVERSAMPLING)
    )
    return np.asarray((total + _OVERSAMPLING**2 // 2) // _OVERSAMPLING**2, dtype=np.uint8)


def _instances(glyph: _Glyph, count: int, seed: int) -> np.ndarray:
    """The first images of a class; each depends on the seed, code point and instance alone."""
    from PIL import Image

    draws = _uniform(FACES + 5 * count, mix(seed, glyph.code))
    faces = sorted(glyph.masters, key=lambda face: draws[face])
    masters = [glyph.masters[faces[i % len(faces)]] for i in range(count)]
    maps = _jitters(masters, draws[FACES:].reshape(count, 5))
    return _shrunk(
        [
            master.transform(master.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
            for master, back in zip(masters, maps, strict=True)
        ]
    )


def _jitters(masters: list[Image], draws: np.ndarray) -> list[list[float]]:
    """Pillow's affine maps, from each jittered image back to its master, that clip no ink."""
    signed = 2 * draws - 1
    angle, shear, shift = _ROTATION * signed[:, 0], _SHEAR * signed[:, 1], _SHIFT * signed[:, 2:4]
    scale = _SCALES[0] + (_SCALES[1] - _SCALES[0]) * draws[:, 4]
    cos, sin = np.cos(angle), np.sin(angle)
    sheared = [[cos, cos * shear - sin], [sin, sin * shear + cos]]
    linear = np.moveaxis(scale * np.array(sheared), -1, 0)

    boxes = np.array([master.getbbox() for master in masters])
    reach = (np.abs(linear) @ (boxes[:, 2:] - boxes[:, :2])[:, :, None] / 2)[:, :, 0]
    half = masters[0].size[0] / 2
    room = half - _OVERSAMPLING  # one pixel stays free
    fit = np.minimum(1, room / reach.max(1))[:, None]
    slack = np.maximum(room - fit * reach, 0)

    back = np.linalg.inv(fit[:, :, None] * linear)
    center = half + np.clip(2 * half * shift, -slack, slack)
    offset = half - back @ center[:, :, None]
    return np.concatenate([back, offset], 2).reshape(len(masters), 6).tolist()


def _uniform(count: int, key: int) -> np.ndarray:
    """Draws from [0, 1); a smaller count gives the first draws of a larger one."""
    bits = np.random.Philox(key=key).random_raw(count)
    return (bits >> np.uint64(11)) * 2.0**-53
