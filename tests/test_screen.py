"""What a person sees of a run: a line or a bar with its figures, text as it is, and a help text
that leaves no setting out."""

from __future__ import annotations

import io
import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ibaml.assessment import Protocol
from ibaml.cli import app, screen
from ibaml.cli.screen import LiveView, errors_as_sentences, say
from ibaml.fields import flag
from ibaml.training import Settings, SettingsError, Step
from runs import WAVES, words

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def plain(monkeypatch) -> io.StringIO:
    """A screen that is a file."""
    return _screen(monkeypatch, False)


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """A screen that is a terminal."""
    return _screen(monkeypatch, True)


def _screen(monkeypatch, is_terminal: bool) -> io.StringIO:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=200)
    monkeypatch.setattr(screen, "console", console)
    return written


def step(number: int, **given) -> Step:
    return Step(
        **{
            "step": number,
            "loss": 1.5,
            "tasks": 8,
            "left_out": 0,
            "gradient_norm": 1.0,
            "moved": True,
            "rate": 0.01,
            "cg_residual": 2e-3,
            **given,
        }
    )


# --- a file --------------------------------------------------------------------------------------


def test_lines_hold_every_figure(plain):
    view = LiveView(2, "accuracy")
    view.started(0, 4)
    view.stepped(step(1, loss=2.0))
    assert plain.getvalue() == "", "a line every two steps"
    view.stepped(step(2, loss=1.0, left_out=4))
    view.validated(2, {"nll": 0.75, "accuracy": 0.625}, True)
    view.stepped(step(3))
    view.stepped(step(4, cg_residual=3e-4))
    view.ended()
    first, validation, last = plain.getvalue().splitlines()
    speed = r"[\d.e+]+ tasks/s"
    left = r"left \d+:\d\d:\d\d"
    assert re.fullmatch(
        rf"2/4  {speed}  loss 1\.500  CG residual 2\.0e-03  diverged 25 %  {left}", first
    )
    assert validation == "2/4  val accuracy 62.5 % nll 0.750  (best so far)"
    assert re.fullmatch(
        rf"4/4  {speed}  loss 1\.500  val accuracy 62\.5 % nll 0\.750  CG residual 3\.0e-04  "
        r"diverged 0 %  left 0:00:00",
        last,
    )


def test_time_left_grows_with_the_steps_that_are_left(plain, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    view = LiveView(1, "accuracy")
    view.started(10, 110)
    now[0] += 60  # a minute for one of the hundred steps that this process has to do
    view.stepped(step(11))
    going_on, line = plain.getvalue().splitlines()
    assert going_on == "resuming after iteration 10 of 110"
    assert "0.133 tasks/s" in line
    assert line.endswith("left 1:39:00")


def test_regression_has_rmse_and_no_implicit_gradient_no_residual(plain):
    view = LiveView(1, "rmse")
    view.started(0, 2)
    view.validated(0, {"nll": 3.0, "rmse": 1.25}, False)
    view.stepped(step(1, cg_residual=None))
    validation, line = plain.getvalue().splitlines()
    assert validation == "0/2  val rmse 1.250 nll 3.000"
    assert "val rmse 1.250 nll 3.000" in line
    assert "CG" not in line


def test_a_step_that_every_task_left_has_no_loss(plain):
    view = LiveView(1, "accuracy")
    view.started(0, 3)
    view.stepped(step(1, loss=float("nan"), left_out=8, moved=False))
    assert "nan" not in plain.getvalue()
    assert "diverged 100 %" in plain.getvalue()


def test_a_run_that_is_piped_into_a_file_has_no_codes(tmp_path):
    given = {**WAVES, "method": "imaml", "iterations": 4, "log_every": 2, "val_every": 4}
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), *words(given)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    lines = done.output.splitlines()
    assert any(re.match(r"2/4 .*tasks/s.*loss.*CG residual.*diverged 0 %.*left", x) for x in lines)
    assert any(re.match(r"4/4  val rmse .* nll .*best so far", x) for x in lines)
    assert lines[0].startswith("imaml on sinusoids, regression; mlp: 9 weights adapted, 16 shared")
    assert lines[-1] == f"done: {tmp_path / 'run'}. Next: ibaml evaluate {tmp_path / 'run'}"


# --- a terminal ----------------------------------------------------------------------------------


