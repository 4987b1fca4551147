"""Distances between pixels, between their spectra and between their neighbourhoods."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kornia.metrics import ssim
from torch import Tensor

from sr.errors import SRError
from sr.losses.base import Loss


class L1Loss(Loss):
    """Mean absolute difference.

    Args:
        weight: factor of the term in the sum.
    """

    name = "l1"

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(sr, target)


class CharbonnierLoss(Loss):
    """Mean of ``sqrt(d^2 + eps^2)``, a smooth absolute difference.

    "Deep Laplacian Pyramid Networks for Fast and Accurate Super-Resolution" (Lai et al., CVPR 2017).

    Args:
        weight: factor of the term in the sum.
        eps: difference below which it is more like a square; also its value where nothing differs.
    """

    name = "charbonnier"

    def __init__(self, weight: float = 1.0, eps: float = 1e-3) -> None:
        super().__init__(weight)
        if not eps > 0:
            raise SRError(f"eps of the Charbonnier loss must be larger than 0, not {eps}")
        self.eps = eps

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        return ((sr - target).square() + self.eps**2).sqrt().mean()


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

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.rfft2(sr - target)).abs().mean()  # one transform: it is linear


class SSIMLoss(Loss):
    """``1 - SSIM``, over R, G and B, with a Gaussian window of 11 pixels (sigma 1.5) inside the picture.

    "Image Quality Assessment: From Error Visibility to Structural Similarity" (Wang et al., TIP 2004).

    Args:
        weight: factor of the term in the sum.
    """

    name = "ssim"

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        if min(sr.shape[-2:]) < 11:
            raise SRError(f"SSIMLoss needs patches of at least 11 pixels, not {tuple(sr.shape[-2:])}; raise gt_size")
        return 1 - ssim(sr, target, window_size=11, padding="valid").mean()
