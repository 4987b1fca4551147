"""Side-by-side pictures for the eye: LQ | bicubic | SR | GT | error."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sr.image import to_image
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


def contact_sheet(rows: list[list[Tensor]], labels: list[str]) -> Image.Image:
    """A table of pictures, each enlarged without interpolation to the size of the first in its row.

    Args:
        rows: in each row pictures (3, h, w), uint8 or float in [0, 1]; the first one's edges are multiples of theirs.
        labels: one a column.
    """
    height, width = rows[0][0].shape[-2:]
    sheet = Image.new(
        "RGB", (len(labels) * (width + _GAP) - _GAP, _LABEL_HEIGHT + len(rows) * (height + _GAP) - _GAP), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for x, label in enumerate(labels):
        draw.text((x * (width + _GAP) + 2, 1), label, fill="black")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            image = to_image(picture).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(image, (x * (width + _GAP), _LABEL_HEIGHT + y * (height + _GAP)))
    return sheet


def _psnr(picture: Tensor, gt: Tensor, crop_border: int) -> float:
    small = min(gt.shape[-2:]) <= 2 * crop_border
    return psnr(picture[None], gt[None], crop_border=0 if small else crop_border).item()
