"""A picture that comes from top to bottom: only the rows that are still needed are kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


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
        while self._bottom < bottom:
            part = next(self._parts)
            self._bottom += part.shape[-2]
            if self._bottom > top:
                self._kept.append(part)
            else:
                self._top = self._bottom
        if len(self._kept) > 1:
            self._kept = [torch.cat(self._kept, -2)]
        return self._kept[0][..., top - self._top : bottom - self._top, :]
