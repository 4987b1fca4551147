"""Whole pictures: what is read from files that others made, and what others read from files that we made."""

from __future__ import annotations

import errno
import io
import os
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torture
from PIL import ExifTags, Image, ImageSequence, TiffImagePlugin
from torture import Case

from sr.errors import SRError
from sr.pictures import Info, Picture, RowReader, output_format, probe, read_picture, write_picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torture")


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    return {case.name: case for case in torture.make(folder)}


def names() -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        return [case.name for case in torture.make(Path(place))]


NAMES = names()


# --- readers that share nothing with the package -------------------------------------------------------------------


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


def twice(picture: Picture) -> Picture:
    return replace(picture, frames=[frame.repeat(2, 0).repeat(2, 1) for frame in picture.frames])


# --- the torture files ---------------------------------------------------------------------------------------------


def test_there_are_many_kinds() -> None:
    assert len(set(NAMES)) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_read_enlarged_and_written_without_loss(
    name: str, folder: Path, cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[name]
    info = probe(folder / name)
    assert (info.format, info.width, info.height, info.frames) == (case.format, case.width, case.height, case.frames)
    picture = twice(read_picture(folder / name))
    assert picture.info.channels == case.channels
    assert picture.durations == case.durations
    kind, suffix = output_format(picture.info, 2 * case.width, 2 * case.height)
    assert suffix == case.suffix
    target = tmp_path / f"result{suffix}"
    write_picture(picture, target, kind)
    assert [p.name for p in tmp_path.iterdir()] == [target.name]
    data = target.read_bytes()

    frames = frames_of(data, case)
    assert len(frames) == case.frames
    assert frames[0].shape == (2 * case.height, 2 * case.width, case.channels)
    assert frames[0].dtype.newbyteorder("=") == case.dtype
    first = in_unit(frames[0], case)
    if case.corners is not None:
        corners = first[[0, 0, -1, -1], [0, -1, 0, -1]]
        assert np.nanmax(np.abs(corners - case.corners)) <= case.tolerance
    if case.mean is not None:
        mean = first.mean((0, 1))
        if case.channels in (2, 4):
            alpha = first[..., -1:]
            mean[:-1] = (first[..., :-1] * alpha).sum((0, 1)) / alpha.sum()
        np.testing.assert_allclose(mean, case.mean, atol=case.tolerance)
    check_metadata(data, case)


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


@pytest.mark.parametrize("name", ["moving.gif", "clear.gif", "moving.webp", "moving.png", "clear.webp"])
def test_every_frame_is_whole(name: str, folder: Path) -> None:
    """Frames that a file stores as differences are put together, also under transparency."""
    first, second, third = (frame.astype(int) for frame in read_picture(folder / name).frames)
    assert first[0, 0, :3].tolist() == torture.QUARTERS[0, :3].tolist()
    assert second[0, 0, :3].tolist() == [0, 0, 0]
    assert second[-1, 0, :3].tolist() == torture.QUARTERS[2, :3].tolist()
    assert len(set(third[0, 0, :3].tolist())) == 1 and third[0, 0, 0] > 0
    if name.startswith("clear"):
        assert first[0, -1, 3] == second[0, -1, 3] == third[0, -1, 3] == 0
        assert first[-1, -1, 3] == second[0, 0, 3] == 255


def test_gif_disposal_restores_what_was_before(tmp_path: Path) -> None:
    """Red whole; a blue patch that is restored to the background; a green patch on what is left then."""
    red = Image.new("P", (8, 8), 0)
    red.putpalette([255, 0, 0, 0, 0, 255, 0, 255, 0])
    patch = b""
    for colour, disposal, x in ((0, 1, 0), (1, 3, 0), (2, 1, 4)):
        width = 8 if colour == 0 else 4
        codes = [4] + [value for pixel in range(8 * width) for value in ([colour, 4] if pixel % 2 else [colour])] + [5]
        bits = sum(code << (3 * i) for i, code in enumerate(codes))
        packed = bits.to_bytes((3 * len(codes) + 7) // 8, "little")
        patch += struct.pack("<BBBBHBB", 0x21, 0xF9, 4, disposal << 2, 10, 0, 0)
        patch += struct.pack("<BHHHHB", 0x2C, x, 0, width, 8, 0)
        patch += b"\x02" + bytes([len(packed)]) + packed + b"\0"
    table = bytes([255, 0, 0, 0, 0, 255, 0, 255, 0, 9, 9, 9])
    data = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x91, 0, 0) + table + patch + b";"
    frames = read_picture(data).frames
    colours = [[frame[0, 0, :3].tolist(), frame[0, 7, :3].tolist()] for frame in frames]
    r, g, b = [255, 0, 0], [0, 255, 0], [0, 0, 255]
    assert colours == [[r, r], [b, r], [r, g]]


@pytest.mark.parametrize("suffix", [".png", ".webp", ".gif", ".avif"])
def test_animations_go_into_other_formats(suffix: str, folder: Path, tmp_path: Path) -> None:
    picture = read_picture(folder / "moving.png")
    if suffix == ".avif" and "AVIF" not in Image.registered_extensions().values():
        pytest.skip("Pillow without AVIF")
    kind, _ = output_format(picture.info, 24, 16, suffix)
    write_picture(picture, tmp_path / f"x{suffix}", kind)
    again = read_picture(tmp_path / f"x{suffix}")
    assert again.durations == picture.durations
    assert again.loop == picture.loop or suffix == ".avif"
    np.testing.assert_allclose(again.frames[1][0, 0].astype(int), [0, 0, 0], atol=12 if suffix == ".avif" else 0)


def test_an_apng_keeps_its_still_and_odd_times(tmp_path: Path) -> None:
    still, *frames = (Image.new("RGB", (4, 4), c) for c in ("white", "red", "lime"))
    still.save(tmp_path / "a.png", save_all=True, default_image=True, append_images=frames, duration=[100 / 3, 12.5])
    picture = read_picture(tmp_path / "a.png")
    assert picture.default_image and len(picture.frames) == 3
    write_picture(picture, tmp_path / "b.png", "PNG")
    with Image.open(tmp_path / "b.png") as image:
        assert image.info["default_image"] and image.n_frames == 3
        image.seek(1)
        assert image.info["duration"] == pytest.approx(100 / 3)
    write_picture(picture, tmp_path / "b.webp", "WEBP")
    assert [f[0, 0].tolist() for f in read_picture(tmp_path / "b.webp").frames] == [[255, 0, 0], [0, 255, 0]]


def test_a_gif_of_many_colours_keeps_black_and_white(tmp_path: Path) -> None:
    ramp = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    ramp[:3], ramp[-3:] = 0, 255
    picture = Picture([ramp, ramp[::-1].copy()], Info("GIF", 40, 40, "P", 3, frames=2), durations=[40, 40])
    write_picture(picture, tmp_path / "x.gif", "GIF")
    frames = read_picture(tmp_path / "x.gif").frames
    assert (frames[0][:2] == 0).all() and (frames[0][-2:] == 255).all() and (frames[1][:2] == 255).all()


# --- metadata ------------------------------------------------------------------------------------------------------


def test_sizes_in_exif_follow_and_the_thumbnail_goes(tmp_path: Path) -> None:
    entry = "<HHII"
    first = struct.pack("<H", 2) + struct.pack("<HHIHH", 274, 3, 1, 6, 0) + struct.pack(entry, 0x8769, 4, 1, 38)
    first += struct.pack("<I", 68)
    sizes = struct.pack("<H", 2) + struct.pack("<HHIHH", 40962, 3, 1, 16, 0) + struct.pack(entry, 40963, 4, 1, 24)
    small = struct.pack("<H", 2) + struct.pack(entry, 513, 4, 1, 98) + struct.pack(entry, 514, 4, 1, 4)
    raw = b"Exif\0\0II*\0\x08\0\0\0" + first + sizes + bytes(4) + small + bytes(4) + b"\xff\xd8\xff\xd9"
    colour = Image.fromarray(torture.quarters(torture.QUARTERS[:, :3]))
    torture.turned(colour, 6).save(tmp_path / "x.jpg", exif=raw)
    with Image.open(tmp_path / "x.jpg") as image:
        assert image.getexif().get_ifd(ExifTags.IFD.IFD1)[514] == 4
    write_picture(twice(read_picture(tmp_path / "x.jpg")), tmp_path / "y.jpg", "JPEG")
    with Image.open(tmp_path / "y.jpg") as image:
        found = image.getexif()
        assert image.size == (48, 32)
        assert (found.get_ifd(0x8769)[40962], found.get_ifd(0x8769)[40963]) == (48, 32)
        assert found[274] == 1 and not found.get_ifd(ExifTags.IFD.IFD1)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif", ".avif"])
def test_metadata_goes_from_any_format_to_any_other(suffix: str, tmp_path: Path) -> None:
    colour = Image.fromarray(torture.quarters(torture.QUARTERS[:, :3]))
    icc = torture.display_p3()
    if suffix == ".avif" and ".avif" not in Image.registered_extensions():
        pytest.skip("Pillow without AVIF")
    colour.save(tmp_path / f"x{suffix}", exif=torture.exif(1), icc_profile=icc, quality=95)
    picture = read_picture(tmp_path / f"x{suffix}")
    for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        stream = io.BytesIO()
        write_picture(picture, stream, kind)
        with Image.open(io.BytesIO(stream.getvalue())) as image:
            assert image.format == kind
            assert image.getexif()[0x010F] == "Maker"
            assert image.getexif().get_ifd(0x8769)[0x9003] == "2001:02:03 04:05:06"
            assert image.info["icc_profile"] == icc


def test_big_endian_exif_is_patched_in_place(tmp_path: Path) -> None:
    """A maker's note keeps its place, as the offsets in it count from the start."""
    note = b"offsets count from the start of the block"
    block = torture.exif(8)
    block.endian = ">"
    block.get_ifd(0x8769)[0x927C] = note
    raw = block.tobytes()
    assert raw[6:8] == b"MM"
    Image.new("RGB", (8, 4)).save(tmp_path / "x.jpg", exif=raw)
    write_picture(read_picture(tmp_path / "x.jpg"), tmp_path / "y.jpg", "JPEG")
    with Image.open(tmp_path / "y.jpg") as image:
        assert image.size == (4, 8)
        assert image.info["exif"].index(note) == raw.index(note)
        assert image.getexif()[274] == 1


def test_damaged_exif_harms_no_pixels(tmp_path: Path) -> None:
    Image.new("RGB", (8, 4), "red").save(tmp_path / "x.png", exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage")
    write_picture(read_picture(tmp_path / "x.png"), tmp_path / "y.png", "PNG")
    with Image.open(tmp_path / "y.png") as image:
        assert image.getpixel((0, 0)) == (255, 0, 0) and "exif" not in image.info


def test_text_and_colour_chunks_stay_as_they_are(tmp_path: Path) -> None:
    chunks = [(b"gAMA", struct.pack(">I", 100_000)), (b"zTXt", b"Comment\0\0" + zlib.compress(b"long" * 99))]
    extra = b"".join(torture.png_chunk(*chunk) for chunk in chunks)
    for bits in (8, 16):
        data = torture.png(np.full((4, 4, 3), 9, np.uint16), bits, extra)
        stream = io.BytesIO()
        write_picture(read_picture(data), stream, "PNG")
        for chunk in chunks:
            assert torture.png_chunk(*chunk) in stream.getvalue()


def test_cmyk_is_converted_with_the_profile_in_the_file(tmp_path: Path) -> None:
    pyvips = pytest.importorskip("pyvips")
    profile = bytes(pyvips.Image.profile_load("cmyk"))
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "x.tif", icc_profile=profile)
    picture = read_picture(tmp_path / "x.tif")
    assert any("the file's own profile" in note for note in picture.notes) and picture.metadata.icc is None
    cyan = picture.frames[0][0, 0].tolist()
    assert cyan[0] < 60 and 130 < cyan[1] < 190 and cyan[2] > 200  # printed cyan, not the screen's 0, 255, 255
    with RowReader(tmp_path / "x.tif") as rows:
        np.testing.assert_allclose(rows.read(8)[0, 0].astype(int), cyan, atol=2)
        assert rows.metadata.icc is None and rows.notes == picture.notes
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "y.tif")
    plain = read_picture(tmp_path / "y.tif")
    assert plain.frames[0][0, 0].tolist() == [0, 255, 255] and any("plain formula" in note for note in plain.notes)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "BMP", "PPM"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_lossless_formats_keep_every_value(kind: str, channels: int, dtype: str) -> None:
    rng = np.random.default_rng(channels)
    frame = rng.integers(0, np.iinfo(dtype).max, (7, 9, channels), dtype, endpoint=True)
    frame[0, 0], frame[-1, -1] = 0, np.iinfo(dtype).max
    frame[0, 0, 1::2] = frame[0, 0, 1::2] if channels in (1, 3) else 0  # a colour under full transparency
    picture, stream = Picture([frame], Info(kind, 9, 7, "", channels, dtype)), io.BytesIO()
    if (dtype == "uint16" and kind in ("WEBP", "BMP")) or (channels in (2, 4) and kind in ("BMP", "PPM")):
        with pytest.raises(SRError, match=f"{kind} cannot hold .* use PNG"):
            write_picture(picture, stream, kind)
        assert not stream.getvalue()
        return
    write_picture(picture, stream, kind)
    found = read_picture(stream.getvalue())
    again = found.frames[0]
    if kind in ("WEBP", "BMP") and channels < 3 and again.shape[2] != channels:
        again = again[..., [0, 3] if channels == 2 else [0]]
    np.testing.assert_array_equal(again, frame)
    assert again.dtype == dtype


