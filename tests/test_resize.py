"""imresize against MATLAB's own output, a direct evaluation of its definition, and the properties that follow."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import sr.resize
from sr.color import rgb_to_y
from sr.errors import SRError
from sr.metrics import psnr, ssim
from sr.resize import imresize

GOLDEN = np.load(Path(__file__).parent / "golden" / "matlab_protocol.npz")
SET5 = Path(__file__).parents[2] / "shared" / "data" / "benchmarks" / "Set5"
needs_set5 = pytest.mark.skipif(not SET5.is_dir(), reason="needs shared/data/benchmarks/Set5 beside the repository")


def chw(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))


def modcrop(x: Tensor, scale: int) -> Tensor:
    return x[..., : x.shape[-2] // scale * scale, : x.shape[-1] // scale * scale]


def definition(x: np.ndarray, size: tuple[int, int], scales: tuple[float, float]) -> np.ndarray:
    """The formula, pixel by pixel: no tables, no trimming of taps, and a border that is really there."""

    def kernel(t: float) -> float:
        t = abs(t)
        if t <= 1:
            return 1.5 * t**3 - 2.5 * t**2 + 1
        return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0

    for axis, length, scale in zip((0, 1), size, scales, strict=True):
        shrink = min(scale, 1)
        reach = math.ceil(3 / shrink) + 2  # a last pixel that ceil() added lies up to 1/scale outside
        rows = np.moveaxis(x, axis, 0)
        padded = np.pad(rows, ((reach, reach), (0, 0)), mode="symmetric")
        out = np.empty((length, rows.shape[1]))
        for i in range(length):
            centre = (i + 0.5) / scale - 0.5
            weights = np.array([kernel(shrink * (centre - p)) for p in range(-reach, len(rows) + reach)])
            out[i] = weights @ padded / weights.sum()
        x = np.moveaxis(out, 0, axis)
    return x


@pytest.mark.parametrize("key", sorted(k for k in GOLDEN if "down" in k or "_up" in k))
def test_equals_matlab(key):
    name, way, dtype = key.split("_")
    scale = int(way[-1])
    source = chw(GOLDEN[name])
    result = chw(GOLDEN[key])
    source, factor = (modcrop(source, scale), 1 / scale) if "down" in way else (source[:, :20, :20], scale)
    if dtype == "uint8":
        assert torch.equal(imresize(source, factor), result)
        assert torch.equal(imresize(source, size=result.shape[-2:]), result)
    else:
        # MATLAB's float64 pictures run over [0, 1] or [0, 255]; the unit follows from the numbers
        unit = 255 if result.max() <= 2 else 1
        torch.testing.assert_close(imresize(source.double() / unit, factor), result, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (3, 5), (2, 2), (13, 10)])
@pytest.mark.parametrize("scale", [1 / 4, 1 / 3, 0.7, 1, 1.5, 3, 0.05])
def test_equals_the_definition(shape, scale):
    x = np.random.default_rng(0).random(shape)
    expected = definition(x, tuple(math.ceil(scale * n) for n in shape), (scale, scale))
    np.testing.assert_allclose(imresize(torch.from_numpy(x), scale).numpy(), expected, rtol=0, atol=1e-12)
    byte = imresize(torch.from_numpy(x).mul(255).byte(), scale)
    assert byte.shape == expected.shape
    assert byte.dtype == torch.uint8


@pytest.mark.parametrize("size", [(1, 1), (5, 30), (30, 5), (11, 9), (12, 13)])
def test_target_size_equals_the_definition(size):
    x = np.random.default_rng(0).random((11, 9))
    expected = definition(x, size, (size[0] / 11, size[1] / 9))
    np.testing.assert_allclose(imresize(torch.from_numpy(x), size=size).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1 / 3, 2.5])
def test_bands_and_pieces_join_without_a_seam(monkeypatch, scale):
    x = torch.rand(2, 41, 37, dtype=torch.float64)
    byte = x.mul(255).byte()
    whole, whole_byte = imresize(x, scale), imresize(byte, scale)
    monkeypatch.setattr(sr.resize, "_BAND", 5)
    monkeypatch.setattr(sr.resize, "_PIECE", 50)
    sr.resize._bands.cache_clear()
    torch.testing.assert_close(imresize(x, scale), whole, rtol=0, atol=1e-13)
    assert torch.equal(imresize(byte, scale), whole_byte)
    sr.resize._bands.cache_clear()


def test_uint8_is_rounded_half_up_and_clamped_after_each_pass_rows_first():
    x = torch.randint(0, 2, (12, 15), dtype=torch.uint8) * 255
    expected = x.double()
    for size in ((4, 15), (4, 5)):
        expected = imresize(expected, size=size).add(0.5).floor().clamp(0, 255)
    assert torch.equal(imresize(x, size=(4, 5)), expected.byte())
    # MATLAB takes the axis with the smaller scale first
    expected = x.double()
    for size in ((12, 5), (24, 5)):
        expected = imresize(expected, size=size).add(0.5).floor().clamp(0, 255)
    assert torch.equal(imresize(x, size=(24, 5)), expected.byte())


@pytest.mark.parametrize("scale", [1 / 4, 0.6, 1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_constant_stays_constant(scale, dtype):
    x = torch.full((2, 3, 9, 6), 77, dtype=dtype)
    y = imresize(x, scale)
    assert y.dtype == dtype
    assert y.shape == (2, 3, math.ceil(9 * scale), math.ceil(6 * scale))
    torch.testing.assert_close(y, torch.full_like(y, 77), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [(6, 4), (7, 5), (36, 40)])
def test_flips_transposition_and_linearity(size):
    x, z = torch.rand(2, 2, 18, 20, dtype=torch.float64)
    y = imresize(x, size=size)
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(imresize(x.flip(-1), size=size), y.flip(-1), **close)
    torch.testing.assert_close(imresize(x.flip(-2), size=size), y.flip(-2), **close)
    torch.testing.assert_close(imresize(x.mT, size=size[::-1]), y.mT, **close)
    torch.testing.assert_close(imresize(x + 3 * z, size=size), y + 3 * imresize(z, size=size), **close)


def test_leading_dimensions_do_not_mix():
    x = torch.randint(0, 256, (2, 4, 3, 10, 7), dtype=torch.uint8)
    for y in (x, x.double()):
        assert torch.equal(imresize(y, 0.5)[1, 2], imresize(y[1, 2], 0.5))
        assert torch.equal(imresize(y, 0.5)[1, 2, 0], imresize(y[1, 2, 0], 0.5))
    assert imresize(x[:0], 2).shape == (0, 4, 3, 20, 14)
    assert torch.equal(imresize(x.transpose(0, 1), 0.5), imresize(x, 0.5).transpose(0, 1))


def test_scale_one_is_a_copy():
    for x in (torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8), torch.rand(3, 5, 4, dtype=torch.float64)):
        y = imresize(x, 1)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("factor", range(2, 17))
def test_an_exact_multiple_never_gains_a_pixel(factor):
    for n in range(1, 3000):
        assert math.ceil(1 / factor * (factor * n)) == n


@pytest.mark.parametrize("kwargs", [{"scale": 1 / 3}, {"scale": 0.7}, {"scale": 2}, {"size": (4, 9)}])
def test_gradients(kwargs):
    x = torch.rand(1, 2, 7, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: imresize(t, **kwargs), x)


def test_reduced_precision_products_do_not_reach_it():
    x = torch.rand(3, 24, 24)
    expected = imresize(x.double(), 0.5)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = imresize(x, 0.5)
    finally:
        torch.set_float32_matmul_precision(before)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-7)


def test_tables_made_in_inference_mode_serve_training():
    sr.resize._bands.cache_clear()
    sr.resize._taps.cache_clear()
    with torch.inference_mode():
        imresize(torch.rand(1, 9, 9), 1 / 3)
    x = torch.rand(1, 9, 9, requires_grad=True)
    imresize(x, 1 / 3).sum().backward()
    torch.testing.assert_close(x.grad.sum(), torch.tensor(9.0))


@pytest.mark.parametrize(
    ("x", "args", "kwargs", "message"),
    [
        (torch.zeros(4, 4), (0,), {}, "positive number, not 0"),
        (torch.zeros(4, 4), (-0.5,), {}, "positive number, not -0.5"),
        (torch.zeros(4, 4), (math.nan,), {}, "positive number, not nan"),
        (torch.zeros(4, 4), (math.inf,), {}, "positive number, not inf"),
        (torch.zeros(4, 4), (), {"size": (0, 4)}, r"\(0, 4\)"),
        (torch.zeros(4, 4), (), {"size": (4, 2.5)}, "whole numbers"),
        (torch.zeros(4, 4), (), {"size": (4,)}, r"\(height, width\)"),
        (torch.zeros(4, 4), (), {}, "either scale or size"),
        (torch.zeros(4, 4), (2,), {"size": (8, 8)}, "either scale or size"),
        (torch.zeros(4, 4, dtype=torch.int64), (2,), {}, "int64"),
        (torch.zeros(4, 4, dtype=torch.bool), (2,), {}, "bool"),
        (torch.zeros(4), (2,), {}, r"\(4,\)"),
        (torch.zeros(3, 0, 4), (2,), {}, r"\(3, 0, 4\)"),
    ],
)
def test_mistakes_are_explained(x, args, kwargs, message):
    with pytest.raises(SRError, match=message) as caught:
        imresize(x, *args, **kwargs)
    assert "\n" not in str(caught.value)


def set5(folder: str) -> list[Tensor]:
    return [chw(np.asarray(Image.open(p).convert("RGB"))) for p in sorted((SET5 / folder).glob("*.png"))]


@needs_set5
@pytest.mark.parametrize(
    ("scale", "psnr_y", "ssim_y", "quantised"),
    [(2, "33.66", "0.9299", "33.67"), (3, "30.39", "0.8682", "30.40"), (4, "28.42", "0.8104", "28.43")],
)
def test_published_bicubic_results_on_set5(scale, psnr_y, ssim_y, quantised):
    gts = [modcrop(x, scale) for x in set5("HR")]
    lqs = set5(f"LR_bicubic/X{scale}")
    assert len(gts) == len(lqs) == 5

    # SRCNN's script: rgb2ycbcr of the uint8 picture (Y is rounded), then imresize down and up without rounding between
    values = []
    for gt in gts:
        y = (rgb_to_y(gt.double() / 255) * 255).add(0.5).floor().div(255)[None]
        up = imresize(imresize(y, 1 / scale), scale)
        kwargs = {"crop_border": scale, "test_y_channel": False}
        values.append((psnr(up, y, **kwargs).item(), ssim(up, y, **kwargs).item()))
    mean = np.mean(values, axis=0)
    assert (f"{mean[0]:.2f}", f"{mean[1]:.4f}") == (psnr_y, ssim_y)

    # today's protocol: RGB, and LR and result in 8 bits
    for gt, lq in zip(gts, lqs, strict=True):
        assert torch.equal(imresize(gt, 1 / scale), lq)
    values = [
        psnr(imresize(lq, scale)[None], gt[None], crop_border=scale).item() for gt, lq in zip(gts, lqs, strict=True)
    ]
    assert f"{np.mean(values):.2f}" == quantised
