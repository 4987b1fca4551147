import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision.models as tv
from scipy.ndimage import gaussian_filter
from torch import nn
from torchmetrics.functional.image import learned_perceptual_image_patch_similarity

import sr
from sr.archs import SparseSR
from sr.checkpoint import save
from sr.errors import SRError
from sr.losses import (
    Adversarial,
    CharbonnierLoss,
    DistillationLoss,
    FFTL1Loss,
    L1Loss,
    LPIPSLoss,
    PerceptualLoss,
    SSIMLoss,
    UNetDiscriminator,
)
from sr.module import SRModule
from sr.schedules import Schedule


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return torch.rand(2, 3, 18, 19, requires_grad=True), torch.rand(2, 3, 18, 19)


@pytest.fixture(scope="module")
def vgg19_state():
    """Random weights under torchvision's names, the convolutions only."""
    torch.manual_seed(1)
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in tv.vgg19(init_weights=False).features.state_dict().items()}
    return {
        f"features.{key}": torch.randn(shape) * (2 / shape[1:].numel()) ** 0.5 if len(shape) > 1 else torch.zeros(shape)
        for key, shape in shapes.items()
    }


@pytest.fixture
def vgg19(vgg19_state, monkeypatch):
    monkeypatch.setattr(tv.VGG19_Weights, "get_state_dict", lambda self, **_: dict(vgg19_state))


@pytest.fixture
def squeezenet(monkeypatch):
    torch.manual_seed(1)
    state = tv.squeezenet1_1().state_dict()
    monkeypatch.setattr(tv.SqueezeNet1_1_Weights, "get_state_dict", lambda self, **_: state)


@pytest.fixture
def teacher():
    torch.manual_seed(2)
    return SparseSR(scale=2, dim=4, groups=1, blocks=1, match_dim=4, value_dim=4, window=4).eval()


# --- distances of pixels


def test_l1_against_numpy(pair):
    sr, gt = (t.detach().numpy() for t in pair)
    assert L1Loss()(*pair).item() == pytest.approx(np.abs(sr - gt).mean(), rel=1e-6)


def test_charbonnier_against_its_formula(pair):
    sr, gt = (t.detach().double().numpy() for t in pair)
    assert CharbonnierLoss(eps=0.1)(*pair).item() == pytest.approx(np.sqrt((sr - gt) ** 2 + 0.01).mean(), rel=1e-6)
    with pytest.raises(SRError, match="eps"):
        CharbonnierLoss(eps=0)


def test_fft_l1_against_numpy(pair):
    sr, gt = (t.detach().numpy() for t in pair)
    difference = np.fft.rfft2(sr) - np.fft.rfft2(gt)
    expected = np.abs(np.stack([difference.real, difference.imag])).mean()
    assert FFTL1Loss()(*pair).item() == pytest.approx(expected, rel=1e-5)


def test_ssim_against_its_formula(pair):
    def local_mean(x):
        """Gaussian of sigma 1.5 in a window of 11, without the border that it does not cover."""
        return gaussian_filter(x, 1.5, radius=5, axes=(2, 3))[..., 5:-5, 5:-5]

    x, y = (t.detach().double().numpy() for t in pair)
    mean_x, mean_y = local_mean(x), local_mean(y)
    var_x, var_y = local_mean(x * x) - mean_x**2, local_mean(y * y) - mean_y**2
    cov = local_mean(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * mean_x * mean_y + c1) * (2 * cov + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    assert SSIMLoss()(*pair).item() == pytest.approx(1 - ssim.mean(), abs=1e-5)
    with pytest.raises(SRError, match="at least 11 pixels"):
        SSIMLoss()(torch.rand(1, 3, 10, 30), torch.rand(1, 3, 10, 30))


@pytest.mark.parametrize("loss", [L1Loss(), CharbonnierLoss(), FFTL1Loss(), SSIMLoss()], ids=lambda loss: loss.name)
def test_equal_pictures_cost_least_and_others_have_a_gradient(loss, pair):
    sr, gt = pair
    assert loss(gt, gt).item() == pytest.approx(getattr(loss, "eps", 0), abs=1e-6)
    loss(sr, gt).backward()
    assert sr.grad.isfinite().all() and sr.grad.abs().sum() > 0
    with torch.no_grad():
        assert loss(sr - 0.01 * sr.grad / sr.grad.abs().max(), gt) < loss(sr, gt)


@pytest.mark.parametrize("loss", [L1Loss(), CharbonnierLoss(), FFTL1Loss(), SSIMLoss()], ids=lambda loss: loss.name)
def test_value_does_not_depend_on_autocast(loss, pair):
    expected = loss(*pair)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*pair)
    assert value.dtype == torch.float32 and torch.equal(value, expected)
    half = pair[0].to(torch.bfloat16)
    assert torch.equal(loss(half, pair[1]), loss(half.float(), pair[1]))


