"""What a picture file holds beside its pixels: colour profile, EXIF, XMP, resolution, text."""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from PIL import Image, PngImagePlugin

from sr.pictures import ifd
from sr.pictures.samples import Samples

_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_TEXT = (b"tEXt", b"zTXt", b"iTXt")
_PNG_COLOUR = (b"cHRM", b"cICP", b"gAMA", b"sRGB")
_XMP_KEY = b"XML:com.adobe.xmp"
# Of a TIFF file's own tags the ones that tell about the picture rather than how this file stores it.
_TIFF_KEPT = (
    269,
    270,
    271,
    272,
    285,
    305,
    306,
    315,
    316,
    18246,
    18249,
    33432,
    33723,
    ifd.EXIF,
    ifd.GPS,
    *range(40091, 40096),
)
_XMP_TURN = re.compile(rb"(tiff:Orientation\s*(?:=\s*[\"']|>)\s*)([1-8])")
_LARGEST = 1 << 26  # bytes, of what is unpacked from a PNG file's chunk
_JPEG_MOST = 65_000  # bytes of EXIF or XMP that fit one segment of a JPEG file
_RICH = ("AVIF", "JPEG", "PNG", "TIFF", "WEBP")  # formats that hold profiles, EXIF and XMP


@dataclass
class Metadata:
    """What goes with a picture; ``None`` or empty: the file has none.

    Attributes:
        icc: ICC profile.
        exif: EXIF block that starts with the TIFF header; its orientation has been applied.
        xmp: XMP packet, likewise.
        dpi: horizontal and vertical resolution in dots per inch.
        comment: comment of a JPEG or GIF file.
        chunks: PNG chunks that are passed on as they are: text, and colour without a profile.
        samples: type and range of samples that are neither 8 nor 16 bit.
    """

    icc: bytes | None = None
    exif: bytes | None = None
    xmp: bytes | None = None
    dpi: tuple[float, float] | None = None
    comment: bytes | None = None
    chunks: list[tuple[bytes, bytes]] = field(default_factory=list)
    samples: Samples | None = None


