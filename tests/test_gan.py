"""Adversarial training and distillation through the real command line, on tiny pictures."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import sr.cli
from sr.archs import SparseSR
from sr.checkpoint import load, save
from sr.cli import SRCLI
from sr.errors import SRError
from sr.gan import GANModule
from sr.module import SRModule

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(config):
    """With a discriminator of a few thousand parameters."""
    config["model"]["adversarial"] = {
        "game": "relativistic",
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": "1e-3"}},
        "discriminator": {"class_path": "sr.losses.UNetDiscriminator", "init_args": {"features": 4}},
    }
    return config


def checkpoint_of(cli: SRCLI) -> dict:
    return torch.load(cli.run_dir / "checkpoints" / "last.ckpt", weights_only=True)


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_a_config_with_a_discriminator_trains_through_the_command_line(config, monkeypatch, capsys):
    monkeypatch.delenv("SR_RUN_DIR", raising=False)
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny.yaml", "--model.adversarial.weight", "0.05"])
    sr.cli.main()
    run = Path("runs/tiny/001")
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    steps = [row for row in rows if row["train/loss"]]
    assert [int(row["step"]) for row in steps] == [1, 2, 3, 4]
    for row in steps:
        expected = float(row["train/l1"]) + 0.05 * float(row["train/gan"])
        assert float(row["train/loss"]) == pytest.approx(expected, rel=1e-5)
    assert len({row["train/discriminator"] for row in steps}) == 4  # it changes, since it learns
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "PSNR_Y" in line] == ["0", "2", "4"]
    assert load(run / "checkpoints" / "last.ckpt")(torch.rand(1, 3, 5, 6)).shape == (1, 3, 10, 12)


def test_without_the_key_nothing_has_a_discriminator(config, start):
    del config["model"]["adversarial"]
    cli = start(config)
    assert type(cli.model) is SRModule
    assert not any("discriminator" in key for key in (*checkpoint_of(cli), *cli.model.state_dict()))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_of_both_are_the_steps_of_the_run(config, start, monkeypatch, accumulate):
    counts = {"network": 0, "discriminator": 0, "average": 0}
    original = SRModule._update_ema

    def count(self):
        counts["average"] += 1
        original(self)

    def count_steps(self, closure=None):
        counts["discriminator" if self.defaults["lr"] == 0.1 else "network"] += 1
        return original_step(self, closure)

    original_step = torch.optim.SGD.step
    monkeypatch.setattr(SRModule, "_update_ema", count)
    monkeypatch.setattr(torch.optim.SGD, "step", count_steps)
    for place, lr in ((config["model"], 0.2), (config["model"]["adversarial"], 0.1)):
        place["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": lr}}
    cli = start(config, "--trainer.accumulate_grad_batches", str(accumulate))
    assert isinstance(cli.model, GANModule)
    assert cli.trainer.global_step == 4
    assert counts == {"network": 4, "discriminator": 4, "average": 4}
    assert cli.trainer.fit_loop.epoch_loop.batch_progress.total.processed == 4 * accumulate
    rate = cli.model.discriminator_optimizer.param_groups[0]["lr"]  # the last step is taken at 3/4 of the cosine
    assert rate == pytest.approx(0.1 * (1 + torch.cos(torch.tensor(0.75 * torch.pi)).item()) / 2, rel=1e-5)


@pytest.mark.parametrize("game", ["vanilla", "hinge"])
def test_two_steps_against_a_loop_written_out(config, start, game):
    """Network and discriminator by plain PyTorch, on the batches that the run has seen."""
    config["model"]["adversarial"] |= {"game": game, "weight": 0.5}
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    config["trainer"]["max_steps"] = 2
    for place in (config["model"], config["model"]["adversarial"]):
        place["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    batches, before = [], {}
    original = GANModule.training_step

    def record(self, batch, batch_idx):
        if not batches:
            before.update({k: v.clone() for k, v in self.state_dict().items()})
        batches.append(batch)
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GANModule, "training_step", record)
        module = start(config).model

    network = SparseSR(**config["model"]["network"]["init_args"])
    network.load_state_dict({k[8:]: v for k, v in before.items() if k.startswith("network.")})
    judge = sr.losses.UNetDiscriminator(4)
    judge.load_state_dict({k[26:]: v for k, v in before.items() if k.startswith("adversarial.discriminator.")})
    for batch in batches:
        output = network(batch["lq"])
        logits = judge(output)
        term = torch.nn.functional.softplus(-logits).mean() if game == "vanilla" else -logits.mean()
        loss = (output - batch["gt"]).abs().mean() + 0.5 * term
        wanted = list(network.parameters())
        gradients = torch.autograd.grad(loss, wanted)
        both = judge(torch.cat([batch["gt"], output.detach()]))  # one pass: each moves the spectral norm's estimate
        real, fake = both[:2], both[2:]
        if game == "vanilla":
            label = torch.ones_like(real)
            bce = torch.nn.functional.binary_cross_entropy_with_logits
            judged = bce(real, label) + bce(fake, 1 - label)
        else:
            judged = (1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean()
        own = list(judge.parameters())
        for parameters, found in ((wanted, gradients), (own, torch.autograd.grad(judged, own))):
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.data -= 0.1 * gradient
    for trained, expected in ((module.network, network), (module.adversarial.discriminator, judge)):
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-4, atol=1e-6)


def test_resuming_is_as_if_nothing_had_happened(config, start, monkeypatch):
    config["trainer"]["max_steps"] = 8

    def keep_the_checkpoint_of_step_4(self, *_):
        if self.trainer.global_step == 5:
            shutil.copy(Path(self.trainer.default_root_dir) / "checkpoints" / "last.ckpt", "half.ckpt")

    with monkeypatch.context() as patch:
        patch.setattr(SRModule, "on_train_batch_end", keep_the_checkpoint_of_step_4)
        whole = checkpoint_of(start(config))
    half = torch.load("half.ckpt", weights_only=True)
    again = checkpoint_of(start(config, "--ckpt_path", "half.ckpt"))
    assert (half["global_step"], again["global_step"]) == (4, 8)
    for part in ("state_dict", "discriminator_optimizer", "optimizer_states"):
        assert equal(whole[part], again[part])
        assert not equal(whole[part], half[part])  # and the comparison can tell
    own = {key for key in whole["state_dict"] if key.startswith("adversarial.discriminator.")}
    assert any("_u" in key for key in own)  # the spectral norm's estimates, too


@pytest.mark.parametrize("first_with", [False, True])
def test_a_run_goes_on_with_a_discriminator_only_if_it_had_one(config, start, first_with):
    plain = {**config, "model": {k: v for k, v in config["model"].items() if k != "adversarial"}}
    before, after = (config, plain) if first_with else (plain, config)
    last = start(before).run_dir / "checkpoints" / "last.ckpt"
    having = "with" if first_with else "without"
    wrong = rf"last.ckpt is of a run {having} a discriminator \(model.adversarial\)"
    with pytest.raises(SRError, match=wrong) as error:
        start(after, "--ckpt_path", str(last), "--trainer.max_steps", "6", "--name", "other")
    assert "--model.weights" in str(error.value)
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"]


def test_the_latest_averaged_weights_are_exported(config, start, monkeypatch, capsys):
    """Not those of the best PSNR, which here is that of the first validation."""
    original = SRModule.on_validation_epoch_end

    def worse_and_worse(self):
        original(self)
        self.scores["val"]["psnr_y"] = 30.0 - self.trainer.global_step

    monkeypatch.setattr(SRModule, "on_validation_epoch_end", worse_and_worse)
    cli = start(config, "--trainer.max_steps", "5")
    exported = cli.run_dir / "last.safetensors"
    assert not list(cli.run_dir.glob("best*"))
    weights = load(exported).state_dict()
    assert all(torch.equal(weights[key], value) for key, value in cli.model.ema.state_dict().items())
    out = capsys.readouterr().out
    assert f"last weights: {exported} (step 5, mean PSNR 25.00 dB)" in out and f"-m {exported}" in out


def test_a_step_that_is_skipped_leaves_the_discriminator_alone(config, start, monkeypatch):
    def skip(self, optimizer):
        if self.trainer.global_step == 1:
            optimizer.zero_grad(set_to_none=True)

    weights = []
    original = GANModule.on_before_optimizer_step

    def record(self, optimizer):
        original(self, optimizer)
        weights.append(self.adversarial.discriminator.first.weight.clone())

    monkeypatch.setattr(SRModule, "on_before_optimizer_step", skip, raising=False)
    monkeypatch.setattr(GANModule, "on_before_optimizer_step", record)
    start(config)
    assert torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[2], weights[1])


def test_a_gradient_that_is_not_finite_leaves_the_discriminator_alone(config, start, monkeypatch):
    original = sr.losses.Adversarial.discriminator_loss

    def spoil(self, output, gt):
        return original(self, output, gt) * torch.nan

    monkeypatch.setattr(sr.losses.Adversarial, "discriminator_loss", spoil)
    cli = start(config)
    assert all(p.isfinite().all() for p in cli.model.state_dict().values())
    assert not cli.model.discriminator_optimizer.state


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_trains(config, start, precision):
    config["trainer"]["max_steps"] = 2
    cli = start(config, "--trainer.precision", precision)
    assert all(p.isfinite().all() for p in cli.model.state_dict().values())
    assert cli.model.discriminator_optimizer.state


def test_one_gradient_scaler_serves_both(config, start, monkeypatch):
    """As in 16-mixed precision on a GPU: gradients are scaled once, and steps that overflow are skipped by both."""
    for place in (config["model"], config["model"]["adversarial"]):
        place["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}

    before = {}

    def remember(self):
        before.update({key: value.detach().clone() for key, value in self.named_parameters() if "ema." not in key})

    def train(scale: float) -> dict:
        scaler = {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu", "init_scale": scale}}
        plugin = {"precision": "16-mixed", "device": "cpu", "scaler": scaler}
        config["trainer"]["plugins"] = [{"class_path": "lightning.pytorch.plugins.MixedPrecision", "init_args": plugin}]
        return checkpoint_of(start(config))["state_dict"]

    monkeypatch.setattr(GANModule, "on_train_start", remember)
    one, other, overflown = train(1.0), train(1024.0), train(2.0**120)
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=2e-2, atol=2e-4)
    assert all(torch.equal(overflown[key], value) for key, value in before.items())
    moved = {key.split(".")[0] for key, value in before.items() if not torch.equal(one[key], value)}
    assert moved == {"network", "adversarial"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gmae", "hinge", "gmae"),
        ("game", "chess", "model.adversarial"),
        (
            "optimizer",
            {"class_path": "torch.optim.Adam", "init_args": {"lr": -1}},
            r"^model\.adversarial\.optimizer: Invalid learning rate: -1",
        ),
    ],
)
def test_mistakes_are_named_and_leave_nothing(config, start, key, value, message):
    config["model"]["adversarial"][key] = value
    with pytest.raises(SRError, match=message) as error:
        start(config)
    assert len(str(error.value)) < 400
    assert not Path("runs").exists()


def test_a_student_learns_from_a_teacher_that_no_checkpoint_holds(config, start):
    del config["model"]["adversarial"]
    torch.manual_seed(0)
    save(SparseSR(**config["model"]["network"]["init_args"]), "teacher.safetensors")
    teaching = {"class_path": "sr.losses.DistillationLoss", "init_args": {"teacher": "teacher.safetensors"}}
    config["model"]["losses"].append(teaching)
    cli = start(config)
    assert {key.split(".")[0] for key in checkpoint_of(cli)["state_dict"]} == {"network", "ema"}
    assert "train/distillation" in next(csv.reader((cli.run_dir / "metrics.csv").open()))
    config["model"]["network"]["init_args"]["scale"] = 4
    with pytest.raises(SRError, match="distillation is for networks of scale 2, not 4"):
        start(config)
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == ["001"]


@pytest.mark.slow
def test_two_processes_train_as_one(config, tmp_path, start):
    config["model"]["adversarial"]["game"] = "vanilla"  # its means are of single pixels
    for place in (config["model"], config["model"]["adversarial"]):
        place["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    one = checkpoint_of(start(config))["state_dict"]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
    command += ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr
    two = torch.load("runs/tiny/002/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=1e-5, rtol=1e-4)
