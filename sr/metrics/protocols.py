"""What the numbers of a paper's table mean: the choices behind a PSNR, under the names of who uses them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sr.metrics.functional import psnr_and_ssim


@dataclass(frozen=True)
class Protocol:
    """How pictures are compared; whatever it is, values are clamped and computed in float64.

    Attributes:
        name: what tables print beside the numbers.
        crop_border: pixels shaved off each side before comparing; ``None``: as many as the scale.
        test_y_channel: compare the luma Y rather than R, G and B.
        full_range: JPEG's Y in place of MATLAB's.
        rounded: round to 8 bits first.
        pooled: PSNR of the squared error of all pixels of a set, rather than the mean of per-picture values. SSIM is
            a mean of per-picture values either way.
    """

    name: str
    crop_border: int | None = None
    test_y_channel: bool = True
    full_range: bool = False
    rounded: bool = True
    pooled: bool = False

    def crop(self, scale: int) -> int:
        """Pixels shaved off each side at a scale."""
        return scale if self.crop_border is None else self.crop_border

    def measure(self, sr: Tensor, gt: Tensor, scale: int) -> tuple[Tensor, Tensor]:
        """PSNR in dB and SSIM of each picture, (N,) float64 each; see :func:`sr.metrics.psnr` for the arguments."""
        return psnr_and_ssim(
            sr,
            gt,
            crop_border=self.crop(scale),
            test_y_channel=self.test_y_channel,
            full_range=self.full_range,
            rounded=self.rounded,
        )

    def describe(self, scale: int) -> str:
        """All choices in words, e.g. ``clamped, 8 bit, crop 4, MATLAB's Y, float64, mean of per-picture values``."""
        return ", ".join(
            (
                "clamped",
                "8 bit" if self.rounded else "not rounded",
                f"crop {self.crop(scale)}",
                ("full-range Y" if self.full_range else "MATLAB's Y") if self.test_y_channel else "RGB",
                "float64",
                "squared error pooled over the set" if self.pooled else "mean of per-picture values",
            )
        )

    def but(self, **changes: Any) -> Protocol:
        """The protocol with other choices, which its name then tells."""
        changes = {key: value for key, value in changes.items() if value != getattr(self, key)}
        words = [f"{key}={value}" for key, value in changes.items()]
        return replace(self, name=f"{self.name}({', '.join(words)})", **changes) if words else self


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("sisr-y"),  # nearly every paper since EDSR
        Protocol("ntire-rgb", test_y_channel=False),  # the NTIRE challenges on efficient super-resolution
        Protocol("crop4-y", crop_border=4),  # ASSANet's tables, also for x2 and x3
    )
}


def every_protocol(scale: int) -> list[Protocol]:
    """The matrix of RGB / MATLAB's Y / full-range Y x crop 0 / scale / 4 x rounded or not."""
    colours = {"RGB": (False, False), "MATLAB's Y": (True, False), "full-range Y": (True, True)}
    return [
        Protocol(
            f"{colour}, crop {crop}, {'8 bit' if rounded else 'not rounded'}",
            crop_border=crop,
            test_y_channel=luma,
            full_range=full,
            rounded=rounded,
        )
        for colour, (luma, full) in colours.items()
        for crop in dict.fromkeys((0, scale, 4))
        for rounded in (True, False)
    ]
