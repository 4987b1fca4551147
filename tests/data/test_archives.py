"""Unpacking small archives, honest and hostile."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_archives import tar_of, zip_of

from sr.data.archives import ArchiveError, unpack
from sr.errors import SRError

MakePictures = Callable[..., Path]


def contents(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize(("inside", "expected"), [("set", 3), (".", 4), ("set/more", 1)])
def test_unpack(files, tmp_path: Path, name: str, inside: str, expected: int) -> None:
    make = zip_of if name.endswith("zip") else tar_of
    unpack(make(tmp_path / name, files), inside, tmp_path / "new" / "out")
    found = contents(tmp_path / "new" / "out")
    assert len(found) == expected
    prefix = "" if inside == "." else f"{inside}/"
    assert {f: (tmp_path / "new" / "out" / f).read_bytes() for f in found} == {f: files[prefix + f] for f in found}
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(
    "name", ["../x.png", "set/../../x.png", "/x.png", "C:/x.png", "set\\..\\..\\x.png", "\\\\host\\x.png"]
)
def test_paths_that_leave_the_folder(files, tmp_path: Path, kind: str, name: str) -> None:
    make = zip_of if kind == "zip" else tar_of
    archive = make(tmp_path / f"a.{kind}", {**files, name: b"evil"})
    with pytest.raises(ArchiveError, match="leads out of it"):
        unpack(archive, "set", tmp_path / "out" / "set")
    assert contents(tmp_path) == [f"a.{kind}"]


@pytest.mark.parametrize("type", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_tar(files, tmp_path: Path, type: bytes) -> None:
    archive = tar_of(tmp_path / "a.tar", files)
    with tarfile.open(archive, "a") as tar:
        info = tarfile.TarInfo("set/link.png")
        info.type, info.linkname = type, "../../../etc/passwd"
        tar.addfile(info)
    with pytest.raises(ArchiveError, match="a link or device"):
        unpack(archive, "set", tmp_path / "out" / "set")
    assert contents(tmp_path) == ["a.tar"]


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_in_zip(files, tmp_path: Path, mode: int) -> None:
    archive = zip_of(tmp_path / "a.zip", files)
    with zipfile.ZipFile(archive, "a") as zipped:
        info = zipfile.ZipInfo("set/link.png")
        info.create_system, info.external_attr = 3, (mode | 0o777) << 16
        zipped.writestr(info, "/etc/passwd")
    with pytest.raises(ArchiveError, match="a link or device"):
        unpack(archive, "set", tmp_path / "out" / "set")
    assert contents(tmp_path) == ["a.zip"]


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "many", "skipped"])
def test_bombs(tmp_path: Path, kind: str) -> None:
    archive = tmp_path / ("a.tar.gz" if kind == "tar.gz" else "a.zip")
    if kind == "tar.gz":
        tar_of(archive, {"set/a.png": bytes(8 << 20)})
    else:
        names = (
            ["set/a.png"]
            if kind == "zip"
            else ["other/a.txt"]
            if kind == "skipped"
            else [f"set/{i}.png" for i in range(999)]
        )
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name in names:
                zipped.writestr(name, b"" if kind == "many" else bytes(8 << 20))
    assert archive.stat().st_size < 200_000
    with pytest.raises(ArchiveError, match="too much for pictures"):
        unpack(archive, "set", tmp_path / "out" / "set")
    assert contents(tmp_path) == [archive.name]


def damaged(path: Path, files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Names of broken archives, and what the message has to say."""
    (path / "text.zip").write_text("<html>not found</html>")
    yield "text.zip", "neither zip nor tar"
    (path / "empty.tar").write_bytes(b"")
    yield "empty.tar", "neither zip nor tar"
    data = bytearray(zip_of(path / "bits.zip", files).read_bytes())
    data[len(data) // 4] ^= 255
    (path / "bits.zip").write_bytes(data)
    yield "bits.zip", "CRC"
    tar = tar_of(path / "short.tar", files).read_bytes()
    (path / "short.tar").write_bytes(tar[: 512 + len(files["set/0001.png"]) // 2])
    yield "short.tar", "unexpected end of data"
    packed = bytearray(tar_of(path / "sum.tar.gz", files).read_bytes())
    packed[-8] ^= 255  # gzip's checksum of the whole, behind the last member
    (path / "sum.tar.gz").write_bytes(packed)
    yield "sum.tar.gz", "CRC"
    (path / "short.tar.gz").write_bytes(gzip.compress(tar)[:-20])
    yield "short.tar.gz", "damaged"
    zip_of(path / "none.zip", {"other/a.png": b"a", "set/readme.txt": b"text"})
    yield "none.zip", "no pictures in its folder 'set'"


def test_damaged_archives(files, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, message in damaged(tmp_path / "in", files):
        with pytest.raises(ArchiveError, match=message):
            unpack(tmp_path / "in" / name, "set", tmp_path / "out" / "set")
        assert contents(tmp_path / "out") == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_name_that_occurs_twice(tmp_path: Path, files) -> None:
    archive = zip_of(tmp_path / "a.zip", files)
    with zipfile.ZipFile(archive, "a") as zipped:
        zipped.writestr("set/0001.png", b"another")
    with pytest.raises(ArchiveError, match=r"'set/0001\.png' twice"):
        unpack(archive, "set", tmp_path / "out")


def test_unpack_never_merges_and_needs_space(files, tmp_path: Path, monkeypatch) -> None:
    archive = zip_of(tmp_path / "a.zip", files)
    (tmp_path / "out").mkdir()
    with pytest.raises(SRError, match="exists already"):
        unpack(archive, "set", tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("sr.fetch.shutil.disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(SRError, match=r"only 0\.001 MB are free"):
        unpack(archive, "set", tmp_path / "new")
    with pytest.raises(SRError, match="cannot unpack"):
        unpack(tmp_path / "none.zip", "set", tmp_path / "new")
