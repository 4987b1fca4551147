"""Weights files: whole, self-describing, never partly loaded, never executed."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sr
from sr.checkpoint import describe, read_info
from sr.weights import PRETRAINED, default_weights

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def network():
    torch.manual_seed(0)
    net = sr.create_model("sparsesr_t", scale=2)
    torch.nn.init.normal_(net.head.weight, std=0.1)
    return net.eval()


@pytest.fixture
def path(network, tmp_path):
    sr.save(network, tmp_path / "x.safetensors", info={"step": 7})
    return tmp_path / "x.safetensors"


def test_a_file_describes_itself(path, network):
    info = read_info(path)
    assert info["arch"] == "SparseSR"
    assert info["hparams"] == network.hparams
    assert info["scale"] == "2"
    assert info["version"] == sr.__version__
    assert info["info"] == {"step": 7}


def test_loaded_networks_are_ready_for_inference(path):
    net = sr.load(path)
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())


def edited(path, tmp_path, change):
    tensors = load_file(path)
    metadata = {k: v if isinstance(v, str) else json.dumps(v) for k, v in read_info(path).items() if k != "digest"}
    change(tensors, metadata)
    save_file(tensors, tmp_path / "edited.safetensors", metadata=metadata)
    return tmp_path / "edited.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("head.weight"), "needs 'head.weight', which the file lacks"),
        (lambda t, m: t.update({"head.weight": torch.zeros(3)}), r"'head.weight' has shape \(3,\), needed is"),
        (lambda t, m: t.update({"more": torch.zeros(3)}), "has no place for 1 tensors, first 'more'"),
        (lambda t, m: m.update(arch="SparsSR"), "did you mean 'SparseSR'"),
        (lambda t, m: m.update(hparams='{"depth": 3}'), "hyper-parameters do not fit SparseSR"),
        (lambda t, m: m.update(hparams="{"), "hyper-parameters do not fit SparseSR"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(path, tmp_path, change, message):
    with pytest.raises(sr.SRError, match=message):
        sr.load(edited(path, tmp_path, change))


def test_files_that_cannot_be_read(path, tmp_path):
    torch.save({"a": torch.zeros(99)}, tmp_path / "whole.pth")
    cases = {
        "missing.safetensors": (None, "no weights file at"),
        "cut.safetensors": (path.read_bytes()[:1000], "damaged, or not a safetensors file"),
        "cut.pth": ((tmp_path / "whole.pth").read_bytes()[:500], r"damaged, or not a PyTorch file \(cut short, or"),
        "empty.pth": (b"", "damaged, or not a PyTorch file"),
        "text.pth": (b"hello\n", "damaged, or not|refused"),
        "notes.txt": (b"hello\n", "not a weights file"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(sr.SRError, match=message):
            sr.load(tmp_path / name)
    with pytest.raises(sr.SRError, match="is a folder"):
        sr.load(tmp_path)
    with pytest.raises(sr.SRError, match="did you mean"):
        sr.load(next(iter(PRETRAINED)) + "x")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('code from a weights file was run')",)


def test_a_pickle_that_wants_code_is_refused(tmp_path):
    torch.save({"params": {"a": torch.zeros(1)}, "x": Bomb()}, tmp_path / "bomb.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pth", "raw.pth"):
        with pytest.raises(sr.SRError, match=r"refused, .* run code from the file: it asks for \w+\.exec$"):
            sr.load(tmp_path / name)


def test_a_training_checkpoint_gives_the_averaged_weights(network, tmp_path):
    raw = {f"network.{k}": v + 1 for k, v in network.state_dict().items()}
    averaged = {f"ema.{k}": v for k, v in network.state_dict().items()}
    torch.save({"sr_network": describe(network), "state_dict": raw | averaged}, tmp_path / "last.ckpt")
    torch.save({"sr_network": describe(network), "state_dict": raw}, tmp_path / "no_ema.ckpt")
    assert torch.equal(sr.load(tmp_path / "last.ckpt").head.weight, network.head.weight)
    assert torch.equal(sr.load(tmp_path / "no_ema.ckpt").head.weight, network.head.weight + 1)
    assert torch.equal(sr.load(tmp_path / "last.ckpt", which="raw").head.weight, network.head.weight + 1)
    with pytest.raises(sr.SRError, match=r"has no weights 'ema'; it has state_dict/network \(raw\)"):
        sr.load(tmp_path / "no_ema.ckpt", which="ema")


def test_a_published_file_of_an_unknown_network_is_refused(tmp_path):
    torch.save({"params": {"fea_conv.weight": torch.zeros(3)}}, tmp_path / "net.pth")
    with pytest.raises(sr.SRError, match=r"no architecture .*first key: 'fea_conv.weight'"):
        sr.load(tmp_path / "net.pth")


@pytest.mark.parametrize(
    "content",
    [
        {"sr_network": {"arch": "SparseSR", "hparams": "{}"}},
        {"sr_network": {"arch": "SparseSR", "hparams": '{"dim": -1}'}, "state_dict": {}},
        {"sr_network": {}, "state_dict": {}},
        {"epoch": 3},
        [1, 2],
    ],
)
def test_malformed_files_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(sr.SRError, match=r"x\.ckpt|at least 1"):
        sr.load(tmp_path / "x.ckpt")


def test_a_file_of_version_0_0_1_loads():
    """It has no digest, range or channels; ``groups`` are named as then."""
    network = sr.load(GOLDEN / "sparsesr_0.0.1.safetensors")
    assert (network.scale, network.hparams["dim"], network.hparams["blocks"]) == (2, 4, 1)
    with torch.no_grad():
        out = network(torch.full((1, 3, 8, 8), 0.5))
    assert out.shape == (1, 3, 16, 16)
    assert out.isfinite().all()
    info = read_info(GOLDEN / "sparsesr_0.0.1.safetensors")
    assert info["version"] == "0.0.1"
    assert info["info"]["step"] == 7


def test_a_flipped_bit_is_noticed(path, tmp_path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    (tmp_path / "flipped.safetensors").write_bytes(content)
    with pytest.raises(sr.SRError, match="differs from its digest"):
        sr.load(tmp_path / "flipped.safetensors")


def test_saving_leaves_nothing_half_written(network, tmp_path):
    with pytest.raises(sr.SRError, match="cannot write"):
        sr.save(network, tmp_path / "no_such_folder" / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_installed_weights_load_and_say_what_they_are():
    for name, record in PRETRAINED.items():
        if record.url:
            continue
        net = sr.load(name)
        assert net.scale == record.scale
        assert name.split(".")[0].endswith(f"_x{record.scale}")
        assert net.arch == record.arch
        assert record.path.stat().st_size == record.size
        assert hashlib.sha256(record.path.read_bytes()).hexdigest() == record.sha256
    assert default_weights(2).scale == 2


def test_metadata_of_other_tools_are_left_as_they_are(path, tmp_path):
    save_file(load_file(path), tmp_path / "x.safetensors", {"info": "made by somebody", "hparams": "[1]"})
    assert read_info(tmp_path / "x.safetensors") == {"info": {}, "hparams": {}}


def test_a_checkpoint_that_does_not_name_its_network_is_not_resumed(network, tmp_path):
    torch.save({"sr_network": "x", "state_dict": {}, "global_step": 1}, tmp_path / "x.ckpt")
    with pytest.raises(sr.SRError, match="does not say which network it is of"):
        sr.checkpoint.resume_step(tmp_path / "x.ckpt", network)
