"""LPIPS and DISTS with made-up weights: what they are fed, and what happens without weights."""

from __future__ import annotations

import urllib.error

import pytest
import torch
import torchvision
from torch import Tensor

from sr.errors import SRError
from sr.metrics.perceptual import DISTS, LPIPS, PERCEPTUAL

dists_module = pytest.importorskip("torchmetrics.functional.image.dists")  # torchmetrics 1.7
lpips_module = pytest.importorskip("torchmetrics.functional.image.lpips")


def features(name: str) -> torch.nn.Module:
    """torchvision's network without its classifier, which is most of it, with weights that do not change."""
    torch.manual_seed(0)
    layers = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["D"]) if name == "vgg16" else None
    network = torch.nn.Module()
    network.features = layers or torchvision.models.AlexNet(num_classes=1).features
    return network


@pytest.fixture
def fake_weights(monkeypatch):
    monkeypatch.setattr(dists_module, "vgg16", lambda weights: features("vgg16"))
    monkeypatch.setattr(torchvision.models, "alexnet", lambda weights: features("alexnet"))


def pair(n: int = 2, height: int = 48, width: int = 56) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    gt = torch.rand(n, 3, height, width, generator=generator)
    return gt + 0.1 * torch.randn(gt.shape, generator=generator), gt


@pytest.mark.parametrize("name", ["lpips", "dists"])
def test_values_are_torchmetrics_own_on_8_bit_rgb(fake_weights, name):
    from torchmetrics.functional.image import learned_perceptual_image_patch_similarity
    from torchmetrics.functional.image.dists import deep_image_structure_and_texture_similarity

    sr, gt = pair()
    a, b = (x[..., 4:-4, 4:-4].clamp(0, 1).mul(255).add(0.5).floor() / 255 for x in (sr, gt))
    for i in range(2):
        one = a[i : i + 1], b[i : i + 1]
        expected = (
            learned_perceptual_image_patch_similarity(*one, net_type="alex", normalize=True)
            if name == "lpips"
            else deep_image_structure_and_texture_similarity(*one).reshape(())
        )
        value = PERCEPTUAL[name](crop_border=4).measure(sr[i : i + 1], gt[i : i + 1])
        torch.testing.assert_close(value, expected.detach().double().reshape(1), rtol=1e-5, atol=1e-6)
        assert value > 0


@pytest.mark.parametrize("name", ["lpips", "dists"])
def test_mean_over_pictures_whatever_the_batches(fake_weights, name):
    sr, gt = pair(3)
    metric = PERCEPTUAL[name]()
    expected = metric.measure(sr, gt).mean()
    assert metric.measure(gt, gt).abs().max() < 1e-5
    for part in (slice(0, 1), slice(1, 3)):
        metric.update(sr[part], gt[part])
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-6, atol=1e-7)
    assert not metric.higher_is_better
    assert "torchmetrics" in metric.implementation


def test_a_grey_picture_counts_as_rgb_and_a_small_one_is_refused(fake_weights):
    sr, gt = pair(1)
    metric = LPIPS()
    grey = metric.measure(sr[:, :1], gt[:, :1])
    torch.testing.assert_close(grey, metric.measure(*(x[:, :1].expand(-1, 3, -1, -1) for x in (sr, gt))))
    with pytest.raises(SRError, match="at least 32 pixels"):
        metric.measure(sr[..., :31], gt[..., :31])


@pytest.mark.parametrize(("cls", "file"), [(LPIPS, "alexnet-owt"), (DISTS, "vgg16-")])
def test_missing_weights_are_named(monkeypatch, cls, file):
    def offline(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", offline)
    with pytest.raises(SRError, match=rf"{file}.*no route.*\n.*checkpoints") as caught:
        cls()
    assert str(caught.value).count("\n") == 1
    assert torch.hub.get_dir() in str(caught.value)
