"""ASSANet against stored outputs of the published code, and against the slow reference beside this file."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from assanet_reference import (
    direct_dynamic_conv,
    direct_gated_conv,
    direct_norm,
    reference,
    tile_starts,
)
from safetensors.torch import load_file

from sr.archs import assanet, stencils
from sr.archs.assanet import ASSANet, _Axis, _TracedAxis, assanet_b, assanet_l, assanet_s

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "data" / "vectors"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(stencils, "compile_kernels", False)
    monkeypatch.setattr(stencils._State, "broken", False)


def error(a, b):
    """Largest difference, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def tiny(scale=2, tile=6, **kwargs):
    """Two groups of two blocks, all weights random; temperatures differ from one."""
    network = ASSANet(scale=scale, dim=8, groups=2, blocks=2, tile=tile, **kwargs).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return network


# --- the published function ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2, 4])
def test_official_files_give_the_published_outputs(scale):
    weights = VECTORS / f"assanet_s_x{scale}_random.pth"
    if not weights.exists():
        pytest.skip(f"{weights} is not here")
    state = torch.load(weights, weights_only=True)["params_ema"]
    io = load_file(VECTORS / f"assanet_s_x{scale}_random_io.safetensors")
    network = ASSANet(**ASSANet.infer_hparams(state))
    network.load_state_dict(ASSANet.remap(state))
    with torch.no_grad():
        assert error(network.eval()(io["input"]), io["output_tlc"]) < 1e-5
        network.tile = None
        assert error(network(io["input"]), io["output_whole"]) < 1e-5
        if scale == 4:  # the smaller picture
            assert error(network.train()(io["input"]), io["output_whole"]) < 1e-5
            assert error(reference(state, io["input"], None), io["output_whole"]) < 1e-5
        assert error(io["output_tlc"], io["output_whole"]) > 1e-2  # or the test would not tell them apart


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (6, 7), (7, 40), (13, 16), (31, 9)])
@pytest.mark.parametrize("tile", [6, 4, 64, None])
def test_equals_the_reference_at_any_size(size, tile):
    network, x = tiny(scale=3, tile=tile), torch.rand(2, 3, *size)
    with torch.no_grad():
        assert error(network(x), reference(network.state_dict(), x, tile)) < 1e-5


def test_a_long_strip():
    network, x = tiny(tile=48), torch.rand(1, 3, 7, 200)
    with torch.no_grad():
        assert error(network(x), reference(network.state_dict(), x, 48)) < 1e-5


def test_training_attends_over_the_whole_patch_with_the_same_gradients():
    network, x = tiny().double().train(), torch.rand(2, 3, 13, 11, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, 3, 26, 22, dtype=torch.float64)
    parameters = dict(network.named_parameters())
    ours = torch.autograd.grad((network(x) * weight).sum(), [x, *parameters.values()])
    theirs = torch.autograd.grad((reference(parameters, x, None) * weight).sum(), [x, *parameters.values()])
    for name, a, b in zip(["input", *parameters], ours, theirs, strict=True):
        assert a.abs().sum() > 0, name
        assert error(a, b) < 1e-9, name


def test_pictures_of_a_batch_do_not_mix():
    network, x = tiny(), torch.rand(3, 3, 15, 10)
    with torch.no_grad():
        together = network(x)
        for i in range(3):
            assert error(together[i : i + 1], network(x[i : i + 1])) < 1e-6


def test_bfloat16_autocast_trains_with_finite_values():
    network, x = tiny(), torch.rand(1, 3, 14, 9)
    with torch.autocast("cpu", torch.bfloat16):
        half = network(x)
        loss = network.train()(x).square().mean()
    loss.backward()
    assert half.isfinite().all()
    assert error(half.float(), network.eval()(x)) < 0.05
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in network.parameters())


# --- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 48])
def test_tiles_are_placed_as_published(tile):
    for size in (*range(1, 40), 97, 200):
        assert _Axis(size, tile, CPU).starts == tile_starts(size, tile)


