"""Makes archives of a few files, for tests."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path


def zip_of(path: Path, files: dict[str, bytes]) -> Path:
    """Write a zip file; names in the archive -> contents."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    """Write a tar file, compressed if its name ends in ``.gz``; names in the archive -> contents."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path
