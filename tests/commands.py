"""How does a test use the command line? As a person does, in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from ibaml.cli import app


def invoke(*arguments: str | Path) -> str:
    """The output of a command that succeeds."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def refused(*arguments: str | Path) -> str:
    """The sentence of a command that fails, on one line."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), f"a traceback: {done.exception!r}"
    assert done.output.strip().startswith("Error: ")
    return " ".join(done.output.split())
