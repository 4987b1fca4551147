"""Distances between pixels and between their spectra."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.losses.base import Loss


class L1Loss(Loss):
    """Mean absolute difference.

    Args:
        weight: factor of the term in the sum.
    """

    name = "l1"

    def term(self, sr: Tensor, gt: Tensor) -> Tensor:
        return F.l1_loss(sr, gt)


class FFTL1Loss(Loss):
    """Mean absolute difference of the 2-D spectra, real and imaginary parts.

    The unnormalised transform is used, as in "Rethinking Coarse-to-Fine Approach in Single Image Deblurring"
    (Cho et al., ICCV 2021), and as efficient SR networks are trained with a weight of 0.05.

    Args:
        weight: factor of the term in the sum.
    """

    name = "fft_l1"

    def __init__(self, weight: float = 0.05) -> None:
        super().__init__(weight)

    def term(self, sr: Tensor, gt: Tensor) -> Tensor:
        # One transform of the difference: the transform is linear. In float32: there is no half-precision FFT on CPUs.
        return torch.view_as_real(torch.fft.rfft2((sr - gt).float())).abs().mean()
