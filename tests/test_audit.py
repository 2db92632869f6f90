"""`make audit` never calls clean what nobody answered for."""

from __future__ import annotations

import sys

import pytest

from audit import CLEAN, FAULTS, NO_ANSWER, installed, main, verdict

LIBRARIES = ["pillow==11.0", "typing_extensions==4.1"]
PILLOW = {"name": "pillow", "version": "11.0", "vulns": []}
TYPING = {"name": "typing-extensions", "version": "4.1", "vulns": []}
FAULT = {"id": "PYSEC-1", "fix_versions": ["11.1"]}
SKIPPED = {"name": "pillow", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ([PILLOW, TYPING], CLEAN, "none of 2 libraries"),
        ([{**PILLOW, "vulns": [FAULT]}, TYPING], FAULTS, "pillow==11.0: PYSEC-1, mended in 11.1"),
        ([{**PILLOW, "vulns": [FAULT]}], FAULTS, "no answer for 1 of 2"),
        ([SKIPPED, TYPING], NO_ANSWER, "no answer for 1 of 2 libraries (pillow==11.0)"),
        (None, NO_ANSWER, "no answer for 2 of 2"),
    ],
)
def test_the_verdict_counts_what_was_looked_up(found, status, words):
    report = None if found is None else {"dependencies": found}
    code, lines = verdict(report, LIBRARIES)
    assert code == status
    assert words in "\n".join(lines)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the service")
def test_a_service_that_does_not_answer_is_told_apart_from_a_clean_audit(tmp_path, capsys):
    silent = tmp_path / "pip-audit"
    silent.write_text("#!/bin/sh\necho 'Failed to resolve api.osv.dev' >&2\nexit 1\n")
    silent.chmod(0o755)
    assert main(str(silent)) == NO_ANSWER
    assert f"no answer for {len(installed())} of" in capsys.readouterr().out


def test_all_that_is_installed_is_asked_about():
    names = {line.split("==")[0].lower() for line in installed()}
    assert {"torch", "numpy", "pillow", "safetensors"} <= names
    assert not any("+" in line for line in installed())
