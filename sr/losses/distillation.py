"""A small network learns from a large one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.checkpoint import load
from sr.errors import SRError
from sr.losses.base import Frozen, Loss


class DistillationLoss(Loss):
    """Mean absolute difference to the output of a trained network, the teacher, for the same input.

    "Distilling the Knowledge in a Neural Network" (Hinton et al., 2015), for pictures.

    Args:
        teacher: a weights file, or the name of installed or published weights; whatever ``sr.load`` takes.
        weight: factor of the term in the sum.

    Raises:
        SRError: the teacher cannot be loaded.
    """

    name = "distillation"

    def __init__(self, teacher: str, weight: float = 1.0) -> None:
        super().__init__(weight)
        network = load(teacher)
        self.scale = network.scale
        self.teacher = Frozen(network)

    @torch.no_grad()
    def target(self, gt: Tensor, lq: Tensor | None) -> Tensor:
        if lq is None:
            raise SRError("DistillationLoss needs the network's input: loss(sr, gt, lq)")
        output: Tensor = self.teacher(lq)
        return output

    def term(self, sr: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(sr, target)
