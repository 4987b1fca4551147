"""What other tools read: ONNX in onnxruntime, torch.export, .pth in spandrel; and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import spandrel
import torch
from PIL import Image

import sr
from sr.archs import IMDN, PAN, RLFN, SpandrelNetwork
from sr.export import export_onnx, export_program, export_pth
from sr.registry import list_models

SIZES = ((1, 1), (7, 200), (64, 64), (133, 97))
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def shaken(network):
    """Weights that are not those of an initialisation, which are often zero."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return network.eval()


def compact(scale=2):
    return shaken(SpandrelNetwork(scale=scale, arch="Compact", args={"num_feat": 8, "num_conv": 2}))


def span():
    args = {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 8}
    return shaken(SpandrelNetwork(scale=2, arch="SPAN", args=args))


def sparse():
    arguments = {"dim": 8, "groups": 1, "blocks": 1, "match_dim": 4, "value_dim": 4}
    return shaken(sr.archs.SparseSR(scale=2, window=8, **arguments))


NETWORKS = {
    "compact": compact,
    "imdn": lambda: shaken(IMDN(scale=3, dim=16, blocks=1)),
}
SLOW = {
    "span": span,
    "pan": lambda: shaken(PAN(scale=4, dim=8, blocks=1, up_dim=6)),
    "sparsesr": sparse,
    "assanet": lambda: shaken(sr.create_model("assanet_s", scale=2, groups=1, blocks=1)),
    "rlfn": lambda: shaken(RLFN(scale=3, dim=8, blocks=1)),
    "bsrn": lambda: shaken(sr.archs.BSRN(scale=2, dim=16, blocks=1)),
    "smfanet": lambda: shaken(sr.archs.SMFANet(scale=2, dim=8, blocks=1)),
}


def cases():
    quick = [pytest.param(make, id=name) for name, make in NETWORKS.items()]
    return quick + [pytest.param(make, id=name, marks=pytest.mark.slow) for name, make in SLOW.items()]


def session(path):
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])


def largest_difference(network, other, smallest=1):
    differences = []
    for batch, size in enumerate(SIZES, 1):
        lq = torch.rand(batch, 3, *(max(edge, smallest) for edge in size))
        with torch.no_grad():
            expected, result = network(lq), other(lq)
        assert result.shape == expected.shape
        differences.append(((result - expected).abs().max() / expected.abs().max().clamp(min=1)).item())
    return max(differences)


# --- ONNX ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", cases())
def test_onnx_is_the_network_at_any_size(make, tmp_path):
    pytest.importorskip("onnxscript")
    network, path = make(), tmp_path / "net.onnx"
    before = {key: value.clone() for key, value in network.state_dict().items()}
    assert export_onnx(network, path, metadata={"licence": "CC0-1.0"}) < 1e-4
    run = session(path)
    assert largest_difference(network, lambda lq: torch.from_numpy(run.run(["sr"], {"lq": lq.numpy()})[0])) < 1e-4
    ((entry,), (output,)) = run.get_inputs(), run.get_outputs()
    s = network.scale
    assert (entry.type, entry.shape) == ("tensor(float)", ["batch", 3, "height", "width"])
    assert output.shape[0] == "batch" and {output.shape[2], output.shape[3]} == {f"{s}*height", f"{s}*width"}
    said = run.get_modelmeta().custom_metadata_map
    assert (said["scale"], said["arch"], said["licence"]) == (str(s), network.arch, "CC0-1.0")
    assert json.loads(said["hparams"])["scale"] == s
    assert sr.load(path).scale == s
    own = {key: value for key, value in network.state_dict().items() if "eval_conv" not in key}  # SPAN computes it anew
    assert all(torch.equal(value, before[key]) for key, value in own.items())
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def test_half_precision_halves_the_file_and_stays_close(tmp_path):
    pytest.importorskip("onnxscript")
    network = shaken(SpandrelNetwork(scale=2, arch="Compact", args={"num_feat": 32, "num_conv": 3}))
    export_onnx(network, tmp_path / "full.onnx")
    export_onnx(network, tmp_path / "half.onnx", half=True)
    full, half = ((tmp_path / f"{name}.onnx").stat().st_size for name in ("full", "half"))
    assert half < 0.6 * full
    run = session(tmp_path / "half.onnx")
    assert run.get_inputs()[0].type == run.get_outputs()[0].type == "tensor(float)"
    difference = largest_difference(network, lambda lq: torch.from_numpy(run.run(None, {"lq": lq.numpy()})[0]))
    assert 1e-6 < difference < 1e-2
    assert all(parameter.dtype == torch.float32 for parameter in network.parameters())


def test_a_graph_that_differs_is_not_written(tmp_path, monkeypatch):
    """A network that is another one while it is recorded; what was there before stays."""
    pytest.importorskip("onnxscript")
    (tmp_path / "net.onnx").write_text("old")
    upscale = SpandrelNetwork.upscale

    def other(self, lq):
        return upscale(self, lq) + (0.01 if torch.compiler.is_compiling() else 0)

    monkeypatch.setattr(SpandrelNetwork, "upscale", other)
    with pytest.raises(
        sr.SRError, match=r"net\.onnx is not written: at 1x1 pixels it differs from the network by 0\.01"
    ):
        export_onnx(compact(), tmp_path / "net.onnx")
    with pytest.raises(sr.SRError, match=r"differs from the network"):
        export_program(compact(), tmp_path / "net.pt2")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("net.onnx", "old")]


