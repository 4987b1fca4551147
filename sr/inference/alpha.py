"""Colours under transparency: what an editor left there must not show as a fringe around what is visible."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.rows import RowWindow

_LEVELS = 5
_BLOCK = 2**_LEVELS  # pixels of the coarsest level, and the least distance that colours spread
# A pixel looks at its block of the coarsest level, at this one's neighbours, and once more when it is enlarged again.
_REACH = 3 * _BLOCK
_BAND = 4 * _BLOCK


def bleed(colours: Tensor, alpha: Tensor) -> Tensor:
    """Continue the visible colours into fully transparent pixels, at least 32 pixels far.

    Means weighted by alpha are made at 1/2, 1/4 ... 1/32 of the size; a transparent pixel takes its colour from the
    finest of them that saw anything visible. Visible pixels, and transparent ones too far from any, stay as they are.

    Args:
        colours: (N, C, H, W), float, not multiplied by alpha.
        alpha: (N, 1, H, W), float, [0, 1].

    Returns:
        (N, C, H, W)
    """
    visible = alpha > 0
    if visible.all():
        return colours
    height, width = colours.shape[-2:]
    border = (0, -width % _BLOCK, 0, -height % _BLOCK)
    total, weight = F.pad(colours * alpha, border), F.pad(alpha, border)
    levels = []
    for _ in range(_LEVELS):
        levels.append((total, weight))
        total, weight = F.avg_pool2d(total, 2), F.avg_pool2d(weight, 2)
    total, weight = F.avg_pool2d(total, 3, 1, 1), F.avg_pool2d(weight, 3, 1, 1)
    known = (weight > 0).to(colours.dtype)
    filled = _ratio(total, weight)
    for total, weight in reversed(levels):
        share = _doubled(known)
        filled = torch.where(weight > 0, _ratio(total, weight), _ratio(_doubled(filled * known), share))
        known = ((weight > 0) | (share > 0)).to(colours.dtype)
    filled, known = filled[..., :height, :width], known[..., :height, :width]
    return torch.where(visible | (known == 0), colours, filled)


def bleed_rows(parts: Iterator[Tensor], height: int) -> Iterator[Tensor]:
    """:func:`bleed` for a picture of ``height`` rows that comes and goes in parts (N, C, h, W), alpha last."""
    window = RowWindow(parts)
    for top in range(0, height, _BAND):
        first = max(0, top - _REACH)
        rows = window.get(first, min(height, top + _BAND + _REACH))
        bottom = min(height, top + _BAND)
        here = slice(top - first, bottom - first)
        yield torch.cat((bleed(rows[:, :-1], rows[:, -1:])[..., here, :], rows[:, -1:, here]), 1)


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def _ratio(total: Tensor, weight: Tensor) -> Tensor:
    return total / torch.where(weight > 0, weight, 1)
