"""Tag directories (IFD) of TIFF files, which EXIF blocks are as well: read, changed in place, and written.

Values are kept as bytes in little-endian order, so that what is not understood is passed on unharmed.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import BinaryIO, Union

import numpy as np

#: Bytes of one value of each TIFF type, and of the unit whose bytes turn round with the byte order.
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_UNITS = {**_SIZES, 5: 4, 10: 4}
_NUMBERS = {1: "u1", 3: "<u2", 4: "<u4", 6: "i1", 8: "<i2", 9: "<i4", 11: "<f4", 12: "<f8", 13: "<u4", 16: "<u8"}

ORIENTATION, EXIF, GPS, INTEROP = 274, 34665, 34853, 40965
_POINTERS = (EXIF, GPS, INTEROP, 330)
_LARGEST = 2**24  # bytes of one value; strip offsets of the largest files have less
_LARGEST_ALL = 2**27  # bytes of all values of a directory, which may claim the same ones over and over


@dataclass(frozen=True)
class Value:
    """The value of one tag: TIFF type, number of values, and their bytes in little-endian order."""

    type: int
    count: int
    data: bytes

    @classmethod
    def of(cls, kind: int, *numbers: int) -> Value:
        """Whole numbers of type 1 (byte), 3 (16 bit), 4 (32 bit) or 16 (64 bit), or a rational (5) as two numbers."""
        if kind == 5:
            return cls(5, len(numbers) // 2, struct.pack(f"<{len(numbers)}I", *numbers))
        return cls(kind, len(numbers), np.array(numbers, _NUMBERS[kind]).tobytes())

    @property
    def numbers(self) -> list[float]:
        """The values as numbers; rationals are divided."""
        if self.type in (5, 10):
            pairs = np.frombuffer(self.data, "<u4" if self.type == 5 else "<i4").reshape(-1, 2).tolist()
            return [a / b if b else 0.0 for a, b in pairs]
        return np.frombuffer(self.data, _NUMBERS[self.type]).tolist() if self.type in _NUMBERS else []


Tags = dict[int, Union[Value, "Tags"]]


@dataclass(frozen=True)
class Directory:
    """What the header of a TIFF file or EXIF block says, and its first directory."""

    tags: Tags
    order: str  # "<" or ">"
    big: bool
    places: dict[int, int]  # where the entry of a tag of the first directory starts in the file
    exif_places: dict[int, int]  # the same of the EXIF directory
    next_place: int  # where the offset of the second directory is
    more: bool  # there is a second directory


def parse(source: bytes | BinaryIO) -> Directory:
    """Read the first directory of a TIFF file or EXIF block, and the EXIF and GPS directories below it.

    Raises:
        ValueError: it is no TIFF structure, or damaged.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    file.seek(0)
    head = file.read(16)
    order = {b"II": "<", b"MM": ">"}.get(head[:2])
    if order is None or len(head) < 8:
        raise ValueError("no TIFF structure")
    big = struct.unpack(order + "H", head[2:4])[0] == 43
    try:
        (offset,) = struct.unpack(order + ("Q" if big else "I"), head[8:16] if big else head[4:8])
        tags, places, end, following = _directory(file, offset, order, big)
        exif_places: dict[int, int] = {}
        for pointer in _POINTERS:
            below = tags.pop(pointer, None)
            if pointer in (EXIF, GPS) and isinstance(below, Value) and below.numbers:
                found, inner, _, _ = _directory(file, int(below.numbers[0]), order, big)
                for nested in _POINTERS:
                    found.pop(nested, None)
                tags[pointer] = found
                exif_places = inner if pointer == EXIF else exif_places
    except (struct.error, OverflowError) as exc:
        raise ValueError("damaged tags") from exc
    return Directory(tags, order, big, places, exif_places, end, following != 0)


