"""How does a dataset file reach the disk whole, verified, and only once?

It is written to `<name>.part`, continued after an interruption, and renamed only when its SHA-256
is the expected one. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse, InvalidURL
from pathlib import Path
from typing import IO
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

Report = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all (None if unknown)."""

BACKOFF = 0.5  # seconds before the second attempt, doubled before each one after it
MAX_BYTES = 10 * 2**30  # where the size is unknown
CHUNK = 2**18
SCHEMES = ("http", "https")
TRANSIENT = (
    TimeoutError,
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
    HTTPException,
)


class DownloadError(RuntimeError):
    """The file could not be had, or is not the expected one."""


@dataclass(frozen=True)
class Remote:
    """A file to download.

    Args:
        url: http or https.
        checksum: the expected SHA-256, or MD5 where that is what is published; None if none is
            known: the file is then not verified, `fetch` warns, and does not continue what an
            earlier run left.
        size: bytes, where known; a server that sends more is cut off.
        name: the file name to store, the last part of the url's path unless given.
    """

    url: str
    checksum: str | None
    size: int | None = None
    name: str | None = None

    @property
    def algorithm(self) -> str:
        """Which digest the checksum is, by its length."""
        return "md5" if self.checksum is not None and len(self.checksum) == 32 else "sha256"

    def __post_init__(self) -> None:
        if self.checksum is not None:
            object.__setattr__(self, "checksum", self.checksum.lower())
            if not re.fullmatch("[0-9a-f]{32}|[0-9a-f]{64}", self.checksum):
                raise ValueError(
                    "checksum must be an MD5 or SHA-256 in hexadecimal digits, got "
                    f"{self.checksum!r}"
                )


def fetch(
    remote: Remote,
    folder: Path,
    report: Report | None = None,
    *,
    attempts: int = 4,
    timeout: float = 30.0,
) -> Path:
    """The path of the file in the folder, downloaded unless it is there already.

    Args:
        remote: what to download.
        folder: where to, made if need be.
        report: called as the bytes arrive; the count falls back to 0 if the download starts over.
        attempts: how often to try when the connection drops or the server answers 5xx.
        timeout: seconds to wait for the server, each time.

    Raises:
        DownloadError: saying what happened and, where it helps, how to put the file there by hand.
    """
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    try:
        scheme = urlsplit(remote.url).scheme
    except ValueError:
        scheme = ""
    if scheme not in SCHEMES:
        raise DownloadError(f"not an http or https url: {remote.url}")
    path = Path(folder) / _file_name(remote)
    part = path.with_name(path.name + ".part")
    if remote.checksum is None:
        warnings.warn(f"{path.name} has no known checksum: it is not verified", stacklevel=2)
    if path.is_file() and _wrong(path, remote) is None:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if remote.checksum is not None and part.is_file() and _wrong(part, remote) is None:
        os.replace(part, path)
        return path
    for _ in range(2):
        continued = _download(remote, path, part, report, attempts, timeout)
        wrong = _wrong(part, remote)
        if wrong is None:
            os.replace(part, path)
            return path
        part.unlink()
        if not continued:
            break
    raise DownloadError(f"{remote.url} is not the expected file: {wrong}")


class _Failure(Exception):
    """A request that came to nothing, and whether to try again."""

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


class _TooMuch(Exception):
    """More bytes than allowed."""


