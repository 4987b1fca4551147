"""Score models on picture sets, bicubic first, by the protocols of :mod:`sr.metrics`."""

from __future__ import annotations

import copy
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sr.data import PictureSet
from sr.errors import SRError
from sr.evaluation.models import BICUBIC, Model, NetworkModel, Run, check_8bit
from sr.metrics import Protocol
from sr.metrics.fidelity import PictureMean
from sr.metrics.functional import to_8bit
from sr.resize import imresize

_MOST_WORKERS = 4  # pictures in memory at a time

#: (picture's name, LQ, GT, results by model, their scores); pictures are uint8 (3, h, w). Called from several threads.
OnPicture = Callable[[str, Tensor, Tensor, Mapping[str, Tensor], Mapping[str, "Score"]], None]


@dataclass(frozen=True)
class Score:
    """PSNR in dB and SSIM of one picture, and how many values the PSNR is a mean of."""

    psnr: float
    ssim: float
    pixels: int


@dataclass(frozen=True)
class Mean:
    """PSNR in dB and SSIM of a set, and how many pictures equal to their GT are not in its PSNR."""

    psnr: float
    ssim: float
    identical: int


@dataclass(frozen=True)
class PictureScores:
    """All scores of one picture.

    Attributes:
        name: the picture's.
        grey: the channels of its GT are equal; it is scored as the RGB picture that it stands for.
        scores: model -> one score for each protocol. ``bicubic`` comes first.
        perceptual: model -> metric -> value.
    """

    name: str
    grey: bool
    scores: dict[str, list[Score]]
    perceptual: dict[str, dict[str, float]] = field(default_factory=dict)


def bicubic(lq: Tensor, scale: int) -> Tensor:
    """MATLAB-bicubic enlargement of a uint8 (..., 3, h, w) picture: what every result is compared with."""
    return imresize(lq, scale)


def score(sr: Tensor, gt: Tensor, protocol: Protocol, scale: int) -> Score:
    """PSNR and SSIM of one picture, (3, H, W) each, uint8 or float in [0, 1]."""
    psnr, ssim = protocol.measure(sr[None], gt[None], scale)
    crop = 2 * protocol.crop(scale)
    return Score(psnr.item(), ssim.item(), (gt.shape[-2] - crop) * (gt.shape[-1] - crop))


def mean(scores: Sequence[Score], pooled: bool = False) -> Mean:
    """Scores of a set; an infinite PSNR (a picture equal to its GT) is counted, not averaged.

    Args:
        scores: of its pictures.
        pooled: PSNR of the mean squared error over all pixels, those of identical pictures included, rather than the
            mean of per-picture values.
    """
    finite = [s for s in scores if math.isfinite(s.psnr)]
    psnr = math.inf
    if finite and pooled:
        error = math.fsum(s.pixels * 10 ** (-s.psnr / 10) for s in finite) / sum(s.pixels for s in scores)
        psnr = -10 * math.log10(error)
    elif finite:
        psnr = math.fsum(s.psnr for s in finite) / len(finite)
    return Mean(psnr, math.fsum(s.ssim for s in scores) / len(scores), len(scores) - len(finite))


def evaluate(
    models: Sequence[Model],
    pictures: PictureSet,
    protocols: Sequence[Protocol],
    *,
    perceptual: Mapping[str, PictureMean] | None = None,
    modcrop: bool = False,
    on_picture: OnPicture | None = None,
) -> Iterator[PictureScores]:
    """Score bicubic and the models on every picture of a set, in its order.

    On a CPU several pictures are worked on side by side, each by a share of PyTorch's threads and a copy of the
    networks: one network alone leaves cores idle, which then read and score.

    Args:
        models: of the set's scale.
        pictures: prepared.
        protocols: at least one; the first is the one whose scores ``on_picture`` sees.
        perceptual: more metrics by name, of 8-bit RGB pictures.
        modcrop: cut a GT and results that differ by less than ``scale`` pixels per edge to what they share, in
            multiples of the scale.
        on_picture: called with each picture's results.

    Raises:
        SRError: at once, if a crop leaves nothing of a picture, a GT has 16 bits, or a folder lacks results.
    """
    for picture in pictures.pictures:
        height, width = picture.gt_size
        crop = max(protocol.crop(pictures.scale) for protocol in protocols)
        if crop < 0 or min(height, width) <= 2 * crop:
            raise SRError(
                f"a crop of {crop} pixels leaves nothing of {pictures.name}/{picture.name} ({width}x{height})"
            )
        check_8bit(picture.gt)
    first = {model.name: model.bind(pictures, modcrop) for model in models}
    return _evaluate(models, first, pictures, protocols, perceptual or {}, modcrop, on_picture)


