"""``scripts/train.py``: a config in, a run folder with weights out."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import warnings
from argparse import ArgumentError
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import sr.archs
import sr.losses
import sr.schedules  # noqa: F401  (their classes are named in configs)
from sr.callbacks import BestWeights, Previews, TrainingProgress, ValidationReport
from sr.checkpoint import resume_step
from sr.config_errors import explain, refuse_empty_files
from sr.data import SRDataModule
from sr.data.check import check as find_faults
from sr.errors import SRError
from sr.gan import GANModule, make_module
from sr.logs import ResumableCSVLogger
from sr.module import SRModule
from sr.safeguards import LastCheckpoint, NonFiniteGuard, StopOnSignal, Stopped, WholeCheckpointIO

_RUN_DIR = "SR_RUN_DIR"  # tells the other processes of a multi-device run which folder the first one chose


class SRCLI(LightningCLI):
    """Reads the config, builds network, data and trainer; :meth:`train` checks the data and does the rest.

    Without sub-commands (``run=False``), so that Lightning never merges a checkpoint's hyper-parameters over what
    the user wrote.

    Raises:
        SRError: any mistake in the config; nothing is left behind.
    """

    run_dir: Path
    weights: BestWeights
    model: SRModule
    datamodule: SRDataModule
    _made_run_dir = False

    def __init__(self, args: list[str] | None = None) -> None:
        refuse_empty_files()
        try:
            super().__init__(
                make_module,
                SRDataModule,
                args=args,
                run=False,
                seed_everything_default=0,
                parser_kwargs={
                    "exit_on_error": False,
                    "allow_abbrev": False,
                    "description": "Train a super-resolution network. Every key of the config is an option, too.",
                },
                save_config_callback=SaveRunConfig,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,  # sr.load reads checkpoints; it cannot do with a function, either
                trainer_defaults={
                    "max_epochs": -1,
                    "check_val_every_n_epoch": None,  # validation counts steps, too
                    "val_check_interval": 1000,
                    "num_sanity_val_steps": -1,  # all of it: a broken validation set fails before the first step
                    "use_distributed_sampler": False,  # the data module splits the batch itself
                    "enable_model_summary": False,
                    "log_every_n_steps": 20,
                },
            )
        except (ArgumentError, MisconfigurationException, TypeError, ValueError, OSError) as e:
            self._discard_run_dir()
            raise e if isinstance(e, SRError) else SRError(explain(str(e), self.parser)) from e

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="continue exactly where this checkpoint stopped"
        )
        parser.add_argument("--runs", type=str, default="runs", help="folder for run folders")
        parser.add_argument("--name", type=str | None, default=None, help="of the run; default: the config's name")
        parser.add_lightning_class_args(NonFiniteGuard, "guard")
        parser.link_arguments("model", "data.scale", compute_fn=lambda m: m.network.scale, apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        if self.config.trainer.max_steps < 1:
            raise SRError("the length of the run is missing: set trainer.max_steps to the number of optimiser steps")
        for key in ("val_check_interval", "accumulate_grad_batches"):
            value = self.config.trainer[key]
            if not isinstance(value, int):
                raise SRError(f"trainer.{key} must be a whole number, not {value}")
            if value < 1:
                raise SRError(f"trainer.{key} must be at least 1, not {value}")
        checkpoint = self.config.ckpt_path
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise SRError(f"no checkpoint at {checkpoint}")
        if checkpoint is not None:
            self.config.model.weights = None  # what the run started from is in the checkpoint

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        config = self.config_init.trainer
        self._first_step = 0
        if self.config.ckpt_path:
            parts = {key.partition(".")[0] for key in self.model.state_dict()}
            self._first_step = resume_step(self.config.ckpt_path, self.model.network, parts)
        folder = self.run_dir = self._reserve_run_dir()
        self.weights = BestWeights(folder, by_psnr=not isinstance(self.model, GANModule))
        callbacks = [ValidationReport(), Previews(folder / "previews"), self.weights]
        if config.enable_progress_bar is not False:
            callbacks.insert(0, TrainingProgress())
        if config.enable_checkpointing is not False:
            last = LastCheckpoint(folder / "checkpoints")
            callbacks += [StopOnSignal(last), last]
        kwargs["callbacks"] = [*(config.callbacks or []), *callbacks]
        kwargs["default_root_dir"] = str(folder)
        plugins = config.plugins or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), WholeCheckpointIO()]
        if config.logger is None:
            tensorboard = TensorBoardLogger(str(folder), name="", version="tensorboard")
            kwargs["logger"] = [ResumableCSVLogger(folder, self._first_step), tensorboard]
        # Lightning counts batches there; a step may take several.
        kwargs["val_check_interval"] = config.val_check_interval * config.accumulate_grad_batches
        return super().instantiate_trainer(**kwargs)

    def _reserve_run_dir(self) -> Path:
        """Make a folder that no other run has, or find the one of the run that is resumed."""
        if _RUN_DIR in os.environ:
            return Path(os.environ[_RUN_DIR])
        checkpoint = self.config.ckpt_path
        if checkpoint is not None and Path(checkpoint).parent.name == "checkpoints":
            run_dir = Path(checkpoint).parent.parent
        else:
            configs = self.config.config or []
            name = self.config.name or (Path(str(configs[0])).stem if configs else "run")
            parent = Path(self.config.runs).expanduser() / name
            if rank_zero_only.rank:  # type: ignore[attr-defined]  # started by torchrun or SLURM; only the first process writes
                return parent / "elsewhere"
            run_dir = _new_folder(parent)
            self._made_run_dir = True
        self.config.name = run_dir.parent.name  # so that the saved config leads to the same place
        os.environ[_RUN_DIR] = str(run_dir)
        return run_dir

    def _discard_run_dir(self) -> None:
        """After a failure before the first step: remove the folder that was made, and those left empty."""
        os.environ.pop(_RUN_DIR, None)
        if not self._made_run_dir:
            return
        shutil.rmtree(self.run_dir, ignore_errors=True)  # it holds at most the config and the head of a log
        for folder in list(self.run_dir.parents)[:2]:
            if folder == Path() or any(folder.iterdir()):
                break
            folder.rmdir()

    def train(self) -> None:
        """Check everything, train to the end, validate there, and say where everything is.

        Raises:
            SRError: a mistake in the data or a setting, found before the first step; or the training diverged.
        """
        try:
            self._check()
        except BaseException:  # Ctrl-C, too
            self._discard_run_dir()
            raise
        try:
            self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.config.ckpt_path)
            if self.model.validated_step != self.trainer.global_step and self.datamodule.val_sets:
                self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        except SystemExit as e:
            if self.trainer.interrupted and self.trainer.is_global_zero:
                print(f"stopped at step {self.trainer.global_step}; the run folder is {self.run_dir}")
                for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(callback, LastCheckpoint) and callback.step:
                        again = f"--config {self.run_dir / 'config.yaml'} --ckpt_path {callback.path}"
                        print(f"continue from step {callback.step} with {again}")
            if self.trainer.interrupted and not isinstance(e, Stopped):  # Lightning's exit(1) after the second Ctrl-C
                raise SystemExit(130) from None
            raise
        except Exception:
            if self.trainer.global_step <= self._first_step:
                self._discard_run_dir()
            raise
        finally:
            os.environ.pop(_RUN_DIR, None)
        if self.trainer.global_step < self.trainer.max_steps and self.trainer.is_global_zero:
            how = "as a callback or trainer.max_time has it"
            print(f"ended at step {self.trainer.global_step} of {self.trainer.max_steps}, {how}")
        self._finish()

    def _check(self) -> None:
        """Whatever can be known to be wrong before the first step."""
        data = self.datamodule
        data.trainer = self.trainer
        report = find_faults(
            data.train_sets, data.val_sets, data.scale, data.gt_size, thorough=False, on_error=data.on_error
        )
        try:
            data.setup("fit")
        except SRError as e:
            count = sum(len(f.files) or 1 for f in report.findings if f.level == "error")
            more = f" ({count} faults in all: scripts/prepare_data.py check lists them)" if count > 1 else ""
            raise SRError(f"{e}{more}") from e
        smallest = min((min(size) for pictures in self.datamodule.val_sets for size in pictures.gt_sizes), default=None)
        crop = self.model.crop_border
        if smallest is not None and (crop < 0 or smallest <= 2 * crop):
            raise SRError(
                f"model.crop_border {crop} leaves nothing of the smallest validation picture ({smallest} pixels); "
                f"it lies between 0 and {(smallest - 1) // 2}"
            )
        try:
            self.model.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as e:
            raise SRError(f"model.optimizer: {e}") from e

    def _finish(self) -> None:
        self.weights.finish(self.trainer, self.model)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LastCheckpoint):
                callback.save(self.trainer)
        if self.trainer.is_global_zero:
            print(f"run folder: {self.run_dir}\nupscale with the new weights:")
            print(f"  python scripts/upscale.py image.png -m {self.weights.path} -o large.png")


class DataCLI(SRCLI):
    """Reads a training config for its data alone: no trainer, no run folder.

    Raises:
        SRError: any mistake in the config.
    """

    def before_instantiate_classes(self) -> None:
        """The length of the run does not matter here."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


class SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config such that running it again is a new run of the same name, not a resumption."""

    def __init__(self, parser: LightningArgumentParser, config: Any, **kwargs: Any) -> None:
        config = copy.deepcopy(config)
        config.ckpt_path = None
        super().__init__(parser, config, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Into the run folder: Lightning asks the first logger for a place, which others than ours have elsewhere."""
        if not self.already_saved and trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "config.yaml"
            self.parser.save(self.config, str(path), skip_none=False, overwrite=True, multifile=False)
        self.already_saved = True


def _new_folder(parent: Path) -> Path:
    """Make the folder in ``parent`` whose number follows the highest."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise SRError(f"cannot make a run folder in {parent} ({e.strerror}); choose another with --runs") from e
    number = max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    while True:  # making a folder succeeds for one process only
        number += 1
        try:
            (parent / f"{number:03d}").mkdir()
            return parent / f"{number:03d}"
        except FileExistsError:
            continue


def main(args: list[str] | None = None) -> None:
    """Entry point of ``scripts/train.py``."""
    set_up_logging()
    SRCLI(args).train()


def set_up_logging() -> None:
    """Show the project's messages, once over all processes, and of Lightning's only what applies here."""
    logging.basicConfig(format="%(message)s")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger("sr").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "does not have many workers",
        "in eval mode at the start",
        "LeafSpec",
        "Total length of `list` across ranks is zero",
        "smaller than the logging interval",
        "sync_dist=True",  # metrics reduce themselves; the rest is equal on all devices
        "returned a view tensor",
        "`IterableDataset` has `__len__` defined",
        "args parameter is intended to run from within Python",
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
