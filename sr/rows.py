"""A picture that comes from top to bottom: only the rows that are still needed are kept."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_LARGE = 1 << 24  # bytes


class RowWindow:
    """Rows of a picture, taken from an iterator when they are asked for, and forgotten when they lie above.

    Args:
        parts: the picture's rows in order, in parts (..., h, W) of any height.
    """

    def __init__(self, parts: Iterator[Tensor]) -> None:
        self._parts = parts
        self._kept: list[Tensor] = []
        self._top = self._bottom = 0  # rows that are kept

    def get(self, top: int, bottom: int) -> Tensor:
        """Rows ``top`` to ``bottom``, (..., bottom - top, W); ``top`` never lies above an earlier one."""
        while self._kept and self._top + self._kept[0].shape[-2] <= top:
            self._top += self._kept.pop(0).shape[-2]
        if self._kept and self._top < top:
            self._kept[0] = self._kept[0][..., top - self._top :, :]
            self._top = top
        while self._bottom < bottom:
            part = next(self._parts)
            self._bottom += part.shape[-2]
            if self._bottom > top:
                self._kept.append(part)
            else:
                self._top = self._bottom
        if len(self._kept) > 1:
            first = self._kept[0]
            rows = sum(part.shape[-2] for part in self._kept)
            joined = empty_apart((*first.shape[:-2], rows, first.shape[-1]), first)
            self._kept = [torch.cat(self._kept, -2, out=joined)]
        return self._kept[0][..., top - self._top : bottom - self._top, :]


def empty_apart(shape: Sequence[int], like: Tensor) -> Tensor:
    """``like.new_empty(shape)``; a large one on a CPU has pages of its own, which the system gets back with it.

    For what outlives a network's run: in the heap it would lie amid what the run leaves free; the next run would find
    room for its maps in other places, and the process grow with each.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < _LARGE:
        return like.new_empty(shape)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=like.dtype).view(*shape)
