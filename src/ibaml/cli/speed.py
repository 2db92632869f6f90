"""``ibaml bench training``: how fast is a whole run here, and where does its time go?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ibaml.cli.progress import counting
from ibaml.cli.screen import errors_as_sentences, say


def training(
    out: Annotated[
        Path, typer.Option(help="JSON file of all figures; the text goes beside it.")
    ] = Path("runs/training.json"),
    **given: Any,
) -> None:
    """Measure whole runs of `ibaml train`, and where their time goes.

    A row per run: tasks a second, the meta-step's own rate beside it, and the milliseconds of an
    iteration on the device, the host, data, validation, checkpoints and logs. Options that take
    several values have commas between them.

    On a GPU, the head with few and many tasks, then everything adapted:

    ibaml bench training --methods head --tasks 8,32 --evaluate 1000

    ibaml bench training --methods all,maml,imaml-all,abml --shots 1 --evaluate 1000

    From command to first step on 60,000 images: ibaml bench training --start --images 60000

    See docs/speed.md.
    """
    from ibaml.machine import keep_freed_memory
    from ibaml.speed import SpeedOptions, measure, written

    keep_freed_memory()
    with errors_as_sentences():
        options = SpeedOptions.of(given)
        out.parent.mkdir(parents=True, exist_ok=True)  # fails now, not at the end
        with counting() as count:
            measured = measure(options, count)
        files = measured.write(out)
    for line in written(measured):
        say(line)
    for file in files:
        say(f"  {file}")
