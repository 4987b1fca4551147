"""Time of the Real-ESRGAN recipe on a batch, and of the same steps picture by picture through OpenCV and NumPy.

    pip install opencv-python-headless
    python tests/degradations/benchmark_degradations.py [--rounds 16]

Both take turns, on two threads. The factor of the first resize decides much of the time, so it takes some rounds.
Beside the time on the clock it prints that of all cores (CPU), which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import sr  # noqa: F401  (before torch: how long its threads spin while they wait)

# isort: split
import numpy as np
import torch
import yaml
from jsonargparse import ArgumentParser
from scipy.special import j1

from sr.degradations import Degradation, Draws, Pipeline
from sr.errors import SRError, run_script
from sr.image import list_images, read_rgb

try:
    import cv2
except ImportError:
    cv2 = None

ROOT = Path(__file__).parents[2]
PICTURES, EDGE, SCALE = 32, 256, 4
MODES = ("area", "bilinear", "bicubic")


class PictureByPicture:
    """Real-ESRGAN's degradation of one picture (H, W, 3), float32 in [0, 1], as data loaders do it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, gt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gt = self.sharpen(gt)
        height, width = gt.shape[0] // SCALE, gt.shape[1] // SCALE
        x = self.blur(gt, 3.0)
        factor = self.factor((0.2, 0.7, 0.1), 0.15, 1.5)
        x = self.resize(x, int(gt.shape[0] * factor), int(gt.shape[1] * factor))
        x = self.noise(x, 30, 3.0)
        x = self.jpeg(x)
        if self.rng.random() < 0.8:
            x = self.blur(x, 1.5)
        factor = self.factor((0.3, 0.4, 0.3), 0.3, 1.2)
        x = self.resize(x, int(height * factor), int(width * factor))
        x = self.noise(x, 25, 2.5)
        if self.rng.random() < 0.5:
            x = self.jpeg(self.ring(self.resize(x, height, width)))
        else:
            x = self.ring(self.resize(self.jpeg(x), height, width))
        return (x.clip(0, 1) * 255).round() / 255, gt

    def sharpen(self, x: np.ndarray) -> np.ndarray:
        detail = x - cv2.GaussianBlur(x, (51, 51), 0)
        mask = cv2.GaussianBlur((np.abs(detail) > 10 / 255).astype(np.float32), (51, 51), 0)
        return mask * (x + 0.5 * detail).clip(0, 1) + (1 - mask) * x

    def blur(self, x: np.ndarray, sigma_max: float) -> np.ndarray:
        size = 2 * self.rng.integers(3, 11) + 1
        if self.rng.random() < 0.1:
            return cv2.filter2D(x, -1, self.sinc(size, math.pi / (3 if size < 13 else 5)))
        kind = self.rng.choice(6, p=(0.45, 0.25, 0.12, 0.03, 0.12, 0.03))
        sigma_x, sigma_y = self.rng.uniform(0.2, sigma_max, 2)
        if kind % 2 == 0:
            sigma_y = sigma_x
        angle = self.rng.uniform(-math.pi, math.pi)
        t = np.arange(size) - size // 2
        along = (math.cos(angle) * t + math.sin(angle) * t[:, None]) / sigma_x
        across = (math.cos(angle) * t[:, None] - math.sin(angle) * t) / sigma_y
        q = along**2 + across**2
        if kind >= 2:
            low, high = (0.5, 4) if kind < 4 else (1, 2)
            q **= self.rng.uniform(low, 1) if self.rng.random() < 0.5 else self.rng.uniform(1, high)
        kernel = 1 / (1 + q) if kind >= 4 else np.exp(-q / 2)
        return cv2.filter2D(x, -1, (kernel / kernel.sum()).astype(np.float32))

    def sinc(self, size: int, low: float) -> np.ndarray:
        w = self.rng.uniform(low, math.pi)
        t = np.arange(size) - size // 2
        r = np.hypot(t, t[:, None])
        kernel = np.where(r == 0, w**2 / (4 * math.pi), w * j1(w * r) / (2 * math.pi * np.maximum(r, 1)))
        return (kernel / kernel.sum()).astype(np.float32)

    def ring(self, x: np.ndarray) -> np.ndarray:
        if self.rng.random() >= 0.8:
            return x
        return cv2.filter2D(x, -1, self.sinc(2 * self.rng.integers(3, 11) + 1, math.pi / 3))

    def factor(self, up_down_keep: tuple[float, ...], low: float, high: float) -> float:
        return float(self.rng.uniform(*((1, high), (low, 1), (1, 1))[self.rng.choice(3, p=up_down_keep)]))

    def resize(self, x: np.ndarray, height: int, width: int) -> np.ndarray:
        how = (cv2.INTER_AREA, cv2.INTER_LINEAR, cv2.INTER_CUBIC)[self.rng.integers(3)]
        return cv2.resize(x, (width, height), interpolation=how)

    def noise(self, x: np.ndarray, sigma_max: float, strength_max: float) -> np.ndarray:
        gray = self.rng.random() < 0.4
        if self.rng.random() < 0.5:
            shape = (*x.shape[:2], 1) if gray else x.shape
            noise = self.rng.standard_normal(shape, dtype=np.float32) * (self.rng.uniform(1, sigma_max) / 255)
        else:
            levels = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None] if gray else x
            levels = (levels * 255).round().clip(0, 255) / 255
            white = 2 ** math.ceil(math.log2(len(np.unique(levels))))
            noise = (self.rng.poisson(levels * white) / white - levels) * self.rng.uniform(0.05, strength_max)
        return (x + noise).clip(0, 1).astype(np.float32)

    def jpeg(self, x: np.ndarray) -> np.ndarray:
        pixels = (x.clip(0, 1) * 255).round().astype(np.uint8)
        _, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, int(self.rng.integers(30, 96))])
        return cv2.imdecode(data, cv2.IMREAD_COLOR).astype(np.float32) / 255