@pytest.mark.parametrize("loss", [L1Loss(), FFTL1Loss()])
def test_shapes_that_would_broadcast_are_refused(loss, pair):
    with pytest.raises(SRError, match="differ"):
        loss(pair[0], pair[1][:1])


# --- distances of features


def test_perceptual_against_slices_of_vgg19(vgg19, vgg19_state, pair):
    layers = {2: 0.1, 7: 0.1, 16: 1, 25: 1, 34: 1}
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def features(x):
        """Layer by layer, from the weights alone: VGG19 is convolutions with 1 pixel of padding, ReLUs, pooling."""
        x = (x - mean[:, None, None]) / std[:, None, None]
        index = 0
        for convolutions in (2, 2, 4, 4, 4):
            for _ in range(convolutions):
                x = F.conv2d(
                    x, vgg19_state[f"features.{index}.weight"], vgg19_state[f"features.{index}.bias"], padding=1
                )
                if index in layers:
                    yield layers[index], x
                x, index = F.relu(x), index + 2
            if index < 36:
                x, index = F.max_pool2d(x, 2), index + 1

    expected = sum(w * (a - b).abs().mean() for (w, a), (_, b) in zip(*map(features, pair), strict=True))
    loss = PerceptualLoss()
    value = loss(*pair)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=0)
    assert loss(pair[1], pair[1]) == 0
    (wanted,) = torch.autograd.grad(expected, pair[0])
    (gradient,) = torch.autograd.grad(value, pair[0])
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(*pair), value)
    with pytest.raises(SRError, match="at least 16 pixels"):
        loss(torch.rand(1, 3, 15, 20), torch.rand(1, 3, 15, 20))


def test_lpips_is_torchmetrics_and_takes_what_is_out_of_range(squeezenet, pair):
    loss = LPIPSLoss(net="squeeze")
    value = loss(*pair)
    expected = learned_perceptual_image_patch_similarity(*pair, net_type="squeeze", normalize=True)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    value.backward()
    assert pair[0].grad.abs().sum() > 0
    assert loss(3 * pair[0] - 1, pair[1]).isfinite()
    with pytest.raises(SRError, match="at least 17 pixels"):
        loss(torch.rand(1, 3, 16, 20), torch.rand(1, 3, 16, 20))


@pytest.mark.parametrize(
    ("make", "file"),
    [(PerceptualLoss, "vgg19-dcbb9e9d.pth"), (LPIPSLoss, "vgg16-397923af.pth")],
)
def test_missing_and_damaged_weights_are_named(make, file, tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    place = tmp_path / "hub" / "checkpoints" / file
    with pytest.raises(SRError, match=rf"{place}, which is missing .*no route.*https://\S*{file} there"):
        make()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"<html>not found</html>")
    with pytest.raises(SRError, match=rf"{place}, which is damaged"):
        make()


# --- networks inside of losses


def test_networks_inside_are_frozen_hidden_and_follow_to_another_device(vgg19):
    loss = PerceptualLoss()
    inside = loss.vgg._network[0]
    holder = nn.ModuleList([loss]).train()
    assert not list(holder.parameters()) and not holder.state_dict()
    assert not any(p.requires_grad for p in inside.parameters())
    assert not any(m.training for m in inside.modules())
    holder.to(torch.bfloat16)
    assert {p.dtype for p in inside.parameters()} == {torch.float32}
    holder.to("meta")
    assert {p.device.type for p in inside.parameters()} == {"meta"}


