"""Patches a second from the pack, against decoding PNG sub-images for each sample, as most training code does."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import sr
from sr.data import GTFolder, SRDataModule
from sr.data.folders import PictureSet
from sr.errors import SRError
from sr.image import save_image, to_image

_SUB_IMAGE = 480
_SCALE, _GT, _BATCH = 4, 192, 16


class _SubImages(Dataset):
    """GT and LQ sub-images read from PNG bytes, decoded for each sample, cut and mirrored: BasicSR's way."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def read(self, kind: str, key: str) -> bytes:
        raise AssertionError("a subclass reads")

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import cv2

        cv2.setNumThreads(0)
        key, size = random.choice(self.keys), _GT // _SCALE
        encoded = (np.frombuffer(self.read(kind, key), np.uint8) for kind in ("gt", "lq"))
        gt, lq = (np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR)) for data in encoded)
        y, x = random.randrange(lq.shape[0] - size + 1), random.randrange(lq.shape[1] - size + 1)
        lq = lq[y : y + size, x : x + size]
        gt = gt[_SCALE * y : _SCALE * (y + size), _SCALE * x : _SCALE * (x + size)]
        if random.random() < 0.5:
            lq, gt = lq[:, ::-1], gt[:, ::-1]
        return {k: torch.from_numpy(p[..., ::-1].transpose(2, 0, 1).copy()) for k, p in (("lq", lq), ("gt", gt))}


class Files(_SubImages):
    """From PNG files of :func:`write_sub_images`."""

    def __init__(self, keys: list[str], root: Path) -> None:
        super().__init__(keys)
        self.root = root

    def read(self, kind: str, key: str) -> bytes:
        return (self.root / kind / f"{key}.png").read_bytes()


class _LMDB(_SubImages):
    def __init__(self, keys: list[str], root: Path) -> None:
        super().__init__(keys)
        self.root = root
        self.env: Any = None

    def read(self, kind: str, key: str) -> bytes:
        import lmdb

        if self.env is None:  # one in each worker
            self.env = lmdb.open(str(self.root), readonly=True, lock=False, readahead=False)
        with self.env.begin() as transaction:
            return transaction.get(f"{kind}/{key}".encode())


def endless_loader(samples: Dataset, batch_size: int, workers: int) -> DataLoader:
    """Batches of a data set that is as long as one likes, from worker processes."""
    return DataLoader(samples, batch_size, num_workers=workers, sampler=_Endless())


class _Endless(Sampler):
    """0, 1, 2 and so on, so that no loader pays for starting anew."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def _training_loader(args: argparse.Namespace, batch_size: int, cache: Path) -> Iterable[dict[str, torch.Tensor]]:
    """The loader that a training run of this batch size gets."""
    data = SRDataModule(
        GTFolder(args.data), _SCALE, _GT, batch_size, num_workers=args.workers, seed=0, cache_dir=str(cache)
    )
    data._batches_total = lambda: 10**6  # type: ignore[method-assign]
    return data.train_dataloader()


def write_sub_images(pictures: PictureSet, root: Path) -> list[str]:
    """Cut the pictures into PNG sub-images, as files and as an LMDB."""
    import lmdb

    keys = []
    lq_edge = _SUB_IMAGE // _SCALE
    with lmdb.open(str(root / "lmdb"), map_size=2**40).begin(write=True) as transaction:
        for kind in ("gt", "lq"):
            (root / kind).mkdir()
        for i in range(len(pictures)):
            lq, gt = pictures.pair(i)
            for y in range(0, lq.shape[1] - lq_edge + 1, lq_edge):
                for x in range(0, lq.shape[2] - lq_edge + 1, lq_edge):
                    keys.append(f"{i:04d}_{y:05d}_{x:05d}")
                    top, left = _SCALE * y, _SCALE * x
                    parts = {
                        "gt": gt[:, top : top + _SUB_IMAGE, left : left + _SUB_IMAGE],
                        "lq": lq[:, y : y + lq_edge, x : x + lq_edge],
                    }
                    for kind, part in parts.items():
                        path = root / kind / f"{keys[-1]}.png"
                        save_image(to_image(part), path)
                        transaction.put(f"{kind}/{keys[-1]}".encode(), path.read_bytes())
    return keys


def require_peers() -> None:
    """Make sure that the libraries are there which the project is compared with."""
    try:
        import cv2  # noqa: F401
        import lmdb  # noqa: F401
    except ImportError as e:
        raise SRError(f"{e.name} is what is compared with: pip install opencv-python-headless lmdb") from e


def throughput(args: argparse.Namespace) -> None:
    """Patches a second of the pack, of PNG sub-images, and of an LMDB of these."""
    require_peers()
    with tempfile.TemporaryDirectory() as folder:
        pictures = GTFolder(args.data)
        pictures.prepare(_SCALE)
        keys = write_sub_images(pictures, Path(folder))
        ways = {
            "LMDB of PNG sub-images": _LMDB(keys, Path(folder) / "lmdb"),
            "PNG sub-images": Files(keys, Path(folder)),
        }
        loaders = {"pack": iter(_training_loader(args, _BATCH, Path(folder)))} | {
            name: iter(endless_loader(samples, _BATCH, args.workers)) for name, samples in ways.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(args.repeats):
            for name, loader in loaders.items():
                rates[name].append(_rate(loader, 1.5))
        _print(rates, len(keys), args.workers)
        _print_starvation(args, Path(folder))


def _rate(loader: Iterator[Any], seconds: float) -> float:
    """Patches a second, once what the workers had fetched ahead is used up."""
    for _ in range(8):
        next(loader)
    start, batches = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        next(loader)
        batches += 1
    return batches * _BATCH / passed


def _print(rates: dict[str, list[float]], count: int, workers: int) -> None:
    print(f"GT {_GT}, LQ {_GT // _SCALE}, batch {_BATCH}, {workers} workers, {count} sub-images of {_SUB_IMAGE}")
    print("\n| source | patches/s | the pack is faster by |\n|---|---|---|")
    ours = statistics.median(rates["pack"])
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"| {name} | {rate:.0f} | {ours / rate:.1f}x |")


def _print_starvation(args: argparse.Namespace, cache: Path) -> None:
    """The share of time that training steps of a small network wait for the loader."""
    network = sr.create_model("sparsesr_s", scale=_SCALE).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters())
    loader = iter(_training_loader(args, 8, cache))
    next(loader)
    waited, start = 0.0, time.perf_counter()
    for _ in range(15):
        before = time.perf_counter()
        batch = next(loader)
        waited += time.perf_counter() - before
        optimizer.zero_grad()
        (network(batch["lq"] / 255) - batch["gt"] / 255).abs().mean().backward()
        optimizer.step()
    total = time.perf_counter() - start
    print(f"\ntraining sparsesr_s, batch 8: {100 * waited / total:.2f} % of the time spent waiting for data")


def add_to(commands: Any) -> None:
    """Add the subcommand ``data``."""
    command = commands.add_parser("data", help=throughput.__doc__, description=__doc__)
    command.add_argument("--data", default="datasets/sample/train", help="folder of photographs")
    command.add_argument("--workers", type=int, default=2)
    command.set_defaults(run=throughput)
