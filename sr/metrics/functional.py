"""PSNR and SSIM of each picture, by the protocol that super-resolution papers report.

Both pictures are clamped to [0, 1], rounded to 8 bits and shaved by ``crop_border`` pixels on each side; MATLAB's Y is
taken without rounding it again; everything is computed in float64. Means over a set are means of these values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sr.errors import SRError

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
# Values of one map of SSIM that are worked on at a time, so that they stay in a core's cache, and rows of one product.
_PIECE, _BLOCK = 32_768, 16
# Weights of R, G, B and an offset, in 8-bit steps: MATLAB's rgb2ycbcr (ITU-R BT.601, studio range), JPEG's full range.
_STUDIO = (65.481 / 255, 128.553 / 255, 24.966 / 255), 16.0
_FULL = (0.299, 0.587, 0.114), 0.0


def psnr(
    sr: Tensor,
    gt: Tensor,
    *,
    crop_border: int = 0,
    test_y_channel: bool = True,
    full_range: bool = False,
    rounded: bool = True,
) -> Tensor:
    """Peak signal-to-noise ratio of each picture: ``10 log10(255^2 / MSE)``.

    Args:
        sr: prediction, (N, C, H, W), C 1 or 3 (RGB), float with the range [0, 1] or uint8. Values outside [0, 1]
            are clamped.
        gt: ground truth, the same shape; its dtype may differ.
        crop_border: pixels to shave off each side; papers shave ``scale``.
        test_y_channel: compare the luma Y (a grey picture counts as three equal channels); otherwise the error is
            averaged over all channels.
        full_range: take JPEG's Y, from 0 to 255, in place of MATLAB's, from 16 to 235: it reads 1.3 dB lower.
        rounded: round both pictures to 8 bits first.

    Returns:
        (N,), float64, dB; infinite where the pictures are identical.

    Raises:
        SRError: shapes that differ or are not (N, 1 or 3, H, W), an integer type other than uint8, float pictures that
            are evidently not in [0, 1], or a crop that leaves no pixel.
    """
    return _psnr(*_prepare(sr, gt, crop_border, test_y_channel, full_range, rounded))


def ssim(
    sr: Tensor,
    gt: Tensor,
    *,
    crop_border: int = 0,
    test_y_channel: bool = True,
    full_range: bool = False,
    rounded: bool = True,
) -> Tensor:
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
        test_y_channel: compare the luma Y (a grey picture counts as three equal channels); otherwise the mean over
            the channels is returned.
        full_range: as for :func:`psnr`.
        rounded: as for :func:`psnr`.

    Returns:
        (N,), float64, at most 1.

    Raises:
        SRError: as for :func:`psnr`.
    """
    return _ssim(*_prepare(sr, gt, crop_border, test_y_channel, full_range, rounded))


