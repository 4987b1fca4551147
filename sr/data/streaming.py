"""Training pictures that need not fit on one disk: litdata chunks in a folder or an object store, read as a stream.

:func:`optimize` packs picture files as they are into chunks of some 64 MB, :class:`StreamingGTDataset` trains on them.

Whole pictures are stored, not sub-pictures with their LQ: a chunk then serves every scale and patch size, takes no more
room than the files, and every position in a picture is as likely as in :class:`~sr.data.patches.PatchDataset`. The
price is that a picture has to be decoded and reduced as a whole, since LQ is MATLAB's reduction of the whole picture:
some 0.1 s of one core for 1.5 megapixels. So several patches are taken from each picture, and those of as many
pictures are mixed. Patches (gt_size 128, scale 2) of pictures of 1.5 megapixels in a second of CPU time, Intel Xeon:

===================  ===  ===  ===  ===
patches_per_picture    1    4   16   32
===================  ===  ===  ===  ===
PNG                   10   40  160  315
JPEG                  12   49  195  400
===================  ===  ===  ===  ===
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import re
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sr.data.folders import OnError
from sr.data.patches import cut_patch
from sr.errors import SRError
from sr.image import list_images, read_rgb, to_image
from sr.resize import imresize

log = logging.getLogger(__name__)

_CHUNK = "64MB"  # one request of an object store; a few dozen pictures, which are read one after the other
_FORMAT = ["bytes", "bytes"]  # what litdata calls the types of an item's fields, name and picture


def _litdata() -> Any:
    try:
        import litdata
    except ModuleNotFoundError as exc:
        if exc.name != "litdata":
            raise
        raise SRError("streaming needs litdata, which is not installed; pip install -e '.[streaming]'") from exc
    return litdata


def optimize(
    inputs: Sequence[str | Path], to: str | Path, workers: int | None = None, on_error: OnError = "raise"
) -> None:
    """Pack the pictures of folders into chunks for :class:`StreamingGTDataset`, in random order.

    A file is stored unchanged where plain decoding gives the pixels of :func:`sr.image.read_rgb`, and else (turned by
    EXIF, 16 bit) as PNG. Every picture is decoded once to make sure that it can be.

    Args:
        inputs: folders of pictures, sub-folders included.
        to: an empty or new folder, or the URL of one in an object store (``s3://bucket/name``, ``gs://bucket/name``;
            credentials as for boto3 and google-cloud-storage).
        workers: processes. Default: one per core.
        on_error: a picture that cannot be read is an error (``raise``), or is left out with a warning (``skip``).

    Raises:
        SRError: litdata is missing; there is no picture; one cannot be read; ``to`` is not empty or cannot be written.
    """
    litdata = _litdata()
    pictures = [
        (f"{Path(root).resolve().name}/{path.relative_to(root).as_posix()}", str(path.absolute()))
        for root in inputs
        for path in list_images(root)
    ]
    if not pictures:
        raise SRError("there is nothing to optimize; give at least one folder of pictures")
    to = str(to)
    if "://" not in to and Path(to).exists() and (not Path(to).is_dir() or any(Path(to).iterdir())):
        raise SRError(f"{to} is not an empty folder; choose another")
    order = np.random.default_rng(0).permutation(len(pictures))  # neighbours on disk look alike
    with _as_before():
        try:
            litdata.optimize(
                partial(_pack, on_error),
                [pictures[i] for i in order],
                to,
                chunk_bytes=_CHUNK,
                num_workers=min(workers or os.cpu_count() or 1, len(pictures)),
                reorder_files=False,
                keep_data_ordered=True,
                verbose=False,
            )
        except (RuntimeError, ValueError, OSError) as exc:  # litdata hands a worker's traceback on as text
            found = re.search(r"SRError: (.+)", str(exc))
            raise SRError(found[1] if found else f"cannot write {to}: {exc}") from exc


@contextmanager
def _as_before() -> Iterator[None]:
    """Undo what ``litdata.optimize`` does to its process, and keep it out of other runs' temporary files."""
    method, on_interrupt = multiprocessing.get_start_method(allow_none=True), signal.getsignal(signal.SIGINT)
    environment = os.environ.copy()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{folder}/chunks"
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{folder}/data"
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            multiprocessing.set_start_method(method, force=True)
            signal.signal(signal.SIGINT, on_interrupt)


