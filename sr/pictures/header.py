"""What a picture file is, from its header: format by content, size, mode, depth, and what goes with the pixels."""

from __future__ import annotations

import io
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from sr.errors import SRError
from sr.image import is_16_bit, opened, picture_name, reading, working_mode
from sr.pictures import ifd, metadata
from sr.pictures.metadata import Metadata

_PNG, _TIFF = b"\x89PNG\r\n\x1a\n", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_PPM = re.compile(rb"P([56])" + rb"(?:\s|#[^\n]*\n)+(\d+)" * 3 + rb"\s")
_ANIMATED = ("GIF", "WEBP", "AVIF")
_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


@dataclass
class Info:
    """A picture in words and numbers, without its pixels.

    Attributes:
        format: Pillow's name of the format that the file has, whatever its name says.
        width: pixels of the upright picture.
        height: likewise.
        mode: the file's own mode: ``1``, ``L``, ``P``, ``RGB``, ``CMYK``, ``LAB``, ... as Pillow calls them, ``;16``
            behind it for 16 bits (grey is ``I;16``), ``I`` for other integers and ``F`` for floats.
        channels: of the decoded picture: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA.
        dtype: NumPy's name of the type of the decoded picture: ``uint8``, ``uint16``, or ``float32`` for the rest.
        frames: frames of an animation; 1 for a still.
    """

    format: str
    width: int
    height: int
    mode: str
    channels: int
    dtype: str = "uint8"
    frames: int = 1

    @property
    def animated(self) -> bool:
        """More than one frame."""
        return self.frames > 1

    @property
    def alpha(self) -> bool:
        """The decoded picture has an alpha channel."""
        return self.channels in (2, 4)


@dataclass
class Header:
    """What is needed to decode the file.

    Attributes:
        info: for the user.
        metadata: what goes with the pixels, as in the file.
        turn: orientation of the stored pixels, 1 to 8.
        notes: what the user ought to know.
        deep: Pillow would lose bits of the samples.
        streamed: the stored rows can be decoded one after the other in little memory.
        samples: NumPy's name of the file's own samples, where they are not ``info.dtype``.
        grey_bits: of a PNG file whose grey samples have less than 8 bits.
        default_image: the first frame is the still of an animated PNG file, no part of the animation.
        data_at: where the samples of a PPM file start, and their largest value.
    """

    info: Info
    metadata: Metadata
    turn: int = 1
    notes: list[str] = field(default_factory=list)
    deep: bool = False
    streamed: bool = False
    samples: str = ""
    grey_bits: int = 8
    default_image: bool = False
    data_at: tuple[int, int] = (0, 255)


def probe(source: str | Path | bytes) -> Info:
    """What a file (or the content of one) is, from its header only; of any size.

    Raises:
        SRError: missing, empty, a folder, no permission, no picture, damaged as far as the header tells, or a kind
            that is not read.
    """
    return read_header(source if isinstance(source, bytes) else Path(source)).info


def read_header(source: Path | bytes) -> Header:
    """Everything but the pixels.

    Raises:
        SRError: as for :func:`probe`.
    """
    with reading(source), io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        start = file.read(4096)
        if start.startswith(_PNG):
            header = _png(file)
        elif start.startswith(_TIFF):
            header = _tiff(file, picture_name(source))
        else:
            header = _other(source, start)
        header.turn = metadata.orientation(header.metadata)
        if header.turn >= 5:
            header.info.width, header.info.height = header.info.height, header.info.width
        metadata.upright(header.metadata)
        return header


