"""How is a stranger's picture decoded without harm? In a process that may be ended.

A file of some kilobytes can keep a decoder busy for minutes, or ask for gigabytes. Here another
process opens it, with limited memory; one that takes too long is killed, and the next picture gets
a fresh one. It returns what `ibaml.tasks.images.open_picture` does, and a thumbnail, which is
encoded anew: no byte of the file itself is ever shown.
"""

from __future__ import annotations

import io
import os
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Timer
from typing import IO

import numpy as np

from ibaml import untrusted
from ibaml.tasks.images import ImageError, open_picture

THUMBNAIL = 320  # pixels of its longer side
_ASK = struct.Struct(">III")  # least side; bytes of name and picture
_TOLD = struct.Struct(">IIII")  # height, width; bytes of thumbnail and refusal


@dataclass(frozen=True)
class Decoded:
    """Pixels, uint8 (H, W, 3), and a small JPEG of them."""

    pixels: np.ndarray
    thumbnail: bytes


class Decoder:
    """One process that decodes, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes, name: str, least: int) -> Decoded:
        """The picture in an image file; an `ImageError` says why there is none.

        Args:
            least: as in `open_picture`.
        """
        process, late = self.start(), Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = Timer(untrusted.DECODING, end)
        timer.start()
        try:
            return _asked(process, data, name, least)
        except ImageError:
            raise
        except (OSError, EOFError, ValueError) as error:  # ValueError: closed by another thread
            self.close()
            why = "its decoder broke down"
            if late.is_set():
                why = f"decoding it takes more than {untrusted.DECODING} seconds: save it smaller"
            raise ImageError(f"{name}: not a readable image ({why})") from error
        finally:
            timer.cancel()

    def start(self) -> subprocess.Popen[bytes]:
        """The process, which is started unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not written yet goes nowhere
                    pipe.close()
            self._process = None


class Decoders:
    """Several of them, for several threads."""

    def __init__(self, count: int) -> None:
        self._all = [Decoder() for _ in range(count)]
        self._free: queue.SimpleQueue[Decoder] = queue.SimpleQueue()
        for one in self._all:
            self._free.put(one)

    @contextmanager
    def one(self) -> Iterator[Decoder]:
        """A decoder for this thread; waits for it."""
        decoder = self._free.get()
        try:
            yield decoder
        finally:
            self._free.put(decoder)

    def start(self) -> None:
        for one in self._all:
            one.start()

    def close(self) -> None:
        for one in self._all:
            one.close()


def _asked(process: subprocess.Popen[bytes], data: bytes, name: str, least: int) -> Decoded:
    assert process.stdin is not None
    assert process.stdout is not None
    label = name.encode(errors="replace")
    process.stdin.write(_ASK.pack(least, len(label), len(data)) + label)
    process.stdin.write(data)
    process.stdin.flush()
    height, width, small, refusal = _TOLD.unpack(_exactly(process.stdout, _TOLD.size))
    if refusal:
        raise ImageError(_exactly(process.stdout, refusal).decode())
    thumbnail = _exactly(process.stdout, small)
    pixels = np.frombuffer(_exactly(process.stdout, height * width * 3), np.uint8)
    return Decoded(pixels.reshape(height, width, 3), thumbnail)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data


# --- the other process ---------------------------------------------------------------------------


def main() -> None:
    """Decode what comes in, until nothing does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    _limit_memory()
    coming, going = sys.stdin.buffer, sys.stdout.buffer
    while head := coming.read(_ASK.size):
        least, name, size = _ASK.unpack(head)
        label = coming.read(name).decode()
        data = coming.read(size)
        try:
            picture = open_picture(data, label, least=least)
            pixels = np.asarray(picture)
            small = _thumbnail(pixels)
        except (ImageError, MemoryError) as error:
            text = (
                str(error) if isinstance(error, ImageError) else f"{label}: needs too much memory"
            )
            words = text.encode()
            going.write(_TOLD.pack(0, 0, 0, len(words)) + words)
        else:
            going.write(_TOLD.pack(*pixels.shape[:2], len(small), 0) + small)
            going.write(np.ascontiguousarray(pixels).data)
        going.flush()


def _thumbnail(pixels: np.ndarray) -> bytes:
    from PIL import Image

    small = Image.fromarray(pixels)  # without anything but pixels: no EXIF, no color profile
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=82)
    return content.getvalue()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows has none
        return
    resource.setrlimit(resource.RLIMIT_AS, (untrusted.DECODER, untrusted.DECODER))


if __name__ == "__main__":
    main()
