"""``scripts/train.py``: a config in, a run folder with weights out."""

from __future__ import annotations

import logging
import os
import warnings
from argparse import ArgumentError
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import sr.archs
import sr.losses
import sr.schedules  # noqa: F401  (their classes are named in configs)
from sr.callbacks import BestWeights, Previews, TrainingProgress, ValidationReport
from sr.config_errors import explain
from sr.data import SRDataModule
from sr.errors import SRError
from sr.module import SRModule

_RUN_DIR = "SR_RUN_DIR"  # tells the other processes of a multi-device run which folder the first one chose


class SRCLI(LightningCLI):
    """Reads the config, builds network, data and trainer, and checks the data; :meth:`train` does the rest.

    Without sub-commands (``run=False``), so that Lightning never merges a checkpoint's hyper-parameters over what
    the user wrote.
    """

    run_dir: Path

    def __init__(self, args: list[str] | None = None) -> None:
        super().__init__(
            SRModule,
            SRDataModule,
            args=args,
            run=False,
            seed_everything_default=0,
            parser_kwargs={"exit_on_error": False},
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            trainer_defaults={
                "max_epochs": -1,
                "check_val_every_n_epoch": None,  # validation counts steps, too
                "num_sanity_val_steps": -1,  # all of it: a broken validation set fails before the first step
                "use_distributed_sampler": False,  # the data module splits the batch itself
                "enable_model_summary": False,
                "log_every_n_steps": 20,
            },
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="continue exactly where this checkpoint stopped"
        )
        parser.add_argument("--runs", type=str, default="runs", help="folder for run folders")
        parser.add_argument("--name", type=str | None, default=None, help="of the run; default: the config's name")
        parser.link_arguments("model", "data.scale", compute_fn=lambda m: m.network.scale, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as e:
            raise SRError(explain(str(e), parser)) from e

    def before_instantiate_classes(self) -> None:
        if self.config.trainer.max_steps < 1:
            raise SRError("the length of the run is missing: set trainer.max_steps to the number of optimiser steps")
        checkpoint = self.config.ckpt_path
        if checkpoint is not None and not Path(checkpoint).is_file():
            raise SRError(f"no checkpoint at {checkpoint}")
        self.run_dir = self._choose_run_dir()

    def _choose_run_dir(self) -> Path:
        if _RUN_DIR in os.environ:
            return Path(os.environ[_RUN_DIR])
        checkpoint = self.config.ckpt_path
        if checkpoint is not None and Path(checkpoint).parent.name == "checkpoints":
            run_dir = Path(checkpoint).parent.parent  # a resumed run goes on in its own folder
        else:
            configs = self.config.config or []
            parent = Path(self.config.runs) / (self.config.name or (Path(str(configs[0])).stem if configs else "run"))
            taken = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
            run_dir = parent / f"{max(taken, default=0) + 1:03d}"
        os.environ[_RUN_DIR] = str(run_dir)
        return run_dir

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        folder = self.run_dir
        config = self.config_init.trainer
        callbacks = [
            TrainingProgress(),
            ValidationReport(),
            Previews(folder / "previews"),
            BestWeights(folder),
            ModelCheckpoint(
                dirpath=folder / "checkpoints",
                filename="last",
                enable_version_counter=False,
                every_n_train_steps=config.val_check_interval if isinstance(config.val_check_interval, int) else 1000,
                save_on_train_epoch_end=True,
            ),
        ]
        kwargs["callbacks"] = [*(config.callbacks or []), *callbacks]
        kwargs["default_root_dir"] = str(folder)
        if config.logger is None:
            kwargs["logger"] = [
                CSVLogger(str(folder), name="", version="", flush_logs_every_n_steps=100),
                TensorBoardLogger(str(folder), name="", version="tensorboard"),
            ]
        return super().instantiate_trainer(**kwargs)

    def train(self) -> None:
        """Train to the end, validate there, and say where everything is."""
        self.datamodule.trainer = self.trainer
        self.datamodule.setup("fit")  # data errors show before the run folder exists
        self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.config.ckpt_path)
        if self.model.validated_step != self.trainer.global_step:
            self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            weights = self.run_dir / "best.safetensors"
            print(f"run folder: {self.run_dir}\nupscale with the new weights:")
            print(f"  python scripts/upscale.py image.png -m {weights} -o large.png")


def main(args: list[str] | None = None) -> None:
    """Entry point of ``scripts/train.py``."""
    _quiet()
    SRCLI(args).train()


def _quiet() -> None:
    """Silence Lightning's advice that does not apply here; warnings of our own stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*in eval mode at the start.*", ".*exists and is not empty.*"):
        warnings.filterwarnings("ignore", message=message)
