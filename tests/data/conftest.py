"""Fixtures of the tests about data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def files(make_pictures: Callable[..., Path]) -> dict[str, bytes]:
    """For an archive: three pictures in ``set/``, one deeper; a text; macOS's junk; other pictures."""
    root = make_pictures("made", ["set/0001.png", "set/0002.png", "set/more/0003.png", "other/0004.png"])
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*.png"))}
    shutil.rmtree(root)
    return files | {"set/readme.txt": b"text", "__MACOSX/set/._0001.png": b"junk", "set/._0001.png": b"junk"}