def test_jpeg_has_full_chroma_and_the_stated_quality() -> None:
    frame = np.zeros((32, 32, 3), np.uint8)
    frame[:, ::2, 0], frame[:, 1::2, 2] = 255, 255
    picture = Picture([frame], Info("PNG", 32, 32, "RGB", 3))
    streams = {}
    for quality in (None, 95, 30):
        stream = io.BytesIO()
        write_picture(picture, stream, "JPEG", quality)
        streams[quality] = stream.getvalue()
    assert streams[None] == streams[95] and len(streams[30]) < len(streams[95])
    with Image.open(io.BytesIO(streams[95])) as image:
        assert [layer[1:3] for layer in image.layer] == [(1, 1)] * 3
        assert np.abs(np.asarray(image).astype(int) - frame).max() < 30


def test_float_values_beyond_one_come_back(tmp_path: Path) -> None:
    values = np.array([[-3.5, 0, 0.25], [1, 700, 1200.5]], np.float32)
    Image.fromarray(values).save(tmp_path / "x.tif")
    picture = read_picture(tmp_path / "x.tif")
    assert picture.frames[0].min() == 0 and picture.frames[0].max() == 1
    write_picture(picture, tmp_path / "y.tif", "TIFF")
    with Image.open(tmp_path / "y.tif") as image:
        np.testing.assert_allclose(np.asarray(image), values, atol=1e-3)
    Image.fromarray(np.array([[0.5, np.nan]], np.float32)).save(tmp_path / "n.tif")
    with pytest.raises(SRError, match=r"n\.tif holds NaN"):
        read_picture(tmp_path / "n.tif")


