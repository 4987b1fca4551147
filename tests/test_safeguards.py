"""Runs that are killed, interrupted, fill the disk, or meet a loss that is not a number, lose nothing."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

import sr.losses
from sr.errors import SRError
from sr.safeguards import NonFiniteGuard, WholeCheckpointIO

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
LAST = Path("runs/tiny/001/checkpoints/last.ckpt")


class TimeIsUp(Callback):
    """Wants the run to end, and says so once, after some batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop |= batch_idx + 1 == self.batches


class NaNAt(sr.losses.L1Loss):
    """The L1 loss, but for some calls, counted from 1, where it is NaN."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls, self.count = calls, 0

    def forward(self, sr: torch.Tensor, gt: torch.Tensor, lq: torch.Tensor | None = None) -> torch.Tensor:
        self.count += 1
        return super().forward(sr, gt, lq) * (float("nan") if self.count in self.calls else 1)


def with_nan(config: dict, calls: list[int]) -> dict:
    config["model"]["losses"] = [{"class_path": "test_safeguards.NaNAt", "init_args": {"calls": calls}}]
    return config


@pytest.fixture(autouse=True)
def find_this_module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def run_undisturbed(config: dict, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run ends with; in a process of its own, with the threads that other such runs have."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    subprocess.run([*TRAIN, "--name", "undisturbed"], check=True, cwd=folder, capture_output=True)
    return weights(folder / "runs/undisturbed/001/checkpoints/last.ckpt")


# --- checkpoints -------------------------------------------------------------------------------------------------


def small_disk(folder: Path, size: str) -> bool:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return sys.platform == "linux" and os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    disk = tmp_path / "disk"
    if not small_disk(disk, "1m"):
        pytest.skip("needs the right to mount a small disk")
    try:
        path = disk / "last.ckpt"
        WholeCheckpointIO().save_checkpoint({"x": torch.ones(1000)}, path)
        with pytest.raises(SRError, match=r"last\.ckpt \(no space left.*; the one before is still there"):
            WholeCheckpointIO().save_checkpoint({"x": torch.ones(10**6)}, path)
        assert torch.load(path)["x"].sum() == 1000
        assert [p.name for p in disk.iterdir()] == ["last.ckpt"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_run_on_a_full_disk_ends_with_one_line(config, start, tmp_path):
    disk = tmp_path / "disk"
    if not small_disk(disk, "600k"):
        pytest.skip("needs the right to mount a small disk")
    try:
        (disk / "filler").write_bytes(b"x" * 560_000)
        with pytest.raises(SRError, match=r"^cannot write [^\n]*$"):
            start(config, "--runs", str(disk), "--trainer.logger", "false")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- signals -----------------------------------------------------------------------------------------------------

SIGNALS = [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGUSR1))]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_leaves_and_the_run_goes_on_exactly(config, tmp_path, number):
    config["trainer"] |= {"max_steps": 60, "val_check_interval": 10, "accumulate_grad_batches": 2}
    undisturbed = run_undisturbed(config, tmp_path)
    process = subprocess.Popen(TRAIN, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        while "step 10 " not in (line := process.stdout.readline()):
            assert line, "the run ended before the signal"
        process.send_signal(number)
        out = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "stopping after this step" in out and f"--ckpt_path {LAST}" in out
    step = torch.load(LAST, weights_only=True)["global_step"]
    assert 10 <= step < 60
    assert f"continue from step {step} with" in out
    subprocess.run([*TRAIN, "--ckpt_path", str(LAST)], check=True, cwd=tmp_path, capture_output=True)
    assert_equal(weights(LAST), undisturbed)


@pytest.mark.parametrize("where", ["in the middle of a validation", "in a step before one"])
def test_a_run_that_is_stopped_loses_no_validation(config, start, monkeypatch, make_pictures, where):
    config["data"]["val"][0]["init_args"]["root"] = str(make_pictures("many", [f"{i}.png" for i in range(5)]))
    undisturbed = start(config)
    from sr.module import SRModule

    step = SRModule.validation_step

    def interrupted(self, batch, batch_idx, dataloader_idx=0):
        step(self, batch, batch_idx, dataloader_idx)
        if self.trainer.global_step == 2 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    train_step = SRModule.training_step

    def interrupted_before(self, batch, batch_idx):
        if self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, batch, batch_idx)

    if where == "in a step before one":
        monkeypatch.setattr(SRModule, "training_step", interrupted_before)
    else:
        monkeypatch.setattr(SRModule, "validation_step", interrupted)
    with pytest.raises(SystemExit) as stopped:
        start(config, "--name", "other")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setattr(SRModule, "validation_step", step)
    monkeypatch.setattr(SRModule, "training_step", train_step)
    last = Path("runs/other/001/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2
    resumed = start(config, "--ckpt_path", str(last))
    assert_equal(weights(last), weights(undisturbed.run_dir / "checkpoints" / "last.ckpt"))
    assert resumed.model.scores == undisturbed.model.scores
    logs = [list(csv.DictReader((cli.run_dir / "metrics.csv").open())) for cli in (undisturbed, resumed)]
    whole, again = ([(row["step"], row["val/many/psnr_y"]) for row in log if row["val/many/psnr_y"]] for log in logs)
    assert [step for step, _ in whole] == ["2", "4"] and again == whole
    losses, again = ([row["train/loss"] for row in log if row["train/loss"]] for log in logs)
    assert len(losses) == 4 and again == losses
    # Nothing of the stop is left: lengthened, both go on alike.
    config["trainer"]["max_steps"] = 6
    ends = [
        start(config, "--ckpt_path", str(cli.run_dir / "checkpoints" / "last.ckpt")) for cli in (undisturbed, resumed)
    ]
    assert ends[0].model.scores == ends[1].model.scores
    logs = [list(csv.DictReader((cli.run_dir / "metrics.csv").open())) for cli in ends]
    whole, again = ([(row["step"], row["val/many/psnr_y"]) for row in log if row["val/many/psnr_y"]] for log in logs)
    assert [step for step, _ in whole] == ["2", "4", "6"] and again == whole


def test_a_run_whose_time_is_up_ends_after_a_whole_step(config, start, capsys):
    config["trainer"]["accumulate_grad_batches"] = 4
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    whole = start(config)
    config["trainer"]["callbacks"] = [{"class_path": "test_safeguards.TimeIsUp", "init_args": {"batches": 6}}]
    ended = start(config)
    assert ended.trainer.global_step == 2 and "ended at step 2 of 4" in capsys.readouterr().out
    del config["trainer"]["callbacks"]
    last = ended.run_dir / "checkpoints" / "last.ckpt"
    start(config, "--ckpt_path", str(last))
    assert_equal(weights(last), weights(whole.run_dir / "checkpoints" / "last.ckpt"))


def test_a_run_without_time_for_a_step_says_so(config, start):
    with pytest.raises(SRError, match="the run ended before its first step"):
        start(config, "--trainer.max_time", "00:00:00:00")


@pytest.mark.slow
def test_twenty_kills_do_not_change_the_result(config, tmp_path):
    config["trainer"] |= {"max_steps": 200, "val_check_interval": 4}
    undisturbed = run_undisturbed(config, tmp_path)
    rng, resume = random.Random(0), []
    for kill in range(20):
        process = subprocess.Popen([*TRAIN, *resume], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        for _ in range(rng.randint(1, 3)):  # some time after the start, when it trains
            while "PSNR_Y" not in (line := process.stdout.readline()):
                assert line, f"the run ended before kill {kill}"
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
        if LAST.is_file():
            resume = ["--ckpt_path", str(LAST)]
    subprocess.run([*TRAIN, *resume], check=True, cwd=tmp_path, capture_output=True)
    assert_equal(weights(LAST), undisturbed)


# --- losses that are not numbers ---------------------------------------------------------------------------------


def test_a_step_without_a_number_is_skipped_and_counted(config, start, caplog):
    config["trainer"]["max_steps"] = 6
    cli = start(with_nan(config, [3]))
    assert cli.trainer.global_step == 6
    guard = next(c for c in cli.trainer.callbacks if isinstance(c, NonFiniteGuard))
    assert guard.skipped == 1
    assert "step 3: the gradient is not finite, so the step is skipped (1 so far)" in caplog.text
    assert "1 steps were skipped" in caplog.text
    optimizer = cli.trainer.optimizers[0]
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}  # the optimiser saw five
    assert all(torch.isfinite(p).all() for p in cli.model.parameters())


def test_skipping_leaves_weights_as_they_were(config, start):
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    three = start(config, "--trainer.max_steps", "3", "--name", "three")
    skipped = start(with_nan(config, [4, 5]), "--trainer.max_steps", "5", "--name", "five")
    assert_equal(dict(three.model.network.named_parameters()), dict(skipped.model.network.named_parameters()))


def test_many_in_a_row_stop_the_run_and_name_the_pictures(config, start):
    with pytest.raises(SRError, match=r"step 3: .* 2 times in a row, the last time on train/[ab].*\n.*lr"):
        start(with_nan(config, [2, 3]), "--guard.patience", "2")


def test_many_in_a_row_roll_back(config, start, caplog):
    config["trainer"] |= {"max_steps": 8, "val_check_interval": 2}
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    arguments = ("--guard.patience", "3", "--guard.then", "rollback", "--guard.lr_factor", "0.1")
    cli = start(with_nan(config, [4, 5, 6]), *arguments)
    assert cli.trainer.global_step == 8
    assert "step 6: back to the weights of step 4, with 0.1 of the configured learning rate" in caplog.text
    rows = csv.DictReader((cli.run_dir / "metrics.csv").open())
    rates = {int(row["step"]): float(row["lr"]) for row in rows if row["lr"]}
    assert [rates[step] for step in range(5, 9)] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])  # the first step, too
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)
    again = torch.load(cli.run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    assert again["lr_factor"] == pytest.approx(0.1)
    state = next(iter(cli.trainer.optimizers[0].state.values()))
    assert int(state["step"]) == 5  # three before, two after; step 4 was skipped


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(config, start):
    config["trainer"]["val_check_interval"] = 4
    with pytest.raises(SRError, match="not finite 2 times in a row"):
        start(with_nan(config, [1, 2]), "--guard.patience", "2", "--guard.then", "rollback")


@pytest.mark.parametrize("setting", [("patience", 0), ("lr_factor", 1.0)])
def test_settings_of_the_guard_are_checked(config, start, setting):
    with pytest.raises(SRError, match="patience"):
        start(config, f"--guard.{setting[0]}", str(setting[1]))


def test_config_of_the_run_keeps_the_guard(config, start):
    cli = start(config, "--guard.patience", "7")
    assert yaml.safe_load((cli.run_dir / "config.yaml").read_text())["guard"]["patience"] == 7
