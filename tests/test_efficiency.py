"""The efficiency card: counts against closed forms and published figures, measurements against known costs."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sr
from sr import efficiency
from sr.archs import SpandrelNetwork, stencils
from sr.checkpoint import read_info
from sr.efficiency import Run, card, cards, count, ntire_score, to_markdown
from sr.errors import SRError
from sr.network import SRNetwork
from sr.profiling import timings

ROOT = Path(__file__).parents[1]


class Body(SRNetwork):
    """Whatever module is given, at scale 1 on the contract; not rebuilt from hyper-parameters in these tests."""

    def __init__(self, *, body: nn.Module | None = None, scale: int = 1) -> None:
        super().__init__(scale=scale)
        self.body = body

    def upscale(self, lq):
        return F.interpolate(self.body(lq)[:, :3], scale_factor=self.scale)


class Call(nn.Module):
    """A function of the picture as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        self.function(x)
        return x


# --- counting --------------------------------------------------------------------------------------------------------

H, W = 9, 14


def test_convolution():
    counted = count(Body(body=nn.Conv2d(3, 16, 3, padding=1)), H, W)
    assert counted == {
        "parameters": 3 * 16 * 9 + 16,
        "macs": H * W * 3 * 16 * 9,
        "flops": 2 * H * W * 3 * 16 * 9,
        "activations": 16 * H * W,
        "convolutions": 1,
    }


@pytest.mark.parametrize(
    ("layer", "macs", "activations"),
    [
        (nn.Conv2d(3, 6, 3, padding=1, groups=3), H * W * 6 * 9, 6 * H * W),
        (nn.Conv2d(3, 4, (3, 5), stride=2), 4 * 5 * 4 * 3 * 15, 4 * 4 * 5),  # 9x14 -> 4x5
        (nn.Conv2d(3, 8, 3, padding=2, dilation=2), H * W * 3 * 8 * 9, 8 * H * W),
        (nn.ConvTranspose2d(3, 6, 4, stride=2, groups=3), H * W * 3 * 2 * 16, 6 * (2 * H + 2) * (2 * W + 2)),
    ],
    ids=["grouped", "strided", "dilated", "transposed"],
)
def test_other_convolutions(layer, macs, activations):
    counted = count(Body(body=layer), H, W)
    assert (counted["macs"], counted["activations"], counted["convolutions"]) == (macs, activations, 1)


def _attend(mask, heads=2, tokens=10, keys=12, channels=8):
    def function(x):
        q, k = x.new_ones(1, heads, tokens, channels), x.new_ones(1, heads, keys, channels)
        F.scaled_dot_product_attention(q, k, k, attn_mask=x.new_zeros(tokens, keys) if mask else None)

    return function


ATTENTION = 2 * 10 * 12 * 8 * 2


@pytest.mark.parametrize(
    ("function", "macs"),
    [
        (lambda x: F.linear(x, x.new_ones(5, W), x.new_ones(5)), 3 * H * W * 5),
        (lambda x: x @ x.transpose(-1, -2), 3 * H * H * W),
        (lambda x: torch.einsum("nchw,nchv->ncwv", x, x), 3 * H * W * W),
        (lambda x: torch.bmm(x[0], x[0].transpose(-1, -2)), 3 * H * H * W),
        (lambda x: x[0, 0] @ x[0, 0, 0], H * W),
        (lambda x: x[0, 0, 0] @ x[0, 0, 1], W),
        (_attend(mask=False), ATTENTION),
        (_attend(mask=True), ATTENTION),
        (lambda x: (x * 2 + x.softmax(-1)).relu().mean(), 0),
    ],
    ids=["linear", "matmul", "einsum", "bmm", "matrix-vector", "dot", "sdpa", "masked-sdpa", "element-wise"],
)
@pytest.mark.parametrize("asks_for_values", [False, True], ids=["shapes alone", "run"])
def test_matrix_products_and_attention(function, macs, asks_for_values):
    def both(x):
        if asks_for_values:  # cannot be had from shapes: the network is run, where attention is another operator
            x.sum().item()
        function(x)

    assert count(Body(body=Call(both)), H, W)["macs"] == macs


