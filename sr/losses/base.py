"""What every loss term is."""

from __future__ import annotations

from torch import Tensor, nn

from sr.errors import SRError


class Loss(nn.Module):
    """A term of the training loss: ``weight * term(sr, gt)``.

    Attributes:
        name: what the term is called in the log, ``train/<name>`` (unweighted there).
        weight: its factor in the sum.
    """

    name: str = "loss"

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def term(self, sr: Tensor, gt: Tensor) -> Tensor:
        """The unweighted value, a scalar; ``sr`` and ``gt`` are (N, 3, H, W), RGB, nominally [0, 1]."""
        raise TypeError(f"{type(self).__name__} does not define term()")

    def forward(self, sr: Tensor, gt: Tensor) -> Tensor:
        if sr.shape != gt.shape:  # broadcasting would hide a wrong scale
            raise SRError(f"{self.name}: the network's output {tuple(sr.shape)} and the GT {tuple(gt.shape)} differ")
        return self.term(sr, gt)
