"""Downloads against a server on loopback that misbehaves in every way that servers do."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sr.errors import SRError
from sr.fetch import FetchError, check_file, fetch

ROOT = Path(__file__).parents[1]
CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
DATE = {"Last-Modified": "Fri, 02 Jan 2026 00:00:00 GMT"}


@dataclass
class Server:
    """What the next requests get, and what they asked for."""

    url: str = ""
    content: bytes = CONTENT
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"v1"'})
    ranges: bool = True
    length: bool = True
    cuts: list[int] = field(default_factory=list)  # each answer ends after that many bytes
    statuses: list[int] = field(default_factory=list)  # refusals that come first
    stall: threading.Event | None = None  # a cut connection stays open until then
    asked: list[int] = field(default_factory=list)  # first byte of each request

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        self.asked.append(start)
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        # A weak ETag promises nothing about bytes, so a server must not let it decide (RFC 9110, 13.1.5).
        current = [v for v in self.headers.values() if not v.startswith("W/")]
        partial = self.ranges and asked and handler.headers.get("If-Range") in (None, *current)
        if partial and start >= len(self.content):
            handler.send_error(416)
            return
        body = self.content[start:] if partial else self.content
        handler.send_response(206 if partial else 200)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        if partial:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.length:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)
        handler.wfile.flush()
        if self.stall:
            self.stall.wait(20)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{httpd.server_port}/file.bin"
        yield state
        httpd.shutdown()
        thread.join()


def get(server: Server, path: Path, **checks: object) -> Path:
    return fetch(server.url, path, pause=0.001, timeout=5, **checks)  # type: ignore[arg-type]


def leftovers(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_downloads_once_and_leaves_only_the_file(server: Server, tmp_path: Path, capsys) -> None:
    path = tmp_path / "new" / "file.bin"
    assert get(server, path, size=len(CONTENT), sha256=SHA256, md5=hashlib.md5(CONTENT).hexdigest()) == path
    assert path.read_bytes() == CONTENT
    assert leftovers(path) == ["file.bin"]
    assert get(server, path, sha256=SHA256) == path
    assert get(server, path) == path
    assert server.asked == [0]
    assert capsys.readouterr() == ("", "")  # no bar where there is no terminal


def test_a_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(CONTENT[:-1] + b"x")
    get(server, path, sha256=SHA256)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("headers", [{"ETag": '"v1"'}, {"ETag": 'W/"v1"', **DATE}, DATE])
def test_goes_on_after_a_broken_connection(server: Server, tmp_path: Path, headers: dict[str, str]) -> None:
    server.headers = headers
    server.cuts = [300_000, 200_000]
    path = get(server, tmp_path / "file.bin")
    assert path.read_bytes() == CONTENT
    assert server.asked == [0, 300_000, 500_000]


def test_weak_etag_is_never_sent_as_a_condition(server: Server, tmp_path: Path) -> None:
    server.headers = {"ETag": 'W/"v1"'}
    server.cuts = [300_000]
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [0, 0]


@pytest.mark.parametrize("version", [{"ranges": False}, {"headers": {}}], ids=["no Range", "no way to tell versions"])
def test_starts_over_where_going_on_is_unsafe(server: Server, tmp_path: Path, version: dict) -> None:
    vars(server).update(version)
    server.cuts = [300_000]
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_server_that_always_breaks_off_ends_after_the_attempts(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [300_000] * 50
    with pytest.raises(FetchError, match=r"connection ended after 0\.3 MB of 1\.05 MB"):
        get(server, tmp_path / "file.bin", attempts=3)
    assert len(server.asked) == 3
    assert not (tmp_path / "file.bin").exists()


def test_a_later_call_goes_on(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000]
    with pytest.raises(FetchError, match=r"goes on from 0\.3 MB"):
        get(server, tmp_path / "file.bin", attempts=1)
    assert (tmp_path / "file.bin.part").stat().st_size == 300_000
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [0, 300_000]
    assert leftovers(tmp_path / "file.bin") == ["file.bin"]


@pytest.mark.parametrize("honest", [True, False], ids=["If-Range obeyed", "If-Range ignored"])
def test_file_that_changed_meanwhile_is_not_stitched(server: Server, tmp_path: Path, honest: bool) -> None:
    server.cuts = [300_000]
    with pytest.raises(FetchError):
        get(server, tmp_path / "file.bin", attempts=1)
    server.content, server.headers = CONTENT[::-1], {"ETag": '"v2"'}
    if not honest:
        original = server.answer

        def ignore_condition(handler: http.server.BaseHTTPRequestHandler) -> None:
            del handler.headers["If-Range"]
            original(handler)

        server.answer = ignore_condition  # type: ignore[method-assign]
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT[::-1]
    assert server.asked == ([0, 300_000] if honest else [0, 300_000, 0])


def test_file_that_became_shorter(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000]
    with pytest.raises(FetchError):
        get(server, tmp_path / "file.bin", attempts=1)
    server.content = b"short"
    assert get(server, tmp_path / "file.bin").read_bytes() == b"short"
    assert server.asked == [0, 300_000, 0]


def test_the_beginning_of_another_address_is_not_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    note = {"url": "http://other", "version": '"v1"', "total": len(CONTENT)}
    (tmp_path / "file.bin.part.json").write_text(json.dumps(note))
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [0]


@pytest.mark.parametrize("note", ["", "{", "[]", '{"url": 1}'])
def test_a_note_that_cannot_be_read_means_starting_over(server: Server, tmp_path: Path, note: str) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    (tmp_path / "file.bin.part.json").write_text(note)
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT


def test_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    """The process was killed after the last byte, before the file got its name."""
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    note = {"url": server.url, "version": '"v1"', "total": len(CONTENT)}
    (tmp_path / "file.bin.part.json").write_text(json.dumps(note))
    assert get(server, tmp_path / "file.bin", sha256=SHA256).read_bytes() == CONTENT
    assert server.asked == []


def test_passing_refusals_are_retried_and_others_not(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429, 500]
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT
    server.statuses = [404, 404]
    with pytest.raises(FetchError, match="answers 404"):
        get(server, tmp_path / "other.bin")
    assert len(server.statuses) == 1
    assert leftovers(tmp_path / "other.bin") == ["file.bin", "other.bin.lock"]


def test_waits_longer_from_failure_to_failure(server: Server, tmp_path: Path, monkeypatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("sr.fetch.time.sleep", waited.append)
    server.statuses = [503] * 9
    with pytest.raises(FetchError, match="503"):
        fetch(server.url, tmp_path / "file.bin", attempts=9)
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("checks", "message"),
    [({"size": 5}, "1048576 bytes long, not 5"), ({"sha256": "0" * 64}, "sha256"), ({"md5": "0" * 32}, "md5")],
)
def test_wrong_file_is_refused_and_removed(server: Server, tmp_path: Path, checks: dict, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        get(server, tmp_path / "file.bin", **checks)
    assert leftovers(tmp_path / "file.bin") == ["file.bin.lock"]
    assert len(server.asked) == 1


def test_wrong_size_is_found_without_the_server_telling_it(server: Server, tmp_path: Path) -> None:
    server.length = False
    with pytest.raises(FetchError, match="not 5"):
        get(server, tmp_path / "file.bin", size=5)
    assert get(server, tmp_path / "file.bin", size=len(CONTENT)).read_bytes() == CONTENT


def test_server_that_falls_silent(server: Server, tmp_path: Path) -> None:
    server.cuts, server.stall = [300_000], threading.Event()
    with pytest.raises(FetchError, match="timed out"):
        fetch(server.url, tmp_path / "file.bin", attempts=1, timeout=0.2)
    server.stall.set()
    assert get(server, tmp_path / "file.bin").read_bytes() == CONTENT


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="cannot be downloaded"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", attempts=2, pause=0.001)


def test_disk_too_small(server: Server, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("sr.fetch.shutil.disk_usage", lambda folder: usage._replace(free=1_000_000))
    with pytest.raises(SRError, match=r"1\.05 MB are needed in .* only 1 MB are free") as caught:
        get(server, tmp_path / "file.bin")
    assert not isinstance(caught.value, FetchError)  # another source would not help
    assert not (tmp_path / "file.bin").exists()


def test_file_address(tmp_path: Path) -> None:
    source = tmp_path / "a b.bin"
    source.write_bytes(CONTENT)
    path = fetch(source.as_uri(), tmp_path / "copy.bin", sha256=SHA256)
    assert path.read_bytes() == CONTENT
    with pytest.raises(FetchError, match="cannot be downloaded"):
        fetch((tmp_path / "none").as_uri(), tmp_path / "other")


def test_messages_for_paths(server: Server, tmp_path: Path) -> None:
    for url in ("ftp://host/file", "file.bin", "data:,x"):
        with pytest.raises(SRError, match="no address to download from"):
            fetch(url, tmp_path / "x")
    with pytest.raises(SRError, match="is a folder"):
        get(server, tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SRError, match="cannot write"):
        get(server, tmp_path / "file" / "below")


def test_check_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1, and RFC 1321, appendix A.5.
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    check_file(path, size=3, sha256=sha256.upper(), md5="900150983cd24fb0d6963f7d28e17f72")
    with pytest.raises(SRError, match="3 bytes long, not 4"):
        check_file(path, size=4)
    with pytest.raises(SRError, match=f"{sha256}, not 00"):
        check_file(path, sha256="00")
    with pytest.raises(SRError, match="no file"):
        check_file(tmp_path)


def test_killed_process_leaves_a_part_that_is_used(server: Server, tmp_path: Path) -> None:
    server.cuts, server.stall = [400_000], threading.Event()
    path, part = tmp_path / "file.bin", tmp_path / "file.bin.part"
    code = f"from sr.fetch import fetch; fetch({server.url!r}, {str(path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        # The client reads in blocks of 256 KiB, so the first of them is what a killed process has.
        until = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size >= 1 << 18) and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
        server.stall.set()
    assert not path.exists()
    assert get(server, path, sha256=SHA256).read_bytes() == CONTENT
    assert server.asked[1] == server.asked[-1] >= 1 << 18


def test_callers_that_want_the_same_file_share_one_download(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    server.cuts, server.stall = [len(CONTENT)], threading.Event()
    threads = [threading.Thread(target=get, args=(server, path), kwargs={"sha256": SHA256}) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    server.stall.set()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == CONTENT
    assert server.asked == [0]
