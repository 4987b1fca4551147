"""Pictures for training and validation: sets of pairs, patches, and the Lightning data module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sr.data.folders import BenchmarkFolder, GTFolder, PairedFolder, PictureSet, check_names, find_pictures
from sr.data.patches import PatchDataset, PictureDataset
from sr.data.streaming import StreamingGTDataset

if TYPE_CHECKING:
    from sr.data.module import SRDataModule

__all__ = [
    "BenchmarkFolder",
    "GTFolder",
    "PairedFolder",
    "PatchDataset",
    "PictureDataset",
    "PictureSet",
    "SRDataModule",
    "StreamingGTDataset",
    "check_names",
    "find_pictures",
]


def __getattr__(name: str) -> Any:
    if name == "SRDataModule":  # imports lightning, which evaluating and upscaling do without
        from sr.data.module import SRDataModule

        return SRDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
