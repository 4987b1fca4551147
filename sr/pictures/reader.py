"""Decoding: whole pictures, and huge stills a few rows at a time.

Pillow decodes what it can without loss. libvips (pyvips) decodes 16-bit colour and other deep TIFF files, which Pillow
reduces to 8 bits or refuses, and the rows of PNG, JPEG and TIFF files one after the other, which Pillow cannot;
tifffile and imagecodecs would do so for TIFF alone.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sr.errors import SRError
from sr.image import picture_name, reading
from sr.pictures import pillow
from sr.pictures.header import Header, Info, read_header
from sr.pictures.metadata import Metadata
from sr.pictures.samples import Samples


@dataclass
class Picture:
    """Everything that a picture file holds, decoded.

    Attributes:
        frames: (H, W, C) each, uint8, uint16, or float32 in [0, 1], all of one shape; C is 1 grey, 2 grey and alpha,
            3 RGB, 4 RGBA. The EXIF orientation is applied.
        info: what the file is.
        metadata: what :func:`sr.pictures.write_picture` puts back.
        durations: of each frame in ms; empty for a still.
        loop: how often an animation plays; 0 is for ever.
        default_image: the first frame is the still of an animated PNG file, no part of the animation.
        notes: what was converted or left out, in sentences for the user.
    """

    frames: list[np.ndarray]
    info: Info
    metadata: Metadata = field(default_factory=Metadata)
    durations: list[float] = field(default_factory=list)
    loop: int = 0
    default_image: bool = False
    notes: list[str] = field(default_factory=list)


def read_picture(source: str | Path | bytes) -> Picture:
    """Decode a file, or the content of one.

    Raises:
        SRError: as for :func:`sr.pictures.probe`; cut short; or more than 179 million pixels in all its frames.
    """
    source = source if isinstance(source, bytes) else Path(source)
    header = read_header(source)
    info = header.info
    if header.deep:
        with reading(source):
            if (most := 2 * (Image.MAX_IMAGE_PIXELS or 0)) and info.width * info.height > most:
                raise Image.DecompressionBombError
        with RowReader(source) as rows:
            frame = rows.read(rows.height)
            return Picture([frame], rows.info, rows.metadata, notes=rows.notes)
    found = pillow.decode(source, header)
    frames = found.frames
    if header.samples:
        samples = _spanning(header.samples, float(frames[0].min()), float(frames[0].max()), source)
        header.metadata = replace(header.metadata, samples=samples)
        frames = [samples.decoded(frame) for frame in frames]
    info.channels = frames[0].shape[2]
    return Picture(frames, info, header.metadata, found.durations, found.loop, header.default_image, notes=header.notes)


class RowReader:
    """Rows of a still from top to bottom, upright; of an animation those of the first frame.

    PNG, JPEG, TIFF and binary PPM files take the memory of a few rows. What cannot be decoded in this order
    (interlaced PNG, an EXIF orientation of 3 to 8) is decoded by libvips beforehand, into a temporary file if it is
    large; other formats are decoded into memory. ``notes`` says so.

    Attributes:
        info: what the file is.
        width: pixels of the upright picture.
        height: likewise.
        channels: 1 to 4.
        dtype: of the rows, ``uint8``, ``uint16`` or ``float32`` in [0, 1].
        metadata: for a :class:`sr.pictures.RowWriter`.
        notes: what was converted or left out.

    Raises:
        SRError: as for :func:`sr.pictures.probe`, without a limit to the size for the formats that are read in rows.
    """

    def __init__(self, source: str | Path | bytes) -> None:
        self._source = source if isinstance(source, bytes) else Path(source)
        self._close = contextlib.ExitStack()
        header = read_header(self._source)
        self.info, self.metadata, self.notes = header.info, header.metadata, header.notes
        self._next = 0
        with reading(self._source):
            self._rows = self._open(header)
            if header.samples:
                low, high = np.inf, -np.inf
                while len(rows := self.read(max(1, 2**24 // (self.width * self.channels)))):
                    low, high = np.minimum(low, rows.min()), np.maximum(high, rows.max())  # NaN stays
                samples = _spanning(header.samples, float(low), float(high), self._source)
                self.metadata = replace(self.metadata, samples=samples)
                self._close.close()
                raw, self._next = self._open(header), 0
                self._rows = lambda first, count: samples.decoded(raw(first, count))

    @property
    def width(self) -> int:
        return self.info.width

    @property
    def height(self) -> int:
        return self.info.height

    @property
    def channels(self) -> int:
        return self.info.channels

    @property
    def dtype(self) -> str:
        return self.info.dtype

    def read(self, count: int) -> np.ndarray:
        """The next ``count`` rows (or as many as are left): (rows, W, C).

        Raises:
            SRError: the file is damaged or cut short here.
        """
        count = min(count, self.height - self._next)
        if count <= 0:
            return np.zeros((0, self.width, self.channels), self.dtype)
        with reading(self._source):
            rows = self._rows(self._next, count)
        self._next += count
        return rows

    def close(self) -> None:
        """Let the file go."""
        self._close.close()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, header: Header) -> Callable[[int, int], np.ndarray]:
        """A function of (first row, number of rows)."""
        if header.info.format == "PPM" and header.streamed and header.turn == 1:
            return self._ppm(header)
        if not header.info.animated and (header.streamed or header.deep or header.info.format == "PNG"):
            return self._vips(header)
        frame = pillow.decode(self._source, header, limit=False).frames[0]
        self.info.channels = frame.shape[2]
        self.notes.append(f"{header.info.format} pictures of this kind cannot be read in rows, and take memory whole")
        return lambda first, count: frame[first : first + count]

    def _ppm(self, header: Header) -> Callable[[int, int], np.ndarray]:
        start, most = header.data_at
        kind = np.dtype(">u2" if most > 255 else "u1")
        shape = (self.width, self.channels)
        stride = self.width * self.channels * kind.itemsize
        file = io.BytesIO(self._source) if isinstance(self._source, bytes) else self._source.open("rb")
        self._close.enter_context(file)

        def rows(first: int, count: int) -> np.ndarray:
            file.seek(start + first * stride)
            data = file.read(count * stride)
            if len(data) < count * stride:
                raise ValueError("it ends too early")
            values = np.frombuffer(data, kind).reshape(count, *shape)
            top = 65535 if most > 255 else 255
            if most != top:
                values = (values.astype(np.uint64) * top + most // 2) // most
            return values.astype(self.dtype)

        return rows

    def _vips(self, header: Header) -> Callable[[int, int], np.ndarray]:
        pyvips = load_vips()
        if isinstance(self._source, bytes):
            opened = pyvips.Source.new_from_memory(self._source)
        else:  # not by name: libvips remembers the content that goes with one
            file = self._close.enter_context(self._source.open("rb"))
            opened = pyvips.Source.new_from_descriptor(file.fileno())
        in_order = header.streamed and header.turn <= 2
        load = {"PNG": pyvips.Image.pngload_source, "JPEG": pyvips.Image.jpegload_source}.get(
            header.info.format, pyvips.Image.tiffload_source
        )
        image = load(opened, access="sequential" if in_order else "random", fail_on="error")
        if not in_order:
            why = "is interlaced" if header.turn <= 2 else "is stored turned"
            self.notes.append(f"the file {why}, and is decoded whole before the first row")
        image = _upright(self._coloured(image), header.turn)
        region = pyvips.Region.new(image)
        channels, kind = self.channels, np.dtype(_VIPS_TYPES[image.format])

        def rows(first: int, count: int) -> np.ndarray:
            data = region.fetch(0, first, image.width, count)
            values = np.frombuffer(data, kind).reshape(count, image.width, image.bands)
            if image.bands < channels - 1:  # a palette or a JPEG file of nothing but grey
                values = np.concatenate([values[..., :1]] * 3 + [values[..., 1:]], -1)
            return values[..., :channels]

        return rows

    def _coloured(self, image: Any) -> Any:
        """RGB of what is stored as CMYK; anything else as it is."""
        if image.interpretation != "cmyk":
            return image
        profile, self.metadata.icc = self.metadata.icc, None
        top = 65535 if image.format == "ushort" else 255
        if profile and "icc-profile-data" in image.get_fields():
            with contextlib.suppress(load_vips().Error):
                image = image.icc_transform("srgb", embedded=True, intent="perceptual", depth=16 if top > 255 else 8)
                self._note(pillow.CMYK_BY_PROFILE)
                return image
        self._note(pillow.CMYK_PLAIN)
        inks, black = top - image[0:3], top - image[3]
        return (inks * black / top).rint().cast(image.format)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


_VIPS_TYPES = {
    "uchar": "u1",
    "char": "i1",
    "ushort": "u2",
    "short": "i2",
    "uint": "u4",
    "int": "i4",
    "float": "f4",
    "double": "f8",
}


def load_vips() -> Any:
    """The module ``pyvips``, imported when a picture first needs it.

    Raises:
        SRError: it is not installed, or finds no libvips.
    """
    try:
        import pyvips
    except (ImportError, OSError) as exc:
        raise SRError(
            "pictures of this size or depth are read with libvips; run: pip install 'pyvips[binary]'"
        ) from exc
    return pyvips


def _upright(image: Any, turn: int) -> Any:
    """A libvips image whose EXIF orientation is ``turn``, turned upright."""
    turned = {3: "rot180", 5: "rot90", 6: "rot90", 7: "rot270", 8: "rot270"}
    if turn in turned:
        image = getattr(image, turned[turn])()
    if turn in (2, 5, 7):
        image = image.fliphor()
    return image.flipver() if turn == 4 else image


def _spanning(dtype: str, low: float, high: float, source: Path | bytes) -> Samples:
    if not (np.isfinite(low) and np.isfinite(high)):
        raise SRError(f"{picture_name(source)} holds NaN or infinite samples; replace them by numbers")
    return Samples.spanning(dtype, low, high)
