"""Transparency: no fringe of hidden colours around what is visible."""

import numpy as np
import pytest
import torch
from test_inference import Blur

import sr
from sr.inference.alpha import bleed


def disc() -> np.ndarray:
    y, x = np.mgrid[:60, :90]
    inside = np.clip(20.5 - np.hypot(y - 30, x - 40), 0, 1)
    picture = np.zeros((60, 90, 4), np.uint8)
    picture[..., 3] = np.round(255 * inside)
    picture[picture[..., 3] > 0, 0] = 255
    return picture  # red on transparent black


@pytest.mark.parametrize("arguments", [{}, {"outscale": 3.3}, {"tile": 32}, {"wrap": True}, {"tta": True}])
def test_no_dark_fringe_around_what_is_visible(arguments):
    out = sr.Upscaler(Blur(), device="cpu", **arguments)(disc()).astype(int)
    visible = out[..., 3] > 0
    assert visible.sum() > 4 * 1200
    assert (abs(out[visible][:, :3] - [255, 0, 0]) <= 2).all()
    assert out[0, 0, 3] == 0
    assert out[out.shape[0] // 2, int(out.shape[1] * 40 / 90), 3] == 255


def test_colours_bleed_far_and_visible_ones_stay():
    colours = torch.rand(1, 3, 70, 130)
    alpha = torch.zeros(1, 1, 70, 130)
    alpha[..., 20:25, 40:45] = 0.3
    colours[..., 20:25, 40:45] = torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1)
    out = bleed(colours, alpha)
    near = out[..., :55, 10:75]  # 30 pixels around
    torch.testing.assert_close(near, torch.tensor([0.1, 0.5, 0.9]).view(1, 3, 1, 1).expand_as(near))
    assert torch.equal(out[..., 20:25, 40:45], colours[..., 20:25, 40:45])
    assert torch.equal(bleed(colours, torch.zeros_like(alpha)), colours)