def psnr_and_ssim(
    sr: Tensor,
    gt: Tensor,
    *,
    crop_border: int = 0,
    test_y_channel: bool = True,
    full_range: bool = False,
    rounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`psnr` and :func:`ssim`, for which the pictures are prepared once."""
    a, b = _prepare(sr, gt, crop_border, test_y_channel, full_range, rounded)
    return _psnr(a, b), _ssim(a, b)


def shave(x: Tensor, crop_border: int) -> Tensor:
    """A view of pictures (..., H, W) without ``crop_border`` pixels on each side; refuses to leave nothing."""
    height, width = x.shape[-2:]
    if crop_border < 0 or min(height, width) <= 2 * crop_border:
        raise SRError(f"crop_border {crop_border} does not fit a picture of {height} x {width} pixels")
    return x[..., crop_border : height - crop_border, crop_border : width - crop_border]


def to_8bit(x: Tensor) -> Tensor:
    """The picture as it would be written to a file, uint8: float pictures are clamped to [0, 1] and rounded half up."""
    if x.dtype == torch.uint8:
        return x
    if x.device.type == "mps":  # has no float64
        x = x.cpu()
    return x.double().clamp(0, 1).mul_(255).add_(0.5).to(torch.uint8)


def _prepare(
    sr: Tensor, gt: Tensor, crop_border: int, test_y_channel: bool, full_range: bool, rounded: bool
) -> tuple[Tensor, Tensor]:
    """Checks, and what the metrics compare: float64 values counted in 8-bit steps, (N, C', H', W')."""
    if sr.shape != gt.shape:
        raise SRError(f"prediction and ground truth differ in shape: {tuple(sr.shape)} and {tuple(gt.shape)}")
    if gt.dim() != 4 or gt.shape[1] not in (1, 3):
        raise SRError(f"metrics take pictures of shape (N, 1 or 3, H, W), not {tuple(gt.shape)}")
    for name, x in (("prediction", sr), ("ground truth", gt)):
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise SRError(f"the {name} must be float in [0, 1] or uint8, not {x.dtype}")
    a, b = shave(sr.detach(), crop_border), shave(gt.detach(), crop_border)
    _check_range(sr, gt)
    if rounded:
        a, b = to_8bit(a), to_8bit(b)
    if test_y_channel:
        weights, offset = _FULL if full_range else _STUDIO
        a, b = _luma(a, weights, offset), _luma(b, weights, offset)
    else:
        a, b = _in_steps(a), _in_steps(b)
    unknown = sr.detach().isnan().flatten(1).any(1).to(a.device)
    return a.masked_fill(unknown.view(-1, 1, 1, 1), math.nan), b  # rounding would have made a number of NaN


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


def _in_steps(x: Tensor) -> Tensor:
    """float64 values in 8-bit steps, not rounded."""
    if x.device.type == "mps":  # has no float64
        x = x.cpu()
    return x.double() if x.dtype == torch.uint8 else x.double().clamp(0, 1).mul_(255)


def _luma(x: Tensor, weights: tuple[float, float, float], offset: float) -> Tensor:
    """Y of (N, 1 or 3, H, W) in 8-bit steps, (N, 1, H, W), float64; not rounded."""
    r, g, b = (_in_steps(c) for c in x.expand(-1, 3, -1, -1).split(1, 1))
    return (r * weights[0]).add_(g, alpha=weights[1]).add_(b, alpha=weights[2]).add_(offset)


def _psnr(a: Tensor, b: Tensor) -> Tensor:
    return 10 * torch.log10(255**2 / (a - b).square_().mean((1, 2, 3)))


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    n, channels, height, width = a.shape
    down, across = min(_WINDOW, height), min(_WINDOW, width)  # the window's edges
    piece = max(1, _PIECE // (n * channels * width * _BLOCK)) * _BLOCK if a.device.type == "cpu" else height
    c1, c12 = a.new_tensor(_C1), a.new_tensor(_C1 + _C2)
    total = a.new_zeros(n)
    for top in range(0, height - down + 1, piece):
        x, y = (m[..., top : top + piece + down - 1, :].permute(2, 0, 1, 3) for m in (a, b))
        rows = len(x) - down + 1
        # Four maps, of which the formula needs the local means; only the sum of the two variances occurs in it, which
        # saves one. What is added before blurring is there afterwards, since the window's weights sum to 1.
        maps = a.new_zeros(_whole(rows) + down - 1, 4, n, channels, _whole(width - across + 1) + across - 1)
        own = maps[: len(x), ..., :width]
        own[:, 0], own[:, 1] = x, y
        torch.addcmul(c12, x, x, out=own[:, 2]).addcmul_(y, y)
        torch.addcmul(c12, x, y, value=2, out=own[:, 3])
        maps = _blur(maps, down)[:rows]
        maps = _blur(maps.movedim(-1, 0).contiguous(), across)[: width - across + 1]
        mean_x, mean_y, squares, product = maps.unbind(2)
        mean_squares = torch.addcmul(c1, mean_x, mean_x).addcmul_(mean_y, mean_y)
        mean_product = torch.addcmul(c1, mean_x, mean_y, value=2)
        contrast = product.sub_(mean_product).div_(squares.sub_(mean_squares))
        total += mean_product.div_(mean_squares).mul_(contrast).sum((0, 1, 3))
    return total / (channels * (height - down + 1) * (width - across + 1))


def _whole(length: int) -> int:
    """``length`` in whole blocks."""
    return -(-length // _BLOCK) * _BLOCK


def _blur(x: Tensor, size: int) -> Tensor:
    """Gaussian mean over a window of ``size`` along the first axis, at each position where it fits: whole blocks."""
    # Products of one small banded matrix with blocks of rows: 0.6 of the time of adding up shifted maps, and a small
    # part of conv2d's, which is slow in float64.
    offset = torch.arange(size, dtype=x.dtype, device=x.device) - (size - 1) / 2
    weights = torch.exp(-offset.square() / (2 * _SIGMA**2))
    taps = _BLOCK + size - 1
    band = x.new_zeros(_BLOCK, taps)
    band.as_strided((_BLOCK, size), (taps + 1, 1)).copy_(weights / weights.sum())
    return (band @ x.flatten(1).unfold(0, taps, _BLOCK).transpose(1, 2)).flatten(0, 1).unflatten(1, x.shape[1:])
