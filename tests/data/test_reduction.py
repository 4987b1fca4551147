"""How an LQ picture was made, against pictures made by PIL, NumPy and SciPy; shifts against a closed form."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor

from sr.data.reduction import EXACT, MATLAB, NEARLY, UNRELATED, identify, measure_shift
from sr.resize import imresize


def picture(h: int, w: int, seed: int = 0) -> Tensor:
    """Structure of several sizes, as photographs have; uint8 (3, h, w)."""
    rng = np.random.default_rng(seed)
    layers = [s * gaussian_filter(rng.standard_normal((3, h, w)), (0, s, s)) for s in (1, 3, 9)]
    x = sum(layers[1:], layers[0])
    return torch.from_numpy((127 + 40 * x / x.std()).round().clip(0, 255).astype(np.uint8))


def pil(how: Image.Resampling) -> Callable[[Tensor, int], Tensor]:
    def reduce(gt: Tensor, s: int) -> Tensor:
        image = Image.fromarray(gt.permute(1, 2, 0).contiguous().numpy())
        return tensor(image.resize((image.width // s, image.height // s), how))

    return reduce


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def compressed(lq: Tensor, quality: int) -> Tensor:
    file = io.BytesIO()
    Image.fromarray(lq.permute(1, 2, 0).contiguous().numpy()).save(file, "JPEG", quality=quality)
    return tensor(Image.open(file))


def matlab(gt: Tensor, s: int) -> Tensor:
    return imresize(gt, size=(gt.shape[-2] // s, gt.shape[-1] // s))


def blurred(gt: Tensor, sigma: float) -> Tensor:
    return torch.from_numpy(gaussian_filter(gt.numpy().astype(float), (0, sigma, sigma)).round().astype(np.uint8))


def opencv_bicubic(gt: Tensor, s: int) -> Tensor:
    """Keys' kernel with a = -0.75 at the four pixels around the middle of each ``s`` pixels; ``s`` is even."""
    taps = np.array([-0.09375, 0.59375, 0.59375, -0.09375])  # at distances 1.5, 0.5, 0.5, 1.5
    x = np.pad(gt.numpy().astype(float), [(0, 0), (1, 1), (1, 1)], "edge")
    for axis in (1, 2):
        n = gt.shape[axis] // s
        at = np.arange(n) * s + s // 2 - 1  # first tap, in the padded picture
        x = sum(t * x.take(at + k, axis) for k, t in enumerate(taps))
    return torch.from_numpy(np.floor(x + 0.5).clip(0, 255).astype(np.uint8))


KINDS = [
    (pil(Image.Resampling.BICUBIC), "antialiased bicubic of PIL or PyTorch"),
    (pil(Image.Resampling.BILINEAR), "antialiased bilinear"),
    (pil(Image.Resampling.LANCZOS), "antialiased Lanczos"),
    (pil(Image.Resampling.BOX), "area"),
    (opencv_bicubic, "bicubic without antialiasing, as OpenCV's"),
    (lambda gt, s: gt[:, ::s, ::s], "nearest (first"),
    (pil(Image.Resampling.NEAREST), "nearest (middle"),
    (lambda gt, s: blurred(gt, 1.6)[:, ::s, ::s], "Gaussian blur of sigma 1.6 before taking 1 of"),
    (lambda gt, s: matlab(blurred(gt, 2.0), s), "Gaussian blur of sigma 2.0 before MATLAB"),
    (lambda gt, s: compressed(matlab(gt, s), 83), "MATLAB bicubic, then JPEG of quality 83"),
]


@pytest.mark.parametrize("scale", [2, 4])
@pytest.mark.parametrize("make, kind", KINDS, ids=[k for _, k in KINDS])
def test_other_reductions_are_named(make: Callable[[Tensor, int], Tensor], kind: str, scale: int) -> None:
    gt = picture(80 * scale, 72 * scale)
    found = identify(make(gt, scale), gt, scale)
    assert found.known
    assert found.kind.startswith(kind)


