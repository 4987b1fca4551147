"""What scores cannot show: the results as files, and strips of the same crop from LR to HR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sr.errors import SRError
from sr.evaluation.scores import Score
from sr.image import save_image, to_image

#: Left, top, width, height in GT pixels.
Box = tuple[int, int, int, int]

_EDGE = 96  # of a crop that was not given
_PANEL = 192  # smallest width of a crop in the strip, which is enlarged to it
_TEXT = 13  # height of a line
_GAP = 4


class PictureWriter:
    """Writes each result to ``folder/x4/MODEL/SET/PICTURE.png`` and a strip to ``folder/x4/strips/SET/PICTURE.png``.

    Args:
        folder: created where it is missing.
        set_name: the picture set's.
        scale: output edge / input edge.
        box: the strips' crop, cut to what lies inside the picture; default: :func:`largest_difference`.
    """

    def __init__(self, folder: Path, set_name: str, scale: int, box: Box | None = None) -> None:
        self.folder = folder / f"x{scale}"
        self.set_name = set_name
        self.scale = scale
        self.box = box

    def __call__(
        self, name: str, lq: Tensor, gt: Tensor, results: Mapping[str, Tensor], scores: Mapping[str, Score]
    ) -> None:
        """Write one picture; the arguments are those of :data:`sr.evaluation.scores.OnPicture`."""
        for model, sr in results.items():
            self._save(to_image(sr), model, name)
        box = self.box or largest_difference(gt, results)
        if box[0] >= gt.shape[-1] or box[1] >= gt.shape[-2]:
            raise SRError(f"the crop at {box[0]}, {box[1]} lies outside {name} ({gt.shape[-1]}x{gt.shape[-2]})")
        self._save(strip(lq, gt, results, scores, self.scale, box), "strips", name)

    def _save(self, image: Image.Image, kind: str, name: str) -> None:
        path = self.folder / kind / self.set_name / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_image(image, path)


def largest_difference(gt: Tensor, results: Mapping[str, Tensor], edge: int = _EDGE) -> Box:
    """The square in which the results differ most from one another; bicubic alone is compared with GT.

    Args:
        gt: uint8 (3, H, W).
        results: uint8 (3, H, W) each.
        edge: of the square, in GT pixels; cut to the picture.
    """
    pictures = torch.stack([*results.values(), *([gt] if len(results) == 1 else [])]).float()
    spread = (pictures.amax(0) - pictures.amin(0)).square().mean(0)
    height, width = (min(edge, size) for size in spread.shape)
    # Sums over squares as differences of a summed-area table.
    table = torch.nn.functional.pad(spread.double().cumsum(0).cumsum(1), (1, 0, 1, 0))
    sums = table[height:, width:] - table[:-height, width:] - table[height:, :-width] + table[:-height, :-width]
    top, left = divmod(int(sums.argmax()), sums.shape[1])
    return left, top, width, height


def strip(
    lq: Tensor, gt: Tensor, results: Mapping[str, Tensor], scores: Mapping[str, Score], scale: int, box: Box
) -> Image.Image:
    """LR | bicubic | each model | HR, the same crop, with the whole picture's PSNR under each.

    Args:
        lq: uint8 (3, h, w).
        gt: uint8 (3, scale*h, scale*w).
        results: of the size of ``gt``; bicubic first.
        scores: of ``results``.
        scale: output edge / input edge.
        box: the crop; what lies outside the picture is left out.
    """
    left, top, width, height = box
    lr = lq.repeat_interleave(scale, -2).repeat_interleave(scale, -1)
    panels = {"LR": lr, **results, "HR": gt}
    crops = [to_image(x[:, top : top + height, left : left + width]) for x in panels.values()]
    factor = math.ceil(_PANEL / crops[0].width)
    size = crops[0].width * factor, crops[0].height * factor
    sheet = Image.new("RGB", (len(crops) * (size[0] + _GAP) - _GAP, size[1] + 2 * _TEXT), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (name, crop) in enumerate(zip(panels, crops, strict=True)):
        x = i * (size[0] + _GAP)
        sheet.paste(crop.resize(size, Image.Resampling.NEAREST), (x, 0))
        draw.text((x + 2, size[1]), _fitting(draw, name, size[0] - 4), fill="black")
        if name in scores:
            draw.text((x + 2, size[1] + _TEXT), f"{scores[name].psnr:.2f} dB", fill="black")
    return sheet


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """The text, shortened at its end to a width in pixels."""
    while len(text) > 2 and draw.textlength(text) > width:
        text = text[:-3] + ".."
    return text
