"""Side-by-side pictures for the eye: LQ | bicubic | SR | GT | error."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sr.metrics import psnr
from sr.resize import imresize

_LABEL_HEIGHT = 14
_GAP = 2


def comparison(lq: Tensor, sr: Tensor, gt: Tensor, scale: int, edge: int = 192) -> Image.Image:
    """A strip of the same crop: LQ (enlarged without interpolation), bicubic, SR, GT, absolute error.

    The crop is centred, at most ``edge`` GT pixels wide and high. The error is shown four times as strong.

    Args:
        lq: (3, h, w), uint8.
        sr: (3, scale*h, scale*w), float in [0, 1].
        gt: (3, scale*h, scale*w), uint8.
        scale: output edge / input edge.
        edge: largest edge of the crop, in GT pixels.
    """
    result = (sr.clamp(0, 1) * 255).round().to(torch.uint8)
    cubic = imresize(lq, scale)
    nearest = lq.repeat_interleave(scale, -2).repeat_interleave(scale, -1)
    error = ((result.int() - gt.int()).abs() * 4).clamp(max=255).to(torch.uint8)
    panels = {
        "LQ": nearest,
        f"bicubic {_psnr(cubic, gt, scale):.2f} dB": cubic,
        f"SR {_psnr(result, gt, scale):.2f} dB": result,
        "GT": gt,
        "error x 4": error,
    }
    height, width = (min(edge, size) for size in gt.shape[-2:])
    top, left = (gt.shape[-2] - height) // 2, (gt.shape[-1] - width) // 2
    strip = Image.new("RGB", (len(panels) * (width + _GAP) - _GAP, height + _LABEL_HEIGHT), "white")
    draw = ImageDraw.Draw(strip)
    for i, (label, panel) in enumerate(panels.items()):
        crop = panel[:, top : top + height, left : left + width].permute(1, 2, 0).contiguous()
        strip.paste(Image.fromarray(crop.numpy()), (i * (width + _GAP), _LABEL_HEIGHT))
        draw.text((i * (width + _GAP) + 2, 1), label, fill="black")
    return strip


def _psnr(picture: Tensor, gt: Tensor, crop_border: int) -> float:
    small = min(gt.shape[-2:]) <= 2 * crop_border
    return psnr(picture[None], gt[None], crop_border=0 if small else crop_border).item()
