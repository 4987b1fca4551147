"""How far results in tiles are from those of the whole picture, for each size of tile, and what tiles cost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sr
from sr.errors import SRError
from sr.image import open_image, to_tensor
from sr.inference.runner import find_margin
from sr.network import SRNetwork

_SPREAD = 0.02  # of what is added to weights without training: they start as bicubic interpolation


class Identity(SRNetwork):
    """Gives the input."""

    receptive_field = 0

    def __init__(self, *, scale: int = 1) -> None:
        super().__init__(scale=scale)

    def upscale(self, lq: Tensor) -> Tensor:
        return lq.clone()


Find = Callable[[str, int], SRNetwork]


def _find(name: str, find_network: Find) -> SRNetwork:
    """``identity``, or what ``-m`` of the subcommand ``model`` takes; what is not trained is made to do something."""
    if name == "identity":
        return Identity()
    network = find_network(name, 2)
    if name in sr.list_models():
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(_SPREAD * torch.randn(parameter.shape, generator=generator))
    return network


def tiles(args: argparse.Namespace) -> None:
    """Largest and mean difference between tiles and the whole picture, and the time of either."""
    width, height = args.size
    lq = to_tensor(open_image(args.picture).convert("RGB"))[:, :height, :width]
    if lq.shape[1:] != (height, width):
        raise SRError(f"{args.picture} is smaller than {width}x{height}; choose a smaller --size")
    print(f"{args.picture.name}, {width}x{height}; differences in [0, 1], 1/255 = 0.0039\n", flush=True)
    print("| network | halo | tile | largest difference | mean | time / whole |\n|---|---|---|---|---|---|")
    for name in args.model:
        network = _find(name, args.find_network).eval()
        margin = find_margin(network, torch.device("cpu"))
        kind = f"{margin.halo}" if margin.exact else f"{margin.halo}, blended"
        whole, seconds = _timed(sr.Upscaler(network, tile=None, device="cpu"), lq)
        for tile in args.tiles:
            result, took = _timed(sr.Upscaler(network, tile=tile, device="cpu"), lq)
            difference = (result - whole).abs()
            row = f"{difference.max():.1e} | {difference.mean():.1e} | {took / seconds:.2f}"
            print(f"| {name} | {kind} | {tile} | {row} |", flush=True)


def _timed(upscaler: sr.Upscaler, lq: Tensor) -> tuple[Tensor, float]:
    start = time.process_time()  # other programs do not count
    return upscaler(lq), time.process_time() - start


def add_to(commands: Any, find_network: Find, picture_size: Callable[[str], tuple[int, int]]) -> None:
    """Add the subcommand ``tiles``."""
    command = commands.add_parser("tiles", help=tiles.__doc__, description=__doc__)
    command.add_argument("picture", type=Path, help="a photograph")
    command.add_argument("-m", "--model", action="append", required=True, help="as of 'model', or identity")
    command.add_argument("--size", type=picture_size, default=(700, 500), metavar="WxH", help="of it (700x500)")
    command.add_argument("--tiles", type=int, nargs="+", default=[64, 96, 128, 192, 256, 384, 512])
    command.set_defaults(run=tiles, find_network=find_network)
