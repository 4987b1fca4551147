"""Training through the real command line, on tiny pictures."""

import csv
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import sr
from sr.checkpoint import read_info
from sr.cli import SRCLI
from sr.errors import SRError
from sr.logs import ResumableCSVLogger
from sr.module import SRModule

ROOT = Path(__file__).parents[1]


def test_a_run_leaves_everything_it_promises(config, start, capsys):
    cli = start(config)
    folder = cli.run_dir
    assert folder == Path("runs/tiny/001")
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["network"]["init_args"]["scale"] == 2
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert {"train/loss", "train/l1", "val/val/psnr_y", "val/val/ssim_y"} <= set(rows[0])
    assert list((folder / "tensorboard").glob("events*"))
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    with Image.open(folder / "previews" / "val_0000004.png") as strip:
        assert strip.width == 5 * 40 + 4 * 2  # five panels of the validation picture, cut to an even width
    out = capsys.readouterr().out
    assert out.count("PSNR_Y") == 3  # before the first step, at step 2, at the end
    assert f"upscale.py image.png -m {folder / 'best.safetensors'}" in out

    best, checkpoint = sr.load(folder / "best.safetensors"), sr.load(folder / "checkpoints" / "last.ckpt")
    x = torch.rand(1, 3, 5, 6)
    assert best(x).shape == checkpoint(x).shape == (1, 3, 10, 12)


def test_the_weights_say_what_they_are_and_cost(config, start):
    path = start(config).run_dir / "best.safetensors"
    said, network = read_info(path), sr.load(path)
    info = said["info"]
    assert (said["arch"], said["hparams"]["scale"], said["range"]) == (network.arch, 2, "[0, 1]")
    assert set(info) == {*("step", "averaged", "protocol", "validation", "bicubic", "data", "recipe", "efficiency")}
    assert info["averaged"] is True and info["step"] in (2, 4)
    assert info["data"][0]["pictures"] > 0 and len(info["data"][0]["sha256"]) == 64
    assert yaml.safe_load(info["recipe"])["model"]["network"]["init_args"]["scale"] == 2
    cost = info["efficiency"]
    assert cost["parameters"] == sum(p.numel() for p in network.parameters())
    assert cost["output"] == [1280, 720] and cost["flops"] == 2 * cost["macs"] > 2 * 640 * 360 * cost["parameters"] / 2
    assert "latency" not in cost


def test_number_of_steps_counts_optimiser_steps(config, start):
    cli = start(config, "--trainer.accumulate_grad_batches", "3")
    assert cli.trainer.global_step == 4
    assert cli.trainer.fit_loop.epoch_loop.batch_progress.total.processed == 12


def test_learning_rate_is_a_number_and_follows_the_schedule(config, start):
    cli = start(config, "--trainer.max_steps", "2")
    assert cli.trainer.optimizers[0].defaults["lr"] == 1e-3
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)  # the cosine has ended


def test_end_is_validated_even_if_the_interval_does_not_divide_the_run(config, start):
    cli = start(config, "--trainer.max_steps", "3")
    assert cli.model.validated_step == 3
    assert (cli.run_dir / "previews" / "val_0000003.png").is_file()


def test_same_seed_gives_the_same_weights(config, start):
    one, two = (start(config).run_dir for _ in range(2))
    assert two == Path("runs/tiny/002")
    a, b = (load_file(run / "best.safetensors") for run in (one, two))
    assert all(torch.equal(a[k], b[k]) for k in a)
    other = load_file(start(config, "--seed_everything", "5").run_dir / "best.safetensors")
    assert not all(torch.equal(a[k], other[k]) for k in a)


