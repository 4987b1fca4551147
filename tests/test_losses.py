import numpy as np
import pytest
import torch

from sr.errors import SRError
from sr.losses import FFTL1Loss, L1Loss


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return torch.rand(2, 3, 6, 7, requires_grad=True), torch.rand(2, 3, 6, 7)


def test_l1_against_numpy(pair):
    sr, gt = (t.detach().numpy() for t in pair)
    assert L1Loss()(*pair).item() == pytest.approx(np.abs(sr - gt).mean(), rel=1e-6)


def test_fft_l1_against_numpy(pair):
    sr, gt = (t.detach().numpy() for t in pair)
    difference = np.fft.rfft2(sr) - np.fft.rfft2(gt)
    expected = np.abs(np.stack([difference.real, difference.imag])).mean()
    assert FFTL1Loss()(*pair).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [L1Loss(), FFTL1Loss()])
def test_equal_pictures_cost_nothing_and_others_have_a_gradient(loss, pair):
    sr, gt = pair
    assert loss(gt, gt).item() == 0
    loss(sr, gt).backward()
    assert sr.grad.abs().sum() > 0


@pytest.mark.parametrize("loss", [L1Loss(), FFTL1Loss()])
def test_shapes_that_would_broadcast_are_refused(loss, pair):
    with pytest.raises(SRError, match="differ"):
        loss(pair[0], pair[1][:1])
