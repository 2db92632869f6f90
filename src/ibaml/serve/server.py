"""Who may ask the page what, and how long may it take? HTTP on this machine's loopback address.

Every request needs the token of the printed address (afterwards in a cookie that scripts cannot
read), one of this server's own names as Host, and, if it changes something, this server as Origin:
other web sites that are open in the same browser reach nothing. Limits are in `ibaml.untrusted`.
"""

from __future__ import annotations

import asyncio
import errno
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from types import FrameType
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ibaml import untrusted
from ibaml.serve.session import Session
from ibaml.tasks.errors import DataError

LOOPBACK = "127.0.0.1"
_NAMES = (LOOPBACK, "localhost")
_PARTS = {  # of the page
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CLOSE = {"Connection": "close"}  # the rest of the request is not read


class Page:
    """A session at an address of this machine.

    Args:
        port: of the address; 0 takes a free one.
        at_once: photographs that are read at the same time.

    Attributes:
        address: what to open in a browser, token included.
    """

    def __init__(self, session: Session, port: int = 0, *, at_once: int = 1) -> None:
        self._session = session
        self._socket = _listening(port)
        self.port = int(self._socket.getsockname()[1])
        self._token = secrets.token_urlsafe(32)
        self.address = f"http://{LOOPBACK}:{self.port}/?token={self._token}"
        self._reading = asyncio.Semaphore(at_once)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app(),
                http=_Prompt,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                limit_concurrency=untrusted.CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )

    def run(self) -> None:
        """Answer requests until `stop`, Ctrl-C or SIGTERM."""
        with _quiet_end():
            self._server.run([self._socket])

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True

    def app(self) -> ASGIApp:
        """The application, behind its guard."""
        session = self._session

        async def state(request: Request) -> Response:
            shown = await run_in_threadpool(session.state)
            return JSONResponse({**shown, "upload": untrusted.UPLOAD})

        async def thumbnail(request: Request) -> Response:
            number = request.path_params["number"]
            content = await run_in_threadpool(session.thumbnail, number)
            return Response(content, media_type="image/jpeg")

        async def save(request: Request) -> Response:
            content = await run_in_threadpool(session.saved)
            return Response(
                content,
                media_type="application/octet-stream",
                headers={"Content-Disposition": 'attachment; filename="shop.ibaml"'},
            )

        async def picture(request: Request) -> Response:
            given = request.query_params
            name, where = given.get("name", ""), given.get("class")
            if where is not None and not re.fullmatch(r"[0-9]{1,15}", where):
                raise _Refusal(400, "A class is a number.")
            label = None if where is None else int(where)
            data = await _body(request, untrusted.UPLOAD)
            async with self._reading:
                number = await run_in_threadpool(session.add, data, name, label)
            return JSONResponse({"id": number})

        shown = {path: _part(*part) for path, part in _PARTS.items()} | {
            "/state": state,
            "/thumbnail/{number:int}": thumbnail,
            "/save": save,
        }
        done = {
            "/picture": picture,
            "/class": _told(session.add_class, "name"),
            "/rename": _told(session.rename, "class", "name"),
            "/move": _told(session.move, "id", "to"),
            "/remove": _told(session.remove, "ids"),
            "/remove-class": _told(session.remove_class, "class"),
            "/undo": _told(session.undo),
        }
        inner = Starlette(
            routes=[
                *(Route(path, one, methods=["GET"]) for path, one in shown.items()),
                *(Route(path, one, methods=["POST"]) for path, one in done.items()),
            ],
            exception_handlers={DataError: _sentence, _Refusal: _refused, 500: _broken},
        )
        return _Guard(inner, self._token, self.port)


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} is in use, by another `ibaml serve` perhaps"
        elif error.errno == errno.EACCES:
            why = f"port {port} is for the system"
        else:
            raise
        raise DataError(f"{why}: choose another one, --port 0 takes a free one") from error
    except OverflowError:
        raise DataError(f"a port is a number from 0 to 65535, got {port}") from None


