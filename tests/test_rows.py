"""Stills read and written a few rows at a time."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torture
from PIL import Image
from raw_files import bytes_of, display_p3, png, png_chunk

from sr.errors import SRError
from sr.pictures import Info, RowReader, RowWriter, encoders, needs_rows, read_picture

ROOT = Path(__file__).parents[1]


def blocks(reader: RowReader, count: int) -> Iterator[np.ndarray]:
    while len(rows := reader.read(count)):
        yield rows


def noise(height: int, width: int, channels: int, dtype: str = "uint8") -> np.ndarray:
    top = np.iinfo(dtype).max
    return np.random.default_rng(3).integers(0, top, (height, width, channels), dtype, endpoint=True)


def test_rows_are_those_of_the_whole_picture(tmp_path: Path) -> None:
    """Of every kind of file, in blocks that do not fit, also from bytes."""
    for case in torture.make(tmp_path):
        picture = read_picture(tmp_path / case.name)
        for source in (tmp_path / case.name, (tmp_path / case.name).read_bytes()):
            with RowReader(source) as reader:
                rows = np.concatenate(list(blocks(reader, 7)))
                assert (reader.width, reader.height) == (case.width, case.height), case.name
                assert (reader.channels, reader.dtype) == (rows.shape[2], rows.dtype), case.name
            # the two libraries' conversions of colours between spaces may round differently
            np.testing.assert_allclose(rows.astype(float), picture.frames[0], atol=1e-6, err_msg=case.name)


def test_what_is_not_read_in_order_is_said(tmp_path: Path) -> None:
    torture.make(tmp_path)
    for name, words in (
        ("interlaced.png", "is interlaced"),
        ("exif6.jpg", "is stored turned"),
        ("rgba.webp", "cannot be read in rows"),
        ("rgb.png", ""),
        ("exif2.jpg", ""),
    ):
        with RowReader(tmp_path / name) as reader:
            reader.read(1)
            assert words in " ".join(reader.notes) and bool(reader.notes) == bool(words), name


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "WEBP"])
def test_written_rows_come_back(kind: str, channels: int, dtype: str, tmp_path: Path) -> None:
    content, path = noise(37, 41, channels, dtype), tmp_path / "x"
    if (kind == "PPM" and channels in (2, 4)) or (kind == "WEBP" and (dtype == "uint16" or channels < 3)):
        pytest.skip("the format has no such pictures")
    with RowWriter(path, 41, 37, channels, dtype, kind) as writer:
        for first in range(0, 37, 5):
            writer.write(content[first : first + 5])
            assert not path.exists()
    np.testing.assert_array_equal(read_picture(path).frames[0], content)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    if dtype == "uint8":
        with Image.open(path) as image:
            np.testing.assert_array_equal(np.atleast_3d(np.asarray(image)), content)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_blocks_of_the_encoder_join_without_a_seam(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_BLOCK", 500)  # 4 rows
    content = noise(23, 40, 3)
    with RowWriter(tmp_path / "x", 40, 23, 3, "uint8", kind) as writer:
        for first, last in ((0, 1), (1, 12), (12, 13), (13, 23)):
            writer.write(content[first:last])
    with Image.open(tmp_path / "x") as image:
        np.testing.assert_array_equal(np.asarray(image), content)


def test_a_tiff_file_beyond_4_gb_has_wide_offsets(tmp_path: Path) -> None:
    """70,000 x 20,000 RGB have 4.2 GB; black takes little room on the disk, so the first rows tell."""
    file = io.BytesIO()
    extra = read_picture(bytes_of(Image.new("RGB", (1, 1)), "PNG", dpi=(300, 300), exif=torture.exif(1)))
    writer = encoders.TiffRows(file, 70_000, 20_000, 3, "uint8", extra.metadata)
    writer.write(np.full((3, 70_000, 3), 7, np.uint8))
    writer._tags[257] = writer._tags[278] = encoders.ifd.Value.of(4, 3)  # as if it ended here
    writer._strip = 3
    writer.close()
    assert file.getvalue()[:4] == b"II\x2b\0"
    with Image.open(io.BytesIO(file.getvalue())) as image:
        assert image.size == (70_000, 3) and image.getpixel((69_999, 2)) == (7, 7, 7)
        assert image.tag_v2[271] == "Maker" and image.info["dpi"] == pytest.approx((300, 300), abs=0.01)


def test_jpeg_rows_carry_metadata_and_full_chroma(tmp_path: Path) -> None:
    ramp = np.stack(np.broadcast_arrays(np.arange(160)[:, None], np.arange(200), 90), -1).astype(np.uint8)
    kept = {"exif": torture.exif(1), "icc_profile": display_p3(), "dpi": (300, 300), "comment": b"words"}
    Image.fromarray(ramp).save(tmp_path / "x.jpg", **kept, xmp=torture.XMP % 1)
    with RowReader(tmp_path / "x.jpg") as reader, RowWriter.like(reader, tmp_path / "y.jpg", 200, 160, "JPEG") as out:
        for first, _ in enumerate(blocks(reader, 1)):
            out.write(ramp[first : first + 1])
    with Image.open(tmp_path / "y.jpg") as image:
        assert [layer[1:3] for layer in image.layer] == [(1, 1)] * 3
        assert np.abs(np.asarray(image).astype(int) - ramp).max() <= 3
        assert image.getexif()[0x010F] == "Maker" and image.info["dpi"] == (300, 300)
        assert image.info["icc_profile"] == kept["icc_profile"] and image.info["comment"] == b"words"
        assert b"Torture" in image.info["xmp"]


def test_16_bit_rows_keep_metadata(tmp_path: Path) -> None:
    icc = display_p3()
    data = png(noise(9, 9, 3, "uint16"), 16, png_chunk(b"tEXt", b"Author\0me"))
    (tmp_path / "x.png").write_bytes(data)
    with RowReader(tmp_path / "x.png") as reader:
        reader.metadata.icc = icc
        with RowWriter.like(reader, tmp_path / "y.png", 9, 9, "PNG") as writer:
            writer.write(reader.read(9))
    with Image.open(tmp_path / "y.png") as image:
        assert image.text == {"Author": "me"} and image.info["icc_profile"] == icc
    np.testing.assert_array_equal(read_picture(tmp_path / "y.png").frames[0], read_picture(data).frames[0])


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG", "WEBP"])
def test_nothing_is_left_of_a_picture_that_was_given_up(kind: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(KeyError), RowWriter(tmp_path / "x", 300, 200, 3, "uint8", kind) as writer:
        writer.write(noise(100, 300, 3))
        raise KeyError
    writer = RowWriter(tmp_path / "x", 300, 200, 3, "uint8", kind)
    writer.write(noise(100, 300, 3))
    with pytest.raises(SRError, match="100 of its 200 rows"):
        writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == b"old"


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "x.png", 4, 2, 3, "uint8", "PNG") as writer:
        with pytest.raises(SRError, match=r"not \(1, 5, 3\)"):
            writer.write(np.zeros((1, 5, 3), np.uint8))
        with pytest.raises(SRError, match="of uint16"):
            writer.write(np.zeros((1, 4, 3), np.uint16))
        writer.write(np.zeros((2, 4, 3), np.uint8))
        with pytest.raises(SRError, match="given more"):
            writer.write(np.zeros((1, 4, 3), np.uint8))
    for channels, dtype, kind in ((4, "uint8", "JPEG"), (3, "uint16", "JPEG"), (3, "float32", "PNG")):
        with pytest.raises(SRError, match=f"{kind} cannot hold"):
            RowWriter(tmp_path / "y", 4, 2, channels, dtype, kind)
    with pytest.raises(SRError, match="cannot write"):
        RowWriter(tmp_path / "nowhere" / "y.png", 4, 2, 3, "uint8", "PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
def test_a_full_disk_ends_the_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    opened = Path.open

    def full(self: Path, mode: str = "r", **kwargs: object) -> object:
        if "x" not in mode:
            return opened(self, mode, **kwargs)
        self.touch()
        return opened(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", full)
    with (
        pytest.raises(SRError, match="No space left on device"),
        RowWriter(tmp_path / "x", 300, 2000, 3, "uint8", kind) as writer,
    ):
        for _ in range(20):
            writer.write(noise(100, 300, 3))
    assert not list(tmp_path.iterdir())


def test_without_libvips_rows_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "pyvips", None)
    with pytest.raises(SRError, match=r"pip install 'pyvips\[binary\]'"):
        RowReader(tmp_path / "x.png")


# --- memory --------------------------------------------------------------------------------------------------------


def test_only_large_stills_need_rows() -> None:
    assert not needs_rows(Info("PNG", 1000, 1000, "RGB", 3), 4000, 4000)
    assert needs_rows(Info("PNG", 5000, 5000, "RGB", 3), 20_000, 20_000)
    assert not needs_rows(Info("GIF", 5000, 5000, "P", 3, frames=2), 20_000, 20_000)


@pytest.mark.parametrize(("source", "kind"), [("png", "TIFF"), ("jpg", "PNG"), ("tif", "JPEG")])
def test_memory_does_not_grow_with_the_picture(source: str, kind: str, tmp_path: Path) -> None:
    """4 megapixels become 16 (48 MB); what is read and written in rows takes less than half of this."""
    Image.new("RGB", (2000, 2000), (9, 90, 200)).save(tmp_path / f"x.{source}")
    code = f"""
import resource, sys
from sr.pictures import RowReader, RowWriter
import pyvips
def run(path, factor):
    with RowReader(path) as reader:
        w, h = factor * reader.width, factor * reader.height
        with RowWriter.like(reader, sys.argv[1] + "/y", w, h, "{kind}") as writer:
            while len(rows := reader.read(16)):
                writer.write(rows.repeat(factor, 0).repeat(factor, 1))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
run(sys.argv[1] + "/x.{source}", 2)
print(peak() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 + 12  # with the 12 MB of the input; whole, the two take more than 60
