"""The pack: every picture of a set, decoded once, in one memory-mapped file that all processes of a machine share.

A pack is eight bytes of magic, the length of the index, the pixels (uint8, rows of RGB), and the index (JSON). It is
written under a temporary name and renamed when it is whole, under a lock, so that whatever has its name is complete,
and processes that start together build it once. What is known of each file (size, time of change) is in the index: a
pack in which anything differs is written anew, with the pixels of the pictures that stayed copied over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import track
from torch import Tensor

from sr.data.folders import Picture, PictureSet
from sr.errors import SRError

log = logging.getLogger(__name__)

_MAGIC = b"srpack1\n"
_HEAD = len(_MAGIC) + 8  # magic, position of the index
_MIB = 2**20


def default_folder() -> Path:
    """Where packs lie unless the user says otherwise: ``$XDG_CACHE_HOME/sr`` or ``~/.cache/sr``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sr"


@dataclass
class _Entry:
    """One picture in a pack: what it was made from, and where its pixels are."""

    made_from: list[Any]
    gt: tuple[int, int, int]  # position in the file, height, width
    lq: tuple[int, int, int] | None
    error: str | None = None


class Pack:
    """An open pack; pictures come in the order of the set. It can be sent to other processes, which map the file too.

    Args:
        path: the file.
        entries: where the pictures are.
    """

    def __init__(self, path: Path, entries: list[_Entry]) -> None:
        self.path = path
        self._entries = entries
        # Copy-on-write, which nothing ever does: torch warns about memory that is read-only.
        self._pixels = np.memmap(path, mode="c", dtype=np.uint8).view(np.ndarray)  # whose slices are cheap

    def __len__(self) -> int:
        return len(self._entries)

    def __getstate__(self) -> tuple[Path, list[_Entry]]:
        return self.path, self._entries

    def __setstate__(self, state: tuple[Path, list[_Entry]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def gt(self, i: int) -> np.ndarray:
        """Ground truth of picture ``i``, uint8 (H, W, 3), RGB, a view of the file."""
        return _view(self._pixels, self._entries[i].gt)

    def lq(self, i: int) -> np.ndarray:
        """Low-quality input of picture ``i``, uint8 (h, w, 3), RGB, a view of the file."""
        place = self._entries[i].lq
        if place is None:
            raise RuntimeError(f"{self.path} was packed without LQ")
        return _view(self._pixels, place)


def open_pack(pictures: PictureSet, folder: Path | None = None, lq: bool = True) -> Pack:
    """The pack of a set, built first if there is none or if it is out of date.

    Pictures that cannot be decoded raise, or, if the set was prepared with ``on_error="skip"``, are taken out of it.

    Args:
        pictures: a prepared set.
        folder: where packs are kept; default: :func:`default_folder`.
        lq: whether to hold LQ as well as GT; without, LQ is to be made by a degradation.

    Raises:
        SRError: a picture cannot be read, or the pack not be written (no space, no permission).
    """
    folder = default_folder() if folder is None else folder
    path = folder / f"{pictures.name}_{_identity(pictures, lq)}.pack"
    wanted = _layout(pictures, lq)
    with _os_errors(path):
        entries = _read(path)
        if not _fits(entries, wanted, pictures):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                entries = _read(path)  # another process may have built it by now
                if not _fits(entries, wanted, pictures):
                    entries = _build(path, pictures, wanted, entries)
        assert entries is not None
        pack = Pack(path, [e for e in entries if e.error is None])
    pictures.drop({i: e.error for i, e in enumerate(entries) if e.error is not None})
    return pack


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise SRError(
            f"cannot write the pack {path} ({e.strerror or e});\n"
            "choose another place with data.cache_dir, or do without: data.cache false"
        ) from e


def _identity(pictures: PictureSet, lq: bool) -> str:
    """What tells the packs of different sets apart: where the pictures are, scale, with or without LQ."""
    folders = [os.path.commonpath([p.gt.resolve().parent for p in pictures.pictures])]
    partners = [p.lq.resolve().parent for p in pictures.pictures if p.lq is not None]
    if lq and partners:
        folders.append(os.path.commonpath(partners))
    digest = hashlib.sha256("\0".join(map(str, folders)).encode()).hexdigest()[:10]
    return f"x{pictures.scale}_{digest}" if lq else f"gt{pictures.scale}_{digest}"


def _layout(pictures: PictureSet, lq: bool) -> list[_Entry]:
    """Where each picture of the set goes."""
    entries, end = [], _HEAD
    for picture in pictures.pictures:
        (h, w), s = picture.gt_size, pictures.scale
        gt, end = (end, h, w), end + 3 * h * w
        small = None
        if lq:
            small, end = (end, h // s, w // s), end + 3 * (h // s) * (w // s)
        entries.append(_Entry(_made_from(picture, lq), gt, small))
    return entries


def _made_from(picture: Picture, lq: bool) -> list[Any]:
    """Name, and size and time of change of the files: if they are the same, so are the pixels."""
    facts: list[Any] = [picture.name]
    for file in (picture.gt, picture.lq if lq else None):
        if file is None:
            facts.append(None)
            continue
        try:
            stat = file.stat()
        except OSError as e:
            raise SRError(f"{file} was there a moment ago and is not any more ({e.strerror})") from e
        facts.append([file.suffix, stat.st_size, stat.st_mtime_ns])
    return [*facts, list(picture.gt_size)]


def _read(path: Path) -> list[_Entry] | None:
    """The index of a pack; ``None`` if there is no pack, or one that this version does not understand."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if len(head) < _HEAD or not head.startswith(_MAGIC):
                return None
            file.seek(int.from_bytes(head[len(_MAGIC) :], "little"))
            return [
                _Entry(e["made_from"], tuple(e["gt"]), e["lq"] and tuple(e["lq"]), e["error"])
                for e in json.loads(file.read())
            ]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # damaged after it was written: built anew
        return None


def _fits(entries: list[_Entry] | None, wanted: list[_Entry], pictures: PictureSet) -> bool:
    """Whether a pack holds exactly what is wanted; faulty pictures are tried again unless they are to be skipped."""
    if entries is None or [(e.made_from, e.gt, e.lq) for e in entries] != [(e.made_from, e.gt, e.lq) for e in wanted]:
        return False
    return pictures.on_error == "skip" or all(e.error is None for e in entries)


def _build(path: Path, pictures: PictureSet, entries: list[_Entry], old: list[_Entry] | None) -> list[_Entry]:
    """Write a pack whole, or raise and leave nothing."""
    for stale in path.parent.glob(f"{path.name}.*.part"):  # of a build that was killed: we hold the lock
        stale.unlink()
    last = entries[-1]
    size = _end(last.lq or last.gt)
    log.info("packing %d pictures of %r: %.1f MiB in %s", len(entries), pictures.name, size / _MIB, path)
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise SRError(
            f"the pack of {pictures.name!r} takes {size / _MIB:.0f} MiB, but {path.parent} has {free / _MIB:.0f} free;"
            "\nchoose another place with data.cache_dir, or do without: data.cache false"
        )
    kept = {json.dumps(e.made_from): e for e in old or [] if e.error is None}
    before = np.memmap(path, mode="r", dtype=np.uint8) if kept else np.empty(0, np.uint8)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            _fill(file, pictures, entries, kept, before)
            file.seek(0, os.SEEK_END)
            end = max(file.tell(), size)
            file.seek(end)
            file.write(json.dumps([vars(e) for e in entries]).encode())
            file.seek(0)
            file.write(_MAGIC + end.to_bytes(8, "little"))
            file.flush()
            os.fsync(file.fileno())
        del before  # Windows replaces no file that is mapped
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return entries


def _fill(
    file: BinaryIO, pictures: PictureSet, entries: list[_Entry], kept: dict[str, _Entry], before: np.ndarray
) -> None:
    """Decode the pictures in threads and write their pixels, or copy those of an earlier pack."""
    lock = threading.Lock()

    def write(place: tuple[int, int, int], pixels: np.ndarray) -> None:
        with lock:  # by seek and write, not through a map, where a full disk would kill the process
            file.seek(place[0])
            file.write(pixels.data)

    def work(i: int) -> None:
        entry = entries[i]
        same = kept.get(json.dumps(entry.made_from))
        if same is not None:
            write(entry.gt, _view(before, same.gt))
            if entry.lq is not None and same.lq is not None:
                write(entry.lq, _view(before, same.lq))
            return
        try:
            if entry.lq is None:
                gt = pictures.read_gt(i)
            else:
                lq, gt = pictures.pair(i)
                write(entry.lq, _rows(lq))
            write(entry.gt, _rows(gt))
        except SRError as e:
            entry.error = str(e)

    # In a forked process PyTorch makes its thread pool anew at the first call; threads that do it at once fail.
    torch.set_num_threads(torch.get_num_threads())
    quiet = not Console(stderr=True).is_terminal
    with ThreadPoolExecutor(min(16, max(2, os.cpu_count() or 2))) as pool:
        jobs = [pool.submit(work, i) for i in range(len(entries))]
        try:
            for job in track(jobs, f"packing {pictures.name}", console=Console(stderr=True), disable=quiet):
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    errors = [e.error for e in entries if e.error is not None]
    if errors and pictures.on_error == "raise":
        more = f"\n(and {len(errors) - 1} more pictures cannot be read)" if len(errors) > 1 else ""
        raise SRError(f"{errors[0]}{more}")


def _view(pixels: np.ndarray, place: tuple[int, int, int]) -> np.ndarray:
    start, h, w = place
    return pixels[start : start + 3 * h * w].reshape(h, w, 3)


def _end(place: tuple[int, int, int]) -> int:
    start, h, w = place
    return start + 3 * h * w


def _rows(picture: Tensor) -> np.ndarray:
    """uint8 (3, H, W) -> contiguous (H, W, 3)."""
    return picture.permute(1, 2, 0).contiguous().numpy()


def as_picture(pixels: np.ndarray) -> Tensor:
    """uint8 (H, W, 3) array of a pack -> (3, H, W) tensor on the same memory, not contiguous."""
    return torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)
