"""Weights for several scales in a given time: ``python scripts/train_scales.py --config CONFIG --minutes 15``.

The first scale is trained from scratch for half of the time, the others from its weights for equal shares of the rest.
The number of steps comes from the speed measured in a first short run, so every schedule ends where it should. The same
command goes on where it was stopped. Options that this script does not know are handed to the training, e.g.
``--data.train.init_args.root FOLDER``.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

import sr
from sr.atomic import atomic
from sr.cli import SRCLI, set_up_logging
from sr.errors import run_script

_WARM_UP = 50  # steps before the clock starts: compilation, and what is fetched ahead


class _Speed(Callback):
    """Seconds a step takes, from the ``_WARM_UP``-th step to the last."""

    seconds = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        next(pl_module.parameters()).sum().item()  # waits for the device
        if trainer.global_step == _WARM_UP:
            self._start = time.perf_counter()
        elif trainer.global_step > _WARM_UP:
            self.seconds = (time.perf_counter() - self._start) / (trainer.global_step - _WARM_UP)


def measure(options: list[str], steps: int) -> float:
    """Seconds a training step takes, on the average of ``steps``."""
    with tempfile.TemporaryDirectory() as folder:
        last = str(_WARM_UP + steps)
        quiet = ["--trainer.max_steps", last, "--trainer.limit_val_batches", "0", "--trainer.val_check_interval", last]
        cli = SRCLI([*options, *quiet, "--runs", folder, "--trainer.enable_checkpointing", "false"])
        speed = _Speed()
        cli.trainer.callbacks.insert(0, speed)  # type: ignore[attr-defined]
        cli.train()
        return speed.seconds


def train(options: list[str], minutes: float, steps: int, runs: Path, name: str) -> Path:
    """Train for about ``minutes``, or finish the run begun before; returns the file of the weights."""
    begun = sorted(runs.glob(f"{name}/*/checkpoints/last.ckpt"))
    if begun:
        run = begun[-1].parent.parent
        cli = SRCLI(["--config", str(run / "config.yaml"), "--ckpt_path", str(begun[-1])])
    else:
        count = max(1, int(60 * minutes / measure(options, steps)))
        every = str(max(1, count // 5))
        length = ["--trainer.max_steps", str(count), "--trainer.val_check_interval", every]
        cli = SRCLI([*options, *length, "--runs", str(runs), "--name", name])
    cli.train()
    return cli.weights.path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a training config; its scale is the first")
    parser.add_argument("--minutes", type=float, required=True, help="for all trainings together")
    parser.add_argument("--scales", type=int, nargs="*", default=[3, 4], help="after the first (default: 3 4)")
    parser.add_argument("--output", type=Path, default=Path("weights"), help="folder for runs and weights")
    parser.add_argument("--probe", type=int, default=200, help="steps timed to choose their number (default: 200)")
    args, more = parser.parse_known_args()
    if args.minutes <= 0 or args.probe < 1:
        raise sr.SRError("--minutes is larger than 0, and --probe at least 1")
    try:
        config = yaml.safe_load(args.config.read_text())
        first, gt_size = config["model"]["network"]["init_args"]["scale"], config["data"]["gt_size"]
    except (OSError, yaml.YAMLError, TypeError, KeyError) as e:
        raise sr.SRError(f"{args.config}: no config with model.network.init_args.scale and data.gt_size ({e})") from e
    set_up_logging()
    scales = [first, *(scale for scale in args.scales if scale != first)]
    start: Path | None = None
    for scale in scales:
        target = args.output / f"{args.config.stem}_x{scale}.safetensors"
        if not target.is_file():
            share = 1.0 if len(scales) == 1 else 0.5 if start is None else 0.5 / (len(scales) - 1)
            options = ["--config", str(args.config), "--model.network.init_args.scale", str(scale)]
            options += ["--data.gt_size", str(gt_size // first * scale), *more]
            options += ["--model.weights", str(start)] if start else []
            best = train(options, share * args.minutes, args.probe, args.output / "runs", target.stem)
            args.output.mkdir(parents=True, exist_ok=True)
            with atomic(target) as file:
                file.write(best.read_bytes())
        print(f"x{scale}: {target}", flush=True)
        start = start or target


if __name__ == "__main__":
    run_script(main)
