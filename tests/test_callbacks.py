"""What a run shows and logs of itself."""

import csv
import functools
import math
import re
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sr import callbacks
from sr.checkpoint import read_info
from sr.data.patches import PatchDataset
from sr.image import read_rgb
from sr.metrics.functional import psnr
from sr.pace import Pace
from sr.resize import imresize

FETCH = "[_TrainingEpochLoop].train_dataloader_next"


def rows(cli) -> list[dict[str, str]]:
    return list(csv.DictReader((cli.run_dir / "metrics.csv").open()))


def test_pace_counts_neither_the_first_batch_nor_validation(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace()

    def batch(wait: float, work: float) -> None:
        pace.start("[Callback]something else")
        pace.start(FETCH)
        now[0] += wait
        pace.stop(FETCH)
        now[0] += work
        pace.batch_done()

    now[0] += 7
    pace.skip()  # the validation before the first step
    batch(5, 50)
    assert pace.rates(8, 1) == ""
    assert pace.lap() is None
    batch(1, 3)
    now[0] += 1000
    pace.skip()
    batch(0, 4)
    assert (pace.batches, pace.seconds, pace.waited) == (2, 8, 1)
    assert pace.rates(batch_size=8, accumulate=2) == "0.125 steps/s  2 samples/s  data wait 12.5 %"
    assert pace.lap() == 12.5
    batch(3, 1)
    assert pace.lap() == 75  # since the lap before


def test_rate_waiting_and_gain_are_logged(config, start):
    cli = start(config)
    logged = rows(cli)
    train = [row for row in logged if row["lr"]]
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert [float(row["lr"]) for row in train] == pytest.approx(expected)
    assert [int(row["step"]) for row in train] == [1, 2, 3, 4]
    waits = [float(row["data_wait"]) for row in train if row["data_wait"]]
    assert len(waits) == 3 and all(0 <= wait <= 100 for wait in waits)

    # Bicubic by itself, 8-bit at both ends; the picture is cut to a multiple of the scale.
    gt = read_rgb("val/v.png")[None, :, :36, :40]
    bicubic = imresize(imresize(gt, 1 / 2), 2)
    base = psnr(bicubic.float() / 255, gt.float() / 255, crop_border=2).item()
    validated = [row for row in logged if row["val/val/psnr_y"]]
    assert len(validated) == 2
    for row in validated:
        assert float(row["val/val/psnr_y"]) - float(row["val/val/psnr_y_gain"]) == pytest.approx(base, abs=1e-3)
        assert abs(float(row["val/val/ssim_y"]) - float(row["val/val/ssim_y_gain"])) <= 1

    events = EventAccumulator(str(cli.run_dir / "tensorboard"))
    events.Reload()
    wanted = {"lr", "data_wait", "train/loss", "train/l1", "train/grad_norm", "val/val/psnr_y", "val/val/ssim_y_gain"}
    assert wanted <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("lr")] == [1, 2, 3, 4]


def test_steps_between_two_lines_of_the_log_are_not_logged(config, start):
    """And those that are have all their values."""
    train = [row for row in rows(start(config, "--trainer.log_every_n_steps", "2")) if row["train/loss"]]
    assert [int(row["step"]) for row in train] == [2, 4]
    assert all(row[key] for row in train for key in ("train/l1", "train/grad_norm", "lr", "data_wait"))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_progress_shows_what_the_run_does(config, start, capsys, monkeypatch, accumulate):
    monkeypatch.setattr(callbacks, "_LINE_INTERVAL", 0.0)
    cli = start(config, "--trainer.accumulate_grad_batches", str(accumulate), "--trainer.log_every_n_steps", "1")
    pattern = re.compile(
        r"step (\d)/4  \d:\d\d:\d\d left  loss (\S+)  (\S+) steps/s  (\S+) samples/s  data wait (\S+) %(  \S+ GiB)?"
    )
    lines = [match.groups() for line in capsys.readouterr().out.splitlines() if (match := pattern.fullmatch(line))]
    first = {line[0]: line for line in reversed(lines)}  # of several batches after a step, that with which it ended
    assert {"3", "4"} <= set(first)
    for _, _, steps, samples, wait, _ in lines:
        assert float(samples) == pytest.approx(float(steps) * 2 * accumulate, rel=0.01)
        assert 0 <= float(wait) <= 100
    logged = {row["step"]: float(row["train/loss"]) for row in rows(cli) if row["train/loss"]}
    for step, line in first.items():
        assert float(line[1]) == pytest.approx(logged[step], abs=6e-5)


@pytest.mark.parametrize("width", [60, 200])
def test_a_terminal_gets_a_bar_of_one_line(config, start, capsys, monkeypatch, width):
    monkeypatch.setattr(callbacks, "_BAR_INTERVAL", 0.0)
    terminal = functools.partial(Console, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(callbacks, "Console", terminal)
    start(config)
    bars = [line for line in re.split(r"[\r\n]+", capsys.readouterr().out) if "4/4 " in line]
    assert bars and all(re.search(r"4/4  0:00:00 left  loss 0\.\d{4}  ", line) for line in bars)
    assert any("samples/s  data wait" in line for line in bars) == (width == 200)


def test_waiting_for_slow_data_is_told(config, start, capsys, monkeypatch):
    batch = PatchDataset.batch

    def slow(self, *args):
        time.sleep(0.2)
        return batch(self, *args)

    monkeypatch.setattr(PatchDataset, "batch", slow)
    pace = start(config).model.pace
    assert pace.batches == 3
    assert 0.6 <= pace.waited < pace.seconds
    share = 100 * pace.waited / pace.seconds
    assert f"data wait {share:.1f} %" in capsys.readouterr().out


def test_another_profiler_is_left_alone(config, start, capsys):
    cli = start(config, "--trainer.profiler", "simple")
    assert type(cli.trainer.profiler).__name__ == "SimpleProfiler"
    assert "data wait" not in capsys.readouterr().out
    assert "data_wait" not in rows(cli)[0]


def test_the_end_says_what_came_of_it(config, start, capsys):
    cli = start(config)
    out = capsys.readouterr().out
    assert re.search(r"^4 steps in 0:\d\d:\d\d  \S+ steps/s  \S+ samples/s  data wait \S+ %$", out, re.MULTILINE)
    path = cli.run_dir / "best.safetensors"
    info = read_info(path)["info"]
    score = info["validation"]["val"]["psnr_y"]
    assert f"best weights: {path} (step {info['step']}, mean PSNR {score:.2f} dB)" in out

    # Going on with a rate of zero, nothing gets better, and the best step is still that of the file.
    last = str(cli.run_dir / "checkpoints" / "last.ckpt")
    config["model"]["scheduler"] = {"class_path": "sr.schedules.Cosine", "init_args": {"warmup": 0.999}}
    start(config, "--ckpt_path", last, "--trainer.max_steps", "6", "--trainer.val_check_interval", "6")
    out = capsys.readouterr().out
    assert re.search(r"^2 steps in ", out, re.MULTILINE)
    assert f"(step {read_info(path)['info']['step']}, mean PSNR" in out


def test_without_validation_the_end_names_the_last_step(config, start, capsys):
    del config["data"]["val"]
    cli = start(config)
    assert f"best weights: {cli.run_dir / 'best.safetensors'} (step 4)" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="resident memory is known on Linux only")
def test_memory_is_what_the_process_has():
    status = Path("/proc/self/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 2**20
    text = callbacks._memory(torch.device("cpu"))
    assert text.endswith(" GiB") and float(text.split()[0]) == pytest.approx(resident, abs=0.15)
