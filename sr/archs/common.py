"""Blocks that several published families share, and how their files are recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.stencils import tracing


def last_number(keys: Iterable[str], pattern: str) -> int:
    """The largest number that ``pattern``'s only group has in the keys that it matches as a whole; -1 if none."""
    return max((int(m[1]) for m in map(re.compile(pattern).fullmatch, keys) if m), default=-1)


class ContrastAttention(nn.Module):
    """CCA of IMDN: each map is scaled by what two layers make of its mean plus its standard deviation."""

    def __init__(self, dim: int, reduction: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(dim, dim // reduction, 1), nn.Conv2d(dim // reduction, dim, 1)
        # So few units are easily all dead at the start, and then never learn.
        nn.init.constant_(first.get_parameter("bias"), 0.5)
        self.conv_du = nn.Sequential(first, nn.ReLU(), second, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        mean = x.mean((2, 3), keepdim=True)
        variance = (x - mean).square().mean((2, 3), keepdim=True)
        # A flat map's standard deviation has no finite gradient; below 1e-12 the variance is rounding anyway.
        return x * self.conv_du(mean + variance.clamp_min(1e-12).sqrt())


class SpatialAttention(nn.Module):
    """ESA of RFANet, as RLFN trimmed it: each pixel is scaled by what a coarse, wide-looking branch makes of it.

    Needs at least :attr:`MIN_SIZE` pixels on both axes. The coarse grid is stretched to the picture's edges, so the
    picture's size moves it under every pixel, and a network with this attention has no receptive field to give: with
    tiles a value changes by some grey levels whatever their margin.
    """

    MIN_SIZE = 15  # halved by a 3x3 convolution without padding, 7 pixels remain, which is what is pooled

    def __init__(self, dim: int, hidden: int, conv: Callable[..., nn.Module] = nn.Conv2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, hidden, 1)
        self.conv_f = nn.Conv2d(hidden, hidden, 1)
        self.conv2 = conv(hidden, hidden, 3, stride=2)
        self.conv3 = conv(hidden, hidden, 3, padding=1)
        self.conv4 = nn.Conv2d(hidden, dim, 1)

    def coarse(self, x: Tensor, bordered: Callable[[Tensor], Tensor]) -> Tensor:
        """What becomes of the pooled maps; the input of every 3x3 convolution goes through ``bordered``."""
        return self.conv3(bordered(x))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        narrow = self.conv1(x)
        halved = self.conv2(narrow)
        if tracing():
            wide = self._wide_of_any_size(halved, *x.shape[-2:])
        else:
            coarse = self.coarse(F.max_pool2d(halved, 7, stride=3), lambda pooled: pooled)
            wide = F.interpolate(coarse, size=x.shape[-2:], mode="bilinear")
        return x * torch.sigmoid(self.conv4(wide + self.conv_f(narrow)))

    def _wide_of_any_size(self, halved: Tensor, height: int, width: int) -> Tensor:
        """The same for a graph that holds for any size.

        An export takes an edge that is not 1 in its example for one that never is, and the pooled maps of small
        pictures have one row. So they get a row and a column more, which are kept at zero, like the border beyond.
        """
        pooled = F.max_pool2d(F.pad(halved, (0, 3, 0, 3)), 7, stride=3)
        rows, columns = (torch.arange(edge, device=pooled.device) < edge - 1 for edge in pooled.shape[-2:])
        inside = (rows[:, None] & columns).to(pooled.dtype)
        coarse = self.coarse(pooled, lambda x: x * inside)
        low, high, part = _between(coarse.shape[-2] - 1, height, coarse)
        coarse = torch.lerp(coarse[..., low, :], coarse[..., high, :], part[:, None])
        low, high, part = _between(coarse.shape[-1] - 1, width, coarse)
        return torch.lerp(coarse[..., low], coarse[..., high], part)


def _between(edge: int, size: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bilinear enlargement of an axis: both neighbours of each of ``size`` places, and how far it is to the second."""
    at = ((torch.arange(size, device=like.device) + 0.5) * (edge / size) - 0.5).clamp(min=0)
    low = at.floor().long()
    return low, (low + 1).clamp(max=edge - 1), (at - low).to(like.dtype)