@contextmanager
def _quiet_end() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more; that is no error here."""
    try:
        before = {
            number: signal.signal(number, _ignored) for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not in the main thread, which alone hears signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignored(number: int, frame: FrameType | None) -> None:
    pass


class _Prompt(H11Protocol):
    """A connection that says nothing is closed; uvicorn waits for the first request for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(untrusted.ARRIVAL, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


# --- who may ask ---------------------------------------------------------------------------------


class _Guard:
    """Lets those requests through that come from the page, or bring its token."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}".encode() for name in _NAMES}
        self._cookie = f"ibaml-{port}=".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        app = self._app
        if (why := self._wrong_sender(scope["method"], headers)) is not None:
            app = PlainTextResponse(why, 403, _CLOSE)
        elif scope["path"] == "/" and self._is_token(_token_of(scope["query_string"])):
            pass  # the printed address
        elif not self._has_cookie(headers):
            why = "Open the address that `ibaml serve` printed, with its token."
            app = PlainTextResponse(why, 403, _CLOSE)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                if scope["path"] == "/" and message["status"] == 200:
                    cookie = self._cookie + self._token + b"; Path=/; HttpOnly; SameSite=Strict"
                    added.append((b"set-cookie", cookie))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await app(scope, receive, guarded)

    def _wrong_sender(self, method: str, headers: dict[bytes, list[bytes]]) -> str | None:
        host = headers.get(b"host", [])
        if len(host) != 1 or host[0].lower() not in self._hosts:
            return "This page is at 127.0.0.1 alone; the request is for another host."
        origins = headers.get(b"origin", [])
        if any(origin != b"http://" + host[0].lower() for origin in origins):
            return "The request comes from another site."
        if method not in ("GET", "HEAD") and not origins:
            return "A request that changes something says where it comes from (Origin)."
        return None

    def _is_token(self, given: bytes | None) -> bool:
        return given is not None and secrets.compare_digest(given, self._token)

    def _has_cookie(self, headers: dict[bytes, list[bytes]]) -> bool:
        """Cookies of other ports stand beside ours, in any form."""
        each = [one.strip() for line in headers.get(b"cookie", []) for one in line.split(b";")]
        own = [one[len(self._cookie) :] for one in each if one.startswith(self._cookie)]
        return any(self._is_token(value) for value in own)


def _token_of(query: bytes) -> bytes | None:
    given = parse_qs(query.decode("latin-1")).get("token", [])
    return given[0].encode() if len(given) == 1 else None


# --- what is asked -------------------------------------------------------------------------------

Do = Callable[..., Any]
Endpoint = Callable[[Request], Awaitable[Response]]


class _Refusal(Exception):
    """A request that is not read further."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def _part(name: str, kind: str) -> Endpoint:
    content = (files("ibaml.serve") / "page" / name).read_bytes()

    async def part(request: Request) -> Response:
        return Response(content, media_type=kind)

    return part


def _told(do: Do, *fields: str) -> Endpoint:
    """Calls a function with the fields of a JSON object."""

    async def told(request: Request) -> Response:
        try:
            given = untrusted.parsed_json(await _body(request, untrusted.REQUEST))
            values = [given[name] for name in fields]
        except (untrusted.Refused, KeyError, TypeError, IndexError) as error:
            raise _Refusal(400, f"The request needs JSON with {', '.join(fields)}.") from error
        if not all(_fits(*each) for each in zip(fields, values, strict=True)):
            raise _Refusal(400, f"The request has another type than {', '.join(fields)} needs.")
        return JSONResponse({"done": await run_in_threadpool(do, *values)})

    return told


def _fits(name: str, value: Any) -> bool:
    if name == "ids":
        return isinstance(value, list) and all(type(one) is int for one in value)
    if name == "name":
        return isinstance(value, str)
    return type(value) is int or (name == "to" and value is None)  # to no class


async def _body(request: Request, most: int) -> bytes:
    """What a request brings, if it is not too much and does not take too long."""
    too_much = _Refusal(413, f"More than {most // untrusted.KB:,} kB in one request.")
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > most:
        raise too_much
    data = bytearray()
    try:
        async with asyncio.timeout(untrusted.ARRIVAL):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise too_much
    except TimeoutError as error:
        seconds = untrusted.ARRIVAL
        raise _Refusal(408, f"The request took more than {seconds} seconds to come.") from error
    except ClientDisconnect as error:
        raise _Refusal(400, "The request broke off.") from error
    return bytes(data)


async def _sentence(request: Request, error: Exception) -> Response:
    """What a person asked for cannot be: an ordinary answer, which the page shows."""
    return JSONResponse({"refused": str(error)})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refusal)
    return JSONResponse({"refused": str(error)}, error.status, _CLOSE)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"refused": f"This is a fault of ibaml: {type(error).__name__}."}, 500)
