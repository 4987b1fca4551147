"""The training loop's view of a network: losses, optimiser, averaged weights, validation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric, MetricCollection

from sr.checkpoint import describe
from sr.errors import SRError
from sr.finetune import start_from
from sr.inference.tiling import upscale_tiled
from sr.losses import Loss
from sr.metrics import PSNR, SSIM
from sr.network import SRNetwork
from sr.pace import Pace
from sr.resize import imresize
from sr.schedules import Schedule

# Validation pictures larger than this edge (input pixels) go through the network in tiles, to bound memory.
_VALIDATION_TILE = 512


class SRModule(LightningModule):
    """Trains a super-resolution network.

    A batch is a dictionary with ``lq`` (N, 3, h, w) and ``gt`` (N, 3, scale*h, scale*w), float32, RGB, [0, 1]; for
    validation also with ``counts`` (see :class:`sr.data.PictureDataset`).

    Args:
        network: the network, by class path.
        losses: the terms of the loss; their weighted sum is minimised.
        optimizer: called with the trainable parameters.
        scheduler: factor of the learning rate as a function of the fraction of the run that is done.
        ema_decay: decay of the exponential moving average of the weights, which is what is validated and exported;
            it warms up as ``(1 + step) / (10 + step)``, step counted from 0. 0: no average.
        crop_border: pixels shaved off each side before validation metrics, in GT pixels. Default: the scale.
        compile: train through ``torch.compile``: faster steps, after a minute or so of compiling.
        weights: what a new run starts from (:func:`sr.finetune.start_from`); also of another scale.
        weights_partly: start from ``weights`` even if less than 90 % of the network are in them.
    """

    def __init__(
        self,
        network: SRNetwork,
        losses: list[Loss],
        optimizer: OptimizerCallable,
        scheduler: Schedule,
        ema_decay: float = 0.999,
        crop_border: int | None = None,
        compile: bool = False,
        weights: str | None = None,
        weights_partly: bool = False,
    ) -> None:
        super().__init__()
        if not losses:
            raise SRError("model.losses is empty; name at least one, e.g. class_path: sr.losses.L1Loss")
        for loss in losses:
            if loss.scale not in (None, network.scale):
                raise SRError(f"model.losses: {loss.name} is for networks of scale {loss.scale}, not {network.scale}")
        if not 0 <= ema_decay < 1:
            raise SRError(f"model.ema_decay lies in [0, 1), not {ema_decay}")
        if weights is not None:
            print(f"starting from {weights}: {start_from(network, weights, weights_partly)}")
        # Channels-last is what both CPU and GPU convolutions prefer; parameters keep the format through checkpoints.
        self.network = network.to(memory_format=torch.channels_last)
        self.ema: SRNetwork | None = copy.deepcopy(network).eval().requires_grad_(False) if ema_decay else None
        if compile:
            self.network.compile()  # in place: names of parameters stay; the averaged network sees pictures of any size
        self.ema_decay = ema_decay
        self.losses = nn.ModuleList(losses)
        self.make_optimizer = optimizer
        self.schedule = scheduler
        self.lr_factor = 1.0  # of all learning rates; a rollback lowers it
        self.crop_border = network.scale if crop_border is None else crop_border
        # Data set -> {"psnr_y", "ssim_y"}: the latest validation, and bicubic's, which is computed once.
        self.scores: dict[str, dict[str, float]] = {}
        self.bicubic_scores: dict[str, dict[str, float]] = {}
        self.validated_step = -1
        self.pace = Pace()
        self._sharded = False
        self._whole: list[SRNetwork] = []  # sharded training: what gather() makes; in a list, so not in checkpoints

    @property
    def eval_network(self) -> SRNetwork:
        """The network that is validated and exported: the averaged one if there is one; see :meth:`gather`."""
        if self._whole:
            return self._whole[0]
        return self.network if self.ema is None else self.ema

    def forward(self, lq: Tensor) -> Tensor:
        return self.eval_network(lq)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SRModule:
        """Moves everything, and changes its type (bf16-true); but the average stays in float32.

        In bfloat16 it would stand still: a thousandth of a small change is lost in rounding.
        """
        ema, self.ema = self.ema, None
        try:
            super()._apply(fn, recurse)
        finally:
            self.ema = ema
        if ema is not None:
            ema._apply(lambda t: t.to(fn(torch.empty(0, device=t.device)).device))
        return self

    def _input(self, network: SRNetwork, batch: dict[str, Any]) -> Tensor:
        """``lq`` as a network wants it: channels-last, and in its dtype (another than float32 with bf16-true)."""
        lq: Tensor = batch["lq"]
        return lq.to(next(network.parameters()).dtype).contiguous(memory_format=torch.channels_last)

    def configure_model(self) -> None:
        """Shard parameters, gradients and optimiser state over the devices, if the strategy is FSDP2."""
        if not isinstance(self.trainer.strategy, ModelParallelStrategy) or self._sharded:
            return
        mesh = self.trainer.strategy.device_mesh["data_parallel"]
        for network in (self.network, self.ema):
            if network is None:
                continue
            network.to(memory_format=torch.contiguous_format)  # the only one that can be sharded
            for part in network.children():
                for block in part if isinstance(part, nn.ModuleList | nn.Sequential) else ():
                    fully_shard(block, mesh=mesh)
            fully_shard(network, mesh=mesh)
        self._sharded = True

    # --- training

    def on_train_start(self) -> None:
        if self.trainer.num_sanity_val_steps != float("inf"):
            self.bicubic_scores.clear()  # they are those of the few pictures that were tried

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """What a network draws (dropped paths, for instance) depends on seed and batch, so that resuming is exact."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        key = (data.seed, data.batches_done(), self.trainer.global_rank)
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes its time for devices that are not used
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        total = self.objective(self.network(self._input(self.network, batch)), batch)
        self.log_train("loss", total)
        if self._is_written:
            self._log_number("step", self.trainer.global_step + 1)  # loggers count optimiser steps, this one included
            self._log_number("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return total

    def objective(self, sr: Tensor, batch: dict[str, Any]) -> Tensor:
        """What is minimised, for the network's output; each term is logged."""
        total = sr.new_zeros((), dtype=torch.float32)
        for loss in self.losses:
            value = loss(sr, batch["gt"], batch["lq"])
            total = total + loss.weight * value
            self.log_train(str(loss.name), value)
        return total

    def log_train(self, name: str, value: Tensor) -> None:
        """Log ``train/<name>``, averaged over the devices, in the steps whose values are written."""
        if self._is_written:
            self.log(f"train/{name}", value, sync_dist=self.trainer.world_size > 1)

    @property
    def _is_written(self) -> bool:
        """Whether loggers will hear of the step under way. In the others, Lightning's ``log`` is time for nothing."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.trainer.global_step + 1) % every == 0

    def _log_number(self, name: str, value: float) -> None:
        """Log what the CPU knows, without moving it to the GPU, which would wait for that to finish its work."""
        self.log(name, torch.tensor(float(value)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pace.batch_done()
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every > 0 and self.trainer.global_step % every == 0 and (waiting := self.pace.lap()) is not None:
            self._log_number("data_wait", waiting)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._update_ema()

    @torch.no_grad()
    def _update_ema(self) -> None:
        if self.ema is None:
            return
        step = self.trainer.global_step  # does not count the step that was just taken yet
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        means, values, with_buffers = self._averaged
        if means[0].dtype != values[0].dtype:  # bf16-true
            values = [value.to(means[0].dtype) for value in values]
        torch._foreach_lerp_(means, values, 1 - decay)
        for ema, network in with_buffers:
            for mean, value in zip(ema.buffers(recurse=False), network.buffers(recurse=False), strict=True):
                mean.copy_(value)

    @cached_property
    def _averaged(self) -> tuple[list[Tensor], list[Tensor], list[tuple[nn.Module, nn.Module]]]:
        """Parameters of the average and of the network, and the modules of both that have buffers.

        To look them up in every step would take longer than to average them.
        """
        ema = cast(SRNetwork, self.ema)
        pairs = zip(ema.modules(), self.network.modules(), strict=True)
        with_buffers = [pair for pair in pairs if next(pair[0].buffers(recurse=False), None) is not None]
        return list(ema.parameters()), list(self.network.parameters()), with_buffers

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer: Optimizer = self.make_optimizer(p for p in self.network.parameters() if p.requires_grad)
        total = self.trainer.max_steps
        scheduler = LambdaLR(optimizer, lambda step: self.lr_factor * self.schedule(step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sr_network"] = describe(self.network)  # lets sr.load read the checkpoint
        checkpoint["lr_factor"] = self.lr_factor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.lr_factor = checkpoint.get("lr_factor", 1.0)

    # --- validation

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer  # Any: typed without its profiler and its data module
        if type(trainer.profiler) is PassThroughProfiler:  # the default
            trainer.profiler = self.pace
        self.val_names = [pictures.name for pictures in trainer.datamodule.val_sets]
        self.metrics = nn.ModuleList(self._make_metrics() for _ in self.val_names)
        self.bicubic_metrics = nn.ModuleList(self._make_metrics() for _ in self.val_names)

    def _make_metrics(self) -> MetricCollection:
        metrics: dict[str, Metric | MetricCollection] = {
            "psnr_y": PSNR(crop_border=self.crop_border),
            "ssim_y": SSIM(crop_border=self.crop_border),
        }
        return MetricCollection(metrics, compute_groups=False)

    def on_validation_start(self) -> None:
        self.gather()  # processes validate pictures of different sizes, in different numbers of tiles

    def gather(self) -> None:
        """Make :attr:`eval_network` the whole network as it is now, if it is sharded; every process takes part."""
        if not self._sharded:
            return
        network = self.network if self.ema is None else self.ema
        state = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True))
        if not self._whole:
            whole = type(network)(**network.hparams).to(self.device, next(network.parameters()).dtype)
            self._whole.append(whole.eval().requires_grad_(False))
        self._whole[0].load_state_dict(state)

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        network = self.eval_network
        sr = upscale_tiled(network, self._input(network, batch), _VALIDATION_TILE).float()
        if not batch["counts"].item():  # a stand-in that keeps the processes in step
            return
        lq, gt = batch["lq"], batch["gt"]
        cast(MetricCollection, self.metrics[dataloader_idx]).update(sr, gt)
        if self.val_names[dataloader_idx] not in self.bicubic_scores:
            # Through uint8, since that is how bicubic's published values came about.
            sr = imresize((lq * 255).round().to(torch.uint8), self.network.scale)
            cast(MetricCollection, self.bicubic_metrics[dataloader_idx]).update(sr, gt)

    def on_validation_end(self) -> None:
        self.pace.skip()

    def on_validation_epoch_end(self) -> None:
        for name, own, bicubic in zip(self.val_names, self.metrics, self.bicubic_metrics, strict=True):
            self.scores[name] = _compute(cast(MetricCollection, own))
            if name not in self.bicubic_scores:
                self.bicubic_scores[name] = _compute(cast(MetricCollection, bicubic))
            if not self.trainer.sanity_checking:
                for key, value in self.scores[name].items():
                    self.log(f"val/{name}/{key}", value, rank_zero_only=True)
                    gain = value - self.bicubic_scores[name][key]
                    self.log(f"val/{name}/{key}_gain", gain, rank_zero_only=True)
        if not self.trainer.sanity_checking:
            self.log("step", float(self.trainer.global_step))
        self.validated_step = self.trainer.global_step


def _compute(metrics: MetricCollection) -> dict[str, float]:
    values = {key: value.item() for key, value in metrics.compute().items()}
    metrics.reset()
    return values
