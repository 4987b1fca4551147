"""Upscale many files: decoding, the network and encoding at the same time, in bounded memory, past bad files."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from sr.atomic import remove_unfinished
from sr.batch.inputs import STREAM, Job
from sr.errors import SRError
from sr.inference import Upscaler
from sr.pictures import (
    Picture,
    RowReader,
    RowWriter,
    left_out,
    needs_rows,
    output_format,
    probe,
    read_picture,
    write_picture,
)

Progress = Callable[[int, int], None]

_AHEAD = 4  # pictures asked for before the network needs them
# Pixels of pictures or of their results, whichever have more, that may be at work at a time, from decoding to encoding;
# a larger picture is alone.
_IN_FLIGHT = 64_000_000


@dataclass
class Record:
    """What became of one picture.

    Attributes:
        input: the file; ``-``: standard input.
        output: the file; ``-``: standard output.
        status: ``done``, ``skipped`` (the output was there) or ``failed``.
        model: name of the weights.
        input_size: (width, height).
        output_size: (width, height).
        frames: 1, or how many an animation has.
        seconds: what the network took.
        tile_difference: the largest difference between the result in tiles and in one piece, in [0, 1], if asked for.
        notes: what changed on the way (converted from CMYK ...).
        error: why it failed, in one line.
        finished: when, in ISO 8601.
    """

    input: str
    output: str
    status: str
    model: str
    input_size: tuple[int, int] | None = None
    output_size: tuple[int, int] | None = None
    frames: int | None = None
    seconds: float | None = None
    tile_difference: float | None = None
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    finished: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without what is not known."""
        return {key: value for key, value in asdict(self).items() if value not in (None, [])}


class Batch:
    """Runs jobs; what goes wrong with one picture is its record, and the next one is done.

    Args:
        upscaler: does the work, on the thread that iterates over :meth:`run`.
        model: name of its weights, for the records.
        quality: of lossy formats, 1 to 100.
        stream_suffix: the suffix of what is written to standard output.
        skip_existing: leave out what has its result already. Files appear complete, so a result that is there is whole.
        check_tiles: compute each picture in one piece as well, and record the largest difference.
        progress: called with the tiles done and the tiles of the picture at work.
    """

    def __init__(
        self,
        upscaler: Upscaler,
        model: str,
        *,
        quality: int | None = None,
        stream_suffix: str = ".png",
        skip_existing: bool = False,
        check_tiles: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.upscaler = upscaler
        self.model = model
        self.quality = quality
        self.stream_suffix = stream_suffix
        self.skip_existing = skip_existing
        self.check_tiles = check_tiles
        self.progress = progress

    def run(self, jobs: Sequence[Job]) -> Generator[Record, None, None]:
        """Do the jobs; each record appears when its picture is written, under its name and whole.

        Close the iterator (:func:`contextlib.closing`) when leaving early: what is being written is finished first.
        Ends early if the disk is full, since nothing more could be written.

        Raises:
            SRError: an output folder cannot be made.
        """
        _make_folders(jobs)
        todo = deque(jobs)
        reading: deque[tuple[Job, Future[_Item]]] = deque()
        writing: deque[tuple[Record, Future[None]]] = deque()
        budget = _Budget(_IN_FLIGHT)
        reader = ThreadPoolExecutor(1, "read")  # one, so that the budget is taken in the order of the jobs
        writers = ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 2)), "write")
        try:
            while todo or reading or writing:
                while todo and len(reading) < _AHEAD:
                    job = todo.popleft()
                    if self.skip_existing and job.target is not None and job.target.exists():
                        yield _finished(self._skip(job, job.target), None)
                    else:
                        reading.append((job, reader.submit(self._read, job, budget)))
                if writing and (not reading or writing[0][1].done()):
                    record, written = writing.popleft()
                    error = written.exception()
                    yield _finished(record, error)
                    if _is_disk_full(error):
                        todo.clear()
                        reading.clear()
                elif reading:
                    job, read = reading.popleft()
                    record = self._record(job, "done")
                    try:
                        writing.append((record, self._upscale(record, read.result(), budget, writers)))
                    except Exception as e:
                        writing.append((record, _failed(e)))
        finally:
            budget.close()
            reader.shutdown(cancel_futures=True)
            writers.shutdown(cancel_futures=True)

    def _record(self, job: Job, status: str) -> Record:
        return Record(str(job.source or STREAM), str(job.target or STREAM), status, self.model)

    def _skip(self, job: Job, target: Path) -> Record:
        """The record of a picture that has a result; a note tells if that is one of another scale."""
        record = self._record(job, "skipped")
        try:
            source, there = probe(job.source or b""), probe(target)
            width, height = self.upscaler.out_size(source.width, source.height)
        except SRError:  # whatever it is, it is kept
            return record
        if (there.width, there.height) != (width, height):
            found = f"{there.width}x{there.height}"
            record.notes.append(f"{target} is kept, though it is {found}, not {width}x{height}; remove it to redo it")
        return record

    def _read(self, job: Job, budget: _Budget) -> _Item:
        """On the reader's thread: the header, room in memory, and then the picture."""
        source = sys.stdin.buffer.read() if job.source is None else job.source
        info = probe(source)
        size = self.upscaler.out_size(info.width, info.height)
        kind, _ = output_format(info, *size, self.stream_suffix if job.target is None else job.target.suffix)
        pixels = max(size[0] * size[1], info.width * info.height) * info.frames
        budget.take(pixels)
        try:
            # A texture that wraps needs its first and its last rows at a time.
            in_rows = needs_rows(info, *size) and job.target is not None and not self.upscaler.wrap
            picture: Picture | RowReader = RowReader(source) if in_rows else read_picture(source)
        except BaseException:
            budget.give(pixels)
            raise
        return _Item(picture, job.target, size, kind, pixels)

    def _upscale(self, record: Record, item: _Item, budget: _Budget, writers: ThreadPoolExecutor) -> Future[None]:
        """Compute what was read, and have it written."""
        info = item.picture.info
        record.input_size, record.output_size, record.frames = (info.width, info.height), item.size, info.frames
        record.notes = [*item.picture.notes, *left_out(item.picture.metadata, item.format)]
        start = time.perf_counter()
        try:
            if isinstance(item.picture, RowReader):
                if self.check_tiles:
                    record.notes.append("too large for one piece, with which its tiles could be compared")
                finish: Callable[[], None] = self._upscale_rows(item, item.picture, writers).close
            else:
                if self.check_tiles:
                    record.tile_difference = self.upscaler.check_tiles(item.picture.frames[0])
                    start = time.perf_counter()
                frames = [self.upscaler(frame, progress=self.progress) for frame in item.picture.frames]
                finish = partial(self._write, replace(item.picture, frames=frames), item)
        except BaseException:
            budget.give(item.pixels)
            raise
        record.seconds = round(time.perf_counter() - start, 3)
        written = writers.submit(finish)
        pixels = item.pixels  # not the item, which would stay in memory until the record is told
        written.add_done_callback(lambda _: budget.give(pixels))
        return written

    def _upscale_rows(self, item: _Item, reader: RowReader, writers: ThreadPoolExecutor) -> RowWriter:
        """Read, upscale and write a picture in rows; each part is encoded while the next is computed."""
        assert item.target is not None
        writer = RowWriter.like(reader, item.target, *item.size, item.format, quality=self.quality)
        encoding: Future[None] | None = None
        try:
            with reader:
                shape = (reader.width, reader.height, reader.channels, reader.dtype)
                for rows in self.upscaler.rows(reader.read, *shape, progress=self.progress):
                    if encoding is not None:
                        encoding.result()
                    encoding = writers.submit(writer.write, rows)
            if encoding is not None:
                encoding.result()
        except BaseException:
            if encoding is not None:
                encoding.exception()  # waits: the file is still being written to
            writer.abort()
            raise
        return writer

    def _write(self, picture: Picture, item: _Item) -> None:
        """On a writer's thread."""
        if item.target is not None:
            write_picture(picture, item.target, item.format, self.quality)
        else:
            try:
                write_picture(picture, sys.stdout.buffer, item.format, self.quality)
                sys.stdout.buffer.flush()
            except OSError as e:
                raise SRError(f"cannot write to standard output ({e.strerror or e})") from e


