"""The embedded dataset: grouped images, splits that share no appearance, draws by name."""

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from ibaml.tasks.render import (
    REFERENCE_DIGEST,
    RenderedGlyphs,
    known_rendering,
    render_glyphs,
)

PER_CLASS = 20
SMALL = 12  # pixels: the quickest rendering


@pytest.fixture(scope="module")
def glyphs() -> RenderedGlyphs:
    return render_glyphs(per_class=PER_CLASS)


@pytest.fixture(scope="module")
def small() -> RenderedGlyphs:
    return render_glyphs(SMALL, per_class=5)


def by_class(rendered: RenderedGlyphs) -> np.ndarray:
    return rendered.images.reshape(len(rendered.classes), -1, *rendered.images.shape[2:])


def code_points(rendered: RenderedGlyphs) -> list[int]:
    return [int(name.rpartition("U+")[2].rstrip(")"), 16) for name in rendered.classes]


def test_images_are_grouped_by_class(glyphs: RenderedGlyphs) -> None:
    count = len(glyphs.classes)
    assert glyphs.images.shape == (count * PER_CLASS, 1, 28, 28)
    assert glyphs.images.dtype == np.uint8
    assert glyphs.labels.dtype == np.int64
    assert (np.diff(glyphs.labels) >= 0).all()
    assert np.bincount(glyphs.labels).tolist() == [PER_CLASS] * count
    assert len(set(glyphs.classes)) == len(glyphs.scripts) == count
    assert len(glyphs.digest) == 64


def test_splits_are_different_scripts(glyphs: RenderedGlyphs) -> None:
    members = [i for split in ("train", "val", "test") for i in glyphs.splits[split]]
    assert sorted(members) == list(range(len(glyphs.classes)))
    scripts = {s: {glyphs.scripts[i] for i in glyphs.splits[s]} for s in glyphs.splits}
    assert scripts["test"] == {"Georgian", "Armenian", "Hebrew", "Lao"}
    assert scripts["val"] == {"Cyrillic"}
    assert not scripts["train"] & (scripts["val"] | scripts["test"])
    assert {"Latin", "Greek", "Canadian Aboriginal", "Mathematics", "Arrows"} <= scripts["train"]
    assert len(glyphs.splits["test"]) >= 200
    assert len(glyphs.splits["val"]) >= 100
    assert len(glyphs.splits["train"]) >= 1000


def test_names_say_script_and_code_point(glyphs: RenderedGlyphs) -> None:
    index = glyphs.classes.index("GEORGIAN LETTER AN (U+10D0)")
    assert glyphs.scripts[index] == "Georgian"
    held_out = {"CYRILLIC", "GEORGIAN", "ARMENIAN", "HEBREW", "LAO"}
    for i in glyphs.splits["train"]:
        assert not held_out & set(glyphs.classes[i].split()), glyphs.classes[i]


def test_only_base_characters(glyphs: RenderedGlyphs) -> None:
    for code in code_points(glyphs):
        assert unicodedata.category(chr(code))[0] not in "CMZ"
        assert not unicodedata.decomposition(chr(code))


def test_identical_letters_are_one_class(glyphs: RenderedGlyphs) -> None:
    codes = set(code_points(glyphs))
    assert {ord("A"), ord("o"), ord("H")} <= codes  # Latin, the first of their scripts
    for twin in "ΑАΟоОНոօ":  # Greek, Cyrillic and Armenian letters drawn as Latin ones
        assert ord(twin) not in codes, unicodedata.name(twin)
    assert {ord("Ж"), ord("Ω"), ord("א"), ord("ა")} <= codes  # these look like no other


