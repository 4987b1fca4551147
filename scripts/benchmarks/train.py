"""Whole training steps of SAFMN x4: this framework, a bare loop on tensors in memory, and one fed with PNG files."""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from benchmarks.data import Files, endless_loader, require_peers, write_sub_images
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from sr.archs import SpandrelNetwork
from sr.cli import SRCLI, set_up_logging
from sr.data import GTFolder

_SCALE, _GT, _BATCH = 4, 192, 8
_NETWORK = {"scale": _SCALE, "arch": "SAFMN", "args": {"dim": 36, "n_blocks": 8}}
_OURS, _MEMORY, _FILES = "this framework, from a pack", "bare loop, tensors in memory", "bare loop, PNG sub-images"


class _BareLoop:
    """What one writes by hand: no average, no log, no check, no schedule.

    Args:
        batches: ``lq`` and ``gt``, uint8 or float in [0, 1].
        device: where it trains.
    """

    def __init__(self, batches: Iterable[dict[str, Tensor]], device: torch.device) -> None:
        self.batches = iter(batches)
        self.device = device
        self.network = SpandrelNetwork(**_NETWORK).to(device, memory_format=torch.channels_last)  # type: ignore[arg-type, call-overload]
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)

    def step(self) -> None:
        batch = {k: v.to(self.device, non_blocking=True) for k, v in next(self.batches).items()}
        lq, gt = (v.float() / 255 if v.dtype == torch.uint8 else v for v in (batch["lq"], batch["gt"]))
        self.optimizer.zero_grad()
        F.l1_loss(self.network(lq.contiguous(memory_format=torch.channels_last)), gt).backward()
        self.optimizer.step()


class _Turns(Callback):
    """Stops the framework's run every few steps and lets the other loops take their turn.

    Args:
        others: one step of each other loop.
        warm_up: first steps of a turn, not timed: they use up what was fetched ahead while the others had their turn.
        steps: that are timed in a turn.
        device: that has to be done when a clock is read.
    """

    def __init__(self, others: dict[str, Callable[[], None]], warm_up: int, steps: int, device: torch.device) -> None:
        self.others, self.warm_up, self.steps, self.device = others, warm_up, steps, device
        self.seconds: dict[str, list[float]] = {name: [] for name in (_OURS, *others)}
        self._start = 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        place = trainer.global_step % (self.warm_up + self.steps)
        if place == self.warm_up:
            self._start = self._now()
        elif place == 0:
            self.seconds[_OURS].append((self._now() - self._start) / self.steps)
            for name, step in self.others.items():
                self.seconds[name].append(self._time(step))

    def _time(self, step: Callable[[], None]) -> float:
        for _ in range(self.warm_up):
            step()
        start = self._now()
        for _ in range(self.steps):
            step()
        return (self._now() - start) / self.steps


def _config(args: argparse.Namespace, steps: int) -> dict[str, Any]:
    """The framework as users run it: average, guard, schedule, logs and progress are on."""
    return {
        "model": {
            "network": {"class_path": "sr.archs.SpandrelNetwork", "init_args": _NETWORK},
            "losses": [{"class_path": "sr.losses.L1Loss"}],
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 1e-3}},
            "scheduler": {"class_path": "sr.schedules.Cosine"},
        },
        "data": {
            "train": {"class_path": "sr.data.GTFolder", "init_args": {"root": args.data}},
            "gt_size": _GT,
            "batch_size": _BATCH,
            "num_workers": args.workers,
        },
        "trainer": {"max_steps": steps, "accelerator": "gpu" if args.device == "cuda" else "cpu", "devices": 1},
    }


def training(args: argparse.Namespace) -> None:
    """Training steps a second of the framework beside hand-written loops."""
    require_peers()
    device = torch.device(args.device)
    warm_up = 2 * args.workers + 1
    lq, gt = (torch.rand(_BATCH, 3, edge, edge, device=device) for edge in (_GT // _SCALE, _GT))
    set_up_logging()
    with tempfile.TemporaryDirectory() as folder:
        pictures = GTFolder(args.data)
        pictures.prepare(_SCALE)
        files = Files(write_sub_images(pictures, Path(folder)), Path(folder))
        loops = {
            _MEMORY: _BareLoop(itertools.repeat({"lq": lq, "gt": gt}), device),
            _FILES: _BareLoop(endless_loader(files, _BATCH, args.workers), device),
        }
        turns = _Turns({name: loop.step for name, loop in loops.items()}, warm_up, args.steps, device)
        config = Path(folder) / "benchmark.yaml"
        config.write_text(yaml.safe_dump(_config(args, args.repeats * (warm_up + args.steps))))
        cli = SRCLI(["--config", str(config), "--runs", folder, "--data.cache_dir", folder])
        cli.trainer.callbacks.insert(0, turns)  # type: ignore[attr-defined]
        cli.train()
    _print(turns.seconds, args)


def _print(seconds: dict[str, list[float]], args: argparse.Namespace) -> None:
    print(f"\nSAFMN x4, batch {_BATCH}, LR {_GT // _SCALE}, {args.workers} workers, {args.device}; medians of turns")
    print("\n| training steps | ms/step | samples/s | the framework's speed against it (range) |\n|---|---|---|---|")
    for name, values in seconds.items():
        each = statistics.median(values)
        ratios = sorted(other / own for other, own in zip(values, seconds[_OURS], strict=True))
        ratio = f"{statistics.median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {name} | {1000 * each:.1f} | {_BATCH / each:.1f} | {ratio} |")


def add_to(commands: Any) -> None:
    """Add the subcommand ``train``."""
    command = commands.add_parser("train", help=training.__doc__, description=__doc__)
    command.add_argument("--data", default="datasets/sample/train", help="folder of photographs")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--steps", type=int, default=10, help="timed in each turn (default: 10)")
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    command.set_defaults(run=training)
