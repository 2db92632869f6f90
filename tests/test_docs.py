"""Does what the pages print work? Doctests, Python snippets, TOML and command lines, as printed.

A page's snippets run from top to bottom, in one namespace and an empty folder. What a page leaves
to its reader (a learner, photographs) stands in ``SETUP``, what takes minutes there and must take
seconds here in ``SHORTER``. Nothing else differs from what is printed.
"""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import ibaml
from ibaml.cli import app
from ibaml.evaluation import ClassScores
from ibaml.paper.studies import STUDIES
from ibaml.training import resolve, train

ROOT = Path(__file__).parent.parent
PAGES = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sorted(ROOT.glob("docs/*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text()
MODULES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "src").rglob("*.py"))
    if ">>> " in path.read_text()
]
METHODS = ("maml", "fomaml", "reptile", "imaml", "abml")


# What pages leave to the reader -----------------------------------------------------------------


def photographs(size: int) -> None:
    """photos/, a folder of small pictures for each of 20 classes, and four more pictures."""
    rng = np.random.default_rng(0)

    def save(name: str) -> None:
        pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(name)

    for number in range(320):
        save(f"photos/{number % 20}/{number}.png")
    for name in ("oak", "elm", "ash", "unknown"):
        save(f"{name}.jpg")


def of_readme() -> dict[str, Any]:
    return {
        "energy": lambda w, params: ((w - params) ** 2).sum(),
        "start": torch.zeros(3),
        "params": torch.ones(3, requires_grad=True),
        "loss": torch.sum,
    }


def of_data() -> dict[str, Any]:
    photographs(size=8)
    return {"learner": ibaml.methods.ibaml(ibaml.nn.conv4(5, channels=2))}


def of_evaluation() -> dict[str, Any]:
    keys, labels = np.arange(4), np.tile(np.arange(3), (4, 5))
    probabilities = np.random.default_rng(0).dirichlet([1.0, 1.0, 1.0], (4, 15))
    scores = ClassScores.of(keys, probabilities, labels)
    names = {"keys": keys, "probabilities": probabilities, "labels": labels}
    return {**names, "maml_scores": scores, "ibaml_scores": scores}


def of_methods() -> dict[str, Any]:
    model = ibaml.nn.mlp(2, 3)
    return {"ibaml": ibaml, "model": model, "learner": ibaml.methods.ibaml(model)}


def of_quality() -> dict[str, Any]:
    photographs(size=8)
    return {}


def of_training() -> dict[str, Any]:
    photographs(size=8)
    small = {"image_size": 16, "channels": 2, "queries": 2, "tasks": 1, "micro_batch": 1}
    short = {"iterations": 1, "steps": 1, "val_every": 0, "tensorboard": False}
    train(resolve({"data": "photos", "ways": 3, "tie_head": True, **small, **short}), "runs/photos")
    return {}


SETUP = {
    "README.md": of_readme,
    "docs/data.md": of_data,
    "docs/evaluation.md": of_evaluation,
    "docs/methods.md": of_methods,
    "docs/quality.md": of_quality,
    "docs/training.md": of_training,
}
SHORTER = {
    "docs/data.md": {"stream(tasks=16)": "stream(tasks=1, steps=1)"},  # printed: for ever
    "docs/quality.md": {"epochs=60": "epochs=1", "conv4(5)": "conv4(5, 2)"},
    "docs/training.md": {
        '"iterations": 500': '"iterations": 2, "steps": 1, "micro_batch": 8, "val_tasks": 8',
        "iterations=1000": "iterations=3",
    },
}


# Python -----------------------------------------------------------------------------------------


def fences(page: str, language: str) -> Iterator[tuple[int, str]]:
    """The line and the text of every fence of a page in this language."""
    text = PAGES[page]
    for fence in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, fence.start(1)), fence[1]


def execute(page: str, shorter: dict[str, str]) -> dict[str, Any]:
    """The names that a page's snippets leave; an error shows the page's own line."""
    torch.manual_seed(0)
    names = SETUP[page]() if page in SETUP else {}
    for line, text in fences(page, "python"):
        for printed, short in shorter.items():
            text = text.replace(printed, short)
        exec(compile("\n" * line + text, ROOT / page, "exec"), names)
    return names


WITH_PYTHON = [page for page in PAGES if any(fences(page, "python"))]


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page != "README.md"])
def test_the_snippets_of_a_page_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path / "cache"))
    execute(page, SHORTER.get(page, {}))


def test_every_exception_is_needed():
    assert set(SETUP) | set(SHORTER) <= set(WITH_PYTHON)
    for page, changes in SHORTER.items():
        for printed in changes:
            assert any(printed in text for _, text in fences(page, "python")), (page, printed)


