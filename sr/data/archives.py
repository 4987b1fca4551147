"""Unpacking the pictures of a zip or tar archive, without trusting it."""

from __future__ import annotations

import gzip
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NamedTuple

from sr.errors import SRError
from sr.fetch import gigabytes, need_space, progress
from sr.image import IMAGE_SUFFIXES

# Pictures are compressed already: an archive that swells to more than this is no archive of pictures. The slack is for
# small archives, and a file counts as one block of the disk at least.
_RATIO = 2
_SLACK = 1 << 20
_BLOCK = 4096
_CHUNK = 1 << 20
_MOST_PADDING = 64  # chunks after the last member of a tar file
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, RuntimeError, ValueError),  # a short file; an encrypted one; names that are no text
)


class ArchiveError(SRError):
    """The archive is damaged, or holds what no archive of pictures holds."""


class _Member(NamedTuple):
    name: str
    size: int
    is_file: bool
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, inside: str, to: Path) -> None:
    """Unpack the pictures below one folder of an archive.

    Only regular picture files are written, each to a new file that is opened here, so nothing in the archive decides
    where or what a file is. The folder gets its name once it is whole; until then it is called ``to.unpacking``.

    Args:
        archive: a zip file, or a tar file (plain, gzip, bzip2 or xz).
        inside: the folder in the archive; ``.`` for all of it. Sub-folders are kept.
        to: the folder to make; it must not exist.

    Raises:
        ArchiveError: a path that leaves the folder, a link, a device, a name that occurs twice, too much data for the
            size of the archive, no picture at all, or damage.
        SRError: the archive cannot be read, or the pictures cannot be written.
    """
    temporary = to.with_name(to.name + ".unpacking")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.exists():
            raise SRError(f"{to} exists already; move it away")
        need_space(to.parent, archive.stat().st_size)
        shutil.rmtree(temporary, ignore_errors=True)  # of an earlier call that was killed
        temporary.mkdir()
        try:
            _write(archive, PurePosixPath(inside), temporary)
            temporary.replace(to)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except SRError:
        raise
    except _DAMAGE as e:
        raise ArchiveError(f"{archive} is damaged, or neither zip nor tar ({e}); get it again") from e
    except OSError as e:
        raise SRError(f"cannot unpack {archive} into {to} ({e.strerror or e})") from e


def _write(archive: Path, inside: PurePosixPath, to: Path) -> None:
    limit = _RATIO * archive.stat().st_size + _SLACK
    pictures = total = 0
    with progress(f"unpacking {archive.name}", archive.stat().st_size) as show:
        for member in _members(archive):
            path = _checked(archive, member)
            total += max(member.size, _BLOCK)
            if total > limit:
                raise ArchiveError(
                    f"{archive} would unpack to more than {gigabytes(limit)}, too much for pictures; nothing was kept"
                )
            if member.is_file and path.is_relative_to(inside) and _is_picture(path):
                _copy(archive, member, to / path.relative_to(inside))
                pictures += 1
            show(total, None)
    if not pictures:
        raise ArchiveError(f"{archive} holds no pictures in its folder {str(inside)!r}; is it the right archive?")


def _copy(archive: Path, member: _Member, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    source = member.open()
    assert source is not None  # tarfile gives none for what is no regular file
    try:
        target = file.open("xb")
    except FileExistsError as e:
        raise ArchiveError(f"{archive} holds {member.name!r} twice; get another copy of it") from e
    with source, target:
        shutil.copyfileobj(source, target, _CHUNK)
        if target.tell() != member.size:
            raise ArchiveError(f"{archive} ends within {member.name!r}; get it again")


def _checked(archive: Path, member: _Member) -> PurePosixPath:
    windows = PureWindowsPath(member.name)  # knows both separators, and drives
    if windows.anchor or ".." in windows.parts:
        raise ArchiveError(
            f"{archive} holds the path {member.name!r}, which leads out of it; do not trust this archive"
        )
    return PurePosixPath(member.name)


def _is_picture(path: PurePosixPath) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not any(p.startswith((".", "__MACOSX")) for p in path.parts)


def _members(archive: Path) -> Iterator[_Member]:
    """Files and folders in an archive; anything else is refused."""
    with archive.open("rb") as file:
        is_zip = file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
    for member, kind in _zip_members(archive) if is_zip else _tar_members(archive):
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise ArchiveError(f"{archive} holds {member.name!r}, a link or device; do not trust this archive")
        yield member


def _zip_members(archive: Path) -> Iterator[tuple[_Member, int]]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            kind = stat.S_IFDIR if info.is_dir() else stat.S_IFREG
            said = stat.S_IFMT(info.external_attr >> 16)  # 0 where the archive was not made on Unix
            yield _Member(info.filename, info.file_size, not info.is_dir(), partial(zipped.open, info)), said or kind


def _tar_members(archive: Path) -> Iterator[tuple[_Member, int]]:
    with tarfile.open(archive) as tar:
        for info in tar:
            kind = stat.S_IFREG if info.isreg() else stat.S_IFDIR if info.isdir() else 0
            yield _Member(info.name, info.size, info.isreg(), partial(tar.extractfile, info)), kind
        for _ in range(_MOST_PADDING):  # on to the end, where gzip has its checksum
            if tar.fileobj is None or not tar.fileobj.read(_CHUNK):
                break
