"""Torch data sets over picture sets: random patches for training, whole pictures for validation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sr.data.folders import OnError, PictureSet
from sr.data.pack import Pack, as_picture, open_pack
from sr.errors import SRError

log = logging.getLogger(__name__)


class PatchDataset(Dataset):
    """Random aligned patches, without end: sample ``i`` is a function of ``(seed, i)`` alone.

    So the order of reading, the number of workers and of devices, and an interruption change nothing. A picture is
    drawn with a probability proportional to its area, then a position, then one of the 8 symmetries of the square.

    A sample is ``{"lq": uint8 (3, gt_size/scale, gt_size/scale), "gt": uint8 (3, gt_size, gt_size), "index": int}``,
    RGB; without ``lq`` if it is left to a degradation.
    """

    def __init__(
        self,
        sets: PictureSet | Sequence[PictureSet],
        scale: int,
        gt_size: int,
        seed: int = 0,
        *,
        lq: bool = True,
        on_error: OnError = "raise",
    ) -> None:
        """List and check the pictures, without decoding any.

        Args:
            sets: where the pictures come from.
            scale: GT edge / LQ edge.
            gt_size: edge of a GT patch, a multiple of ``scale``.
            seed: at least 0.
            lq: whether samples have an LQ patch.
            on_error: whether a picture that cannot be read is an error or left out.

        Raises:
            SRError: ``gt_size`` that ``scale`` does not divide or that no picture can hold, a negative seed, or what
                :meth:`PictureSet.prepare` finds.
        """
        self.sets = [sets] if isinstance(sets, PictureSet) else list(sets)
        self.scale = scale
        self.gt_size = gt_size
        self.seed = seed
        self.lq = lq
        self._packs: list[Pack] | None = None
        self._broken: set[tuple[PictureSet, int]] = set()
        if not self.sets:
            raise SRError("there is nothing to train on; give at least one data set as train")
        if seed < 0:
            raise SRError(f"seed must not be negative, but is {seed}")
        for pictures in self.sets:
            pictures.prepare(scale, on_error)
        if gt_size < scale or gt_size % scale:
            below = gt_size // scale * scale
            fits = f"{below} or {below + scale}" if below > 0 else f"{scale}"
            raise SRError(f"gt_size {gt_size} is not a multiple of scale {scale}; the nearest that fit: {fits}")
        self._choose()

    def _choose(self) -> None:
        """Which pictures are large enough, and how much area they have up to each."""
        every = [(s, i, min(size)) for s, pictures in enumerate(self.sets) for i, size in enumerate(pictures.gt_sizes)]
        self._items = [(s, i) for s, i, edge in every if edge >= self.gt_size]
        if not self._items:
            largest = max(edge for _, _, edge in every)
            names = ", ".join(repr(s.name) for s in self.sets)
            raise SRError(
                f"gt_size {self.gt_size} is larger than every picture of {names}; "
                f"the largest possible is {largest // self.scale * self.scale}"
            )
        if len(self._items) < len(every):
            log.warning(
                "%d of %d pictures are smaller than gt_size %d in one direction and are left out",
                len(every) - len(self._items),
                len(every),
                self.gt_size,
            )
        areas = [h * w for h, w in (self.sets[s].gt_sizes[i] for s, i in self._items)]
        self._ends = np.cumsum(np.array(areas, dtype=np.int64))

    def pack(self, folder: Path | None = None) -> None:
        """Decode every picture into packs on disk, or find them there; without, each sample decodes a picture.

        Args:
            folder: where packs are kept; default: :func:`~sr.data.pack.default_folder`.

        Raises:
            SRError: a picture cannot be read, or a pack not be written.
        """
        if self._packs is None:
            before = [len(s) for s in self.sets]
            self._packs = [open_pack(s, folder, self.lq) for s in self.sets]
            if before != [len(s) for s in self.sets]:
                self._choose()

    def __len__(self) -> int:
        """Number of pictures drawn from; an index beyond it is as good as one below."""
        return len(self._items)

    def name(self, index: int) -> str:
        """Which picture sample ``index`` is cut from, as ``set/picture``."""
        s, i = self._draw(np.random.default_rng((self.seed, index)))
        return f"{self.sets[s].name}/{self.sets[s].names[i]}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {k: v[0] for k, v in self.batch([index]).items()} | {"index": index}

    def batch(self, indices: Sequence[int], gt_size: int | None = None) -> dict[str, torch.Tensor]:
        """Several samples, stacked: ``lq`` and ``gt`` (N, 3, h, w), ``index`` (N,).

        Args:
            indices: which.
            gt_size: edge of these patches, a multiple of the scale and at most the data set's; default: the data set's.
        """
        gt_size = gt_size or self.gt_size
        count, size, step = len(indices), gt_size // self.scale, self.scale
        gts = np.empty((count, 3, gt_size, gt_size), np.uint8)
        lqs = np.empty((count, 3, size, size), np.uint8)
        for n, index in enumerate(indices):
            rng = np.random.default_rng((self.seed, index))
            gt, lq = self._read(rng)
            y = int(rng.integers(gt.shape[0] // step - size + 1))
            x = int(rng.integers(gt.shape[1] // step - size + 1))
            symmetry = int(rng.integers(8))
            cut_patch(gt, y * step, x * step, symmetry, gts[n])
            if lq is not None:
                cut_patch(lq, y, x, symmetry, lqs[n])
        batch = {"index": torch.tensor(indices), "gt": torch.from_numpy(gts)}
        return batch | {"lq": torch.from_numpy(lqs)} if self.lq else batch

    def _draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """(set, picture), with a probability proportional to area."""
        return self._items[int(np.searchsorted(self._ends, rng.integers(self._ends[-1]), side="right"))]

    def _read(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """GT and LQ of a random picture, (H, W, 3)."""
        while True:
            s, i = self._draw(rng)
            if self._packs is not None:
                return self._packs[s].gt(i), self._packs[s].lq(i) if self.lq else None
            pictures = self.sets[s]
            try:
                if not self.lq:
                    return _array(pictures.read_gt(i)), None
                lq, gt = pictures.pair(i)
                return _array(gt), _array(lq)
            except SRError as e:  # another draw, the same whenever this sample is asked for
                if pictures.on_error == "raise":
                    raise
                if (pictures, i) not in self._broken:
                    self._broken.add((pictures, i))
                    log.warning("left out: %s", e)
                if len(self._broken) == len(self._items):
                    raise SRError(f"no picture of {pictures.name!r} can be read, e.g. {e}") from e


class PictureDataset(Dataset):
    """The whole pictures of a set, or one process's share of them.

    A sample is ``{"lq": uint8 (3, h, w), "gt": uint8 (3, H, W), "name": str, "counts": bool}``, RGB. Every process has
    equally many, since they wait for one another; where the pictures do not suffice, a process gets the first picture
    again, with ``counts`` false.
    """

    def __init__(self, pictures: PictureSet, rank: int = 0, world_size: int = 1, pack: Pack | None = None) -> None:
        """Choose the pictures; nothing is decoded yet.

        Args:
            pictures: a prepared set.
            rank: number of this process.
            world_size: number of processes, among which the pictures are dealt out.
            pack: the set's pack; without, pictures are decoded when they are asked for.
        """
        self.pictures = pictures
        self.own = len(range(rank, len(pictures), world_size))
        surplus = -(-len(pictures) // world_size) - self.own
        self.indices = [*range(rank, len(pictures), world_size), *[0] * surplus]
        self._pack = pack

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        i = self.indices[index]
        if self._pack is None:
            lq, gt = self.pictures.pair(i)
        else:
            lq, gt = as_picture(self._pack.lq(i)), as_picture(self._pack.gt(i))
        return {"lq": lq, "gt": gt, "name": self.pictures.names[i], "counts": index < self.own}


def _array(picture: torch.Tensor) -> np.ndarray:
    """(3, H, W) -> (H, W, 3)."""
    return picture.numpy().transpose(1, 2, 0)


def cut_patch(picture: np.ndarray, y: int, x: int, symmetry: int, out: np.ndarray) -> np.ndarray:
    """Copy a square of a picture in one of its 8 symmetries: a mirror image for 4 and up, then quarter turns.

    Args:
        picture: uint8 (H, W, 3).
        y: top row of the square.
        x: left column.
        symmetry: 0 to 7.
        out: uint8 (3, size, size), filled and returned.
    """
    # By NumPy: a copy this small takes 0.04 ms, and many times that when torch divides it among threads on busy cores.
    # First as it lies in memory: turning while reading a mapped file takes half as long again.
    size = out.shape[1]
    patch = np.ascontiguousarray(picture[y : y + size, x : x + size]).transpose(2, 0, 1)
    if symmetry & 4:
        patch = patch[:, :, ::-1]
    # np.rot90 spends 0.01 ms on its arguments.
    match symmetry & 3:
        case 1:
            patch = patch.swapaxes(1, 2)[:, ::-1]
        case 2:
            patch = patch[:, ::-1, ::-1]
        case 3:
            patch = patch.swapaxes(1, 2)[:, :, ::-1]
    out[...] = patch
    return out