def test_a_terminal_has_a_bar_that_ends_cleanly(terminal):
    view = LiveView(2, "accuracy")
    view.started(0, 4)
    for number in range(1, 5):
        view.stepped(step(number))
        if number == 2:
            view.validated(2, {"nll": 0.75, "accuracy": 0.625}, True)
    view.ended()
    shown = terminal.getvalue()
    last = CODES.sub("", shown).replace("\r", "\n").strip().splitlines()[-1]
    assert "meta-training" in last
    assert "━━━" in last
    assert "4/4" in last
    for word in ("tasks/s", "loss 1.500", "val accuracy 62.5 % nll 0.750", "CG residual", "left"):
        assert word in last
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is back"
    assert shown.endswith(("\n", "\x1b[?25h")), "the next line begins a line"


def test_a_run_that_fails_leaves_the_terminal_as_it_was(terminal):
    view = LiveView(1, "accuracy")
    view.started(0, 4)
    view.stepped(step(1))
    view.ended()
    view.ended()
    before = terminal.getvalue()
    say("Error: afterwards")
    added = terminal.getvalue().removeprefix(before)
    assert CODES.sub("", added) == "Error: afterwards\n", "nothing is drawn any more"
    assert before.count("\x1b[?25h") >= before.count("\x1b[?25l")


def test_a_bar_goes_on_where_a_run_goes_on(terminal):
    view = LiveView(1, "accuracy")
    view.started(30, 40)
    view.ended()
    shown = CODES.sub("", terminal.getvalue())
    assert "resuming after iteration 30 of 40" in shown
    assert "30/40" in shown


# --- text as it is -------------------------------------------------------------------------------

ODD = "runs/[red]a[/red] [/] [link=x] :100: %"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_brackets_are_printed_as_they_are(is_terminal, monkeypatch):
    written = _screen(monkeypatch, is_terminal)
    say(ODD)
    view = LiveView(1, "accuracy")
    view.message(ODD)
    with pytest.raises(typer.Exit), errors_as_sentences():
        raise SettingsError(ODD)
    shown = CODES.sub("", written.getvalue()).splitlines()
    assert shown == [ODD, ODD, f"Error: {ODD}"]


def test_long_paths_are_not_broken(plain):
    path = "/a/" + "very/" * 100 + "long.npz"
    say(path)
    assert plain.getvalue() == f"{path}\n"


@pytest.mark.parametrize("name", ["[red]run", "[/]", "run [bold]x[/bold]"])
def test_run_folders_with_brackets_work_throughout(name, tmp_path):
    given = {**WAVES, "method": "fomaml", "iterations": 1, "val_every": 0}
    run = str(tmp_path / name)
    done = CliRunner().invoke(app, ["train", "--out", run, *words(given)])
    assert done.exit_code == 0, done.output
    assert f"run folder: {run}" in done.output
    judged = CliRunner().invoke(app, ["evaluate", run, "--tasks", "2"])
    assert judged.exit_code == 0, judged.output
    assert f"{run}/evaluation/summary.json" in judged.output
    again = CliRunner().invoke(app, ["train", "--out", run, *words(given)])
    assert again.exit_code == 1
    assert f"{run} is a run already" in again.output


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "table"), [("train", Settings), ("evaluate", Protocol), ("compare", Protocol)]
)
def test_every_setting_has_its_option_and_a_help_text(command, table):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"})
    assert shown.exit_code == 0
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown.output).split())
    for name, field in table.__dataclass_fields__.items():
        help_ = " ".join(field.metadata["help"].split())
        line = re.search(rf"{flag(name)}\b.*?{re.escape(help_)}(.*?)(?= --|$)", text)
        assert line, f"{flag(name)}: {help_}"
        default = field.metadata["shown"] or field.default
        if default is not None:
            written = ("no", "yes")[default] if isinstance(default, bool) else default
            assert f"[default: ({written})]" in line[1], name
        assert field.metadata["panel"] in text


@pytest.mark.parametrize("command", ["train", "evaluate", "compare"])
def test_every_option_is_a_setting_or_the_commands_own(command):
    known = typer.main.get_command(app).commands[command].params
    own = {"train": {"out", "config", "resume"}, "evaluate": {"run", "out"}}
    table = Settings if command == "train" else Protocol
    expected = own.get(command, {"runs", "out"}) | set(table.__dataclass_fields__)
    assert {p.name for p in known} == expected
    for parameter in known:
        assert getattr(parameter, "help", None), parameter.name
