"""Metrics as torchmetrics classes: means over all pictures of a set, whatever the batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from sr.metrics import functional


class PictureMean(Metric):
    """Mean of a per-picture value over all pictures seen, whatever the batch size and the number of processes.

    Args:
        crop_border: pixels to shave off each side; papers shave ``scale``.
        kwargs: passed on to :class:`torchmetrics.Metric`.

    Attributes:
        total: sum of the finite values, float64.
        count: number of finite values.
        identical: number of infinite values: identical pictures, which are counted and not averaged.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    total: Tensor
    count: Tensor
    identical: Tensor

    def __init__(self, *, crop_border: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.crop_border = crop_border
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("identical", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def measure(self, sr: Tensor, gt: Tensor) -> Tensor:
        """Value of each picture, (N,), float64."""
        raise TypeError(f"{type(self).__name__} does not define measure()")

    def update(self, sr: Tensor, gt: Tensor) -> None:
        """Add a batch; shapes, ranges and errors as in :mod:`sr.metrics.functional`.

        Args:
            sr: prediction, (N, 1 or 3, H, W), float in [0, 1] or uint8, RGB.
            gt: ground truth, the same shape.
        """
        values = self.measure(sr.detach(), gt).to(self.total.device)
        infinite = values.isinf()
        self.total += values.masked_fill(infinite, 0).sum()
        self.count += (~infinite).sum()
        self.identical += infinite.sum()

    def compute(self) -> Tensor:
        """Mean of the finite values, float64: inf if all pictures were identical, nan if there were none."""
        if self.count == 0:
            return torch.full_like(self.total, float("inf" if self.identical > 0 else "nan"))
        return self.total / self.count

    def set_dtype(self, dst_type: str | torch.dtype) -> PictureMean:
        """Does nothing: the states stay float64 (half of them would stop counting at 2,048)."""
        return self

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> PictureMean:
        # torchmetrics guards its states against .half() and friends, yet not against .to(dtype), which Lightning's
        # "bf16-true" uses. So the states follow a module to its device only.
        self._computed = None
        super()._apply(fn, exclude_state=tuple(self._defaults))
        if self.device.type != "mps":  # has no float64; the states stay on the CPU
            for name, default in self._defaults.items():
                self._defaults[name] = default.to(self.device)  # type: ignore[union-attr]
                setattr(self, name, getattr(self, name).to(self.device))
        return self


class _Fidelity(PictureMean):
    def __init__(
        self,
        *,
        crop_border: int = 0,
        test_y_channel: bool = True,
        full_range: bool = False,
        rounded: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(crop_border=crop_border, **kwargs)
        self.how: dict[str, Any] = {
            "crop_border": crop_border,
            "test_y_channel": test_y_channel,
            "full_range": full_range,
            "rounded": rounded,
        }


class PSNR(_Fidelity):
    """Mean of :func:`sr.metrics.psnr` over pictures, in dB; takes its keyword arguments."""

    def measure(self, sr: Tensor, gt: Tensor) -> Tensor:
        """PSNR of each picture, (N,), float64, dB."""
        return functional.psnr(sr, gt, **self.how)


class SSIM(_Fidelity):
    """Mean of :func:`sr.metrics.ssim` over pictures; takes its keyword arguments."""

    def measure(self, sr: Tensor, gt: Tensor) -> Tensor:
        """SSIM of each picture, (N,), float64."""
        return functional.ssim(sr, gt, **self.how)