def _pack(on_error: OnError, picture: tuple[str, str]) -> dict[str, bytes] | None:
    """One item of a chunk."""
    name, path = picture
    try:
        rgb = read_rgb(path)
    except SRError as exc:
        if on_error == "raise":
            raise
        log.warning("left out: %s", exc)
        return None
    data = Path(path).read_bytes()
    if not np.array_equal(_decode(data), rgb.permute(1, 2, 0).numpy()):
        buffer = io.BytesIO()
        to_image(rgb).save(buffer, "PNG")
        data = buffer.getvalue()
    return {"name": name.encode(), "picture": data}


def _decode(data: bytes) -> np.ndarray:
    """uint8 (H, W, 3), RGB, with nothing but Pillow's conversion."""
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB"))


class StreamingGTDataset:
    """High-resolution pictures in chunks that :func:`optimize` wrote, in place of a picture set as ``data.train``.

    LQ is MATLAB's bicubic reduction of the whole picture, in 8 bit, as with :class:`~sr.data.folders.GTFolder`. The
    order of an epoch is litdata's: chunks are shuffled by the seed and the number of the epoch, and dealt out over all
    loading processes of all devices, each of which downloads its own only. In an epoch each picture is read once. A
    picture gives ``patches_per_picture`` patches (the first few of a run fewer), which are a function of (seed, epoch,
    name of the picture), and ``patches_per_picture`` successive patches are of as many different pictures. A picture
    smaller than the patch is passed over, and the next one gives its patches too.

    Chunks of an object store are kept in ``~/.lightning/chunks`` until three quarters of the free disk are taken;
    litdata's environment variables ``LITDATA_CACHE_DIR`` and ``MAX_CACHE_SIZE`` (``200GB``) change that.
    """

    def __init__(self, root: str | Path, patches_per_picture: int = 16) -> None:
        """Name the folder; nothing is read yet.

        Args:
            root: the folder of chunks, or its URL (``s3://bucket/name``, ``gs://bucket/name``).
            patches_per_picture: patches from a picture that is decoded; more are cheaper and less varied.

        Raises:
            SRError: ``patches_per_picture`` is not positive.
        """
        if patches_per_picture < 1:
            raise SRError(f"patches_per_picture must be at least 1, not {patches_per_picture}")
        self.root = str(root)
        self.patches_per_picture = patches_per_picture

    def loader(
        self,
        scale: int,
        gt_size: int,
        seed: int,
        batch_size: int,
        batches: int,
        done: Callable[[], int] = lambda: 0,
        rank: int = 0,
        world_size: int = 1,
        lq: bool = True,
        **options: Any,
    ) -> DataLoader:
        """The batches of a run that are still to come, of one of its processes.

        With the same ``world_size`` and ``num_workers`` a run that is interrupted sees what it would have seen.

        Args:
            scale: GT edge / LQ edge.
            gt_size: edge of a GT patch, a multiple of ``scale``.
            seed: of the order and of the patches.
            batch_size: patches of a batch of this process.
            batches: of the whole run.
            done: the number of batches that the run has trained on, asked for at each iteration.
            rank: number of this process.
            world_size: number of processes.
            lq: whether batches have LQ patches.
            **options: of the ``DataLoader``: ``num_workers``, ``pin_memory``, ...

        Returns:
            Its length is that of the whole run. A batch is ``{"lq": uint8 (batch_size, 3, gt_size/scale,
            gt_size/scale), "gt": uint8 (batch_size, 3, gt_size, gt_size), "index": int64 (batch_size)}``, RGB;
            the index is a sample's number in the run of all processes.

        Raises:
            SRError: litdata is missing, there are no chunks at ``root``, ``scale`` does not divide ``gt_size``, or the
                seed is negative.
        """
        if seed < 0:
            raise SRError(f"seed must not be negative, but is {seed}")
        if gt_size < scale or gt_size % scale:
            raise SRError(f"gt_size {gt_size} is not a multiple of scale {scale}")
        workers = max(1, options.get("num_workers", 0))
        run = _Run(self.root, scale, gt_size, seed, self.patches_per_picture, batch_size, world_size, workers)
        return _RunLoader(_RunPatches(run, rank, batches, lq), done, batch_size=batch_size, **options)


