"""BSRN: blueprint separable residual network, IMDN's distillation with separable convolutions.

Paper: "Blueprint Separable Residual Network for Efficient Image Super-Resolution", Z. Li, Y. Liu, X. Chen, H. Cai,
J. Gu, Y. Qiao, C. Dong; CVPR Workshops 2022. Authors' code and weights: MIT.

Written from the paper's description; module names equal the published ones, so that the published weights load.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.common import ContrastAttention, SpatialAttention, last_number
from sr.network import SRNetwork
from sr.registry import register_arch

_COPIES = 4  # of the picture, along its channels, that the first convolution takes


class BlueprintConv(nn.Module):
    """1x1 convolution without bias, then a depth-wise one."""

    def __init__(self, channels_in: int, channels_out: int, size: int = 3, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.pw = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.dw = nn.Conv2d(channels_out, channels_out, size, stride, padding, groups=channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.dw(self.pw(x))


class FirstConv(BlueprintConv):
    """The same for a picture repeated along its channels, (N, 3, H, W) -> (N, C, H, W): copies add up their weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.pw.weight.unflatten(1, (_COPIES, -1)).sum(1)
        return self.dw(F.conv2d(x, weight))


class BlueprintAttention(SpatialAttention):
    """ESA with blueprint convolutions, and three of them on the pooled maps."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden, BlueprintConv)
        self.conv_max = BlueprintConv(hidden, hidden, padding=1)
        self.conv3_ = BlueprintConv(hidden, hidden, padding=1)

    def coarse(self, x: Tensor, bordered: Callable[[Tensor], Tensor]) -> Tensor:
        x = F.gelu(self.conv_max(bordered(x)))
        x = F.gelu(self.conv3(bordered(x)))
        return self.conv3_(bordered(x))


class Block(nn.Module):
    """ESDB: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        kept = dim // 2
        self.c1_d = nn.Conv2d(dim, kept, 1)
        self.c1_r = BlueprintConv(dim, dim, padding=1)
        self.c2_d = nn.Conv2d(dim, kept, 1)
        self.c2_r = BlueprintConv(dim, dim, padding=1)
        self.c3_d = nn.Conv2d(dim, kept, 1)
        self.c3_r = BlueprintConv(dim, dim, padding=1)
        self.c4 = BlueprintConv(dim, kept, padding=1)
        self.c5 = nn.Conv2d(4 * kept, dim, 1)
        self.esa = BlueprintAttention(dim, 16)
        self.cca = ContrastAttention(dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        kept, rest = [], x
        for distil, refine in ((self.c1_d, self.c1_r), (self.c2_d, self.c2_r), (self.c3_d, self.c3_r)):
            kept.append(F.gelu(distil(rest)))
            rest = F.gelu(refine(rest) + rest)
        joined = self.c5(torch.cat((*kept, F.gelu(self.c4(rest))), 1))
        return self.cca(self.esa(joined)) + x


@register_arch
class BSRN(SRNetwork):
    """BSRN; see the module's docstring.

    Args:
        scale: output edge / input edge.
        dim: channels, at least 16.
        blocks: number of blocks.
    """

    min_size = SpatialAttention.MIN_SIZE

    def __init__(self, *, scale: int = 4, dim: int = 64, blocks: int = 8) -> None:
        super().__init__(scale=scale)
        self.fea_conv = FirstConv(3 * _COPIES, dim, padding=1)
        self.blocks = [f"B{i + 1}" for i in range(blocks)]
        for name in self.blocks:
            self.add_module(name, Block(dim))
        self.c1 = nn.Conv2d(blocks * dim, dim, 1)
        self.c2 = BlueprintConv(dim, dim, padding=1)
        last = nn.Sequential(nn.Conv2d(dim, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))
        self.upsampler = nn.Sequential(OrderedDict(upsampleOneStep=last))

    def upscale(self, lq: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, scale*H, scale*W), H, W >= ``min_size``."""
        x = shallow = self.fea_conv(lq)
        outputs = []
        for name in self.blocks:
            x = getattr(self, name)(x)
            outputs.append(x)
        return self.upsampler(self.c2(F.gelu(self.c1(torch.cat(outputs, 1)))) + shallow)

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        last = state_dict.get("upsampler.upsampleOneStep.0.weight")
        if last is None or "B1.c1_r.pw.weight" not in state_dict:
            return None
        return {
            "scale": math.isqrt(last.shape[0] // 3),
            "dim": last.shape[1],
            "blocks": last_number(state_dict, r"B(\d+)\.c1_r\.pw\.weight"),
        }


@register_arch
def bsrn(*, scale: int = 4, **kwargs: Any) -> BSRN:
    """BSRN: 64 channels, 8 blocks."""
    return BSRN(**{"scale": scale, "dim": 64, "blocks": 8, **kwargs})