def test_no_appearance_is_in_two_splits(glyphs: RenderedGlyphs) -> None:
    """Un-jittered images, drawn here by another path: Pillow's own centering at one size."""
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(folder / "DejaVuSans.ttf"), 120)

    def plain(code: int) -> np.ndarray:
        canvas = Image.new("L", (600, 600))
        ImageDraw.Draw(canvas).text((300, 300), chr(code), fill=255, font=font, anchor="mm")
        ink = canvas.crop(canvas.getbbox())
        zoom = 20 / max(ink.size)
        ink = ink.resize([max(1, round(zoom * side)) for side in ink.size], Image.Resampling.BOX)
        square = Image.new("L", (22, 22))
        square.paste(ink, ((22 - ink.size[0]) // 2, (22 - ink.size[1]) // 2))
        return np.asarray(square, dtype=np.float32).ravel() / 255

    codes = code_points(glyphs)
    images = {s: np.stack([plain(codes[i]) for i in glyphs.splits[s]]) for s in glyphs.splits}

    def closest(a: np.ndarray, b: np.ndarray) -> float:
        energy_a, energy_b = (a**2).sum(1)[:, None], (b**2).sum(1)
        gap = energy_a + energy_b - 2 * a @ b.T
        return float((gap / np.minimum(energy_a, energy_b)).min())

    assert closest(plain(ord("A"))[None], plain(ord("А"))[None]) < 0.01  # the measure sees twins
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        assert closest(images[a], images[b]) > 0.02


def test_every_image_has_ink_and_none_is_clipped(glyphs: RenderedGlyphs) -> None:
    images = glyphs.images[:, 0]
    assert images.max(axis=(1, 2)).min() > 100
    frame = np.ones((28, 28), dtype=bool)
    frame[1:-1, 1:-1] = False
    assert images[:, frame].max() < 128


def test_images_of_a_class_differ(glyphs: RenderedGlyphs) -> None:
    for images, name in zip(by_class(glyphs), glyphs.classes, strict=True):
        assert len({image.tobytes() for image in images}) == PER_CLASS, name


def test_glyphs_fill_and_center(glyphs: RenderedGlyphs) -> None:
    ink = glyphs.images[:, 0] > 64
    rows, columns = ink.any(2), ink.any(1)

    def first_and_last(lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return lines.argmax(1), 27 - lines[:, ::-1].argmax(1)

    (top, bottom), (left, right) = first_and_last(rows), first_and_last(columns)
    larger = np.maximum(bottom - top, right - left) + 1
    assert 18 <= np.median(larger) <= 24
    for low, high in ((top, bottom), (left, right)):
        middle = (low + high) / 2 - 13.5
        assert abs(middle.mean()) < 0.25
        assert np.quantile(np.abs(middle), 0.99) < 3.5


def test_same_seed_same_images_and_fewer_are_the_first(small: RenderedGlyphs) -> None:
    fewer = render_glyphs(SMALL, per_class=3)
    assert fewer.classes == small.classes
    assert np.array_equal(by_class(fewer), by_class(small)[:, :3])
    assert fewer.digest != small.digest


def test_digest_follows_the_seed(small: RenderedGlyphs) -> None:
    other = render_glyphs(SMALL, per_class=5, seed=1)
    assert other.classes == small.classes
    assert other.digest != small.digest
    same = (by_class(other) == by_class(small)).all(axis=(2, 3))
    assert same.mean() < 0.01


def episodes(rendered: RenderedGlyphs, ways: int, count: int) -> Iterator[float]:
    """Accuracy of the nearest one-image centroid in pixel space, per test episode."""
    generator = np.random.default_rng(0)
    images = by_class(rendered).reshape(len(rendered.classes), PER_CLASS, -1) / 255.0
    for _ in range(count):
        chosen = generator.choice(rendered.splits["test"], ways, replace=False)
        order = generator.permuted(np.tile(np.arange(PER_CLASS), (ways, 1)), axis=1)
        shuffled = images[chosen[:, None], order]
        support, query = shuffled[:, 0], shuffled[:, 1:16]
        distance = ((query[:, :, None] - support) ** 2).sum(-1)
        yield float((distance.argmin(-1) == np.arange(ways)[:, None]).mean())


def test_pixels_alone_solve_about_half(glyphs: RenderedGlyphs) -> None:
    """Neither trivial nor hopeless: the room that a learner is measured in."""
    accuracy = np.mean(list(episodes(glyphs, ways=5, count=300)))
    print(f"pixel nearest centroid, 5-way 1-shot: {accuracy:.3f}")
    assert 0.35 < accuracy < 0.65


def test_known_rendering(glyphs: RenderedGlyphs) -> None:
    from PIL import features

    assert known_rendering(REFERENCE_DIGEST)
    assert not known_rendering(glyphs.digest[::-1])
    measured_with = ("2.14.3", "3.11.2")  # FreeType, matplotlib
    if (features.version("freetype2"), matplotlib.__version__) == measured_with:
        assert known_rendering(glyphs.digest)


@pytest.mark.parametrize(("field", "value"), [("size", 11), ("per_class", 0)])
def test_refuses_impossible_sizes(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least .*got {value}"):
        render_glyphs(**{field: value})


def test_missing_fonts_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="reinstall matplotlib"):
        render_glyphs()