def test_swinir_by_the_formulas_of_its_paper():
    """W-MSA: 4 hw C^2 + 2 M^2 hw C (Swin, eq. 2), an MLP of ratio 2: 4 hw C^2; a 3x3 convolution: 9 hw C^2."""
    dim, window, depths, scale = 60, 8, (6, 6, 6, 6), 4
    args = {
        "img_size": 64, "window_size": window, "img_range": 1.0, "depths": list(depths), "embed_dim": dim,
        "num_heads": [6] * 4, "mlp_ratio": 2, "upsampler": "pixelshuffledirect", "resi_connection": "1conv",
    }  # fmt: skip
    network = SpandrelNetwork(arch="SwinIR", args=args, scale=scale)
    pixels = 184 * 320  # 180 rows are padded to a multiple of the window
    blocks = sum(depths) * (8 * dim**2 + 2 * window**2 * dim)
    convolutions = 9 * (3 * dim + (len(depths) + 1) * dim**2 + dim * 3 * scale**2)
    expected = pixels * (blocks + convolutions)
    assert count(network, 180, 320)["macs"] == pytest.approx(expected, rel=0.01)


# github.com/sunny2109/SAFMN: parameters, "FLOPs" (which are MACs), activations, for an output of 1280 x 720.
@pytest.mark.parametrize(
    ("scale", "parameters", "macs", "activations"),
    [(2, 227.82e3, 51.53e9, 299e6), (3, 232.69e3, 23.42e9, 134e6), (4, 239.52e3, 13.56e9, 76.70e6)],
)
def test_safmn_as_published(scale, parameters, macs, activations):
    network = SpandrelNetwork(arch="SAFMN", args={"dim": 36, "n_blocks": 8}, scale=scale)
    result = card(network, measure_time=False)
    assert result["parameters"] == pytest.approx(parameters, rel=1e-4)
    assert result["macs"] == pytest.approx(macs, rel=0.002)
    assert result["activations"] == pytest.approx(activations, rel=0.003)  # published in whole millions at x2 and x3
    assert result["input"] == {2: [640, 360], 3: [427, 240], 4: [320, 180]}[scale]


def test_sparsesr_by_hand():
    """Convolutions, the choice of windows (24 neighbours, made once), attention of 64 queries to 3 * 64 keys."""
    dim, pixels, scale = 32, 16 * 24, 4
    convolutions = 9 * (3 * dim + 16 * dim * dim + 2 * dim * 32 + dim * 48) + 2 * 32 * dim
    bicubic = 25 * 3 * scale**2
    windows = pixels // 64
    attention = 2 * windows * 64 * 3 * 64 * (16 + 16) + windows * 24 * 16
    counted = count(sr.create_model("sparsesr_t", scale=scale), 16, 24)
    assert counted["macs"] == pixels * (convolutions + bicubic) + attention


def test_sizes_that_depend_on_the_picture_count_as_if_nothing_was_skipped():
    dense, sparse = (sr.create_model("sparsesr_t", sparsity=s) for s in (0.0, 0.1))
    assert count(sparse, 24, 32) == count(dense, 24, 32)


