from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import DataLoader

from sr.data import GTFolder, SRDataModule, streaming
from sr.data.streaming import StreamingGTDataset, optimize
from sr.errors import SRError
from sr.image import read_rgb

pytest.importorskip("litdata")

N = 13  # pictures; the blue channel of number i is 10 * i
SMALL = 5  # the one that is smaller than a patch
SCALE, SIZE = 2, 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streaming") / "pictures"
    root.mkdir()
    for i in range(N):
        rng = np.random.default_rng(i)
        pixels = rng.integers(0, 256, (6, 6, 3) if i == SMALL else (21 + i % 3, 25 - i % 2, 3), dtype=np.uint8)
        pixels[..., 2] = 10 * i
        Image.fromarray(pixels).save(root / f"{i:02}.png")
    return root


@pytest.fixture(scope="module")
def chunks(pictures: Path) -> Iterator[Path]:
    before = os.environ.copy(), multiprocessing.get_start_method(), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_CHUNK", 5000)  # bytes: three pictures
        optimize([pictures], pictures.parent / "chunks", workers=1)
    assert before == (os.environ.copy(), multiprocessing.get_start_method(), signal.getsignal(signal.SIGINT))
    yield pictures.parent / "chunks"


def loader(chunks: Path, batches: int, batch_size: int = 1, each: int = 1, **kwargs: Any) -> DataLoader:
    return StreamingGTDataset(chunks, each).loader(SCALE, SIZE, kwargs.pop("seed", 0), batch_size, batches, **kwargs)