def test_distillation_compares_with_the_teacher(teacher, tmp_path, pair):
    save(teacher, tmp_path / "teacher.safetensors")
    loss = DistillationLoss(str(tmp_path / "teacher.safetensors"), weight=0.5)
    lq = torch.rand(2, 3, 6, 7)
    output = torch.rand(2, 3, 12, 14, requires_grad=True)
    gt = torch.full_like(output, torch.nan)  # does not take part
    with torch.no_grad():
        expected = (output - teacher(lq)).abs().mean()
    value = loss(output, gt, lq)
    torch.testing.assert_close(value, expected)
    value.backward()
    assert output.grad.abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(output, gt, lq), expected)
    assert not list(loss.parameters()) and not loss.state_dict()
    with pytest.raises(SRError, match="input"):
        loss(output, gt)


def test_a_teacher_of_another_scale_or_none_is_refused(tmp_path, teacher):
    save(teacher, tmp_path / "x2.safetensors")
    loss = DistillationLoss(str(tmp_path / "x2.safetensors"))
    student = SparseSR(scale=3, dim=4, groups=1, blocks=1, match_dim=4, value_dim=4, window=4)
    with pytest.raises(SRError, match="distillation is for networks of scale 2, not 3"):
        SRModule(student, [loss], torch.optim.SGD, Schedule())
    with pytest.raises(SRError, match="no weights file"):
        DistillationLoss(str(tmp_path / "nowhere.safetensors"))


def test_an_installed_teacher_is_found_by_name():
    name = "sparsesr_t_x2.quickstart"
    loss = DistillationLoss(name)
    lq = torch.rand(1, 3, 8, 9)
    assert loss.scale == 2
    assert loss(sr.load(name)(lq), torch.zeros(1, 3, 16, 18), lq) == 0


# --- the discriminator and its games


def test_discriminator_has_the_published_size_and_judges_every_pixel():
    assert sum(p.numel() for p in UNetDiscriminator().parameters()) == 4_376_897  # of Real-ESRGAN's netD
    assert UNetDiscriminator(4)(torch.rand(2, 3, 21, 34)).shape == (2, 1, 21, 34)


def test_discriminator_convolutions_have_spectral_norm_one():
    torch.manual_seed(0)
    network = UNetDiscriminator(4)
    for _ in range(200):  # each forward pass in training is a step of the power iteration
        network(torch.rand(1, 3, 8, 8))
    network.eval()
    for layer in (*network.down, *network.up, *network.body):
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2).item() == pytest.approx(1, abs=1e-3)


def bce(logits, label):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


GAMES = {
    "vanilla": (lambda r, f: bce(r, 1.0) + bce(f, 0.0), lambda r, f: bce(f, 1.0)),
    "hinge": (lambda r, f: (1 - r).clamp(min=0).mean() + (1 + f).clamp(min=0).mean(), lambda r, f: -f.mean()),
    "relativistic": (
        lambda r, f: bce(r - f.mean(), 1.0) + bce(f - r.mean(), 0.0),
        lambda r, f: bce(r - f.mean(), 0.0) + bce(f - r.mean(), 1.0),
    ),
}


@pytest.fixture
def adversarial():
    torch.manual_seed(3)
    made = Adversarial(lambda p: torch.optim.SGD(p, 0.1), discriminator=UNetDiscriminator(4))
    return made.eval()  # no power iteration, so that two passes see the same weights


@pytest.mark.parametrize("game", GAMES)
def test_games_against_cross_entropy_and_who_gets_gradients(adversarial, game, pair):
    sr, gt = pair
    adversarial.game = game
    with torch.no_grad():
        adversarial.discriminator.last.weight *= 50  # logits on both sides of the hinge
        real, fake = adversarial.discriminator(gt), adversarial.discriminator(sr)
    assert real.min() < -1 and fake.max() > 1
    for_discriminator, for_network = GAMES[game]
    value = adversarial(sr, gt)
    torch.testing.assert_close(value, for_network(real, fake))
    value.backward()
    assert sr.grad.abs().sum() > 0
    assert all(p.grad is None for p in adversarial.parameters())

    sr.grad = None
    loss = adversarial.requires_grad_(True).discriminator_loss(sr, gt)
    torch.testing.assert_close(loss, for_discriminator(real, fake))
    loss.backward()
    assert sr.grad is None
    assert all(p.grad.abs().sum() > 0 for p in adversarial.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert adversarial(sr, gt).dtype == adversarial.discriminator_loss(sr, gt).dtype == torch.float32


def test_a_discriminator_without_features_is_refused():
    with pytest.raises(SRError, match="at least 1, not 0"):
        UNetDiscriminator(0)
