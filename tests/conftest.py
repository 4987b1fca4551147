"""Fixtures shared by all tests: two threads, and tiny folders of made-up pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(2)

MakePictures = Callable[..., Path]


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