@pytest.mark.parametrize("axis", [_Axis, _TracedAxis])
@pytest.mark.parametrize("tile", [3, 7, 48])
def test_overlaps_are_averaged(axis, tile):
    for size in (1, 2, 3, 4, 7, 8, 15, 16):
        x = torch.randn(2, 3, size, 5)
        cut = axis(size, tile, CPU)
        tiles = cut.cut(x, -2, 1)
        torch.testing.assert_close(cut.paste(tiles, -2, 1), x)
        # Multiply tile i by i: each pixel is multiplied by the mean number of the tiles it lies in.
        starts = tile_starts(size, tile)
        numbers = torch.arange(tiles.shape[1], dtype=torch.float32).clamp(max=len(starts) - 1).view(-1, 1, 1, 1)
        inside = [[i for i, s in enumerate(starts) if s <= row < s + tile] for row in range(size)]
        means = torch.tensor([sum(i) / len(i) for i in inside]).view(-1, 1)
        if axis is _Axis or max(map(len, inside)) < 3:
            torch.testing.assert_close(cut.paste(tiles * numbers, -2, 1), x * means)


# --- stencils --------------------------------------------------------------------------------------------------------


def operations():
    """Operation, direct form, shapes of the arguments."""
    return [
        pytest.param(stencils.dynamic_conv, direct_dynamic_conv, [(2, 5, 9, 8), (45, 1, 3, 3)], id="dynamic_conv"),
        pytest.param(stencils.gated_conv, direct_gated_conv, [(2, 6, 9, 8), (6, 1, 3, 3)], id="gated_conv"),
        pytest.param(stencils.channel_norm, direct_norm, [(2, 6, 7, 5), (6,), (6,)], id="channel_norm"),
        pytest.param(
            lambda x, k, w: stencils.project(stencils.gated_conv, w, x, k),
            lambda x, k, w: F.conv2d(direct_gated_conv(x, k), w),
            [(2, 6, 6, 7), (6, 1, 3, 3), (4, 3, 1, 1)],
            id="project",
        ),
    ]