@dataclass(frozen=True)
class _Run:
    """What has to be equal for a resumed run to see the data it would have seen."""

    root: str
    scale: int
    gt_size: int
    seed: int
    patches_per_picture: int
    batch_size: int
    world_size: int
    workers: int  # of each process; 1 if the process does it itself


def _open(run: _Run, rank: int) -> tuple[Any, int]:
    """litdata's stream of the pictures of one process, and how many there are for all of them."""
    litdata = _litdata()
    try:
        stream = litdata.StreamingDataset(
            run.root,
            shuffle=True,
            seed=run.seed,
            batch_decode=0,  # items one by one, not 256 at a time
            serializers={"pickle": litdata.streaming.serializers.BytesSerializer()},  # chunks bring no code along
        )
        index = json.loads((Path(stream.input_dir.path) / "index.json").read_text())
    except Exception as exc:  # each object store has exceptions of its own
        raise SRError(f"no chunks can be read at {run.root} ({exc}); `prepare_data.py optimize` makes them") from exc
    if index["config"]["data_format"] != _FORMAT:
        raise SRError(f"the chunks at {run.root} hold other things; `prepare_data.py optimize` makes the right ones")
    # Said, not left to detection. One node: with several, litdata makes the order of an epoch depend on how much of
    # each node's disk is free, and pictures are then seen twice or not at all.
    env = stream.distributed_env
    env.world_size, env.global_rank, env.num_nodes = run.world_size, rank, 1
    stream.set_drop_last(False)  # no process waits for another at the end of an epoch
    stream.set_num_workers(run.workers)
    return stream, sum(chunk["chunk_size"] for chunk in index["chunks"])


