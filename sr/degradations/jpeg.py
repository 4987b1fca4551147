"""JPEG compression as libjpeg does it, on a batch.

8-bit pixels, full-range YCbCr (JFIF), chroma at half size (4:2:0), 8 x 8 DCT, the standard's tables (ITU-T T.81, Annex
K) scaled by libjpeg's quality, and libjpeg's smooth upsampling of chroma. What the entropy coder does is lossless and
left out. ``kornia.enhance.jpeg_codec_differentiable`` is further from libjpeg and slower: README.md has the figures.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.degradations.base import Draws, Step, check_range
from sr.degradations.pieces import by_pieces
from sr.errors import SRError

# fmt: off
_LUMA = (
    16, 11, 10, 16,  24,  40,  51,  61,
    12, 12, 14, 19,  26,  58,  60,  55,
    14, 13, 16, 24,  40,  57,  69,  56,
    14, 17, 22, 29,  51,  87,  80,  62,
    18, 22, 37, 56,  68, 109, 103,  77,
    24, 35, 55, 64,  81, 104, 113,  92,
    49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103,  99,
)
_CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99,
    18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99,
) + (99,) * 32
# fmt: on
_Y = (0.299, 0.587, 0.114)
_CB, _CR = 2 - 2 * _Y[2], 2 - 2 * _Y[0]  # B - Y and R - Y divided by these are Cb and Cr
_RGB_TO_YCC = (
    _Y,
    tuple(((i == 2) - w) / _CB for i, w in enumerate(_Y)),
    tuple(((i == 0) - w) / _CR for i, w in enumerate(_Y)),
)
_YCC_TO_RGB = ((1.0, 0.0, _CR), (1.0, -_Y[2] * _CB / _Y[1], -_Y[0] * _CR / _Y[1]), (1.0, _CB, 0.0))


class JPEG(Step):
    """JPEG compression with a quality that is drawn for each picture.

    Args:
        quality_range: smallest and largest quality, whole numbers from 1 to 100, both included.

    Raises:
        SRError: a wrong range.
    """

    def __init__(self, quality_range: tuple[int, int]) -> None:
        low, high = check_range("JPEG's quality_range", quality_range, 1, 100)
        self.quality_range = (int(low), int(high))

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        return jpeg(x, draws.integers(len(x), *self.quality_range))


def jpeg(x: Tensor, quality: Tensor) -> Tensor:
    """Compress and decode.

    Args:
        x: (N, 3, H, W), RGB, float32; clamped to [0, 1] and rounded to 8 bits, as a file is.
        quality: (N,) from 1 to 100, libjpeg's.

    Returns:
        (N, 3, H, W), multiples of 1/255 in [0, 1].

    Raises:
        SRError: ``quality`` is not one number for each picture.
    """
    if quality.shape != x.shape[:1]:
        raise SRError(f"jpeg takes one quality for each of {len(x)} pictures, not {tuple(quality.shape)}")
    return by_pieces(_jpeg, x, quality)


def _jpeg(x: Tensor, quality: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    rgb = (x * 255).round_().clamp_(0, 255)
    if height % 16 or width % 16:
        rgb = F.pad(rgb, (0, -width % 16, 0, -height % 16), mode="replicate")
    ycc_of_rgb, rgb_of_ycc, dct, base = _constants(x.device)
    # A file's planes are 8 bits deep, on the way in and out: many coefficients lie between two steps, so it shows.
    ycc = torch.matmul(ycc_of_rgb, rgb.flatten(2)).round_().view(rgb.shape)
    percent = torch.where(quality < 50, (5000 / quality).floor(), 200 - 2 * quality)
    tables = (base * percent[:, None, None] + 50).div_(100).floor_().clamp_(1, 255)
    pairs = ycc[:, 1:, ::2] + ycc[:, 1:, 1::2]  # avg_pool2d and interpolate are several times slower on a CPU
    half = (pairs[..., ::2] + pairs[..., 1::2]).div_(4).round_()
    luma, chroma = _code(ycc[:, :1] - 128, tables[:, :1], dct), _code(half, tables[:, 1:], dct)
    ycc = torch.cat((luma.add_(128), _double(_double(chroma, 3), 2)), 1)
    rgb = torch.matmul(rgb_of_ycc, ycc.flatten(2)).view(rgb.shape)
    return rgb.round_().clamp_(0, 255).div_(255)[..., :height, :width]


def _double(x: Tensor, axis: int) -> Tensor:
    """Twice as long: each new pixel is 3/4 of the nearest and 1/4 of the next nearest, as libjpeg enlarges chroma."""
    first, last = x.narrow(axis, 0, 1), x.narrow(axis, -1, 1)
    before = torch.cat((first, x.narrow(axis, 0, x.shape[axis] - 1)), axis)
    after = torch.cat((x.narrow(axis, 1, x.shape[axis] - 1), last), axis)
    return torch.stack((x.lerp(before, 0.25), x.lerp(after, 0.25)), axis + 1).flatten(axis, axis + 1)


def _code(plane: Tensor, table: Tensor, dct: Tensor) -> Tensor:
    """(N, C, H, W), centred on 0, to quantised DCT coefficients and back, with a table (N, 1, 64) of steps."""
    n, c, h, w = plane.shape
    blocks = plane.reshape(n, c, h // 8, 8, w // 8, 8).transpose(3, 4).reshape(n, -1, 64)
    blocks = (blocks @ dct.T).div_(table).round_().mul_(table) @ dct
    return blocks.view(n, c, h // 8, w // 8, 8, 8).transpose(3, 4).reshape(plane.shape).round_().clamp_(-128, 127)


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RGB to YCbCr (3, 3) and back (3, 3), without offsets; the 8 x 8 DCT as (64, 64); both tables (2, 64)."""
    with torch.inference_mode(False):  # what inference mode makes could not serve a later training step
        f = torch.arange(8, dtype=torch.float64, device="cpu")
        d = torch.cos(f[:, None] * (2 * f + 1) * (math.pi / 16)) / 2
        d[0] /= math.sqrt(2)
        values = (_RGB_TO_YCC, _YCC_TO_RGB, torch.kron(d, d).tolist(), (_LUMA, _CHROMA))
        ycc_of_rgb, rgb_of_ycc, dct, tables = (torch.tensor(v, dtype=torch.float32, device=device) for v in values)
        return ycc_of_rgb, rgb_of_ycc, dct, tables
