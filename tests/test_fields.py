"""Options declared once: what is read from words, what is refused and in which words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import ibaml
from ibaml.fields import (
    SettingsError,
    chosen,
    fields_of,
    read_toml,
    refuse_unread,
    require,
    setting,
)


def rising(values: tuple[int, ...]) -> str | None:
    return None if list(values) == sorted(set(values)) else "must rise"


@dataclass(frozen=True)
class Options:
    seeds: int = setting(30, "How many.", least=2)
    steps: tuple[int, ...] = setting((1, 2), least=1, check=rising)
    scales: tuple[float, ...] = (0.5, 1.0)
    arms: tuple[str, ...] = setting(("maml",), choices=("maml", "imaml"))
    stiffness: float = setting(0.5, above=0, below=2)
    quick: bool = False
    lam: float | None = setting(None, only=("imaml",))
    spectrum: Literal["flat", "steep"] = "flat"

    def __post_init__(self) -> None:
        require(self)


def test_a_field_is_what_its_annotation_and_its_declaration_say():
    fields = fields_of(Options)
    assert list(fields)[:2] == ["seeds", "steps"]
    assert (fields["seeds"].kind, fields["seeds"].help) == (int, "How many.")
    assert (fields["scales"].kind, fields["scales"].several) == (float, True)
    assert fields["lam"].kind is float
    assert fields["spectrum"].choices == ("flat", "steep")
    assert fields["stiffness"].flag == "--stiffness"


def test_words_become_what_the_field_is():
    given = {
        "seeds": "5", "steps": "1,2, 5", "scales": "1,0.25", "arms": "imaml,maml", "quick": "yes",
        "lam": "0.5", "spectrum": "steep", "stiffness": None,
    }  # fmt: skip
    assert chosen(Options, given, words=True) == {
        "seeds": 5, "steps": (1, 2, 5), "scales": (1.0, 0.25), "arms": ("imaml", "maml"),
        "quick": True, "lam": 0.5, "spectrum": "steep",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seeds": "many"}, "seeds must be a whole number, got 'many'"),
        ({"seeds": "1"}, "seeds must be 2 or more"),
        ({"quick": "perhaps"}, "quick must be true or false"),
        ({"steps": "2,1"}, r"steps must rise, got \(2, 1\)"),
        ({"steps": ""}, "steps must be whole numbers of 1 or more, with commas between them"),
        ({"steps": [1.5]}, "steps must be whole numbers"),
        ({"scales": "1,x"}, "scales must be numbers, with commas"),
        (
            {"arms": "mamml"},
            "each of arms must be one of maml, imaml; got 'mamml'; did you mean maml",
        ),
        ({"stiffness": "2"}, "stiffness must be below 2"),
        ({"lam": "nan"}, "lam must be finite"),
        ({"spectrum": "stepe"}, "spectrum must be one of flat, steep.*did you mean steep"),
        ({"sedes": "1"}, "study: there is no setting 'sedes'; did you mean seeds"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given, words):
    with pytest.raises(SettingsError, match=words):
        chosen(Options, given, words=True, whose="study")


def test_a_text_is_no_number_but_on_the_command_line():
    with pytest.raises(SettingsError, match="seeds must be a whole number, got '5'"):
        chosen(Options, {"seeds": "5"})


def test_a_table_made_directly_is_checked_too():
    with pytest.raises(SettingsError, match="seeds must be 2 or more"):
        Options(seeds=1)


def test_what_a_reader_does_not_read_is_refused():
    refuse_unread(Options, {"lam": 1.0, "seeds": 3}, "imaml")
    with pytest.raises(SettingsError, match="lam is read by imaml and the method is maml"):
        refuse_unread(Options, {"lam": 1.0}, "maml")


def test_a_file_may_write_dashes(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("seeds = 4\n")
    assert read_toml(file, Options) == {"seeds": 4}


def test_the_tables_that_help_shows_need_no_torch():
    """The packages around them are stood in for, so that their own imports do not count."""
    code = """
import sys, types
for name in ("ibaml", "ibaml.training"):
    package = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + name.removeprefix("ibaml").replace(".", "/")]
    sys.modules[name] = package
import ibaml.training.rules
from ibaml.assessment import Protocol
assert "torch" not in sys.modules
assert Protocol().tasks == 1000
"""
    home = str(Path(ibaml.__file__).parent)
    subprocess.run([sys.executable, "-c", code, home], check=True)
