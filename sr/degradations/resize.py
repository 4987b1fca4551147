"""Changing the size of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from sr.degradations.base import Draws, Step, check_probabilities, check_range
from sr.degradations.pieces import by_pieces
from sr.errors import SRError
from sr.resize import imresize

Mode = Literal["area", "bilinear", "bicubic", "matlab"]


def resize(x: Tensor, size: tuple[int, int], mode: Mode) -> Tensor:
    """Resize (N, C, H, W) to ``size`` (height, width).

    ``area``, ``bilinear`` and ``bicubic`` (a = -0.75) are PyTorch's, without antialiasing, as Real-ESRGAN uses them;
    ``matlab`` is the antialiased bicubic of :func:`sr.resize.imresize`.
    """
    if tuple(x.shape[-2:]) == size:
        return x
    if mode == "matlab":
        return imresize(x, size=size)
    return by_pieces(partial(F.interpolate, size=size, mode=mode), x, size=size)


class RandomResize(Step):
    """Up, down or neither, by a factor and with a mode that are drawn for the batch, whose pictures share a size.

    Args:
        up_down_keep_prob: probabilities of growing, shrinking, and keeping the size.
        factor_range: smallest and largest factor, on either side of 1; uniform between 1 and either.
        modes: equally likely.
        relative_to: what is multiplied by the factor: the ``input``'s size, or that of the ``lq`` to be made (which a
            kept size then is).

    Raises:
        SRError: wrong probabilities or ranges, no mode.
    """

    def __init__(
        self,
        up_down_keep_prob: tuple[float, float, float],
        factor_range: tuple[float, float],
        modes: list[Mode],
        relative_to: Literal["input", "lq"] = "input",
    ) -> None:
        self.probabilities = check_probabilities("RandomResize's up_down_keep_prob", up_down_keep_prob)
        self.factor_range = check_range("RandomResize's factor_range", factor_range, 0.01)
        if not self.factor_range[0] <= 1 <= self.factor_range[1]:
            raise SRError(f"RandomResize's factor_range has to contain 1, unlike {list(factor_range)}")
        self.modes = check_modes("RandomResize", modes)
        self.relative_to = relative_to

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        low, high = self.factor_range
        low, high = ((1, high), (low, 1), (1, 1))[draws.choice(self.probabilities)]
        factor = draws.number(low, high)
        size = x.shape[-2:] if self.relative_to == "input" else draws.lq_size
        return resize(x, scaled(size, factor), draw_mode(self.modes, draws))


class Resize(Step):
    """To the size of the LQ, with a mode that is drawn for the batch.

    Args:
        modes: equally likely.

    Raises:
        SRError: no mode.
    """

    def __init__(self, modes: list[Mode]) -> None:
        self.modes = check_modes("Resize", modes)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        return resize(x, draws.lq_size, draw_mode(self.modes, draws))


def scaled(size: Sequence[int], factor: float) -> tuple[int, int]:
    """The size (height, width) times ``factor``, rounded down, of at least one pixel."""
    height, width = size
    return max(1, int(height * factor)), max(1, int(width * factor))


def check_modes(name: str, modes: Sequence[Mode]) -> list[Mode]:
    """The modes as a list.

    Raises:
        SRError: there is none, or an unknown one.
    """
    known = ("area", "bilinear", "bicubic", "matlab")
    if not modes or any(mode not in known for mode in modes):
        raise SRError(f"{name}'s modes are one or more of {', '.join(known)}, not {list(modes)}")
    return list(modes)


def draw_mode(modes: Sequence[Mode], draws: Draws) -> Mode:
    """One of the modes, all equally likely."""
    return modes[draws.choice([1 / len(modes)] * len(modes))]
