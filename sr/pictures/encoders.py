"""Files written a few rows at a time: PNG, TIFF and PPM by hand, JPEG by libvips.

libvips cannot be handed rows of every depth and number of channels, while a filter and a deflate stream are all that
PNG and TIFF need.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

import numpy as np
from PIL import Image, PngImagePlugin

from sr.pictures import ifd, metadata
from sr.pictures.metadata import Metadata
from sr.pictures.reader import load_vips

_BLOCK = 2**20  # bytes that are worked on at a time; filters need several times as much
_LEVEL = 4  # of zlib: for photographs within 3 % of level 6, in a third of the time
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


class RowEncoder(Protocol):
    """Writes a picture to a file that it does not close."""

    def write(self, rows: np.ndarray) -> None:
        """The next rows (n, W, C)."""

    def close(self) -> None:
        """Write what follows the last row."""

    def abort(self) -> None:
        """Give up; the file is worthless."""


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _BLOCK // max(1, rows[:1].nbytes))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


class PngRows:
    """PNG, 8 or 16 bits, every row filtered with Paeth's predictor (``level`` 0: neither filtered nor packed)."""

    def __init__(
        self,
        file: BinaryIO,
        width: int,
        height: int,
        channels: int,
        dtype: str,
        extra: Metadata | None = None,
        level: int = _LEVEL,
    ) -> None:
        self._file = file
        self._step = channels * np.dtype(dtype).itemsize
        self._wide = np.dtype(dtype).newbyteorder(">")
        self._above = np.zeros((1, width * self._step), np.uint8)
        self._filtered = level > 0
        self._packer = zlib.compressobj(level)
        file.write(b"\x89PNG\r\n\x1a\n")
        kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
        bits = 8 * self._wide.itemsize
        self._chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
        if extra is not None:  # as Pillow writes it
            kept = metadata.for_pillow(extra, "PNG", width, height)
            for name, data, _ in PngImagePlugin.getchunks(Image.new(_MODES[channels], (1, 1)), **kept):
                if name not in (b"IHDR", b"IDAT", b"IEND"):
                    self._chunk(name, data)

    def _chunk(self, name: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I4s", len(data), name) + data + struct.pack(">I", zlib.crc32(name + data)))

    def write(self, rows: np.ndarray) -> None:
        for block in _blocks(rows):
            raw = np.ascontiguousarray(block.astype(self._wide, copy=False)).view(np.uint8).reshape(len(block), -1)
            lines = np.empty((len(raw), 1 + raw.shape[1]), np.uint8)
            if self._filtered:
                above = np.concatenate([self._above, raw[:-1]])
                self._above = raw[-1:].copy()
                lines[:, 0] = 4
                lines[:, 1:] = raw - _paeth(raw, above, self._step)
            else:
                lines[:, 0] = 0
                lines[:, 1:] = raw
            if packed := self._packer.compress(lines.data):
                self._chunk(b"IDAT", packed)

    def close(self) -> None:
        self._chunk(b"IDAT", self._packer.flush())
        self._chunk(b"IEND", b"")

    def abort(self) -> None:
        pass


def _paeth(rows: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    """Paeth's prediction of each byte of ``rows`` from those to the left, above, and above to the left."""
    left, corner = np.zeros(rows.shape, np.int16), np.zeros(rows.shape, np.int16)
    left[:, step:] = rows[:, :-step]
    corner[:, step:] = above[:, :-step]
    up = above.astype(np.int16)
    to_left, to_up, to_corner = np.abs(up - corner), np.abs(left - corner), np.abs(left + up - 2 * corner)
    best = np.where((to_left <= to_up) & (to_left <= to_corner), left, np.where(to_up <= to_corner, up, corner))
    return best.astype(np.uint8)


class TiffRows:
    """TIFF in deflated strips; BigTIFF where the samples alone have nearly 4 GB. ``dtype`` is any NumPy number."""

    def __init__(
        self, file: BinaryIO, width: int, height: int, channels: int, dtype: str, extra: Metadata | None = None
    ) -> None:
        self._file, self._start = file, file.tell()
        self._kind = np.dtype(dtype).newbyteorder("<")
        stride = width * channels * self._kind.itemsize
        self._big = stride * height > 3_900_000_000
        self._strip = min(height, max(1, _BLOCK // stride))
        self._waiting: list[np.ndarray] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        predicted = self._kind.kind in "iu" and self._kind.itemsize <= 4
        self._predicted = predicted
        form = {"u": 1, "i": 2, "f": 3}[self._kind.kind]
        value = ifd.Value.of
        self._tags: ifd.Tags = metadata.for_tiff(extra or Metadata(), width, height)
        self._tags |= {
            256: value(4, width),
            257: value(4, height),
            258: value(3, *[8 * self._kind.itemsize] * channels),
            259: value(3, 8),
            262: value(3, 1 if channels < 3 else 2),
            277: value(3, channels),
            278: value(4, self._strip),
            284: value(3, 1),
            317: value(3, 2 if predicted else 1),
            339: value(3, *[form] * channels),
        }
        if channels in (2, 4):
            self._tags[338] = value(3, 2)  # alpha that the colours are not multiplied with
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0) if self._big else struct.pack("<2sHI", b"II", 42, 0))

    def write(self, rows: np.ndarray) -> None:
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= self._strip:
            ready = np.concatenate(self._waiting)
            whole = len(ready) // self._strip * self._strip
            for first in range(0, whole, self._strip):
                self._write_strip(ready[first : first + self._strip])
            self._waiting = [ready[whole:].copy()]

    def _write_strip(self, rows: np.ndarray) -> None:
        values = rows.astype(self._kind, copy=False)
        if self._predicted:
            values = values.copy()
            values[:, 1:] -= rows[:, :-1].astype(self._kind, copy=False)
        data = zlib.compress(np.ascontiguousarray(values).data, _LEVEL)
        self._offsets.append(self._file.tell() - self._start)
        self._sizes.append(len(data))
        self._file.write(data)

    def close(self) -> None:
        rest = np.concatenate(self._waiting) if self._waiting else np.zeros((0,))
        if len(rest):
            self._write_strip(rest)
        kind = 16 if self._big else 4
        self._tags |= {273: ifd.Value.of(kind, *self._offsets), 279: ifd.Value.of(kind, *self._sizes)}
        place = self._file.tell() - self._start
        if place % 2:
            self._file.write(b"\0")
            place += 1
        self._file.write(ifd.build(self._tags, place, self._big))
        self._file.seek(self._start + (8 if self._big else 4))
        self._file.write(struct.pack("<Q" if self._big else "<I", place))
        self._file.seek(0, os.SEEK_END)

    def abort(self) -> None:
        pass


class PpmRows:
    """Binary PGM or PPM, 8 or 16 bits."""

    def __init__(
        self, file: BinaryIO, width: int, height: int, channels: int, dtype: str, extra: Metadata | None = None
    ) -> None:
        self._file = file
        self._kind = np.dtype(dtype).newbyteorder(">")
        file.write(b"P%d\n%d %d\n%d\n" % (5 if channels == 1 else 6, width, height, np.iinfo(dtype).max))

    def write(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows.astype(self._kind, copy=False)).data)

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class JpegRows:
    """JPEG 4:4:4: a thread of libvips takes the rows as an unpacked PNG stream through a pipe."""

    def __init__(
        self,
        file: BinaryIO,
        width: int,
        height: int,
        channels: int,
        dtype: str,
        extra: Metadata | None = None,
        quality: int = 95,
    ) -> None:
        self._vips = load_vips()
        self._file, self._quality = file, quality
        twin = io.BytesIO()
        kept = metadata.for_pillow(extra or Metadata(), "JPEG", width, height)
        Image.new(_MODES[channels], (1, 1)).save(twin, "JPEG", **kept)
        self._head: bytes | None = _leading_segments(twin.getvalue())
        self._failed: Exception | None = None
        read_end, write_end = os.pipe()
        self._pipe = os.fdopen(write_end, "wb")
        self._thread = threading.Thread(target=self._encode, args=(read_end,), daemon=True)
        self._thread.start()
        self._png = PngRows(self._pipe, width, height, channels, dtype, level=0)

    def _encode(self, read_end: int) -> None:
        try:
            source = self._vips.Source.new_from_descriptor(read_end)
            target = self._vips.TargetCustom()
            target.on_write(self._take)
            image = self._vips.Image.pngload_source(source, access="sequential", fail_on="error")
            image.jpegsave_target(target, Q=self._quality, subsample_mode="off", keep="none")
        except Exception as exc:
            self._failed = self._failed or exc
        finally:
            while os.read(read_end, 2**16):  # after a failure, else the other end would wait for ever
                pass
            os.close(read_end)

    def _take(self, data: Any) -> int:
        """Pass on what libvips has encoded, with Pillow's leading segments for its own."""
        block = bytes(data)
        try:
            if self._head is not None:
                rest = block[2:]
                if rest[:2] == b"\xff\xe0":
                    rest = rest[2 + int.from_bytes(rest[2:4], "big") :]
                self._file.write(self._head + rest)
                self._head = None
            else:
                self._file.write(block)
        except Exception as exc:  # would be lost in C
            self._failed = exc
            return -1
        return len(block)

    def write(self, rows: np.ndarray) -> None:
        if self._failed is not None:
            raise self._failed
        self._png.write(rows)

    def close(self) -> None:
        self._png.close()
        self._finish()

    def _finish(self) -> None:
        self._pipe.close()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._finish()


def _leading_segments(data: bytes) -> bytes:
    """A JPEG file's start up to its last application or comment segment."""
    end = 2
    while data[end] == 0xFF and (0xE0 <= data[end + 1] <= 0xEF or data[end + 1] == 0xFE):
        end += 2 + int.from_bytes(data[end + 2 : end + 4], "big")
    return data[:end]
