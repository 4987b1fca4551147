"""What happens to one tile: precision, a second try in float32, eight views, and colours that do not drift."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.errors import SRError
from sr.inference.tiling import Margin, Run, declared_margin, round_up
from sr.network import SRNetwork

_COLOR_RADIUS = 8  # input pixels, of each of the two box blurs that leave the low frequencies
_WINDOW = 2 * _COLOR_RADIUS + 1
#: How far, in input pixels, the correction of colours looks.
COLOR_REACH = 2 * _COLOR_RADIUS + 2

_CORE, _FURTHEST = 16, 64  # of the tile that margins are tried on, and the widest margin; input pixels
_EXACT = 2e-6  # a tile that differs from the whole by no more differs by rounding
_CLOSE = 2e-3  # half of one of 255 levels


class TileRunner:
    """Runs a network over tiles, wherever these lie, and gives float32 results on its own device.

    Args:
        network: in evaluation mode, on ``device``.
        device: where to compute.
        dtype: float32, or bfloat16 or float16 through autocast.
        tta: average over the eight flips and quarter turns.
        keep_color: give the result the low frequencies of the input.
    """

    def __init__(
        self, network: SRNetwork, device: torch.device, dtype: torch.dtype, tta: bool = False, keep_color: bool = False
    ) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self.tta, self.keep_color = tta, keep_color

    @torch.inference_mode()
    def __call__(self, lq: Tensor) -> Tensor:
        """(N, 3, h, W) float32 -> (N, 3, scale*h, scale*W) float32, not clamped.

        Raises:
            SRError: the result is not finite, even in float32.
        """
        x = lq.to(self.device).contiguous(memory_format=torch.channels_last)
        run = (lambda t: eight_views(self._plain, t, self.network.multiple_of)) if self.tta else self._plain
        sr = run(x)
        return keep_color(x, sr, self.network.scale) if self.keep_color else sr

    def _plain(self, x: Tensor) -> Tensor:
        if self.dtype != torch.float32:
            with torch.autocast(self.device.type, dtype=self.dtype):
                sr = self.network(x).float()
            if sr.isfinite().all():
                return sr
        # Some callers compute inside an autocast of their own.
        with torch.autocast(self.device.type, enabled=False), whole_float32(self.device):
            sr = self.network(x).float()
        if not sr.isfinite().all():
            raise SRError(
                "the network gives NaN or infinite values in float32; its weights are damaged or diverged in training"
            )
        return sr


@contextlib.contextmanager
def whole_float32(device: torch.device) -> Iterator[None]:
    """On a GPU, convolutions not in TF32, whose 10 bits are too few for scores and for pictures of 16 bits."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    # Of torch 2.9 and newer, where reading the old flag is an error once somebody has set the new one.
    owner, name, exact = (
        (cudnn.conv, "fp32_precision", "ieee") if hasattr(cudnn, "conv") else (cudnn, "allow_tf32", False)
    )
    before = getattr(owner, name)
    setattr(owner, name, exact)
    try:
        yield
    finally:
        setattr(owner, name, before)


def eight_views(run: Run, x: Tensor, multiple: int = 1) -> Tensor:
    """Mean of what ``run`` makes of the eight flips and quarter turns of (N, C, H, W), each turned back.

    The picture is filled up at its right and bottom to a ``multiple`` first: windows then lie in each view as they do
    when it is cut into tiles.
    """
    height, width = x.shape[-2:]
    x = F.pad(x, (0, -width % multiple, 0, -height % multiple), mode="replicate")
    total: Tensor | None = None
    for turns in range(4):
        for flip in (False, True):
            view = torch.rot90(x.flip(-1) if flip else x, turns, (-2, -1))
            sr = torch.rot90(run(view.contiguous(memory_format=torch.channels_last)), -turns, (-2, -1))
            sr = sr.flip(-1) if flip else sr
            total = sr if total is None else total + sr
    assert total is not None
    scale = total.shape[-1] // x.shape[-1]
    return total[..., : height * scale, : width * scale] / 8


def keep_color(lq: Tensor, sr: Tensor, scale: int) -> Tensor:
    """``sr`` with the low frequencies of ``lq``: what a blur leaves of the difference is added.

    Args:
        lq: (N, C, H, W).
        sr: (N, C, scale*H, scale*W).
        scale: output edge / input edge.
    """
    drift = lq - F.avg_pool2d(sr, scale)
    for _ in range(2):
        for kernel, padding in (((_WINDOW, 1), (_COLOR_RADIUS, 0)), ((1, _WINDOW), (0, _COLOR_RADIUS))):
            drift = F.avg_pool2d(drift, kernel, 1, padding, count_include_pad=False)
    return sr + F.interpolate(drift, scale_factor=scale, mode="bilinear")


def find_margin(network: SRNetwork, device: torch.device) -> Margin:
    """The margin that a network's tiles need: declared, or measured where ``receptive_field`` is ``None``.

    Measured on noise: the smallest of some margins with which a tile equals the same part of a whole picture. If none
    does (means over the whole picture; pooling to a grid whose cells depend on the picture's size), tiles have the
    smallest that is close, and overlap. Tiles then also begin at multiples of 8, which is what most pooling asks for.

    Args:
        network: in evaluation mode, on ``device``.
        device: where to compute; about 0.1 megapixels go through the network.
    """
    if network.receptive_field is not None:
        return declared_margin(network)
    multiple = math.lcm(8, network.multiple_of)
    halos = sorted({round_up(halo, multiple) for halo in (16, 24, 32, 48, _FURTHEST)})
    start, s = round_up(halos[-1] + 8, multiple), network.scale
    size = start + _CORE + halos[-1] + 27  # no multiple of anything: cells of pooling lie otherwise than in the tile
    lq = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), whole_float32(device):
        whole = network(lq)[..., start * s : (start + _CORE) * s, start * s : (start + _CORE) * s]
        difference = {}
        for halo in halos:
            here = slice(start - halo, start + _CORE + halo)
            core = slice(halo * s, (halo + _CORE) * s)
            difference[halo] = (network(lq[..., here, here])[..., core, core] - whole).abs().max().item()
            if difference[halo] <= _EXACT * max(1.0, whole.abs().max().item()):
                return Margin(halo + multiple, multiple, exact=True)  # one more, since other pictures are not this one
    close = next((halo for halo in halos if difference[halo] <= _CLOSE), halos[-2])
    return Margin(close, multiple, exact=False)


def compile_network(network: SRNetwork) -> None:
    """Compile, in place, what a network does between padding and cropping; anew for each shape of tiles."""
    network.upscale = torch.compile(network.upscale, dynamic=False)  # type: ignore[method-assign]