class _Redirects(request.HTTPRedirectHandler):
    """Only to http and https, and never from https to http."""

    def redirect_request(
        self,
        req: request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in SCHEMES or (req.type, scheme) == ("https", "http"):
            raise HTTPError(newurl, code, f"redirection to {newurl} is not allowed", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> request.OpenerDirector:
    """Knows http and https only, where urllib's own also opens files, ftp and data."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _file_name(remote: Remote) -> str:
    """A plain file name: no folders, no '..', no leading dot."""
    name = unquote(urlsplit(remote.url).path) if remote.name is None else remote.name
    name = re.sub(r"[^\w.+-]", "_", re.split(r"[/\\]", name)[-1])
    name = re.sub(r"\.{2,}", ".", name).strip(".")
    if not name:
        raise DownloadError(f"no file name in {remote.name or remote.url!r}: give Remote a name")
    return name


def _wrong(path: Path, remote: Remote) -> str | None:
    """What is wrong with a file, None if nothing."""
    found_size = path.stat().st_size
    if remote.checksum is None:
        if remote.size in (None, found_size):
            return None
        return f"expected {remote.size} bytes, found {found_size}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, remote.algorithm).hexdigest()
    if found == remote.checksum:
        return None
    return f"expected {remote.algorithm} {remote.checksum}, found {found} ({found_size} bytes)"


def _download(
    remote: Remote,
    path: Path,
    part: Path,
    report: Report | None,
    attempts: int,
    timeout: float,
) -> bool:
    """Fills the part; True if its last bytes were added to some from an earlier answer."""
    limit = MAX_BYTES if remote.size is None else remote.size
    version = None
    for attempt in range(attempts):
        if attempt:
            time.sleep(BACKOFF * 2 ** (attempt - 1))
        start = part.stat().st_size if part.is_file() else 0
        if start >= limit or (remote.checksum is None and version is None):
            start = 0  # unverified, parts of two versions could not be told from one whole file
        try:
            response, start = _open(remote.url, start, version, timeout)
            with response:
                if remote.checksum is None:
                    version = _version(response)
                _receive(response, start, part, remote.size, limit, report)
            return start > 0
        except _TooMuch:
            part.unlink(missing_ok=True)
            raise DownloadError(f"{remote.url} sends more than the {limit} bytes allowed") from None
        except _Failure as failure:
            if not failure.again or attempt == attempts - 1:
                raise DownloadError(_by_hand(remote, path, failure, attempt + 1)) from failure
    raise AssertionError("unreachable")


def _open(url: str, start: int, version: str | None, timeout: float) -> tuple[HTTPResponse, int]:
    """An answer and the byte it begins at: `start`, or 0 if the server does not continue there."""
    headers = {"User-Agent": "ibaml"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if version is not None:
            headers["If-Range"] = version
    try:
        response: HTTPResponse = _opener().open(
            request.Request(url, headers=headers), timeout=timeout
        )
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:
            return _open(url, 0, None, timeout)
        again = error.code >= 500 or error.code in (408, 429)
        raise _Failure(f"HTTP {error.code} {error.reason}", again) from error
    except (OSError, HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, URLError) else error
        again = isinstance(cause, TRANSIENT) and not isinstance(cause, InvalidURL)
        raise _Failure(str(cause) or type(cause).__name__, again) from error
    if response.status == 200:
        return response, 0
    if start and response.status == 206:
        if response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            return response, start
        response.close()
        return _open(url, 0, None, timeout)
    response.close()
    raise _Failure(f"HTTP {response.status} {response.reason}", again=False)


def _version(response: HTTPResponse) -> str | None:
    """What tells this version of the file from another, if the server says."""
    tag: str | None = response.headers.get("ETag")
    if tag is not None and not tag.startswith("W/"):
        return tag
    return response.headers.get("Last-Modified")


def _receive(
    response: HTTPResponse,
    start: int,
    part: Path,
    size: int | None,
    limit: int,
    report: Report | None,
) -> None:
    """Writes an answer to the part from byte `start` on."""
    total = size if response.length is None else start + response.length
    if total is not None and total > limit:
        raise _TooMuch
    got = start
    with part.open("ab" if start else "wb") as file:
        while True:
            if report is not None:
                report(got, total)
            try:
                chunk = response.read1(min(CHUNK, limit - got + 1))
            except (OSError, HTTPException) as error:
                raise _Failure(f"dropped after {got} bytes: {error}", again=True) from error
            if not chunk:
                break
            if got + len(chunk) > limit:
                raise _TooMuch
            file.write(chunk)
            got += len(chunk)
    if total is not None and got < total:
        raise _Failure(f"dropped after {got} of {total} bytes", again=True)


def _by_hand(remote: Remote, path: Path, failure: _Failure, tried: int) -> str:
    times = f" ({tried} attempts)" if tried > 1 else ""
    check = f" ({remote.algorithm} {remote.checksum})" if remote.checksum else ""
    there = "; the file there now is not the expected one" if path.is_file() else ""
    return (
        f"could not download {remote.url}: {failure}{times}. "
        f"Download it by hand and save it as {path}{check}{there}"
    )
