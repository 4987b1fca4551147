"""The upscaler: any kind of picture in, the same kind out, and tiles that cannot be seen."""

import numpy as np
import pytest
import torch
from PIL import Image

import sr
from sr.inference import upscale_tiled
from sr.network import SRNetwork


class Nearest(SRNetwork):
    """Repeats pixels: its result is known without computing it."""

    receptive_field = 0

    def __init__(self, *, scale: int = 2, multiple_of: int = 1) -> None:
        super().__init__(scale=scale)
        self.multiple_of = multiple_of

    def upscale(self, lq):
        return lq.repeat_interleave(self.scale, -2).repeat_interleave(self.scale, -1)


@pytest.fixture(scope="module")
def upscaler():
    return sr.Upscaler(Nearest(scale=2))


def enlarged(array: np.ndarray) -> np.ndarray:
    return array.repeat(2, 0).repeat(2, 1)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 50)])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F", "PA", "La"])
def test_every_mode_and_size(upscaler, mode, size):
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, size).astype(np.uint16))
    elif mode == "PA":
        image = rgb.convert("P").convert("PA")
    elif mode == "La":
        image = rgb.convert("LA").convert("La")
    else:
        image = rgb.convert(mode)
    out = upscaler(image)
    assert out.size == (2 * size[1], 2 * size[0])


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA"])
def test_pictures_keep_mode_and_values(upscaler, mode):
    rng = np.random.default_rng(1)
    array = rng.integers(0, 256, (6, 5, len(Image.new(mode, (1, 1)).getbands())), dtype=np.uint8)
    image = Image.fromarray(array[..., 0] if mode == "L" else array)
    out = upscaler(image)
    assert out.mode == image.mode == mode
    colours = slice(0, 1 if mode in ("L", "LA") else 3)
    assert np.array_equal(np.atleast_3d(out)[..., colours], enlarged(array)[..., colours])


def test_palette_and_one_bit_pictures_show_their_true_colours(upscaler):
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert np.asarray(upscaler(palette))[0].tolist() == [[255, 0, 0]] * 2 + [[0, 0, 255]] * 2
    bit = Image.new("1", (2, 1), 1)
    bit.putpixel((0, 0), 0)
    assert np.asarray(upscaler(bit))[0].tolist() == [0, 0, 255, 255]


def test_transparent_palette_becomes_rgba(upscaler):
    image = Image.new("P", (2, 2))
    image.putpalette([10, 20, 30])
    image.info["transparency"] = 0
    assert upscaler(image).getpixel((0, 0)) == (10, 20, 30, 0)


def test_transparent_grey_becomes_grey_with_alpha(upscaler):
    image = Image.new("L", (2, 2), 7)
    image.info["transparency"] = 7
    out = upscaler(image)
    assert (out.mode, out.getpixel((0, 0))) == ("LA", (7, 0))


def test_opaque_stays_opaque(upscaler):
    out = upscaler(Image.new("RGBA", (5, 4), (200, 100, 0, 255)))
    assert out.getextrema()[3] == (255, 255)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 3), (4, 6, 4)])
def test_arrays_come_back_as_they_went_in(upscaler, dtype, shape):
    top = {np.uint8: 255, np.uint16: 65535}.get(dtype, 1)
    array = (np.random.default_rng(2).random(shape) * top).astype(dtype)
    out = upscaler(array)
    assert out.dtype == dtype
    assert out.shape == (8, 12, *shape[2:])
    np.testing.assert_allclose(out[..., :3], enlarged(array)[..., :3], atol=1e-6 * top)


def test_sixteen_bits_survive(upscaler):
    array = np.array([[0, 1, 256, 257], [32768, 65534, 65535, 300]], dtype=np.uint16)
    assert np.array_equal(np.asarray(upscaler(Image.fromarray(array))), enlarged(array))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_tensors_come_back_as_they_went_in(upscaler, dtype):
    x = torch.rand(3, 4, 5)
    x = (x * 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    assert torch.equal(upscaler(x), x.repeat_interleave(2, -2).repeat_interleave(2, -1))
    assert upscaler(x[None]).shape == (1, 3, 8, 10)


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.int64), np.zeros(3), torch.zeros(2, 2), torch.zeros(5, 2, 2), "x"])
def test_what_is_no_picture_is_refused(upscaler, bad):
    with pytest.raises(sr.SRError, match=r"picture|channels"):
        upscaler(bad)


@pytest.mark.parametrize("value", [255.0, float("nan"), -3.0])
def test_float_pictures_of_another_range_are_refused(upscaler, value):
    with pytest.raises(sr.SRError, match=r"lies in \[0, 1\]"):
        upscaler(torch.full((3, 2, 2), value))


def test_an_upscaler_needs_a_network():
    with pytest.raises(sr.SRError, match=r"sr\.load"):
        sr.Upscaler("sparsesr_t_x2")


@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("tile", [1, 5, 8, 64])
def test_tiles_of_an_identity_network_are_exact(multiple_of, tile):
    x = torch.rand(2, 3, 13, 22)
    assert torch.equal(upscale_tiled(Nearest(multiple_of=multiple_of), x, tile), Nearest()(x))


@pytest.mark.parametrize("size", [(100, 77), (30, 140)])
def test_tiles_of_a_trained_network_cannot_be_told_from_the_whole(size):
    torch.manual_seed(0)
    network = sr.create_model("sparsesr_t", scale=2).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
        x = torch.rand(1, 3, *size)
        whole = network(x)
        torch.testing.assert_close(upscale_tiled(network, x, 24), whole, atol=1e-4, rtol=0)


def test_nonsense_tile_is_refused():
    with pytest.raises(sr.SRError, match="at least 1 pixel"):
        upscale_tiled(Nearest(), torch.rand(1, 3, 4, 4), 0)
