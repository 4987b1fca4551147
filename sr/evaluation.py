"""Score a network on data sets, beside bicubic, by the protocol of :mod:`sr.metrics`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sr.data import PictureSet
from sr.errors import SRError
from sr.inference import Upscaler
from sr.metrics import psnr, ssim
from sr.resize import imresize


@dataclass(frozen=True)
class Score:
    """PSNR in dB and SSIM of one picture or the mean of many."""

    psnr: float
    ssim: float


@dataclass(frozen=True)
class PictureScore:
    """The scores of one picture: ours and bicubic's."""

    name: str
    model: Score
    bicubic: Score


def bicubic(lq: Tensor, scale: int) -> Tensor:
    """MATLAB-bicubic enlargement of a uint8 (..., 3, h, w) picture: what every result is compared with."""
    return imresize(lq, scale)


def score(sr: Tensor, gt: Tensor, crop_border: int) -> Score:
    """PSNR_Y and SSIM_Y of one picture, (3, H, W) each, uint8 or float in [0, 1]."""
    return Score(
        psnr(sr[None], gt[None], crop_border=crop_border).item(),
        ssim(sr[None], gt[None], crop_border=crop_border).item(),
    )


def evaluate(upscaler: Upscaler, pictures: PictureSet, crop_border: int) -> Iterator[PictureScore]:
    """Upscale and score every picture of a prepared set, one after the other.

    Args:
        upscaler: holds the network.
        pictures: prepared for the network's scale.
        crop_border: pixels shaved off each side before scoring, in GT pixels; the usual value is the scale.

    Raises:
        SRError: at once, if the crop leaves nothing of a picture.
    """
    for name, (height, width) in zip(pictures.names, pictures.gt_sizes, strict=True):
        if crop_border < 0 or min(height, width) <= 2 * crop_border:
            raise SRError(f"a crop of {crop_border} pixels leaves nothing of {pictures.name}/{name} ({height}x{width})")
    return _evaluate(upscaler, pictures, crop_border)


def _evaluate(upscaler: Upscaler, pictures: PictureSet, crop_border: int) -> Iterator[PictureScore]:
    for i, name in enumerate(pictures.names):
        lq, gt = pictures.pair(i)
        yield PictureScore(
            name,
            model=score(upscaler(lq), gt, crop_border),
            bicubic=score(bicubic(lq, upscaler.scale), gt, crop_border),
        )


def mean(scores: list[Score]) -> Score:
    """The mean of per-picture values, as papers report it; an infinite PSNR (a picture equal to its GT) is left out."""
    finite = [s.psnr for s in scores if math.isfinite(s.psnr)]
    return Score(
        psnr=math.fsum(finite) / len(finite) if finite else math.inf,
        ssim=math.fsum(s.ssim for s in scores) / len(scores),
    )
