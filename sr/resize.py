"""MATLAB's ``imresize``: bicubic (a = -0.5), antialiased when it shrinks, symmetric border.

The LR pictures of every super-resolution benchmark are made with it. PIL, OpenCV and ``F.interpolate`` differ from it:
all of them at the border, and those without antialiasing by up to 7 dB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sr.errors import SRError
from sr.rows import RowWindow

# Two ways, because two things count. Milliseconds on two cores (AMD EPYC) for a picture of 3 x 1356 x 2040 halved / a
# batch of 16 x 3 x 256 x 256 quartered:
#   uint8    taps summed in cache-sized pieces 16 / 5;  taps summed over the whole picture 450 / -
#   float64  banded matrices 40 / 6 (with backward 143 / 14);  whole matrices 199 / 13;  taps summed 232 / 15
_PIECE = 262_144  # values of one accumulator of the uint8 path: 2 MiB; with 256 KiB it takes twice as long
_BAND = 128  # output rows of one matrix; more and narrower ones cost the backward pass a full-size buffer each


def imresize(x: Tensor, scale: float | None = None, *, size: tuple[int, int] | None = None) -> Tensor:
    """Resize like MATLAB's ``imresize(x, scale)`` or ``imresize(x, size)`` with the default (bicubic) method.

    Cubic convolution after R. G. Keys, "Cubic convolution interpolation for digital image processing", 1981, with
    a = -0.5; where an axis shrinks, the kernel is stretched by 1/scale. The picture is mirrored at its border, edge
    pixel included, as often as the kernel asks for. The axis with the smaller scale is resized first, rows (height)
    where both are equal.

    Args:
        x: (..., H, W), uint8 or float, any device. Float values may have any range and are not clamped.
        scale: output edge / input edge, any positive number. The output measures ``ceil(scale * H)`` by
            ``ceil(scale * W)``, the product in double precision as in MATLAB.
        size: (height, width) of the output, in place of ``scale``; the axes then have a scale each.

    Returns:
        (..., height, width) of the dtype and on the device of ``x``. A float result is differentiable with respect to
        ``x``. A uint8 result is rounded half up and clamped after each of the two passes, as MATLAB does.

    Raises:
        SRError: ``x`` is neither uint8 nor float or holds no pixel; not exactly one of ``scale`` and ``size`` is given;
            ``scale`` is not a positive number, or ``size`` not two positive whole numbers.
    """
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise SRError(f"imresize takes uint8 or float tensors, not {x.dtype}")
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise SRError(f"imresize takes pictures of shape (..., H, W) with at least one pixel, not {tuple(x.shape)}")
    exact = x.dtype == torch.uint8
    if exact and x.device.type == "mps":  # has no float64
        return imresize(x.cpu(), scale, size=size).to(x.device)
    axes = [(axis, *plan) for axis, plan in zip((-2, -1), _plan(x.shape[-2:], scale, size), strict=True)]
    resize_axis = _resize_axis_uint8 if exact else _resize_axis_float
    y = x if exact else x.to(_precise(x.device))
    for axis, length, factor in sorted(axes, key=lambda a: a[2]):  # stable: rows first where the scales are equal
        if factor != 1:
            y = resize_axis(y, axis, length, factor)
    y = y.to(x.dtype).contiguous()
    return y.clone() if y is x else y  # never the caller's own memory


def imresize_rows(parts: Iterator[Tensor], shape: tuple[int, int], size: tuple[int, int]) -> Iterator[Tensor]:
    """:func:`imresize` to ``size`` for a float picture that comes and goes in rows; columns are resized first.

    Args:
        parts: the picture's rows in order, in parts (..., h, W) of any height.
        shape: (height, width) of the picture.
        size: (height, width) of the result.

    Yields:
        Its rows in order, at most 128 at a time (as they come, where the height stays), of the dtype of ``parts``.
    """
    (height, row_scale), (width, column_scale) = _plan(torch.Size(shape), None, size)

    def precise() -> Iterator[Tensor]:
        for part in parts:
            part = part.to(_precise(part.device))
            yield part if column_scale == 1 else _resize_axis_float(part, -1, width, column_scale)

    first = next(parts)
    dtype, device = first.dtype, first.device
    parts = itertools.chain([first], parts)
    if row_scale == 1:
        for part in precise():
            yield part.to(dtype)
        return
    window = RowWindow(precise())
    for start, matrix in _bands(shape[0], height, row_scale, _precise(device), device):
        yield (matrix @ window.get(start, start + matrix.shape[1])).to(dtype)


def imresize_wrapped(x: Tensor, size: tuple[int, int]) -> Tensor:
    """:func:`imresize` to ``size`` (height, width) for a texture (..., H, W) whose opposite edges meet."""
    for axis, length in zip((-2, -1), size, strict=True):
        if x.shape[axis] != length:
            shape = list(x.shape[-2:])
            shape[axis] = 3 * length  # three side by side keep the phase, and have no border in the middle
            x = imresize(torch.cat((x, x, x), axis), size=(shape[0], shape[1])).narrow(axis, length, length)
    return x


def _precise(device: torch.device) -> torch.dtype:
    """float64 on purpose, also for float32: autocast and TF32 leave float64 products alone, and would otherwise
    silently cut the picture to 8 or 11 bits. MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _plan(shape: torch.Size, scale: float | None, size: tuple[int, int] | None) -> list[tuple[int, float]]:
    """(output length, scale) of height and width."""
    if (scale is None) == (size is None):
        raise SRError("imresize takes either scale or size")
    if scale is not None:
        if not (math.isfinite(scale) and scale > 0):
            raise SRError(f"scale must be a positive number, not {scale!r}")
        return [(math.ceil(scale * n), float(scale)) for n in shape]
    assert size is not None
    if len(size) != 2 or any(n != int(n) or n < 1 for n in size):
        raise SRError(f"size must be (height, width), two whole numbers of at least 1, not {size!r}")
    return [(int(new), int(new) / n) for new, n in zip(size, shape, strict=True)]