def _directory(file: BinaryIO, offset: int, order: str, big: bool) -> tuple[Tags, dict[int, int], int, int]:
    """Tags, the places of their entries, the place of the next directory's offset, and that offset."""
    file.seek(offset)
    (count,) = struct.unpack(order + ("Q" if big else "H"), file.read(8 if big else 2))
    size, word = (20, 8) if big else (12, 4)
    start = file.tell()
    if count > 4096:
        raise ValueError("damaged tags")
    block = file.read(count * size + word)
    tags: Tags = {}
    places, left = {}, _LARGEST_ALL
    for i in range(count):
        entry = block[i * size : (i + 1) * size]
        tag, kind, number = struct.unpack(order + ("HHQ" if big else "HHI"), entry[:-word])
        length = _SIZES.get(kind, 0) * number
        if not 0 < length <= _LARGEST:
            continue
        left -= length
        if left < 0:
            raise ValueError("damaged tags")
        data = entry[-word:][:length]
        if length > word:
            file.seek(struct.unpack(order + ("Q" if big else "I"), entry[-word:])[0])
            data = file.read(length)
        if len(data) < length:
            continue  # this value is cut off; the others may be whole
        unit = _UNITS[kind]
        if order == ">" and unit > 1:
            data = np.frombuffer(data, f">u{unit}").astype(f"<u{unit}").tobytes()
        tags[tag] = Value(kind, number, data)
        places[tag] = start + i * size
    (following,) = struct.unpack(order + ("Q" if big else "I"), block[-word:])
    return tags, places, start + count * size, following


def build(tags: Tags, offset: int, big: bool = False) -> bytes:
    """The bytes of a directory and of what hangs on it, to stand at ``offset`` of a little-endian file."""
    size, word, form = (20, 8, "<HHQ") if big else (12, 4, "<HHI")
    entries = [struct.pack("<Q" if big else "<H", len(tags))]
    rest = offset + len(entries[0]) + len(tags) * size + word
    tail = b""
    for tag in sorted(tags):
        value = tags[tag]
        if isinstance(value, dict):
            tail += bytes(len(tail) % 2)
            place = rest + len(tail)
            tail += build(value, place, big)
            value = Value.of(16 if big else 4, place)
        data = value.data
        if len(data) > word:
            tail += bytes(len(tail) % 2)  # values start at even places
            data = struct.pack("<Q" if big else "<I", rest + len(tail))
            tail += value.data
        entries.append(struct.pack(form, tag, value.type, value.count) + data.ljust(word, b"\0"))
    return b"".join(entries) + bytes(word) + tail


def exif_block(tags: Tags) -> bytes:
    """A whole EXIF block (TIFF header and directory) of these tags."""
    return b"II*\0\x08\0\0\0" + build(tags, 8)


def patched(block: bytes, width: int | None = None, height: int | None = None) -> bytes:
    """The same EXIF block of an upright picture without a thumbnail, all else in place (also a maker's own offsets).

    The orientation becomes 1, the sizes that the block states become ``width`` and ``height``.

    Raises:
        ValueError: no EXIF block, or damaged.
    """
    found = parse(block)
    if found.big:
        raise ValueError("an EXIF block is no BigTIFF")
    data = bytearray(block)

    def put(place: int, kind: int, value: int) -> None:
        head = struct.pack(found.order + "HI", kind, 1)
        number = struct.pack(found.order + ("HH" if kind == 3 else "I"), *([value, 0] if kind == 3 else [value]))
        data[place + 2 : place + 12] = head + number

    if ORIENTATION in found.places:
        put(found.places[ORIENTATION], 3, 1)
    for places, tag, size in (
        (found.places, 256, width),
        (found.places, 257, height),
        (found.exif_places, 40962, width),
        (found.exif_places, 40963, height),
    ):
        if tag in places and size is not None:
            put(places[tag], 4, size)
    data[found.next_place : found.next_place + 4] = bytes(4)  # the thumbnail's directory
    return bytes(data)