# --- decisions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "size", "suffix", "message"),
    [
        (Info("PNG", 1, 1, "RGB", 3), (65_501, 10), ".jpg", "JPEG holds at most 65,500 .* use PNG"),
        (Info("JPEG", 1, 1, "RGB", 3), (70_000, 10), None, "JPEG holds at most 65,500 .* use PNG"),
        (Info("PNG", 1, 1, "RGB", 3), (10, 16_384), ".webp", "WEBP holds at most 16,383 .* use PNG"),
        (Info("PNG", 1, 1, "RGB", 3), (40_000, 40_000), ".bmp", "BMP holds at most 4 GB.* use PNG"),
        (Info("GIF", 1, 1, "P", 3, frames=2), (65_536, 1), None, "GIF holds at most 65,535"),
        (Info("PNG", 1, 1, "RGBA", 4), (2, 2), ".jpg", "JPEG cannot hold transparency; use PNG"),
        (Info("PNG", 1, 1, "LA", 2), (2, 2), ".bmp", "BMP cannot hold transparency"),
        (Info("PNG", 1, 1, "RGB;16", 3, "uint16"), (2, 2), ".jpeg", "JPEG cannot hold 16 bits .* use PNG"),
        (Info("PNG", 1, 1, "I;16", 1, "uint16"), (2, 2), ".WEBP", "WEBP cannot hold 16 bits"),
        (Info("TIFF", 1, 1, "F", 1, "float32"), (2, 2), ".png", "PNG cannot hold floats .* use TIFF"),
        (Info("GIF", 1, 1, "P", 3, frames=2), (2, 2), ".jpg", "JPEG cannot hold an animation; use GIF"),
        (Info("PNG", 1, 1, "RGB", 3), (2, 2), ".xyz", "suffix '.xyz'; use one of .*.png"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    info: Info, size: tuple[int, int], suffix: str | None, message: str
) -> None:
    with pytest.raises(SRError, match=message) as found:
        output_format(info, *size, suffix)
    assert "\n" not in str(found.value)


def test_formats_of_results() -> None:
    assert output_format(Info("JPEG", 1, 1, "RGB", 3), 2, 2) == ("JPEG", ".jpg")
    assert output_format(Info("GIF", 1, 1, "P", 3), 2, 2) == ("PNG", ".png")
    assert output_format(Info("JPEG2000", 1, 1, "RGB", 3), 2, 2) == ("PNG", ".png")
    assert output_format(Info("FITS", 1, 1, "F", 1, "float32"), 2, 2) == ("TIFF", ".tif")
    assert output_format(Info("PNG", 1, 1, "RGB", 3), 2, 2, "JPG") == ("JPEG", ".JPG")


# --- what goes wrong -----------------------------------------------------------------------------------------------


def broken(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    found: dict[str, tuple[Path, str]] = {}
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for suffix in (".png", ".jpg", ".webp", ".tif", ".bmp", ".gif"):
        path = tmp_path / f"cut{suffix}"
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        found[path.name] = path, "damaged or incomplete|not a picture"
    deep = torture.png(noise.astype(np.uint16) * 257, 16)
    for name, data, message in (
        ("cut16.png", deep[: len(deep) // 2], "damaged or incomplete"),
        ("cut16.tif", torture.tiff(noise.astype(np.uint16))[:900], "damaged or incomplete"),
        ("cut16.ppm", b"P6\n9 9\n65535\n" + bytes(99), "damaged or incomplete"),
        ("head.png", deep[:20], "damaged or incomplete"),
        ("empty.png", b"", "empty"),
        ("text.jpg", b"<html>404</html>", "not a picture"),
        ("five.tif", torture.tiff(np.zeros((4, 4, 5), np.uint8)), "5 channels per pixel"),
    ):
        (tmp_path / name).write_bytes(data)
        found[name] = tmp_path / name, message
    found["nowhere"] = tmp_path / "nowhere.png", "does not exist"
    found["folder"] = tmp_path, "is a folder"
    return found


@pytest.mark.parametrize("whole", [True, False])
def test_broken_files_are_named_in_one_line(tmp_path: Path, whole: bool) -> None:
    for name, (path, message) in broken(tmp_path).items():
        with pytest.raises(SRError, match=message) as found:
            if whole:
                read_picture(path)
            else:
                with RowReader(path) as rows:
                    while len(rows.read(16)):
                        pass
        assert path.name in str(found.value), name
        assert "\n" not in str(found.value), name


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # the superuser may do anything
    with pytest.raises(SRError, match=r"no permission to read .*x\.png"):
        read_picture(tmp_path / "x.png")
    with pytest.raises(SRError, match=r"cannot write .*y\.png \(Permission denied\)"):
        write_picture(Picture([np.zeros((2, 2, 3), np.uint8)], Info("PNG", 2, 2, "RGB", 3)), tmp_path / "y.png", "PNG")


@pytest.mark.parametrize("name", ["rgb.png", "deep3.png", "deep3.tif", "moving.gif", "rgba.webp", "exif1.jpg"])
def test_a_full_disk_leaves_the_old_file(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    picture = read_picture(folder / name)
    target = tmp_path / name
    target.write_bytes(b"old")
    opened = Path.open

    def full(self: Path, mode: str = "r", **kwargs: object) -> io.IOBase:
        if "x" not in mode:
            return opened(self, mode, **kwargs)
        self.touch()
        return open(os.open("/dev/full", os.O_WRONLY), "wb")  # noqa: PTH123 (a device for the file)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SRError, match=rf"cannot write .*{name} \({os.strerror(errno.ENOSPC)}\)"):
        write_picture(picture, target, picture.info.format)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert target.read_bytes() == b"old"


def test_without_libvips_all_but_deep_colour_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyvips", None)
    assert read_picture(folder / "rgb.png").frames[0].shape == (16, 24, 3)
    with pytest.raises(SRError, match=r"pip install 'pyvips\[binary\]'"):
        read_picture(folder / "deep3.png")


def test_too_large_for_the_memory_is_refused_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for name in ("rgb.png", "deep3.png", "exif1.jpg", "moving.gif"):
        with pytest.raises(SRError, match=r"more than (the )?200 pixels"):
            read_picture(folder / name)
        if name != "moving.gif":
            with RowReader(folder / name) as rows:
                assert rows.read(99).shape == (16, 24, 3)