def state(cli: SRCLI) -> dict[str, torch.Tensor]:
    return torch.load(cli.run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_resuming_is_as_if_nothing_had_happened(config, start, monkeypatch):
    config["trainer"]["max_steps"] = 8
    config["data"]["num_workers"] = 1

    def keep_the_checkpoint_of_step_4(self, *_):
        if self.trainer.global_step == 5:
            shutil.copy(Path(self.trainer.default_root_dir) / "checkpoints" / "last.ckpt", "half.ckpt")

    with monkeypatch.context() as patch:
        patch.setattr(SRModule, "on_train_batch_end", keep_the_checkpoint_of_step_4)
        whole = state(start(config))
    half = torch.load("half.ckpt", weights_only=True)
    assert half["global_step"] == 4
    resumed = start(config, "--ckpt_path", "half.ckpt")
    assert resumed.trainer.global_step == 8
    again = state(resumed)
    assert any(k.startswith("ema.") for k in again)
    assert all(torch.equal(whole[k], again[k]) for k in whole)  # raw and averaged weights alike
    assert not all(torch.equal(whole[k], half["state_dict"][k]) for k in whole)  # and the comparison can tell


def test_resuming_draws_what_the_run_would_have_drawn(config, start, monkeypatch):
    """Dropped paths and the like."""

    class Dropping(sr.losses.L1Loss):
        def forward(self, sr, gt, lq=None):
            return super().forward(torch.nn.functional.dropout(sr, 0.5), gt)

    monkeypatch.setattr("sr.losses.L1Loss", Dropping)
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    whole = state(start(config))
    half = start(config, "--trainer.max_steps", "2")
    resumed = start(config, "--ckpt_path", str(half.run_dir / "checkpoints" / "last.ckpt"))
    assert all(torch.equal(value, whole[key]) for key, value in state(resumed).items())


def test_a_resumed_run_stays_in_its_folder(config, start):
    first = start(config)
    resumed = start(config, "--ckpt_path", str(first.run_dir / "checkpoints" / "last.ckpt"), "--trainer.max_steps", "6")
    assert resumed.run_dir == first.run_dir
    assert resumed.trainer.global_step == 6


def test_the_log_goes_on_when_a_run_is_resumed(config, start):
    first = start(config)
    log = first.run_dir / "metrics.csv"
    before = list(csv.DictReader(log.open()))
    last = torch.load(first.run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 4
    start(config, "--ckpt_path", str(first.run_dir / "checkpoints" / "last.ckpt"), "--trainer.max_steps", "6")
    after = list(csv.DictReader(log.open()))
    assert [row["train/loss"] for row in after[: len(before)]] == [row["train/loss"] for row in before]
    assert [int(row["step"]) for row in after if row["train/loss"]] == [1, 2, 3, 4, 5, 6]


def test_the_saved_config_is_a_new_run_of_the_same_name(config, start, monkeypatch):
    first = start(config)
    start(config, "--ckpt_path", str(first.run_dir / "checkpoints" / "last.ckpt"), "--trainer.max_steps", "5")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(first.run_dir / "config.yaml")])
    again = SRCLI()
    assert again.run_dir == Path("runs/tiny/002")
    again.train()
    assert again.trainer.global_step == 5


