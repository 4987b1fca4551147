"""Noise against its distribution."""

import pytest
import torch
from scipy.stats import poisson

from sr.degradations import Draws, GaussianNoise, PoissonNoise
from sr.degradations.noise import poisson_deviation
from sr.errors import SRError


def draws(seed: int = 0) -> Draws:
    return Draws(torch.Generator().manual_seed(seed), torch.device("cpu"), 4, (8, 8))


def test_gaussian_noise_has_the_level_asked_for():
    x = torch.full((4, 3, 120, 120), 0.5)
    noise = GaussianNoise((20, 20), gray_prob=0)(x, draws()) - x
    assert noise.std((1, 2, 3)) * 255 == pytest.approx(20, rel=0.02)
    assert noise.mean((1, 2, 3)) == pytest.approx(0, abs=0.002)
    correlation = torch.corrcoef(noise[0].flatten(1))
    assert (correlation - torch.eye(3)).abs().max() < 0.03


def test_levels_and_gray_are_drawn_per_picture():
    x = torch.full((300, 3, 16, 16), 0.5)
    noise = GaussianNoise((5, 25), gray_prob=0.4)(x, draws()) - x
    gray = (noise[:, 0] == noise[:, 1]).flatten(1).all(1) & (noise[:, 0] == noise[:, 2]).flatten(1).all(1)
    assert gray.float().mean() == pytest.approx(0.4, abs=0.1)
    levels = noise[~gray].flatten(1).std(1) * 255
    assert levels.min() == pytest.approx(5, abs=1) and levels.max() == pytest.approx(25, abs=2)
    assert levels.mean() == pytest.approx(15, abs=1)


def test_correlated_noise_is_correlated_and_as_strong_as_the_largest_level_allows():
    x = torch.full((60, 3, 50, 50), 0.5)
    noise = GaussianNoise((2, 25), gray_prob=0, correlated_prob=1)(x, draws()) - x
    covariance = torch.stack([torch.cov(n.flatten(1)) for n in noise]) * (255 / 25) ** 2
    # U^T diag(d) U with d uniform in [0, 1): its trace is 3/2 on average and at most 3; no entry is negative.
    assert covariance.diagonal(dim1=1, dim2=2).sum(1).mean() == pytest.approx(1.5, abs=0.2)
    assert covariance.diagonal(dim1=1, dim2=2).sum(1).max() < 3.1
    assert covariance.min() > -0.05 and covariance[:, 0, 1].mean() > 0.05


@pytest.mark.parametrize("rate", [0.2, 1.0, 5.0, 60.0])
def test_poisson_deviation_has_poissons_moments(rate):
    z = torch.randn(400_000, generator=torch.Generator().manual_seed(0)).double()
    x = poisson_deviation(torch.full_like(z, rate), z)
    mean, variance, skewness = poisson.stats(rate, moments="mvs")
    assert x.mean() == pytest.approx(0, abs=0.01 * rate**0.5)
    assert x.var() == pytest.approx(variance, rel=0.02)
    if rate >= 1:
        assert (x / x.std()).pow(3).mean() == pytest.approx(skewness, rel=0.1, abs=0.02)
        for p in (0.05, 0.5, 0.95):  # a whole number is at most 1 from the value it stands for
            assert x.quantile(p) + mean == pytest.approx(poisson.ppf(p, rate), abs=1)


def test_no_light_no_noise():
    assert torch.equal(poisson_deviation(torch.zeros(50), torch.randn(50)), torch.zeros(50))


@pytest.mark.parametrize("strength", [1.0, 2.5])
def test_poisson_noise_grows_with_the_square_root_of_light(strength):
    # 256 levels in equal parts: 256 photons at white.
    x = (torch.arange(256).repeat(256, 1).T / 255).expand(2, 3, 256, 256).contiguous()
    noise = PoissonNoise((strength, strength), gray_prob=0)(x, draws()) - x
    for level in (30, 120):
        found = noise[:, :, level].std() * 255
        assert found == pytest.approx(strength * 255 / 256 * (level * 256 / 255) ** 0.5, rel=0.05)


def test_gray_poisson_noise_is_the_same_in_all_channels():
    x = torch.rand(3, 3, 40, 40) * 0.4 + 0.3
    noise = PoissonNoise((1, 1), gray_prob=1)(x, draws()) - x
    assert torch.allclose(noise[:, 0], noise[:, 1], atol=1e-6) and noise.std() > 0.01


def test_noise_is_clamped_and_leaves_its_input_alone():
    x = torch.rand(6, 3, 9, 5)
    kept = x.clone()
    for step in (GaussianNoise((200, 255), 0.5, 0.2), PoissonNoise((2, 3), 0.5)):
        result = step(x, draws())
        assert result.min() >= 0 and result.max() <= 1 and result.isfinite().all()
    assert torch.equal(x, kept)


def test_wrong_settings_are_refused():
    with pytest.raises(SRError, match="at most 1"):
        GaussianNoise((1, 30), gray_prob=0.8, correlated_prob=0.4)
    with pytest.raises(SRError, match="strength_range"):
        PoissonNoise((3, 0.05), gray_prob=0.4)