class _RunPatches(IterableDataset):
    """A worker's part of the patches of a run that are still to come.

    Worker ``w`` of ``W`` gives the batches ``w``, ``w + W``, ... of its process. It has an endless sequence of
    pictures, epoch after epoch, and takes its patches from them in blocks: block ``b`` is one patch of each of the
    pictures ``b`` to ``b + patches_per_picture - 1``.
    """

    def __init__(self, run: _Run, rank: int, batches: int, lq: bool) -> None:
        self.run = run
        self.rank = rank
        self.batches = batches
        self.lq = lq
        self.start = 0  # the batch to begin with, a multiple of run.workers
        self.stream, self.total = _open(run, rank)
        self.beginning = self.stream.state_dict(0, run.workers, 1)  # here, since litdata refuses it to workers

    def __len__(self) -> int:
        return self.batches * self.run.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        size = self.run.batch_size
        block, inside = divmod(self.start // self.run.workers * size, self.run.patches_per_picture)
        patches = islice(self._blocks(block), inside, None)
        for batch in range(self.start + (info.id if info else 0), self.batches, self.run.workers):
            first = (batch * self.run.world_size + self.rank) * size
            for index, patch in zip(range(first, first + size), patches, strict=False):
                yield {"index": index, **patch}

    def _blocks(self, first: int) -> Iterator[dict[str, Any]]:
        """The patches of block ``first`` and of all that follow."""
        pictures = self._pictures(first)
        window = deque(islice(pictures, self.run.patches_per_picture - 1))
        for patches in pictures:
            window.append(patches)
            yield from (patches[i] for i, patches in enumerate(window))
            window.popleft()

    def _pictures(self, first: int) -> Iterator[list[dict[str, Any]]]:
        """The patches of each of the worker's pictures from number ``first`` on."""
        run = self.run
        small = 0  # pictures passed over; they count, or the numbers of those that follow would depend on gt_size
        for epoch, name, data in self._items(first):
            try:
                gt = _decode(data)
            except Exception as exc:  # Pillow's decoders raise whatever they like
                what = f"the picture {name.decode()} at {run.root}"
                raise SRError(f"{what} is damaged ({exc}); optimize the pictures anew") from exc
            if min(gt.shape[:2]) < run.gt_size:
                small += 1
                if small > self.total:
                    raise SRError(f"gt_size {run.gt_size} is larger than the pictures at {run.root}")
                continue
            lq = self._reduce(gt) if self.lq else None
            for missed in range(small, -1, -1):
                rng = np.random.default_rng((run.seed, epoch, missed, *name))
                yield [self._cut(gt, lq, rng) for _ in range(run.patches_per_picture)]
            small = 0

    def _items(self, first: int) -> Iterator[tuple[int, bytes, bytes]]:
        """(epoch, name, picture file) of each of the worker's pictures from number ``first`` on."""
        stream, workers = self.stream, self.run.workers
        stream.reset_state_dict()
        stream.set_epoch(1)
        iter(stream)
        own = stream.stop_length  # the same in every epoch
        if not own:
            processes = self.run.world_size * workers
            raise SRError(f"{self.run.root} holds too few pictures for {processes} processes; use fewer num_workers")
        epoch, seen = divmod(first, own)
        while True:
            stream.reset_state_dict()
            stream.set_epoch(epoch + 1)
            # litdata counts what all workers have seen, which may be fewer pictures each than this worker's.
            skipped = min(seen, len(stream) // workers)
            if skipped:
                state = {"current_epoch": epoch + 1, "num_samples_yielded": skipped * workers}
                stream.load_state_dict(self.beginning | state)
            rest = islice(stream, seen - skipped, None)
            # Copies: litdata may give views of a mapped chunk.
            yield from ((epoch, bytes(item["name"]), bytes(item["picture"])) for item in rest)
            epoch, seen = epoch + 1, 0

    def _reduce(self, gt: np.ndarray) -> np.ndarray:
        """MATLAB's reduction of a (H, W, 3) picture, cut at the right and bottom to a multiple of the scale."""
        h, w = (n // self.run.scale for n in gt.shape[:2])
        picture = torch.from_numpy(gt[: h * self.run.scale, : w * self.run.scale]).permute(2, 0, 1)
        return imresize(picture, size=(h, w)).permute(1, 2, 0).numpy()

    def _cut(self, gt: np.ndarray, lq: np.ndarray | None, rng: np.random.Generator) -> dict[str, Any]:
        """A random patch in a random one of the 8 symmetries of the square."""
        s, size = self.run.scale, self.run.gt_size // self.run.scale
        y, x = (int(rng.integers(n // s - size + 1)) for n in gt.shape[:2])
        symmetry = int(rng.integers(8))
        patch = {"gt": cut_patch(gt, y * s, x * s, symmetry, np.empty((3, size * s, size * s), np.uint8))}
        if lq is not None:
            patch["lq"] = cut_patch(lq, y, x, symmetry, np.empty((3, size, size), np.uint8))
        return {k: torch.from_numpy(v) for k, v in patch.items()}


class _RunLoader(DataLoader):
    """A loader that Lightning knows to be resumable; the position itself is the trainer's count of batches."""

    dataset: _RunPatches

    def __init__(self, dataset: _RunPatches, done: Callable[[], int], **options: Any) -> None:
        super().__init__(dataset, **options)
        self.done = done

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # DataLoader promises a private class
        # Batches are taken from worker 0, 1, ... in turn, so those of a resumed run begin with the one of worker 0.
        done, workers = self.done(), self.dataset.run.workers
        self.dataset.start = done - done % workers
        return islice(super().__iter__(), done % workers, None)

    def state_dict(self) -> dict[str, Any]:
        """The settings of the run."""
        return asdict(self.dataset.run)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Say so if the resumed run sees other data."""
        other = [f"{k} {state[k]} -> {v}" for k, v in self.state_dict().items() if state.get(k, v) != v]
        if other:
            log.warning("the resumed run goes on with other patches than it began with: %s", ", ".join(other))
