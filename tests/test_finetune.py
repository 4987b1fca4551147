"""Which weights a training starts from."""

import pytest
import torch
import torch.nn.functional as F

import sr
from sr.archs import SparseSR, sparsesr_t
from sr.errors import SRError
from sr.finetune import start_from


def randomised(network):
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.1, 0.1)
    return network.eval()


@pytest.fixture
def x2(tmp_path):
    network = randomised(sparsesr_t(scale=2))
    sr.save(network, tmp_path / "x2.safetensors")
    return network, tmp_path / "x2.safetensors"


def test_the_same_network_starts_as_it_was(x2):
    network, path = x2
    new = sparsesr_t(scale=2).eval()
    start = start_from(new, path)
    assert start.share == 1 and not (start.adapted or start.initialised or start.skipped)
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(new(x), network(x))


@pytest.mark.parametrize("scale", [3, 4])
def test_x2_weights_start_a_larger_scale(x2, scale):
    network, path = x2
    new = sparsesr_t(scale=scale).eval()
    start = start_from(new, path)
    assert start.share == 1 and len(start.adapted) == 2 and not start.initialised
    assert f"head.weight [12, 32, 3, 3] -> [{3 * scale**2}, 32, 3, 3]" in str(start)
    x = torch.rand(1, 3, 16, 16)
    base = network.base(x)
    detail = network(x) - base  # what the x2 network adds to bicubic; the larger one adds the nearest pixel of it
    expected = F.interpolate(detail, scale_factor=scale / 2, mode="nearest-exact") + new.base(x)
    torch.testing.assert_close(new(x), expected, atol=1e-5, rtol=0)


def test_too_little_is_refused_unless_told_otherwise(x2):
    _, path = x2
    other = SparseSR(scale=2, dim=32, groups=3, blocks=4)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(SRError, match=r"only 6\d % of SparseSR would start .*\n.*weights_partly"):
        start_from(other, path)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())  # untouched
    start = start_from(other, path, partly=True)
    assert 0.6 < start.share < 0.7
    assert all("groups.2." in name for name in start.initialised) and "not in the file" in str(start)
    assert torch.equal(other.embed.weight, sr.load(path).embed.weight)
    smaller = SparseSR(scale=2, dim=32, groups=1, blocks=4)
    assert any("groups.1." in name for name in start_from(smaller, path).skipped)


def test_other_shapes_are_named(x2):
    _, path = x2
    with pytest.raises(SRError, match=r"only 0 % .*embed\.weight \(\[32, 3, 3, 3\] there, \[48, 3, 3, 3\] here\)"):
        start_from(SparseSR(scale=2, dim=48), path)


def test_settings_that_no_shape_tells_are_named(x2):
    _, path = x2
    start = start_from(SparseSR(scale=2, dim=32, groups=2, blocks=4, radius=1), path)
    assert start.share == 1 and start.settings == ["radius 2 there, 1 here"]
    assert "radius 2 there, 1 here" in str(start)


def test_training_starts_from_weights(config, start, capsys, tmp_path):
    first = start(config)
    config["model"]["network"]["init_args"]["scale"] = 4
    config["trainer"]["max_steps"] = 1
    cli = start(config, "--model.weights", str(first.run_dir / "best.safetensors"), "--name", "x4")
    assert cli.model.network.scale == 4
    assert "head.weight [12, 4, 3, 3] -> [48, 4, 3, 3]" in capsys.readouterr().out
    resumed = start(config, "--ckpt_path", str(cli.run_dir / "checkpoints" / "last.ckpt"), "--trainer.max_steps", "2")
    assert resumed.trainer.global_step == 2
    with pytest.raises(SRError, match="no weights file at"):
        start(config, "--model.weights", "nowhere.safetensors")
