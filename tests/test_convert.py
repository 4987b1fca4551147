"""scripts/convert.py as a user runs it, and the model card."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml

import sr
from sr.archs import SpandrelNetwork
from sr.card import model_card
from sr.efficiency import card
from sr.weights import find_weights

ROOT = Path(__file__).parents[1]


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Run the script in this process and in a fresh folder; gives its status, what it printed, and its complaints."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "convert.py"), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    network = SpandrelNetwork(scale=2, arch="Compact", args={"num_feat": 8, "num_conv": 2})
    sr.save(network, tmp_path / "net.safetensors", info={"licence": "CC0-1.0", "step": 7})
    return tmp_path / "net.safetensors"


def test_inspect_says_what_a_file_is(convert, weights):
    status, out, _ = convert("inspect", "net.safetensors")
    assert status == 0 and "Compact" in out and "x2" in out
    status, out, _ = convert("inspect", "net.safetensors", "--json")
    report = json.loads(out)
    assert (report["arch"], report["scale"], report["problem"]) == ("Compact", 2, "")
    torch.save({"params": {"a.weight": torch.zeros(3)}}, weights.with_name("foreign.pth"))
    status, out, _ = convert("inspect", "foreign.pth")
    assert status == 1 and "no" in out


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_weights_make_the_round_trip(convert, weights, kind):
    status, out, _ = convert("export", "net.safetensors", "--to", kind, "-o", f"out.{kind}")
    assert (status, out) == (0, f"net.safetensors -> out.{kind}\n")
    before, after = sr.load("net.safetensors"), sr.load(f"out.{kind}")
    assert all(torch.equal(value, after.state_dict()[key]) for key, value in before.state_dict().items())
    if kind == "safetensors":
        assert sr.checkpoint.read_info("out.safetensors")["info"]["licence"] == "CC0-1.0"


def test_onnx_beside_the_file(convert, weights):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    status, out, _ = convert("export", "net.safetensors", "--to", "onnx", "--fp16")
    assert status == 0 and out.startswith("net.safetensors -> net_fp16.onnx (differs by at most ")
    assert sr.load("net_fp16.onnx").scale == 2
    status, _, err = convert("export", "net_fp16.onnx", "--to", "pth")
    assert status == 2 and "is an ONNX file" in err


def test_a_training_checkpoint_gives_both_sets(convert, config, start):
    cli = start(config)
    status, _, err = convert("export", cli.run_dir / "checkpoints" / "last.ckpt", "--to", "pth", "-o", "both.pth")
    assert status == 0, err
    content = torch.load("both.pth", weights_only=True)
    for key, network in (("params_ema", cli.model.ema), ("params", cli.model.network)):
        assert all(torch.equal(content[key][name], value) for name, value in network.state_dict().items())
    name = next(iter(content["params"]))
    assert not torch.equal(content["params"][name], content["params_ema"][name])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["export", "net.safetensors", "--to", "pth", "-o", "out.bin"], "ends with .pth"),
        (["export", "net.safetensors", "--to", "pth", "-o", "no/out.pth"], "the folder no does not exist"),
        (["export", "net.safetensors", "--to", "safetensors"], "is the input as well"),
        (["export", "net.safetensors", "--to", "pth", "--fp16"], "--fp16 and --opset are for --to onnx"),
        (["export", "net.safetensors", "--to", "onnx", "--opset", "3"], "opset|cannot be exported"),
        (["export", "none.safetensors", "--to", "pth"], "no weights file at none.safetensors"),
        (["inspect", "none.pth"], "no weights file at none.pth"),
        (["config", "none.yml"], "none.yml cannot be read"),
    ],
)
def test_mistakes_take_one_line_and_leave_nothing(convert, weights, args, message):
    before = sorted(weights.parent.iterdir())
    status, out, err = convert(*args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert any(part in err for part in message.split("|"))
    assert sorted(weights.parent.iterdir()) == before


def test_a_config_goes_to_standard_output_and_the_rest_to_standard_error(convert, tmp_path):
    text = "scale: 2\nnetwork_g: {type: span}\ntrain: {total_iter: 9, wild: 1}\n"
    (tmp_path / "theirs.yml").write_text(text + "datasets: {train: {dataroot_gt: hr, gt_size: 32}}\n")
    status, out, err = convert("config", "theirs.yml")
    assert status == 0
    own = yaml.safe_load(out)
    assert own["model"]["network"]["init_args"]["arch"] == "SPAN" and own["trainer"]["max_steps"] == 9
    assert err == "no counterpart: train.wild: 1 (nothing is like it)\n"


# --- the model card --------------------------------------------------------------------------------------------------


def test_a_card_from_the_command_line(convert, weights, monkeypatch):
    monkeypatch.setattr("sr.efficiency.HD", (64, 48))
    monkeypatch.setattr("sr.efficiency.card", lambda network, **_: card(network, size=(64, 48), measure_time=False))
    status, out, _ = convert("export", "net.safetensors", "--to", "card")
    assert (status, out) == (0, "net.safetensors -> net.md\n")
    text = Path("net.md").read_text()
    assert "CC0-1.0" in text and "| steps | 7 |" in text and 'sr.load("net.safetensors")' in text


def test_a_card_holds_what_the_file_says():
    network = sr.create_model("sparsesr_t", scale=2)
    cost = card(network, size=(64, 48), measure_time=False)
    info = {
        "recipe": {"config": "a|b.yaml"},
        "metrics": {"sisr-y": {"Set5": {"psnr_y": 37.123, "ssim_y": 0.95678}}, "rgb": {"Set5": {"psnr": 35.5}}},
        "bicubic": {"Set5": {"psnr_y": 33.66, "ssim_y": 0.9299}},
        "licence": "MIT",
    }
    text = model_card("a.safetensors", network, cost, {"info": info, "version": "0.1.0"})
    assert "| Set5 | 37.12 dB / 0.9568 | 33.66 dB / 0.9299 |" in text
    assert "By protocol `rgb`:" in text and "| Set5 | 35.50 dB |" in text
    assert "| licence of the weights | MIT |" in text and "a\\|b.yaml" in text
    assert f"{sum(p.numel() for p in network.parameters()) / 1000:.1f} K" in text
    assert "| data | not stated |" in text


def test_a_card_shows_a_config_as_it_is():
    network = SpandrelNetwork(scale=2, arch="Compact", args={"num_feat": 8, "num_conv": 2})
    recipe = "trainer:\n  max_steps: 9\n"
    cost = card(network, size=(64, 48), measure_time=False)
    text = model_card("a.safetensors", network, cost, {"info": {"recipe": recipe}})
    assert f"```yaml\n{recipe}```" in text and "| recipe | see below |" in text


def test_a_card_of_weights_that_say_nothing():
    network = SpandrelNetwork(scale=2, arch="Compact", args={"num_feat": 8, "num_conv": 2})
    text = model_card("net.pth", network, card(network, size=(64, 48), measure_time=False))
    for line in ("licence of the weights", "recipe", "steps", "data", "written by version"):
        assert f"| {line} | not stated |" in text
    assert "Compact (through spandrel)" in text and "Scores: not stated" in text


def test_a_record_fills_in_what_the_file_does_not_say():
    record = find_weights("imdn_x4")
    network = sr.create_model("imdn", scale=4)
    text = model_card("imdn_x4", network, card(network, size=(64, 48), measure_time=False), None, record)
    psnr, ssim = record.metrics["Set5"]
    assert record.licence in text and record.recipe in text and f"| Set5 | {psnr:.2f} dB / {ssim:.4f}" in text