def test_a_graph_that_half_precision_breaks_is_not_written(tmp_path, monkeypatch):
    """Off by 3/255 in float16 alone: more than rounding ever does."""
    pytest.importorskip("onnxscript")
    upscale = SpandrelNetwork.upscale
    off = {torch.float16: 3 / 255}
    monkeypatch.setattr(SpandrelNetwork, "upscale", lambda self, lq: upscale(self, lq) + off.get(lq.dtype, 0))
    with pytest.raises(sr.SRError, match=r"differs from the network by 0\.01.*; export without --fp16"):
        export_onnx(compact(), tmp_path / "net.onnx", half=True)
    assert not list(tmp_path.iterdir())
    export_onnx(compact(), tmp_path / "net.onnx")


def test_half_precision_of_the_quickstart_on_a_photograph(tmp_path):
    """Windows are chosen in float32: in float16 others would be, and values differ by up to 4/255."""
    pytest.importorskip("onnxscript")
    network = sr.load("sparsesr_t_x2.quickstart")
    assert export_onnx(network, tmp_path / "net.onnx", half=True) < 1 / 255
    run = session(tmp_path / "net.onnx")
    with Image.open(ROOT / "datasets" / "sample" / "val" / "friends.png") as image:
        lq = torch.from_numpy(np.array(image.convert("RGB").crop((0, 0, 160, 160)))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        difference = (torch.from_numpy(run.run(None, {"lq": lq.numpy()})[0]) - network(lq)).abs()
    assert difference.max() < 1 / 255 and difference.mean() < 3e-4


def test_what_float16_cannot_hold_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    network = compact()
    with torch.no_grad():
        network.network.body[0].weight.mul_(1e6)
    with pytest.raises(sr.SRError, match="export without --fp16"):
        export_onnx(network, tmp_path / "net.onnx", half=True)
    assert not list(tmp_path.iterdir())


def test_a_network_with_a_fixed_batch_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(SpandrelNetwork, "upscale", lambda self, lq: self.network(lq.reshape(2, 3, *lq.shape[2:])))
    with pytest.raises(sr.SRError, match="Compact cannot be exported to ONNX"):
        export_onnx(compact(), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


# --- torch.export ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", cases())
def test_an_exported_program_is_the_network_at_any_size(make, tmp_path):
    network = make()
    assert export_program(network, tmp_path / "net.pt2") < 1e-5
    smallest = 1 if network.multiple_of == 1 else network.multiple_of + 1  # a window has to have a neighbour
    assert largest_difference(network, torch.export.load(tmp_path / "net.pt2").module(), smallest) < 1e-5


# --- .pth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.endswith(("_b", "_l")) else n for n in list_models()]
)
def test_every_model_comes_back_from_a_pth(name, scale, tmp_path):
    network = shaken(sr.create_model(name, scale=scale))
    export_pth(network, tmp_path / "net.pth")
    again = sr.load(tmp_path / "net.pth")
    assert type(again) is type(network) and again.hparams == network.hparams
    assert again.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("make", [compact, span])
def test_spandrel_reads_its_networks_under_its_own_names(make, tmp_path):
    network = make()
    export_pth(network, tmp_path / "net.pth")
    theirs = spandrel.ModelLoader().load_from_file(tmp_path / "net.pth")
    assert (theirs.architecture.id, theirs.scale) == (network.hparams["arch"], 2)
    with torch.no_grad():
        lq = torch.rand(1, 3, 9, 14)
        assert (theirs(lq) - network(lq).clamp(0, 1)).abs().max() < 1e-5


def test_averaged_and_trained_weights_stand_side_by_side(tmp_path):
    averaged, trained = sparse(), sparse()
    export_pth(averaged, tmp_path / "net.pth", raw=trained)
    content = torch.load(tmp_path / "net.pth", weights_only=True)
    for key, network in (("params_ema", averaged), ("params", trained)):
        assert all(torch.equal(content[key][name], value) for name, value in network.state_dict().items())
    found = sr.load(tmp_path / "net.pth").state_dict()
    assert all(torch.equal(found[name], value) for name, value in averaged.state_dict().items())


def test_published_names_are_the_published_ones(tmp_path):
    path = DATA / "weights" / "rlfn_s_x2.pth"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    export_pth(sr.load(path), tmp_path / "net.pth")
    theirs, ours = (torch.load(p, map_location="cpu", weights_only=True) for p in (path, tmp_path / "net.pth"))
    theirs = theirs.get("params", theirs)
    assert ours["params"].keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours["params"].items())


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [export_onnx, export_program, export_pth])
def test_places_that_cannot_be_written(write, tmp_path):
    suffix = {export_onnx: ".onnx", export_program: ".pt2", export_pth: ".pth"}[write]
    with pytest.raises(sr.SRError, match=f"ends with \\{suffix}"):
        write(compact(), tmp_path / "net.txt")
    with pytest.raises(sr.SRError, match=r"the folder .*nowhere does not exist"):
        write(compact(), tmp_path / "nowhere" / f"net{suffix}")
    (tmp_path / f"net{suffix}").mkdir()
    with pytest.raises(sr.SRError, match="a folder has this name"):
        write(compact(), tmp_path / f"net{suffix}")
