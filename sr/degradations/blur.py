"""Filters: random blur, ringing, and the sharpening of GT."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.degradations.base import Draws, Step, check_probabilities, check_range, check_sizes
from sr.degradations.kernels import gaussian_kernels, sinc_kernels
from sr.degradations.pieces import by_pieces
from sr.errors import SRError

KERNELS = ("iso", "aniso", "generalized_iso", "generalized_aniso", "plateau_iso", "plateau_aniso")


class Blur(Step):
    """Gaussian, generalised Gaussian or plateau-shaped blur (Wang et al., "Real-ESRGAN", 2021); drawn per picture.

    Args:
        kernel_prob: probability of each kind of kernel: ``iso``, ``aniso``, ``generalized_iso``,
            ``generalized_aniso``, ``plateau_iso``, ``plateau_aniso``; those left out have none.
        size_range: smallest and largest edge of the kernels in pixels, odd.
        sigma_range: standard deviations in pixels; anisotropic kernels draw two.
        angle_range: direction of anisotropic kernels in radians.
        beta_generalized_range: shape of generalised kernels; below and above 1 are equally likely.
        beta_plateau_range: shape of plateau-shaped kernels; likewise.

    Raises:
        SRError: an unknown kind, wrong probabilities or ranges.
    """

    def __init__(
        self,
        kernel_prob: dict[str, float],
        size_range: tuple[int, int],
        sigma_range: tuple[float, float],
        angle_range: tuple[float, float] = (-math.pi, math.pi),
        beta_generalized_range: tuple[float, float] = (0.5, 4.0),
        beta_plateau_range: tuple[float, float] = (1.0, 2.0),
    ) -> None:
        unknown = [kind for kind in kernel_prob if kind not in KERNELS]
        if unknown:
            raise SRError(f"unknown kernel {unknown[0]!r} in Blur's kernel_prob; known: {', '.join(KERNELS)}")
        self.kernel_prob = check_probabilities("Blur's kernel_prob", [kernel_prob.get(kind, 0.0) for kind in KERNELS])
        self.size_range = check_sizes("Blur's size_range", size_range)
        self.sigma_range = check_range("Blur's sigma_range", sigma_range, 0.01)
        self.angle_range = check_range("Blur's angle_range", angle_range, -2 * math.pi, 2 * math.pi)
        self.beta_ranges = (
            check_range("Blur's beta_generalized_range", beta_generalized_range, 0.01),
            check_range("Blur's beta_plateau_range", beta_plateau_range, 0.01),
        )

    def kernels(self, n: int, draws: Draws) -> Tensor:
        """(n, edge, edge) with the largest edge of ``size_range``."""
        kind = draws.choices(n, self.kernel_prob).to(draws.device)
        size = draws.odd(n, *self.size_range)
        sigma_x, sigma_y = draws.uniform(n, *self.sigma_range), draws.uniform(n, *self.sigma_range)
        angle = draws.uniform(n, *self.angle_range)
        generalized, plateau = (self._beta(n, draws, *limits) for limits in self.beta_ranges)
        beta = torch.where(kind < 2, torch.ones_like(angle), torch.where(kind < 4, generalized, plateau))
        sigma_y = torch.where(kind % 2 == 0, sigma_x, sigma_y)
        return gaussian_kernels(size, sigma_x, sigma_y, angle, beta, kind >= 4, self.size_range[1])

    @staticmethod
    def _beta(n: int, draws: Draws, low: float, high: float) -> Tensor:
        part = draws.uniform(n, -1, 1)  # its sign decides the side of 1
        return 1 + part * torch.where(part < 0, 1 - min(low, 1.0), max(high, 1.0) - 1)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        return filter_pictures(x, self.kernels(len(x), draws))


class Sinc(Step):
    """Ideal low-pass filter: ringing and overshoot as from sharpening or compression; drawn per picture.

    Args:
        size_range: smallest and largest edge of the kernels in pixels, odd.
        cutoff_range: highest frequency that passes, as a part of the highest that a picture holds, in (0, 1].

    Raises:
        SRError: wrong ranges.
    """

    def __init__(self, size_range: tuple[int, int], cutoff_range: tuple[float, float]) -> None:
        self.size_range = check_sizes("Sinc's size_range", size_range)
        self.cutoff_range = check_range("Sinc's cutoff_range", cutoff_range, 0.01, 1)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        size, cutoff = draws.odd(len(x), *self.size_range), draws.uniform(len(x), *self.cutoff_range)
        return filter_pictures(x, sinc_kernels(size, cutoff, self.size_range[1]))


class Sharpen:
    """Unsharp mask where it exceeds a threshold, with a soft transition, as Real-ESRGAN sharpens its GT.

    Args:
        weight: of the difference to the blurred picture that is added.
        radius: width of the Gaussian in pixels, made odd. Its standard deviation is what OpenCV takes for that many
            taps, 0.3 ((taps - 1) / 2 - 1) + 0.8: 8 pixels for 50.
        threshold: of the difference, in steps of 1/255.

    Raises:
        SRError: a value that is negative, or a radius below 2.
    """

    def __init__(self, weight: float = 0.5, radius: int = 50, threshold: float = 10.0) -> None:
        if weight < 0 or radius < 2 or threshold < 0:
            raise SRError("Sharpen takes weight and threshold of at least 0 and a radius of at least 2")
        self.weight, self.radius, self.threshold = weight, radius, threshold

    def __call__(self, x: Tensor) -> Tensor:
        """Sharpen a batch (N, C, H, W) in [0, 1]; so is the result."""
        return by_pieces(self._sharpen, x)

    def _sharpen(self, x: Tensor) -> Tensor:
        detail = x - self._blur(x)
        mask = self._blur(detail.abs().gt_(self.threshold / 255))  # 1 or 0
        sharp = detail.mul_(self.weight).add_(x).clamp_(0, 1)
        return torch.lerp(x, sharp, mask).clamp_(0, 1)

    def _blur(self, x: Tensor) -> Tensor:
        taps = self.radius // 2 * 2 + 1
        up_y, down_y = _smooth(x.shape[-2], taps, x.device)
        up_x, down_x = _smooth(x.shape[-1], taps, x.device)
        return up_y @ (down_y @ (x @ down_x.T) @ up_x.T)


@lru_cache(maxsize=64)
def _smooth(n: int, taps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Factors (n, r) and (r, n) of the matrix that blurs an axis of n pixels with a Gaussian, reflected at its ends.

    A wide Gaussian passes few frequencies, so few singular values of the matrix count: 36 of 256 for 51 taps. Products
    with the factors take a fraction of the time, and differ from the full matrix by at most 0.04 / 255 in a photograph.
    """
    t = torch.arange(taps, dtype=torch.float64, device="cpu") - taps // 2
    sigma = 0.3 * (taps // 2 - 1) + 0.8
    weights = torch.exp(-(t**2) / (2 * sigma**2))
    weights /= weights.sum()
    with torch.inference_mode(False):  # what inference mode makes could not serve a later training step
        matrix = torch.zeros(n, n, dtype=torch.float64, device="cpu")
        source = _reflected(n, taps // 2, taps // 2).unfold(0, taps, 1)
        matrix.scatter_add_(1, source, weights.expand(n, taps).contiguous())
        u, s, vh = torch.linalg.svd(matrix)
        rank = int((s > 1e-3).sum())
        return (u[:, :rank] * s[:rank]).float().to(device), vh[:rank].float().to(device)


def filter_pictures(x: Tensor, kernels: Tensor) -> Tensor:
    """Filter each picture with its own kernel; the border is reflected without repeating the edge pixel.

    The same as ``kornia.filters.filter2d``, but for pictures smaller than the kernel too, and by Fourier transform,
    whose time does not grow with the kernel: README.md has the figures.

    Args:
        x: (N, C, H, W).
        kernels: (N, K, K), K odd, each the same when turned by 180 degrees.

    Returns:
        (N, C, H, W).
    """
    return by_pieces(_filter, x, kernels)


def _filter(x: Tensor, kernels: Tensor) -> Tensor:
    (height, width), r = x.shape[-2:], kernels.shape[-1] // 2
    rows, columns = _fft_size(height + 2 * r), _fft_size(width + 2 * r)
    padded = _reflect(x, r, rows - height - r, columns - width - r)
    # The kernel is symmetric about its centre, so its spectrum is real: sums of cosines.
    (cos_y, sin_y), (cos_x, sin_x) = _waves(2 * r + 1, rows, 1, x.device), _waves(2 * r + 1, columns, 2, x.device)
    response = cos_y @ kernels @ cos_x - sin_y @ kernels @ sin_x
    spectrum = torch.fft.rfft2(padded)
    torch.view_as_real(spectrum).flatten(-2).mul_(response[:, None])
    # Not irfft2, which takes several times as long on a CPU.
    result = torch.fft.irfft(torch.fft.ifft(spectrum, dim=-2), n=columns)
    return result[..., r : r + height, r : r + width]


def _fft_size(n: int) -> int:
    """The next even number with no prime factor but 2, 3 and 5."""
    n += n % 2
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 2


@lru_cache(maxsize=256)
def _waves(taps: int, n: int, part: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n, taps) of all n frequencies (``part`` 1), or (taps, 2 (n // 2 + 1)) of half of them.

    The latter come twice, side by side: once for the real and once for the imaginary part of what they multiply.
    """
    with torch.inference_mode(False):
        t = torch.arange(taps, dtype=torch.float64, device="cpu") - taps // 2
        f = torch.arange(n if part == 1 else n // 2 + 1, dtype=torch.float64, device="cpu") * (2 * math.pi / n)
        angle = f[:, None] * t if part == 1 else t[:, None] * f.repeat_interleave(2)
        return angle.cos().float().to(device), angle.sin().float().to(device)


def _reflect(x: Tensor, before: int, after_y: int, after_x: int) -> Tensor:
    """Padded by reflection, also by more than the picture holds."""
    height, width = x.shape[-2:]
    if max(before, after_y) < height and max(before, after_x) < width:
        return F.pad(x, (before, after_x, before, after_y), mode="reflect")
    rows, columns = _reflected(height, before, after_y), _reflected(width, before, after_x)
    return x.index_select(-2, rows.to(x.device)).index_select(-1, columns.to(x.device))


def _reflected(n: int, before: int, after: int) -> Tensor:
    """Positions in an axis of n pixels that the pixels of the padded axis come from."""
    period = max(1, 2 * (n - 1))
    position = torch.arange(-before, n + after).remainder(period)
    return torch.minimum(position, (period - position).remainder(period) if n > 1 else position)
