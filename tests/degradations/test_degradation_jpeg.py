"""JPEG against libjpeg (through Pillow) on photographs."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sr.degradations import JPEG, Draws
from sr.degradations.jpeg import jpeg
from sr.errors import SRError
from sr.image import read_rgb

PHOTOGRAPHS = sorted((Path(__file__).parents[2] / "datasets" / "sample" / "val").glob("*.png"))


def libjpeg(picture: torch.Tensor, quality: int) -> torch.Tensor:
    """What Pillow writes and reads, uint8 (3, H, W)."""
    file = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)


@pytest.mark.parametrize("size", [(128, 128), (101, 77)])
@pytest.mark.parametrize("quality", [10, 30, 50, 75, 95])
def test_jpeg_is_libjpegs(quality, size):
    for path in PHOTOGRAPHS:
        picture = read_rgb(path)[:, 50 : 50 + size[0], 60 : 60 + size[1]].contiguous()
        truth = libjpeg(picture, quality).float()
        result = jpeg(picture[None].float() / 255, torch.tensor([float(quality)]))[0] * 255
        loss = (picture.float() - truth).abs().mean()
        difference = (result - truth).abs().mean()
        # Rounding differs where a coefficient lies between two steps; the loss itself is far larger.
        assert difference < 1.2 and difference < 0.45 * loss, (path.name, difference, loss)


def test_each_picture_has_its_own_quality():
    batch = torch.stack([read_rgb(path)[:, :64, :64] for path in PHOTOGRAPHS[:3]]).float() / 255
    qualities = torch.tensor([20.0, 60.0, 90.0])
    together = jpeg(batch, qualities)
    for i in range(3):
        assert torch.equal(together[i], jpeg(batch[i : i + 1], qualities[i : i + 1])[0])


@pytest.mark.parametrize("size", [(1, 1), (1, 17), (16, 16), (33, 8)])
def test_any_size_gives_8_bit_pictures(size):
    x = torch.rand(2, 3, *size) * 1.5 - 0.25
    result = jpeg(x, torch.tensor([1.0, 100.0]))
    assert result.shape == x.shape and result.min() >= 0 and result.max() <= 1
    assert torch.equal((result * 255).round() / 255, result)


def test_gray_stays_gray_and_flat_stays_flat():
    gray = torch.rand(1, 1, 40, 40).expand(1, 3, 40, 40)
    result = jpeg(gray, torch.tensor([30.0]))
    assert torch.equal(result[:, 0], result[:, 1]) and torch.equal(result[:, 0], result[:, 2])
    for value in (0.0, 1.0):
        flat = torch.full((1, 3, 24, 24), value)
        assert torch.equal(jpeg(flat, torch.tensor([50.0])), flat)


def test_qualities_cover_their_range_both_ends_included(monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr("sr.degradations.jpeg.jpeg", lambda x, quality: seen.extend(quality.tolist()) or x)
    draws = Draws(torch.Generator().manual_seed(0), torch.device("cpu"), 4, (8, 8))
    JPEG((30, 33))(torch.rand(200, 3, 1, 1), draws)
    assert set(seen) == {30, 31, 32, 33}


def test_wrong_settings_are_refused():
    with pytest.raises(SRError, match="between 1 and 100"):
        JPEG((0, 95))
    with pytest.raises(SRError, match="one quality for each of 2 pictures"):
        jpeg(torch.rand(2, 3, 8, 8), torch.tensor([50.0]))
