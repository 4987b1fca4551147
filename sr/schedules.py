"""Learning-rate schedules as functions of the fraction of the run that is done.

The number of steps is written once, in ``trainer.max_steps``; a schedule stretches with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sr.errors import SRError


class Schedule:
    """Maps progress in [0, 1] to a factor of the optimiser's learning rate."""

    def __call__(self, progress: float) -> float:
        return 1.0


class Cosine(Schedule):
    """Linear warm-up, then half a cosine down to ``final``.

    Args:
        warmup: fraction of the run spent on going from 0 to the full rate.
        final: factor at the end.
    """

    def __init__(self, warmup: float = 0.0, final: float = 0.0) -> None:
        if not 0 <= warmup < 1:
            raise SRError(f"warmup is a fraction of the run in [0, 1), not {warmup}")
        self.warmup, self.final = warmup, final

    def __call__(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        done = min(1.0, (progress - self.warmup) / (1 - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


class MultiStep(Schedule):
    """Multiplies the rate by ``gamma`` at each milestone.

    Args:
        milestones: increasing fractions of the run, e.g. ``[0.5, 0.8, 0.9, 0.95]``.
        gamma: the factor.
    """

    def __init__(self, milestones: Sequence[float], gamma: float = 0.5) -> None:
        if any(not 0 < m < 1 for m in milestones):
            raise SRError(f"milestones are fractions of the run between 0 and 1, not {list(milestones)}")
        self.milestones, self.gamma = sorted(milestones), gamma

    def __call__(self, progress: float) -> float:
        return float(self.gamma ** sum(progress >= m for m in self.milestones))
