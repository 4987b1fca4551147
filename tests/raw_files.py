"""Picture files made byte by byte, of kinds that Pillow does not write; nothing of ``sr`` is used."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

_PNG = b"\x89PNG\r\n\x1a\n"


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(array: np.ndarray, bits: int, extra: bytes = b"", interlaced: bool = False) -> bytes:
    """A PNG file byte by byte: (H, W, C) of ``bits`` per sample (2 and 4 bits for grey only), no filter."""
    height, width, channels = array.shape

    def lines(part: np.ndarray) -> bytes:
        if not part.size:
            return b""
        if bits < 8:
            flat = (part[..., 0, None] >> np.arange(bits - 1, -1, -1)) & 1
            raw = np.packbits(flat.reshape(len(part), -1).astype(np.uint8), axis=1)
        else:
            raw = np.ascontiguousarray(part.astype(f">u{bits // 8}")).view(np.uint8).reshape(len(part), -1)
        return b"".join(b"\0" + row.tobytes() for row in raw)

    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    data = b"".join(lines(array[y::dy, x::dx]) for y, x, dy, dx in passes) if interlaced else lines(array)
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, int(interlaced))
    return _PNG + png_chunk(b"IHDR", head) + extra + png_chunk(b"IDAT", zlib.compress(data)) + png_chunk(b"IEND", b"")


def tiff(array: np.ndarray, order: str = "<", tags: dict[int, tuple[int, list[int]]] | None = None) -> bytes:
    """A TIFF file byte by byte: (H, W, C) of any number type, one strip, unpacked; short and long tags only."""
    height, width, channels = array.shape
    kind = {"u": 1, "i": 2, "f": 3}[array.dtype.kind]
    data = array.astype(array.dtype.newbyteorder(order)).tobytes()
    data += bytes(len(data) % 2)
    entries: dict[int, tuple[int, list[int]]] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [8 * array.itemsize] * channels),
        259: (3, [1]),
        262: (3, [1 if channels < 3 else 2]),
        273: (4, [8]),
        277: (3, [channels]),
        278: (4, [height]),
        279: (4, [len(data)]),
        339: (3, [kind] * channels),
    }
    if channels in (2, 4):
        entries[338] = (3, [2])
    entries |= tags or {}
    place = 8 + len(data)
    rest = place + 2 + 12 * len(entries) + 4
    block, tail = struct.pack(order + "H", len(entries)), b""
    for tag, (form, numbers) in sorted(entries.items()):
        value = struct.pack(order + {3: "H", 4: "I"}[form] * len(numbers), *numbers)
        if len(value) > 4:
            value, tail = struct.pack(order + "I", rest + len(tail)), tail + value
        block += struct.pack(order + "HHI", tag, form, len(numbers)) + value.ljust(4, b"\0")
    start = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, place)
    return start + data + block + bytes(4) + tail


def display_p3() -> bytes:
    """A small ICC profile of P3's primaries (adapted to D50) with gamma 2.2."""

    def xyz(*values: float) -> bytes:
        return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(v * 65536) for v in values))

    words = b"P3 for tests\0"
    text = b"desc" + bytes(4) + struct.pack(">I", len(words)) + words + bytes(12 + 67)
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256))
    tags = {
        b"desc": text,
        b"cprt": b"text\0\0\0\0none\0",
        b"wtpt": xyz(0.9642, 1.0, 0.8249),
        b"rXYZ": xyz(0.5151, 0.2412, -0.0011),
        b"gXYZ": xyz(0.2920, 0.6922, 0.0419),
        b"bXYZ": xyz(0.1571, 0.0666, 0.7841),
        b"rTRC": curve,
        b"gTRC": curve,
        b"bTRC": curve,
    }
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += struct.pack(">4sII", name, 132 + 12 * len(tags) + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I4sI4s4s4s", 128 + len(table) + len(body), b"none", 0x02100000, b"mntr", b"RGB ", b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">3i", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + table + body


def bytes_of(image: Image.Image, kind: str, **save: Any) -> bytes:
    """A file's content, without a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **save)
    return buffer.getvalue()
