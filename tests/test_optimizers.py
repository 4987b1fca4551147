"""Optimisers are named by class path: torch's and timm's."""

import importlib

import pytest
import torch

from sr.errors import SRError


@pytest.mark.parametrize(
    ("path", "args"),
    [
        ("torch.optim.AdamW", {"lr": 1e-3, "weight_decay": 0.01}),
        ("torch.optim.SGD", {"lr": 0.01, "momentum": 0.9}),
        ("sr.optim.Muon", {"lr": 1e-3}),
        ("timm.optim.Muon", {"lr": 1e-3}),  # convolutions as matrices; torch.optim.Muon takes matrices alone
        ("timm.optim.Adan", {"lr": 1e-3}),
        ("timm.optim.Lion", {"lr": 1e-4}),
    ],
)
def test_optimisers_train_and_resume(config, start, path, args):
    if not hasattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]):
        pytest.skip(f"this version has no {path}")
    config["model"]["optimizer"] = {"class_path": path, "init_args": args}
    config["model"]["scheduler"] = {"class_path": "sr.schedules.MultiStep", "init_args": {"milestones": []}}
    whole = start(config, "--name", "whole").model.network.state_dict()
    half = start(config, "--trainer.max_steps", "2")
    assert type(half.trainer.optimizers[0]).__name__ == path.rpartition(".")[2]
    resumed = start(config, "--ckpt_path", str(half.run_dir / "checkpoints" / "last.ckpt"))
    for key, value in resumed.model.network.state_dict().items():
        assert torch.equal(value, whole[key]), key


def test_an_optimiser_that_does_not_suit_the_network_is_named(config, start):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    config["model"]["optimizer"] = {"class_path": "torch.optim.Muon", "init_args": {"lr": 1e-3}}
    with pytest.raises(SRError, match=r"model\.optimizer: .*2D"):
        start(config)
