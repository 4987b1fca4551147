"""Files that appear under their names complete, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from sr.errors import SRError

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]


def _prefix(name: str) -> str:
    """What the names of a file's unfinished versions begin with."""
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}."


def _lock(file: BinaryIO) -> bool:
    """Claim an open file, until it is closed or this process ends; whether nobody else has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # claimed, or on a file system that cannot tell
        return False
    return True


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name ``path`` when the block ends, replacing what has it; none if the block fails.

    Until then it has a hidden name in the same folder, which no other process uses.

    Raises:
        SRError: the folder cannot be written, the disk is full, or another ``OSError`` of the block.
    """
    part = path.parent / f"{_prefix(path.name)}{secrets.token_hex(4)}.part"
    try:
        with part.open("x+b") as file:
            _lock(file)  # for remove_unfinished
            yield file
        part.replace(path)
    except OSError as exc:
        raise SRError(f"cannot write {path} ({exc.strerror or exc}); check the folder's permissions and space") from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Remove what killed processes left of the files ``names``; what another process is writing stays.

    Raises:
        OSError: the folder cannot be read or changed.
    """
    own = {_prefix(name) for name in names}
    for part in folder.glob(".*.part"):
        if f"{part.name.rsplit('.', 2)[0]}." in own:
            # Finished in the meantime; or being written, on Windows; or another user's.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                with part.open("r+b") as file:
                    is_left = _lock(file)
                if is_left:
                    part.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all; its folder is made.

    Raises:
        SRError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SRError(f"cannot make the folder {path.parent} ({exc.strerror or exc}); choose another") from exc
    with atomic(path) as file:
        file.write(text.encode())
