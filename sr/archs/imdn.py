"""IMDN: information multi-distillation network, which sets a quarter of the channels aside at every step of a block.

Paper: "Lightweight Image Super-Resolution with Information Multi-distillation Network", Z. Hui, X. Gao, Y. Yang,
X. Wang; ACM Multimedia 2019. Authors' code and weights: no licence stated.

Written from the paper's description; module names equal the published ones, so that the published weights load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.common import ContrastAttention, last_number
from sr.network import SRNetwork
from sr.registry import register_arch

_SLOPE = 0.05


class Block(nn.Module):
    """IMDB: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        kept = dim // 4
        self.split = [kept, dim - kept]
        self.c1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.c2 = nn.Conv2d(dim - kept, dim, 3, padding=1)
        self.c3 = nn.Conv2d(dim - kept, dim, 3, padding=1)
        self.c4 = nn.Conv2d(dim - kept, kept, 3, padding=1)
        self.cca = ContrastAttention(4 * kept, 16)
        self.c5 = nn.Conv2d(4 * kept, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, rest = [], x
        for conv in (self.c1, self.c2, self.c3):
            aside, rest = F.leaky_relu(conv(rest), _SLOPE).split(self.split, 1)
            kept.append(aside)
        return self.c5(self.cca(torch.cat((*kept, self.c4(rest)), 1))) + x


@register_arch
class IMDN(SRNetwork):
    """IMDN; see the module's docstring.

    Args:
        scale: output edge / input edge.
        dim: channels, at least 16.
        blocks: number of blocks.
    """

    def __init__(self, *, scale: int = 4, dim: int = 64, blocks: int = 6) -> None:
        super().__init__(scale=scale)
        self.fea_conv = nn.Conv2d(3, dim, 3, padding=1)
        self.blocks = [f"IMDB{i + 1}" for i in range(blocks)]
        for name in self.blocks:
            self.add_module(name, Block(dim))
        self.c = nn.Sequential(nn.Conv2d(blocks * dim, dim, 1), nn.LeakyReLU(_SLOPE))
        self.LR_conv = nn.Conv2d(dim, dim, 3, padding=1)
        self.upsampler = nn.Sequential(nn.Conv2d(dim, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def upscale(self, lq: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, scale*H, scale*W), any H, W >= 1."""
        x = shallow = self.fea_conv(lq)
        outputs = []
        for name in self.blocks:
            x = getattr(self, name)(x)
            outputs.append(x)
        return self.upsampler(self.LR_conv(self.c(torch.cat(outputs, 1))) + shallow)

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        last = state_dict.get("upsampler.0.weight")
        if last is None or "IMDB1.cca.conv_du.0.weight" not in state_dict:
            return None
        return {
            "scale": math.isqrt(last.shape[0] // 3),
            "dim": last.shape[1],
            "blocks": last_number(state_dict, r"IMDB(\d+)\.c1\.weight"),
        }


@register_arch
def imdn(*, scale: int = 4, **kwargs: Any) -> IMDN:
    """IMDN: 64 channels, 6 blocks."""
    return IMDN(**{"scale": scale, "dim": 64, "blocks": 6, **kwargs})
