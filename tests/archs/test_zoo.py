"""Published efficient networks: their files, their scores, and what the published code cannot do."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sr
from sr.archs import BSRN, IMDN, PAN, RLFN, SMFANet
from sr.archs.common import ContrastAttention, SpatialAttention
from sr.archs.smfanet import _Cells, _TracedCells, _variance
from sr.data import find_pictures
from sr.image import read_rgb
from sr.metrics import psnr, ssim
from sr.registry import get_arch, list_archs

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

# File -> class, arguments, mean PSNR_Y and SSIM_Y on Set5 by an independent implementation of network and metrics.
FILES = {
    "IMDN_x2": (IMDN, (2, 64, 6), 37.996, 0.9605),
    "IMDN_x4": (IMDN, (4, 64, 6), 32.210, 0.8948),
    "rlfn_x4": (RLFN, (4, 52, 6), 32.238, 0.8953),
    "rlfn_s_x2": (RLFN, (2, 48, 6), 38.047, 0.9607),
    "net_g_BSRN_x2": (BSRN, (2, 64, 8), 38.083, 0.9608),
    "net_g_BSRN_x4": (BSRN, (4, 64, 8), 32.349, 0.8965),
    "SMFANet_DF2K_100w_x4SR": (SMFANet, (4, 36, 8), 32.252, 0.8956),
    "SMFANet_plus_DF2K_100w_x2SR": (SMFANet, (2, 48, 12), 38.185, 0.9611),
    "SMFANet_plus_DF2K_100w_x3SR": (SMFANet, (3, 48, 12), 34.665, 0.9292),
    "SMFANet_plus_DF2K_100w_x4SR": (SMFANet, (4, 48, 12), 32.511, 0.8985),
    "PANx2_DF2K": (PAN, (2, 40, 16), 38.001, 0.9605),
    "PANx4_DF2K": (PAN, (4, 40, 16), 32.13, 0.8948),
}
# Pictures that the published code made.
RESULTS = {"IMDN_x4": "IMDN_x4", "BSRN_x2": "net_g_BSRN_x2", "SMFANet_plus_DF2K_x3": "SMFANet_plus_DF2K_100w_x3SR"}

# As published for x4.
PARAMETERS = {"imdn": 715_176, "bsrn": 352_400}

TINY = {
    "imdn": lambda scale: IMDN(scale=scale, dim=16, blocks=2),
    "rlfn": lambda scale: RLFN(scale=scale, dim=8, blocks=2),
    "bsrn": lambda scale: BSRN(scale=scale, dim=16, blocks=2),
    "pan": lambda scale: PAN(scale=scale, dim=8, blocks=2, up_dim=6),
    "smfanet": lambda scale: SMFANet(scale=scale, dim=8, blocks=2),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_the_published_ones(name):
    network = sr.create_model(name, scale=4)
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS[name]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Threads of tiny convolutions wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def published(name):
    path = DATA / "weights" / f"{name}.pth"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return path


def tiny(name, scale=2):
    network = TINY[name](scale).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return network


def error(a, b):
    """Largest difference, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


# --- published files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("wrapper", [None, "params_ema", "state_dict"])
def test_a_published_file_is_recognised_by_what_is_in_it(name, wrapper, tmp_path):
    content = torch.load(published(name), map_location="cpu", weights_only=True)
    state = {k.removeprefix("module."): v for k, v in content.get("params", content).items()}
    torch.save({wrapper: {f"module.{k}": v for k, v in state.items()}} if wrapper else state, tmp_path / "weights.pt")
    network = sr.load(tmp_path / "weights.pt")
    assert type(network) is FILES[name][0]
    assert tuple(network.hparams[k] for k in ("scale", "dim", "blocks")) == FILES[name][1]
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())


@pytest.mark.parametrize(("folder", "name"), RESULTS.items())
def test_pictures_are_those_of_the_published_code(folder, name):
    upscaler = sr.Upscaler(sr.load(published(name)), tile=None)
    lq = DATA / "benchmarks" / "Set5" / "LR_bicubic" / f"X{upscaler.scale}" / "bird.png"
    theirs = read_rgb(DATA / "peer_results" / folder / "Set5" / "bird.png")
    assert (upscaler(read_rgb(lq)).int() - theirs.int()).abs().max() <= 1  # rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_published_scores(name):
    upscaler = sr.Upscaler(sr.load(published(name)), tile=None)
    pictures = find_pictures(DATA / "benchmarks" / "Set5", upscaler.scale)
    pairs = [pictures.pair(i) for i in range(len(pictures.names))]
    results = [(upscaler(lq)[None], gt[None]) for lq, gt in pairs]
    for metric, expected, tolerance in ((psnr, FILES[name][2], 0.02), (ssim, FILES[name][3], 0.0005)):
        values = [metric(a, b, crop_border=upscaler.scale).item() for a, b in results]
        assert sum(values) / len(values) == pytest.approx(expected, abs=tolerance)


# --- recognition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("name", ["imdn", "rlfn", "rlfn_s", "bsrn", "smfanet", "smfanet_plus", "pan"])
def test_only_the_own_family_knows_its_weights(name, scale):
    network = sr.create_model(name, scale=scale)
    state = network.state_dict()
    found = {arch: get_arch(arch).infer_hparams(state) for arch in list_archs()}
    own = found.pop(type(network).__name__)
    assert set(found.values()) == {None}
    if name == "pan":  # random weights do not tell 2 from 3
        own["scale"] = scale if scale != 4 else own["scale"]
    assert own == network.hparams


def stripes(size):
    """Bars of a random direction and width, (2, 3, size, size)."""
    at = torch.arange(size, dtype=torch.float32)
    fy, fx = torch.rand(2, 2, 1, 1, 1)
    return (0.5 + 0.3 * torch.sign(torch.sin(fy * at[:, None] + fx * at))).expand(2, 3, size, size)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("scale", [2, 3])
