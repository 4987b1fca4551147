"""The upscaler: any kind of picture in, the same kind out, and tiles that cannot be seen."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from upscaling import Nearest

import sr
from sr.archs.sparsesr import BicubicUpsample
from sr.inference.runner import TileRunner, whole_float32
from sr.resize import imresize


class BicubicNet(Nearest):
    """Bicubic enlargement."""

    receptive_field = 3

    def __init__(self) -> None:
        super().__init__(scale=2)
        self.up = BicubicUpsample(3, 2)

    def upscale(self, lq):
        return self.up(lq)


class Blur(Nearest):
    """Looks as far as it says, with weights that have no symmetry, and keeps a constant picture."""

    receptive_field = 2

    def __init__(self) -> None:
        super().__init__(scale=2)
        generator = torch.Generator().manual_seed(1)
        self.conv = torch.nn.Conv2d(1, 4, 5, padding=2, padding_mode="replicate", bias=False)
        weight = torch.rand(4, 1, 5, 5, generator=generator)
        self.conv.weight = torch.nn.Parameter(weight / weight.sum((2, 3), keepdim=True))

    def upscale(self, lq):
        out = self.conv(lq.flatten(0, 1)[:, None])
        return torch.nn.functional.pixel_shuffle(out, 2).unflatten(0, lq.shape[:2])[:, :, 0]


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32, torch.bfloat16])
def test_tensors_come_back_as_they_went_in(upscaler, dtype):
    x = torch.rand(3, 4, 5)
    x = x.to(dtype) if dtype.is_floating_point else (x * torch.iinfo(dtype).max).to(dtype)
    out = upscaler(x)
    assert out.dtype == dtype
    assert torch.equal(out.double(), x.double().repeat_interleave(2, -2).repeat_interleave(2, -1))
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


# --- scales and sizes


@pytest.mark.parametrize(
    ("arguments", "size", "expected"),
    [
        ({}, (5, 3), (10, 6)),
        ({"outscale": 3.5}, (10, 3), (35, 11)),
        ({"outscale": 0.35}, (10, 100), (4, 35)),
        ({"outscale": 4.35}, (100, 1), (435, 4)),
        ({"outscale": 0.01}, (5, 5), (1, 1)),
        ({"size": (30, 7)}, (5, 3), (30, 7)),
    ],
)
def test_output_has_the_size_that_is_told_before(arguments, size, expected):
    upscaler = sr.Upscaler(Nearest(), device="cpu", **arguments)
    assert upscaler.out_size(*size) == expected
    out = upscaler(np.zeros((size[1], size[0], 3), np.uint8))
    assert out.shape == (expected[1], expected[0], 3)


@pytest.mark.parametrize("arguments", [{"outscale": 3.5}, {"outscale": 2.6}, {"size": (41, 90)}, {"outscale": 0.5}])
def test_other_scales_run_the_network_and_resize_with_the_right_phase(arguments):
    x = torch.rand(1, 3, 20, 30)
    upscaler = sr.Upscaler(Nearest(), device="cpu", tile=8, **arguments)
    width, height = upscaler.out_size(30, 20)
    times = 2 ** max(1, math.ceil(math.log2(max(width / 30, height / 20))))
    whole = x.repeat_interleave(times, -2).repeat_interleave(times, -1)
    torch.testing.assert_close(upscaler(x), imresize(whole, size=(height, width)).clamp(0, 1), atol=1e-6, rtol=0)


def test_phase_is_right_for_a_slope():
    """A slope stays the same slope: pixel i of the output lies at (i + 0.5) / scale of the input."""
    x = torch.linspace(0.2, 0.8, 60).expand(1, 3, 40, 60)
    out = sr.Upscaler(BicubicNet(), device="cpu", outscale=3.5)(x)
    at = (torch.arange(out.shape[-1]) + 0.5) / 3.5 - 0.5
    expected = 0.2 + 0.6 * at / 59
    torch.testing.assert_close(out[0, 0, 70, 20:-20], expected[20:-20], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"outscale": 0},
        {"outscale": -2},
        {"outscale": 1000},
        {"outscale": float("nan")},
        {"size": (0, 5)},
        {"size": (5,)},
        {"size": (4, 4), "outscale": 2},
        {"tile": 0},
        {"tile": "big"},
        {"dtype": torch.float64},
        {"dtype": torch.float16, "device": "cpu"},
        {"device": "nowhere"},
    ],
)
def test_nonsense_arguments_are_refused(arguments):
    with pytest.raises(sr.SRError):
        sr.Upscaler(Nearest(), **arguments)


def test_an_enormous_size_is_refused():
    with pytest.raises(sr.SRError, match="64 times"):
        sr.Upscaler(Nearest(), size=(1000, 10))(torch.rand(3, 10, 10))


# --- the network stays the caller's


def test_the_network_is_left_as_it_was():
    network = Nearest()
    network.extra = torch.nn.Conv2d(3, 3, 1)
    sr.Upscaler(network)
    assert network.training and network.extra.weight.requires_grad


# --- rows


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "arguments", [{}, {"outscale": 3.3}, {"size": (50, 400)}, {"tta": True}, {"keep_color": True}, {"tile": "auto"}]
)
def test_rows_are_those_of_the_whole_picture(channels, arguments):
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (300, 21, channels), dtype=np.uint8)
    if channels in (2, 4):
        picture[40:200, :15, -1] = 0
    upscaler = sr.Upscaler(Blur(), device="cpu", **{"tile": 64, **arguments})
    expected, position = upscaler(picture), 0

    def read(n):
        nonlocal position
        n = min(n, 37)
        position += n
        return picture[position - n : position]

    parts = list(upscaler.rows(read, 21, 300, channels, np.uint8))
    assert max(map(len, parts)) <= 128
    assert np.array_equal(np.concatenate(parts), expected)


def test_a_picture_of_many_tiles_is_cut_into_equal_ones(monkeypatch):
    """Or the memory that they take falls into pieces. Few tiles are as small as they can be."""
    upscaler = sr.Upscaler(Blur(), device="cpu", tile=16)
    shapes, run = [], upscaler.run.network.forward
    monkeypatch.setattr(upscaler.run.network, "forward", lambda x: shapes.append(x.shape) or run(x))
    for edge, equal in ((16 * 10, True), (16 * 4, False)):
        shapes.clear()
        picture = torch.rand(3, edge, edge)
        torch.testing.assert_close(upscaler(picture), Blur()(picture[None])[0].clamp(0, 1))
        assert (len(set(shapes)) == 1) == equal and len(shapes) == (edge // 16) ** 2


def test_rows_are_read_no_earlier_than_needed():
    read = 0

    def some(n):
        nonlocal read
        read += min(n, 16)
        return np.zeros((min(n, 16), 30, 4), np.uint16)

    rows = sr.Upscaler(Blur(), device="cpu", tile=32).rows(some, 30, 5000, 4, np.uint16)
    out = next(rows)
    assert read < 500
    assert out.dtype == np.uint16 and out.shape[1:] == (60, 4)


def test_rows_that_end_early_or_wrap_are_refused():
    with pytest.raises(sr.SRError, match="after 8 of 20 rows"):
        parts = iter([np.zeros((8, 4, 3), np.uint8), np.zeros((0, 4, 3), np.uint8)])
        list(sr.Upscaler(Nearest()).rows(lambda n: next(parts), 4, 20, 3, np.uint8))
    with pytest.raises(sr.SRError, match="wrap"):
        next(sr.Upscaler(Nearest(), wrap=True).rows(lambda n: np.zeros((n, 4, 3), np.uint8), 4, 4, 3, np.uint8))


# --- textures


@pytest.mark.parametrize("arguments", [{}, {"outscale": 3}, {"outscale": 8}, {"tile": 8}, {"keep_color": True}])
@pytest.mark.parametrize("channels", [3, 4])
def test_a_wrapped_texture_has_no_edge(arguments, channels):
    x = torch.rand(1, channels, 16, 24)
    upscaler = sr.Upscaler(Blur(), device="cpu", wrap=True, **arguments)
    rolled = upscaler(x.roll((5, 9), (-2, -1)))
    factor = rolled.shape[-1] // 24
    torch.testing.assert_close(rolled, upscaler(x).roll((5 * factor, 9 * factor), (-2, -1)), atol=1e-5, rtol=0)
    plain = sr.Upscaler(Blur(), device="cpu", **arguments)
    assert (plain(x.roll((5, 9), (-2, -1))) - plain(x).roll((5 * factor, 9 * factor), (-2, -1))).abs().max() > 1e-3


# --- precision, threads, progress


def test_explicit_bfloat16_is_used():
    x = torch.rand(1, 3, 20, 20)
    narrow, wide = (sr.Upscaler(Blur(), device="cpu", dtype=dtype)(x) for dtype in (torch.bfloat16, torch.float32))
    assert narrow.dtype == torch.float32
    assert 1e-5 < (narrow - wide).abs().max() < 0.02
    assert torch.equal(sr.Upscaler(Blur(), device="cpu")(x), wide)


def test_four_threads_share_an_upscaler():
    pictures = [torch.rand(3, 40 + i, 50) for i in range(8)]
    expected = [sr.Upscaler(Blur(), device="cpu", tile=16)(picture) for picture in pictures]
    upscaler = sr.Upscaler(Blur(), device="cpu", tile=16)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(upscaler, pictures))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_progress_counts_tiles_of_all_passes():
    seen = []
    sr.Upscaler(Nearest(), device="cpu", tile=10, outscale=4)(torch.rand(3, 15, 20), progress=lambda *a: seen.append(a))
    total = 2 * 2 + 3 * 4
    assert seen == [(i + 1, total) for i in range(total)]


def test_tiles_follow_memory(monkeypatch):
    upscaler = sr.Upscaler(Blur(), device="cpu")
    seen = []
    monkeypatch.setattr("sr.inference.upscaler.available_memory", lambda device: 2 * 200 * 200 * upscaler._cost())
    upscaler(torch.rand(3, 300, 400), progress=lambda done, total: seen.append(total))
    assert seen[-1] == 2 * 3  # tiles of 184 pixels and a margin of 8
    monkeypatch.setattr("sr.inference.upscaler.available_memory", lambda device: 1 << 40)
    upscaler(torch.rand(3, 300, 400), progress=lambda done, total: seen.append(total))
    assert seen[-1] == 1


def test_out_of_memory_changes_nothing(monkeypatch):
    x = torch.rand(3, 90, 70)
    upscaler = sr.Upscaler(Blur(), device="cpu", tile=None)
    expected, run = upscaler(x), TileRunner.__call__

    def scarce(self, lq):
        if lq.shape[-2] * lq.shape[-1] > 2500:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, lq)

    monkeypatch.setattr(TileRunner, "__call__", scarce)
    torch.testing.assert_close(upscaler(x), expected, atol=1e-6, rtol=0)


def test_tiles_are_checked_against_the_whole():
    assert sr.Upscaler(Nearest(), device="cpu", tile=8).check_tiles(torch.rand(3, 20, 30)) == 0
    assert sr.Upscaler(Blur(), device="cpu", tile=16).check_tiles(np.zeros((30, 40, 3), np.uint8)) < 1e-6
    wrong = Blur()
    wrong.receptive_field = 0
    assert sr.Upscaler(wrong, device="cpu", tile=8).check_tiles(torch.rand(3, 20, 30)) > 0.01


@pytest.mark.parametrize(("value", "levels"), [(0, 0), (255, 255)])
def test_black_and_white_stay(value, levels):
    out = sr.Upscaler(sr.load("sparsesr_t_x2.quickstart"), device="cpu")(np.full((24, 24, 3), value, np.uint8))
    assert abs(out.astype(int) - levels).max() <= 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1)])
@pytest.mark.parametrize("arguments", [{}, {"tta": True}, {"keep_color": True}, {"wrap": True}, {"outscale": 3.5}])
def test_slivers(shape, arguments):
    # What wraps is continued far on all sides, so that the network meets no sliver, and takes long.
    network = Blur() if "wrap" in arguments else sr.create_model("sparsesr_t", scale=2)
    out = sr.Upscaler(network, device="cpu", tile=64, **arguments)(np.full((*shape, 3), 128, np.uint8))
    factor = arguments.get("outscale", 2)
    assert out.shape == (*(int(n * factor + 0.5) for n in shape), 3)
    assert abs(out.astype(int) - 128).max() <= 1


def test_a_pil_picture_is_turned_upright_and_keeps_what_belongs_to_it(upscaler, tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    array = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png", exif=exif, icc_profile=b"a profile", dpi=(300, 300))
    with Image.open(tmp_path / "a.png") as image:
        large = upscaler(image)
    assert np.array_equal(np.asarray(large), enlarged(np.rot90(array, -1)))
    large.save(tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as image:
        assert image.info["icc_profile"] == b"a profile"
    assert large.getexif().get(0x0112, 1) == 1 and large.getexif()[0x010F] == "maker"
    assert large.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert "icc_profile" not in upscaler(Image.new("CMYK", (4, 4))).info


def test_what_has_more_than_8_bits_is_computed_in_float32(monkeypatch):
    """Half precision, the default on a GPU, has 2048 levels between 1/2 and 1."""

    class Half(Nearest):
        def upscale(self, lq):
            return super().upscale(lq).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)

    choose = sr.Upscaler._dtype
    monkeypatch.setattr(sr.Upscaler, "_dtype", lambda *a: torch.bfloat16 if a[2] == "auto" else choose(*a))
    upscaler = sr.Upscaler(Half(scale=2), device="cpu")
    deep = np.arange(40_000, 40_000 + 8 * 9 * 3, dtype=np.uint16).reshape(8, 9, 3)
    assert np.array_equal(upscaler(deep), enlarged(deep))
    floats = (deep / np.float32(65535)).astype(np.float32)
    assert np.array_equal(upscaler(floats), enlarged(floats))
    assert torch.equal(upscaler(torch.from_numpy(floats[..., 0])[None])[0], torch.from_numpy(enlarged(floats[..., 0])))
    grey = Image.fromarray(deep[..., 0])
    assert np.array_equal(np.asarray(upscaler(grey)), enlarged(deep[..., 0]))
    rows = iter([deep])
    parts = upscaler.rows(lambda count: next(rows), 9, 8, 3, np.uint16)
    assert np.array_equal(np.concatenate(list(parts)), enlarged(deep))
    assert upscaler.check_tiles(deep) == 0
    flat = np.full((8, 9, 3), 201, np.uint8)  # 8 bits go the fast way: bfloat16 has 128 levels between 1/2 and 1
    assert abs(int(upscaler(flat)[0, 0, 0]) - 201) <= 1 and upscaler.run.dtype == torch.bfloat16


@pytest.mark.parametrize("newer", [True, False])
def test_float32_on_a_gpu_is_not_tf32(monkeypatch, newer):
    """The flags that cuDNN goes by, which are there without a GPU, too."""
    cudnn = torch.backends.cudnn
    if newer and not hasattr(cudnn, "conv"):
        pytest.skip("this PyTorch has the old flag only")
    if not newer and hasattr(cudnn, "conv"):
        monkeypatch.delattr(type(cudnn), "conv", raising=False)
        monkeypatch.delattr(cudnn, "conv", raising=False)
    precision = (lambda: cudnn.conv.fp32_precision) if newer else (lambda: cudnn.allow_tf32)
    before = precision()
    with whole_float32(torch.device("cuda")):
        assert precision() == ("ieee" if newer else False)
    assert precision() == before
    with whole_float32(torch.device("cpu")):
        assert precision() == before