def _png(file: BinaryIO) -> Header:
    chunks = list(metadata.png_chunks(file))
    names = [name for name, _ in chunks]
    first = dict(reversed(chunks))
    width, height, bits, kind, _, _, interlaced = struct.unpack(">IIBBBBB", first[b"IHDR"])
    if not width or not height:
        raise ValueError("no pixels")
    transparent = b"tRNS" in names and kind in (0, 2, 3)
    mode = {0: "1" if bits == 1 else "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}[kind]
    info = Info("PNG", width, height, mode, {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}[kind] + transparent)
    header = Header(info, metadata.of_png(file), streamed=not interlaced, grey_bits=bits if kind == 0 else 8)
    if b"acTL" in names and b"IDAT" in names:
        header.default_image = b"fcTL" not in names[: names.index(b"IDAT")]
        info.frames = struct.unpack(">I", first[b"acTL"][:4])[0] + header.default_image
    if bits == 16:
        info.mode = "I;16" if mode == "L" else f"{mode};16"
        if info.animated:
            header.notes.append("the animation's 16 bits per sample become 8")
        else:
            info.dtype, header.deep = "uint16", True
    return header


def _tiff(file: BinaryIO, name: str) -> Header:
    found = ifd.parse(file)

    def numbers(tag: int, default: list[float]) -> list[int]:
        value = found.tags.get(tag)
        return [int(x) for x in (value.numbers if isinstance(value, ifd.Value) else []) or default]

    (width, *_), (height, *_) = numbers(256, [0]), numbers(257, [0])
    bits, kinds = numbers(258, [1]), numbers(339, [1])
    (photometric, *_), (samples, *_) = numbers(262, [1]), numbers(277, [1])
    if width < 1 or height < 1:
        raise ValueError("no pixels")
    colours = {0: ("L", 1), 1: ("L", 1), 2: ("RGB", 3), 3: ("P", 1), 5: ("CMYK", 4), 6: ("YCbCr", 3), 8: ("LAB", 3)}
    if photometric not in colours or len(set(bits)) > 1 or len(set(kinds)) > 1 or kinds[0] not in (1, 2, 3):
        raise SRError(f"{name} is a kind of TIFF that is not read (colours {photometric}, bits {bits}); save it as RGB")
    mode, base = colours[photometric]
    extra = samples - base
    if extra not in (0, 1) or (extra and mode not in ("L", "RGB")):
        raise SRError(f"{name} has {samples} channels per pixel ({mode}); save it as grey, RGB or RGBA")
    alpha = extra and numbers(338, [2])[0] != 0
    kind = {1: "uint", 2: "int", 3: "float"}[kinds[0]]
    info = Info("TIFF", width, height, mode + "A" * alpha, (1 if mode == "L" else 3) + alpha)
    header = Header(info, metadata.of_tiff(found.tags))
    if extra and not alpha:
        header.notes.append("the file's additional channel is no alpha, and is left out")
    if (kind, bits[0]) in (("uint", 1), ("uint", 2), ("uint", 4), ("uint", 8)):
        info.mode = "1" if bits[0] == 1 and info.mode == "L" else info.mode
        header.streamed = photometric in (0, 1, 2, 3, 5)
    elif bits[0] in (8, 16, 32, 64) and not (kind == "float" and bits[0] == 8):
        header.deep = header.streamed = True
        if (kind, bits[0]) == ("uint", 16):
            info.dtype, info.mode = "uint16", "I;16" if info.mode == "L" else f"{info.mode};16"
        else:
            info.dtype, header.samples = "float32", f"{kind}{bits[0]}"
            info.mode = {"float": "F"}.get(kind, "I") if info.mode == "L" else f"{info.mode};{header.samples}"
    else:
        raise SRError(f"{name} has {bits[0]}-bit samples, which are not read; save it with 8 or 16 bits")
    if found.more:
        header.notes.append("the file holds more than one page; the first is taken")
    return header


def _other(source: Path | bytes, start: bytes) -> Header:
    with opened(source, limit=False) as image:
        kind = image.format or ""
        frames = int(getattr(image, "n_frames", 1)) if kind in _ANIMATED else 1
        width, height = image.size
        mode = "RGB" if image.mode in ("I", "F") and not is_16_bit(image) else working_mode(image)
        info = Info("JPEG" if kind == "MPO" else kind, width, height, image.mode, _CHANNELS.get(mode, 1), frames=frames)
        header = Header(info, metadata.of_image(image))
        if mode == "RGB" and image.mode in ("I", "F"):
            info.channels, info.dtype = 1, "float32"
            header.samples = "float32" if image.mode == "F" else "int32"
        elif is_16_bit(image):
            info.dtype, info.mode = "uint16", "I;16"
        if kind == "AVIF" and _avif_bits(start) > 8:
            header.notes.append(f"the file's {_avif_bits(start)} bits per sample become 8")
        if kind == "MPO":
            header.notes.append("the file holds more than one picture; the first is taken")
        header.streamed = kind in ("JPEG", "MPO")
        if kind == "PPM" and (found := _PPM.match(start)):
            most = int(found[4])
            header.data_at = (found.end(), most)
            header.streamed = most >= 255
            header.deep = most > 255
            if header.deep:
                info.dtype, info.mode = "uint16", "I;16" if found[1] == b"5" else "RGB;16"
        return header


def _avif_bits(start: bytes) -> int:
    """Bits per sample, from the configuration of an AVIF file's decoder."""
    place = start.find(b"av1C")
    flags = start[place + 6] if 0 <= place < len(start) - 6 else 0
    return 8 if not flags & 0x40 else 12 if flags & 0x20 else 10