def test_the_last_checkpoint_is_the_end_of_the_run_and_knows_the_best_score(config, start):
    cli = start(config, "--trainer.max_steps", "3")
    checkpoint = torch.load(cli.run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 3
    (best,) = (s["best"] for name, s in checkpoint["callbacks"].items() if "BestWeights" in name)
    assert best == pytest.approx(read_info(cli.run_dir / "best.safetensors")["info"]["validation"]["val"]["psnr_y"])


def test_without_validation_the_end_is_exported(config, start):
    del config["data"]["val"]
    cli = start(config)
    exported = load_file(cli.run_dir / "best.safetensors")
    assert all(torch.equal(exported[k], v) for k, v in cli.model.ema.state_dict().items())
    assert torch.load(cli.run_dir / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_diverged_run_says_so(config, start):
    config["model"]["optimizer"]["init_args"]["lr"] = 1e30
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    with pytest.raises(SRError, match=r"the gradient was not finite 10 times in a row, the last time on train/"):
        start(config, "--trainer.max_steps", "16", "--trainer.val_check_interval", "16")


def test_validation_counts_optimiser_steps(config, start, capsys):
    start(config, "--trainer.accumulate_grad_batches", "3")
    lines = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "PSNR_Y" in line]
    assert lines == ["0", "2", "4"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_trains(config, start, precision):
    cli = start(config, "--trainer.precision", precision)
    exported = load_file(cli.run_dir / "best.safetensors")
    assert cli.model.scores["val"]["psnr_y"] > 10
    # The average is one of float32 numbers in either case: a thousandth of a change is lost in bfloat16.
    assert {value.dtype for value in exported.values()} == {torch.float32}
    trained = next(cli.model.network.parameters())
    assert trained.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


def test_the_average_follows_weights_in_bfloat16(config, start):
    model = start(config, "--trainer.precision", "bf16-true").model
    mean, value = model._averaged[0][0], model._averaged[1][0]
    torch.nn.init.ones_(mean)
    torch.nn.init.constant_(value, 1.0078125)  # the next number in bfloat16
    model.ema_decay, steps = 0.9, 20
    for _ in range(steps):
        model._update_ema()
    decay = min(0.9, (1 + model.trainer.global_step) / (10 + model.trainer.global_step))
    assert torch.allclose(mean, 1.0078125 - 0.0078125 * torch.tensor(decay**steps), rtol=0, atol=1e-6)


def test_bicubic_is_scored_on_all_pictures_if_few_were_tried_before_the_run(config, start, make_pictures):
    config["data"]["val"][0]["init_args"]["root"] = str(make_pictures("many", [f"{i}.png" for i in range(3)]))
    whole = start(config).model.bicubic_scores
    assert start(config, "--trainer.num_sanity_val_steps", "1").model.bicubic_scores == whole


def test_the_config_lies_in_the_run_folder_whatever_logs(config, start):
    Path("config.yaml").write_text("the user's own")
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "elsewhere"}}
    config["trainer"]["logger"] = logger
    cli = start(config)
    assert yaml.safe_load((cli.run_dir / "config.yaml").read_text())["trainer"]["max_steps"] == 4
    assert Path("config.yaml").read_text() == "the user's own"
    assert not list(Path("elsewhere").rglob("config.yaml"))
    assert "trainer" in read_info(cli.run_dir / "best.safetensors")["info"]["recipe"]


def test_a_log_that_a_full_disk_cut_off_goes_on(config, start):
    first = start(config)
    log = first.run_dir / "metrics.csv"
    rows = log.read_text()
    log.write_text(rows + rows.splitlines()[-1][:3])
    start(config, "--ckpt_path", str(first.run_dir / "checkpoints" / "last.ckpt"), "--trainer.max_steps", "5")
    assert log.read_text().startswith(rows)
    steps = [row["step"] for row in csv.DictReader(log.open())]
    assert all(step.isdecimal() for step in steps) and steps[-1] == "5"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_on_a_full_disk_is_an_error_in_words(tmp_path):
    log = ResumableCSVLogger(tmp_path)
    log.experiment.metrics_file_path = "/dev/full"
    log.log_metrics({"a": 1.0}, 1)
    with pytest.raises(SRError, match=r"cannot write the log /dev/full \(No space left on device\)"):
        log.experiment.save()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_without_a_cache_damaged_validation_pictures_are_found_before_the_start(
    config, start, make_pictures, caplog, on_error
):
    root = make_pictures("many", ["a.png", "b.png"])
    (root / "b.png").write_bytes((root / "b.png").read_bytes()[:-40])  # its header says nothing of it
    config["data"]["val"][0]["init_args"]["root"] = str(root)
    config["data"] |= {"cache": False, "num_workers": 1, "on_error": on_error}
    if on_error == "skip":
        assert len(start(config).datamodule.val_sets[0]) == 1
        assert "b.png" in caplog.text
    else:
        with pytest.raises(SRError, match=r"b\.png is damaged or incomplete") as error:
            start(config)
        assert "Traceback" not in str(error.value) and not Path("runs").exists()


def test_data_follows_the_seed_of_the_run(config, start):
    assert start(config, "--seed_everything", "5").datamodule.seed == 5
    assert start(config, "--seed_everything", "5", "--data.seed", "1").datamodule.seed == 1


