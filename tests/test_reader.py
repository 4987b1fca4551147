"""Weights of any origin: every wrapper and prefix in any nesting, which of several sets, ONNX, and the report."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sr
from sr.checkpoint import inspect
from sr.efficiency import cards
from sr.losses import DistillationLoss

WRAPPERS = (
    *("params_ema", "params-ema", "params", "state_dict", "model_state_dict", "model"),
    *("net", "net_g", "generator_ema", "generator", "ema"),
)
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "net_g.", "netG.", "generator.", "ema_model.")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return sr.archs.RLFN(scale=2, dim=4, blocks=1).eval()


@pytest.fixture
def weights(network):
    return dict(network.state_dict())


def wrapped(weights, wrappers=(), prefixes=()):
    content = {"".join(prefixes) + key: value for key, value in weights.items()}
    for wrapper in reversed(wrappers):
        content = {wrapper: content, "epoch": 3}
    return content


def loads(tmp_path, content, network, **kwargs):
    torch.save(content, tmp_path / "net.pth")
    loaded = sr.load(tmp_path / "net.pth", **kwargs)
    assert loaded.hparams == network.hparams
    return all(torch.equal(loaded.state_dict()[key], value) for key, value in network.state_dict().items())


def raised(weights):
    return {key: value + 1 for key, value in weights.items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_alone_twice_and_within_others(wrapper, tmp_path, network, weights):
    for wrappers in ((wrapper,), (wrapper, wrapper), ("state_dict", wrapper), (wrapper, "params")):
        assert loads(tmp_path, wrapped(weights, wrappers), network)
    assert loads(tmp_path, wrapped(weights, (wrapper,), ("module.", "net_g.")), network)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_alone_twice_and_among_others(prefix, tmp_path, network, weights):
    for prefixes in (
        (prefix,),
        (prefix, prefix),
        ("module.", prefix),
        (prefix, "_orig_mod."),
        ("model.", prefix, "net."),
    ):
        assert loads(tmp_path, wrapped(weights, (), prefixes), network)
    assert loads(tmp_path, wrapped(weights, ("generator", "params"), (prefix, "module.", prefix)), network)


def test_a_part_that_was_compiled(tmp_path, network, weights):
    assert loads(tmp_path, {key.replace(".", "._orig_mod.", 1): value for key, value in weights.items()}, network)


@pytest.mark.parametrize(
    "content",
    [
        lambda w, r: {"params": r, "params_ema": w},
        lambda w, r: {"state_dict": {"net_g": r, "ema": w}},
        lambda w, r: {"generator": {"params": r}, "generator_ema": {"params": w}},
        lambda w, r: wrapped(r, (), ("net_g.",)) | wrapped(w, (), ("net_g_ema.",)) | {"net_d.x": torch.zeros(2)},
        lambda w, r: wrapped(r, (), ("online_model.",)) | wrapped(w, (), ("ema_model.",)) | {"step": torch.zeros(1)},
        # Lightning's WeightAveraging
        lambda w, r: {"state_dict": wrapped(w, (), ("model.",)), "current_model_state": wrapped(r, (), ("model.",))},
    ],
    ids=["BasicSR", "nested", "two wrappers", "by prefix", "ema_pytorch", "Lightning"],
)
def test_averaged_weights_are_preferred_and_the_others_reached(content, tmp_path, network, weights):
    content = content(weights, raised(weights))
    assert loads(tmp_path, content, network)
    assert loads(tmp_path, content, network, which="ema")
    assert inspect(tmp_path / "net.pth").averaged
    if not any(key.startswith("online_model.") for key in content):
        assert not loads(tmp_path, content, network, which="raw")
        assert not inspect(tmp_path / "net.pth", which="raw").averaged


def test_torch_averages_count_themselves(tmp_path, network, weights):
    average = torch.optim.swa_utils.AveragedModel(network)
    assert loads(tmp_path, average.state_dict(), network, which="ema")


def test_sets_by_their_name(tmp_path, network, weights):
    content = {"net_g": raised(weights), "params": weights}
    assert loads(tmp_path, content, network, which="params")
    assert not loads(tmp_path, content, network, which="net_g")
    with pytest.raises(sr.SRError, match=r"has no weights 'net_x'; it has net_g \(raw\), params \(raw\)"):
        sr.load(tmp_path / "net.pth", which="net_x")


def test_a_checkpoint_of_another_lightning_module(tmp_path, network, weights):
    state = wrapped(weights, (), ("net_g.module.",)) | {"net_d.x": torch.zeros(2), "loss.vgg.0.weight": torch.zeros(2)}
    assert loads(tmp_path, {"state_dict": state, "epoch": 1, "optimizer_states": []}, network)


def test_other_peoples_safetensors(tmp_path, network, weights):
    save_file(wrapped(weights, (), ("model.",)), tmp_path / "x.safetensors")
    assert torch.equal(sr.load(tmp_path / "x.safetensors").conv_1.weight, network.conv_1.weight)
    (tmp_path / "x.safetensors").rename(tmp_path / "x.pth")  # the content counts, not the name
    assert torch.equal(sr.load(tmp_path / "x.pth").conv_1.weight, network.conv_1.weight)


def test_the_report_of_a_file_that_loads(tmp_path, network, weights):
    torch.save(wrapped(weights, ("params_ema",), ("module.",)) | {"params": weights}, tmp_path / "net.pth")
    report = inspect(tmp_path / "net.pth")
    assert (report.problem, report.arch, report.hparams) == ("", "RLFN", network.hparams)
    assert (report.scale, report.channels, report.range) == (2, 3, "[0, 1]")
    assert report.parameters == sum(p.numel() for p in network.parameters())
    assert report.unwrapped == ["params_ema", "module."]
    assert (report.averaged, report.inferred, report.others, report.ignored) == (True, True, ["params"], ["epoch"])
    assert report.fitting == len(weights)
    assert report.missing == report.misshapen == report.unexpected == []
    assert json.loads(json.dumps(report.as_dict()))["size"] == (tmp_path / "net.pth").stat().st_size
    assert "RLFN(scale=2, dim=4, blocks=1)" in str(report)


def test_the_report_of_a_self_describing_file(tmp_path, network):
    sr.save(network, tmp_path / "x.safetensors", info={"recipe": "seed: 1\n", "licence": "MIT", "averaged": True})
    report = inspect(tmp_path / "x.safetensors")
    assert (report.averaged, report.inferred) == (True, False)
    assert report.metadata == {"version": sr.__version__, "recipe": "seed: 1\n", "licence": "MIT", "averaged": True}
    assert "licence      MIT" in str(report)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (lambda w: w.pop("conv_1.weight"), "missing", r"RLFN needs 'conv_1.weight', .* \(\d+ of \d+ tensors fit\)"),
        (
            lambda w: w.update({"conv_1.bias": torch.zeros(9)}),
            "misshapen",
            r"'conv_1.bias' has shape \(9,\), needed",
        ),
        (lambda w: w.update({"conv_1.bias": torch.zeros(4).int()}), "misshapen", "is torch.int32, needed is torch.fl"),
        (lambda w: w.update(more=torch.zeros(2)), "unexpected", "has no place for 1 tensors, first 'more'"),
    ],
)
def test_a_file_that_does_not_fit_says_what_and_why(change, field, message, tmp_path, network, weights):
    change(weights)
    torch.save(weights, tmp_path / "net.pth")
    report = inspect(tmp_path / "net.pth")
    assert len(getattr(report, field)) == 1
    with pytest.raises(sr.SRError, match=message) as caught:
        sr.load(tmp_path / "net.pth")
    assert "\n" not in str(caught.value)
    assert report.problem in str(caught.value)


def test_the_nearest_architecture_is_named(tmp_path):
    weights = {"net_g." + k: v for k, v in sr.create_model("sparsesr_t", scale=3).state_dict().items()}
    del weights["net_g.embed.weight"]
    torch.save(weights, tmp_path / "net.pth")
    with pytest.raises(sr.SRError, match=r"no architecture .*; closest: sparsesr_t x3 needs 'embed.weight'"):
        sr.load(tmp_path / "net.pth")
    assert inspect(tmp_path / "net.pth").missing == ["embed.weight"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path, weights):
    weights["conv_1.weight"] = weights["conv_1.weight"].clone()
    weights["conv_1.weight"][0, 0, 0, 0] = value
    torch.save(weights, tmp_path / "net.pth")
    with pytest.raises(sr.SRError, match=r"'conv_1.weight' holds values that are not finite"):
        sr.load(tmp_path / "net.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype, tmp_path, weights):
    torch.save({key: value.to(dtype) for key, value in weights.items()}, tmp_path / "net.pth")
    loaded = sr.load(tmp_path / "net.pth")
    assert all(torch.equal(v, weights[k].to(dtype).float()) for k, v in loaded.state_dict().items())


def test_loading_draws_no_random_numbers(tmp_path, weights):
    torch.save(weights, tmp_path / "net.pth")
    before = torch.get_rng_state()
    sr.load(tmp_path / "net.pth")
    assert torch.equal(torch.get_rng_state(), before)


SHELF = Path(__file__).resolve().parents[2] / "shared" / "data"
PUBLISHED = {
    "weights/IMDN_x4.pth": ("IMDN", 4),
    "weights/rlfn_x4.pth": ("RLFN", 4),
    "weights/rlfn_s_x2.pth": ("RLFN", 2),
    "weights/net_g_BSRN_x2.pth": ("BSRN", 2),
    "weights/SMFANet_DF2K_100w_x4SR.pth": ("SMFANet", 4),
    "weights/SMFANet_plus_DF2K_100w_x3SR.pth": ("SMFANet", 3),
    "weights/PANx4_DF2K.pth": ("PAN", 4),
    "weights/craft_x4_ntire2024_team34.pth": ("CRAFT", 4),
    "vectors/assanet_s_x4_random.pth": ("ASSANet", 4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(name):
    path = SHELF / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    report = inspect(path)
    assert (report.problem, report.arch, report.scale) == ("", *PUBLISHED[name])
    assert report.fitting == len(sr.load(path).state_dict())


@pytest.mark.parametrize("scale", [2, 4])
def test_outputs_stored_beside_published_weights(scale):
    path = SHELF / "vectors" / f"assanet_s_x{scale}_random.pth"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    pair = load_file(path.with_name(f"{path.stem}_io.safetensors"))
    with torch.no_grad():
        out = sr.load(path)(pair["input"])
    assert (out - pair["output_tlc"]).abs().max() < 1e-5 * pair["output_tlc"].abs().max()
    with pytest.raises(sr.SRError, match="no architecture"):  # pictures are no weights
        sr.load(path.with_name(f"{path.stem}_io.safetensors"))


def onnx_file(path, edges=("h", "w"), location=None):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    node = helper.make_node("Resize", ["lq", "", "scales"], ["sr"], mode="nearest", nearest_mode="floor",
                            coordinate_transformation_mode="asymmetric")  # fmt: skip
    scales = helper.make_tensor("scales", kind, [4], [1.0, 1.0, 2.0, 2.0])
    if location:
        scales.ClearField("float_data")
        scales.data_location = onnx.TensorProto.EXTERNAL
        entry = scales.external_data.add()
        entry.key, entry.value = "location", location
    graph = helper.make_graph(
        [node], "nearest", [helper.make_tensor_value_info("lq", kind, ["n", 3, *edges])],
        [helper.make_tensor_value_info("sr", kind, None)], [scales],
    )  # fmt: skip
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    return path


def test_onnx_files_are_networks(tmp_path):
    network = sr.load(onnx_file(tmp_path / "x.onnx"))
    x = torch.rand(2, 3, 5, 7)
    assert network.scale == 2
    assert torch.equal(network(x), x.repeat_interleave(2, -1).repeat_interleave(2, -2))
    assert sr.Upscaler(network, device="cpu")(torch.rand(3, 9, 4)).shape == (3, 18, 8)
    report = inspect(tmp_path / "x.onnx")
    assert (report.problem, report.format, report.scale) == ("", "ONNX", 2)
    with pytest.raises(sr.SRError, match="has no weights that could be saved"):
        sr.save(network, tmp_path / "x.safetensors")


def test_onnx_files_that_are_refused(tmp_path, monkeypatch):
    with pytest.raises(sr.SRError, match=r"takes 48x32 pixels only"):
        sr.load(onnx_file(tmp_path / "fixed.onnx", edges=(32, 48)))
    for location in ("../secret", "/etc/passwd", "a/../../b" + "x" * 200):
        with pytest.raises(sr.SRError, match=r"refused, since it reads '.*', which is not in its folder"):
            sr.load(onnx_file(tmp_path / "x.onnx", location=location))
    assert "damaged" in inspect(onnx_file(tmp_path / "x.onnx", location="missing.bin")).problem
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(sr.SRError, match="damaged, or not an ONNX file"):
        sr.load(tmp_path / "empty.onnx")
    onnx_file(tmp_path / "x.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(sr.SRError, match=r"needs onnxruntime: pip install onnxruntime$"):
        sr.load(tmp_path / "x.onnx")


def test_our_files_hold_the_tensors_that_torch_sees(tmp_path, network):
    sr.save(network, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == network.state_dict().keys()


def test_an_onnx_file_teaches_and_cannot_be_counted(tmp_path):
    teacher = DistillationLoss(str(onnx_file(tmp_path / "x.onnx")))
    lq = torch.rand(1, 3, 5, 6)
    sr_ = torch.nn.functional.interpolate(lq, scale_factor=2, mode="nearest")
    assert teacher.to("cpu")(sr_, sr_, lq).item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(sr.SRError, match="x is an ONNX file, in which nothing can be counted"):
        cards({"x": sr.load(tmp_path / "x.onnx")})
