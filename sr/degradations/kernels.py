"""Blur kernels, a batch at a time; each sums to 1 and looks the same when turned by 180 degrees."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _grid(edge: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Vertical and horizontal distance from the centre of an edge x edge kernel, which broadcast to it."""
    t = torch.arange(edge, dtype=torch.float32, device=like.device) - edge // 2
    return t[:, None], t[None, :]


def _cut(kernel: Tensor, size: Tensor) -> Tensor:
    """Zero outside the middle size x size pixels, and scaled to sum to 1."""
    y, x = _grid(kernel.shape[-1], kernel)
    inside = torch.maximum(y.abs(), x.abs()) <= (size[:, None, None] - 1) / 2
    kernel = kernel * inside
    return kernel / kernel.sum((1, 2), keepdim=True)


def gaussian_kernels(
    size: Tensor, sigma_x: Tensor, sigma_y: Tensor, angle: Tensor, beta: Tensor, plateau: Tensor, edge: int
) -> Tensor:
    """Gaussian, generalised Gaussian and plateau-shaped kernels (Wang et al., "Real-ESRGAN", 2021, section 3.1).

    With the covariance C and the squared distance q = t^T C^-1 t, a kernel is proportional to exp(-q^beta / 2)
    (beta = 1: the Gaussian, whose covariance is C) or, plateau-shaped, to 1 / (1 + q^beta).

    Args:
        size: (N,) odd edge of each kernel, outside of which it is 0; at most ``edge``.
        sigma_x: (N,) standard deviation in pixels along the axis that ``angle`` turns, positive.
        sigma_y: (N,) across it.
        angle: (N,) radians from the x axis (right) towards the y axis (down).
        beta: (N,) shape, positive.
        plateau: (N,) bool, which of the two.
        edge: odd edge of the result.

    Returns:
        (N, edge, edge).
    """
    y, x = _grid(edge, size)
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    along = (cos * x + sin * y) / sigma_x[:, None, None]
    across = (cos * y - sin * x) / sigma_y[:, None, None]
    q = (along.square() + across.square()) ** beta[:, None, None]
    return _cut(torch.where(plateau[:, None, None], 1 / (1 + q), torch.exp(-q / 2)), size)


def sinc_kernels(size: Tensor, cutoff: Tensor, edge: int) -> Tensor:
    """Ideal low-pass filters of all directions, w J1(w r) / (2 pi r), which ring (section 3.4 of the same paper).

    Args:
        size: (N,) odd edge of each kernel; at most ``edge``.
        cutoff: (N,) highest frequency that passes, w / pi: 1 is the picture's own limit.
        edge: odd edge of the result.

    Returns:
        (N, edge, edge).
    """
    y, x = _grid(edge, size)
    r = (y.square() + x.square()).sqrt()
    w = math.pi * cutoff[:, None, None]
    kernel = w * torch.special.bessel_j1(w * r) / (2 * math.pi * r.clamp(min=1))
    return _cut(torch.where(r == 0, w.square() / (4 * math.pi), kernel), size)
