"""What goes with the pixels: EXIF, profiles, XMP, text, and what formats have no place for."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torture
from PIL import ExifTags, Image, PngImagePlugin, features
from raw_files import bytes_of, display_p3, png, png_chunk

from sr.pictures import Picture, RowReader, ifd, left_out, read_picture, write_picture
from sr.pictures.header import read_header


def twice(picture: Picture) -> Picture:
    return replace(picture, frames=[frame.repeat(2, 0).repeat(2, 1) for frame in picture.frames])


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
    icc = display_p3()
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


def test_what_unpacks_to_more_than_a_profile_can_be_is_left_out() -> None:
    """Twice as much as is taken; a damaged profile goes the same way."""
    bomb = zlib.compress(bytes(1 << 27), 9)
    for packed in (bomb, zlib.compress(display_p3())[:-9]):
        data = png(np.zeros((2, 2, 3), np.uint8), 8, png_chunk(b"iCCP", b"x\0\0" + packed))
        assert read_header(data).metadata.icc is None


def test_tags_that_all_claim_the_same_bytes_are_refused() -> None:
    """Thirty values of 8 MB, of a file that has 8 MB."""
    length = 1 << 23
    entries = b"".join(struct.pack("<HHII", tag, 7, length, 0) for tag in range(1000, 1030))
    block = b"II*\0\x08\0\0\0" + struct.pack("<H", 30) + entries + bytes(4)
    with pytest.raises(ValueError, match="damaged tags"):
        ifd.parse(block.ljust(length, b"\0"))


def test_text_and_colour_chunks_stay_as_they_are(tmp_path: Path) -> None:
    chunks = [(b"gAMA", struct.pack(">I", 100_000)), (b"zTXt", b"Comment\0\0" + zlib.compress(b"long" * 99))]
    extra = b"".join(png_chunk(*chunk) for chunk in chunks)
    for bits in (8, 16):
        data = png(np.full((4, 4, 3), 9, np.uint16), bits, extra)
        stream = io.BytesIO()
        write_picture(read_picture(data), stream, "PNG")
        for chunk in chunks:
            assert png_chunk(*chunk) in stream.getvalue()


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


def test_a_comment_becomes_text_in_png() -> None:
    data = bytes_of(Image.new("RGB", (4, 4)), "JPEG", comment="größer".encode())
    stream = io.BytesIO()
    write_picture(read_picture(data), stream, "PNG")
    with Image.open(stream) as image:
        assert image.text["Comment"] == "größer"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("PNG", []),
        ("TIFF", ["text"]),
        ("JPEG", ["EXIF data", "text"]),
        ("BMP", ["colour profile", "EXIF data", "XMP data", "text"]),
    ],
)
def test_what_a_format_has_no_place_for_is_said(kind: str, lost: list[str]) -> None:
    words = PngImagePlugin.PngInfo()
    words.add_text("Author", "somebody")
    words.add_itxt("XML:com.adobe.xmp", (torture.XMP % 1).decode())
    block = torture.exif(1)
    block[0x010E] = "x" * 66_000  # more than a segment of a JPEG file holds
    data = bytes_of(Image.new("RGB", (4, 4)), "PNG", exif=block, icc_profile=display_p3(), pnginfo=words)
    picture = read_picture(data)
    assert left_out(picture.metadata, kind) == [
        f"{kind} has no place for the file's {x}, which is left out" for x in lost
    ]
    stream = io.BytesIO()
    write_picture(picture, stream, kind)
    with Image.open(stream) as image:
        assert ("icc_profile" not in image.info) == ("colour profile" in lost)
        assert (0x010E not in image.getexif()) == ("EXIF data" in lost)
        assert hasattr(image, "text") != ("text" in lost)


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_deep_avif_is_noted(bits: int) -> None:
    pyvips = pytest.importorskip("pyvips")
    if not features.check("avif"):
        pytest.skip("Pillow without AVIF")
    image = pyvips.Image.black(8, 8, bands=3).cast("ushort").copy(interpretation="rgb16")
    try:
        data = image.heifsave_buffer(compression="av1", bitdepth=bits)
    except pyvips.Error:
        pytest.skip("libvips writes no AVIF")
    assert read_picture(data).notes == ([] if bits == 8 else [f"the file's {bits} bits per sample become 8"])
