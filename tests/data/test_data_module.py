from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DistributedSampler

from sr.data import GTFolder, PatchDataset, SRDataModule
from sr.errors import SRError

MakePictures = Callable[..., Path]


def fake_trainer(rank: int = 0, world: int = 1, steps: int = 3, accumulate: int = 1, done: int = 0) -> Any:
    """As much of a trainer as the data module looks at."""
    progress = SimpleNamespace(total=SimpleNamespace(processed=done))
    return SimpleNamespace(
        world_size=world,
        global_rank=rank,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )


def make(folder: Path, trainer: Any = None, **kwargs: Any) -> SRDataModule:
    settings: dict[str, Any] = {"scale": 2, "gt_size": 16, "batch_size": 4, "val": [GTFolder(folder)]} | kwargs
    data = SRDataModule(GTFolder(folder), **settings)
    data.trainer = trainer
    data.setup("fit")
    return data


def train_batches(data: SRDataModule) -> list[Tensor]:
    return [b["gt"] for b in data.train_dataloader()]


def samples(folder: Path, indices: range, seed: int = 0) -> Tensor:
    data = PatchDataset(GTFolder(folder), 2, 16, seed)
    return torch.stack([data[i]["gt"] for i in indices])


# --- which samples ----------------------------------------------------------------------------------------------


def test_batches_are_consecutive_samples(picture_folder: Path) -> None:
    batches = train_batches(make(picture_folder, fake_trainer(steps=3, accumulate=2), seed=9))
    assert len(batches) == 6
    for b, batch in enumerate(batches):
        assert torch.equal(batch, samples(picture_folder, range(4 * b, 4 * b + 4), seed=9))


def test_shares_of_the_processes_make_up_the_batch_of_one(picture_folder: Path) -> None:
    whole = train_batches(make(picture_folder, fake_trainer()))
    for workers in (0, 2):
        parts = [
            train_batches(make(picture_folder, fake_trainer(rank, 2), num_workers=workers, cache=not workers))
            for rank in range(2)
        ]
        for b, batch in enumerate(whole):
            assert torch.equal(batch, torch.cat([p[b] for p in parts]))


def test_patches_grow_during_the_run_and_resume_in_the_middle(picture_folder: Path) -> None:
    def sizes(done: int = 0, **kwargs: Any) -> list[tuple[int, int]]:
        data = make(picture_folder, fake_trainer(steps=6, done=done), progressive_gt_sizes=[8, 12], **kwargs)
        return [(b["gt"].shape[-1], b["lq"].shape[-1]) for b in data.train_dataloader()]

    grown = [(8, 4), (8, 4), (12, 6), (12, 6), (16, 8), (16, 8)]
    assert sizes() == sizes(num_workers=2) == grown
    assert sizes(done=3) == grown[3:]
    for wrong in ([7], [18], [0]):
        with pytest.raises(SRError, match=r"progressive_gt_sizes are multiples of scale 2 up to gt_size 16"):
            make(picture_folder, fake_trainer(), progressive_gt_sizes=wrong)


def test_a_data_set_smaller_than_a_batch_works(make_pictures: MakePictures) -> None:
    folder = make_pictures("one", {"a.png": (16, 16)})
    batches = train_batches(make(folder, fake_trainer(steps=2), batch_size=10))
    assert [len(b) for b in batches] == [10, 10]


def test_resuming_goes_on_where_it_stopped_and_keeps_the_length(picture_folder: Path) -> None:
    whole = train_batches(make(picture_folder, fake_trainer(steps=5)))
    loader = make(picture_folder, fake_trainer(steps=5, done=3)).train_dataloader()
    assert len(loader) == 5
    assert [torch.equal(a["gt"], b) for a, b in zip(loader, whole[3:], strict=True)] == [True, True]


def test_without_a_trainer_there_is_one_batch(picture_folder: Path) -> None:
    data = make(picture_folder)
    assert [len(b) for b in train_batches(data)] == [4]
    assert [len(loader) for loader in data.val_dataloader()] == [3]


def test_loaders_set_up_what_they_need(picture_folder: Path) -> None:
    data = SRDataModule([GTFolder(picture_folder)], scale=2, gt_size=16, batch_size=4, val=[GTFolder(picture_folder)])
    assert len(train_batches(data)) == 1
    assert len(data.val_dataloader()) == 1


