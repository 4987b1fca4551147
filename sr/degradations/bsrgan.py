"""Steps of BSRGAN whose ranges grow with the scale (Zhang et al., "Designing a Practical Degradation Model for Deep
Blind Image Super-Resolution", 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sr.degradations.base import Draws, Step, check_probabilities, check_range, check_sizes
from sr.degradations.blur import filter_pictures
from sr.degradations.kernels import gaussian_kernels
from sr.degradations.resize import Mode, check_modes, draw_mode, resize, scaled
from sr.errors import SRError


class ScaledBlur(Step):
    """Gaussian blur whose width grows with the scale; drawn per picture.

    Args:
        aniso_prob: probability of an anisotropic kernel of any direction.
        sigma_max: largest standard deviation of an isotropic kernel in pixels, as a and b of a + b scale; uniform
            from 0.
        variance_max: largest variance along either axis of an anisotropic kernel, likewise.
        size_range: smallest and largest edge of the kernels in pixels, odd.

    Raises:
        SRError: wrong probabilities or ranges.
    """

    def __init__(
        self,
        aniso_prob: float,
        sigma_max: tuple[float, float],
        variance_max: tuple[float, float],
        size_range: tuple[int, int],
    ) -> None:
        self.probabilities = check_probabilities("ScaledBlur's aniso_prob", [aniso_prob], complete=False)
        self.sigma_max, self.variance_max = sigma_max, variance_max
        if min(*sigma_max, *variance_max) < 0:
            raise SRError("ScaledBlur's sigma_max and variance_max must not be negative")
        self.size_range = check_sizes("ScaledBlur's size_range", size_range)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        n = len(x)
        aniso = (draws.choices(n, self.probabilities) == 0).to(x.device)
        size = draws.odd(n, *self.size_range)
        sigma = draws.uniform(n, 0, _at(self.sigma_max, draws))
        sigma_x, sigma_y = (draws.uniform(n, 0, _at(self.variance_max, draws)).sqrt() for _ in range(2))
        # A width of 0 leaves the centre only, as do 0.01 pixels.
        sigma_x = torch.where(aniso, sigma_x, sigma).clamp(min=0.01)
        sigma_y = torch.where(aniso, sigma_y, sigma).clamp(min=0.01)
        angle, beta = draws.uniform(n, 0, math.pi), torch.ones_like(sigma)
        kernels = gaussian_kernels(size, sigma_x, sigma_y, angle, beta, beta < 0, self.size_range[1])
        return filter_pictures(x, kernels)


class Halve(Step):
    """Half the size at scale 4, for some batches, so that the steps that follow work towards scale 2.

    Args:
        prob: probability, for the batch.
        modes: equally likely.

    Raises:
        SRError: a wrong probability, no mode.
    """

    def __init__(self, prob: float, modes: list[Mode]) -> None:
        self.probabilities = check_probabilities("Halve's prob", [prob], complete=False)
        self.modes = check_modes("Halve", modes)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        if draws.choice(self.probabilities) != 0 or draws.scale != 4:
            return x
        draws.scale = 2
        height, width = draws.lq_size
        return resize(x, (2 * height, 2 * width), draw_mode(self.modes, draws)).clamp(0, 1)


class ScaledShrink(Step):
    """Smaller by a factor that grows with the scale; or Gaussian blur, and one of ``scale`` pixels; for the batch.

    Args:
        subsample_prob: probability of the latter.
        divisor_range: the size is divided by a number from ``divisor_range[0]`` to ``divisor_range[1] * scale``.
        modes: of resizing, equally likely.
        subsample_sigma_range: standard deviation of the blur, from ``[0]`` to ``[1] * scale`` pixels; per picture.
        subsample_taps: edge of its kernel in pixels, odd.

    Raises:
        SRError: wrong probabilities or ranges, no mode.
    """

    def __init__(
        self,
        subsample_prob: float,
        divisor_range: tuple[float, float],
        modes: list[Mode],
        subsample_sigma_range: tuple[float, float],
        subsample_taps: int,
    ) -> None:
        self.probabilities = check_probabilities("ScaledShrink's subsample_prob", [subsample_prob], complete=False)
        self.divisor_range = check_range("ScaledShrink's divisor_range", divisor_range, 1)
        self.modes = check_modes("ScaledShrink", modes)
        self.sigma_range = check_range("ScaledShrink's subsample_sigma_range", subsample_sigma_range, 0.01)
        self.taps = check_sizes("ScaledShrink's subsample_taps", [subsample_taps] * 2)[0]

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        if draws.choice(self.probabilities) == 0:
            sigma = draws.uniform(len(x), self.sigma_range[0], self.sigma_range[1] * draws.scale)
            rows, columns = (self._samples(n, m, sigma) for n, m in zip(x.shape[-2:], draws.lq_size, strict=True))
            return rows @ x @ columns.mT
        divisor = draws.number(self.divisor_range[0], self.divisor_range[1] * draws.scale)
        return resize(x, scaled(x.shape[-2:], 1 / divisor), draw_mode(self.modes, draws)).clamp(0, 1)

    def _samples(self, n: int, m: int, sigma: Tensor) -> Tensor:
        """(N, 1, m, n): each of m samples as Gaussian weights of n pixels, about the centre of the sample's share."""
        centre = (torch.arange(m, device=sigma.device) + 0.5) * (n / m) - 0.5
        distance = torch.arange(n, device=sigma.device) - centre[:, None]
        # From the nearest pixels' distance on, or a narrow Gaussian between two pixels would be 0 everywhere.
        excess = distance.square() - distance.square().amin(1, keepdim=True)
        weights = torch.exp(-excess / (2 * sigma[:, None, None, None].square()))
        weights = weights * (distance.abs() <= self.taps / 2)
        return weights / weights.sum(-1, keepdim=True)


def _at(line: tuple[float, float], draws: Draws) -> float:
    return line[0] + line[1] * draws.scale
