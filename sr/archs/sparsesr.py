"""SparseSR: dense convolutions for local detail, sparse window attention for repeated structure.

Original to this project (Apache-2.0). The body is a stack of groups; a group is a few residual blocks of two dense
3x3 convolutions and one adaptive sparse self-attention layer (:class:`SparseAttention`). The result is added to the
bicubically enlarged input, and since the last convolution starts at zero, an untrained network *is* bicubic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.errors import SRError
from sr.network import SRNetwork
from sr.registry import register_arch


def window_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Multi-head scaled dot-product attention, ``softmax(q k^T / sqrt(D)) v`` with D channels a head.

    Args:
        q: (B, T, C) queries.
        k: (B, S, C) keys.
        v: (B, S, Cv) values.
        heads: number of heads; divides C and Cv.

    Returns:
        (B, T, Cv)
    """
    if q.shape[-1] % heads or v.shape[-1] % heads:
        raise SRError(f"{heads} attention heads do not divide a width of {q.shape[-1]} and {v.shape[-1]} channels")
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, heads, tokens, D)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def to_windows(x: Tensor, window: int) -> Tensor:
    """(N, C, H, W) -> (N, H/window, W/window, window², C); H and W are multiples of ``window``."""
    x = x.unflatten(2, (-1, window)).unflatten(4, (-1, window))  # (N, C, Hw, w, Ww, w)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4)


def from_windows(x: Tensor, window: int) -> Tensor:
    """Inverse of :func:`to_windows`; the result is channels-last in memory."""
    x = x.unflatten(3, (window, window)).permute(0, 5, 1, 3, 2, 4)  # (N, C, Hw, w, Ww, w)
    return x.flatten(4, 5).flatten(2, 3)


def similar_windows(query: Tensor, key: Tensor, topk: int, radius: int) -> tuple[Tensor, Tensor]:
    """For each window, the ``topk`` most similar ones among its neighbours, by cosine similarity of descriptors.

    Candidates are the windows at most ``radius`` windows away in each direction, the window itself excluded: the
    cost is linear in the number of pixels, and a tile of a picture chooses as the whole picture would. Beyond the
    border there are none; a slot that stays empty falls back to the window itself.

    Args:
        query: (N, Hw, Ww, C) one descriptor a window.
        key: (N, Hw, Ww, C) what it is compared with.
        topk: number of windows to choose; at most ``(2 * radius + 1)² - 1``.
        radius: reach, in windows.

    Returns:
        index: (N, Hw * Ww, topk) int64, into the row-major list of windows.
        score: (N, Hw * Ww, topk) cosine similarity in [-1, 1]; 0 for a slot that fell back. Carries gradient.
    """
    _, height, width, _ = query.shape
    reach = 2 * radius + 1
    own = torch.arange(height * width, device=query.device).view(height, width)
    candidates = _neighbours(
        F.pad(own, (radius,) * 4, value=-1), reach, 0
    )  # (Hw, Ww, reach² - 1), -1: beyond the border
    key = F.pad(F.normalize(key, dim=-1), (0, 0, *(radius,) * 4))
    score = torch.einsum("nhwc,nhwcm->nhwm", F.normalize(query, dim=-1), _neighbours(key, reach, 1))
    best, slot = score.masked_fill(candidates < 0, -2.0).topk(topk, dim=-1)
    found = best > -1.5
    index = torch.where(found, candidates.expand(query.shape[0], -1, -1, -1).gather(-1, slot), own[..., None])
    return index.flatten(1, 2), torch.where(found, best, 0.0).flatten(1, 2)


def _neighbours(x: Tensor, reach: int, dim: int) -> Tensor:
    """(..., H + reach - 1, W + reach - 1, ...) at ``dim`` -> (..., H, W, ..., reach² - 1), all but the centre."""
    around = x.unfold(dim, reach, 1).unfold(dim + 1, reach, 1).flatten(-2)
    centre = reach**2 // 2
    return torch.cat((around[..., :centre], around[..., centre + 1 :]), -1)