def png_chunks(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Names and contents of a PNG file's chunks, those before and after the pixels; pixels are skipped."""
    file.seek(len(_PNG_START))
    while len(head := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        if name in (b"IDAT", b"fdAT"):
            file.seek(length + 4, 1)
            yield name, b""
        else:
            data = file.read(length)
            if len(data) < length:
                return
            file.seek(4, 1)
            yield name, data
        if name == b"IEND":
            return


def of_png(file: BinaryIO) -> Metadata:
    """Metadata of a PNG file, from its chunks alone."""
    found = Metadata()
    for name, data in png_chunks(file):
        with contextlib.suppress(ValueError, IndexError, zlib.error, struct.error):  # damaged: left out
            if name == b"iCCP":
                found.icc = _unpacked(data.split(b"\0", 1)[1][1:])
            elif name == b"eXIf":
                found.exif = data.removeprefix(b"Exif\0\0")
            elif name == b"pHYs":
                x, y, unit = struct.unpack(">IIB", data)
                found.dpi = (x * 0.0254, y * 0.0254) if unit == 1 else None
            elif name == b"iTXt" and data.startswith(_XMP_KEY + b"\0"):
                packed, rest = data[len(_XMP_KEY) + 1], data[len(_XMP_KEY) + 3 :]
                text = rest.split(b"\0", 2)[2]
                found.xmp = _unpacked(text) if packed else text
            elif name == b"zTXt" and data.startswith((b"Raw profile type exif\0", b"Raw profile type APP1\0")):
                lines = _unpacked(data.split(b"\0", 1)[1][1:]).split(b"\n")  # ImageMagick's way of old
                block = bytes.fromhex(b"".join(lines[3:]).decode("ascii"))
                if block.startswith(b"Exif\0\0"):
                    found.exif = found.exif or block[6:]
            elif name in _PNG_TEXT + _PNG_COLOUR:
                found.chunks.append((name, data))
    return found


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, _LARGEST)
    if not unpacker.eof:
        raise ValueError("cut short, or made to fill the memory")
    return found


def of_tiff(tags: ifd.Tags) -> Metadata:
    """Metadata of a TIFF file from its first directory."""

    def value(tag: int) -> ifd.Value | None:
        found = tags.get(tag)
        return found if isinstance(found, ifd.Value) else None

    kept = {tag: tags[tag] for tag in (*_TIFF_KEPT, ifd.ORIENTATION) if tag in tags}
    icc, xmp = value(34675), value(700)
    numbers = [found.numbers[0] for tag in (282, 283) if (found := value(tag)) and found.numbers]
    unit = {2: 1.0, 3: 2.54}.get(int((found.numbers or [2])[0]) if (found := value(296)) else 2)
    return Metadata(
        icc=icc.data if icc else None,
        exif=ifd.exif_block(kept) if kept else None,
        xmp=xmp.data if xmp else None,
        dpi=(numbers[0] * unit, numbers[1] * unit) if unit and len(numbers) == 2 and all(numbers) else None,
    )


def of_image(image: Image.Image) -> Metadata:
    """Metadata of a file in another format, as Pillow gives it."""
    info: dict[Any, Any] = image.info
    xmp, comment = info.get("xmp"), info.get("comment")
    dpi = info.get("dpi")
    return Metadata(
        icc=info.get("icc_profile") or None,
        exif=re.sub(rb"^(Exif\0\0)+", b"", info.get("exif") or b"") or None,
        xmp=(xmp.encode() if isinstance(xmp, str) else xmp) or None,
        dpi=(float(dpi[0]), float(dpi[1])) if dpi and all(dpi) else None,
        comment=(comment.encode() if isinstance(comment, str) else comment) or None,
    )


def orientation(metadata: Metadata) -> int:
    """How the stored pixels are turned, 1 to 8, from EXIF or else XMP; 1 if neither says so."""
    with contextlib.suppress(ValueError):
        turn = ifd.parse(metadata.exif or b"").tags.get(ifd.ORIENTATION)
        if isinstance(turn, ifd.Value) and turn.numbers:
            return int(turn.numbers[0]) if 1 <= turn.numbers[0] <= 8 else 1
    found = _XMP_TURN.search(metadata.xmp or b"")
    return int(found[2]) if found else 1


def upright(metadata: Metadata) -> None:
    """Note in the metadata that the orientation has been applied; EXIF that is damaged is dropped."""
    if metadata.exif is not None:
        try:
            metadata.exif = ifd.patched(metadata.exif)
        except ValueError:
            metadata.exif = None
    if metadata.xmp is not None:
        metadata.xmp = _XMP_TURN.sub(rb"\g<1>1", metadata.xmp)


def for_pillow(metadata: Metadata, kind: str, width: int, height: int) -> dict[str, Any]:
    """Arguments for ``Image.save`` that put the metadata into a file of format ``kind`` and this size.

    What :func:`left_out` names is left out.
    """
    exif = ifd.patched(metadata.exif, width, height) if metadata.exif else b""
    xmp = metadata.xmp or b""
    if kind == "JPEG":
        exif, xmp = (block if len(block) <= _JPEG_MOST else b"" for block in (exif, xmp))
    kept: dict[str, Any] = {"icc_profile": metadata.icc}
    if exif and kind in _RICH:
        kept["exif"] = b"Exif\0\0" + exif
    if xmp and kind in ("JPEG", "WEBP", "AVIF"):
        kept["xmp"] = xmp
    if metadata.dpi and kind in ("JPEG", "PNG", "BMP"):
        kept["dpi"] = metadata.dpi
    if kind in ("JPEG", "GIF") and metadata.comment:
        kept["comment"] = metadata.comment
    if kind == "PNG":
        extra = PngImagePlugin.PngInfo()
        for name, data in metadata.chunks:
            extra.add(name, data)
        if xmp:
            extra.add(b"iTXt", _XMP_KEY + b"\0\0\0\0\0" + xmp)
        if metadata.comment:
            extra.add_itxt("Comment", metadata.comment.decode(errors="replace"))
        kept["pnginfo"] = extra
    return kept


def left_out(metadata: Metadata, kind: str) -> list[str]:
    """What a file of format ``kind`` has no place for, in sentences for the user."""
    rich, most = kind in _RICH, _JPEG_MOST if kind == "JPEG" else float("inf")
    lost = {
        "colour profile": metadata.icc and not rich,
        "EXIF data": metadata.exif and (not rich or len(metadata.exif) > most),
        "XMP data": metadata.xmp and (not rich or len(metadata.xmp) > most),
        "comment": metadata.comment and kind not in ("GIF", "JPEG", "PNG"),
        "text": any(name in _PNG_TEXT for name, _ in metadata.chunks) and kind != "PNG",
    }
    return [f"{kind} has no place for the file's {what}, which is left out" for what, gone in lost.items() if gone]


def for_tiff(metadata: Metadata, width: int, height: int) -> ifd.Tags:
    """Tags that put the metadata into a TIFF file of this size."""
    tags: ifd.Tags = {}
    if metadata.exif:
        tags.update(ifd.parse(ifd.patched(metadata.exif, width, height)).tags)
        for tag in (256, 257, ifd.ORIENTATION, 282, 283, 296, 513, 514, 531):
            tags.pop(tag, None)
    if metadata.icc:
        tags[34675] = ifd.Value(7, len(metadata.icc), metadata.icc)
    if metadata.xmp:
        tags[700] = ifd.Value(1, len(metadata.xmp), metadata.xmp)
    if metadata.dpi:
        for tag, dots in zip((282, 283), metadata.dpi, strict=True):
            tags[tag] = ifd.Value.of(5, round(dots * 10_000), 10_000)
        tags[296] = ifd.Value.of(3, 2)
    return tags
