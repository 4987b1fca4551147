"""The contract that every super-resolution network of the project keeps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.errors import SRError


class SRNetwork(nn.Module):
    """Base class: RGB in [0, 1], any picture size, an integer scale.

    A subclass takes keyword-only arguments with defaults, calls ``super().__init__(scale=...)`` and
    writes :meth:`upscale`. The base class pads the input to a size the body accepts, crops the result,
    and records the constructor's arguments in ``hparams``, so that a weights file can rebuild the network.

    Attributes (a subclass overrides them on the class, or in ``__init__`` where they depend on arguments):
        arch: name of the class.
        hparams: every constructor argument with its value, defaults included.
        scale: output edge / input edge.
        in_channels: channels of the input and of the output.
        multiple_of: height and width that the body sees are multiples of this.
        min_size: smallest height and width that the body accepts.
        receptive_field: how far, in input pixels, one output pixel looks in each direction; ``None`` if the
            whole picture influences every pixel. The tiled upscaler takes its halo from it.
        supports_bf16: the network gives finite and useful results under bfloat16 autocast.
    """

    arch: str
    hparams: dict[str, Any]
    multiple_of: int = 1
    min_size: int = 1
    receptive_field: int | None = None
    supports_bf16: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> SRNetwork:
        # Recorded here rather than in __init__, so that no subclass can forget it. copy.deepcopy calls
        # __new__ without arguments and then restores the original's __dict__, hparams included.
        self = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs)
        bound.apply_defaults()
        self.__dict__["arch"] = cls.__name__  # FSDP exchanges the class
        self.__dict__["hparams"] = dict(list(bound.arguments.items())[1:])  # all but self
        return self

    def __init__(self, *, scale: int, in_channels: int = 3) -> None:
        super().__init__()
        if not isinstance(scale, int) or isinstance(scale, bool) or scale < 1:
            raise SRError(f"scale must be a whole number of at least 1, not {scale!r}")
        self.scale = scale
        self.in_channels = in_channels

    def upscale(self, lq: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, scale*H, scale*W); H and W fit ``multiple_of`` and ``min_size``."""
        raise TypeError(f"{type(self).__name__} does not define upscale()")

    def forward(self, lq: Tensor) -> Tensor:
        """Upscale a batch.

        Args:
            lq: (N, in_channels, H, W), float, [0, 1], RGB, any H, W >= 1.

        Returns:
            (N, in_channels, scale*H, scale*W), not clamped.
        """
        if lq.dim() != 4 or lq.shape[1] != self.in_channels:
            raise SRError(
                f"{type(self).__name__} takes a batch of shape (N, {self.in_channels}, H, W), not {tuple(lq.shape)}"
            )
        if self.multiple_of == 1 and self.min_size == 1:
            return self.upscale(lq)
        h, w = lq.shape[-2:]
        right, below = self._padding(w), self._padding(h)
        # Unconditional, and cropped by a negative pad rather than a slice: a branch or a slice whose end may be the
        # whole edge would tie an exported graph to the size it was traced with.
        sr = self.upscale(F.pad(lq, (0, right, 0, below), mode="replicate"))
        return F.pad(sr, (0, -right * self.scale, 0, -below * self.scale))

    def _padding(self, size: int) -> int:
        """Pixels to add to an edge of ``size`` pixels: up to ``min_size``, then to the next multiple."""
        short = 0 if self.min_size == 1 else cast(int, torch.sym_max(self.min_size - size, 0))
        return short + (-(size + short)) % self.multiple_of

    def fuse(self) -> SRNetwork:
        """Fold what only training needs into fewer operations, in place; the function stays the same."""
        return self

    @classmethod
    def infer_hparams(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Constructor arguments, from keys and shapes of a bare ``state_dict``; ``None`` if it is another network's.

        Only architectures whose weights are published without hyper-parameters need this.
        """
        return None

    @classmethod
    def remap(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Published key names -> this implementation's; called on what :meth:`infer_hparams` has recognised."""
        return dict(state_dict)

    @classmethod
    def upgrade(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights as an earlier version of the project wrote them -> as this one has them."""
        return dict(state_dict)
