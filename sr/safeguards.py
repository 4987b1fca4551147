"""What keeps a run from losing work: whole checkpoints, an orderly stop on a signal, and steps that went wrong."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from sr.errors import SRError
from sr.module import SRModule

log = logging.getLogger(__name__)


class WholeCheckpointIO(TorchCheckpointIO):
    """Checkpoints are written beside their final name, flushed to disk, and renamed: whole or not at all.

    Lightning's own are written in the system's temporary folder and copied from there, if that is another disk.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        part = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except (OSError, RuntimeError) as e:  # torch's zip writer reports a full disk as a RuntimeError
            cause = e.__context__ if isinstance(e.__context__, OSError) else e
            full = isinstance(cause, OSError) and cause.errno == errno.ENOSPC
            left = f"; the one before is still there: {path}" if path.is_file() else ""
            reason = "no space left on the disk" if full else str(cause).splitlines()[0]
            raise SRError(f"cannot write the checkpoint {path} ({reason}){left}") from e
        finally:
            part.unlink(missing_ok=True)


class LastCheckpoint(Checkpoint):
    """Keeps the state of the run in ``last.ckpt``: after each validation, or as often without one, and at the end.

    Lightning calls it after all other callbacks, so what they learnt from a validation is in the file.

    Args:
        folder: where the file goes.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "last.ckpt"
        self.step = 0  # of the file; 0: none was written yet
        self._to_stop = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.path = Path(trainer.strategy.broadcast(str(self.path)))  # the first process has chosen the run's folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.save(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _between_steps(trainer):  # whoever wants the run to end (max_time) has to wait until the step is whole
            self._to_stop, trainer.should_stop = self._to_stop or trainer.should_stop, False
        elif self._to_stop:
            self._to_stop, trainer.should_stop = False, True
        if not trainer.val_dataloaders and (batch_idx + 1) % trainer.val_check_interval == 0:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint, whole or not at all; every process takes part."""
        trainer.save_checkpoint(self.path)
        self.step = trainer.global_step


class Stopped(SystemExit):
    """The run was asked to stop, and has saved its state. The exit status is 128 + the signal's number."""