def _evaluate(
    models: Sequence[Model],
    first: dict[str, Run],
    pictures: PictureSet,
    protocols: Sequence[Protocol],
    perceptual: Mapping[str, PictureMean],
    modcrop: bool,
    on_picture: OnPicture | None,
) -> Iterator[PictureScores]:
    threads = torch.get_num_threads()
    workers = min(_MOST_WORKERS, threads)
    on_cpu = all(m.upscaler.device.type == "cpu" for m in models if isinstance(m, NetworkModel))
    runs: queue.SimpleQueue[dict[str, Run]] = queue.SimpleQueue()
    runs.put(first)
    # On an accelerator one copy of the networks is busy while the other workers read and score. On a CPU each worker
    # has its own, since a network may keep notes in its forward pass.
    for _ in range(workers - 1 if on_cpu else 0):
        runs.put({model.name: model.bind(pictures, modcrop) for model in copy.deepcopy(list(models))})
    one_at_a_time = threading.Lock()
    scale, rounded = pictures.scale, all(protocol.rounded for protocol in protocols)

    def work(i: int) -> PictureScores:
        name = pictures.names[i]
        lq, gt = pictures.pair(i)
        grey = bool((gt[0] == gt[1]).all() and (gt[1] == gt[2]).all())
        run = runs.get()
        try:
            results = {key: model(i, lq if rounded else lq.float() / 255).cpu() for key, model in run.items()}
        finally:
            runs.put(run)
        gt, results = _same_size(gt, {BICUBIC: bicubic(lq, scale)} | results, scale, modcrop, f"{pictures.name}/{name}")
        scores = {key: [score(sr, gt, protocol, scale) for protocol in protocols] for key, sr in results.items()}
        seen: dict[str, dict[str, float]] = {}
        if perceptual:
            with one_at_a_time:  # a torchmetrics object serves one thread
                for key, sr in results.items():
                    seen[key] = {m: metric.measure(sr[None], gt[None]).item() for m, metric in perceptual.items()}
        if on_picture is not None:
            eight = {key: to_8bit(sr) for key, sr in results.items()}
            on_picture(name, lq, gt, eight, {key: of[0] for key, of in scores.items()})
        return PictureScores(name, grey, scores, seen)

    yield from _in_order(work, pictures.gt_sizes, workers, threads)


def _same_size(
    gt: Tensor, results: dict[str, Tensor], scale: int, modcrop: bool, picture: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """GT and results, cut at the right and bottom if they may be; whatever else differs in size is refused."""
    height, width = gt.shape[-2:]
    for key, sr in results.items():
        h, w = sr.shape[-2:]
        near = modcrop and abs(h - height) < scale and abs(w - width) < scale
        if (h, w) != (height, width) and not near:
            raise SRError(f"{key} makes {w}x{h} of {picture}, whose GT is {width}x{height}")
    if modcrop:
        shapes = [x.shape[-2:] for x in (gt, *results.values())]
        height, width = (min(edges) - min(edges) % scale for edges in zip(*shapes, strict=True))
    return gt[:, :height, :width], {key: sr[:, :height, :width] for key, sr in results.items()}


def _in_order(
    work: Callable[[int], PictureScores], sizes: Sequence[tuple[int, int]], workers: int, threads: int
) -> Iterator[PictureScores]:
    """Results in the order of ``sizes``; the largest are begun first, so that none is left over at the end."""
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(max(1, threads // workers),))
    try:
        largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i][0] * sizes[i][1])
        futures = {i: pool.submit(work, i) for i in largest_first}
        for i in range(len(sizes)):
            yield futures.pop(i).result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # threads that PyTorch starts later take the number that was set last