def test_checkpoints_that_cannot_be_resumed_are_named(config, start):
    first = start(config)
    last = first.run_dir / "checkpoints" / "last.ckpt"
    Path("cut.ckpt").write_bytes(last.read_bytes()[:2000])
    torch.save({"state_dict": {}}, "other.ckpt")
    shutil.copytree("runs", "before")
    for path, message in (
        (first.run_dir / "best.safetensors", "holds weights only"),
        ("cut.ckpt", "damaged"),
        ("other.ckpt", "no checkpoint of a training run"),
    ):
        with pytest.raises(SRError, match=message):
            start(config, "--ckpt_path", str(path))
    with pytest.raises(SRError, match="belongs to another network: dim 4 there, 8 here"):
        start(config, "--ckpt_path", str(last), "--model.network.init_args.dim", "8")
    with pytest.raises(SRError, match=r"with an average \(model.ema_decay\), and cannot be continued without it"):
        start(config, "--ckpt_path", str(last), "--model.ema_decay", "0")
    before, after = ({p.relative_to(root) for p in Path(root).rglob("*")} for root in ("before", "runs"))
    assert after == before


def test_two_runs_at_once_get_two_folders(config, monkeypatch):
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny.yaml"])
    folders = []
    for _ in range(2):
        folders.append(SRCLI().run_dir)
        monkeypatch.delenv("SR_RUN_DIR")
    assert folders == [Path("runs/tiny/001"), Path("runs/tiny/002")]


def test_ctrl_c_says_how_to_go_on(config, tmp_path):
    config["trainer"] |= {"max_steps": 100_000, "val_check_interval": 5}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        last = tmp_path / "runs/tiny/001/checkpoints/last.ckpt"
        deadline = time.monotonic() + 300
        while not last.is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "stopped at step" in out
    assert "--ckpt_path runs/tiny/001/checkpoints/last.ckpt" in out
    assert torch.load(last, weights_only=True)["global_step"] == int(out.split("continue from step ")[1].split()[0])
    assert "Traceback" not in err


def test_averaged_weights_follow_their_definition(config, start):
    """With a network whose weights are known after every step, the average is known, too."""
    raw = []
    config["model"]["ema_decay"] = 0.3
    config["trainer"]["max_steps"] = 3
    original = sr.archs.SparseSR.forward

    def record(self, lq):
        if self.training:
            raw.append({k: v.detach().clone() for k, v in self.state_dict().items()})
        return original(self, lq)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sr.archs.SparseSR, "forward", record)
        cli = start(config)
    raw.append(cli.model.network.state_dict())
    average = raw[0]
    for step in range(3):
        decay = min(0.3, (1 + step) / (10 + step))
        average = {k: decay * average[k] + (1 - decay) * raw[step + 1][k] for k in average}
    for key, value in cli.model.ema.state_dict().items():
        torch.testing.assert_close(value, average[key])


def test_without_average_the_trained_weights_are_exported(config, start):
    cli = start(config, "--model.ema_decay", "0", "--trainer.val_check_interval", "4")
    exported = load_file(cli.run_dir / "best.safetensors")
    assert all(torch.equal(exported[k], v) for k, v in cli.model.network.state_dict().items())


