"""Files of community architectures: loaded as spandrel loads them, on the project's contract, or refused."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import spandrel
import torch

import sr
from sr.archs import SpandrelNetwork

ROOT = Path(__file__).resolve().parents[2]
CRAFT = ROOT.parent / "shared" / "data" / "weights" / "craft_x4_ntire2024_team34.pth"

SWIN = {"embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "img_size": 16}
# Architecture (and class, where its name differs) -> arguments of a small network, the scale that it has.
NETWORKS = {
    "Compact": ({"num_feat": 8, "num_conv": 2, "upscale": 3}, 3),
    "SPAN": ({"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 8, "upscale": 2}, 2),
    "SAFMN": ({"dim": 8, "n_blocks": 2, "upscaling_factor": 2}, 2),
    "PLKSR": ({"dim": 16, "n_blocks": 2, "upscaling_factor": 2, "kernel_size": 5}, 2),
    "MoSR": ({"n_block": 2, "dim": 16, "upscale": 2}, 2),
    "RCAN": ({"n_resgroups": 2, "n_resblocks": 2, "n_feats": 16, "scale": 2}, 2),
    "OmniSR": ({"num_feat": 16, "block_num": 1, "res_num": 2, "up_scale": 2, "pe": True}, 2),
    "SwinIR": ({**SWIN, "upscale": 3, "upsampler": "pixelshuffledirect", "mlp_ratio": 2}, 3),
    "HAT": ({**SWIN, "upscale": 2, "upsampler": "pixelshuffle", "mlp_ratio": 2, "squeeze_factor": 6}, 2),
    "DITN": ({"dim": 12, "upscale": 2}, 2),
    # Looks at a picture of half the size in four channels for each colour: enlarges by 4, the picture by 2.
    "ESRGAN": ({"in_nc": 12, "num_filters": 8, "num_blocks": 2, "scale": 4, "shuffle_factor": 2}, 2),
    "RealCUGAN.UpCunet2x_fast": ({}, 2),
    "RealCUGAN.UpCunet3x": ({}, 3),
}
SIZES = ((1, 1), (7, 20), (40, 37))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(name, args):
    module, _, cls = name.partition(".")
    return getattr(importlib.import_module(f"spandrel.architectures.{module}"), cls or module)(**args).eval()


def published(tmp_path, name, args, prefix=""):
    path = tmp_path / "net.pth"
    torch.save({"params": {prefix + k: v for k, v in build(name, args).state_dict().items()}}, path)
    return path


def difference(network, reference, size):
    """Relative to spandrel's output, which is clamped."""
    x = torch.rand(1, 3, *size)
    with torch.no_grad():
        ours, kept = network(x.clone()).clamp(0, 1), x.clone()
        network(x)
        assert torch.equal(x, kept)
        theirs = reference(x.clone())
    assert ours.shape == theirs.shape == (1, 3, size[0] * network.scale, size[1] * network.scale)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_published_file_gives_what_spandrel_gives(name, tmp_path):
    args, scale = NETWORKS[name]
    path = published(tmp_path, name, args)
    network = sr.load(path)
    reference = spandrel.ModelLoader().load_from_state_dict(torch.load(path, weights_only=True))
    assert (network.scale, network.hparams["arch"]) == (scale, name)
    sr.save(network, tmp_path / "net.safetensors")
    again = sr.load(tmp_path / "net.safetensors")
    assert again.hparams == network.hparams
    for size in SIZES:
        assert difference(network, reference, size) < 1e-6
        assert difference(again, reference, size) < 1e-6


def test_craft_of_a_challenge(tmp_path):
    if not CRAFT.exists():
        pytest.skip(f"{CRAFT} is not here")
    network = sr.load(CRAFT)
    reference = spandrel.ModelLoader().load_from_state_dict(torch.load(CRAFT, weights_only=True))
    assert (network.scale, network.min_size, network.multiple_of) == (4, 16, 16)
    sr.save(network, tmp_path / "net.safetensors")
    for loaded in (network, sr.load(tmp_path / "net.safetensors")):
        assert all(difference(loaded, reference, size) < 1e-6 for size in ((1, 1), (16, 19)))


@pytest.mark.parametrize("prefix", ["module.", "model.", "net_g.module."])
def test_prefixes_of_training_tools(tmp_path, prefix):
    assert sr.load(published(tmp_path, "SPAN", NETWORKS["SPAN"][0], prefix)).hparams["arch"] == "SPAN"


def test_names_that_begin_like_a_prefix(tmp_path):
    """All of the old ESRGAN's names begin with ``model.``."""
    path = published(tmp_path, "ESRGAN", NETWORKS["ESRGAN"][0])
    assert all(key.startswith("model.") for key in torch.load(path, weights_only=True)["params"])
    assert sr.load(path).hparams["arch"] == "ESRGAN"


