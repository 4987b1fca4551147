"""Protocols by name: what each compares, and what it is called."""

import pytest
import torch

from sr.metrics import PROTOCOLS, psnr, ssim
from sr.metrics.protocols import every_protocol


@pytest.mark.parametrize(("name", "crop", "y"), [("sisr-y", 2, True), ("ntire-rgb", 2, False), ("crop4-y", 4, True)])
def test_named_protocols(name, crop, y):
    generator = torch.Generator().manual_seed(0)
    sr, gt = (torch.rand(2, 3, 24, 30, generator=generator) for _ in range(2))
    values = PROTOCOLS[name].measure(sr, gt, 2)
    kwargs = {"crop_border": crop, "test_y_channel": y}
    assert torch.equal(values[0], psnr(sr, gt, **kwargs))
    assert torch.equal(values[1], ssim(sr, gt, **kwargs))
    assert f"crop {crop}" in PROTOCOLS[name].describe(2)


def test_other_choices_show_in_the_name():
    plain = PROTOCOLS["sisr-y"]
    assert plain.but(rounded=True, crop_border=None) is plain
    other = plain.but(rounded=False, crop_border=0)
    assert other.name == "sisr-y(rounded=False, crop_border=0)"
    assert other.describe(4) == "clamped, not rounded, crop 0, MATLAB's Y, float64, mean of per-picture values"
    assert (
        plain.but(test_y_channel=False, pooled=True)
        .describe(3)
        .endswith("RGB, float64, squared error pooled over the set")
    )


def test_the_matrix_holds_every_way_once():
    assert len(every_protocol(3)) == 3 * 3 * 2
    rows = every_protocol(4)
    assert len(rows) == 3 * 2 * 2
    assert len({(p.crop(4), p.test_y_channel, p.full_range, p.rounded) for p in rows}) == len(rows)
    assert len({p.name for p in rows}) == len(rows)
