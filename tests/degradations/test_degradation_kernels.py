"""Kernels against closed forms, filters against other libraries."""

import math

import kornia
import numpy as np
import pytest
import torch
from scipy.ndimage import correlate, correlate1d
from scipy.special import gamma

from sr.degradations import Blur, Draws, Sharpen, Sinc
from sr.degradations.blur import filter_pictures
from sr.degradations.kernels import gaussian_kernels, sinc_kernels
from sr.errors import SRError

EDGE = 81


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def moments(kernel: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance (x, y) of a kernel."""
    k = kernel.double().numpy()
    t = np.arange(len(k)) - len(k) // 2
    x, y = np.meshgrid(t, t)
    mean = np.array([(k * x).sum(), (k * y).sum()])
    covariance = np.array([[(k * a * b).sum() for b in (x, y)] for a in (x, y)])
    return mean, covariance


@pytest.mark.parametrize("beta", [1.0, 0.7, 2.5])
def test_gaussian_kernels_have_the_covariance_asked_for(beta):
    sx, sy, angle = 5.0, 3.0, 0.5
    kernels = gaussian_kernels(
        column(EDGE), column(sx), column(sy), column(angle), column(beta), torch.tensor([False]), EDGE
    )
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    expected = turn @ np.diag([sx**2, sy**2]) @ turn.T
    # The second moment of exp(-q^beta / 2) in the plane is 2^(1/beta) Gamma(2/beta) / (2 Gamma(1/beta)) times C.
    expected *= 2 ** (1 / beta) * gamma(2 / beta) / gamma(1 / beta) / 2
    mean, covariance = moments(kernels[0])
    assert kernels.sum() == pytest.approx(1, abs=1e-5)
    assert mean == pytest.approx(0, abs=1e-4)
    assert covariance == pytest.approx(expected, rel=0.01, abs=0.01)


def test_plateau_kernels_fall_as_published():
    kernel = gaussian_kernels(
        column(EDGE), column(6.0), column(6.0), column(0.0), column(1.5), torch.tensor([True]), EDGE
    )[0]
    centre = EDGE // 2
    assert kernel.sum() == pytest.approx(1, abs=1e-5)
    for distance in (3, 6, 12):
        ratio = kernel[centre, centre + distance] / kernel[centre, centre]
        assert ratio == pytest.approx(1 / (1 + (distance / 6) ** 3), rel=1e-4)


@pytest.mark.parametrize("cutoff", [0.3, 0.6])
def test_sinc_kernels_pass_what_is_below_the_cutoff(cutoff):
    kernel = sinc_kernels(column(201), column(cutoff), 201)[0]
    response = torch.fft.fft2(torch.fft.ifftshift(kernel)).real
    frequency = torch.fft.fftfreq(201).mul(2)
    radius = (frequency.square() + frequency.square()[:, None]).sqrt()
    assert kernel.sum() == pytest.approx(1, abs=1e-5)
    assert response[radius < cutoff - 0.1].sub(1).abs().max() < 0.1
    assert response[radius > cutoff + 0.1].abs().max() < 0.1
    assert response[(radius - cutoff).abs() < 0.01].mean() == pytest.approx(0.5, abs=0.1)


def test_kernels_end_at_their_own_size():
    sizes = column(7, 13, 21)
    ones = torch.ones(3)
    for kernels in (
        gaussian_kernels(sizes, 9 * ones, 9 * ones, ones, ones, ones > 2, 21),
        sinc_kernels(sizes, 0.37 * ones, 21),
    ):
        for kernel, size in zip(kernels, sizes.int().tolist(), strict=True):
            margin = (21 - size) // 2
            inner = kernel[margin : 21 - margin, margin : 21 - margin]
            assert inner.ne(0).all() and kernel.ne(0).sum() == size**2
            assert kernel.sum() == pytest.approx(1, abs=1e-5)


def test_blur_draws_its_kinds_and_ranges():
    step = Blur({"iso": 0.3, "aniso": 0.7}, (7, 21), (1.0, 2.0))
    kernels = step.kernels(400, Draws(torch.Generator().manual_seed(0), torch.device("cpu"), 4, (8, 8)))
    round_ones = torch.stack([torch.allclose(k, k.rot90(), atol=1e-6) * torch.ones(()) for k in kernels])
    assert round_ones.mean() == pytest.approx(0.3, abs=0.08)
    sizes = kernels.ne(0).any(1).sum(1)
    assert set(sizes.tolist()) == set(range(7, 22, 2))
    wide = [moments(k)[1] for k, size in zip(kernels, sizes, strict=True) if size == 21]
    widths = np.sqrt(np.concatenate([np.linalg.eigvalsh(c) for c in wide]))
    assert 0.98 < widths.min() < 1.1 and 1.9 < widths.max() < 2.02


@pytest.mark.parametrize("size", [(40, 56), (29, 31), (11, 64)])
def test_filter_agrees_with_kornia(size):
    x = torch.rand(5, 3, *size)
    kernels = sinc_kernels(torch.full((5,), 21.0), torch.linspace(0.2, 1, 5), 21)
    assert torch.allclose(filter_pictures(x, kernels), kornia.filters.filter2d(x, kernels), atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 40), (8, 8)])
def test_filter_reflects_pictures_smaller_than_the_kernel(size):
    x = torch.rand(2, 3, *size)
    ones = torch.ones(2)
    kernels = gaussian_kernels(21 * ones, 3 * ones, 5 * ones, ones, ones, ones > 2, 21)
    expected = [[correlate(p.numpy(), k.numpy(), mode="mirror") for p in q] for q, k in zip(x, kernels, strict=True)]
    assert filter_pictures(x, kernels).numpy() == pytest.approx(np.array(expected), abs=1e-5)


@pytest.mark.parametrize("size", [(64, 90), (20, 7)])
def test_sharpen_is_the_unsharp_mask_of_the_definition(size):
    x = torch.rand(2, 3, *size).double().numpy()
    t = np.arange(-25, 26)
    weights = np.exp(-(t**2) / (2 * 8.0**2))
    weights /= weights.sum()

    def blur(p: np.ndarray) -> np.ndarray:
        return correlate1d(correlate1d(p, weights, axis=-1, mode="mirror"), weights, axis=-2, mode="mirror")

    detail = x - blur(x)
    mask = blur((np.abs(detail) * 255 > 10).astype(float))
    expected = mask * (x + 0.5 * detail).clip(0, 1) + (1 - mask) * x
    result = Sharpen(weight=0.5, radius=50, threshold=10)(torch.from_numpy(x).float()).numpy()
    # Pixels at the very threshold may fall on either side.
    assert np.abs(result - expected).mean() < 2e-4 and np.abs(result - expected).max() < 5e-3
    assert result.min() >= 0 and result.max() <= 1


def test_sharpen_leaves_flat_pictures_alone():
    x = torch.full((1, 3, 30, 30), 0.4)
    assert torch.allclose(Sharpen()(x), x, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blur({"gauss": 1.0}, (7, 21), (1, 2)), "unknown kernel 'gauss'"),
        (lambda: Blur({"iso": 0.5}, (7, 21), (1, 2)), "add up to 1"),
        (lambda: Blur({"iso": 1.0}, (7, 20), (1, 2)), "two odd numbers"),
        (lambda: Blur({"iso": 1.0}, (7, 21), (2, 1)), "the smaller one first"),
        (lambda: Sinc((7, 21), (0.5, 1.5)), "between 0.01 and 1"),
        (lambda: Sharpen(radius=1), "radius of at least 2"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(SRError, match=message):
        make()
