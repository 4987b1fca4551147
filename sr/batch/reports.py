"""What the user of a batch sees: lines, progress bars on a terminal, JSON lines, a manifest, a summary."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from sr.batch.run import Record
from sr.errors import SRError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Report:
    """Tells about records as they come; a context manager.

    Args:
        total: number of pictures to come.
        as_json: one JSON line for each picture on standard output, instead of a readable one.
        manifest: file to which the same JSON lines are added, each at once, so that a killed run has told all it did.
        picture_on_stdout: standard output is the picture's, so that lines go to standard error.

    Raises:
        SRError: the manifest cannot be written.
    """

    def __init__(
        self, total: int, *, as_json: bool = False, manifest: Path | None = None, picture_on_stdout: bool = False
    ) -> None:
        self.total = total
        self.as_json = as_json
        self._out: Any = sys.stderr if picture_on_stdout else sys.stdout
        self._manifest = None if manifest is None else _append_to(manifest)
        self._bars = _Bars(total) if sys.stderr is not None and sys.stderr.isatty() else None
        self._counts = dict.fromkeys(("done", "skipped", "failed"), 0)
        self._pixels = 0
        self._start = time.perf_counter()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.close()
        if self._manifest is not None:
            self._manifest.close()

    def tiles(self, done: int, total: int) -> None:
        """Show how far the picture at work is."""
        if self._bars is not None:
            self._bars.tiles(done, total)

    def add(self, record: Record) -> None:
        """Tell what became of one picture.

        Raises:
            SRError: the manifest cannot be written any more.
        """
        self._counts[record.status] += 1
        if record.status == "done" and record.output_size is not None:
            self._pixels += record.output_size[0] * record.output_size[1] * (record.frames or 1)
        line = json.dumps(record.to_dict())  # ASCII: names of files need not be text
        if self._manifest is not None:
            try:
                self._manifest.write(line.encode() + b"\n")
            except OSError as e:
                raise SRError(f"cannot write the manifest {self._manifest.name} ({e.strerror or e})") from e
        for note in record.notes:
            self._print(f"note: {record.input}: {note}", sys.stderr)
        if record.status == "failed":
            error = (record.error or "").removeprefix(f"{record.input} ")
            self._print(f"failed: {record.input}: {error}", sys.stderr)
        if self.as_json:
            self._print(line, self._out)
        elif record.status == "done":
            self._print(_describe(record), self._out)
        if self._bars is not None:
            self._bars.advance()

    def close(self) -> int:
        """Print the summary, if there was more than one picture; gives the status to exit with, 1 for failures."""
        if self._bars is not None:
            self._bars.close()
        rest = self.total - sum(self._counts.values())
        if self.total > 1:
            seconds = time.perf_counter() - self._start
            parts = [f"{count} {status}" for status, count in self._counts.items() if count or status == "done"]
            if rest:
                parts.append(f"{rest} not begun, since the disk is full")
            speed = f", {self._pixels / 1e6 / seconds:.2f} megapixels/s out" if self._pixels else ""
            self._print(f"{', '.join(parts)} in {_duration(seconds)}{speed}", sys.stderr)
        return 1 if self._counts["failed"] or rest else 0

    def _print(self, line: str, stream: Any) -> None:
        if stream is None:
            return
        line = _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)  # names of files may hold anything
        encoding = stream.encoding or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._bars is not None and stream.isatty():
            self._bars.print(line)
            return
        try:
            print(line, file=stream, flush=True)
        except BrokenPipeError:  # whoever read the lines has left (``| head``); the pictures are wanted all the same
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, stream.fileno())
            os.close(sink)


class _Bars:
    """A bar of pictures and one of the tiles of the picture at work, on standard error."""

    def __init__(self, total: int) -> None:
        # Imported here: without a terminal nothing of it is needed, and it takes as long as a small picture.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._pictures: TaskID = self._progress.add_task("pictures", total=total, visible=total > 1)
        self._tiles: TaskID = self._progress.add_task("tiles", total=None, visible=False)
        self._progress.start()

    def tiles(self, done: int, total: int) -> None:
        self._progress.update(self._tiles, completed=done, total=total, visible=total > 1)

    def advance(self) -> None:
        self._progress.advance(self._pictures)

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _append_to(path: Path) -> BinaryIO:
    """A file to add lines to, unbuffered; a line that a killed process left unfinished is ended."""
    try:
        known = path.read_bytes() if path.is_file() else b""
        if known and not known.startswith(b"{"):  # a picture, for instance, which lines would damage
            raise SRError(f"{path} holds something else than a manifest; give --manifest another name")
        file = path.open("ab", buffering=0)
        if known and not known.endswith(b"\n"):
            file.write(b"\n")
    except OSError as e:
        raise SRError(f"cannot write the manifest {path} ({e.strerror or e}); check its folder") from e
    return file


def _describe(record: Record) -> str:
    size, larger = (f"{s[0]}x{s[1]}" for s in (record.input_size or (0, 0), record.output_size or (0, 0)))
    frames = f", {record.frames} frames" if record.frames and record.frames > 1 else ""
    line = f"{record.input} -> {record.output}  {size} -> {larger}{frames}  {record.seconds or 0:.1f} s"
    if record.tile_difference is not None:
        line += f"  tiles differ by at most {255 * record.tile_difference:.4f}/255"
    return line


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
