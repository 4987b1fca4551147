"""Fixtures shared by all tests: two threads, and tiny folders of made-up pictures."""

from __future__ import annotations

import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ:  # read when torch is loaded: workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# isort: split
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

MakePictures = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packs of a test lie in a folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "sr"


@pytest.fixture(autouse=True)
def no_run_is_left_open() -> Iterator[None]:
    """A test that builds a run without training it leaves the run's folder in the environment."""
    os.environ.pop("SR_RUN_DIR", None)
    yield
    os.environ.pop("SR_RUN_DIR", None)


@pytest.fixture
def make_pictures(tmp_path: Path) -> MakePictures:
    """A function that writes random pictures: ``make_pictures("hr", {"a.png": (24, 32), "sub/b.png": (16, 16)})``.

    Sizes are (height, width); a list of names gives each 32 x 40. The same name and size give the same pixels.
    """

    def make(folder: str, files: Mapping[str, tuple[int, int]] | Iterable[str] = ("a.png", "b.png")) -> Path:
        root = tmp_path / folder
        sizes = files if isinstance(files, Mapping) else dict.fromkeys(files, (32, 40))
        for name, (h, w) in sizes.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng([h, w, *name.encode()])
            # Smooth noise: random pixels would leave nothing to upscale.
            small = rng.integers(0, 256, (h // 4 + 2, w // 4 + 2, 3), dtype=np.uint8)
            Image.fromarray(small).resize((w, h), Image.Resampling.BICUBIC).save(path)
        return root

    return make


@pytest.fixture
def picture_folder(make_pictures: MakePictures) -> Path:
    """Three pictures of 32 x 40, one of them in a sub-folder."""
    return make_pictures("pictures", ["a.png", "b.png", "sub/c.png"])


@pytest.fixture
def config(tmp_path: Path, make_pictures: MakePictures, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A complete config for a network of a few hundred parameters, and a fresh working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SR_RUN_DIR", raising=False)
    train = make_pictures("train", {"a.png": (40, 48), "b.png": (33, 50)})
    val = make_pictures("val", {"v.png": (36, 41)})
    return {
        "model": {
            "network": {
                "class_path": "sr.archs.SparseSR",
                "init_args": {
                    "scale": 2,
                    "dim": 4,
                    "groups": 1,
                    "blocks": 1,
                    "match_dim": 4,
                    "value_dim": 4,
                    "window": 4,
                },
            },
            "losses": [{"class_path": "sr.losses.L1Loss"}],
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": "1e-3"}},
            "scheduler": {"class_path": "sr.schedules.Cosine"},
        },
        "data": {
            "train": {"class_path": "sr.data.GTFolder", "init_args": {"root": str(train)}},
            "val": [{"class_path": "sr.data.GTFolder", "init_args": {"root": str(val)}}],
            "gt_size": 16,
            "batch_size": 2,
        },
        "trainer": {"max_steps": 4, "val_check_interval": 2, "accelerator": "cpu", "log_every_n_steps": 1},
    }


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Train with a config and further arguments, in this process; gives the run's folder and the CLI."""

    def run(config: dict, *args: str) -> Any:
        monkeypatch.delenv("SR_RUN_DIR", raising=False)
        Path("tiny.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny.yaml", *args])
        from sr.cli import SRCLI

        cli = SRCLI()
        cli.train()
        return cli

    return run