def numbers(batches: Any) -> list[int]:
    """Which picture each patch is of."""
    return [int(blue) // 10 for batch in batches for blue in batch["gt"][:, 2, 0, 0]]


def equal(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


# --- chunks ------------------------------------------------------------------------------------------------------


def test_there_are_several_chunks_and_they_hold_the_files(pictures: Path, chunks: Path) -> None:
    files = list(chunks.glob("chunk-*.bin"))
    assert len(files) > 3
    assert json.loads((chunks / "index.json").read_text())["config"]["data_format"] == streaming._FORMAT
    together = b"".join(f.read_bytes() for f in files)
    assert all(path.read_bytes() in together for path in pictures.iterdir())


def test_what_is_stored_has_the_pixels_that_data_sets_see(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    plain.save(tmp_path / "plain.jpg")
    plain.save(tmp_path / "turned.jpg", exif=turned)
    Image.fromarray(rng.integers(0, 2**16, (9, 12), dtype=np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(rng.integers(0, 256, (9, 12, 4), dtype=np.uint8)).save(tmp_path / "alpha.png")
    plain.convert("L").save(tmp_path / "grey.png")
    for name, as_it_is in [("plain.jpg", 1), ("alpha.png", 1), ("grey.png", 1), ("turned.jpg", 0), ("deep.png", 0)]:
        item = streaming._pack("raise", (name, str(tmp_path / name)))
        assert item is not None and item["name"] == name.encode()
        assert torch.equal(
            torch.from_numpy(streaming._decode(item["picture"])), read_rgb(tmp_path / name).permute(1, 2, 0)
        )
        assert (item["picture"] == (tmp_path / name).read_bytes()) == bool(as_it_is)


def test_faults_of_what_to_optimize(pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SRError, match="is not an empty folder; choose another"):
        optimize([pictures], pictures)
    with pytest.raises(SRError, match="give at least one folder"):
        optimize([], tmp_path / "out")
    with pytest.raises(SRError, match="nowhere does not exist"):
        optimize([tmp_path / "nowhere"], tmp_path / "out")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.png").write_bytes((pictures / "00.png").read_bytes()[:200])
    with pytest.raises(SRError, match=r"^[^\n]*broken/a\.png is damaged or incomplete[^\n]*; replace or remove it$"):
        optimize([broken], tmp_path / "out", workers=1)
    with caplog.at_level(logging.WARNING, "sr.data"):
        assert streaming._pack("skip", ("a", str(broken / "a.png"))) is None
    assert "left out: " in caplog.text and "a.png is damaged" in caplog.text


def test_without_litdata_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, pictures: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    for act in (lambda: optimize([pictures], tmp_path / "out"), lambda: loader(tmp_path, 1)):
        with pytest.raises(SRError, match=r"pip install -e '\.\[streaming\]'"):
            act()


# --- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2, 3])
def test_patches_are_of_the_whole_picture_and_its_whole_reduction(pictures: Path, chunks: Path, scale: int) -> None:
    folder = GTFolder(pictures)
    folder.prepare(scale)
    size = 3
    batches = list(StreamingGTDataset(chunks, 4).loader(scale, size * scale, 0, 5, 8))
    assert len(batches) == 8
    found = Counter()
    for batch in batches:
        assert batch["lq"].shape == (5, 3, size, size) and batch["gt"].shape == (5, 3, size * scale, size * scale)
        assert batch["lq"].dtype == batch["gt"].dtype == torch.uint8
        for lq, gt, number in zip(batch["lq"], batch["gt"], numbers([batch]), strict=True):
            whole_lq, whole_gt = folder.pair(number)
            places = [
                (y, x, k, flip)
                for y in range(whole_lq.shape[1] - size + 1)
                for x in range(whole_lq.shape[2] - size + 1)
                for k in range(4)
                for flip in (False, True)
                if torch.equal(turned(whole_lq[:, y : y + size, x : x + size], k, flip), lq)
                and torch.equal(
                    turned(whole_gt[:, y * scale : (y + size) * scale, x * scale : (x + size) * scale], k, flip), gt
                )
            ]
            assert len(places) == 1
            found[(number, *places[0])] += 1
    assert len(found) > 35  # of 40, nearly all different
    assert {k for _, _, _, k, _ in found} == {0, 1, 2, 3} and {flip for *_, flip in found} == {False, True}


def turned(x: Tensor, k: int, flip: bool) -> Tensor:
    return torch.rot90(x.flip(-1) if flip else x, k, (-2, -1))


def test_without_lq_the_patches_are_the_same(chunks: Path) -> None:
    a, b = list(loader(chunks, 5, 2)), list(loader(chunks, 5, 2, lq=False))
    assert all("lq" not in y and torch.equal(x["gt"], y["gt"]) for x, y in zip(a, b, strict=True))


def test_each_picture_gives_its_patches_and_neighbours_are_of_different_pictures(chunks: Path) -> None:
    seen = numbers(loader(chunks, 40 * 4, each=4))
    large = [i for i in range(N) if i != SMALL]
    for first in range(0, len(seen), 4):
        assert len(set(seen[first : first + 4])) >= 2  # the same twice only instead of the small one, or at a new epoch
    counts = Counter(seen)
    assert set(counts) == set(large)
    # 40 blocks are 43 pictures, 3.3 epochs; 4 patches of each.
    assert all(3 * 4 - 3 <= counts[i] <= 5 * 4 + 3 for i in large)


def test_the_seed_and_the_epoch_change_the_order_and_the_patches(chunks: Path) -> None:
    a, again, other = (list(loader(chunks, 2 * N, seed=seed)) for seed in (1, 1, 2))
    assert equal(a, again)
    assert numbers(a) != numbers(other)
    assert numbers(a[:N]) != numbers(a[N:])
    first = {i: batch["gt"] for i, batch in zip(numbers(a[:N]), a[:N], strict=True)}
    later = zip(numbers(a[N:]), a[N:], strict=True)
    assert any(not torch.equal(first[i], batch["gt"]) for i, batch in later)


# --- processes and interruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_two_processes_see_each_picture_once_an_epoch(chunks: Path, workers: int) -> None:
    world: dict[str, Any] = {"world_size": 2, "num_workers": workers}
    for epoch in range(3 if workers < 2 else 1):  # two workers with 3 and 4 pictures reach the next one by one
        seen: list[int] = []
        for rank, own in enumerate((N // 2, N - N // 2)):
            seen += numbers(loader(chunks, own * (epoch + 1), rank=rank, done=lambda n=own * epoch: n, **world))
        # The one that is too small has its successor in its place.
        once = Counter(seen)
        assert len(seen) == N and set(once) == set(range(N)) - {SMALL} and max(once.values()) == 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resuming_goes_on_where_it_stopped_and_keeps_the_length(chunks: Path, workers: int) -> None:
    for rank, each, size in [(0, 1, 1), (1, 4, 3)]:
        settings = {"each": each, "batch_size": size, "num_workers": workers, "rank": rank, "world_size": 2}
        total = 24
        whole = list(loader(chunks, total, **settings))
        seen = torch.cat([b["index"] for b in whole[:2]]).tolist()
        assert seen == [(b + rank) * size + i for b in (0, 2) for i in range(size)]
        for done in range(1, total, 3 if workers == 0 else 9):
            rest = loader(chunks, total, done=lambda n=done: n, **settings)
            assert len(rest) == total
            assert equal(list(rest), whole[done:])


def test_an_object_store_that_is_larger_than_the_disk(
    chunks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("litdata.utilities.dataset_utilities._LITDATA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MAX_CACHE_SIZE", "9000")
    near, far = (list(loader(root, 4 * N, each=2)) for root in (chunks, f"local:{chunks}"))
    assert equal(near, far)
    assert 0 < len(list(tmp_path.rglob("chunk-*.bin"))) < len(list(chunks.glob("chunk-*.bin")))


# --- in a real trainer -------------------------------------------------------------------------------------------


def test_yaml_builds_it(pictures: Path, chunks: Path) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(SRDataModule, "data")
    train = {"class_path": "sr.data.streaming.StreamingGTDataset", "init_args": {"root": str(chunks)}}
    config = {"train": train, "scale": SCALE, "gt_size": SIZE, "batch_size": 2}
    data = parser.instantiate_classes(parser.parse_object({"data": config})).data
    data.setup("fit")
    assert [len(batch["lq"]) for batch in data.train_dataloader()] == [2]
    with pytest.raises(SRError, match="no chunks can be read"):
        SRDataModule(StreamingGTDataset(pictures), SCALE, SIZE, 2).setup("fit")


class Recorder(BoringModel):
    """Notes every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append({k: v.clone() for k, v in batch.items()})
        return self.layer(batch["lq"].mean((2, 3))).mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        assert batch["name"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        if self.trainer.world_size > 1:
            gathered = self.all_gather({k: torch.stack([b[k] for b in self.seen]) for k in self.seen[0]})
            if self.global_rank == 0:
                torch.save(gathered, Path(self.trainer.default_root_dir) / "seen.pt")


class SaveAt(Callback):
    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batches:
            trainer.save_checkpoint(self.path)


def fit(
    pictures: Path, chunks: Path, steps: int, ckpt: Path | None = None, workers: int = 0, each: int = 3, **kwargs: Any
) -> Recorder:
    torch.manual_seed(0)
    model = Recorder()
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )
    data = SRDataModule(
        StreamingGTDataset(chunks, each), SCALE, SIZE, 2, val=[GTFolder(pictures)], cache=False, num_workers=workers
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        trainer.fit(model, datamodule=data, ckpt_path=None if ckpt is None else str(ckpt), weights_only=True)
    return model


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (1, 1), (0, 2)])
def test_four_steps_and_four_more_are_eight(
    pictures: Path, chunks: Path, tmp_path: Path, workers: int, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.ckpt"
    settings: dict[str, Any] = {"workers": workers, "accumulate_grad_batches": accumulate}
    whole = fit(pictures, chunks, 8, callbacks=[SaveAt(4 * accumulate, path)], **settings)
    assert len(whole.seen) == 8 * accumulate
    with caplog.at_level(logging.WARNING, "sr.data"):
        resumed = fit(pictures, chunks, 8, path, **settings)
        assert "other patches" not in caplog.text
        assert equal(resumed.seen, whole.seen[4 * accumulate :])
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
        fit(pictures, chunks, 8, path, each=2, **settings)
    assert "patches_per_picture 3 -> 2" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_two_processes_resume_in_the_middle_of_an_epoch(pictures: Path, chunks: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork", "default_root_dir": tmp_path, "each": 1}
    fit(pictures, chunks, 6, callbacks=[SaveAt(4, tmp_path / "x.ckpt")], **settings)
    whole = torch.load(tmp_path / "seen.pt")
    seen = [int(blue * 255 + 0.5) // 10 for blue in whole["gt"][:, :, :, 2, 0, 0].flatten()]
    assert len(seen) == 12 and max(Counter(seen).values()) <= 2  # of 13; the small one has its successor in its place
    assert len(set(seen)) >= 11
    fit(pictures, chunks, 6, tmp_path / "x.ckpt", **settings)
    rest = torch.load(tmp_path / "seen.pt")
    assert all(torch.equal(rest[k], whole[k][:, 4:]) for k in whole)


# --- faults ------------------------------------------------------------------------------------------------------


def test_faults(chunks: Path, tmp_path: Path) -> None:
    with pytest.raises(SRError, match="patches_per_picture must be at least 1, not 0"):
        StreamingGTDataset(chunks, 0)
    with pytest.raises(SRError, match="gt_size 9 is not a multiple of scale 2"):
        StreamingGTDataset(chunks).loader(2, 9, 0, 1, 1)
    with pytest.raises(SRError, match="seed must not be negative"):
        loader(chunks, 1, seed=-1)
    with pytest.raises(SRError, match=r"no chunks can be read at .*nowhere"):
        loader(tmp_path / "nowhere", 1)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(SRError, match="gt_size 64 is larger than the pictures at"):
        next(iter(StreamingGTDataset(chunks).loader(2, 64, 0, 1, 1)))
    with pytest.raises(SRError, match=r"too few pictures for 20 processes; use fewer num_workers"):
        next(iter(loader(chunks, 1, world_size=20)))


def test_chunks_of_something_else(chunks: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(chunks, other)
    index = json.loads((other / "index.json").read_text())
    index["config"]["data_format"] = ["bytes", "pickle"]  # which could run code
    (other / "index.json").write_text(json.dumps(index))
    with pytest.raises(SRError, match="hold other things"):
        loader(other, 1)


def test_a_damaged_chunk_names_the_picture(chunks: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(chunks, other)
    for path in other.glob("chunk-*.bin"):
        path.write_bytes(path.read_bytes().replace(b"IHDR", b"IXXX"))
    with pytest.raises(SRError, match=r"the picture pictures/\d\d\.png at .* is damaged"):
        next(iter(loader(other, 1)))
