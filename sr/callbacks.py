"""What happens around the training loop: progress, validation report, previews, export of the best weights."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from sr.checkpoint import load, read_info, save
from sr.data import PictureSet
from sr.efficiency import card
from sr.errors import SRError
from sr.image import save_image
from sr.inference.tiling import upscale_tiled
from sr.metrics import PROTOCOLS
from sr.module import SRModule
from sr.preview import comparison

# A log file gets a line this often, in seconds, where a terminal gets a moving bar.
_LINE_INTERVAL = 10.0
_BAR_INTERVAL = 0.2


class TrainingProgress(ProgressBar):
    """A bar in a terminal, a line now and then in a file.

    It shows steps done, steps/s, samples/s, the share of time that the run waits for data, memory (the peak on a GPU,
    otherwise what the process has now), the loss, and the time to the last step, validations included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(file=sys.stdout)
        self._bar: Progress | None = None
        self._enabled = True
        self._started = self._printed = 0.0
        self._first_step = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            self.console.print(*args, highlight=False, soft_wrap=True, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._printed = time.monotonic()
        self._first_step = trainer.global_step
        if self._enabled and self.console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=20),  # a narrow terminal leaves it out, and cuts the end of the text off
                TextColumn("{task.completed}/{task.total}  {task.fields[status]}"),
                console=self.console,
            )
            self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, status="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, step = time.monotonic(), trainer.global_step
        interval = _BAR_INTERVAL if self._bar else _LINE_INTERVAL
        if not self._enabled or step == self._first_step or now - self._printed < interval:
            return
        self._printed = now
        loss = outputs["loss"].item() * trainer.accumulate_grad_batches  # Lightning's is a part of a step's
        left = (now - self._started) / (step - self._first_step) * (trainer.max_steps - step)
        parts = [f"{_duration(left)} left", f"loss {loss:.4f}", _describe_pace(trainer), _memory(pl_module.device)]
        status = "  ".join(filter(None, parts))
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, status=status)
        else:
            self.print(f"step {step}/{trainer.max_steps}  {status}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def _describe_pace(trainer: Trainer) -> str:
    pace = cast(SRModule, trainer.lightning_module).pace
    return pace.rates(trainer.datamodule.batch_size, trainer.accumulate_grad_batches)  # type: ignore[attr-defined]


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _memory(device: torch.device) -> str:
    """The peak of the GPU's memory, or this process's resident memory; empty where neither is known."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])  # Linux
    except OSError:
        return ""
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


class ValidationReport(Callback):
    """Prints each validation set's PSNR_Y and SSIM_Y beside bicubic's."""

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(SRModule, pl_module)
        show = getattr(trainer.progress_bar_callback, "print", print)
        for name, own in module.scores.items():
            base = module.bicubic_scores[name]
            show(
                f"step {trainer.global_step}  {name}: "
                f"PSNR_Y {own['psnr_y']:.2f} dB (bicubic {base['psnr_y']:.2f}, {own['psnr_y'] - base['psnr_y']:+.2f})  "
                f"SSIM_Y {own['ssim_y']:.4f} (bicubic {base['ssim_y']:.4f}, {own['ssim_y'] - base['ssim_y']:+.4f})"
            )


class BestWeights(Callback):
    """Exports the averaged weights whenever the mean PSNR_Y over all validation sets is the best so far.

    Args:
        folder: where ``best.safetensors`` goes.
        by_psnr: without it, the weights of each validation replace those before, in ``last.safetensors``. PSNR falls
            while textures become realistic, so that the best by it would be the least realistic ones.
    """

    def __init__(self, folder: Path, by_psnr: bool = True) -> None:
        self.path = folder / f"{'best' if by_psnr else 'last'}.safetensors"
        self.by_psnr = by_psnr
        self.best = float("-inf")  # mean PSNR_Y of the file
        self.step = 0  # of the file
        self._started = time.monotonic()
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._first_step = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(SRModule, pl_module)
        if trainer.sanity_checking or not module.scores:
            return
        psnr = sum(score["psnr_y"] for score in module.scores.values()) / len(module.scores)
        if psnr > (self.best if self.by_psnr else float("-inf")):  # never so if it is not a number
            self.best = psnr
            self._save(trainer, module)

    def finish(self, trainer: Trainer, module: SRModule) -> None:
        """At the end of the run: note what the network costs, and say how it went.

        A run without validation exports what it ends with.

        Raises:
            SRError: nothing was trained; there was validation, but no score that was a number; or the weights are not
                finite.
        """
        if module.scores and self.best == float("-inf"):
            if trainer.global_step == 0:
                raise SRError("the run ended before its first step, as a callback or trainer.max_time has it")
            raise SRError("the training diverged: no validation gave a number; lower model.optimizer.init_args.lr")
        if not module.scores:
            module.gather()
            self._save(trainer, module)
        if trainer.is_global_zero:
            self._add_cost()
            steps, seconds = trainer.global_step - self._first_step, time.monotonic() - self._started
            print("  ".join(filter(None, [f"{steps} steps in {_duration(seconds)}", _describe_pace(trainer)])))
            score = f", mean PSNR {self.best:.2f} dB" if module.scores else ""
            print(f"{self.path.stem} weights: {self.path} (step {self.step}{score})")

    def _save(self, trainer: Trainer, module: SRModule) -> None:
        self.step = trainer.global_step
        if trainer.is_global_zero:
            save(module.eval_network, self.path, info=self._info(trainer, module))

    def _add_cost(self) -> None:
        """Put the efficiency card into the file: here and not at each validation, since counting takes seconds."""
        network, info = load(self.path), read_info(self.path)["info"]
        try:
            cost = card(network, measure_time=False)
        except (SRError, RuntimeError, TypeError):  # a network that no counter understands is still trained
            return
        save(network, self.path, info=info | {"efficiency": cost})

    def _info(self, trainer: Trainer, module: SRModule) -> dict[str, Any]:
        """How the weights came about and how good they are, for the file's metadata."""
        protocol = PROTOCOLS["sisr-y"].but(crop_border=module.crop_border)
        config = self.path.with_name("config.yaml")  # as Lightning saved it, resolved
        return {
            "step": trainer.global_step,
            "averaged": module.ema is not None,
            "protocol": protocol.describe(module.network.scale),
            "validation": module.scores,
            "bicubic": module.bicubic_scores,
            "data": [_fingerprint(pictures) for pictures in trainer.datamodule.train_sets],  # type: ignore[attr-defined]
            "recipe": config.read_text() if config.is_file() else "",
        }

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.path.is_file():  # not so if the run goes on in another folder
            self.best, self.step = state_dict["best"], state_dict["step"]


def _fingerprint(pictures: PictureSet) -> dict[str, Any]:
    """What tells one state of a data set from another: SHA-256 of the names and sizes of its pictures."""
    facts = sorted((picture.name, *picture.gt_size) for picture in pictures.pictures)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return {"name": pictures.name, "pictures": len(facts), "sha256": digest}


class Previews(Callback):
    """Writes LQ | bicubic | SR | GT | error of one crop of each validation set's first picture.

    Args:
        folder: where ``<set>_<step>.png`` goes; TensorBoard gets the same picture.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module = cast(SRModule, pl_module)
        for pictures in trainer.datamodule.val_sets:  # type: ignore[attr-defined]
            strip = self._strip(module, pictures)
            self.folder.mkdir(parents=True, exist_ok=True)
            save_image(strip, self.folder / f"{pictures.name}_{trainer.global_step:07d}.png")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    image = np.asarray(strip)
                    logger.experiment.add_image(f"val/{pictures.name}", image, trainer.global_step, dataformats="HWC")

    @torch.no_grad()
    def _strip(self, module: SRModule, pictures: PictureSet) -> Image.Image:
        lq, gt = pictures.pair(0)
        network = module.eval_network
        dtype = next(network.parameters()).dtype
        sr = upscale_tiled(network, (lq[None].to(module.device).float() / 255).to(dtype), tile=256)[0]
        return comparison(lq, sr.float().cpu(), gt, network.scale)
