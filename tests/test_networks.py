"""What every network of the registry owes, at every scale."""

import copy

import pytest
import torch

import sr
from sr.network import SRNetwork
from sr.registry import get_arch, list_archs, list_models

SCALES = (2, 3, 4)
# Networks of over a million parameters, and what takes long to trace, go with the slow tests.
LARGE = {name for name in list_models() if sum(p.numel() for p in sr.create_model(name).parameters()) > 1e6}


def cases(*values):
    return [pytest.param(*v, marks=pytest.mark.slow if v[0] in LARGE else ()) for v in values]


everything = pytest.mark.parametrize(("name", "scale"), cases(*((n, s) for n in list_models() for s in SCALES)))


def assert_close(actual, expected, tolerance):
    """Equal but for rounding, which grows with the largest value."""
    torch.testing.assert_close(actual, expected, atol=tolerance * max(1.0, expected.abs().max().item()), rtol=0)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(name: str, scale: int) -> SRNetwork:
    """A network whose weights are all random: a layer that starts at zero would hide what lies before it."""
    network = sr.create_model(name, scale=scale)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return network.eval()


@everything
@pytest.mark.parametrize("size", [(1, 1), (7, 19)])
def test_any_size_gives_exactly_scale_times_it(name, scale, size):
    with torch.no_grad():
        out = build(name, scale)(torch.rand(1, 3, *size))
    assert out.shape == (1, 3, size[0] * scale, size[1] * scale)
    assert out.isfinite().all()


@everything
def test_every_parameter_gets_a_gradient(name, scale):
    network = build(name, scale).train()
    network(torch.rand(2, 3, 13, 17)).square().mean().backward()
    missing = [k for k, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing, f"no gradient for {missing}"


@everything
def test_saved_and_loaded_gives_the_same_picture(name, scale, tmp_path):
    network = build(name, scale)
    sr.save(network, tmp_path / "x.safetensors")
    loaded = sr.load(tmp_path / "x.safetensors")
    x = torch.rand(1, 3, 9, 10)
    assert type(loaded) is type(network)
    assert loaded.hparams == network.hparams
    with torch.no_grad():
        assert torch.equal(loaded(x), network(x))


@everything
def test_fuse_changes_nothing(name, scale):
    network, x = build(name, scale), torch.rand(1, 3, 12, 9)
    with torch.no_grad():
        assert_close(copy.deepcopy(network).fuse()(x), network(x), 1e-5)


@everything
def test_output_does_not_depend_on_batch_mates(name, scale):
    network, x = build(name, scale), torch.rand(3, 3, 11, 8)
    with torch.no_grad():
        assert_close(network(x)[1:2], network(x[1:2]), 1e-5)


@everything
def test_bfloat16_is_finite_and_close(name, scale):
    network, x = build(name, scale), torch.rand(1, 3, 16, 12)
    assert network.supports_bf16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = network(x)
    with torch.no_grad():
        full = network(x)
    assert half.isfinite().all()
    assert (half.float() - full).abs().mean() < 0.05 * full.abs().mean() + 0.01


@everything
def test_wrong_channels_are_refused(name, scale):
    with pytest.raises(sr.SRError, match=r"\(N, 3, H, W\)"):
        build(name, scale)(torch.rand(1, 1, 8, 8))


@pytest.mark.parametrize("name", cases(*((n,) for n in list_models() if not n.endswith(("_b", "_l")))))
def test_torch_export_with_free_sizes(name):
    network = build(name, 2)
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(network, (torch.rand(2, 3, 24, 40),), dynamic_shapes=({0: free, 2: free, 3: free},))
    for shape in ((2, 3, 17, 33), (3, 3, 48, 24)):
        x = torch.rand(shape)
        with torch.no_grad():
            assert_close(program.module()(x), network(x), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in list_models() if not n.endswith(("_b", "_l"))])
def test_torch_compile_changes_nothing(name):
    network, x = build(name, 2), torch.rand(1, 3, 24, 16)
    with torch.no_grad():
        assert_close(torch.compile(network)(x), network(x), 1e-4)


def test_hparams_hold_defaults_and_survive_a_copy():
    network = sr.create_model("sparsesr_t", scale=3)
    assert network.hparams["scale"] == 3
    assert network.hparams["window"] == 8
    assert copy.deepcopy(network).hparams == network.hparams
    assert get_arch("SparseSR")(**network.hparams).hparams == network.hparams


def test_unknown_names_come_with_close_ones():
    with pytest.raises(sr.SRError, match=r"'sparsesr_tt'.*did you mean 'sparsesr_t'"):
        sr.create_model("sparsesr_tt")
    with pytest.raises(sr.SRError, match=r"'SparsSR'.*did you mean 'SparseSR'"):
        get_arch("SparsSR")
    assert "SparseSR" in list_archs()


@pytest.mark.parametrize("scale", [0, -2, 1.5, "2"])
def test_impossible_scales_are_refused(scale):
    with pytest.raises(sr.SRError, match="scale must be a whole number"):
        sr.create_model("sparsesr_t", scale=scale)