def load(name: str) -> Pipeline:
    """A recipe of configs/degradations."""
    parser = ArgumentParser()
    parser.add_argument("--degradation", type=Degradation)
    values = yaml.safe_load((ROOT / "configs" / "degradations" / f"{name}.yaml").read_text())
    return parser.instantiate_classes(parser.parse_object({"degradation": values})).degradation


def photographs() -> torch.Tensor:
    """(PICTURES, 3, EDGE, EDGE) from the middle of the sample photographs."""
    found = [read_rgb(path) for path in list_images(ROOT / "datasets" / "sample")]
    crops = []
    for i in range(PICTURES):
        picture = found[i % len(found)]
        top, left = ((n - EDGE) // 2 for n in picture.shape[1:])
        crops.append(picture[:, top : top + EDGE, left : left + EDGE])
    return torch.stack(crops).float() / 255


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of all cores."""
    clock, cores = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - clock, time.process_time() - cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=16)
    rounds = parser.parse_args().rounds
    if cv2 is None:
        raise SRError("this benchmark compares with OpenCV, which is not installed: pip install opencv-python-headless")
    torch.set_num_threads(2)
    cv2.setNumThreads(2)
    batch, recipe, single = photographs(), load("real_esrgan"), PictureByPicture(0)
    pictures = [np.ascontiguousarray(p.permute(1, 2, 0).numpy()) for p in batch]

    def batched(seed: int) -> None:
        recipe(batch, SCALE, torch.Generator().manual_seed(seed))

    batched(0), single(pictures[0])
    times = []
    for seed in range(rounds):
        times.append((*timed(lambda: batched(seed)), *timed(lambda: [single(p) for p in pictures])))  # noqa: B023
    print(f"{PICTURES} pictures of {EDGE} x {EDGE}, ms per picture, mean of {rounds} rounds (median)")
    columns = [[1000 * t / PICTURES for t in column] for column in zip(*times, strict=True)]
    for i, label in enumerate(("batched", "OpenCV")):
        clock, cores = columns[2 * i : 2 * i + 2]
        print(
            f"  {label:8} {statistics.mean(clock):6.2f} ({statistics.median(clock):6.2f}), "
            f"CPU {statistics.mean(cores):6.2f} ({statistics.median(cores):6.2f})"
        )
    print(f"  ratio    {sum(columns[2]) / sum(columns[0]):6.2f}, CPU {sum(columns[3]) / sum(columns[1]):6.2f}")

    print("step by step, CPU ms per picture at 256 x 256, least of 5: batched, OpenCV")
    draws = Draws(torch.Generator().manual_seed(0), batch.device, SCALE, (EDGE // SCALE, EDGE // SCALE))
    blur, resize, noise, jpeg = recipe.steps.steps[:4]
    down = resize.__class__((0, 1, 0), (0.7, 1), list(MODES))
    pairs: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[np.ndarray], object]]] = {
        "sharpen": (recipe.sharpen, single.sharpen),
        "blur": (lambda x: blur(x, draws), lambda x: single.blur(x, 3)),
        "resize to 0.7-1": (
            lambda x: down(x, draws),
            lambda x: single.resize(x, *[int(EDGE * single.factor((0, 1, 0), 0.7, 1))] * 2),
        ),
        "noise": (lambda x: noise(x, draws), lambda x: single.noise(x, 30, 3)),
        "jpeg": (lambda x: jpeg(x, draws), single.jpeg),
    }
    with torch.inference_mode():
        for name, (ours, theirs) in pairs.items():
            a = min(timed(lambda: ours(batch))[1] for _ in range(5))  # noqa: B023
            b = min(timed(lambda: [theirs(p) for p in pictures])[1] for _ in range(5))  # noqa: B023
            print(f"  {name:16} {1000 * a / PICTURES:6.2f} {1000 * b / PICTURES:6.2f}")


if __name__ == "__main__":
    run_script(main)
