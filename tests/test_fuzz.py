"""Does every reader answer a damaged file by success or a sentence? A few inputs of each, always
the same; `make fuzz` tries more."""

from __future__ import annotations

import pytest

from fuzzing import fuzz, prepared

COUNT = 60
NAMES = (
    "zip", "image", "npz", "list", "table", "toml", "config", "splits", "log", "checkpoint",
    "learner", "posterior", "classifier", "prior", "pickle", "cifar", "request",
    "summary", "scores", "doctor", "result",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def found(place):
    return prepared(place)


def test_every_reader_is_tried(found):
    assert tuple(found) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused_by_a_sentence(name, found, place, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(place / "cache"))
    reader = found[name]
    for number, content in enumerate(reader.valid):  # else damage would be refused for nothing
        path = place / f"valid{number}{reader.suffix}"
        path.write_bytes(content)
        if not (name == "pickle" and number < 2):  # protocols 0 and 1 are not read
            reader.read(path)
    assert not fuzz(name, reader, place, 0, COUNT)
