"""Whole pictures: what is read from files that others made, and what others read from files that we made."""

from __future__ import annotations

import errno
import io
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torture
from independent_readers import check_metadata, frames_of, in_unit
from PIL import Image
from raw_files import png, tiff
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


@pytest.mark.parametrize("count", [4, 250])
def test_a_gif_of_few_colours_keeps_each(tmp_path: Path, count: int) -> None:
    """Also neighbours, one level apart."""
    grey = (20 + np.arange(24 * 30) % count if count > 4 else np.resize([20, 22, 250, 252], 24 * 30)).astype(np.uint8)
    frame = np.repeat(grey.reshape(24, 30, 1), 3, -1)
    picture = Picture([frame, frame[::-1].copy()], Info("GIF", 30, 24, "P", 3, frames=2), durations=[40, 40])
    write_picture(picture, tmp_path / "x.gif", "GIF")
    again = read_picture(tmp_path / "x.gif").frames
    assert np.array_equal(again[0], frame) and np.array_equal(again[1], frame[::-1])


def test_white_stays_white_among_near_whites_of_a_gif(tmp_path: Path) -> None:
    frame = np.random.default_rng(0).integers(240, 256, (40, 40, 3), dtype=np.uint8)
    frame[10:30] = 255
    picture = Picture([frame, frame], Info("GIF", 40, 40, "P", 3, frames=2), durations=[40, 40])
    write_picture(picture, tmp_path / "x.gif", "GIF")
    assert (read_picture(tmp_path / "x.gif").frames[0][10:30] == 255).all()


@pytest.mark.parametrize("suffix", [".webp", ".png"])
def test_animations_are_turned_upright(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "lime")]
    for frame in frames:
        frame.paste("blue", (0, 0, 6, 1))  # the top row, which is the right column when upright
    options = {"lossless": True} if suffix == ".webp" else {}
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], duration=50, exif=exif, **options)
    picture = read_picture(tmp_path / f"a{suffix}")
    assert (picture.info.width, picture.info.height) == (4, 6)
    for frame, colour in zip(picture.frames, ([255, 0, 0], [0, 255, 0]), strict=True):
        assert frame.shape[:2] == (6, 4)
        assert (frame[:, -1, :3] == [0, 0, 255]).all() and (frame[:, :-1, :3] == colour).all()


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
    deep = png(noise.astype(np.uint16) * 257, 16)
    for name, data, message in (
        ("cut16.png", deep[: len(deep) // 2], "damaged or incomplete"),
        ("cut16.tif", tiff(noise.astype(np.uint16))[:900], "damaged or incomplete"),
        ("cut16.ppm", b"P6\n9 9\n65535\n" + bytes(99), "damaged or incomplete"),
        ("head.png", deep[:20], "damaged or incomplete"),
        ("empty.png", b"", "empty"),
        ("text.jpg", b"<html>404</html>", "not a picture"),
        ("five.tif", tiff(np.zeros((4, 4, 5), np.uint8)), "5 channels per pixel"),
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
