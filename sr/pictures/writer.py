"""Encoding: which format a result gets and whether it holds it, whole pictures, and rows of huge stills."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, features

from sr.atomic import atomic
from sr.errors import SRError
from sr.image import FORMATS
from sr.pictures import encoders
from sr.pictures.gif import gif_frames
from sr.pictures.header import Info
from sr.pictures.metadata import Metadata, for_pillow
from sr.pictures.reader import Picture, RowReader
from sr.pictures.samples import Samples

_FORMATS = FORMATS | {".avif": "AVIF", ".gif": "GIF", ".jpe": "JPEG"}
#: Suffixes (lower case) that results can have.
OUTPUT_SUFFIXES = frozenset(_FORMATS)
#: Suffixes (lower case) of the files that a folder is searched for.
INPUT_SUFFIXES = OUTPUT_SUFFIXES | {".dib", ".j2k", ".jp2", ".jpx", ".mpo", ".tga"}
_USUAL = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "TIFF": ".tif", "BMP": ".bmp", "GIF": ".gif", "AVIF": ".avif"}
_USUAL["PPM"] = ".ppm"
# libjpeg, which all programs share, stops at 65,500 pixels, a little below the format's 65,535
_MOST_PIXELS = {"JPEG": 65_500, "WEBP": 16_383, "GIF": 65_535, "AVIF": 32_768, "PNG": 2**31 - 1}
_ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")
_ALPHA = ("PNG", "TIFF", "WEBP", "AVIF", "GIF")
_DEEP = ("PNG", "TIFF", "PPM")
_ROWS: dict[str, Callable[..., encoders.RowEncoder]] = {
    "PNG": encoders.PngRows,
    "TIFF": encoders.TiffRows,
    "PPM": encoders.PpmRows,
    "JPEG": encoders.JpegRows,
}
# Of zlib, in Pillow's hands, whose default is 6: encoding must not take long beside a small network.
_PNG_LEVEL = 2
_MANY_PIXELS = 64_000_000  # of a result; the whole way needs some 20 bytes for each


def format_of(suffix: str) -> str | None:
    """The format that a suffix (``.jpg``) stands for; ``None``: none that is written."""
    return _FORMATS.get(suffix.lower())


def output_format(info: Info, width: int, height: int, suffix: str | None = None) -> tuple[str, str]:
    """Format and suffix of a result, decided before any work.

    Args:
        info: the input.
        width: pixels of the result.
        height: likewise.
        suffix: the one that the user wants (``.png``, any case), or ``None`` for that of the input's own format,
            whatever its name says. A still GIF then becomes PNG, and so does what cannot be written.

    Raises:
        SRError: an unknown suffix, or a format that cannot hold the result; the message names one that can.
    """
    if suffix:
        suffix = "." + suffix.lstrip(".")
        if suffix.lower() not in _FORMATS:
            known = " ".join(sorted(OUTPUT_SUFFIXES))
            raise SRError(f"pictures are not written with the suffix {suffix!r}; use one of {known}")
        kind = _FORMATS[suffix.lower()]
    else:
        kind = info.format if info.format in _USUAL else "PNG"
        if (kind == "GIF" and not info.animated) or (info.dtype == "float32" and kind != "TIFF"):
            kind = "TIFF" if info.dtype == "float32" else "PNG"
        suffix = ".pgm" if kind == "PPM" and info.channels == 1 else _USUAL[kind]
    if trouble := _trouble(kind, width, height, info.channels, info.dtype, info.animated):
        raise SRError(trouble)
    return kind, suffix


def _trouble(kind: str, width: int, height: int, channels: int, dtype: str, animated: bool) -> str | None:
    """Why the format cannot hold such a picture, and which can."""
    better = "TIFF (.tif)" if dtype == "float32" else "PNG (.png)"
    if kind == "AVIF" and not features.check("avif"):
        return "this installation of Pillow cannot write AVIF; use PNG (.png), or a newer Pillow"
    if animated and kind not in _ANIMATED:
        return f"{kind} cannot hold an animation; use GIF (.gif), WebP (.webp) or PNG (.png)"
    if max(width, height) > _MOST_PIXELS.get(kind, 2**32 - 1):
        most = _MOST_PIXELS.get(kind, 2**32 - 1)
        return f"{kind} holds at most {most:,} pixels a side, and the result has {width:,}x{height:,}; use {better}"
    if kind == "BMP" and width * height * 3 > 2**32 - 2**16:
        return f"BMP holds at most 4 GB, and the result has {width:,}x{height:,} pixels; use {better}"
    if dtype == "float32" and kind != "TIFF":
        return f"{kind} cannot hold floats or 32-bit integers; use TIFF (.tif)"
    if dtype == "uint16" and kind not in _DEEP:
        return f"{kind} cannot hold 16 bits per sample; use PNG (.png) or TIFF (.tif)"
    if channels in (2, 4) and kind not in _ALPHA:
        return f"{kind} cannot hold transparency; use PNG (.png), WebP (.webp) or TIFF (.tif)"
    return None


def needs_rows(info: Info, width: int, height: int) -> bool:
    """Whether a still is so large, with a result of ``width x height``, that it should be worked on row by row."""
    return not info.animated and max(width * height, info.width * info.height) > _MANY_PIXELS


def write_picture(picture: Picture, target: str | Path | BinaryIO, format: str, quality: int | None = None) -> None:
    """Encode a picture with its metadata. A file appears complete or not at all.

    The mode follows the frames: one channel is written as grey, and so on. Animations keep their timing; a GIF frame
    gets a palette of its own.

    Args:
        picture: ``dataclasses.replace(read_picture(...), frames=[...])``, for instance.
        target: a path, which an existing file gives way to, or a binary stream.
        format: one that :func:`output_format` gave.
        quality: 1 to 100 of JPEG, WebP and AVIF; by default 95 for JPEG (always without chroma subsampling), lossless
            WebP, and 90 for AVIF.

    Raises:
        SRError: the format cannot hold it, an unwritable folder, a full disk.
    """
    height, width, channels = picture.frames[0].shape
    animated = len(picture.frames) > 1
    dtype = str(picture.frames[0].dtype)
    where = "" if not isinstance(target, (str, Path)) else f"cannot write {target}: "
    if format not in _USUAL:
        raise SRError(f"{where}{format} is not written; use PNG (.png)")
    if trouble := _trouble(format, width, height, channels, dtype, animated):
        raise SRError(where + trouble)
    if isinstance(target, (str, Path)):
        with atomic(Path(target)) as file:
            _encode(picture, file, format, quality)
    else:
        buffer = io.BytesIO()  # encoders go back to their beginnings, which a pipe cannot
        _encode(picture, buffer, format, quality)
        target.write(buffer.getbuffer())


def _encode(picture: Picture, file: BinaryIO, kind: str, quality: int | None) -> None:
    frame = picture.frames[0]
    height, width, channels = frame.shape
    if kind in ("TIFF", "PPM") or frame.dtype != np.uint8:
        rows, dtype = _stored(frame, picture.metadata)
        encoder = _ROWS[kind](file, width, height, channels, dtype, picture.metadata)
        encoder.write(rows)
        encoder.close()
        return
    images = [Image.fromarray(np.ascontiguousarray(f[..., 0] if channels == 1 else f)) for f in picture.frames]
    params: dict[str, Any] = for_pillow(picture.metadata, kind, width, height)
    if kind == "JPEG":
        params |= {"quality": quality or 95, "subsampling": 0}
    elif kind == "WEBP":
        params |= {"lossless": quality is None, "exact": True, "quality": 80 if quality is None else quality}
    elif kind == "PNG":
        params["compress_level"] = _PNG_LEVEL
    elif kind == "AVIF":
        params |= {"quality": quality or 90, "subsampling": "4:4:4"}
    elif kind == "GIF":
        images, palette = gif_frames(images)
        params |= palette
    if len(images) > 1:
        params |= _timing(picture, kind, images)
        images = images[1:] if picture.default_image and kind != "PNG" else images
        params["append_images"] = images[1:]
    try:
        images[0].save(file, format=kind, **params)
    except (OSError, ValueError, KeyError, MemoryError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:  # disk full, and the like
            raise
        raise SRError(f"{kind} does not take the picture ({' '.join(str(exc).split())}); use PNG (.png)") from exc


def _timing(picture: Picture, kind: str, images: list[Image.Image]) -> dict[str, Any]:
    """Pillow's arguments for an animation."""
    durations: list[Any] = list(picture.durations or [100.0] * len(images))
    if picture.default_image:
        durations = durations[1:]
    params: dict[str, Any] = {"save_all": True}
    if kind == "PNG":
        params |= {"loop": picture.loop, "default_image": picture.default_image}
    else:
        durations = [round(d) for d in durations]
    if kind == "WEBP":
        params["loop"] = picture.loop
    if kind == "GIF" and picture.loop != 1:  # a GIF file states repetitions, and nothing if it plays once
        params["loop"] = max(picture.loop - 1, 0)
    return params | {"duration": durations}