def test_reductions_that_are_the_same_share_a_name() -> None:
    gt = picture(120, 120)
    assert "or bilinear without" in identify(gt[:, 1::3, 1::3], gt, 3).kind  # between no pixels, at odd scales


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_matlab_bicubic_to_the_bit_or_nearly(scale: int) -> None:
    gt = picture(40 * scale, 30 * scale)
    lq = matlab(gt, scale)
    assert identify(lq, gt, scale).kind == EXACT
    lq[0, 3, 4] ^= 1
    found = identify(lq, gt, scale)
    assert found.kind == NEARLY and found.known and found.shift == (0, 0)


def test_a_fault_outside_the_window_of_comparison_counts() -> None:
    gt = picture(500, 500)
    lq = matlab(gt, 2)
    lq[:, 240:] = 0
    found = identify(lq, gt, 2)
    assert not found.known and found.kind == "MATLAB bicubic in parts" and found.shift == (0, 0)


def test_tiny_pictures() -> None:
    for h, w in [(1, 1), (2, 7), (15, 17)]:
        gt = picture(2 * h, 2 * w)
        assert identify(matlab(gt, 2), gt, 2).kind == EXACT
        assert identify(255 - matlab(gt, 2), gt, 2).shift == (0, 0)


def test_flat_pictures() -> None:
    gt = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    assert identify(gt[:, ::2, ::2], gt, 2).kind == EXACT
    assert measure_shift(gt, gt) == pytest.approx((0, 0), abs=1e-9)


def test_noise_is_unknown_and_another_picture_unrelated() -> None:
    gt = picture(160, 160)
    lq = matlab(gt, 2)
    noisy = (lq + 10 * torch.randn(lq.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 255).byte()
    found = identify(noisy, gt, 2)
    assert not found.known and found.kind == MATLAB and max(map(abs, found.shift)) < 0.1
    assert identify(matlab(picture(160, 160, seed=1), 2), gt, 2).kind == UNRELATED
    assert identify(lq.flip(1), gt, 2).kind == UNRELATED
    assert identify(torch.zeros_like(lq), gt, 2).kind == UNRELATED


def cosines(h: int, w: int, down: float, right: float) -> Tensor:
    """A sum of waves, displaced in closed form."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:h, :w]
    waves = sum(
        np.cos(2 * np.pi * (fy * (y - down) + fx * (x - right)) + phase)
        for fy, fx, phase in rng.uniform((-0.15, -0.15, 0), (0.15, 0.15, 6.3), (40, 3))
    )
    return torch.from_numpy((127 + 15 * waves).round().clip(0, 255).astype(np.uint8)).expand(3, -1, -1)


@pytest.mark.parametrize("down, right", [(0, 0), (0.25, -0.1), (-0.5, 0.5), (3.3, -7.6)])
def test_shifts_are_measured_to_a_twentieth(down: float, right: float) -> None:
    measured = measure_shift(cosines(90, 120, down, right), cosines(90, 120, 0, 0))
    assert measured == pytest.approx((down, right), abs=0.05)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_one_gt_pixel_of_displacement(scale: int) -> None:
    whole = picture(64 * scale + 4, 80 * scale + 4)
    gt, moved = whole[:, 2:-2, 2:-2].contiguous(), whole[:, 1:-3, 3:-1].contiguous()  # content down, left
    found = identify(matlab(moved, scale), gt, scale)
    assert found.known and found.kind == MATLAB
    assert found.shift == pytest.approx((1 / scale, -1 / scale), abs=0.02)


def test_leaving_pixels_out_is_a_known_shift() -> None:
    gt = picture(160, 160)
    assert identify(gt[:, ::4, ::4], gt, 4).shift == (0.375, 0.375)  # 1.5 of 4 pixels
    assert identify(gt[:, 2::4, 2::4], gt, 4).shift == (-0.125, -0.125)
