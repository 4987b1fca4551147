"""PAN: pixel attention network, whose attention is a sigmoid gate for every value of a map.

Paper: "Efficient Image Super-Resolution Using Pixel Attention", H. Zhao, X. Kong, J. He, Y. Qiao, C. Dong; ECCV
Workshops 2020. Authors' code and weights: no licence stated.

Written from the paper's description; module names equal the published ones, so that the published weights load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.common import last_number
from sr.network import SRNetwork
from sr.registry import register_arch
from sr.resize import imresize


def _activate(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


class PixelAttention(nn.Module):
    """PA: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv(x))


class AttentionConv(nn.Module):
    """PA-Conv: a 3x3 convolution under pixel attention, then another."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.k2 = nn.Conv2d(dim, dim, 1)
        self.k3 = nn.Conv2d(dim, dim, 3, padding=1, bias=False)
        self.k4 = nn.Conv2d(dim, dim, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return self.k4(self.k3(x) * torch.sigmoid(self.k2(x)))


class Block(nn.Module):
    """SC-PA: two half-wide branches, one of them under attention; (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.conv1_a = nn.Conv2d(dim, half, 1, bias=False)
        self.conv1_b = nn.Conv2d(dim, half, 1, bias=False)
        self.k1 = nn.Sequential(nn.Conv2d(half, half, 3, padding=1, bias=False))
        self.PAConv = AttentionConv(half)
        self.conv3 = nn.Conv2d(2 * half, dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.k1(_activate(self.conv1_a(x)))
        b = self.PAConv(_activate(self.conv1_b(x)))
        return self.conv3(_activate(torch.cat((a, b), 1))) + x


@register_arch
class PAN(SRNetwork):
    """PAN; see the module's docstring.

    Args:
        scale: output edge / input edge; 4 is reached in two steps of 2, any other in one.
        dim: channels.
        blocks: number of blocks.
        up_dim: channels of the up-sampler.
    """

    def __init__(self, *, scale: int = 4, dim: int = 40, blocks: int = 16, up_dim: int = 24) -> None:
        super().__init__(scale=scale)
        self.steps = (2, 2) if scale == 4 else (scale,)
        # Two pixels a block, one each for the two convolutions around the blocks, and three of the first step's smaller
        # pixels, rounded up; the rounding covers those of a second step.
        self.receptive_field = 2 * blocks + 2 + math.ceil(3 / self.steps[0])
        self.conv_first = nn.Conv2d(3, dim, 3, padding=1)
        self.SCPA_trunk = nn.Sequential(*(Block(dim) for _ in range(blocks)))
        self.trunk_conv = nn.Conv2d(dim, dim, 3, padding=1)
        for i in range(len(self.steps)):
            self.add_module(f"upconv{i + 1}", nn.Conv2d(up_dim if i else dim, up_dim, 3, padding=1))
            self.add_module(f"att{i + 1}", PixelAttention(up_dim))
            self.add_module(f"HRconv{i + 1}", nn.Conv2d(up_dim, up_dim, 3, padding=1))
        self.conv_last = nn.Conv2d(up_dim, 3, 3, padding=1)

    def upscale(self, lq: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, scale*H, scale*W), any H, W >= 1."""
        shallow = self.conv_first(lq)
        x = shallow + self.trunk_conv(self.SCPA_trunk(shallow))
        for i, step in enumerate(self.steps):
            conv, attention, refine = (getattr(self, f"{name}{i + 1}") for name in ("upconv", "att", "HRconv"))
            x = conv(F.interpolate(x, scale_factor=step, mode="nearest"))
            x = _activate(refine(_activate(attention(x))))
        return self.conv_last(x) + F.interpolate(lq, scale_factor=self.scale, mode="bilinear")

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        first, last = state_dict.get("conv_first.weight"), state_dict.get("conv_last.weight")
        if first is None or last is None or "SCPA_trunk.0.PAConv.k2.weight" not in state_dict:
            return None
        hparams = {
            "dim": first.shape[0],
            "blocks": last_number(state_dict, r"SCPA_trunk\.(\d+)\.conv3\.weight") + 1,
            "up_dim": last.shape[1],
        }
        scale = 4 if "upconv2.weight" in state_dict else min((2, 3), key=lambda s: cls._loss(state_dict, s, hparams))
        return {"scale": scale, **hparams}

    @classmethod
    @torch.no_grad()
    def _loss(cls, state_dict: Mapping[str, Tensor], scale: int, hparams: Mapping[str, int]) -> float:
        """How far stripes, enlarged and shrunk again, are from what they were.

        Weights for scales 2 and 3 have the same names and shapes, but a trained network keeps its input only at its
        own scale: with published weights the error at the other one is five times as large. Untrained weights fit both.
        """
        network = cls(scale=scale, **hparams)
        try:
            network.load_state_dict(state_dict)
        except RuntimeError:
            return math.inf  # incomplete, which whoever fills the network explains
        y, x = torch.meshgrid(torch.arange(96.0), torch.arange(96.0), indexing="ij")
        stripes = imresize(0.5 + 0.3 * torch.sign(torch.sin(0.3 * x + 0.5 * y)).expand(1, 3, -1, -1), 1 / 3)
        return (imresize(network(stripes), 1 / scale) - stripes).abs().mean().item()


@register_arch
def pan(*, scale: int = 4, **kwargs: Any) -> PAN:
    """PAN: 40 channels, 16 blocks, 24 channels in the up-sampler."""
    return PAN(**{"scale": scale, "dim": 40, "blocks": 16, "up_dim": 24, **kwargs})
