from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sr.errors import SRError
from sr.image import (
    check_output,
    image_size,
    list_images,
    open_image,
    read_rgb,
    rgb_size,
    save_image,
    to_image,
    to_tensor,
)


def grey_ramp(h: int = 4, w: int = 6) -> np.ndarray:
    return np.arange(h * w, dtype=np.uint8).reshape(h, w)


# --- finding -----------------------------------------------------------------------------------------------------


def test_list_images_recurses_sorts_and_skips_hidden(tmp_path: Path) -> None:
    wanted = ["a.PNG", "b/c.jpg", "b/é 字.webp", "d.tif"]
    junk = [".hidden.png", ".git/x.png", "__MACOSX/a.png", "b/.DS_Store", "b/._c.jpg", "notes.txt", "a.npy"]
    for name in wanted + junk:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [p.relative_to(tmp_path).as_posix() for p in list_images(tmp_path)] == wanted


def test_list_images_survives_a_link_to_its_own_parent(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert list_images(tmp_path) == [tmp_path / "a.png"]


def test_list_images_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    with pytest.raises(SRError, match=r"nowhere does not exist"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(SRError, match=r"x\.txt is a file, not a folder"):
        list_images(tmp_path / "x.txt")
    with pytest.raises(SRError, match=r"no picture in .*looked for .*\.jpg .*\.png"):
        list_images(tmp_path)


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
def test_exif_orientation_is_applied_once(tmp_path: Path, turn: int, suffix: str) -> None:
    upright = Image.fromarray(np.kron(grey_ramp(2, 3) * 40, np.ones((16, 16), np.uint8)))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that the orientation will undo
    stored = upright.transpose(Image.Transpose(undo[turn])) if turn > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = turn
    path = tmp_path / f"x{suffix}"
    stored.convert("RGB").save(path, exif=exif, quality=95)
    assert image_size(path) == (32, 48)
    image = open_image(path)
    assert image.getexif().get(0x0112, 1) == 1
    np.testing.assert_allclose(np.asarray(image.convert("L"), float), np.asarray(upright, float), atol=6)
    assert read_rgb(path).shape == (3, 32, 48)


def damaged(tmp_path: Path, kind: str, suffix: str = ".png") -> Path:
    path = tmp_path / f"{kind}{suffix}"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "garbled":
        path.write_bytes(data[:60] + bytes(len(data) - 60))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("<html>404</html>")
    return path


@pytest.mark.parametrize(
    ("kind", "suffix", "message"),
    [
        ("truncated", ".png", "damaged or incomplete"),
        ("truncated", ".jpg", "damaged or incomplete"),
        ("truncated", ".webp", "damaged or incomplete|not a picture"),
        ("truncated", ".tif", "damaged or incomplete"),
        ("truncated", ".bmp", "damaged or incomplete"),
        ("garbled", ".png", "damaged or incomplete"),
        ("empty", ".png", r"empty \(0 bytes\)"),
        ("text", ".jpg", "not a picture"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, kind: str, suffix: str, message: str) -> None:
    path = damaged(tmp_path, kind, suffix)
    with pytest.raises(SRError, match=message) as info:
        open_image(path)
    assert path.name in str(info.value)
    assert str(info.value).count("\n") <= 1


def test_other_reading_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SRError, match=r"x\.png does not exist"):
        open_image(tmp_path / "x.png")
    with pytest.raises(SRError, match="is a folder, not a picture"):
        open_image(tmp_path)
    path = tmp_path / "big.png"
    Image.new("L", (30, 30)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(SRError, match=r"big\.png has more than 200 pixels"):
        open_image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow only warns here: still read, without the warning
    assert open_image(path).size == (30, 30)


def test_read_rgb_of_every_mode(tmp_path: Path) -> None:
    grey = grey_ramp() * 10
    colour = np.stack([grey, 255 - grey, grey // 2], -1)
    alpha = np.full_like(grey, 7)

    def read(image: Image.Image, suffix: str = ".png") -> np.ndarray:
        image.save(tmp_path / f"x{suffix}")
        x = read_rgb(tmp_path / f"x{suffix}")
        assert x.dtype == torch.uint8 and x.is_contiguous()
        return x.permute(1, 2, 0).numpy()

    three = np.repeat(grey[..., None], 3, -1)
    np.testing.assert_array_equal(read(Image.fromarray(grey)), three)
    np.testing.assert_array_equal(read(Image.fromarray(np.stack([grey, alpha], -1))), three)
    np.testing.assert_array_equal(read(Image.fromarray(colour)), colour)
    np.testing.assert_array_equal(read(Image.fromarray(np.concatenate([colour, alpha[..., None]], -1))), colour)
    np.testing.assert_array_equal(read(Image.fromarray(grey > 90)), np.where(three > 90, 255, 0))
    palette = Image.fromarray(colour).quantize(24)
    np.testing.assert_array_equal(read(palette), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize("function", [read_rgb, rgb_size])
def test_what_has_no_certain_rgb_is_refused(tmp_path: Path, function: Callable[[Path], object]) -> None:
    for suffix in (".tif", ".jpg"):
        Image.new("CMYK", (16, 16)).save(tmp_path / f"x{suffix}")
        with pytest.raises(SRError, match=rf"x\{suffix} is CMYK"):
            function(tmp_path / f"x{suffix}")
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(SRError, match="32-bit samples"):
        function(tmp_path / "x.tif")
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    for suffix in (".png", ".webp", ".tif"):
        frames[0].save(tmp_path / f"moving{suffix}", save_all=True, append_images=frames[1:])
        with pytest.raises(SRError, match=rf"moving\{suffix} is an animation of 3 frames"):
            function(tmp_path / f"moving{suffix}")


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm"])
def test_16_bit_grey_is_scaled_by_type(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 128, 129, 255], [256, 257, 65406, 65535]], dtype=np.uint16)  # the first row fits in 8 bits
    Image.fromarray(values).save(tmp_path / f"x{suffix}")
    x = read_rgb(tmp_path / f"x{suffix}")
    assert x[0].tolist() == [[0, 0, 1, 1], [1, 1, 254, 255]]
    assert torch.equal(x[0], x[2])
    assert to_tensor(open_image(tmp_path / f"x{suffix}"))[0, 1, 3] == 1
    assert to_tensor(open_image(tmp_path / f"x{suffix}"))[0, 0, 3] == pytest.approx(255 / 65535)


# --- converting --------------------------------------------------------------------------------------------------


def test_rounding_is_to_the_nearest_and_8_bit_values_survive() -> None:
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).expand(3, -1, -1)
    image = to_image(x.float() / 255)
    np.testing.assert_array_equal(np.asarray(image).transpose(2, 0, 1), x.numpy())
    assert torch.equal(to_tensor(image), x.float() / 255)
    y = torch.tensor([[[0.4999, 0.5001, 254.4999, 254.5001, -3.0, 300.0]]]) / 255
    assert np.asarray(to_image(y)).tolist() == [[0, 1, 254, 255, 0, 255]]
    assert np.asarray(to_image(torch.ones(1, 1, 1, dtype=torch.bfloat16))).item() == 255


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_tensor_to_picture_and_back(channels: int) -> None:
    x = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    assert torch.equal(to_tensor(to_image(x)), x / 255)
    assert torch.equal(to_tensor(to_image(x[None])), x / 255)
    assert torch.equal(to_tensor(x.permute(1, 2, 0).numpy()), x / 255)


def test_16_bits_round_trip_for_one_channel() -> None:
    values = np.array([[0, 1, 257, 65534, 65535]], dtype=np.uint16)
    image = to_image(to_tensor(values), bits=16)
    assert image.mode == "I;16"
    np.testing.assert_array_equal(np.asarray(image), values)
    with pytest.raises(SRError, match="16 bits for 3 channels"):
        to_image(torch.zeros(3, 2, 2), bits=16)


def test_conversions_refuse_what_they_cannot_mean() -> None:
    with pytest.raises(SRError, match=r"not \(2, 3, 4, 5\)"):
        to_image(torch.zeros(2, 3, 4, 5))
    with pytest.raises(SRError, match="NaN"):
        to_image(torch.full((3, 2, 2), float("nan")))
    with pytest.raises(SRError, match="int64"):
        to_image(torch.zeros(3, 2, 2, dtype=torch.int64))
    with pytest.raises(SRError, match="int32"):
        to_tensor(np.zeros((2, 2), np.int32))
    with pytest.raises(SRError, match="shape"):
        to_tensor(np.zeros(3, np.uint8))


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".webp", ".bmp", ".tiff", ".ppm"])
def test_lossless_formats_keep_every_pixel(tmp_path: Path, suffix: str) -> None:
    x = torch.randint(0, 256, (3, 9, 11), dtype=torch.uint8)
    save_image(to_image(x), tmp_path / f"é{suffix}")
    assert torch.equal(read_rgb(tmp_path / f"é{suffix}"), x)
    assert [p.name for p in tmp_path.iterdir()] == [f"é{suffix}"]


def test_jpeg_defaults_keep_chroma_and_options_win(tmp_path: Path) -> None:
    x = torch.zeros(3, 32, 32, dtype=torch.uint8)
    x[0, ::2], x[2, 1::2] = 255, 255  # red and blue lines: one colour after chroma subsampling
    save_image(to_image(x), tmp_path / "x.jpg")
    assert (read_rgb(tmp_path / "x.jpg").int() - x.int()).abs().max() < 30
    save_image(to_image(x), tmp_path / "y.jpg", quality=10)
    assert (tmp_path / "y.jpg").stat().st_size < (tmp_path / "x.jpg").stat().st_size


def test_saving_replaces_and_leaves_nothing_behind_on_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    save_image(Image.new("RGB", (4, 4)), path)
    before = path.read_bytes()
    with pytest.raises(SRError, match=r"cannot write .*x\.jpg: JPEG does not take it .*use \.png"):
        save_image(Image.new("RGBA", (4, 4)), path)
    assert path.read_bytes() == before

    class Interrupted(Image.Image):
        def save(self, fp: object, *args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_image(Interrupted(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    save_image(Image.new("RGB", (8, 8)), path)
    assert open_image(path).size == (8, 8)


def test_saving_says_what_is_wrong(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 4))
    with pytest.raises(SRError, match=r"suffix '\.xyz'; use one of"):
        save_image(image, tmp_path / "x.xyz")
    with pytest.raises(SRError, match=r"suffix ''"):
        save_image(image, tmp_path / "x")
    with pytest.raises(SRError, match=r"the folder .*nowhere does not exist"):
        save_image(image, tmp_path / "nowhere" / "x.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(SRError, match=r"cannot write .*taken\.png"):
        save_image(image, tmp_path / "taken.png")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.png"]


def test_outputs_are_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "in.png").touch()
    check_output(tmp_path / "out.png", inputs=[tmp_path / "in.png"])
    with pytest.raises(SRError, match=r"in\.png is the input as well"):
        check_output(tmp_path / "." / "in.png", inputs=[tmp_path / "in.png"])
    with pytest.raises(SRError, match="use one of"):
        check_output(tmp_path / "x.gif")


def test_nothing_is_lost_silently(tmp_path: Path) -> None:
    clear = np.zeros((8, 8, 4), np.uint8)
    clear[..., 0] = 200  # a colour under full transparency
    for suffix in (".png", ".webp"):
        save_image(Image.fromarray(clear), tmp_path / f"x{suffix}")
        np.testing.assert_array_equal(np.asarray(open_image(tmp_path / f"x{suffix}")), clear)
    deep = Image.fromarray(np.full((4, 4), 300, np.uint16))
    for suffix in (".png", ".tif", ".pgm"):
        save_image(deep, tmp_path / f"d{suffix}")
        assert np.asarray(open_image(tmp_path / f"d{suffix}")).max() == 300
    for suffix in (".webp", ".jpg", ".bmp"):
        with pytest.raises(SRError, match=r"does not take .*use \.png"):
            save_image(deep, tmp_path / f"d{suffix}")


def test_an_unwritable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # the superuser may write anywhere
    with pytest.raises(SRError, match=r"cannot write .*x\.png \(Permission denied\); check the folder"):
        save_image(Image.new("RGB", (4, 4)), tmp_path / "x.png")


def test_pictures_and_sets_import_no_lightning() -> None:
    code = "import sys, sr.image, sr.data; sys.exit(any(m.split('.')[0] == 'lightning' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
