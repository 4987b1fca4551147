"""Several processes train as one does; on CPUs, over gloo."""

import csv
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import sr
from sr.data import GTFolder

ROOT = Path(__file__).parents[1]
FSDP = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}
pytestmark = pytest.mark.slow


def train(folder, config, *args, launcher=()):
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, *launcher, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml", *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=400)
    assert result.returncode == 0, result.stderr
    return result


def train_as_slurm_does(folder: Path, config: dict, tasks: int, *args: str) -> str:
    """What ``srun`` does on one machine: starts the same command once for each task, with variables that tell which."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"NTASKS": tasks, "NTASKS_PER_NODE": tasks, "NNODES": 1, "NODEID": 0, "NODELIST": "localhost"}
    shared |= {"JOB_ID": 1, "JOB_NAME": "train"}
    processes = []
    for task in range(tasks):
        own = {f"SLURM_{name}": str(value) for name, value in (shared | {"PROCID": task, "LOCALID": task}).items()}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml", *args]
        processes.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=os.environ | own
            )
        )
    try:
        said = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * tasks, said
    return "".join(out for out, _ in said)


def outcome(run: Path) -> tuple[dict, list[float], list[float]]:
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    scores = [float(row["val/val/psnr_y"]) for row in rows if row["val/val/psnr_y"]]
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"], losses, scores


@pytest.fixture
def sgd(config):
    """With plain gradient descent a difference between gradients stays as small as it is."""
    config["model"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    config["data"]["batch_size"] = 8
    config["trainer"]["max_steps"] = 6
    return config


@pytest.mark.parametrize("way", ["ddp", "torchrun", "srun", "fsdp"])
def test_two_processes_train_as_one(sgd, tmp_path, way):
    """Also with fewer validation pictures than processes; in one run folder."""
    train(tmp_path, sgd, "--name", "one")
    one = outcome(tmp_path / "runs" / "one" / "001")
    sgd["trainer"] |= {"devices": 2, "strategy": FSDP if way == "fsdp" else "ddp"}
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if way == "torchrun" else ()
    if way == "srun":
        said = train_as_slurm_does(tmp_path, sgd, 2, "--name", "two")
    else:
        said = train(tmp_path, sgd, "--name", "two", launcher=launcher).stdout
    assert [path.name for path in (tmp_path / "runs" / "two").iterdir()] == ["001"]
    two = outcome(tmp_path / "runs" / "two" / "001")
    assert one[0].keys() == two[0].keys()
    for key in one[0]:
        torch.testing.assert_close(two[0][key], one[0][key], atol=1e-5, rtol=1e-4)
    assert two[1] == pytest.approx(one[1], rel=1e-4)
    assert two[2] == pytest.approx(one[2], abs=1e-3)
    assert said.count("run folder: runs/two/001") == 1


def test_one_task_of_slurm_needs_no_strategy(config, tmp_path):
    said = train_as_slurm_does(tmp_path, config, 1)
    assert said.count("run folder: runs/tiny/001") == 1


def test_sharded_training_resumes_and_its_weights_upscale(config, tmp_path):
    config["trainer"] |= {"devices": 2, "strategy": FSDP, "max_steps": 6}
    # The schedule is a function of the whole run's length, so a shorter run is a part of it only without one.
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    train(tmp_path, config, "--name", "four", "--trainer.max_steps", "4")
    last = "runs/four/001/checkpoints/last.ckpt"
    train(tmp_path, config, "--ckpt_path", last, "--trainer.max_steps", "6")
    train(tmp_path, config, "--name", "six")
    resumed, six = (outcome(tmp_path / "runs" / name / "001")[0] for name in ("four", "six"))
    for key in six:
        assert torch.equal(resumed[key], six[key]), key
    best = sr.load(tmp_path / "runs" / "six" / "001" / "best.safetensors")
    checkpoint = sr.load(tmp_path / "runs" / "six" / "001" / "checkpoints" / "last.ckpt")
    pictures = GTFolder(tmp_path / "val")
    pictures.prepare(2)
    x = pictures.pair(0)[0][None] / 255
    assert checkpoint(x).shape == best(x).shape == (1, 3, 36, 40)


def test_sharded_training_without_validation_exports_whole_weights(config, tmp_path):
    del config["data"]["val"]
    config["trainer"] |= {"devices": 2, "strategy": FSDP}
    train(tmp_path, config)
    run = tmp_path / "runs" / "tiny" / "001"
    best, averaged = (sr.load(path).state_dict() for path in (run / "best.safetensors", run / "checkpoints/last.ckpt"))
    assert best.keys() == averaged.keys()
    for key in best:
        assert torch.equal(best[key], averaged[key]), key


def test_a_sharded_run_that_is_asked_to_stop_saves_and_goes_on(config, tmp_path):
    config["trainer"] |= {"devices": 2, "strategy": FSDP, "max_steps": 45, "val_check_interval": 10}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        while "step 10 " not in (line := process.stdout.readline()):
            assert line, "the run ended before the signal"
        process.send_signal(signal.SIGTERM)  # to the first process alone
        said = process.communicate(timeout=400)[0]
    finally:
        process.kill()
    last = "runs/tiny/001/checkpoints/last.ckpt"
    step = torch.load(tmp_path / last, weights_only=True)["global_step"]
    assert process.returncode == 128 + signal.SIGTERM
    assert 10 <= step < 45
    assert said.count(f"continue from step {step} with --config") == said.count(f"--ckpt_path {last}") == 1
    said = train(tmp_path, config, "--ckpt_path", last).stdout
    assert "step 45  val: PSNR_Y" in said  # validated after the last step, too, which is between validations
    assert torch.load(tmp_path / last, weights_only=True)["global_step"] == 45


def test_two_processes_train_a_discriminator_as_one_does(sgd, tmp_path):
    """With the hinge game, whose losses are means over the samples."""
    sgd["model"]["adversarial"] = {
        "game": "hinge",
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "discriminator": {"class_path": "sr.losses.UNetDiscriminator", "init_args": {"features": 4}},
    }
    train(tmp_path, sgd, "--name", "one")
    sgd["trainer"] |= {"devices": 2, "strategy": "ddp"}
    train(tmp_path, sgd, "--name", "two")
    one, two = (outcome(tmp_path / "runs" / name / "001") for name in ("one", "two"))
    assert one[0].keys() == two[0].keys()
    for key in one[0]:
        torch.testing.assert_close(two[0][key], one[0][key], atol=1e-5, rtol=1e-4)
    assert two[1] == pytest.approx(one[1], rel=1e-4)
    exported = sr.load(tmp_path / "runs" / "two" / "001" / "last.safetensors").state_dict()
    for key, value in exported.items():
        assert torch.equal(value, two[0][f"ema.{key}"]), key
