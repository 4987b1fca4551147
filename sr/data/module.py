"""The Lightning data module: what to train on, what to validate on, which process takes which part."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from sr.data.folders import PictureSet
from sr.data.patches import PatchDataset, PictureDataset
from sr.errors import SRError

log = logging.getLogger(__name__)

# Forked workers share the decoded pictures; macOS and Windows cannot fork safely, and copy them.
_WORKERS = "fork" if sys.platform == "linux" else None


class SRDataModule(LightningDataModule):
    """Patches for training, whole pictures for validation.

    A run is ``max_steps`` optimiser steps, and one epoch: batch ``b`` holds samples ``b * batch_size`` to
    ``(b + 1) * batch_size - 1`` of an endless sequence (:class:`~sr.data.patches.PatchDataset`), of which each process
    takes its share. The data that a run sees is therefore the same for any number of devices, workers and
    interruptions, and a data set may be smaller than one batch.
    """

    def __init__(
        self,
        train: PictureSet | list[PictureSet],
        scale: int,
        gt_size: int,
        batch_size: int,
        val: list[PictureSet] | None = None,
        num_workers: int = 0,
        seed: int | None = None,
        cache: bool = True,
    ) -> None:
        """Keep the settings; folders are read in :meth:`setup`.

        Args:
            train: picture sets to train on; of several, each is seen in proportion to its pixels.
            scale: GT edge / LQ edge; taken from the network in the command line.
            gt_size: edge of the square GT patches in pixels, a multiple of scale.
            batch_size: patches of one forward pass over all devices together.
            val: picture sets to validate on, with different names.
            num_workers: processes per device that cut patches; 0 cuts them in the training process.
            seed: of the patches drawn. Default: the run's ``seed_everything``.
            cache: decode all pictures into memory before the first step (a 2-megapixel picture takes 6 MB, or 8 MB
                with its LQ at scale 2); otherwise decode one for every patch.
        """
        super().__init__()
        self.train_sets = [train] if isinstance(train, PictureSet) else list(train)
        self.val_sets = list(val or [])
        self.scale = scale
        self.gt_size = gt_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.cache = cache
        self._train: PatchDataset | None = None
        self._val: list[PictureDataset] | None = None

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def setup(self, stage: str | None = None) -> None:
        """List, check and (with ``cache``) decode the pictures; a second call does nothing.

        Args:
            stage: ``fit``, ``validate``, ...; only ``fit`` and ``None`` need the training sets.

        Raises:
            SRError: any fault of the settings or of the pictures.
        """
        self._check()
        if self._val is None:
            for pictures in self.val_sets:
                pictures.prepare(self.scale)
        if self._train is None and stage in ("fit", None):
            train = PatchDataset(self.train_sets, self.scale, self.gt_size, self.seed, self.cache)
            train.load()
            self._train = train
        if self._val is None:
            val = [PictureDataset(s, self._rank, self._world_size) for s in self.val_sets]
            if self.cache:
                for dataset in val:
                    dataset.load()
            self._val = val

    def _check(self) -> None:
        names = [s.name for s in self.val_sets]
        for name in names:
            if names.count(name) > 1:
                raise SRError(f"two validation sets are called {name!r}; give one of them another name")
        if self.num_workers < 0:
            raise SRError(f"num_workers must not be negative, but is {self.num_workers}")
        world = self._world_size
        if self.batch_size < 1:
            raise SRError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.batch_size % world:
            below = self.batch_size // world * world
            fits = f"{below} or {below + world}" if below > 0 else f"{world}"
            raise SRError(
                f"batch_size {self.batch_size} is the number of patches over all {world} device(s), "
                f"which does not divide it; the nearest that fit: {fits}"
            )

    def train_dataloader(self) -> DataLoader:
        """Every batch of the run that is still to come.

        Raises:
            SRError: ``trainer.max_steps`` is not set.
        """
        if self._train is None:
            self.setup("fit")
        assert self._train is not None
        share = self.batch_size // self._world_size
        return _RunLoader(
            self._train,
            batch_size=share,
            sampler=_RunSampler(self, share),
            num_workers=self.num_workers,
            multiprocessing_context=_WORKERS if self.num_workers else None,
            pin_memory=_on_cuda(self.trainer),
        )

    def val_dataloader(self) -> list[DataLoader]:
        """One loader for each validation set, in their order, one whole picture a batch.

        Each process gets every ``world_size``-th picture; none counts twice.
        """
        if self._val is None:
            self.setup("validate")
        assert self._val is not None
        workers = 0 if self.cache else self.num_workers  # there is nothing to decode with the cache
        return [
            DataLoader(
                dataset,
                batch_size=1,
                sampler=_AllSampler(dataset),
                num_workers=workers,
                multiprocessing_context=_WORKERS if workers else None,
                pin_memory=_on_cuda(self.trainer),
            )
            for dataset in self._val
        ]

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """uint8 -> float32 in [0, 1], on the device, where it costs a quarter of the transfer; the rest is kept."""
        return {k: v.float() / 255 if isinstance(v, Tensor) and v.dtype == torch.uint8 else v for k, v in batch.items()}

    def _batches_total(self) -> int:
        """Batches of the whole run."""
        if self.trainer is None:
            return 1
        if self.trainer.max_steps < 0:
            raise SRError("trainer.max_steps is not set; the length of a run is a number of optimiser steps")
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches

    def _batches_done(self) -> int:
        """Batches that the run, before an interruption too, has trained on."""
        # Not global_step * accumulate_grad_batches, which is behind if a checkpoint was written between two
        # optimiser steps, and counts each optimiser of a manually optimised module.
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total  # Any: typed as its base class
        return progress.processed


class _RunSampler(DistributedSampler):
    """Indices of this process's share of each batch of the run that is still to come.

    Its length is that of the whole run: Lightning adds the batches before an interruption to those it fetched when it
    looks for the last one. A ``DistributedSampler`` by name only, so that Lightning does not split the indices again.
    """

    def __init__(self, module: SRDataModule, share: int) -> None:
        self.module = module
        self.share = share
        self.total = module._batches_total()

    def __len__(self) -> int:
        return self.total * self.share

    def __iter__(self) -> Iterator[int]:
        start = self.module._batches_done()  # now, not in __init__: a second epoch of a lengthened run goes on as well
        offset = self.module._rank * self.share
        for batch in range(start, self.total):
            first = batch * self.module.batch_size + offset
            yield from range(first, first + self.share)

    def set_epoch(self, epoch: int) -> None:
        """Nothing depends on the epoch."""


class _AllSampler(DistributedSampler):
    """All indices in order; the data set is already this process's part (see :class:`_RunSampler`)."""

    def __init__(self, dataset: PictureDataset) -> None:
        self.indices = range(len(dataset))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """Nothing depends on the epoch."""


class _RunLoader(DataLoader):
    """A loader that Lightning knows to be resumable; the position itself is the trainer's count of batches."""

    def state_dict(self) -> dict[str, int]:
        """What has to be equal for a resumed run to see the data it would have seen."""
        assert isinstance(self.sampler, _RunSampler)
        module = self.sampler.module
        return {k: getattr(module, k) for k in ("batch_size", "gt_size", "scale", "seed")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Say so if the resumed run sees other data."""
        other = [f"{k} {state[k]} -> {v}" for k, v in self.state_dict().items() if state.get(k, v) != v]
        if other:
            log.warning("the resumed run goes on with other patches than it began with: %s", ", ".join(other))


def _on_cuda(trainer: Any) -> bool:
    return trainer is not None and trainer.strategy.root_device.type == "cuda"
