"""Every kind of data reads its settings or refuses them by name; held-out classes are held out."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from ibaml.kinds import NAMES
from ibaml.tasks import DataError, image_folder, image_list, open_data
from ibaml.tasks.catalog import CATALOG
from ibaml.tasks.dataset import split_by_hash
from ibaml.training import resolve
from ibaml.training.build import open_tasks
from test_sources import make_folder

NAMED = [f"class {i}" for i in range(30)]
TABLE = {"task": "who", "features": "x", "target": "y"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path_factory.mktemp("cache")))


def features(folder: Path) -> dict[str, str]:
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    np.savez(folder / "f.npz", x=x, y=np.repeat(NAMED, 4))
    return {"data": str(folder / "f.npz")}


def listed(folder: Path, **columns: str) -> dict[str, str]:
    make_folder(folder / "images", NAMED, 4)
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", *columns])
        writer.writerows(
            [f"images/{n}/{i}.png", n, *columns.values()] for n in NAMED for i in range(4)
        )
    return {"data": str(folder / "list.csv"), "image_size": 8}


def table(folder: Path) -> dict[str, str]:
    rows = [f"{name},{i},{i * i}" for name in NAMED for i in range(8)]
    (folder / "t.csv").write_text("\n".join(["who,x,y", *rows]) + "\n")
    return {"data": str(folder / "t.csv"), **TABLE}


def splits_file(folder: Path) -> tuple[str, dict[str, list[str]]]:
    """Splits that hold out most of the classes that a hash of their name would train on."""
    usual = [NAMED[i] for i in split_by_hash(NAMED)["train"]]
    kept = [name for name in NAMED if name not in usual] + usual[:2]
    lists = {"train": kept, "val": usual[2:6], "test": usual[6:]}
    (folder / "splits.json").write_text(json.dumps(lists))
    return str(folder / "splits.json"), lists


def names_drawn(source, split: str) -> set[str]:
    """The classes (or tasks) of what a split draws."""
    keys = range(200)
    if (named := source.groups(split, keys)) is not None:
        return set(named)
    episodes = source.episodes(split)
    rows = np.concatenate([episodes.draw(key)[0].ravel() for key in keys])
    return {source.data.classes[c] for c in source.data.labels[rows]}


@pytest.mark.parametrize("make", [features, listed, table])
def test_a_splits_file_decides_what_training_and_test_draw(make: Callable, tmp_path):
    file, lists = splits_file(tmp_path)
    given = make(tmp_path)
    counts = {} if make is table else {"ways": 3, "queries": 2}
    settings = resolve({**given, **counts, "shots": 1, "splits": file, "threads": 1})
    source = open_tasks(settings, torch.device("cpu"))
    for split, names in lists.items():
        assert names_drawn(source, split) == set(names), split


def test_a_splits_file_is_read_by_open_data_too(tmp_path):
    file, lists = splits_file(tmp_path)
    for given in (features(tmp_path), listed(tmp_path)):
        data = open_data(given.pop("data"), splits=file, **given)
        splits = {s: {data.classes[c] for c in data.members(s)} for s in lists}
        assert splits == {s: set(names) for s, names in lists.items()}


def test_a_name_that_a_splits_file_has_twice_is_refused(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"train": NAMED[:5], "test": NAMED[4:]}))
    for given in (features(tmp_path), table(tmp_path)):
        settings = resolve({**given, "splits": str(tmp_path / "s.json")})
        with pytest.raises(DataError, match="'class 4' is in two splits, train and test"):
            open_tasks(settings, torch.device("cpu"))


def test_two_answers_to_which_split_are_refused(tmp_path):
    file, _ = splits_file(tmp_path)
    listed(tmp_path / "l", split="train")
    with pytest.raises(DataError, match=r"list\.csv has a column 'split'.*drop the column"):
        image_list(tmp_path / "l" / "list.csv", splits=file, image_size=8)
    make_folder(tmp_path / "f" / "train", NAMED[:2])
    with pytest.raises(DataError, match="has a folder for each split already: leave splits out"):
        image_folder(tmp_path / "f", splits=file, image_size=8)


REFUSED = [
    ("f.npz", "root", r"root is not read for f\.npz \(an \.npz of features\)"),
    ("f.npz", "image_size", "image_size is not read .* holds no images"),
    ("f.npz", "rotations", "rotations is not read .* holds no images"),
    ("f.npz", "augment", "augment is not read"),
    ("f.npz", "first_rows", "first_rows is not read .* it orders the rows of a table"),
    ("f.npz", "table", "it names columns of a table"),
    ("photos", "root", r"root is not read for photos \(a folder or zip of images\)"),
    ("glyphs", "root", "root is not read for glyphs .* no files are read"),
    ("glyphs", "splits", "splits is not read for glyphs"),
    ("glyphs", "image_size", "28×28"),
    ("glyphs", "first_rows", r"first_rows is not read for glyphs \(a built-in dataset\)"),
    ("glyphs", "table", "it names columns of a table"),
    ("sinusoids", "root", "root is not read for sinusoids"),
    ("sinusoids", "splits", "splits is not read for sinusoids"),
    ("sinusoids", "image_size", "image_size is not read for sinusoids"),
    ("sinusoids", "first_rows", "first_rows is not read for sinusoids"),
    ("list.csv", "first_rows", r"first_rows is not read for list\.csv \(a list of images\)"),
    ("omniglot", "splits", "splits is not read for omniglot .* are the published ones"),
    ("cub", "image_size", "image_size is not read for cub .* a fixed size"),
    ("t.csv", "root", r"root is not read for t\.csv \(a table\)"),
    ("t.csv", "image_size", "image_size is not read"),
    ("t.csv", "queries", "queries is not read .* all rows of a task besides its shots"),
]
VALUES = {"root": "r", "splits": "s.json", "image_size": 32, "queries": 5, "rotations": True,
          "augment": True, "first_rows": True}  # fmt: skip


@pytest.mark.parametrize(("data", "name", "words"), REFUSED, ids=lambda v: str(v)[:12])
def test_a_setting_that_the_data_do_not_read_is_refused_by_name(data, name, words):
    given = TABLE if data == "t.csv" or name == "table" else {}
    given = {**given, **({name: VALUES[name]} if name != "table" else {})}
    with pytest.raises(ValueError, match=words):
        resolve({"data": data, **given})


@pytest.mark.parametrize(
    ("data", "name"),
    [(data, name) for data, name, _ in REFUSED if name in ("root", "splits", "image_size")
     and data not in ("sinusoids", "t.csv")],
)  # fmt: skip
def test_open_data_refuses_what_it_does_not_read(data, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features(tmp_path)
    make_folder(tmp_path / "photos")
    with pytest.raises(DataError, match=f"{name} is not read for {data}"):
        open_data(data, **{name: VALUES[name]})


@pytest.mark.parametrize(
    ("given", "applies"),
    [
        ({"data": "glyphs"}, (None, 15)),
        ({"data": "sinusoids"}, (None, 15)),
        ({"data": "omniglot"}, (None, 15)),
        ({"data": "f.npz"}, (None, 15)),
        ({"data": "photos"}, (84, 15)),
        ({"data": "list.csv"}, (84, 15)),
        ({"data": "t.csv", **TABLE}, (None, None)),
    ],
)
def test_what_does_not_apply_is_none_and_the_rest_resolves_again(given, applies):
    settings = resolve(given)
    assert (settings.image_size, settings.queries) == applies
    assert resolve(asdict(settings)) == settings


def test_every_dataset_with_a_name_is_a_kind_of_its_own():
    assert set(CATALOG) <= set(NAMES)


def test_data_without_a_name_is_refused(tmp_path, monkeypatch):
    """The empty path is the working directory."""
    monkeypatch.chdir(make_folder(tmp_path, NAMED))
    with pytest.raises(ValueError, match="data is empty"):
        resolve({"data": ""})
    with pytest.raises(DataError, match="neither a path nor one of"):
        open_data("")


def test_labels_of_an_npz_that_are_no_classes_are_refused(tmp_path):
    x = np.zeros((4, 2), np.float32)
    for y, words in (
        (np.array([0, 1, np.nan, 1]), r"labels\[2\] is nan"),
        (np.array([[0], [1], [0], [1]]), "squeeze"),
        (np.array(3), "one class each"),
    ):
        np.savez(tmp_path / "f.npz", x=x, y=y)
        with pytest.raises(DataError, match=words):
            open_data(str(tmp_path / "f.npz"))
    np.savez(tmp_path / "f.npz", x=x[:, :0], y=np.arange(4))
    with pytest.raises(DataError, match="no columns"):
        open_data(str(tmp_path / "f.npz"))
