"""The game between a network and a discriminator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from sr.losses.discriminator import UNetDiscriminator
from sr.schedules import Schedule

Game = Literal["vanilla", "hinge", "relativistic"]


@final
class Adversarial(nn.Module):
    """A discriminator, the game it plays with the network, and how it learns.

    With logits ``r`` of the ground truth and ``f`` of the output, sigmoid cross-entropy H, and means over all pixels,
    the discriminator minimises, and the network minimises:

    * ``vanilla``: ``H(r, 1) + H(f, 0)``; ``H(f, 1)``. "Generative Adversarial Networks" (Goodfellow et al., 2014),
      the form that does not saturate.
    * ``hinge``: ``max(0, 1 - r) + max(0, 1 + f)``; ``-f``. "Geometric GAN" (Lim and Ye, 2017).
    * ``relativistic``: ``H(r - mean f, 1) + H(f - mean r, 0)``; ``H(f - mean r, 1) + H(r - mean f, 0)``. "The
      relativistic discriminator" (Jolicoeur-Martineau, ICLR 2019), as in ESRGAN. The means are those of one device.

    Args:
        optimizer: called with the discriminator's parameters.
        weight: factor of the network's term in the sum of its losses.
        game: which losses the two have.
        discriminator: default: :class:`UNetDiscriminator` with 64 features.
        scheduler: factor of the discriminator's learning rate. Default: the network's schedule.

    The parameters are frozen, but for the moment in which someone takes the gradient of :meth:`discriminator_loss`:
    so the network's term leaves no gradients here, and data-parallel training does not wait for any.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable], Optimizer],
        weight: float = 0.1,
        game: Game = "vanilla",
        discriminator: UNetDiscriminator | None = None,
        scheduler: Schedule | None = None,
    ) -> None:
        super().__init__()
        if discriminator is None:
            discriminator = UNetDiscriminator()
        self.discriminator = discriminator.to(memory_format=torch.channels_last)
        self.weight = weight
        self.game = game
        self.schedule = scheduler
        self.make_optimizer = optimizer
        self.requires_grad_(False)

    def forward(self, sr: Tensor, gt: Tensor) -> Tensor:
        """The network's unweighted term, a scalar; ``sr`` and ``gt`` are (N, 3, H, W), RGB, nominally [0, 1]."""
        fake = self.discriminator(sr).float()
        if self.game == "vanilla":
            return F.softplus(-fake).mean()
        if self.game == "hinge":
            return -fake.mean()
        with torch.no_grad():
            real = self.discriminator(gt).float()
        return _relativistic(fake, real)

    def discriminator_loss(self, sr: Tensor, gt: Tensor) -> Tensor:
        """What the discriminator minimises, a scalar that depends on its parameters alone; arguments as above."""
        real, fake = self.discriminator(torch.cat([gt.to(sr.dtype), sr.detach()])).float().chunk(2)
        if self.game == "vanilla":
            return F.softplus(-real).mean() + F.softplus(fake).mean()
        if self.game == "hinge":
            return F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        return _relativistic(real, fake)


def _relativistic(better: Tensor, worse: Tensor) -> Tensor:
    """Cross-entropy of ``better`` looking more real than the average of ``worse``, and the reverse."""
    return F.softplus(worse.mean() - better).mean() + F.softplus(worse - better.mean()).mean()
