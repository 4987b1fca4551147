"""Noise of a sensor; strength and kind are drawn for each picture."""

from __future__ import annotations

import torch
from kornia.color import rgb_to_grayscale
from torch import Tensor

from sr.degradations.base import Draws, Step, check_probabilities, check_range, normal
from sr.degradations.pieces import by_kind


class GaussianNoise(Step):
    """Adds Gaussian noise and clamps to [0, 1].

    Args:
        sigma_range: standard deviation, in steps of 1/255.
        gray_prob: probability of the same noise in all three channels.
        correlated_prob: probability of noise that is correlated between the channels (Zhang et al., "Designing a
            Practical Degradation Model", 2021). Its covariance is |L^2 U^T diag(d) U| with L the largest standard
            deviation, U the left singular vectors of a matrix of uniform numbers, and d uniform in [0, 1). What is
            missing to 1 is independent noise.

    Raises:
        SRError: wrong ranges or probabilities.
    """

    def __init__(self, sigma_range: tuple[float, float], gray_prob: float, correlated_prob: float = 0.0) -> None:
        self.sigma_range = check_range("GaussianNoise's sigma_range", sigma_range, 0)
        self.probabilities = check_probabilities(
            "GaussianNoise's gray_prob and correlated_prob", [gray_prob, correlated_prob], complete=False
        )

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        sigma = draws.uniform(len(x), *self.sigma_range)[:, None, None, None] / 255
        kind = draws.choices(len(x), self.probabilities)
        mixtures = self._mixtures(len(x), draws)

        def gray(x: Tensor, seeds: Tensor, sigma: Tensor, _: Tensor) -> Tensor:
            return (normal(seeds, len(x), 1, *x.shape[-2:]).mul_(sigma) + x).clamp_(0, 1)

        def correlated(x: Tensor, seeds: Tensor, _: Tensor, mixtures: Tensor) -> Tensor:
            noise = mixtures @ normal(seeds, *x.shape).flatten(2)
            return noise.view_as(x).add_(x).clamp_(0, 1)

        def independent(x: Tensor, seeds: Tensor, sigma: Tensor, _: Tensor) -> Tensor:
            return normal(seeds, *x.shape).mul_(sigma).add_(x).clamp_(0, 1)

        return by_kind((gray, correlated, independent), kind, x, draws.seeds(len(x)), sigma, mixtures)

    def _mixtures(self, n: int, draws: Draws) -> Tensor:
        """(n, 3, 3) matrices that turn independent noise into correlated noise."""
        rotation = torch.linalg.svd(draws.uniform(9 * n, 0, 1).view(n, 3, 3)).U
        variance = draws.uniform(3 * n, 0, 1).view(n, 3, 1)
        # The absolute value of a 3 x 3 covariance is one as well, but rounding may leave it singular.
        covariance = (rotation.mT @ (variance * rotation)).abs() + 1e-6 * torch.eye(3, device=draws.device)
        return torch.linalg.cholesky(covariance) * (self.sigma_range[1] / 255)


class PoissonNoise(Step):
    """Adds the noise of counted photons and clamps to [0, 1].

    A picture of m different levels is taken as counts of up to V photons, V the next power of two of m; the noise is
    ``strength`` times the difference between random and expected counts, as in Wang et al., "Real-ESRGAN", 2021.

    Args:
        strength_range: factor of the noise; 1 is that of a sensor that counts V photons at white.
        gray_prob: probability of the same noise, that of the gray picture, in all three channels.

    Raises:
        SRError: wrong ranges or probabilities.
    """

    def __init__(self, strength_range: tuple[float, float], gray_prob: float) -> None:
        self.strength_range = check_range("PoissonNoise's strength_range", strength_range, 0)
        self.probabilities = check_probabilities("PoissonNoise's gray_prob", [gray_prob], complete=False)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        strength = draws.uniform(len(x), *self.strength_range)[:, None, None, None]
        kind = draws.choices(len(x), self.probabilities)

        def gray(x: Tensor, seeds: Tensor, strength: Tensor) -> Tensor:
            return (_photon_noise(rgb_to_grayscale(x), seeds, strength) + x).clamp_(0, 1)

        def color(x: Tensor, seeds: Tensor, strength: Tensor) -> Tensor:
            return _photon_noise(x, seeds, strength).add_(x).clamp_(0, 1)

        return by_kind((gray, color), kind, x, draws.seeds(len(x)), strength)


def _photon_noise(x: Tensor, seeds: Tensor, strength: Tensor) -> Tensor:
    """``strength`` times the difference between counts and expectation, for white at 1; ``x`` in about [0, 1]."""
    levels = (x * 255).round_().clamp_(0, 255)
    # One pixel of five is enough to tell 128 levels from 256, and counting them all takes longer than all else.
    some = levels.flatten(1)[:, ::5].long()
    found = torch.zeros(len(x), 256, device=x.device).scatter_(1, some, 1.0).sum(1)
    white = torch.exp2(torch.log2(found).ceil())[:, None, None, None]
    return poisson_deviation(levels.mul_(white / 255), normal(seeds, *x.shape)).mul_(strength / white)


def poisson_deviation(rate: Tensor, z: Tensor) -> Tensor:
    """A Poisson variable less its expectation, as a polynomial of a standard normal one.

    The first terms of the expansion of E. A. Cornish and R. A. Fisher, "Moments and cumulants in the specification of
    distributions", 1938, with the variance set right: mean and variance are the Poisson variable's, and for rates of 1
    and above the skewness is to 2 %. It is not a whole number, which the rounding to 8 bits hides; a true one takes ten
    times as long to draw on a CPU.

    Args:
        rate: expectation, at least 0.
        z: standard normal numbers of its shape.

    Returns:
        A tensor of that shape.
    """
    # a z + b (z^2 - 1) has the variance a^2 + 2 b^2; for rates of 1 and above, b = 1/6.
    low = rate.clamp(max=1)
    a = rate.sub(low, alpha=1 / 18).sqrt_().mul_(z)
    return a.addcmul_(low.sqrt_(), z.square().sub_(1), value=1 / 6)
