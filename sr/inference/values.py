"""Samples of pictures: what stands for 1, and the way there and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sr.errors import SRError


def white(dtype: np.dtype | torch.dtype) -> float:
    """The sample that stands for 1."""
    name = str(dtype).removeprefix("torch.")
    if name in ("uint8", "uint16"):
        return 255.0 if name == "uint8" else 65535.0
    if not (dtype.is_floating_point if isinstance(dtype, torch.dtype) else np.issubdtype(dtype, np.floating)):
        raise SRError(f"a picture's samples are uint8, uint16 or float, not {name}")
    return 1.0


def to_samples(part: Tensor, dtype: np.dtype, top: float) -> np.ndarray:
    """(1, C, h, W) in [0, 1] -> (h, W, C); rounded, not truncated: white stays white."""
    values = part[0].permute(1, 2, 0).cpu().numpy()
    if top > 1:
        values = np.floor(values * np.float32(top) + np.float32(0.5))
    return values.astype(dtype)


def checked(part: Tensor) -> Tensor:
    """The picture itself; refuses values that are far out of [0, 1]."""
    low, high = (value.item() for value in part.aminmax())
    if not (low > -1 and high < 2):  # NaN is neither
        raise SRError(f"a float picture lies in [0, 1]; this one has values from {low:.3g} to {high:.3g}")
    return part