def with_gradients(operation, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = operation(*inputs)
    return [out.detach(), *torch.autograd.grad((out * torch.linspace(1, 2, out.shape[-1])).sum(), inputs)]


@pytest.mark.parametrize(("operation", "direct", "shapes"), operations())
@pytest.mark.parametrize("cached", [2**17, 1])  # all channels at once, and one by one
def test_stencils_equal_the_direct_form(operation, direct, shapes, cached, monkeypatch):
    monkeypatch.setattr(stencils, "_CACHED_ELEMENTS", cached)
    inputs = [torch.randn(s) for s in shapes]
    for a, b in zip(with_gradients(operation, inputs), with_gradients(direct, inputs), strict=True):
        assert error(a, b) < 1e-5
    assert torch.autograd.gradcheck(operation, [x.double().requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize(("operation", "direct", "shapes"), operations())
def test_bfloat16_maps_are_summed_in_float32(operation, direct, shapes):
    x, *rest = [torch.randn(s) for s in shapes]
    with torch.autocast("cpu", torch.bfloat16):
        out = operation(x.bfloat16(), *rest)
    assert out.dtype == torch.bfloat16
    assert error(out.float(), direct(x.bfloat16().float(), *rest)) < 0.02


def kept_for_backward(function):
    """Elements that a forward pass keeps, each storage once, parameters not counted."""
    kept = {}

    def pack(x):
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function()  # alive until the count, so that no storage is used again
    return sum(kept.values()) * (out is not None)


def test_training_keeps_less_than_a_quarter_of_the_direct_form():
    network, x = tiny().train(), torch.rand(1, 3, 32, 32)
    direct = kept_for_backward(lambda: reference(dict(network.named_parameters()), x, None))
    assert kept_for_backward(lambda: network(x)) < direct / 4


# --- compiling -------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_eager_form_serves_and_says_so_once(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler found\nand more lines")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(stencils, "compile_kernels", True)
    for kernel in (stencils._quadratic, stencils._gated):
        monkeypatch.setattr(kernel, "compiled", None)
    network, x = tiny(), torch.rand(1, 3, 9, 9)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        out = network(x)
        assert error(out, reference(network.state_dict(), x, 6)) < 1e-5
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == ["no compiler found"]


def test_kernels_are_compiled_once_enough_work_is_done(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f.__name__) or f)
    monkeypatch.setattr(stencils, "compile_kernels", None)
    monkeypatch.setattr(stencils._State, "elements", 0)
    monkeypatch.setattr(stencils, "WARM_UP", 2 * 3 * 8 * 8 + 1)
    monkeypatch.setattr(stencils._quadratic, "compiled", None)
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(27, 1, 3, 3)
    for before in (0, 0, 1, 1):
        stencils.dynamic_conv(x, weight)
        assert len(compiled) == before


@pytest.mark.parametrize("bounded", [False, True])
def test_export_with_free_sizes_keeps_the_tiles(bounded):
    network = ASSANet(scale=2, dim=4, groups=1, blocks=1, tile=5).eval()
    h, w = (torch.export.Dim(n, min=2, max=99) if bounded else torch.export.Dim.DYNAMIC for n in "hw")
    program = torch.export.export(network, (torch.rand(1, 3, 12, 17),), dynamic_shapes=({2: h, 3: w},)).module()
    for size in ((12, 17), (3, 4), (5, 6), (2, 40), (26, 7)):
        x = torch.rand(1, 3, *size)
        with torch.no_grad():
            assert error(program(x), network(x)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "direct", "shapes"), operations())
def test_compiled_stencils_equal_the_direct_form(operation, direct, shapes, monkeypatch):
    monkeypatch.setattr(stencils, "compile_kernels", True)
    inputs = [torch.randn(s) for s in shapes]
    for a, b in zip(with_gradients(operation, inputs), with_gradients(direct, inputs), strict=True):
        assert error(a, b) < 1e-5
    assert not stencils._State.broken


@pytest.mark.slow
def test_outer_compilation_changes_nothing():
    network = ASSANet(scale=2, dim=4, groups=1, blocks=1, tile=5).eval()
    compiled = torch.compile(network, dynamic=True)
    for size in ((12, 17), (3, 4), (7, 30)):
        x = torch.rand(1, 3, *size)
        with torch.no_grad():
            assert error(compiled(x), network(x)) < 1e-5
    network.train()
    x = torch.rand(2, 3, 8, 9)
    ours = torch.autograd.grad(compiled(x).square().sum(), network.parameters())
    for a, b in zip(ours, torch.autograd.grad(network(x).square().sum(), network.parameters()), strict=True):
        assert error(a, b) < 1e-4


# --- variants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "parts", "tiles"),
    [
        (assanet_s, (32, 6, 4), {2: 96, 3: 72, 4: 48}),
        (assanet_b, (90, 8, 4), {2: 96, 3: 72, 4: 48}),
        (assanet_l, (160, 8, 8), {2: 144, 3: 108, 4: 72}),
    ],
)
def test_arguments_are_recognised_from_the_weights(build, parts, tiles):
    for scale, tile in tiles.items():
        with torch.device("meta"):
            network = build(scale=scale)
        assert (network.scale, network.tile) == (scale, tile)
        assert tuple(network.hparams[k] for k in ("dim", "groups", "blocks")) == parts
        assert ASSANet.infer_hparams(network.state_dict()) == network.hparams
    assert build(tile=None, groups=1).hparams["tile"] is None


def test_weights_of_other_networks_are_not_recognised():
    assert ASSANet.infer_hparams({}) is None
    assert ASSANet.infer_hparams({"overlap_embed.0.proj.weight": torch.ones(8, 3, 3, 3)}) is None
    assert ASSANet.infer_hparams({"conv.weight": torch.ones(8, 3, 3, 3)}) is None


def test_swapping_in_the_direct_form_is_what_the_benchmark_does(monkeypatch):
    network, x = tiny(), torch.rand(1, 3, 9, 8)
    with torch.no_grad():
        ours = network(x)
        monkeypatch.setattr(assanet, "dynamic_conv", direct_dynamic_conv)
        assert error(network(x), ours) < 1e-5
