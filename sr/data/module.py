"""The Lightning data module: what to train on, what to validate on, which process takes which part."""

from __future__ import annotations

import collections
import itertools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from sr.data.folders import OnError, PictureSet, check_names
from sr.data.pack import open_pack
from sr.data.patches import PatchDataset, PictureDataset
from sr.data.streaming import StreamingGTDataset
from sr.degradations import Degradation
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
        train: PictureSet | list[PictureSet] | StreamingGTDataset,
        scale: int,
        gt_size: int,
        batch_size: int,
        val: list[PictureSet] | None = None,
        num_workers: int = 0,
        seed: int | None = None,
        degradation: Degradation | None = None,
        cache: bool = True,
        cache_dir: str | None = None,
        on_error: OnError = "raise",
        progressive_gt_sizes: list[int] | None = None,
    ) -> None:
        """Keep the settings; folders are read in :meth:`setup`.

        Args:
            train: picture sets to train on; of several, each is seen in proportion to its pixels. Or pictures streamed
                from chunks, which no disk has to hold.
            scale: GT edge / LQ edge; taken from the network in the command line.
            gt_size: edge of the square GT patches in pixels, a multiple of scale.
            batch_size: patches of one forward pass over all devices together.
            val: picture sets to validate on, with different names.
            num_workers: threads per device that cut patches ahead; 0 cuts them when they are needed.
            seed: of the patches drawn. Default: the run's ``seed_everything``.
            degradation: makes the LQ patches from the GT patches, batch by batch on the training device; default:
                the sets' own LQ, or MATLAB's bicubic reduction of the whole picture. Validation always uses the latter.
            cache: decode all pictures once, into a file that every process of the machine maps (a 2-megapixel picture
                takes 6 MB, or 7.5 MB with its LQ at scale 2); otherwise decode one for every patch.
            cache_dir: where these files are kept. Default: ``$XDG_CACHE_HOME/sr`` or ``~/.cache/sr``.
            on_error: a picture that cannot be read stops the run (``raise``), or is left out (``skip``).
            progressive_gt_sizes: smaller patches to begin with: the run is divided into equal parts, one for each of
                these sizes in turn, and the last for ``gt_size``.
        """
        super().__init__()
        self.stream = train if isinstance(train, StreamingGTDataset) else None
        self.train_sets: list[PictureSet] = []
        if not isinstance(train, StreamingGTDataset):
            self.train_sets = [train] if isinstance(train, PictureSet) else list(train)
        self.val_sets = list(val or [])
        self.scale = scale
        self.gt_size = gt_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.degradation = degradation
        self.cache = cache
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        self.on_error: OnError = on_error
        self.gt_sizes = [*(progressive_gt_sizes or []), gt_size]  # of equal parts of the run
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
                pictures.prepare(self.scale, self.on_error)
        if self._train is None and self.stream is None and stage in ("fit", None):
            train = PatchDataset(
                self.train_sets,
                self.scale,
                self.gt_size,
                self.seed,
                lq=self.degradation is None,
                on_error=self.on_error,
            )
            if self.cache:
                train.pack(self.cache_dir)
            self._train = train
        if self._val is None:
            if not self.cache:
                for pictures in self.val_sets:
                    pictures.try_all()
            packs = [open_pack(s, self.cache_dir) if self.cache else None for s in self.val_sets]
            self._val = [
                PictureDataset(s, self._rank, self._world_size, pack)
                for s, pack in zip(self.val_sets, packs, strict=True)
            ]
        if self.stream is not None and stage in ("fit", None):
            self.train_dataloader()  # finds faults of the chunks before the first step

    def _check(self) -> None:
        check_names(self.val_sets, "validation sets")
        for size in self.gt_sizes[:-1]:
            if not 0 < size <= self.gt_size or size % self.scale:
                raise SRError(
                    f"progressive_gt_sizes are multiples of scale {self.scale} up to gt_size {self.gt_size}, not {size}"
                )
        if self.stream is not None and len(self.gt_sizes) > 1:
            raise SRError("progressive_gt_sizes is for picture sets; a stream has one patch size")
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

    def train_dataloader(self) -> Iterable[dict[str, Tensor]]:
        """Every batch of the run that is still to come.

        Raises:
            SRError: ``trainer.max_steps`` is not set.
        """
        share = self.batch_size // self._world_size
        if self.stream is not None:
            return self.stream.loader(
                self.scale,
                self.gt_size,
                self.seed,
                share,
                self._batches_total(),
                self.batches_done,
                self._rank,
                self._world_size,
                self.degradation is None,
                num_workers=self.num_workers,
                multiprocessing_context=_WORKERS if self.num_workers else None,
                pin_memory=_on_cuda(self.trainer),
            )
        if self._train is None:
            self.setup("fit")
        assert self._train is not None
        return _RunLoader(self._train, _RunSampler(self, share), share, self.num_workers, _on_cuda(self.trainer))

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
        """uint8 -> float32 in [0, 1], on the device, where it costs a quarter of the transfer; then the degradation."""
        batch = {
            k: v.float() / 255 if isinstance(v, Tensor) and v.dtype == torch.uint8 else v for k, v in batch.items()
        }
        if self.degradation is not None and "lq" not in batch:
            # The first sample's number is different in every step and on every device, and the same after resuming.
            batch["lq"], batch["gt"] = self.degrade(batch["gt"], int(batch["index"][0]))
        return batch

    def degrade(self, gt: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Make LQ as training does.

        Args:
            gt: (N, 3, H, W), float in [0, 1].
            number: any; the same number gives the same LQ.

        Returns:
            LQ (N, 3, H/scale, W/scale) and GT, which the degradation may have sharpened.
        """
        assert self.degradation is not None
        random = np.random.SeedSequence((self.seed, number)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(random[0] >> 1))
        return self.degradation(gt, self.scale, generator)

    def sample_names(self, indices: list[int]) -> list[str]:
        """Which pictures training samples are cut from, as ``set/picture``."""
        return [] if self._train is None else [self._train.name(i) for i in indices]

    def _batches_total(self) -> int:
        """Batches of the whole run."""
        if self.trainer is None:
            return 1
        if self.trainer.max_steps < 0:
            raise SRError("trainer.max_steps is not set; the length of a run is a number of optimiser steps")
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches

    def batches_done(self) -> int:
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

    def gt_size(self, index: int) -> int:
        """Of the batch that sample ``index`` is in."""
        part = index // self.module.batch_size * len(self.module.gt_sizes) // self.total
        return self.module.gt_sizes[min(part, len(self.module.gt_sizes) - 1)]

    def __len__(self) -> int:
        return self.total * self.share

    def __iter__(self) -> Iterator[int]:
        start = self.module.batches_done()  # now, not in __init__: a second epoch of a lengthened run goes on as well
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


class _RunLoader:
    """The batches of a run that are still to come, cut by threads; Lightning knows it to be resumable.

    Threads, not processes: cutting patches from a pack is copying, and decoding a picture is C code, both of which let
    other threads run, while a batch takes longer to get from one process to another than to be made. Nothing is
    forked, no shared memory runs out, and an error arrives as it was raised. The position is the trainer's count of
    batches.

    Args:
        dataset: patches.
        sampler: which, in order.
        batch_size: how many in a batch.
        num_workers: threads; 0: the training thread does it.
        pin_memory: whether batches lie in memory that a GPU reads directly.
    """

    def __init__(
        self, dataset: PatchDataset, sampler: _RunSampler, batch_size: int, num_workers: int, pin_memory: bool
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        indices = iter(self.sampler)
        shares = iter(lambda: list(itertools.islice(indices, self.batch_size)), [])
        if not self.num_workers:
            yield from map(self._batch, shares)
            return
        with ThreadPoolExecutor(self.num_workers, "patches") as pool:
            ahead = collections.deque(
                pool.submit(self._batch, s) for s in itertools.islice(shares, 2 * self.num_workers)
            )
            try:
                while ahead:
                    batch = ahead.popleft().result()
                    ahead.extend(pool.submit(self._batch, s) for s in itertools.islice(shares, 1))
                    yield batch
            finally:
                pool.shutdown(cancel_futures=True)

    def _batch(self, indices: list[int]) -> dict[str, Tensor]:
        batch = self.dataset.batch(indices, self.sampler.gt_size(indices[0]))
        return {k: v.pin_memory() for k, v in batch.items()} if self.pin_memory else batch

    def state_dict(self) -> dict[str, Any]:
        """What has to be equal for a resumed run to see the data it would have seen."""
        module = self.sampler.module
        return {k: getattr(module, k) for k in ("batch_size", "gt_sizes", "scale", "seed")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Say so if the resumed run sees other data."""
        other = [f"{k} {state[k]} -> {v}" for k, v in self.state_dict().items() if state.get(k, v) != v]
        if other:
            log.warning("the resumed run goes on with other patches than it began with: %s", ", ".join(other))


def _on_cuda(trainer: Any) -> bool:
    return trainer is not None and trainer.strategy.root_device.type == "cuda"