def test_pan_tells_its_scale_from_what_it_does(scale):
    network = PAN(scale=scale, dim=8, blocks=1, up_dim=8)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 150)
    for _ in range(150):
        lq = F.avg_pool2d(stripes(36), 3)
        loss = (F.avg_pool2d(network(lq), scale) - lq).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert PAN.infer_hparams(network.state_dict()) == network.hparams


def test_an_incomplete_file_is_refused_and_named(tmp_path):
    for name in TINY:
        state = tiny(name).state_dict()
        del state[list(state)[1]]  # of the first convolution
        torch.save(state, tmp_path / "part.pth")
        with pytest.raises(sr.SRError, match=r"part\.pth: \w+ needs '.*', which the file lacks"):
            sr.load(tmp_path / "part.pth")


# --- any size --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rlfn", "bsrn", "smfanet"])  # those that pool, down to a single row
def test_exports_hold_for_any_size(name):
    network = tiny(name, scale=3)
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(network, (torch.rand(2, 3, 24, 40),), dynamic_shapes=({0: free, 2: free, 3: free},))
    for shape in ((1, 3, 3, 5), (2, 3, 9, 70), (1, 3, 20, 15), (3, 3, 48, 27)):
        x = torch.rand(shape)
        with torch.no_grad():
            assert error(program.module()(x), network(x)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_onnx_holds_for_any_size(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    network = tiny(name)
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free, 2: free, 3: free},)
    torch.onnx.export(network, (torch.rand(2, 3, 24, 40),), tmp_path / "x.onnx", dynamo=True, dynamic_shapes=shapes)
    session = runtime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    for shape in ((1, 3, 1, 1), (1, 3, 3, 5), (2, 3, 17, 33), (1, 3, 7, 100), (3, 3, 64, 31)):
        x = torch.rand(shape)
        out = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        with torch.no_grad():
            assert error(out, network(x)) < 1e-5


@pytest.mark.parametrize("size", [(1, 3), (8, 15), (17, 16), (23, 41), (64, 9)])
def test_cells_are_those_of_adaptive_pooling(size):
    x = torch.randn(2, 3, *size)
    cells, traced = _Cells(*size), _TracedCells(*size)
    (rows, columns), pooled = cells.counts, cells.largest(x)
    for i in range(rows):  # the definition, cell by cell
        for j in range(columns):
            top, left = i * size[0] // rows, j * size[1] // columns
            cell = x[..., top : -(-(i + 1) * size[0] // rows), left : -(-(j + 1) * size[1] // columns)]
            assert torch.equal(pooled[..., i, j], cell.amax((2, 3)))
    larger = traced.largest(x)
    assert torch.equal(larger, F.pad(pooled, (0, 1, 0, 1)))
    assert torch.equal(traced.spread(larger), cells.spread(pooled))


def test_variance_is_unbiased_and_of_one_pixel_zero():
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(_variance(x), x.var((2, 3), keepdim=True))
    assert torch.equal(_variance(x[..., :1, :1]), torch.zeros(2, 3, 1, 1))


@pytest.mark.parametrize("name", TINY)
def test_flat_pictures_train_with_finite_gradients(name):
    network = tiny(name).train()
    for x in (torch.zeros(1, 3, 1, 1), torch.full((2, 3, 16, 17), 0.5)):
        network.zero_grad()
        network(x).square().mean().backward()
        assert all(p.grad.isfinite().all() for p in network.parameters())


def test_contrast_attention_scales_by_mean_plus_deviation():
    attention, x = ContrastAttention(16, 4), torch.randn(2, 16, 6, 5)
    first, _, second, _ = attention.conv_du
    with torch.no_grad():
        contrast = x.mean((2, 3)) + x.std((2, 3), correction=0)
        hidden = torch.relu(contrast @ first.weight.flatten(1).T + first.bias)
        factor = torch.sigmoid(hidden @ second.weight.flatten(1).T + second.bias)
        torch.testing.assert_close(attention(x), x * factor[..., None, None])


def test_spatial_attention_works_down_to_its_smallest_size():
    attention = SpatialAttention(4, 4)
    smallest = SpatialAttention.MIN_SIZE
    with torch.no_grad():
        assert attention(torch.rand(1, 4, smallest, smallest)).shape == (1, 4, smallest, smallest)
        with pytest.raises(RuntimeError):
            attention(torch.rand(1, 4, smallest - 1, smallest))


# --- how far a pixel looks -------------------------------------------------------------------------------------------


def reach(network, height, width):
    """The largest distance, in rows, at which an input pixel changes an output pixel."""
    x = torch.rand(1, 3, height, width, dtype=torch.float64, requires_grad=True)
    out, far = network.double()(x).sum((0, 1, 3)), 0
    for row in range(len(out)):
        (grad,) = torch.autograd.grad(out[row], x, retain_graph=True)
        seen = grad.abs().sum((0, 1, 3)).nonzero()[:, 0]
        at = row // network.scale
        far = max(far, at - seen.min().item(), seen.max().item() - at)
    return far


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_receptive_field_of_pan_is_exact(scale):
    network = tiny("pan", scale)
    assert reach(network, 26, 3) == network.receptive_field


# --- BSRN's repeated picture -----------------------------------------------------------------------------------------


def test_copies_of_the_picture_add_up_their_weights():
    network, x = tiny("bsrn"), torch.rand(1, 3, 6, 7)
    conv = network.fea_conv
    with torch.no_grad():
        torch.testing.assert_close(conv(x), conv.dw(conv.pw(x.repeat(1, 4, 1, 1))))
