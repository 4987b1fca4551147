"""RGB <-> YCbCr as MATLAB's ``rgb2ycbcr`` and ``ycbcr2rgb`` define it: ITU-R BT.601, studio range.

Every super-resolution paper reports PSNR and SSIM on this Y, which runs from 16/255 to 235/255. The full-range
conversion of most image libraries has another gain and reads 1.3 dB lower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sr.errors import SRError

# Rows Y, Cb, Cr over columns R, G, B in [0, 1]; the result counts in 8-bit steps and is offset by _OFFSET.
_MATRIX = (
    (65.481, 128.553, 24.966),
    (-37.797, -74.203, 112.0),
    (112.0, -93.786, -18.214),
)
_OFFSET = (16.0, 128.0, 128.0)
# Inverted rather than typed in, so that the round trip is as good as the dtype.
_INVERSE = torch.linalg.inv(torch.tensor(_MATRIX, dtype=torch.float64, device="cpu")).tolist()


def rgb_to_y(rgb: Tensor) -> Tensor:
    """Luma of MATLAB's ``rgb2ycbcr``: ``(65.481 R + 128.553 G + 24.966 B + 16) / 255``.

    Args:
        rgb: (..., 3, H, W), float, RGB, [0, 1]. Not clamped.

    Returns:
        (..., 1, H, W), the same dtype; [16/255, 235/255] for an input in [0, 1].

    Raises:
        SRError: ``rgb`` is not of a floating type, or its third dimension from the end is not 3.
    """
    channels = _channels(rgb, "rgb")
    return ((_mix(channels, _MATRIX[0]) + _OFFSET[0]) / 255).unsqueeze(-3).to(rgb.dtype)


def rgb_to_ycbcr(rgb: Tensor) -> Tensor:
    """MATLAB's ``rgb2ycbcr`` for pictures of floating type.

    Args:
        rgb: (..., 3, H, W), float, RGB, [0, 1]. Not clamped.

    Returns:
        (..., 3, H, W), channels Y, Cb, Cr, the same dtype; Y in [16/255, 235/255], Cb and Cr in [16/255, 240/255]
        around 128/255.

    Raises:
        SRError: ``rgb`` is not of a floating type, or its third dimension from the end is not 3.
    """
    channels = _channels(rgb, "rgb")
    rows = [(_mix(channels, row) + offset) / 255 for row, offset in zip(_MATRIX, _OFFSET, strict=True)]
    return torch.stack(rows, -3).to(rgb.dtype)


def ycbcr_to_rgb(ycbcr: Tensor) -> Tensor:
    """Inverse of :func:`rgb_to_ycbcr`.

    Unlike MATLAB's ``ycbcr2rgb`` it does not clamp: colours outside the RGB cube come back outside [0, 1], and the
    function stays invertible and differentiable.

    Args:
        ycbcr: (..., 3, H, W), float, channels Y, Cb, Cr as :func:`rgb_to_ycbcr` gives them.

    Returns:
        (..., 3, H, W), RGB, the same dtype.

    Raises:
        SRError: ``ycbcr`` is not of a floating type, or its third dimension from the end is not 3.
    """
    channels = [c * 255 - offset for c, offset in zip(_channels(ycbcr, "ycbcr"), _OFFSET, strict=True)]
    return torch.stack([_mix(channels, row) for row in _INVERSE], -3).to(ycbcr.dtype)


def _channels(picture: Tensor, name: str) -> tuple[Tensor, ...]:
    """The three planes, half types widened: their steps are coarser than those of an 8-bit picture."""
    if not picture.is_floating_point():
        raise SRError(f"{name} must be a float tensor in [0, 1], not {picture.dtype}; divide 8-bit values by 255")
    if picture.dim() < 3 or picture.shape[-3] != 3:
        raise SRError(f"{name} must have the shape (..., 3, H, W), not {tuple(picture.shape)}")
    return picture.to(torch.promote_types(picture.dtype, torch.float32)).unbind(-3)


def _mix(channels: Sequence[Tensor], row: Sequence[float]) -> Tensor:
    # Products and sums rather than a matrix product, which autocast and TF32 would take to 8 or 11 bits.
    return channels[0] * row[0] + channels[1] * row[1] + channels[2] * row[2]
