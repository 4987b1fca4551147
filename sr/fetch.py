"""Downloading one file so that it is there whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sr.errors import SRError

_CHUNK = 1 << 18
_LONGEST_PAUSE = 60.0
# Answers that another attempt may change; every other 4xx stays what it is.
_PASSING = frozenset({408, 425, 429})


class FetchError(SRError):
    """The server, the network or the file that came is at fault, so that another source may do better."""


def fetch(
    url: str,
    path: str | Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    md5: str | None = None,
    attempts: int = 6,
    pause: float = 1.0,
    timeout: float = 30.0,
) -> Path:
    """Download a file, or do nothing when it is there already and passes the checks.

    What arrives is collected in ``path.part`` and renamed once it is complete and checked; ``path.part.json`` tells
    which version of the file it began with. A later call goes on from there when the server still has that version
    (``If-Range``), and starts over when it does not. Several processes may ask for the same file: one downloads, the
    others wait.

    Args:
        url: ``https://``, ``http://`` or ``file://``.
        path: where the file goes; folders are made.
        size: length in bytes, if known.
        sha256: hexadecimal digest, if known.
        md5: hexadecimal digest, for files of which no better one is published.
        attempts: how many attempts in a row may fail without getting any further.
        pause: seconds before the second attempt; doubled with each failure in a row, up to a minute.
        timeout: seconds without an answer after which an attempt ends.

    Returns:
        ``path``.

    Raises:
        FetchError: the file cannot be had, or is not the one expected.
        SRError: it cannot be written, or does not fit on the disk.
    """
    path = Path(path)
    if urlsplit(url).scheme not in ("https", "http", "file"):
        raise SRError(f"{url!r} is no address to download from; it has to start with https://, http:// or file://")
    checks: dict[str, Any] = {"size": size, "sha256": sha256, "md5": md5}
    lock = path.with_name(path.name + ".lock")
    try:
        if path.exists() and not _fault(path, **checks):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if not path.exists() or _fault(path, **checks):  # another process may have been quicker
                part = _Part(path, url)
                if not part.is_complete:
                    _download(part, size, attempts, pause, timeout)
                if fault := _fault(part.file, **checks):
                    part.discard()
                    raise FetchError(f"what {url} gave {fault}; try again, or another source")
                part.file.replace(path)
                part.discard()
    except OSError as e:
        raise SRError(f"cannot write {path} ({e.strerror or e}); check the folder and the space on its disk") from e
    with contextlib.suppress(OSError):  # Windows keeps a file that another process waits for
        lock.unlink()
    return path


def check_file(path: str | Path, *, size: int | None = None, sha256: str | None = None, md5: str | None = None) -> None:
    """Compare a file with what is known of it.

    Args:
        path: the file.
        size: length in bytes, if known.
        sha256: hexadecimal digest, if known.
        md5: hexadecimal digest, if known.

    Raises:
        SRError: the file is missing, cannot be read, or differs.
    """
    path = Path(path)
    if not path.is_file():
        raise SRError(f"there is no file {path}; check the path")
    try:
        fault = _fault(path, size, sha256, md5)
    except OSError as e:
        raise SRError(f"{path} cannot be read ({e.strerror or e})") from e
    if fault:
        raise SRError(f"{path} {fault}; it is damaged, or another version: download it again")


def need_space(folder: Path, size: float) -> None:
    """Raise :class:`~sr.errors.SRError` unless ``size`` bytes are free on the disk of a folder that exists."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise SRError(f"{gigabytes(size)} are needed in {folder}, but only {gigabytes(free)} are free; make room")


