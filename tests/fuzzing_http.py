"""A page of `ibaml serve` to which files are sent as requests: it answers, or hangs up."""

from __future__ import annotations

import io
import socket
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from ibaml import Classifier

if TYPE_CHECKING:
    from ibaml.serve.server import Page
from ibaml.tasks.images import decode

HEAD = (
    b"Host: 127.0.0.1:PORT\r\nCookie: ibaml-PORT=TOKEN\r\nOrigin: http://127.0.0.1:PORT\r\n"
    b"Connection: close\r\n"
)


def pixels() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def post(path: bytes, body: bytes) -> bytes:
    return (
        b"POST " + path + b" HTTP/1.1\r\n" + HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    )


VALID = (
    *(b"GET " + path + b" HTTP/1.1\r\n" + HEAD + b"\r\n"
      for path in (b"/", b"/?token=TOKEN", b"/state", b"/save", b"/thumbnail/1")),
    post(b"/picture?name=a.png", pixels()),
    post(b"/picture?name=a.png&class=1", pixels()),
    post(b"/class", b'{"name": "disc"}'),
    post(b"/rename", b'{"class": 1, "name": "dots"}'),
    post(b"/move", b'{"id": 2, "to": 1}'),
    post(b"/remove", b'{"ids": [2]}'),
    post(b"/undo", b"{}"),
    b"POST /class HTTP/1.1\r\n" + HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"nam\r\n0\r\n\r\n",
)  # fmt: skip


@cache
def page() -> Page:
    """One page for all requests; it ends with the process."""
    from ibaml.serve.server import Page
    from ibaml.serve.session import Read, Session

    def read(data: bytes, name: str) -> Read:
        small = torch.from_numpy(decode(data, name, 8)).flatten().float()
        return Read(small[:64] / 255, b"")

    made = Page(Session(Classifier(source={"kind": "pictures"}), read))
    threading.Thread(target=made.run, daemon=True).start()
    return made


def received(line: socket.socket, seconds: float) -> bytes:
    """What comes until the end, or until nothing came for so long."""
    line.settimeout(seconds)
    pieces = []
    try:
        while piece := line.recv(2**16):
            pieces.append(piece)
    except TimeoutError:
        if seconds > 10:
            raise
    return b"".join(pieces)


def send(path: Path) -> bytes:
    """The first line of the answer; empty if there is none. 500 and above are faults."""
    to = page()
    token = to.address.partition("=")[2].encode()
    request = path.read_bytes().replace(b"PORT", b"%d" % to.port).replace(b"TOKEN", token)
    try:
        with socket.create_connection(("127.0.0.1", to.port), timeout=30) as line:
            line.sendall(request)
            answer = received(line, 0.2)
            line.shutdown(socket.SHUT_WR)  # no more will come, though the server may expect it
            answer += received(line, 30)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        return b""  # it was refused before it was all sent, and the connection closed
    first = answer.partition(b"\r\n")[0]
    if b"Traceback" in answer or (first and first[9:10] not in b"234"):
        raise AssertionError(answer[:500])
    return first
