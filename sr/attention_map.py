"""Where a pixel of the input looked: the attention weights of SparseSR, as a map over the picture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sr.archs.sparsesr import SparseAttention, from_windows, to_windows
from sr.errors import SRError
from sr.network import SRNetwork


@torch.no_grad()
def attention_map(network: SRNetwork, lq: Tensor, row: int, column: int) -> Tensor:
    """How much a pixel attends to every other one, averaged over the attention layers.

    Args:
        network: a SparseSR with attention.
        lq: (3, H, W), float, [0, 1].
        row, column: the pixel, in input pixels.

    Returns:
        (H, W); sums to the texture gate of the pixel's window: to 1 where attention counts in full, 0 in a flat window.

    Raises:
        SRError: the network has no such layer, or the pixel lies outside.
    """
    layers = [module for module in network.modules() if isinstance(module, SparseAttention)]
    if not layers:
        raise SRError(f"{type(network).__name__} has no sparse attention to look at")
    height, width = lq.shape[-2:]
    if not (0 <= row < height and 0 <= column < width):
        raise SRError(f"row {row}, column {column} lies outside the picture of {height} x {width} pixels")
    total = lq.new_zeros(height, width)

    def add(layer: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, tuple[Tensor, Tensor] | None]) -> None:
        assert isinstance(layer, SparseAttention)
        if output[1] is None:  # no window attends to any
            return
        x, gate, (index, _), w = inputs[0], inputs[1], output[1], layer.window
        match, _ = layer.match_and_value(x)
        windows = to_windows(match, w).flatten(0, 2)  # (windows, T, match_dim)
        own = row // w * (x.shape[-1] // w) + column // w
        query = windows[own, row % w * w + column % w].view(layer.heads, -1)
        keys = windows[index[own]].flatten(0, 1).view(-1, layer.heads, query.shape[-1])
        weights = torch.einsum("hc,thc->ht", query, keys).softmax(-1).mean(0).view(len(index[own]), -1)
        seen = torch.zeros(windows.shape[:2]).index_add(0, index[own], weights * gate[own])
        grid = seen.view(1, x.shape[-2] // w, x.shape[-1] // w, -1, 1)
        total.add_(from_windows(grid, w)[0, 0, :height, :width] / len(layers))

    handles = [layer.register_forward_hook(add) for layer in layers]
    try:
        network(lq[None])
    finally:
        for handle in handles:
            handle.remove()
    return total
