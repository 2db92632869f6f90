"""Which of the installed libraries have known faults? Asked of the services that know: PyPI's, then
OSV's.

    make audit          # python tests/audit.py .audit/bin/pip-audit

Exit status 0: every library was looked up, and none has a known fault. 1: some have. 3: nobody
answered for some libraries, which says nothing about them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

CLEAN, FAULTS, NO_ANSWER = 0, 1, 3


def installed() -> list[str]:
    """Names and versions as they are published: without +cpu and the like."""
    found = {
        d.metadata["Name"]: d.version.split("+")[0] for d in metadata.distributions()
        if d.metadata["Name"] not in ("ibaml", "pip", "setuptools")
    }  # fmt: skip
    return sorted(f"{name}=={version}" for name, version in found.items())


def asked(tool: str, service: str, libraries: list[str]) -> dict[str, Any] | None:
    """What pip-audit reports; None if the service did not answer."""
    with tempfile.TemporaryDirectory() as folder:
        (listed := Path(folder) / "libraries.txt").write_text("\n".join(libraries) + "\n")
        done = subprocess.run(
            [tool, "--vulnerability-service", service, "--requirement", str(listed), "--no-deps",
             "--disable-pip", "--format", "json", "--progress-spinner", "off"],
            capture_output=True, text=True,
        )  # fmt: skip
    try:
        return json.loads(done.stdout)
    except ValueError:
        return None


def verdict(report: dict[str, Any] | None, libraries: list[str]) -> tuple[int, list[str]]:
    """The exit status, and what to say. (pip-audit itself calls clean what it skipped.)"""
    looked_up = {
        f"{d['name']}=={d['version']}".lower().replace("_", "-"): d.get("vulns", [])
        for d in (report or {}).get("dependencies", [])
        if "version" in d
    }
    lines = [
        f"{name}: {v['id']}, mended in {', '.join(v['fix_versions']) or 'no version'}"
        for name, known in looked_up.items() for v in known
    ]  # fmt: skip
    unknown = [n for n in libraries if n.lower().replace("_", "-") not in looked_up]
    if unknown:
        few = ", ".join(unknown[:5]) + (" …" if len(unknown) > 5 else "")
        lines.append(f"no answer for {len(unknown)} of {len(libraries)} libraries ({few})")
    if any(looked_up.values()):
        return FAULTS, lines
    if unknown:
        return NO_ANSWER, [*lines, "nothing is known about these: ask where the service answers"]
    return CLEAN, [f"none of {len(libraries)} libraries has a known fault"]


def main(tool: str) -> int:
    libraries = installed()
    status, lines = NO_ANSWER, []
    for service in ("pypi", "osv"):
        status, lines = verdict(asked(tool, service, libraries), libraries)
        print(f"{service}:", *lines, sep="\n  ")
        if status != NO_ANSWER:
            break
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
