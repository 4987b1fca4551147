"""Torch data sets over picture sets: random patches for training, whole pictures for validation."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sr.data.folders import PictureSet
from sr.errors import SRError

log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]


def read_pairs(items: Sequence[tuple[PictureSet, int]]) -> list[Pair]:
    """Decode pictures in a few threads.

    Args:
        items: (prepared set, index in it) of each picture.

    Returns:
        The pairs of :meth:`PictureSet.pair`, in the order of ``items``.

    Raises:
        SRError: the first picture that cannot be read, and how many more there are.
    """

    def read(item: tuple[PictureSet, int]) -> Pair | SRError:
        try:
            return item[0].pair(item[1])
        except SRError as exc:
            return exc

    with ThreadPoolExecutor(min(16, max(2, os.cpu_count() or 2))) as pool:
        results = list(pool.map(read, items))
    pairs = [r for r in results if not isinstance(r, SRError)]
    errors = [r for r in results if isinstance(r, SRError)]
    if errors:
        more = f"\n(and {len(errors) - 1} more pictures cannot be read)" if len(errors) > 1 else ""
        raise SRError(f"{errors[0]}{more}") from errors[0]
    return pairs


class PatchDataset(Dataset):
    """Random aligned patches, without end: sample ``i`` is a function of ``(seed, i)`` alone.

    So the order of reading, the number of workers and of devices, and an interruption change nothing. A picture is
    drawn with a probability proportional to its area, then a position, then one of the 8 symmetries of the square.

    A sample is ``{"lq": uint8 (3, gt_size/scale, gt_size/scale), "gt": uint8 (3, gt_size, gt_size)}``, RGB.
    """

    def __init__(
        self, sets: PictureSet | Sequence[PictureSet], scale: int, gt_size: int, seed: int = 0, cache: bool = True
    ) -> None:
        """List and check the pictures, without decoding any.

        Args:
            sets: where the pictures come from.
            scale: GT edge / LQ edge.
            gt_size: edge of a GT patch, a multiple of ``scale``.
            seed: at least 0.
            cache: :meth:`load` decodes every picture into memory once; otherwise each sample decodes its own.

        Raises:
            SRError: ``gt_size`` that ``scale`` does not divide or that no picture can hold, a negative seed, or what
                :meth:`PictureSet.prepare` finds.
        """
        self.sets = [sets] if isinstance(sets, PictureSet) else list(sets)
        self.scale = scale
        self.gt_size = gt_size
        self.seed = seed
        self.cache = cache
        self._pairs: list[Pair] | None = None
        if not self.sets:
            raise SRError("there is nothing to train on; give at least one data set as train")
        if seed < 0:
            raise SRError(f"seed must not be negative, but is {seed}")
        for pictures in self.sets:
            pictures.prepare(scale)
        if gt_size < scale or gt_size % scale:
            below = gt_size // scale * scale
            fits = f"{below} or {below + scale}" if below > 0 else f"{scale}"
            raise SRError(f"gt_size {gt_size} is not a multiple of scale {scale}; the nearest that fit: {fits}")
        every = [(s, i, min(s.gt_sizes[i])) for s in self.sets for i in range(len(s))]
        self._items = [(s, i) for s, i, edge in every if edge >= gt_size]
        if not self._items:
            largest = max(edge for _, _, edge in every)
            names = ", ".join(repr(s.name) for s in self.sets)
            raise SRError(
                f"gt_size {gt_size} is larger than every picture of {names}; "
                f"the largest possible is {largest // scale * scale}"
            )
        if len(self._items) < len(every):
            log.warning(
                "%d of %d pictures are smaller than gt_size %d in one direction and are left out",
                len(every) - len(self._items),
                len(every),
                gt_size,
            )
        areas = [h * w for h, w in (s.gt_sizes[i] for s, i in self._items)]
        self._ends = np.cumsum(np.array(areas, dtype=np.int64))

    def load(self) -> None:
        """Decode every picture into memory, if ``cache`` is set; forked workers share it.

        Raises:
            SRError: a picture cannot be read.
        """
        if self.cache and self._pairs is None:
            self._pairs = read_pairs(self._items)

    def __len__(self) -> int:
        """Number of pictures drawn from; an index beyond it is as good as one below."""
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((self.seed, index))
        k = int(np.searchsorted(self._ends, rng.integers(self._ends[-1]), side="right"))
        if self._pairs is None:
            pictures, i = self._items[k]
            lq, gt = pictures.pair(i)
        else:
            lq, gt = self._pairs[k]
        size = self.gt_size // self.scale
        y = int(rng.integers(lq.shape[-2] - size + 1))
        x = int(rng.integers(lq.shape[-1] - size + 1))
        symmetry = int(rng.integers(8))
        s = self.scale
        return {
            "lq": _turn(lq[:, y : y + size, x : x + size], symmetry),
            "gt": _turn(gt[:, y * s : (y + size) * s, x * s : (x + size) * s], symmetry),
        }


class PictureDataset(Dataset):
    """The whole pictures of a set, or one process's share of them.

    A sample is ``{"lq": uint8 (3, h, w), "gt": uint8 (3, H, W), "name": str, "counts": bool}``, RGB. Every process has
    equally many, since they wait for one another; where the pictures do not suffice, a process gets the first picture
    again, with ``counts`` false.
    """

    def __init__(self, pictures: PictureSet, rank: int = 0, world_size: int = 1) -> None:
        """Choose the pictures; nothing is decoded yet.

        Args:
            pictures: a prepared set.
            rank: number of this process.
            world_size: number of processes, among which the pictures are dealt out.
        """
        self.pictures = pictures
        self.own = len(range(rank, len(pictures), world_size))
        surplus = -(-len(pictures) // world_size) - self.own
        self.indices = [*range(rank, len(pictures), world_size), *[0] * surplus]
        self._pairs: list[Pair] | None = None

    def load(self) -> None:
        """Decode every picture into memory.

        Raises:
            SRError: a picture cannot be read.
        """
        if self._pairs is None:
            self._pairs = read_pairs([(self.pictures, i) for i in self.indices])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        i = self.indices[index]
        lq, gt = self.pictures.pair(i) if self._pairs is None else self._pairs[index]
        return {"lq": lq, "gt": gt, "name": self.pictures.names[i], "counts": index < self.own}


def _turn(x: Tensor, symmetry: int) -> Tensor:
    """One of the 8 symmetries of the square, as a contiguous copy: a mirror image for 4 and up, then quarter turns."""
    # By NumPy: a copy this small takes 0.1 ms, and many times that when torch divides it among threads on busy cores.
    array = x.numpy()
    if symmetry & 4:
        array = array[..., ::-1]
    return torch.from_numpy(np.rot90(array, symmetry & 3, (-2, -1)).copy(order="C"))