def gigabytes(size: float) -> str:
    """A number of bytes as people say it: ``3.5 GB``, ``12 MB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


@contextlib.contextmanager
def progress(what: str, total: float | None) -> Iterator[Callable[[float, float | None], None]]:
    """A bar on stderr that shows bytes; nothing at all where stderr is not a terminal.

    Args:
        what: the text before the bar.
        total: bytes to expect, if known.

    Yields:
        a function of (bytes so far, bytes to expect).
    """
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, *columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _BrokenOff(Exception):
    """An attempt ended early for a reason that may pass."""


class _Part:
    """The beginning of a file, and which version of it on the server that is."""

    def __init__(self, path: Path, url: str) -> None:
        self.url = url
        self.name = path.name
        self.file = path.with_name(path.name + ".part")
        self._note = path.with_name(path.name + ".part.json")
        self.version: str | None = None
        self.total: int | None = None
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            if note["url"] == url:
                self.version, self.total = note["version"], note["total"]
        except (OSError, ValueError, LookupError, TypeError):  # none, or not whole: start over
            pass

    @property
    def length(self) -> int:
        return self.file.stat().st_size if self.file.exists() else 0

    @property
    def usable(self) -> int:
        """Bytes to go on from: none when the server gave no means to tell whether the file has changed since."""
        return self.length if self.version and (self.total is None or self.length < self.total) else 0

    @property
    def is_complete(self) -> bool:
        """Whether only checking and renaming is left."""
        return self.version is not None and bool(self.total) and self.length == self.total

    def begin(self, version: str | None, total: int | None) -> None:
        """Forget what is there; what comes is the start of this version."""
        self.discard()
        self.version, self.total = version, total
        self._note.write_text(json.dumps({"url": self.url, "version": version, "total": total}), encoding="utf-8")

    def discard(self) -> None:
        self.file.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self.version = self.total = None


def _download(part: _Part, size: int | None, attempts: int, pause: float, timeout: float) -> None:
    failures, furthest = 0, part.length
    with progress(part.name, size) as show:
        while True:
            try:
                return _attempt(part, size, timeout, show)
            except _BrokenOff as e:
                failures = 1 if part.length > furthest else failures + 1
                furthest = max(furthest, part.length)
                if failures >= attempts:
                    kept = f"; the next try goes on from {gigabytes(part.usable)}" if part.usable else ""
                    raise FetchError(f"{part.url} cannot be downloaded: {e}{kept}") from e
            time.sleep(min(pause * 2 ** (failures - 1), _LONGEST_PAUSE))


def _attempt(part: _Part, size: int | None, timeout: float, show: Callable[[float, float | None], None]) -> None:
    """One request; what it brings is appended to the part."""
    request = urllib.request.Request(part.url, headers={"User-Agent": "sr", "Accept-Encoding": "identity"})
    start = part.usable
    if start and part.version:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", part.version)
    with _open(request, part, timeout) as response:
        version = _version(response.headers)
        if response.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            total = None if span is None or span[2] == "*" else int(span[2])
            same = version in (None, part.version) and total == part.total
            if span is None or int(span[1]) != start or not same:
                part.discard()
                raise _BrokenOff("the file changed on the server")
        else:  # a new version, a server that knows no Range, or nothing to go on from
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            start = 0
            part.begin(version, total)
        if size is not None and total not in (None, size):
            part.discard()
            raise FetchError(f"{part.url} is {total} bytes long, not {size}: it is not the file expected")
        need_space(part.file.parent, (total or size or start) - start)
        _append(response, part, total, show)
    if total is not None and part.length != total:
        raise _BrokenOff(f"the connection ended after {gigabytes(part.length)} of {gigabytes(total)}")


def _open(request: urllib.request.Request, part: _Part, timeout: float) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as e:
        reason = f"the server answers {e.code} {e.reason}"
        e.close()
        if e.code == 416:  # it has fewer bytes than are here
            part.discard()
        elif e.code < 500 and e.code not in _PASSING:
            raise FetchError(f"{part.url} cannot be downloaded: {reason}") from e
        raise _BrokenOff(reason) from e
    except urllib.error.URLError as e:
        if isinstance(e.reason, ssl.SSLCertVerificationError) or request.type == "file":
            raise FetchError(f"{part.url} cannot be downloaded: {e.reason}") from e
        raise _BrokenOff(str(e.reason)) from e
    except (OSError, http.client.HTTPException) as e:
        raise _BrokenOff(str(e) or type(e).__name__) from e


def _append(response: Any, part: _Part, total: int | None, show: Callable[[float, float | None], None]) -> None:
    with part.file.open("ab") as file:
        done = file.tell()
        while True:
            try:
                chunk = response.read(_CHUNK)
            except (OSError, http.client.HTTPException) as e:
                raise _BrokenOff(str(e) or type(e).__name__) from e
            if not chunk:
                break
            file.write(chunk)
            done += len(chunk)
            show(done, total)
        file.flush()
        os.fsync(file.fileno())


def _version(headers: Any) -> str | None:
    """What ``If-Range`` may compare: a strong ETag, or else the time of the last change (RFC 9110, 13.1.5)."""
    etag: str | None = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _fault(path: Path, size: int | None, sha256: str | None, md5: str | None) -> str:
    """In which way a file is not the one expected; empty if in none."""
    if path.is_dir():
        raise SRError(f"{path} is a folder, not a file; give another path")
    length = path.stat().st_size
    if size is not None and length != size:
        return f"is {length} bytes long, not {size}"
    for name, expected in (("sha256", sha256), ("md5", md5)):
        if expected is not None:
            digest = hashlib.new(name)
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
            if digest.hexdigest() != expected.lower():
                return f"has the {name} {digest.hexdigest()}, not {expected}"
    return ""
