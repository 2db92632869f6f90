"""``ibaml bench quality``: which method is best on your data, each with its best settings?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ibaml.cli.progress import counting
from ibaml.cli.screen import errors_as_sentences, say


def quality(
    data: Annotated[str, typer.Argument(help="As for `ibaml train --data`.")],
    out: Annotated[Path, typer.Option(help="Folder for runs, table and figures.")] = Path(
        "runs/quality"
    ),
    **given: Any,
) -> None:
    """Compare methods, each at its best settings, on your data.

    Every method has the same training tasks. Its settings are chosen by the nll of validation
    classes, from a small list; one temperature a method is fitted there; test classes are looked
    at once. A stopped comparison goes on with the same command.

    Two cores, minutes: ibaml bench quality glyphs --quick

    A GPU: ibaml bench quality photos/ --splits splits.json --tasks 32 --minutes 25

    See docs/quality.md.
    """
    from ibaml.machine import keep_freed_memory
    from ibaml.quality import QualityOptions, compare, write, written

    keep_freed_memory()
    with errors_as_sentences():
        options = QualityOptions.of(given)
        out.mkdir(parents=True, exist_ok=True)  # fails now, not at the end
        with counting() as count:
            comparison = compare(data, options, out, count)
        files = write(comparison, out)
    for line in written(comparison):
        say(line)
    for file in files:
        say(f"  {file}")
