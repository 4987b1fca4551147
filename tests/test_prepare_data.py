"""The data script's commands, end to end on tiny pictures."""

import json
import runpy
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import default_collate

import sr
from sr.data import GTFolder
from sr.distill import distill
from sr.errors import SRError
from sr.image import read_rgb

ROOT = Path(__file__).parents[1]


@dataclass
class Result:
    stdout: str
    stderr: str


@pytest.fixture
def run(written, capfd, monkeypatch):
    """Run the script in this process (a new one takes seconds to import everything)."""

    def call(*args: object, status: int = 0) -> Result:
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "scripts" / "prepare_data.py"), run_name="__main__")
        out, err = capfd.readouterr()
        assert end.value.code == status, err
        return Result(out, err)

    return call


@pytest.fixture
def written(config, tmp_path):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_pack_builds_what_training_maps(run, written, cache_home, caplog):
    run("pack", "--config", "x.yaml")
    assert "packing 2 pictures of 'train'" in caplog.text and "packing 1 pictures of 'val'" in caplog.text
    names = sorted(path.name.rsplit("_", 1)[0] for path in cache_home.glob("*.pack"))
    assert names == ["train_x2", "val_x2"]
    caplog.clear()
    run("pack", "--config", "x.yaml")
    assert "packing" not in caplog.text
    refused = run("pack", "--config", "x.yaml", "--data.cache", "false", status=2)
    assert refused.stderr.splitlines()[-1] == (
        "error: data.cache is false in this config, so training would not use a pack"
    )
    assert not (written / "runs").exists()


def test_check_lists_every_fault_and_sets_the_status(run, written):
    clean = run("check", "--config", "x.yaml")
    assert "cropped" in clean.stdout
    for name in ("p", "q"):
        (written / "train" / f"{name}.png").write_text("no picture")
    result = run("check", "--config", "x.yaml", "--json", "found.json", status=1)
    assert "p.png" in result.stdout and "q.png" in result.stdout
    found = json.loads((written / "found.json").read_text())
    assert not found["ok"] and sum(len(f["files"]) for f in found["findings"] if f["level"] == "error") == 2


def test_training_says_how_many_faults_there_are(config, start, written, caplog):
    for name in ("p", "q"):
        (written / "train" / f"{name}.png").write_text("no picture")
    with pytest.raises(SRError, match=r"p\.png is not a picture.*\(2 faults in all: "):
        start(config)
    start(config, "--data.on_error", "skip")
    assert "2 pictures of 'train' are left out" in caplog.text


def test_a_teacher_writes_what_a_smaller_network_learns_from(run, written, config, start, monkeypatch):
    """LQ is what training would have made of GT; the teacher's own result stands in for GT."""
    teacher = "sparsesr_t_x2.quickstart"
    run("distill", "--config", "x.yaml", "--teacher", teacher, "--to", "taught")
    pictures = GTFolder("train")
    pictures.prepare(2)
    for i, name in enumerate(pictures.names):
        lq, _ = pictures.pair(i)
        assert torch.equal(read_rgb(written / "taught" / "LQ" / "train" / f"{name}.png"), lq)
        made = read_rgb(written / "taught" / "GT" / "train" / f"{name}.png").float()
        with torch.inference_mode():
            expected = 255 * sr.load(teacher).eval()(lq[None].float() / 255)[0].clamp(0, 1)
        assert (made - expected).abs().mean() < 1  # bfloat16
    config["data"]["train"] = {
        "class_path": "sr.data.PairedFolder",
        "init_args": {"gt": "taught/GT", "lq": "taught/LQ"},
    }
    start(config)

    monkeypatch.setattr(sr.Upscaler, "__call__", None)  # what is there is not computed again
    run("distill", "--config", "x.yaml", "--teacher", teacher, "--to", "taught")
    degraded = ("--data.degradation", ROOT / "configs" / "degradations" / "bsrgan.yaml")
    for arguments, message in (
        (("sparsesr_s_x3.photos", "--to", "other"), "the teacher sparsesr_s_x3.photos enlarges 3 times; this training"),
        (("sparsesr_s_x2.photos", "--to", "taught"), "taught holds pictures of another teacher or scale"),
        ((teacher, "--to", "other", *degraded), "the teacher's pictures are made of clean LQ"),
    ):
        refused = run("distill", "--config", "x.yaml", "--teacher", *arguments, status=2)
        assert refused.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert not (written / "other").exists()