@dataclass
class _Item:
    """A picture that was read, or is open to be read in rows.

    Attributes:
        picture: the one or the other.
        target: file to be written; ``None``: standard output.
        size: (width, height) of the result.
        format: of the result.
        pixels: what it takes of the budget.
    """

    picture: Picture | RowReader
    target: Path | None
    size: tuple[int, int]
    format: str
    pixels: int


class _Budget:
    """Pixels that may be in memory at a time; a picture that exceeds it by itself is alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._closed = False
        self._changed = threading.Condition()

    def take(self, amount: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._used or self._used + amount <= self._limit)
            self._used += amount

    def give(self, amount: int) -> None:
        with self._changed:
            self._used -= amount
            self._changed.notify_all()

    def close(self) -> None:
        """Let whoever waits go on: nobody will give anything any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _make_folders(jobs: Sequence[Job]) -> None:
    """Make the folders of results, and remove what a killed run left of the same results."""
    names: dict[Path, set[str]] = defaultdict(set)
    for job in jobs:
        if job.target is not None:
            names[job.target.parent].add(job.target.name)
    for folder, own in names.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder, own)
        except OSError as e:
            raise SRError(f"cannot use the folder {folder} ({e.strerror or e}); choose another with -o") from e


def _failed(error: Exception) -> Future[None]:
    failed: Future[None] = Future()
    failed.set_exception(error)
    return failed


def _finished(record: Record, error: BaseException | None) -> Record:
    """The record with its end."""
    record.finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if error is not None:
        kind = "" if isinstance(error, SRError) else f"{type(error).__name__}: "
        record.status, record.error = "failed", kind + " ".join(str(error).split())
    return record


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
