"""RLFN and RLFN-S: residual local feature network, three convolutions and spatial attention in each block.

Paper: "Residual Local Feature Network for Efficient Super-Resolution", F. Kong, M. Li, S. Liu, D. Liu, J. He, Y. Bai,
F. Chen, L. Fu; CVPR Workshops 2022. Authors' code and weights: Apache-2.0.

Written from the paper's description; module names equal the published ones, so that the published weights load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.common import SpatialAttention, last_number
from sr.network import SRNetwork
from sr.registry import register_arch

_RANGE = 255.0  # of pictures inside the network, for which the published weights were trained


class Block(nn.Module):
    """RLFB: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c1_r = nn.Conv2d(dim, dim, 3, padding=1)
        self.c2_r = nn.Conv2d(dim, dim, 3, padding=1)
        self.c3_r = nn.Conv2d(dim, dim, 3, padding=1)
        self.c5 = nn.Conv2d(dim, dim, 1)
        self.esa = SpatialAttention(dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in (self.c1_r, self.c2_r, self.c3_r):
            y = F.leaky_relu(conv(y), 0.05)
        return self.esa(self.c5(y + x))


@register_arch
class RLFN(SRNetwork):
    """RLFN; see the module's docstring.

    Args:
        scale: output edge / input edge.
        dim: channels.
        blocks: number of blocks.
    """

    min_size = SpatialAttention.MIN_SIZE

    def __init__(self, *, scale: int = 4, dim: int = 52, blocks: int = 6) -> None:
        super().__init__(scale=scale)
        self.conv_1 = nn.Conv2d(3, dim, 3, padding=1)
        self.blocks = [f"block_{i + 1}" for i in range(blocks)]
        for name in self.blocks:
            self.add_module(name, Block(dim))
        self.conv_2 = nn.Conv2d(dim, dim, 3, padding=1)
        self.upsampler = nn.Sequential(nn.Conv2d(dim, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def upscale(self, lq: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, scale*H, scale*W), H, W >= ``min_size``."""
        x = shallow = self.conv_1(lq * _RANGE)
        for name in self.blocks:
            x = getattr(self, name)(x)
        return self.upsampler(self.conv_2(x) + shallow) / _RANGE

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        last = state_dict.get("upsampler.0.weight")
        if last is None or "block_1.esa.conv_f.weight" not in state_dict:
            return None
        return {
            "scale": math.isqrt(last.shape[0] // 3),
            "dim": last.shape[1],
            "blocks": last_number(state_dict, r"block_(\d+)\.c1_r\.weight"),
        }


@register_arch
def rlfn(*, scale: int = 4, **kwargs: Any) -> RLFN:
    """RLFN: 52 channels, 6 blocks."""
    return RLFN(**{"scale": scale, "dim": 52, "blocks": 6, **kwargs})


@register_arch
def rlfn_s(*, scale: int = 4, **kwargs: Any) -> RLFN:
    """RLFN-S: 48 channels, 6 blocks."""
    return RLFN(**{"scale": scale, "dim": 48, "blocks": 6, **kwargs})