def put(config: dict, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config[int(key)] if isinstance(config, list) else config[key]
    config[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.network.class_path", "sr.archs.SparsSR", r"no 'SparsSR'; did you mean 'SparseSR'"),
        ("model.network.init_args.dmi", 8, r"unknown option 'dmi' of sr.archs.SparseSR; did you mean 'dim'"),
        ("model.network.init_args.heads", 3, "3 attention heads do not divide"),
        ("model.netwrk", 1, r"'model.netwrk'; did you mean 'model.network'"),
        ("trainr", {"max_steps": 3}, r"'trainr.max_steps'; did you mean 'trainer.max_steps'"),
        ("model.optimizer.class_path", "torch.optim.Adm", r"no 'Adm'; did you mean 'Adam'"),
        ("model.losses.0.class_path", "sr.losses.L2Loss", r"no 'L2Loss'; did you mean 'L1Loss'"),
        ("model.losses", [], "model.losses is empty"),
        ("model.ema_decay", 1.5, r"model.ema_decay lies in \[0, 1\)"),
        ("model.ema_decay", "much", "model.ema_decay"),
        ("data.train.init_args.root", "no_such_folder", "no_such_folder does not exist"),
        ("data.val.0.init_args.root", "no_such_folder", "no_such_folder does not exist"),
        ("data.gt_size", 17, "gt_size 17 is not a multiple of scale 2; the nearest that fit: 16 or 18"),
        ("data.gt_size", 400, "gt_size 400 is larger than every picture"),
        ("data.val.0.init_args.name", "a/b", "cannot be 'a/b'"),
        ("data.train.init_args", {}, "data.train.*missing: root"),
        ("model.crop_border", 30, "crop_border 30 leaves nothing"),
        ("model.scheduler.init_args", {"warmup": 5}, r"warmup is a fraction of the run in \[0, 1\), not 5"),
        ("model.schedular", 1, "did you mean 'model.scheduler'"),
        ("model.optimizer.init_args.lr", "abc", "model.optimizer: 'abc' is not a value of lr"),
        ("data.train", "a_folder", "class_path sr.data.GTFolder with init_args.root"),
        ("data.train", "data/nowhere.yaml", "data.train: no config data/nowhere.yaml"),
        ("data.val", "data/nowhere.yaml", "data.val: no config data/nowhere.yaml"),
        ("data.degradation", "nowhere.yaml", "data.degradation: no config nowhere.yaml"),
        ("data.batch_size", 0, "batch_size must be at least 1"),
        ("model.optimizer.init_args.lr", -1, "model.optimizer: Invalid learning rate"),
        ("model.network.init_args.window", 0, "window must be at least 1"),
        ("trainer.val_check_interval", 0.5, "val_check_interval"),
        ("trainer.accelerator", "cuda", "CUDA|cuda|GPU"),
        ("trainer.max_steps", -1, "trainer.max_steps"),
        ("ckpt_path", "nowhere.ckpt", "no checkpoint at nowhere.ckpt"),
        (
            "trainer.val_check_interval",
            "00:00:30:00",
            "val_check_interval must be a whole number",
        ),
        ("trainer.val_check_interval", 0, "trainer.val_check_interval must be at least 1"),
        ("trainer.accumulate_grad_batches", 0, "trainer.accumulate_grad_batches must be at least 1"),
        ("trainer.precision", 17, r"trainer.precision: expected one of .*'16-mixed'.*, not 17"),
    ],
)
def test_mistakes_are_named_in_two_lines_and_leave_nothing(config, start, path, value, message):
    put(config, path, value)
    with pytest.raises(SRError, match=message) as error:
        start(config)
    assert len(str(error.value)) < 400
    assert not Path("runs").exists()


def test_a_failure_before_the_first_step_leaves_nothing(config, start, monkeypatch, tmp_path):
    """A damaged picture that is not decoded before it is used, and a fault of the program."""
    config["data"]["cache"] = False
    picture = next((tmp_path / "val").iterdir())
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SRError, match="is damaged or incomplete"):
        start(config)
    assert not Path("runs").exists()
    picture.write_bytes(whole)
    cli = start(config)
    kept = {p.relative_to("runs") for p in Path("runs").rglob("*")}

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(cli.model), "training_step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        start(config)
    last = str(cli.run_dir / "checkpoints" / "last.ckpt")
    with pytest.raises(RuntimeError, match="out of memory"):
        start(config, "--ckpt_path", last, "--trainer.max_steps", "6")
    assert kept <= {p.relative_to("runs") for p in Path("runs").rglob("*")}
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["001"]


@pytest.mark.parametrize("missing", ["model.network", "model.losses", "data.train", "data.gt_size"])
def test_a_missing_key_is_named(config, start, missing):
    group, key = missing.split(".")
    del config[group][key]
    with pytest.raises(SRError, match=missing):
        start(config)


def test_the_script_prints_a_mistake_without_a_traceback(config, tmp_path):
    put(config, "data.train.init_args.root", "no_such_folder")
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ") and "no_such_folder" in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") <= 2


def test_abbreviated_options_are_refused(config, start):
    with pytest.raises(SRError, match="did you mean"):
        start(config, "--trainer.max_step", "3")


def test_a_place_without_room_for_runs_is_named(config, start):
    Path("file").write_text("")
    with pytest.raises(SRError, match=r"cannot make a run folder in file/tiny .*choose another with --runs"):
        start(config, "--runs", "file")


def test_a_missing_config_is_named(start, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "nowhere.yaml"])
    with pytest.raises(SRError, match=r"nowhere\.yaml"):
        SRCLI()
