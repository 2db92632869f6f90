"""`ibaml serve` as a person starts it: a process, its address, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Served:
    """A running `ibaml serve`; ``address`` is what it printed."""

    def __init__(self, *words: object, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ibaml", "serve", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "IBAML_CACHE": str(cache), "OMP_NUM_THREADS": "2", "COLUMNS": "200"},
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=\S+", self.said)
        assert found, self.said + self.process.stdout.read()
        self.address, self.port = found[0], int(found[1])

    def end(self, how: signal.Signals = signal.SIGINT) -> str:
        """Stop it as Ctrl-C does; what it said until then."""
        self.process.send_signal(how)
        said, _ = self.process.communicate(timeout=20)
        return self.said + said


@contextmanager
def served(*words: object, cache: Path) -> Iterator[Served]:
    one = Served(*words, cache=cache)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