# --- validation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_pictures_are_split_without_double_counting(make_pictures: MakePictures, world: int) -> None:
    a = make_pictures("A", [f"{i}.png" for i in range(4)])
    b = make_pictures("B", ["x.png", "y.png"])
    for cache in (True, False):
        names: list[list[str]] = [[], []]
        for rank in range(world):
            sets = [GTFolder(a), GTFolder(b)]
            data = make(a, fake_trainer(rank, world), val=sets, batch_size=world, cache=cache)
            loaders = data.val_dataloader()
            for k, loader in enumerate(loaders):
                assert isinstance(loader.sampler, DistributedSampler)  # or Lightning splits the pictures again
                assert len(loader) == math.ceil(len(sets[k]) / world)  # equally many: processes wait for one another
                names[k] += [batch["name"][0] for batch in loader if batch["counts"].item()]
        assert sorted(names[0]) == ["0", "1", "2", "3"] and sorted(names[1]) == ["x", "y"]


def test_batches_become_float_and_keep_their_names(picture_folder: Path) -> None:
    data = make(picture_folder)
    batch = next(iter(data.val_dataloader()[0]))
    assert batch["gt"].dtype == torch.uint8
    moved = data.on_after_batch_transfer(batch, 0)
    assert moved["name"] == ["a"]
    assert moved["gt"].dtype == torch.float32 and moved["gt"].shape == (1, 3, 32, 40)
    assert torch.equal((moved["gt"] * 255).round().to(torch.uint8), batch["gt"])
    white = data.on_after_batch_transfer({"lq": torch.full((1,), 255, dtype=torch.uint8)}, 0)["lq"]
    assert white.item() == 1


# --- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "world", "message"),
    [
        (6, 4, r"batch_size 6 .* 4 device\(s\).*nearest that fit: 4 or 8"),
        (3, 4, r"nearest that fit: 4"),
        (0, 1, r"at least 1, not 0"),
    ],
)
def test_batches_that_cannot_be_shared(picture_folder: Path, batch_size: int, world: int, message: str) -> None:
    with pytest.raises(SRError, match=message):
        make(picture_folder, fake_trainer(world=world), batch_size=batch_size)


def test_settings_that_cannot_work(picture_folder: Path, make_pictures: MakePictures) -> None:
    with pytest.raises(SRError, match=r"two validation sets are called 'pictures'; give one of them another name"):
        make(picture_folder, val=[GTFolder(picture_folder), GTFolder(picture_folder)])
    with pytest.raises(SRError, match="num_workers must not be negative"):
        make(picture_folder, num_workers=-1)
    with pytest.raises(SRError, match=r"max_steps is not set"):
        make(picture_folder, fake_trainer(steps=-1)).train_dataloader()
    broken = make_pictures("broken", ["a.png"])
    (broken / "a.png").write_bytes((broken / "a.png").read_bytes()[:200])
    with pytest.raises(SRError, match=r"broken/a\.png is damaged"):
        make(picture_folder, val=[GTFolder(broken)])


def test_validating_alone_reads_no_training_picture(picture_folder: Path, tmp_path: Path) -> None:
    data = SRDataModule(GTFolder(tmp_path / "nowhere"), 2, 16, 4, val=[GTFolder(picture_folder)])
    data.setup("validate")
    assert len(data.val_dataloader()[0]) == 3
    with pytest.raises(SRError, match="nowhere does not exist"):
        data.setup("fit")


@pytest.mark.parametrize("several", [True, False])
def test_yaml_builds_it_and_help_explains_it(picture_folder: Path, several: bool) -> None:
    parser = ArgumentParser(prog="x")
    parser.add_class_arguments(SRDataModule, "data")
    train = {"class_path": "sr.data.GTFolder", "init_args": {"root": str(picture_folder)}}
    val = {"class_path": "sr.data.BenchmarkFolder", "init_args": {"root": str(picture_folder), "name": "mine"}}
    config = {"train": [train] if several else train, "scale": 2, "gt_size": 16, "batch_size": 2, "val": [val]}
    data = parser.instantiate_classes(parser.parse_object({"data": config})).data
    data.setup("fit")
    assert len(train_batches(data)) == 1
    assert data.val_sets[0].name == "mine"
    text = " ".join(parser.format_help().split())
    assert "patches of one forward pass over all devices together" in text


# --- in a real trainer ------------------------------------------------------------------------------------------


