"""Folders as people have them: which class and split a path means, links, several roots, images
that cannot be read; and datasets of other libraries."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ibaml.tasks import (
    DataError,
    Dataset,
    DataWarning,
    Episodes,
    from_dataset,
    image_folder,
    image_list,
    open_data,
)
from ibaml.tasks.dataset import split_by_hash
from ibaml.tasks.sources.layout import read_layout
from ibaml.tasks.tree import Tree


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path_factory.mktemp("cache")))


def pixels(seed: int, side: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def save(root: Path, *files: str) -> Path:
    for seed, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(seed)).save(root / file)
    return root


def read(root: Path | list[Path], **options) -> Dataset:
    return image_folder(root, image_size=8, **options)


def labelled(data: Dataset) -> dict[str, str]:
    return {f: data.classes[c] for f, c in zip(data.files, data.labels, strict=True)}


class TestLayout:
    @pytest.mark.parametrize(
        ("names", "level", "classes"),
        [
            ("a/1 b/2", None, "a b"),
            ("fruit/apple/1 fruit/pear/2 juice/3", None, "apple pear juice"),
            ("fruit/apple/1 fruit/pear/2 juice/3", 1, "fruit fruit juice"),
            ("x/fruit/apple/1 x/fruit/pear/2", 3, "apple pear"),
            # the shortest path that tells folders of one name apart
            ("a/apple/1 b/apple/2 b/pear/3", None, "a/apple b/apple pear"),
            ("x/a/apple/1 y/a/apple/2 apple/3", None, "x/a/apple y/a/apple apple"),
            ("train/a/1 test/b/2", None, "a b"),
            ("mine/train/x/a/1 mine/Test/y/b/2", None, "a b"),
            ("mine/train/x/a/1 mine/Test/y/b/2", 2, "x y"),
            ("x/a/train/1 y/b/train/2", 1, "x y"),
        ],
    )
    def test_the_class_of_a_path(self, names, level, classes):
        assert read_layout(names.split(), "o", level).classes == tuple(classes.split())

    @pytest.mark.parametrize(
        ("names", "splits"),
        [
            ("train/a/1 valid/x/b/1 test/c/1", {"train": ["a"], "val": ["b"], "test": ["c"]}),
            ("a/train/1 x/b/test/1", {"train": ["a"], "test": ["b"]}),
            ("a/1 b/1", None),
        ],
    )
    def test_splits_outside_and_inside_classes(self, names, splits):
        layout = read_layout(names.split(), "o")
        assert layout.splits == splits
        assert not layout.notes

    @pytest.mark.parametrize(
        "names", ["train/a/1 test/a/2 train/b/1", "a/train/1 a/test/2 b/train/3"]
    )
    def test_images_of_each_class_split_are_put_together_and_said(self, names):
        layout = read_layout(names.split(), "photos")
        assert layout.splits is None
        assert set(layout.classes) == {"a", "b"}
        assert "photos splits the images of each class" in layout.notes[0]

    @pytest.mark.parametrize(
        ("names", "level", "message"),
        [
            ("1 a/2", None, "1 lies in no class folder: put images into one folder per class"),
            ("train/1 train/a/2", None, "train/1 lies in no class folder"),
            (
                "train/a/1 other/b/2",
                None,
                r"'other' lies beside .* \(train\): move it out, or name",
            ),
            ("a/train/1 b/2", None, "b/2 is in no split, and a/train/1 is: .* rename"),
            ("a/b/1 c/2", 2, "c/2 lies above level 2: use --class-level 1 or less"),
            ("train/a/1 test/a/1 test/b/1", None, "'a' is in two splits, train and test"),
            ("a/1", 0, "class_level must be 1 or more, got 0"),
        ],
    )
    def test_refusals_say_what_to_do(self, names, level, message):
        with pytest.raises(DataError, match=message):
            read_layout(names.split(), "photos", level)

    def test_images_beside_folders_of_images_are_two_classes_and_said(self):
        (note,) = read_layout(["apple/1", "apple/red/2"], "photos").notes
        assert "two classes, 'apple' and 'red'; --class-level 1" in note
        assert not read_layout(["apple/1", "apple/red/2"], "photos", 1).notes


class TestFolders:
    def test_nested(self, tmp_path):
        save(tmp_path, "fruit/apple/1.png", "fruit/pear/1.jpg", "milk/1.bmp", "milk/skimmed/1.gif")
        with pytest.warns(DataWarning, match="two classes"):
            data = read(tmp_path)
        assert data.classes == ("apple", "milk", "pear", "skimmed")
        assert labelled(data)["fruit/pear/1.jpg"] == "pear"
        assert read(tmp_path, class_level=1).classes == ("fruit", "milk")
        assert open_data(str(tmp_path), class_level=1).classes == ("fruit", "milk")

    def test_splits_of_images_become_splits_of_classes(self, tmp_path):
        save(tmp_path / "f", *(f"{s}/c{i}/1.png" for s in ("train", "test") for i in range(30)))
        with pytest.warns(DataWarning, match="splits the images of each class"):
            data = read(tmp_path / "f")
        assert all(data.count(c) == 2 for c in range(30))
        assert data.splits == split_by_hash(data.classes)
        (tmp_path / "s.json").write_text(json.dumps({"train": ["c0"], "test": ["c1"]}))
        with pytest.warns(DataWarning):
            given = read(tmp_path / "f", splits=tmp_path / "s.json").splits
        assert given == {"train": (0,), "test": (1,)}

    def test_splits_of_images_in_a_list(self, tmp_path):
        save(tmp_path, "1.png", "2.png", "3.png")
        (tmp_path / "l.csv").write_text(
            "path,label,split\n1.png,a,train\n2.png,a,test\n3.png,b,train\n"
        )
        with pytest.warns(DataWarning, match=r"l\.csv splits the images"):
            data = image_list(tmp_path / "l.csv", image_size=8)
        assert data.classes == ("a", "b")

    def test_several_roots(self, tmp_path):
        save(tmp_path / "one", "apple/1.png", "pear/1.png")
        save(tmp_path / "two", "apple/1.png", "x/plum/1.png")
        roots = [tmp_path / "one", tmp_path / "two"]
        data = read(roots)
        assert data.classes == ("apple", "pear", "plum")
        assert data.count(0) == 2
        assert str(tmp_path / "two" / "apple" / "1.png") in data.files
        again = open_data(os.pathsep.join(map(str, roots)), image_size=8)
        assert np.array_equal(again.examples, data.examples)
        with pytest.raises(DataError, match="name the outer folder alone"):
            read([tmp_path, tmp_path / "one"])
        with pytest.raises(DataError, match=r"nowhere' is neither a path"):
            open_data(os.pathsep.join([str(roots[0]), "nowhere"]))

    def test_unreadable_images_are_left_out_and_named(self, tmp_path):
        save(tmp_path, "a/1.png", "a/2.png", "b/1.png")
        (tmp_path / "a" / "bad.jpg").write_bytes(b"no image")
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "phone.HEIC").write_bytes(b"\0\0\0 ftypheic")
        (tmp_path / "c" / "gone.png").symlink_to(tmp_path / "nowhere.png")
        for _ in range(2):  # from the cache too
            with pytest.warns(DataWarning) as caught:
                data = read(tmp_path)
            text = str(caught[0].message)
            assert "3 of 6 images cannot be read: they are left out" in text
            assert "a/bad.jpg: not a readable image" in text
            assert "c/phone.HEIC" in text
            assert "export it as JPEG" in text
            assert "no image is left of 'c'" in text
            assert data.classes == ("a", "b")
            assert data.files == ("a/1.png", "a/2.png", "b/1.png")
            expected = np.stack([pixels(i) for i in range(3)]).mean((1, 2, 3))
            assert np.abs(data.examples.mean((1, 2, 3)) - expected).max() < 6

    def test_a_class_without_images_does_not_end_splits_by_folder(self, tmp_path):
        save(tmp_path, "train/a/1.png", "test/b/1.png")
        (tmp_path / "test" / "c").mkdir()
        (tmp_path / "test" / "c" / "1.png").write_bytes(b"")
        with pytest.warns(DataWarning, match="no image is left of 'c'"):
            assert read(tmp_path).splits == {"train": (0,), "test": (1,)}

    def test_too_few_classes_for_splits_says_what_to_do(self, tmp_path):
        save(tmp_path, "a/1.png", "b/1.png", "c/1.png")
        with pytest.raises(DataError, match=r"--splits FILE \(now .*\)\. .* ibaml predict"):
            Episodes(read(tmp_path), "train", ways=5)


class TestLinks:
    def test_a_linked_folder_is_read_once(self, tmp_path):
        save(tmp_path / "else" / "pears", "1.png", "deep/2.png")
        save(tmp_path / "f", "apple/1.png")
        (tmp_path / "f" / "pear").symlink_to(tmp_path / "else" / "pears")
        (tmp_path / "f" / "pear again").symlink_to(tmp_path / "else" / "pears")
        (tmp_path / "f" / "red").symlink_to("apple")
        names = Tree.open(tmp_path / "f").names
        assert names == ("apple/1.png", "pear/1.png", "pear/deep/2.png")

    def test_cycles_end(self, tmp_path):
        save(tmp_path / "f", "a/1.png", "b/2.png")
        (tmp_path / "f" / "a" / "up").symlink_to("..")
        (tmp_path / "f" / "b" / "self").symlink_to(".")
        (tmp_path / "f" / "outside").symlink_to(tmp_path)
        (tmp_path / "f" / "x").symlink_to("y")
        (tmp_path / "f" / "y").symlink_to("x")
        assert [n for n in Tree.open(tmp_path / "f").names if n.endswith("png")] == [
            "a/1.png",
            "b/2.png",
        ]

    def test_a_folder_without_end_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("ibaml.untrusted.FILES", 3)
        save(tmp_path / "else", *(f"{i}.png" for i in range(4)))
        save(tmp_path / "f", "a/1.png")
        (tmp_path / "f" / "disk").symlink_to(tmp_path / "else")
        with pytest.raises(DataError, match="more than 3 files: name a folder in it"):
            Tree.open(tmp_path / "f")

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
    def test_a_pipe_named_like_an_image_is_not_read(self, tmp_path):
        save(tmp_path, "a/1.png")
        os.mkfifo(tmp_path / "a" / "2.png")
        assert read(tmp_path).files == ("a/1.png",)


# --- datasets of other libraries


class Pairs(torch.utils.data.Dataset):
    classes = ("apple", "pear")

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int):
        picture = pixels(at)
        return {
            "picture": Image.fromarray(picture),
            "array": picture,
            "tensor": torch.from_numpy(picture.transpose(2, 0, 1) / 255).float(),
        }[self.kind], at % 2


class Features:
    class Names:
        names = ("apple", "pear")

    features = {"fine": Names, "img": None}  # noqa: RUF012

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int):
        return {"img": Image.fromarray(pixels(at)), "fine": np.int64(at % 2)}


@pytest.mark.parametrize("kind", ["picture", "array", "tensor", "mapping"])
def test_any_dataset_of_images_and_labels(kind):
    if kind == "mapping":
        data = from_dataset(Features(), image="img", label="fine", image_size=10)
    else:
        data = from_dataset(Pairs(kind), image_size=10)
    assert data.classes == ("apple", "pear")
    expected = np.stack([pixels(at).transpose(2, 0, 1) for at in (0, 2, 1, 3)])
    assert np.array_equal(data.examples, expected)
    subset = torch.utils.data.Subset(Pairs("picture"), [1, 3])
    assert from_dataset(subset, image_size=10).classes == ("pear",)


def test_labels_without_names_and_splits_by_name():
    pairs = [(pixels(i), i // 2) for i in range(4)]
    data = from_dataset(pairs, image_size=10, splits={"train": ["0"], "test": ["1"]})
    assert data.classes == ("0", "1")
    assert data.splits == {"train": (0,), "test": (1,)}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "the dataset is empty"),
        (iter([]), "has no length: take a part"),
        ([{"pixels": 1, "label": 0}], r"item 0 has no 'image'; it has pixels, label: name them"),
        ([(pixels(0), 1.5)], "1.5 is no label"),
        ([(pixels(0), None)], "None is no label"),
        ([(pixels(0) - 9.0, 0)], "item 0: floating pixels must lie in 0 … 1"),
        ([("a.png", 0)], "item 0: an image is a Pillow picture, an array or a tensor, got str"),
        ([pixels(0)], "is no pair"),
    ],
)
def test_datasets_that_are_refused(items, message):
    with pytest.raises(DataError, match=message):
        from_dataset(items)


def test_clean_folders_warn_of_nothing(tmp_path):
    save(tmp_path, "x/a/1.png", "x/b/1.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path)
