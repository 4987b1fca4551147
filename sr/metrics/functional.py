"""PSNR and SSIM of each picture, by the protocol that super-resolution papers report.

Both pictures are clamped to [0, 1], rounded to 8 bits and shaved by ``crop_border`` pixels on each side; MATLAB's Y is
taken without rounding it again; everything is computed in float64. Means over a set are means of these values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sr.color import rgb_to_y
from sr.errors import SRError

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def psnr(sr: Tensor, gt: Tensor, *, crop_border: int = 0, test_y_channel: bool = True) -> Tensor:
    """Peak signal-to-noise ratio of each picture: ``10 log10(255^2 / MSE)``.

    Args:
        sr: prediction, (N, C, H, W), C 1 or 3 (RGB), float with the range [0, 1] or uint8. Values outside [0, 1]
            are clamped.
        gt: ground truth, the same shape; its dtype may differ.
        crop_border: pixels to shave off each side; papers shave ``scale``.
        test_y_channel: compare MATLAB's Y (a grey picture counts as three equal channels); otherwise the error is
            averaged over all channels.

    Returns:
        (N,), float64, dB; infinite where the pictures are identical.

    Raises:
        SRError: shapes that differ or are not (N, 1 or 3, H, W), an integer type other than uint8, float pictures that
            are evidently not in [0, 1], or a crop that leaves no pixel.
    """
    a, b = _prepare(sr, gt, crop_border, test_y_channel)
    return 10 * torch.log10(255**2 / (a - b).square().mean((1, 2, 3)))


def ssim(sr: Tensor, gt: Tensor, *, crop_border: int = 0, test_y_channel: bool = True) -> Tensor:
    """Structural similarity of each picture.

    Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment: from error visibility to structural similarity",
    2004, as in the authors' MATLAB code: Gaussian window of 11 x 11 with sigma 1.5 at the positions where it fits
    inside the picture, K1 = 0.01, K2 = 0.03, L = 255, no downsampling. An edge shorter than 11 pixels, for which the
    paper defines nothing, has the window cut to that edge.

    Args:
        sr: prediction, (N, C, H, W), C 1 or 3 (RGB), float with the range [0, 1] or uint8. Values outside [0, 1]
            are clamped.
        gt: ground truth, the same shape; its dtype may differ.
        crop_border: pixels to shave off each side; papers shave ``scale``.
        test_y_channel: compare MATLAB's Y (a grey picture counts as three equal channels); otherwise the mean over
            the channels is returned.

    Returns:
        (N,), float64, at most 1.

    Raises:
        SRError: as for :func:`psnr`.
    """
    a, b = _prepare(sr, gt, crop_border, test_y_channel)
    # The formula needs only the sum of the two variances, which saves one of five blurs.
    mean_a, mean_b, squares, product = (_blur(m) for m in (a, b, a * a + b * b, a * b))
    mean_product, mean_squares = mean_a * mean_b, mean_a.square() + mean_b.square()
    luminance = (2 * mean_product + _C1) / (mean_squares + _C1)
    structure = (2 * (product - mean_product) + _C2) / (squares - mean_squares + _C2)
    return (luminance * structure).mean((1, 2, 3))


def _prepare(sr: Tensor, gt: Tensor, crop_border: int, test_y_channel: bool) -> tuple[Tensor, Tensor]:
    """Checks, and what the metrics compare: float64 values counted in 8-bit steps, (N, C', H', W')."""
    if sr.shape != gt.shape:
        raise SRError(f"prediction and ground truth differ in shape: {tuple(sr.shape)} and {tuple(gt.shape)}")
    if gt.dim() != 4 or gt.shape[1] not in (1, 3):
        raise SRError(f"metrics take pictures of shape (N, 1 or 3, H, W), not {tuple(gt.shape)}")
    for name, x in (("prediction", sr), ("ground truth", gt)):
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise SRError(f"the {name} must be float in [0, 1] or uint8, not {x.dtype}")
    height, width = gt.shape[-2:]
    if crop_border < 0 or min(height, width) <= 2 * crop_border:
        raise SRError(f"crop_border {crop_border} does not fit a picture of {height} x {width} pixels")
    _check_range(sr, gt)
    inner = slice(crop_border, height - crop_border), slice(crop_border, width - crop_border)
    a, b = (_to_8bit(x[..., inner[0], inner[1]]) for x in (sr, gt))
    if test_y_channel:
        a, b = (rgb_to_y(x.expand(-1, 3, -1, -1) / 255) * 255 for x in (a, b))
    return a, b


def _check_range(sr: Tensor, gt: Tensor) -> None:
    """Refuse pictures in [0, 255] or [-1, 1]: they would give a plausible, wrong number."""
    if gt.numel() == 0:
        return
    if gt.is_floating_point():
        low, high = (v.item() for v in gt.aminmax())
        if low < -0.5 or high > 1.5:
            raise SRError(f"a float ground truth must be in [0, 1]; this one runs from {low:.4g} to {high:.4g}")
    if sr.is_floating_point():
        # A network early in its training may predict anything, so only what looks like an 8-bit picture is refused.
        x = sr.detach().flatten(1).float()
        if ((x.mean(1) > 2) & (x.amin(1) > -64) & (x.amax(1) < 320)).any():
            raise SRError("a float prediction must be in [0, 1]; this one looks like [0, 255], so divide it by 255")


def _to_8bit(x: Tensor) -> Tensor:
    """The picture as it would be written to a file, as float64."""
    if x.device.type == "mps":  # has no float64
        x = x.cpu()
    if x.dtype == torch.uint8:
        return x.double()
    return x.double().clamp(0, 1).mul_(255).add_(0.5).floor_()


def _blur(x: Tensor) -> Tensor:
    """Gaussian mean over the window at each position where it fits, one axis after the other."""
    # Shifted sums: on a CPU, conv2d takes 12 times as long in float64 (140 ms against 12 for 1356 x 2040).
    for axis in (-2, -1):
        size = min(_WINDOW, x.shape[axis])
        offset = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
        weights = torch.exp(-offset.square() / (2 * _SIGMA**2))
        length = x.shape[axis] - size + 1
        total = torch.zeros_like(x.narrow(axis, 0, length))
        for start, weight in enumerate((weights / weights.sum()).tolist()):
            total.add_(x.narrow(axis, start, length), alpha=weight)
        x = total
    return x
