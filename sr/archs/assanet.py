"""ASSANet: adaptive sparse self-attention over channels, with dynamic convolutions.

Paper: "Adaptive Sparse Self-Attention for Efficient Image Super-resolution and Beyond", J. Pan, L. Sun, T. Song,
J. Dong, J. Yang, J. Zhao, J. Tang; IEEE TPAMI 2026.

Written from the paper's description; module names equal the published ones, so that the published weights load. The
function is the published one, computed with less memory traffic:

* the dynamic convolution is a quadratic form of each 3x3 patch, see :mod:`sr.archs.stencils`;
* the border of zeros that a 3x3 stencil needs is added before the (bias-free) 1x1 convolution in front of it, where the
  map is two to four times narrower;
* queries and keys are not normalised as maps: their norms divide the C x C matrix of their products;
* that matrix and the 1x1 convolution behind the attention are multiplied first, so that each tile's values are read once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.stencils import channel_norm, dynamic_conv, gated_conv, tracing
from sr.network import SRNetwork
from sr.registry import register_arch

_TILE = {
    2: 96,
    3: 72,
    4: 48,
}  # low-resolution pixels, of the small and the base net; the large one's are half as large again


class _Axis:
    """One axis of the picture, covered by tiles of equal size: even steps, and the last tile ends where the picture does."""

    def __init__(self, size: int, tile: int, device: torch.device) -> None:
        self.size = size
        self.edge = torch.sym_min(size, tile)
        steps = torch.sym_max((size + tile - 1) // tile - 1, 1)
        step = torch.sym_max((size - self.edge + steps - 1) // steps, 1)
        # Rounding the step up may reach the end with fewer tiles than planned, in pictures of more than `tile` tiles.
        self.count = (size - self.edge + step - 1) // step + 1
        self.traced = tracing()
        if not self.traced:
            self.starts = [*range(0, size - self.edge, step), size - self.edge]
            cover = torch.zeros(size, device=device)
            for start in self.starts:
                cover[start : start + self.edge] += 1
            self.weight = 1 / cover
            return
        # A graph that holds for any size cannot loop over tiles: it looks up indices instead. A pixel lies in `first` to
        # `last`; a third tile between them (edges of more than about tile^2 pixels) is left out of the mean.
        starts = (torch.arange(self.count, device=device) * step).clamp(max=size - self.edge)
        self.gather = (starts[:, None] + torch.arange(self.edge, device=device)).flatten()
        at = torch.arange(size, device=device)
        last = torch.where(at >= size - self.edge, self.count - 1, at // step)
        first = (torch.div(at - self.edge, step, rounding_mode="floor") + 1).clamp(min=0).minimum(last)
        self.first, self.last = (tile * self.edge + at - starts[tile] for tile in (first, last))

    def cut(self, x: Tensor, dim: int, to: int) -> Tensor:
        """Split axis ``dim`` (negative) into tiles; their number becomes a new axis at ``to``."""
        if self.traced:
            return x.index_select(dim, self.gather).unflatten(dim, (self.count, self.edge)).movedim(dim - 1, to)
        if self.count == 1:
            return x.unsqueeze(to)
        return torch.stack([x.narrow(dim, start, self.edge) for start in self.starts], to)

    def paste(self, tiles: Tensor, dim: int, to: int) -> Tensor:
        """Undo :meth:`cut`; pixels that lie in several tiles get the mean."""
        if self.traced:
            x = tiles.movedim(to, dim - 1).flatten(dim - 1, dim)
            return (x.index_select(dim, self.first) + x.index_select(dim, self.last)) / 2
        if self.count == 1:
            return tiles.squeeze(to)
        shape = list(tiles.select(to, 0).shape)
        shape[dim] = self.size
        x = tiles.new_zeros(shape)
        for i, start in enumerate(self.starts):
            x.narrow(dim, start, self.edge).add_(tiles.select(to, i))
        return x.mul_(self.weight.to(x.dtype).view(-1, *[1] * (-1 - dim)))


class _Tiles:
    """The picture as a grid of overlapping tiles (the paper's test-time local converter)."""

    def __init__(self, h: int, w: int, tile: int, device: torch.device) -> None:
        self.rows, self.columns = _Axis(h, tile, device), _Axis(w, tile, device)

    def cut(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, rows, columns, C, h, w)."""
        return self.columns.cut(self.rows.cut(x, -2, 1), -1, 2)

    def paste(self, tiles: Tensor) -> Tensor:
        """(N, rows, columns, C, h, w) -> (N, C, H, W)."""
        return self.rows.paste(self.columns.paste(tiles, -1, 2), -2, 1)


def _pointwise(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """1x1 convolution without bias, as a matrix product: a CPU's convolution would reorder the map before and after."""
    return torch.matmul(conv.weight.flatten(1), x.flatten(2)).unflatten(2, x.shape[2:])


def _bordered(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1))


