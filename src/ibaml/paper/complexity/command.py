"""``python -m ibaml.complexity --json FILE``: measure with torch and numpy alone.

Then ``ibaml bench complexity --from FILE`` shows the file as a table, a CSV and a picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ibaml.fields import fields_of
from ibaml.paper.complexity.findings import written
from ibaml.paper.complexity.measure import measure
from ibaml.paper.complexity.sweep import Sweep


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ibaml.complexity", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="File for the points.")
    for field in fields_of(Sweep).values():
        kind = int if field.kind is int and not field.several else str
        parser.add_argument(field.flag, type=kind, help=field.help)
    given = vars(parser.parse_args())
    path: Path = given.pop("json")

    def progress(done: int, total: int, what: str) -> None:
        print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

    try:
        sweep = Sweep.of(given)
    except ValueError as error:
        parser.error(str(error))
    measured = measure(sweep, progress)
    measured.write_json(path)
    print(measured.headline)
    for point in measured.points:
        shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in point.row().values())
        print("  ".join(v for v in shown if v))
    for line in written(measured):
        print(line)