def _resize_axis_uint8(x: Tensor, axis: int, length: int, scale: float) -> Tensor:
    """One pass over a uint8 picture, to the last bit.

    A weighted sum often ends exactly on .5 (every 64th pixel at 1/2, every 162nd at 1/3), where its rounding error
    decides. So the taps are added one by one from left to right in float64, MATLAB's order, and never by a matrix
    product, whose order is the library's secret.
    """
    weights, index = _taps(x.shape[axis], length, scale)
    index, weights = index.to(x.device), weights.to(x.device).unsqueeze(-1)
    source = x.movedim(axis, 0)
    shape = source.shape[1:]
    source = source.flatten(1).contiguous()  # whole rows are gathered, so the axis goes first
    columns = source.shape[1]
    # On a GPU the launches cost more than the memory traffic.
    piece = _PIECE if x.device.type == "cpu" else max(1, length * columns)
    rows = max(1, piece // max(1, columns))
    result = torch.empty(length, columns, dtype=torch.uint8, device=x.device)
    for left in range(0, columns, piece):
        part = source[:, left : left + piece]
        for top in range(0, length, rows):
            here = slice(top, top + rows)
            total = part.index_select(0, index[0, here]).double().mul_(weights[0, here])
            for i, w in zip(index[1:, here], weights[1:, here], strict=True):
                total.add_(part.index_select(0, i).double().mul_(w))
            result[here, left : left + piece] = total.add_(0.5).floor_().clamp_(0, 255)
    return result.unflatten(1, shape).movedim(0, axis)


def _resize_axis_float(x: Tensor, axis: int, length: int, scale: float) -> Tensor:
    """One pass as a product with the (length, input length) matrix, which is cut into bands that skip its zeros."""
    parts = []
    for start, matrix in _bands(x.shape[axis], length, scale, x.dtype, x.device):
        part = x.narrow(axis, start, matrix.shape[1])
        parts.append(matrix @ part if axis == -2 else part @ matrix.T)
    return torch.cat(parts, axis)


@lru_cache(maxsize=64)
def _bands(n: int, length: int, scale: float, dtype: torch.dtype, device: torch.device) -> list[tuple[int, Tensor]]:
    """The resampling matrix of an axis as (first input row, (rows, input rows) matrix) for each band of output rows."""
    weights, index = _taps(n, length, scale)
    bands = []
    # A tensor made in inference mode could not serve a later training step out of the cache.
    with torch.inference_mode(False):
        for top in range(0, length, _BAND):
            w, i = weights[:, top : top + _BAND].T, index[:, top : top + _BAND].T
            start, end = int(i.min()), int(i.max()) + 1
            matrix = torch.zeros(len(w), end - start, dtype=w.dtype, device="cpu")
            matrix.scatter_add_(1, i - start, w)  # adds, since mirrored taps meet on one pixel
            bands.append((start, matrix.to(device, dtype)))
    return bands


@lru_cache(maxsize=64)
def _taps(n: int, length: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights and input positions, both (taps, length), of each output pixel: ``contributions`` of MATLAB's imresize.

    Written in the order of MATLAB's operations, so that the weights agree to the last bit.
    """
    shrink = min(scale, 1.0)  # antialiasing stretches the kernel where the axis shrinks
    width = 4 / shrink
    centre = np.arange(1, length + 1) / scale + 0.5 * (1 - 1 / scale)  # counted from 1, as MATLAB does
    taps = math.ceil(width) + 2
    position = np.floor(centre - width / 2)[:, None] + np.arange(taps)
    weights = shrink * _cubic(shrink * (centre[:, None] - position))
    weights /= weights.sum(1, keepdims=True)
    mirrored = np.concatenate([np.arange(n), np.arange(n)[::-1]])
    index = mirrored[np.mod(position.astype(np.int64) - 1, 2 * n)]
    used = (weights != 0).any(0)
    with torch.inference_mode(False):
        return (
            torch.from_numpy(np.ascontiguousarray(weights[:, used].T)),
            torch.from_numpy(np.ascontiguousarray(index[:, used].T)),
        )


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel, a = -0.5."""
    x = np.abs(x)
    x2, x3 = x**2, x**3
    near = (1.5 * x3 - 2.5 * x2 + 1) * (x <= 1)
    return near + (-0.5 * x3 + 2.5 * x2 - 4 * x + 2) * ((x > 1) & (x <= 2))