@pytest.mark.parametrize("tile", [None, 6])
def test_assanet_against_its_direct_form(tile, monkeypatch):
    """The reference stores the taps and attends tile by tile; the counter misses only the products with the taps."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "archs")
    reference = importlib.import_module("assanet_reference").reference
    h, w, dim = 13, 17, 8
    network = sr.archs.ASSANet(scale=2, dim=dim, groups=2, blocks=2, tile=tile).eval()
    outputs = []
    convolution = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *a, **k: outputs.append(convolution(*a, **k)) or outputs[-1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(network.state_dict(), torch.rand(1, 3, h, w), tile)
    monkeypatch.undo()
    counted = count(network, h, w)
    assert counted["macs"] == counter.get_total_flops() // 2 + 4 * 9 * 2 * dim * h * w
    assert counted["activations"] == sum(out.numel() for out in outputs)
    assert counted["convolutions"] == len(outputs)


class TwoBranches(SRNetwork):
    """Two convolutions that one can stand for."""

    def __init__(self, *, scale: int = 1) -> None:
        super().__init__(scale=scale)
        self.branches = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)])

    def upscale(self, lq):
        return sum(branch(lq) for branch in self.branches)

    def fuse(self):
        first, *others = self.branches
        with torch.no_grad():
            for other in others:
                first.weight += other.weight
                first.bias += other.bias
        self.branches = nn.ModuleList([first])
        return self


def test_counting_is_of_the_fused_network_and_changes_nothing():
    network = TwoBranches().train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    random = torch.random.get_rng_state()
    assert card(network, measure_time=False)["convolutions"] == 1
    assert network.training and all(p.requires_grad and p.device.type == "cpu" for p in network.parameters())
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())


def test_counting_by_running_leaves_the_kernels_setting(monkeypatch):
    monkeypatch.setattr(stencils, "compile_kernels", True)
    seen = []
    count(Body(body=Call(lambda x: seen.append(stencils.compile_kernels))), H, W)
    assert seen == [False] and stencils.compile_kernels is True


def test_card_is_kept_in_a_weights_file(tmp_path):
    network = sr.create_model("sparsesr_t", scale=2)
    result = card(network, size=(64, 32), measure_time=False)
    assert (result["input"], result["output"]) == ([32, 16], [64, 32])
    assert "latency" not in result and "run" not in result
    sr.save(network, tmp_path / "net.safetensors", info={"efficiency": result})
    assert read_info(tmp_path / "net.safetensors")["info"]["efficiency"] == result


# --- measuring -------------------------------------------------------------------------------------------------------


def test_jobs_take_turns():
    order = []
    times = timings({name: lambda name=name: order.append(name) for name in "ABC"}, 2)
    assert "".join(order) == "ABC" * 3 and {name: len(t) for name, t in times.items()} == dict.fromkeys("ABC", 2)


def test_latency_in_turn(monkeypatch):
    monkeypatch.setattr(efficiency, "extra_memory", lambda *args: 1.0)
    long, short = (Body(body=Call(lambda x, s=s: time.sleep(s))) for s in (0.06, 0.02))
    # Five runs after one that is not timed; counting calls once more.
    result = cards({"long": long, "short": short}, size=(4, 4), run=Run(repeats=5))
    for name, seconds in (("long", 0.06), ("short", 0.02)):
        latency = result[name]["latency"]
        first, third = latency["quartiles_ms"]
        assert 1000 * seconds <= first <= latency["median_ms"] <= third < 1000 * seconds + 200
    assert result["long"]["run"] == result["short"]["run"]
    assert result["long"]["run"]["threads"] == torch.get_num_threads()


class Buffer(nn.Module):
    """Takes 32 MiB for a moment."""

    def forward(self, x):
        return x + x.new_ones(2**23).sum()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory():
    result = card(Body(body=Buffer()), size=(8, 8), run=Run(repeats=2))
    assert result["extra_memory_mib"] == pytest.approx(32, abs=1)


def test_narrow_types_run_under_autocast(monkeypatch):
    monkeypatch.setattr(efficiency, "extra_memory", lambda *args: 1.0)
    seen = []

    class Look(nn.Module):
        def __deepcopy__(self, memo):
            return self

        def forward(self, x):
            seen.append((x @ x.transpose(-1, -2)).dtype)
            return x

    card(Body(body=Look()), size=(4, 4), run=Run(dtype="bfloat16", repeats=2))
    assert seen == [torch.float32] + [torch.bfloat16] * 3


@pytest.mark.slow
def test_compiled():
    result = card(sr.create_model("assanet_s", groups=1), size=(64, 64), run=Run(compile=True, repeats=2))
    assert result["run"]["compile"] and result["latency"]["median_ms"] > 0


@pytest.mark.gpu
def test_on_a_gpu():
    result = card(Body(body=Buffer()), size=(8, 8), run=Run(device="cuda", repeats=2))
    assert result["extra_memory_mib"] == pytest.approx(32, abs=1)
    assert result["run"]["device_name"] == torch.cuda.get_device_name()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": (0, 8)}, "0x8"),
        ({"run": Run(repeats=1)}, "2 repeats"),
        ({"run": Run(dtype="int8")}, "float32"),
        ({"run": Run(device="toaster")}, "toaster"),
    ],
)
def test_settings_that_cannot_be(kwargs, message):
    with pytest.raises(SRError, match=message):
        card(Body(body=nn.Identity()), **{"size": (4, 4), **kwargs})


def test_table():
    result = {
        "net": {
            "scale": 4, "input": [320, 180], "output": [1280, 720], "parameters": 183_346, "macs": 10_823_910_400,
            "flops": 21_647_820_800, "activations": 45_219_840, "convolutions": 23,
        }
    }  # fmt: skip
    row = to_markdown(result).splitlines()[-1]
    assert row == "| `net` | x4 | 320x180 | 183.3 K | 10.82 G | 21.65 G | 45.22 M | 23 |"


def costs(latency, flops, parameters):
    return {"latency": {"median_ms": latency}, "flops": flops, "parameters": parameters}


def test_ntire_score():
    efdn = costs(16.69, 16.70e9, 0.276e6)
    assert ntire_score(efdn, efdn) == pytest.approx(7.3891, abs=1e-4)  # as the challenge's README works it out
    assert ntire_score(costs(8.345, 8.35e9, 0.138e6), efdn) == pytest.approx(2.718281828459045)
    mixed = 0.7 * 54.598150033144236 + 0.15 * 2.718281828459045 + 0.15 * 20.085536923187668  # e^4, e, e^3
    assert ntire_score(costs(33.38, 8.35e9, 0.414e6), efdn) == pytest.approx(mixed)
    slow, free = costs(10.0**6, 1, 1), costs(1.0, 0, 0)
    assert 1e300 < ntire_score(slow, free) < float("inf")
    assert ntire_score(free, free) == pytest.approx(7.38905609893065)  # nothing is counted in either


def test_ntire_score_is_relative_to_the_first_network(monkeypatch):
    monkeypatch.setattr(efficiency, "extra_memory", lambda *args: 12.3)
    networks = {name: Body(body=nn.Conv2d(3, c, 3, padding=1)) for name, c in (("small", 3), ("large", 9))}
    result = cards(networks, size=(8, 8), run=Run(repeats=2))
    assert json.loads(json.dumps(result)) == result
    assert [c["ntire"]["baseline"] for c in result.values()] == ["small", "small"]
    assert result["small"]["ntire"]["score"] == pytest.approx(7.38905609893065)
    table = to_markdown(result)
    assert "lower is better" in table and "`small`, which has e^2 = 7.389" in table and "2504.10686" in table
    assert table.splitlines()[-2].endswith("| 7.389 |")
    assert "ntire" not in card(networks["small"], size=(8, 8), run=Run(repeats=2))
    other = cards({"large": networks["large"]}, size=(8, 8), run=Run(repeats=2))
    assert "NTIRE" not in to_markdown(result | other)


# --- the script ------------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location("benchmark_script", ROOT / "scripts" / "benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(efficiency, "extra_memory", lambda *args: 12.3)
    file = tmp_path / "cards.json"
    sr.save(sr.create_model("sparsesr_t", scale=2), tmp_path / "own.safetensors")
    names = ["sparsesr_t", 'spandrel:SAFMN:{"dim": 8, "n_blocks": 1}', str(tmp_path / "own.safetensors")]
    common = ["--threads", torch.get_num_threads(), "--repeats", 2]
    models = [part for name in names for part in ("-m", name)]
    arguments = [*common, "model", *models, "--size", "64x96", "--json", file]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    benchmark.main()
    result, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert list(result) == names
    assert [c["input"] for c in result.values()] == [[16, 24], [16, 24], [32, 48]]
    assert to_markdown(result) in shown and "Not counted" in shown
    assert re.search(r"\d ms \([\d.]+-[\d.]+\) \| 12 MiB \|", shown)


def test_script_knows_published_networks(benchmark):
    network = benchmark.find_network("spandrel:SAFMN", 4)
    assert sum(p.numel() for p in network.parameters()) == 239_520


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparsesr_q", "random weights: .*sparsesr_t"),
        ("spandrel:SAFMN:{dim", "not JSON"),
        ("spandrel:Nothing", "no architecture"),
    ],
)
def test_script_says_what_is_wrong(benchmark, name, message):
    with pytest.raises(SRError, match=message):
        benchmark.find_network(name, 4)


def test_script_ends_without_a_traceback():
    command = [sys.executable, "scripts/benchmark.py", "model", "-m", "sparsesr_t", "--device", "toaster"]
    run = subprocess.run([*command, "--size", "8x8"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and "toaster" in run.stderr and "Traceback" not in run.stderr
