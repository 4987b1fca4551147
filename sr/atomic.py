"""Files that appear under their names complete, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sr.errors import SRError


def part_prefix(path: Path) -> str:
    """What the names begin with that :func:`atomic` gives to unfinished files; tells what a killed process left."""
    return f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}."


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name ``path`` when the block ends, replacing what has it; none if the block fails.

    Until then it has a hidden name in the same folder, which no other process uses.

    Raises:
        SRError: the folder cannot be written, the disk is full, or another ``OSError`` of the block.
    """
    part = path.parent / f"{part_prefix(path)}{secrets.token_hex(4)}.part"
    try:
        with part.open("x+b") as file:
            yield file
        part.replace(path)
    except OSError as exc:
        raise SRError(f"cannot write {path} ({exc.strerror or exc}); check the folder's permissions and space") from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


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