class ChannelNorm(nn.Module):
    """Layer normalisation over channels of (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return channel_norm(x, self.body.weight, self.body.bias, self.body.eps)


class DynamicConv(nn.Module):
    """Depth-wise 3x3 convolution whose taps a depth-wise 3x3 convolution predicts: (N, C, H+2, W+2) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Conv2d(dim, 9 * dim, 3, groups=dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return dynamic_conv(x, self.weight.weight)


class SparseAttention(nn.Module):
    """Attention over channels: ReLU instead of softmax selects, keys are the values."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1, 1, 1))
        self.project_in = nn.Conv2d(dim, 2 * dim, 1, bias=False)
        self.dynamic_conv = DynamicConv(2 * dim)
        self.project_out = nn.Conv2d(dim, dim, 1, bias=False)

    def forward(self, x: Tensor, tiles: _Tiles | None) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W); statistics of each tile, or of the whole picture."""
        q, v = self.dynamic_conv(_pointwise(_bordered(x), self.project_in)).chunk(2, 1)
        if tiles is None:
            return self._attend(q, v)
        return tiles.paste(self._attend(tiles.cut(q), tiles.cut(v)))

    def _attend(self, q: Tensor, v: Tensor) -> Tensor:
        """q, v (..., C, h, w): the result of attention, then of the output convolution, of the same shape."""
        edges = v.shape[-2:]
        q, v = q.flatten(-2), v.flatten(-2)
        wide = torch.promote_types(q.dtype, torch.float32)
        length_q, length_v = (
            torch.linalg.vector_norm(m, dim=-1, keepdim=True, dtype=wide).clamp_min(1e-12) for m in (q, v)
        )
        cosine = (q @ v.mT) / (length_q * length_v.mT)
        weights = F.relu(cosine * self.temperature).to(v.dtype)
        return ((self.project_out.weight.flatten(1) @ weights) @ v).unflatten(-1, edges)


class GatedFeedForward(nn.Module):
    """Gated depth-wise feed-forward network of Restormer."""

    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        hidden = dim * expansion
        self.project_in = nn.Conv2d(dim, 2 * hidden, 1, bias=False)
        self.dwconv = nn.Conv2d(2 * hidden, 2 * hidden, 3, groups=2 * hidden, bias=False)
        self.project_out = nn.Conv2d(hidden, dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _pointwise(gated_conv(_pointwise(_bordered(x), self.project_in), self.dwconv.weight), self.project_out)


class Block(nn.Module):
    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(dim)
        self.attn = SparseAttention(dim)
        self.norm2 = ChannelNorm(dim)
        self.ffn = GatedFeedForward(dim, expansion)

    def forward(self, x: Tensor, tiles: _Tiles | None) -> Tensor:
        x = x + self.attn(self.norm1(x), tiles)
        return x + self.ffn(self.norm2(x))


class Group(nn.Module):
    def __init__(self, dim: int, blocks: int, expansion: int) -> None:
        super().__init__()
        self.body = nn.ModuleList([*(Block(dim, expansion) for _ in range(blocks)), nn.Conv2d(dim, dim, 3, padding=1)])

    def forward(self, x: Tensor, tiles: _Tiles | None) -> Tensor:
        *blocks, conv = self.body
        y = x
        for block in blocks:
            y = block(y, tiles)
        return x + conv(y)


class Embedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


@register_arch
class ASSANet(SRNetwork):
    """ASSANet; see the module's docstring.

    Args:
        scale: output edge / input edge.
        dim: channels.
        groups: number of groups.
        blocks: blocks in each group.
        expansion: hidden channels of the feed-forward network / ``dim``.
        tile: edge, in input pixels, of the overlapping tiles in which attention is computed in evaluation mode;
            ``None`` computes it over the whole picture, as in training mode. The attribute of the same name may be
            changed at any time: ``net.tile = None`` switches tiling off.
    """

    mean: Tensor

    def __init__(
        self,
        *,
        scale: int = 4,
        dim: int = 32,
        groups: int = 6,
        blocks: int = 4,
        expansion: int = 2,
        tile: int | None = None,
    ) -> None:
        super().__init__(scale=scale)
        self.tile = tile
        self.overlap_embed = nn.Sequential(Embedding(dim))
        self.deep_feature_extraction = nn.ModuleList(
            [*(Group(dim, blocks, expansion) for _ in range(groups)), nn.Conv2d(dim, dim, 3, padding=1)]
        )
        self.upsample = nn.Sequential(nn.Conv2d(dim, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))
        self.register_buffer("mean", torch.tensor([0.4488, 0.4371, 0.4040]).view(1, 3, 1, 1), persistent=False)

    def upscale(self, lq: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, scale*H, scale*W), any H, W >= 1."""
        x = shallow = self.overlap_embed(lq - self.mean)
        whole = self.training or self.tile is None
        tiles = None if whole else _Tiles(*lq.shape[-2:], self.tile, lq.device)
        *groups, conv = self.deep_feature_extraction
        for group in groups:
            x = group(x, tiles)
        return self.upsample(conv(x) + shallow) + self.mean

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Arguments of a published file; the size of the tiles, which no shape tells, is the one of the paper's variant."""
        embed, last = state_dict.get("overlap_embed.0.proj.weight"), state_dict.get("upsample.0.weight")
        blocks = re.compile(
            r"deep_feature_extraction\.(\d+)\.body\.(\d+)\.attn\.dynamic_conv\.weight\.weight"
        ).fullmatch
        found = [(int(m[1]), int(m[2])) for m in map(blocks, state_dict) if m]
        if embed is None or last is None or not found:
            return None
        dim, scale = embed.shape[0], math.isqrt(last.shape[0] // 3)
        hidden = state_dict["deep_feature_extraction.0.body.0.ffn.project_out.weight"].shape[1]
        count, depth = (max(index) + 1 for index in zip(*found, strict=True))
        tile = _published_tile(scale, large=dim == 160)
        return {"scale": scale, "dim": dim, "groups": count, "blocks": depth, "expansion": hidden // dim, "tile": tile}


def _published_tile(scale: int, large: bool = False) -> int:
    tile = _TILE.get(scale, 192 // scale)
    return tile * 3 // 2 if large else tile


@register_arch
def assanet_s(*, scale: int = 4, **kwargs: Any) -> ASSANet:
    """ASSANet-S: 32 channels, 6 groups of 4 blocks."""
    return ASSANet(**{"scale": scale, "dim": 32, "groups": 6, "blocks": 4, "tile": _published_tile(scale), **kwargs})


@register_arch
def assanet_b(*, scale: int = 4, **kwargs: Any) -> ASSANet:
    """ASSANet-B: 90 channels, 8 groups of 4 blocks."""
    return ASSANet(**{"scale": scale, "dim": 90, "groups": 8, "blocks": 4, "tile": _published_tile(scale), **kwargs})


@register_arch
def assanet_l(*, scale: int = 4, **kwargs: Any) -> ASSANet:
    """ASSANet-L: 160 channels, 8 groups of 8 blocks, larger tiles."""
    tile = _published_tile(scale, large=True)
    return ASSANet(**{"scale": scale, "dim": 160, "groups": 8, "blocks": 8, "tile": tile, **kwargs})