def test_the_readme_learns_and_its_file_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = execute("README.md", {})
    probabilities, new = names["probabilities"], names["new"]
    assert probabilities.shape == (75, 5)
    batch = ibaml.tasks.Episodes(names["data"], "test").batch(range(20))
    predicted = names["learner"].adapt_all(batch).predict_proba(batch.query_x).argmax(-1)
    assert (predicted == batch.query_y).double().mean() > 0.55  # before training: 44 %
    again = ibaml.load_posterior("classifier.ibaml").predict_proba(new.query_x[0])
    torch.testing.assert_close(again, probabilities, rtol=0, atol=1e-6)
    torch.testing.assert_close(names["w"], names["params"])  # the second snippet's solution
    torch.testing.assert_close(names["params"].grad, torch.ones(3))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_the_readmes_one_word_changed(method, tmp_path, monkeypatch):
    assert f"`{method}`" in PAGES["README.md"]
    monkeypatch.chdir(tmp_path)
    changes = {"ibaml.methods.ibaml(": f"ibaml.methods.{method}("}
    changes |= {"steps = 30": "steps = 2", "tasks=8": "tasks=2"}  # but short
    assert all(printed in PAGES["README.md"] for printed in changes)
    names = execute("README.md", changes)
    assert names["probabilities"].sum(-1).allclose(torch.ones(75))
    assert all(p.isfinite().all() for p in names["learner"].parameters())


@pytest.mark.parametrize("module", MODULES)
def test_the_doctests_of_a_module(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert not doctest.testmod(importlib.import_module(module)).failed, "see the captured output"


# TOML and command lines -------------------------------------------------------------------------


def test_every_toml_file_of_a_page_is_one_of_settings():
    files = [text for page in PAGES for _, text in fences(page, "toml")]
    assert files
    for text in files:
        resolve(tomllib.loads(text))


def printed_commands(text: str) -> Iterator[list[str]]:
    """The words after ``ibaml`` of every command in a page's blocks; a loop's, once a round."""
    text = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(r"^(?: {4,})?(?=\S)(.*\bibaml\b.*)$", text, re.MULTILINE):
        loop = re.fullmatch(r"for (\w+) in ([^;]+); do (.+); done", line)
        rounds = [loop[3].replace(f"${loop[1]}", v) for v in loop[2].split()] if loop else [line]
        for command in rounds:
            if re.match(r"(ibaml|torchrun .* -m ibaml) ", command):
                words = shlex.split(command, comments=True)
                yield words[words.index("ibaml") + 1 :]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the words after its name."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "list_commands") and words and not words[0].startswith("-"):
        context = command.make_context(command.name, [], resilient_parsing=True)
        assert words[0] in command.list_commands(context), f"there is no command {words[0]!r}"
        command, words = command.get_command(context, words[0]), words[1:]
    return command, words


def check(words: list[str]) -> None:
    """Refuse what the command line would refuse before it does anything."""
    command, rest = command_of(words)
    try:
        given = command.make_context(" ".join(words[:1]), rest).params
    except typer.Exit:  # --help
        return
    if words[0] == "train":
        own = ("out", "config", "resume")
        resolve({k: v for k, v in given.items() if v is not None and k not in own})
    if words[0] == "reproduce" and given["name"] != "all":
        changes = dict(pair.split("=", 1) for pair in given["option"] or ())
        STUDIES[given["name"]].settings(given["quick"], changes)


COMMANDS = [(page, words) for page, text in PAGES.items() for words in printed_commands(text)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda v: v if type(v) is str else v[0])
def test_a_printed_command_is_one(page, words):
    check(words)


def test_the_commands_of_the_pages_are_seen():
    assert len(COMMANDS) > 40
    assert ["train", "--method", "imaml", "--seed", "1", "--out", "runs/imaml"] in [
        words for _, words in COMMANDS
    ]
    with pytest.raises(AssertionError, match="no command 'trian'"):
        check(["trian"])
    with pytest.raises(Exception, match="--shade"):
        check(["train", "--shade", "1"])
    with pytest.raises(ValueError, match="method"):
        check(["train", "--method", "mamml"])
    with pytest.raises(ValueError, match="spectra"):
        check(["reproduce", "fig1", "--option", "spectra=geometric"])


def test_the_commands_and_options_that_sentences_name_exist():
    for page, text in PAGES.items():
        for line in re.findall(r"`ibaml ([^`]+)`", text):
            command, words = command_of([word for word in line.split() if word != "…"])
            known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
            flags = {word for word in words if word.startswith("--")} - {"--help"}
            assert flags <= known, f"{page}: ibaml {line}: {sorted(flags - known)}"


# Files ------------------------------------------------------------------------------------------


def test_the_files_and_tests_that_pages_name_exist():
    tests = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    everything = "\n".join(tests.values())
    missing = []
    for page, text in PAGES.items():
        here = (ROOT / page).parent
        links = [here / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        paths = re.findall(r"\b(?:benchmarks|docs|tests)/[\w./-]*\.\w+", text)
        missing += [(page, p) for p in [*links, *(ROOT / p for p in paths)] if not p.exists()]
        for file, name in re.findall(r"(test_\w+\.py)(?:::(\w+))?", text):
            if name not in tests.get(file, "") or file not in tests:
                missing.append((page, f"{file}::{name}"))
        for name in re.findall(r"`(test_\w+_\w+)`", text):  # not the option `test_tasks`
            if f"def {name}(" not in everything:
                missing.append((page, name))
    assert not missing