class StopOnSignal(Callback):
    """SIGINT (Ctrl-C), SIGTERM and SIGUSR1: the step under way is finished, the state saved, the run left.

    SIGUSR1 is what many SLURM scripts have sent before the time is up.
    A second signal interrupts at once. All processes stop at the same step, whichever of them was asked.

    Args:
        checkpoint: what saves the state.
    """

    def __init__(self, checkpoint: LastCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.asked = 0  # the signal's number
        self._amid_validation = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # In place of Lightning's handlers: for SIGTERM it leaves without saving; for SIGUSR1, under SLURM, it saves
        # amid a step and queues the job again, which would begin a new run. At the end of the run, however it comes
        # about, Lightning puts back the handlers that it had found.
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
                if hasattr(signal, name):  # Windows has no SIGUSR1
                    signal.signal(getattr(signal, name), self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number
        print("\nstopping after this step; once more to stop at once", flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.val_dataloaders and (batch_idx + 1) % trainer.val_check_interval == 0:
            return  # a validation comes first; stopping in its first batch, it is not lost
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        # Processes validate equally many pictures, so that they can agree here, too.
        if not trainer.sanity_checking:
            self._amid_validation = True
            self._stop_if_asked(trainer)
            self._amid_validation = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if "loops" not in checkpoint:  # weights only
            return
        # A validation that was stopped begins anew. Lightning goes on with one that was stopped in a batch, and takes
        # one that was stopped between two for finished. That batch must not be left over in the next checkpoint.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
        progress["total"] = dict.fromkeys(progress["total"], progress["total"]["completed"])
        if self._amid_validation:
            progress["current"] = dict.fromkeys(progress["current"], 0)
            progress["total"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if trainer.state.fn != "fit" or _between_steps(trainer):
            return
        asked = self.asked
        if trainer.world_size > 1:
            number = torch.tensor(float(asked), device=trainer.strategy.root_device)
            asked = int(trainer.strategy.reduce(number, reduce_op="max"))
        if not asked:
            return
        self.checkpoint.save(trainer)
        raise Stopped(128 + asked)


class NonFiniteGuard(Callback):
    """A step whose gradient is not finite is skipped and counted; after some in a row, the run goes back or stops.

    Skipped means that weights and optimiser stay as they were; the run goes on with the next batch.

    Args:
        patience: how many steps in a row may be skipped.
        then: ``stop`` the run with an error that names the last batch's pictures, or ``rollback``: weights, averaged
            weights and optimiser go back to the last checkpoint, and the learning rate is lower from there on. The
            data go on, so that the run does not meet the same batches again.
        lr_factor: what the learning rate is multiplied by at each rollback.

    Raises:
        SRError: a setting out of range, or ``rollback`` for sharded training.
    """

    def __init__(self, patience: int = 10, then: Literal["stop", "rollback"] = "stop", lr_factor: float = 0.5) -> None:
        if patience < 1 or not 0 < lr_factor < 1:
            raise SRError(f"guard: {patience=} must be at least 1, and lr_factor between 0 and 1, not {lr_factor}")
        self.patience, self.then, self.lr_factor = patience, then, lr_factor
        self.skipped = self.in_a_row = 0
        self._samples: list[int] = []
        self._roll_back = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.then == "rollback" and isinstance(trainer.strategy, ModelParallelStrategy):
            raise SRError("guard.then: rollback is not for sharded training; choose stop")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not _between_steps(trainer):
            self._samples = []
        self._samples += batch["index"].tolist() if "index" in batch else []

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = cast(Tensor, getattr(norm, "full_tensor", lambda: norm)())  # of sharded gradients
        cast(SRModule, pl_module).log_train("grad_norm", norm)
        if norm.isfinite():
            self.in_a_row = 0
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.get_scale() > 1:
            return  # half precision: the scaler skips the step itself, and tries a smaller scale
        optimizer.zero_grad(set_to_none=True)  # an optimiser leaves parameters without a gradient alone
        self.skipped += 1
        self.in_a_row += 1
        where = f"step {trainer.global_step + 1}"
        if self.in_a_row == 1:
            log.warning("%s: the gradient is not finite, so the step is skipped (%d so far)", where, self.skipped)
        if self.in_a_row < self.patience:
            return
        if self.then == "stop" or _last_checkpoint(trainer) is None:
            pictures = ", ".join(dict.fromkeys(trainer.datamodule.sample_names(self._samples)))  # type: ignore[attr-defined]
            raise SRError(
                f"{where}: the gradient was not finite {self.in_a_row} times in a row, the last time on {pictures};\n"
                "look at these, or lower model.optimizer.init_args.lr"
            )
        self._roll_back = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._roll_back:
            return
        last = cast(LastCheckpoint, _last_checkpoint(trainer))
        state = torch.load(last.path, map_location=trainer.strategy.root_device, weights_only=True)
        pl_module.load_state_dict(state["state_dict"])
        trainer.strategy.load_optimizer_state_dict(state)
        module = cast(SRModule, pl_module)
        factor = module.lr_factor
        module.on_load_checkpoint(state)
        module.lr_factor = factor  # lower with each rollback, also if several go back to the same checkpoint
        module.lr_factor *= self.lr_factor
        for config in trainer.lr_scheduler_configs:  # which have set the rates of the next step already
            scheduler = cast(LambdaLR, config.scheduler)
            rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, base, factor_at in rates:
                group["lr"] = base * factor_at(scheduler.last_epoch)
        self._roll_back, self.in_a_row = False, 0
        log.warning(
            "step %d: back to the weights of step %d, with %g of the configured learning rate",
            trainer.global_step,
            last.step,
            module.lr_factor,
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.skipped:
            log.warning("%d steps were skipped, since their gradient was not finite", self.skipped)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]


def _between_steps(trainer: Trainer) -> bool:
    """Whether gradients are being accumulated: an optimiser step is under way."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # Any: typed as its base class
    return progress.processed % trainer.accumulate_grad_batches != 0


def _last_checkpoint(trainer: Trainer) -> LastCheckpoint | None:
    """The run's checkpoint, if one was written."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, LastCheckpoint) and c.path.is_file()), None)
