"""ASSANet: adaptive sparse self-attention over channels, with dynamic convolutions.

Paper: "Adaptive Sparse Self-Attention for Efficient Image Super-resolution and Beyond", J. Pan, L. Sun, T. Song,
J. Dong, J. Yang, J. Zhao, J. Tang; IEEE TPAMI 2026.

Written from the paper's description; module names equal the published ones, so that the published weights load. The
function is the published one, computed with less memory traffic:

* the dynamic convolution is a quadratic form of each 3x3 patch, see :mod:`sr.archs.stencils`;
* the border of zeros that a 3x3 stencil needs is added before the (bias-free) 1x1 convolution in front of it, where the
  map is two to four times narrower;
* queries and keys are not normalised as maps: their norms divide the C x C matrix of their products;
* that matrix and the 1x1 convolution behind the attention are multiplied first, so that a tile's values are read once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.stencils import channel_norm, dynamic_conv, gated_conv, project, tracing
from sr.network import SRNetwork
from sr.registry import register_arch

# Edges by scale, in low-resolution pixels, of the small and the base net; the large one's are half as large again.
_TILE = {2: 96, 3: 72, 4: 48}


class _Axis:
    """One axis of the picture under tiles of equal size: even steps, and the last tile ends where the picture does."""

    def __init__(self, size: int, tile: int, device: torch.device) -> None:
        self.size = size
        self.edge = min(size, tile)
        step = max(-(-(size - self.edge) // max(-(-size // tile) - 1, 1)), 1)
        self.starts = [*range(0, size - self.edge, step), size - self.edge]
        cover = torch.zeros(size, device=device)
        for start in self.starts:
            cover[start : start + self.edge] += 1
        self.weight = 1 / cover

    def cut(self, x: Tensor, dim: int, to: int) -> Tensor:
        """Split axis ``dim`` (negative) into tiles; their number becomes a new axis at ``to``."""
        if len(self.starts) == 1:
            return x.unsqueeze(to)
        return torch.stack([x.narrow(dim, start, self.edge) for start in self.starts], to)

    def paste(self, tiles: Tensor, dim: int, to: int) -> Tensor:
        """Undo :meth:`cut`; pixels that lie in several tiles get the mean."""
        if len(self.starts) == 1:
            return tiles.squeeze(to)
        shape = list(tiles.select(to, 0).shape)
        shape[dim] = self.size
        x = tiles.new_zeros(shape)
        for i, start in enumerate(self.starts):
            x.narrow(dim, start, self.edge).add_(tiles.select(to, i))
        return x.mul_(self.weight.to(x.dtype).view(-1, *[1] * (-1 - dim)))


def _max(a: int, b: int) -> int:
    return cast(int, torch.sym_max(a, b))  # unlike max, makes no branch on a size that is a symbol


class _TracedAxis:
    """The same for a graph that holds for any size: no branch and no loop over tiles, which would tie it to one size.

    Tiles have the full edge also where the picture is smaller, filled up with zeros, which add nothing to a statistic.
    The last tile comes twice, so that there never is just one. A pixel lies in the tiles ``first`` to ``last``; a
    third between them, which only edges of more than about tile^2 pixels have, is left out of the mean.
    """

    def __init__(self, size: int, tile: int, device: torch.device) -> None:
        count = (size + tile - 1) // tile
        steps, rest = _max(count - 1, 1), _max(size - tile, 0)
        step = _max((rest + steps - 1) // steps, 1)
        starts = (torch.arange(count + 1, device=device) * step).clamp(max=rest)
        at = torch.arange(size, device=device)
        last = torch.where(at >= rest, count - 1, at // step)
        first = (torch.div(at - tile, step, rounding_mode="floor") + 1).clamp(min=0).minimum(last)
        self.overlap = [(index, at - starts[index]) for index in (first, last)]  # tile, and place in it, of each pixel
        pixels = starts[:, None] + torch.arange(tile, device=device)
        self.inside = pixels < size
        self.pixels = pixels.clamp(max=size - 1)

    # Indexing by a table, not index_select and a reshape: an export with bounded sizes cannot prove that these fit.

    def cut(self, x: Tensor, dim: int, to: int) -> Tensor:
        tiles = x.movedim(dim, -1)[..., self.pixels] * self.inside.to(x.dtype)
        return tiles.movedim((-2, -1), (to, dim))

    def paste(self, tiles: Tensor, dim: int, to: int) -> Tensor:
        table = tiles.movedim((to, dim), (-2, -1))
        first, last = (table[..., tile, place] for tile, place in self.overlap)
        return ((first + last) / 2).movedim(-1, dim)


class _Tiles:
    """The picture as a grid of overlapping tiles (the paper's test-time local converter)."""

    def __init__(self, h: int, w: int, tile: int, device: torch.device) -> None:
        axis = _TracedAxis if tracing() else _Axis
        self.rows, self.columns = axis(h, tile, device), axis(w, tile, device)

    def cut(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, rows, columns, C, h, w)."""
        return self.columns.cut(self.rows.cut(x, -2, 1), -1, 2)

    def paste(self, tiles: Tensor) -> Tensor:
        """(N, rows, columns, C, h, w) -> (N, C, H, W)."""
        return self.rows.paste(self.columns.paste(tiles, -1, 2), -2, 1)


class ChannelNorm(nn.Module):
    """Layer normalisation over channels of (N, C, H, W), and a border of one pixel of zeros around the result."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.LayerNorm(dim)

    def projected(self, x: Tensor, conv: nn.Conv2d) -> Tensor:
        """Normalise, add the border, and convolve 1x1: (N, C, H, W) -> (N, D, H+2, W+2)."""
        return project(_bordered_norm, conv.weight, x, self.body.weight, self.body.bias)


def _bordered_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.pad(channel_norm(x, weight, bias), (1, 1, 1, 1))


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

    def forward(self, x: Tensor, norm: ChannelNorm, tiles: _Tiles | None) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W); statistics of each tile, or of the whole picture."""
        q, v = self.dynamic_conv(norm.projected(x, self.project_in)).chunk(2, 1)
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
        cosine = (q @ v.transpose(-1, -2)) / (length_q * length_v.transpose(-1, -2))
        weights = F.relu(cosine * self.temperature).to(v.dtype)
        folded = self.project_out.weight.flatten(1).expand_as(weights) @ weights
        return (folded @ v).unflatten(-1, edges)


class GatedFeedForward(nn.Module):
    """Gated depth-wise feed-forward network of Restormer."""

    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        hidden = dim * expansion
        self.project_in = nn.Conv2d(dim, 2 * hidden, 1, bias=False)
        self.dwconv = nn.Conv2d(2 * hidden, 2 * hidden, 3, groups=2 * hidden, bias=False)
        self.project_out = nn.Conv2d(hidden, dim, 1, bias=False)

    def forward(self, x: Tensor, norm: ChannelNorm) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return project(gated_conv, self.project_out.weight, norm.projected(x, self.project_in), self.dwconv.weight)


class Block(nn.Module):
    def __init__(self, dim: int, expansion: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(dim)
        self.attn = SparseAttention(dim)
        self.norm2 = ChannelNorm(dim)
        self.ffn = GatedFeedForward(dim, expansion)

    def forward(self, x: Tensor, tiles: _Tiles | None) -> Tensor:
        x = x + self.attn(x, self.norm1, tiles)
        return x + self.ffn(x, self.norm2)


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
        h, w = lq.shape[-2:]
        tiles = None if self.training or self.tile is None else _Tiles(h, w, self.tile, lq.device)
        *groups, conv = self.deep_feature_extraction
        for group in groups:
            x = group(x, tiles)
        return self.upsample(conv(x) + shallow) + self.mean

    def work(self, h: int, w: int) -> dict[str, int]:
        """Cost by definition for h x w input pixels, see :mod:`sr.efficiency`: what no counter sees in fused kernels.

        Every convolution has an output of h x w, also the one that predicts taps; applying these is nine products a
        value; attention is two matrix products in each tile. What runs is less: a value of a dynamic convolution takes
        54 products instead of 90, and the output convolution is part of attention.
        """
        convolutions = [m for m in self.modules() if isinstance(m, nn.Conv2d)]
        macs = h * w * sum(conv.weight.numel() for conv in convolutions)
        attended = h * w
        if self.tile is not None and not self.training:
            axes = (_Axis(size, self.tile, self.mean.device) for size in (h, w))
            attended = math.prod(len(axis.starts) * axis.edge for axis in axes)
        for attention in (m for m in self.modules() if isinstance(m, SparseAttention)):
            dim = attention.project_out.in_channels
            macs += 9 * 2 * dim * h * w + 2 * dim**2 * attended
        activations = h * w * sum(conv.out_channels for conv in convolutions)
        return {"macs": macs, "activations": activations, "convolutions": len(convolutions)}

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Arguments of a published file; the tiles' edge, which no shape tells, is that of the paper's variant."""
        embed, last = state_dict.get("overlap_embed.0.proj.weight"), state_dict.get("upsample.0.weight")
        blocks = re.compile(
            r"deep_feature_extraction\.(\d+)\.body\.(\d+)\.attn\.dynamic_conv\.weight\.weight"
        ).fullmatch
        found = [(int(m[1]), int(m[2])) for m in map(blocks, state_dict) if m]
        narrow = state_dict.get("deep_feature_extraction.0.body.0.ffn.project_out.weight")
        if embed is None or last is None or narrow is None or not found:
            return None
        dim, scale = embed.shape[0], math.isqrt(last.shape[0] // 3)
        hidden = narrow.shape[1]
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