def test_sets_of_one_name_are_not_distilled_into_one_folder(written):
    sets = [GTFolder("train"), GTFolder("val", name="train")]
    for pictures in sets:
        pictures.prepare(2)
    with pytest.raises(SRError, match="two training sets are called 'train'"):
        distill(sets, 2, "sparsesr_t_x2.quickstart", Path("taught"))
    assert not Path("taught").exists()


def test_preview_shows_gt_beside_what_is_made_of_it(run, written):
    run("preview", "--config", "x.yaml", "-o", "bicubic.png", "--rows", 3)
    with Image.open(written / "bicubic.png") as sheet:
        assert sheet.size == (2 * 16 + 2, 14 + 3 * 16 + 2 * 2)
    degradation = ROOT / "configs" / "degradations" / "real_esrgan.yaml"
    arguments = ("preview", "--config", "x.yaml", "--data.degradation", degradation, "--draws", 3, "--rows", 2)
    run(*arguments, "-o", "first.png")
    run(*arguments, "-o", "again.png")
    with Image.open(written / "first.png") as sheet, Image.open(written / "again.png") as again:
        assert sheet.size == (4 * 16 + 3 * 2, 14 + 2 * 16 + 2)
        assert sheet.tobytes() == again.tobytes()
        columns = [sheet.crop((x, 14, x + 16, 30)).tobytes() for x in (0, 18, 36, 54)]
        assert len(set(columns)) == 4  # GT and three different draws


def test_a_degradation_makes_what_training_sees(config, start):
    config["data"]["degradation"] = str(ROOT / "configs" / "degradations" / "bsrgan.yaml")
    cli = start(config)
    data = cli.datamodule
    batch = default_collate([data._train[i] for i in range(2)])
    assert "lq" not in batch
    moved = data.on_after_batch_transfer(batch, 0)
    assert moved["lq"].shape == (2, 3, 8, 8) and moved["gt"].shape == (2, 3, 16, 16)


def test_download_unpacks_what_one_has(run, written):
    with zipfile.ZipFile(written / "DIV2K_train_HR.zip", "w") as archive:
        archive.write(written / "train" / "a.png", "DIV2K_train_HR/0001.png")
    result = run("download", "div2k", "--to", "sets", "--from", "DIV2K_train_HR.zip", status=2)
    assert result.stderr.startswith("error: ") and "DIV2K_train_HR.zip" in result.stderr  # not the published one
    assert not (written / "sets" / "DIV2K").exists()


def test_optimize_writes_chunks_that_training_reads(config, start, written):
    pytest.importorskip("litdata")
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "optimize", "train", "--to", "chunks"]
    result = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True, cwd=written)
    assert result.returncode == 0, result.stderr
    assert "StreamingGTDataset" in result.stdout and (written / "chunks" / "index.json").is_file()
    config["data"]["train"] = {"class_path": "sr.data.StreamingGTDataset", "init_args": {"root": "chunks"}}
    assert start(config).trainer.global_step == 4


def test_mistakes_are_named(run, written, config):
    assert "cannot write" in run("check", "--config", "x.yaml", "--json", "nowhere/x.json", status=2).stderr
    assert "at least 1" in run("preview", "--config", "x.yaml", "--rows", 0, status=2).stderr
    assert "there is no file" in run("download", "div2k", "--from", "no/DIV2K_train_HR.zip", status=2).stderr
    config["data"]["train"] = {"class_path": "sr.data.StreamingGTDataset", "init_args": {"root": "chunks"}}
    (written / "stream.yaml").write_text(yaml.safe_dump(config))
    for command in ("check", "pack", "preview"):
        assert "is a stream" in run(command, "--config", "stream.yaml", status=2).stderr
    run("check", "--config", "nowhere.yaml", status=2)
    assert "data.gt_siez" in run("check", "--config", "x.yaml", "--data.gt_siez", 3, status=2).stderr
    run("download", "div3k", status=2)