class Recorder(BoringModel):
    """Notes the first GT pixel block of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[Tensor] = []
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert batch["gt"].dtype == torch.float32
        self.seen.append((batch["gt"] * 255).round().to(torch.uint8).cpu())
        return self.layer(batch["lq"].mean((2, 3))).mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        assert batch["name"]
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path, steps: int, ckpt: Path | None = None, callbacks: list[Callback] | None = None, **kwargs: Any
) -> Recorder:
    torch.manual_seed(0)
    model = Recorder()
    data_args = {k: kwargs.pop(k) for k in ("num_workers", "cache", "seed") if k in kwargs}
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks or [],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or []),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"num_sanity_val_steps": 0, **kwargs},
    )
    data = SRDataModule(GTFolder(folder), 2, 16, 4, val=[GTFolder(folder)], **data_args)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        trainer.fit(model, datamodule=data, ckpt_path=None if ckpt is None else str(ckpt), weights_only=True)
    assert trainer.global_step == steps
    return model


class SaveAt(Callback):
    """Writes a checkpoint in one of the hooks in which people do."""

    def __init__(self, hook: str, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batches and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
@pytest.mark.parametrize(
    ("accumulate", "at", "limit", "workers"),
    [(1, 3, None, 0), (1, 3, None, 2), (2, 4, None, 0), (2, 3, None, 0), (1, 3, 2, 0), (1, 2, 2, 0), (1, 6, None, 0)],
    ids=["plain", "workers", "accumulate", "between-steps", "mid-epoch", "end-of-epoch", "finished"],
)
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(
    picture_folder: Path, tmp_path: Path, hook: str, accumulate: int, at: int, limit: int | None, workers: int
) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 1}
    if limit:
        settings["limit_train_batches"] = limit  # several epochs
    first_steps = 6 // accumulate
    whole = fit(picture_folder, 8 // accumulate, **settings)
    assert len(whole.seen) == 8
    assert torch.equal(torch.cat(whole.seen), samples(picture_folder, range(32)))
    path = tmp_path / "x.ckpt"
    settings["num_workers"] = workers
    begun = fit(picture_folder, first_steps, callbacks=[SaveAt(hook, at, path)], **settings)
    resumed = fit(picture_folder, 8 // accumulate, ckpt=path, **settings)
    together = begun.seen[:at] + resumed.seen
    assert len(together) == 8
    assert torch.equal(torch.cat(together), torch.cat(whole.seen))
    assert torch.equal(resumed.layer.weight, whole.layer.weight) or (accumulate, at) == (2, 3)  # gradients are not kept


def test_model_checkpoint_resumes_too(picture_folder: Path, tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(picture_folder, 7, callbacks=[saver])
    resumed = fit(picture_folder, 7, ckpt=tmp_path / "step=3.ckpt")
    assert torch.equal(torch.cat(resumed.seen), samples(picture_folder, range(12, 28)))


def test_other_settings_on_resuming_are_reported(
    picture_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.ckpt"
    fit(picture_folder, 3, callbacks=[SaveAt("on_train_batch_end", 2, path)])
    with caplog.at_level(logging.WARNING, "sr.data"):
        fit(picture_folder, 3, ckpt=path)
        assert "other patches" not in caplog.text
        fit(picture_folder, 3, ckpt=path, seed=4)
    assert "seed 0 -> 4" in caplog.text


def test_validation_every_few_steps_and_fast_dev_run(picture_folder: Path) -> None:
    model = fit(picture_folder, 4, val_check_interval=2, num_sanity_val_steps=1)
    assert model.validated == [0] + [2] * 3 + [4] * 3
    assert len(fit(picture_folder, 1, fast_dev_run=True).seen) == 1


class Shares(Recorder):
    def on_train_end(self) -> None:
        seen = self.all_gather(torch.cat(self.seen).float())
        names = self.all_gather(torch.tensor(len(self.validated)))
        if self.global_rank == 0:
            torch.save((seen, names), Path(self.trainer.default_root_dir) / "seen.pt")


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_two_processes_share_the_batches_of_one(picture_folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(Shares(), datamodule=SRDataModule(GTFolder(picture_folder), 2, 16, 4, val=[GTFolder(picture_folder)]))
    seen, names = torch.load(tmp_path / "seen.pt")
    together = seen.reshape(2, 3, 2, 3, 16, 16).transpose(0, 1).reshape(12, 3, 16, 16)  # rank, step -> step, rank
    assert torch.equal(together.to(torch.uint8), samples(picture_folder, range(12)))
    assert names.flatten().tolist() == [2, 2]
