"""What every loss term is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sr.errors import SRError


class Loss(nn.Module):
    """A term of the training loss: ``weight * term(sr, gt)``.

    Attributes:
        name: what the term is called in the log, ``train/<name>`` (unweighted there).
        weight: its factor in the sum.
        scale: the only scale of networks that it can train; ``None``: any.
    """

    name: str = "loss"
    scale: int | None = None

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        """The unweighted value, a scalar; both are (N, 3, H, W), float32, RGB, nominally [0, 1]."""
        raise TypeError(f"{type(self).__name__} does not define term()")

    def target(self, gt: Tensor, lq: Tensor | None) -> Tensor:
        """What ``sr`` is compared with."""
        return gt

    def forward(self, sr: Tensor, gt: Tensor, lq: Tensor | None = None) -> Tensor:
        """The unweighted value, in float32 whatever the precision of the run: its terms are smaller than its noise.

        Args:
            sr: (N, 3, scale*h, scale*w), the network's output.
            gt: same shape, [0, 1].
            lq: (N, 3, h, w), [0, 1], the network's input.

        Raises:
            SRError: ``sr`` and ``gt`` differ in shape.
        """
        if sr.shape != gt.shape:  # broadcasting would hide a wrong scale
            raise SRError(f"{self.name}: the network's output {tuple(sr.shape)} and the GT {tuple(gt.shape)} differ")
        with torch.autocast(sr.device.type, enabled=False):
            return self.term(sr.float(), self.target(gt.float(), None if lq is None else lq.float()))


class Frozen(nn.Module):
    """A network that a loss looks through: in float32 and evaluation mode, never trained, never saved.

    It follows the module that holds it to another device, but is no part of its parameters or its ``state_dict``.

    Args:
        network: takes and gives float32 tensors.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network = (network.eval().requires_grad_(False),)  # a tuple hides it from nn.Module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Frozen:
        network = self._network[0]
        here = next((p.device for p in network.parameters()), torch.device("cpu"))  # an ONNX file has none
        network.to(fn(torch.empty(0, device=here)).device)  # the device alone: a run in bfloat16 changes the dtype, too
        super()._apply(fn, recurse)
        return self

    def forward(self, *args: Any) -> Any:
        return self._network[0](*args)
