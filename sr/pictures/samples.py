"""Numbers of pictures that are neither 8 nor 16 bit: 32-bit integers and floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Samples:
    """Samples of any numeric type and range, decoded as float32 in [0, 1].

    Attributes:
        dtype: NumPy's name of the type in the file.
        low: the value that is decoded as 0.
        high: the value that is decoded as 1.
    """

    dtype: str
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def spanning(cls, dtype: str, low: float, high: float) -> Samples:
        """Of values from ``low`` to ``high``; those within [0, 1] stay what they are."""
        return cls(dtype, min(low, 0.0), max(high, 1.0))

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Values of the file as float32 in [0, 1]."""
        return ((values.astype(np.float64) - self.low) / (self.high - self.low)).astype(np.float32)

    def encoded(self, values: np.ndarray) -> np.ndarray:
        """The inverse of :meth:`decoded`, in the file's own type; integers are rounded and kept within its range."""
        found = values.astype(np.float64) * (self.high - self.low) + self.low
        kind = np.dtype(self.dtype)
        if kind.kind in "iu":
            found = np.rint(found).clip(np.iinfo(kind).min, np.iinfo(kind).max)
        return found.astype(kind)
