"""SparseSR with one design decision taken back, for the ablation table in ``sr/archs/README.md``.

Used from the command line: ``PYTHONPATH=tests/archs python scripts/train.py ... --model.network
sparsesr_ablations.Ablation --model.network.without shared_choice``.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.archs.sparsesr import Choice, SparseAttention, SparseSR


class OwnChoice(SparseAttention):
    """Each layer chooses its windows anew."""

    def forward(
        self, x: Tensor, gate: Tensor, choice: Choice | None, kept: Tensor | None
    ) -> tuple[Tensor, Choice | None]:
        return super().forward(x, gate, None, kept)


class Ungated(SparseAttention):
    """What was found counts in full, in flat windows as well."""

    def forward(
        self, x: Tensor, gate: Tensor, choice: Choice | None, kept: Tensor | None
    ) -> tuple[Tensor, Choice | None]:
        return super().forward(x, torch.ones_like(gate), choice, kept)


class Convolution(nn.Module):
    """A residual block with as many parameters as the attention layer that it replaces."""

    def __init__(self, dim: int, parameters: int) -> None:
        super().__init__()
        hidden = round((parameters - dim) / (18 * dim + 1))
        self.conv1 = nn.Conv2d(dim, hidden, 3, padding=1)
        self.conv2 = nn.Conv2d(hidden, dim, 3, padding=1)

    def forward(self, x: Tensor, gate: Tensor, choice: None, kept: Tensor | None) -> tuple[Tensor, None]:
        return x + self.conv2(F.relu(self.conv1(x))), None


class Ablation(SparseSR):
    """A SparseSR that goes without ``without``; the other arguments are SparseSR's."""

    def __init__(
        self,
        *,
        scale: int = 4,
        dim: int = 48,
        without: Literal["shared_choice", "gate", "attention"] = "attention",
    ) -> None:
        self.hparams.update(SparseSR(scale=scale, dim=dim).hparams)
        super().__init__(scale=scale, dim=dim)
        for group in self.groups:
            attention = group.mixer
            if without == "attention":
                group.mixer = Convolution(dim, sum(p.numel() for p in attention.parameters()))
            else:
                attention.__class__ = {"shared_choice": OwnChoice, "gate": Ungated}[without]