def test_own_architectures_come_first(tmp_path):
    for model in ("smfanet", "rlfn_s", "imdn", "pan", "bsrn"):
        torch.save(sr.create_model(model, scale=3).state_dict(), tmp_path / "net.pth")
        assert not isinstance(sr.load(tmp_path / "net.pth"), SpandrelNetwork)


def test_loaded_networks_train(tmp_path):
    network = sr.load(published(tmp_path, "HAT", NETWORKS["HAT"][0])).train().requires_grad_(True)
    network(torch.rand(1, 3, 9, 21)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Compact", {"num_in_ch": 1, "num_out_ch": 1, "num_feat": 8, "num_conv": 2, "upscale": 2}, "1 and 1 channels"),
        ("Compact", {"num_in_ch": 4, "num_out_ch": 4, "num_feat": 8, "num_conv": 2, "upscale": 2}, "4 and 4 channels"),
        ("Compact", {"num_feat": 8, "num_conv": 2, "upscale": 1}, "Compact at scale 1 is no network that enlarges"),
        ("NAFNet", {"width": 8, "middle_blk_num": 1, "enc_blk_nums": [1], "dec_blk_nums": [1]}, "NAFNet at scale 1"),
    ],
)
def test_networks_for_other_ends_are_refused_in_one_line(tmp_path, name, args, message):
    with pytest.raises(sr.SRError, match=rf"net\.pth: .*{message}") as caught:
        sr.load(published(tmp_path, name, args))
    assert "\n" not in str(caught.value)


def test_incomplete_and_foreign_weights_are_refused_in_one_line(tmp_path):
    state = build("SPAN", NETWORKS["SPAN"][0]).state_dict()
    last = list(state)[-1]
    for change, message in (
        ({k: v for k, v in state.items() if k != last}, f"architecture SPAN, but cannot load it .*{last}"),
        (state | {"more": torch.zeros(2)}, "architecture SPAN, but cannot load it .*more"),
        (state | {last: torch.zeros(2)}, f"architecture SPAN, but cannot load it .*{last}"),
        (
            {"body.0.weight": torch.zeros(8), "body.1.weight": torch.zeros(8)},
            "architecture Compact, but cannot load it",
        ),
    ):
        torch.save(change, tmp_path / "net.pth")
        with pytest.raises(sr.SRError, match=rf"net\.pth: .*{message}") as caught:
            sr.load(tmp_path / "net.pth")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body.999999999.weight": torch.zeros(1)}, "no architecture of this project or of spandrel"),
        ({"body.50000.weight": torch.zeros(1)}, "no architecture of this project or of spandrel"),
        ({"body.0.weight": torch.zeros(1).expand(10**6, 3, 3, 3)}, "claim more than the file holds"),
        ({"body.0.weight": torch.zeros(0, 10**9)}, "claim more than the file holds"),
    ],
    ids=["too many parts", "many parts", "no storage", "no elements"],
)
def test_what_asks_for_more_than_it_holds_is_not_built(tmp_path, change, message):
    state = build("Compact", NETWORKS["Compact"][0]).state_dict()
    torch.save(state | change, tmp_path / "net.pth")
    with pytest.raises(sr.SRError, match=message):
        sr.load(tmp_path / "net.pth")


@pytest.mark.parametrize("arch", ["NoSuch", "SwinIR.math", "SwinIR.SwinIRArch", "os", "..os"])
def test_only_networks_are_built_by_name(arch):
    with pytest.raises(sr.SRError, match="spandrel has no architecture"):
        SpandrelNetwork(arch=arch)


def test_arguments_that_do_not_fit():
    with pytest.raises(sr.SRError, match="it cannot be told the scale"):
        SpandrelNetwork(arch="NAFNet", scale=2)
    with pytest.raises(sr.SRError, match="it cannot be told the scale"):
        SpandrelNetwork(arch="RealCUGAN.UpCunet3x", scale=2)
    with pytest.raises(sr.SRError, match=r"SAFMN: .*'width'.*it takes dim"):
        SpandrelNetwork(arch="SAFMN", args={"width": 3})


def test_spandrel_is_imported_when_it_is_needed():
    code = "import sys, sr; sr.load('sparsesr_t_x2'); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(out.stdout.split())
    assert "sr.archs.external" in loaded
    assert not {"spandrel", "torchvision", "sr.fetch"} & loaded


def test_span_fuses_into_what_it_is_deployed_as():
    network = SpandrelNetwork(
        scale=4, arch="SPAN", args={"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 48}
    ).eval()
    x = torch.rand(1, 3, 12, 9)
    with torch.no_grad():
        before = network(x)
        assert network.fuse() is network
        torch.testing.assert_close(network(x), before, atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in network.parameters()) == 426_288  # as its authors count
