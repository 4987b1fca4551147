"""SMFANet and SMFANet+: self-modulation feature aggregation, local detail beside pooled statistics.

Paper: "SMFANet: A Lightweight Self-Modulation Feature Aggregation Network for Efficient Image Super-Resolution",
M. Zheng, L. Sun, J. Dong, J. Pan; ECCV 2024. Authors' code and weights: Apache-2.0.

Written from the paper's description; module names equal the published ones, so that the published weights load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.common import last_number
from sr.archs.stencils import tracing
from sr.network import SRNetwork
from sr.registry import register_arch

_CELL = 8  # edge, in pixels, of the cells whose maxima stand for the picture's coarse structure


def _count(size: int) -> int:
    return cast(int, torch.sym_max(size // _CELL, 1))


class _Cells:
    """The picture as H/8 x W/8 equal, if need be overlapping cells."""

    def __init__(self, h: int, w: int) -> None:
        self.size, self.counts = (h, w), (_count(h), _count(w))

    def largest(self, x: Tensor) -> Tensor:
        """Maximum of each cell: (N, C, H, W) -> (N, C, rows, columns)."""
        return F.adaptive_max_pool2d(x, self.counts)

    def spread(self, x: Tensor) -> Tensor:
        """(N, C, rows, columns) -> (N, C, H, W)."""
        return F.interpolate(x, size=self.size, mode="nearest")


class _TracedCells(_Cells):
    """The same by tables, for a graph that holds for any size: no exporter has adaptive pooling to unknown sizes.

    An export takes an edge that is not 1 in its example for one that never is. So there is a row and a column of cells
    more, at zero, like the border beyond, and :meth:`spread` leaves them out.
    """

    def largest(self, x: Tensor) -> Tensor:
        (rows, inside_rows), (columns, inside_columns) = (
            self._pixels(*axis, x.device) for axis in zip(self.size, self.counts, strict=True)
        )
        inside = (inside_rows & inside_columns.T).to(x.dtype)
        return x[..., columns].amax(-1)[..., rows, :].amax(-2) * inside

    def spread(self, x: Tensor) -> Tensor:
        rows, columns = (
            torch.arange(size, device=x.device) * count // size
            for size, count in zip(self.size, self.counts, strict=True)
        )
        return x[..., rows, :][..., columns]

    @staticmethod
    def _pixels(size: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Pixels of each cell, the last one repeated: no cell has more than 15. And which cells exist (a column)."""
        cell = torch.arange(count + 1, device=device)[:, None]
        first, end = cell * size // count, ((cell + 1) * size + count - 1) // count
        taps = torch.arange(2 * _CELL - 1, device=device)
        return (first + taps).minimum(end - 1).clamp(max=size - 1), cell < count


def _variance(x: Tensor) -> Tensor:
    """Unbiased variance of each map, (N, C, 1, 1); zero for a map of one pixel."""
    centred = x - x.mean((2, 3), keepdim=True)
    freedom = cast(int, torch.sym_max(x.shape[-2] * x.shape[-1] - 1, 1))
    return centred.square().sum((2, 3), keepdim=True) / freedom


class LocalDetail(nn.Module):
    """Depth-wise 3x3 and two 1x1 convolutions: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv_0 = nn.Sequential(
            nn.Conv2d(dim, 2 * dim, 3, padding=1, groups=dim),
            nn.Conv2d(2 * dim, 2 * dim, 1),
        )
        self.conv_1 = nn.Conv2d(2 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_1(F.gelu(self.conv_0(x)))


class SelfModulation(nn.Module):
    """SMFA: one half of the projected channels is gated by its own coarse structure, the other adds local detail."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear_0 = nn.Conv2d(dim, 2 * dim, 1)
        self.linear_1 = nn.Conv2d(dim, dim, 1)
        self.linear_2 = nn.Conv2d(dim, dim, 1)
        self.lde = LocalDetail(dim)
        self.dw_conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.alpha = nn.Parameter(torch.ones(1, dim, 1, 1))
        self.belt = nn.Parameter(torch.zeros(1, dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        y, x = self.linear_0(x).chunk(2, 1)
        cells = (_TracedCells if tracing() else _Cells)(*x.shape[-2:])
        coarse = self.dw_conv(cells.largest(x)) * self.alpha + _variance(x) * self.belt
        gate = cells.spread(F.gelu(self.linear_1(coarse)))
        return self.linear_2(x * gate + self.lde(y))


class PartialFeedForward(nn.Module):
    """PCFN: a feed-forward network in which a quarter of the hidden channels see their neighbours."""

    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        hidden = dim * expansion
        self.split = [hidden // 4, hidden - hidden // 4]
        self.conv_0 = nn.Conv2d(dim, hidden, 1)
        self.conv_1 = nn.Conv2d(self.split[0], self.split[0], 3, padding=1)
        self.conv_2 = nn.Conv2d(hidden, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        near, rest = F.gelu(self.conv_0(x)).split(self.split, 1)
        return self.conv_2(torch.cat((F.gelu(self.conv_1(near)), rest), 1))


class Block(nn.Module):
    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        self.smfa = SelfModulation(dim)
        self.pcfn = PartialFeedForward(dim, expansion)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.smfa(F.normalize(x))
        return x + self.pcfn(F.normalize(x))


@register_arch
class SMFANet(SRNetwork):
    """SMFANet; see the module's docstring.

    Args:
        scale: output edge / input edge.
        dim: channels.
        blocks: number of blocks.
        expansion: hidden channels of the feed-forward network / ``dim``.
    """

    def __init__(self, *, scale: int = 4, dim: int = 36, blocks: int = 8, expansion: int = 2) -> None:
        super().__init__(scale=scale)
        self.to_feat = nn.Conv2d(3, dim, 3, padding=1)
        self.feats = nn.Sequential(*(Block(dim, expansion) for _ in range(blocks)))
        self.to_img = nn.Sequential(nn.Conv2d(dim, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def upscale(self, lq: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, scale*H, scale*W), any H, W >= 1."""
        x = self.to_feat(lq)
        return self.to_img(self.feats(x) + x)

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        last, hidden = state_dict.get("to_img.0.weight"), state_dict.get("feats.0.pcfn.conv_0.weight")
        if last is None or hidden is None or "feats.0.smfa.belt" not in state_dict:
            return None
        return {
            "scale": math.isqrt(last.shape[0] // 3),
            "dim": last.shape[1],
            "blocks": last_number(state_dict, r"feats\.(\d+)\.smfa\.belt") + 1,
            "expansion": hidden.shape[0] // hidden.shape[1],
        }


@register_arch
def smfanet(*, scale: int = 4, **kwargs: Any) -> SMFANet:
    """SMFANet: 36 channels, 8 blocks."""
    return SMFANet(**{"scale": scale, "dim": 36, "blocks": 8, **kwargs})


@register_arch
def smfanet_plus(*, scale: int = 4, **kwargs: Any) -> SMFANet:
    """SMFANet+: 48 channels, 12 blocks."""
    return SMFANet(**{"scale": scale, "dim": 48, "blocks": 12, **kwargs})