class SparseAttention(nn.Module):
    """Attention of each window to itself and to its top-k most similar neighbour windows.

    Convolutional local features make queries, keys and values. Which windows a window sees is decided from their
    mean features, *before* any query-key product; whole windows are then gathered and go through dense fused
    attention, without a mask. The similarity of a chosen window multiplies its values, so that choosing has a gradient.

    Args:
        dim: channels in and out.
        attn_dim: channels of queries, keys and values.
        heads: attention heads; divides ``attn_dim``.
        window: edge of a window, in input pixels.
        topk: how many further windows each window sees.
        radius: how far away, in windows, these may be.
    """

    def __init__(self, dim: int, attn_dim: int, heads: int, window: int, topk: int, radius: int) -> None:
        super().__init__()
        if attn_dim % heads:
            raise SRError(f"{heads} attention heads do not divide attn_dim={attn_dim}")
        if not 0 <= topk < (2 * radius + 1) ** 2:
            raise SRError(
                f"topk={topk} windows cannot be chosen among the {(2 * radius + 1) ** 2 - 1} within {radius=}"
            )
        self.heads, self.window, self.topk, self.radius = heads, window, topk, radius
        self.qkv = nn.Conv2d(dim, 3 * attn_dim, 3, padding=1)
        self.proj = nn.Conv2d(attn_dim, dim, 1)
        nn.init.normal_(self.proj.weight, std=1e-2)  # the layer starts close to the identity

    def forward(self, x: Tensor) -> Tensor:
        qkv = to_windows(self.qkv(x), self.window)  # (N, Hw, Ww, T, 3A)
        n, height, width, tokens, width3 = qkv.shape
        q, kv = qkv.split((width3 // 3, 2 * width3 // 3), dim=-1)
        seen = kv.flatten(0, 2)[:, None]  # (N * windows, 1, T, 2A): the window itself, then the chosen ones
        if self.topk:
            descriptors = qkv.mean(3)
            index, score = similar_windows(*descriptors.chunk(3, dim=-1)[:2], self.topk, self.radius)
            first = torch.arange(0, n * height * width, height * width, device=x.device)[:, None, None]
            # index_select over whole windows: its gradient is a plain sum of rows.
            others = seen.flatten(1).index_select(0, (index + first).flatten()).view(-1, self.topk, *seen.shape[2:])
            gate = (0.5 + 0.5 * score).to(others.dtype).view(-1, self.topk, 1, 1)
            k, v = others.chunk(2, dim=-1)
            seen = torch.cat((seen, torch.cat((k, v * gate), -1)), 1)
        k, v = seen.flatten(1, 2).chunk(2, dim=-1)  # (N * windows, (1 + topk) * T, A) each
        out = window_attention(q.flatten(0, 2), k, v, self.heads)
        return x + self.proj(from_windows(out.view(n, height, width, tokens, -1), self.window))


class ResidualBlock(nn.Module):
    """x + conv(act(conv(x))): two dense 3x3 convolutions, which is what processors do best."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.gelu(self.conv1(x)))


class BicubicUpsample(nn.Module):
    """Bicubic enlargement (a = -0.5, as MATLAB's ``imresize``) by a whole number, as one depth-wise convolution.

    Equal to :func:`sr.resize.imresize` but for two pixels at the border, where it replicates instead of mirroring.
    """

    kernel: Tensor

    def __init__(self, channels: int, scale: int) -> None:
        super().__init__()
        # Output pixel s*i + p lies at i + (p + 0.5) / s - 0.5 in the input; taps at i-2 ... i+2.
        phase = (torch.arange(scale, dtype=torch.float64) + 0.5) / scale - 0.5
        distance = (phase[:, None] - torch.arange(-2, 3)).abs()
        near = 1.5 * distance**3 - 2.5 * distance**2 + 1
        far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
        taps = torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))  # (scale, 5)
        kernel = torch.einsum("ai,bj->abij", taps, taps).reshape(1, scale**2, 1, 5, 5)
        kernel = kernel.expand(channels, -1, -1, -1, -1).flatten(0, 1).float()
        self.register_buffer("kernel", kernel.contiguous(), persistent=False)
        self.channels, self.scale = channels, scale

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (2, 2, 2, 2), mode="replicate")
        return F.pixel_shuffle(F.conv2d(x, self.kernel.to(x.dtype), groups=self.channels), self.scale)


@register_arch
class SparseSR(SRNetwork):
    """The project's network: convolutional groups, each with one sparse attention layer.

    Args:
        scale: output edge / input edge.
        dim: channels of the body.
        groups: number of groups.
        blocks: residual blocks in each group.
        attn_dim: channels of queries, keys and values.
        heads: attention heads; divides ``attn_dim``.
        window: edge of an attention window, in input pixels.
        topk: how many further windows each window attends to.
        radius: how many windows away these may be.
    """

    def __init__(
        self,
        *,
        scale: int = 4,
        dim: int = 32,
        groups: int = 2,
        blocks: int = 4,
        attn_dim: int = 16,
        heads: int = 1,
        window: int = 8,
        topk: int = 3,
        radius: int = 2,
    ) -> None:
        super().__init__(scale=scale)
        self.multiple_of = window
        self.embed = nn.Conv2d(3, dim, 3, padding=1)
        self.body = nn.Sequential()
        for _ in range(groups):
            self.body.extend(ResidualBlock(dim) for _ in range(blocks))
            self.body.append(SparseAttention(dim, attn_dim, heads, window, topk, radius))
        self.head = nn.Conv2d(dim, 3 * scale**2, 3, padding=1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.base = BicubicUpsample(3, scale)
        # Each attention layer reaches to the far edge of the farthest window and one pixel on; two pixels a block.
        self.receptive_field = 2 + groups * (2 * blocks + 1 + (radius + 1) * window)

    def upscale(self, lq: Tensor) -> Tensor:
        shallow = self.embed(lq)
        deep = shallow + self.body(shallow)
        return self.base(lq) + F.pixel_shuffle(self.head(deep), self.scale)


@register_arch
def sparsesr_t(*, scale: int = 4, **kwargs: Any) -> SparseSR:
    """About 0.17 M parameters: the quickstart's network."""
    return SparseSR(scale=scale, dim=32, groups=2, blocks=4, **kwargs)