def _stored(rows: np.ndarray, extra: Metadata) -> tuple[np.ndarray, str]:
    """Rows as the file holds them, and their type."""
    if rows.dtype != np.float32:
        return rows, str(rows.dtype)
    samples = extra.samples or Samples("float32")
    return samples.encoded(rows), samples.dtype


class RowWriter:
    """A still written from top to bottom; it gets its name when it is complete.

    PNG, TIFF, PPM and JPEG take the memory of a few rows; WebP, AVIF, BMP and GIF are collected first. Use it in a
    ``with`` block, which closes it, or aborts after an exception.

    Args:
        path: the file; one of that name is replaced at the end.
        width: pixels.
        height: likewise.
        channels: 1 to 4.
        dtype: of the rows, ``uint8``, ``uint16`` or ``float32`` in [0, 1].
        format: one that :func:`output_format` gave.
        metadata: of the :class:`sr.pictures.RowReader` or picture it comes from.
        quality: as for :func:`write_picture`.

    Raises:
        SRError: as for :func:`write_picture`.
    """

    def __init__(
        self,
        path: str | Path,
        width: int,
        height: int,
        channels: int,
        dtype: str,
        format: str,
        metadata: Metadata | None = None,
        quality: int | None = None,
    ) -> None:
        self._path, self._shape, self._dtype = Path(path), (width, channels), str(np.dtype(dtype))
        self._info = Info(format, width, height, "", channels, self._dtype)
        self._metadata, self._quality = metadata or Metadata(), quality
        if trouble := _trouble(format, width, height, channels, self._dtype, False):
            raise SRError(f"cannot write {path}: {trouble}")
        self._height, self._written = height, 0
        self._collected: np.ndarray | None = None
        self._encoder: encoders.RowEncoder | None = None
        self._file = contextlib.ExitStack()
        if format not in _ROWS:
            self._collected = np.empty((height, width, channels), self._dtype)
            return
        settings: dict[str, Any] = {"quality": quality or 95} if format == "JPEG" else {}
        stored = (self._metadata.samples or Samples("float32")).dtype if self._dtype == "float32" else self._dtype
        file = self._file.enter_context(atomic(self._path))
        try:
            self._encoder = _ROWS[format](file, width, height, channels, stored, self._metadata, **settings)
        except BaseException as exc:
            self._leave(exc)
            raise

    @classmethod
    def like(
        cls, reader: RowReader, path: str | Path, width: int, height: int, format: str, quality: int | None = None
    ) -> RowWriter:
        """A writer for a picture of another size with the reader's channels, depth and metadata."""
        return cls(path, width, height, reader.channels, reader.dtype, format, reader.metadata, quality)

    def write(self, rows: np.ndarray) -> None:
        """The next rows (n, W, C).

        Raises:
            SRError: another shape or type, more rows than the height, or a full disk.
        """
        if rows.ndim != 3 or rows.shape[1:] != self._shape or str(rows.dtype) != self._dtype:
            raise SRError(
                f"rows of {self._path} are (n, {self._shape[0]}, {self._shape[1]}) of {self._dtype}, "
                f"not {rows.shape} of {rows.dtype}"
            )
        if self._written + len(rows) > self._height:
            raise SRError(f"{self._path} has {self._height} rows, and was given more")
        if self._collected is not None:
            self._collected[self._written : self._written + len(rows)] = rows
        elif self._encoder is not None:
            self._guarded(lambda encoder: encoder.write(_stored(rows, self._metadata)[0]))
        self._written += len(rows)

    def close(self) -> None:
        """Finish the file, and give it its name.

        Raises:
            SRError: rows are missing, or a full disk; nothing is left then.
        """
        if self._written < self._height:
            self.abort()
            raise SRError(f"{self._path} was given {self._written} of its {self._height} rows; nothing was written")
        if self._collected is not None:
            picture = Picture([self._collected], self._info, self._metadata)
            write_picture(picture, self._path, self._info.format, self._quality)
        elif self._encoder is not None:
            self._guarded(lambda encoder: encoder.close())
            self._file.close()
        self._collected = self._encoder = None

    def abort(self) -> None:
        """Leave nothing of the file; after :meth:`close` it stays."""
        if self._encoder is not None:
            self._encoder.abort()
            self._leave(InterruptedError())
        self._collected = self._encoder = None

    def _guarded(self, work: Callable[[encoders.RowEncoder], None]) -> None:
        """Leave nothing behind when the encoder fails."""
        assert self._encoder is not None
        try:
            work(self._encoder)
        except BaseException as exc:
            encoder, self._encoder = self._encoder, None
            encoder.abort()
            self._leave(exc, speak=True)
            raise

    def _leave(self, exc: BaseException, speak: bool = False) -> None:
        """End the atomic block by this exception, which it may turn into an :class:`SRError`."""
        try:
            self._file.__exit__(type(exc), exc, exc.__traceback__)
        except SRError:
            if speak:
                raise
        except BaseException as other:
            if other is not exc:
                raise

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and (self._encoder is not None or self._collected is not None):
            self.close()
        else:
            self.abort()
