"""What others read from the files that we write; nothing of ``sr`` is used."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageSequence, TiffImagePlugin
from torture import Case


def read_deep_png(data: bytes) -> np.ndarray:
    """16-bit PNG by the standard's own words."""
    place, packed = 8, b""
    while place < len(data):
        length, name = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + length]
        assert zlib.crc32(name + body) == struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0]
        if name == b"IHDR":
            width, height, bits, kind, _, _, laced = struct.unpack(">IIBBBBB", body)
            assert bits == 16 and not laced
        packed += body if name == b"IDAT" else b""
        place += 12 + length
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[kind]
    step, raw = 2 * channels, zlib.decompress(packed)
    stride = 1 + width * step
    above, rows = bytearray(stride - 1), []
    for y in range(height):
        method, line = raw[y * stride], bytearray(raw[y * stride + 1 : (y + 1) * stride])
        for i in range(len(line)):
            a, b, c = line[i - step] if i >= step else 0, above[i], above[i - step] if i >= step else 0
            paeth = min((a, b, c), key=lambda v: abs(a + b - c - v))
            line[i] = (line[i] + {0: 0, 1: a, 2: b, 3: (a + b) // 2, 4: paeth}[method]) % 256
        rows.append(bytes(line))
        above = line
    return np.frombuffer(b"".join(rows), ">u2").reshape(height, width, channels)


def tiff_tags(data: bytes) -> TiffImagePlugin.ImageFileDirectory_v2:
    tags = TiffImagePlugin.ImageFileDirectory_v2(data[:8])
    file = io.BytesIO(data)
    file.seek(tags.next)
    tags.load(file)
    return tags


def read_deep_tiff(data: bytes) -> np.ndarray:
    """Deflated strips with or without horizontal differences, little-endian."""
    tags = tiff_tags(data)
    channels = tags[277]
    kind = {1: "u", 2: "i", 3: "f"}[np.atleast_1d(tags[339])[0]]
    raw = b"".join(
        zlib.decompress(data[a : a + n])
        for a, n in zip(np.atleast_1d(tags[273]), np.atleast_1d(tags[279]), strict=True)
    )
    bits = int(np.atleast_1d(tags[258])[0])
    values = np.frombuffer(raw, f"<{kind}{bits // 8}").reshape(tags[257], tags[256], channels)
    return np.cumsum(values, 1, dtype=values.dtype) if tags[317] == 2 else values


def frames_of(data: bytes, case: Case) -> list[np.ndarray]:
    """Frames of a result, by an independent reader."""
    if case.dtype != "uint8" and data.startswith(b"\x89PNG"):
        return [read_deep_png(data)]
    if case.dtype != "uint8" and data.startswith(b"II"):
        return [read_deep_tiff(data)]
    if case.dtype != "uint8":
        start = data.index(b"65535\n") + 6
        return [np.frombuffer(data[start:], ">u2").reshape(2 * case.height, 2 * case.width, case.channels)]
    mode = ["L", "LA", "RGB", "RGBA"][case.channels - 1]
    with Image.open(io.BytesIO(data)) as image:
        assert case.frames > 1 or image.mode == mode or image.format == "WEBP"
        return [np.atleast_3d(np.asarray(frame.convert(mode))) for frame in ImageSequence.Iterator(image)]


def in_unit(frame: np.ndarray, case: Case) -> np.ndarray:
    top = {"uint8": 255, "uint16": 65535, "int32": 1e8}.get(case.dtype, 1000 if case.name == "float_rgb.tif" else 1)
    return frame.astype(np.float64) / top


def check_metadata(data: bytes, case: Case) -> None:
    """By Pillow, of the finished file."""
    if case.dtype not in ("uint8", "uint16") or case.name == "deep2.tif":
        return  # Pillow opens no such TIFF files
    with Image.open(io.BytesIO(data)) as image:
        turn = tiff_tags(data).get(274, 1) if image.format == "TIFF" else image.getexif().get(274, 1)
        assert turn == 1
        if case.make is not None:
            assert image.getexif()[0x010F] == case.make
            assert image.getexif().get_ifd(0x8769)[0x9003] == "2001:02:03 04:05:06"
        if case.icc is not None:
            assert image.info["icc_profile"] == case.icc
        if case.dpi is not None:
            np.testing.assert_allclose(image.info["dpi"], case.dpi, atol=0.01)
        if case.xmp:
            xmp = image.info.get("xmp") or image.info["XML:com.adobe.xmp"].encode()
            assert b'tiff:Orientation="1"' in xmp and b'dc:title="Torture"' in xmp
        if case.text:
            assert {key: str(image.text[key]) for key in case.text} == case.text
        if case.frames > 1:
            times = []
            for frame in ImageSequence.Iterator(image):
                frame.load()
                times.append(frame.info["duration"])
            assert times == case.durations
            once = image.format == "GIF" and "loop" not in image.info
            assert (1 if once else image.info["loop"]) == case.loop
