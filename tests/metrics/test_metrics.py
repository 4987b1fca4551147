"""PSNR and SSIM against MATLAB's values, an independent implementation, and across batches and processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.ndimage import correlate
from torch import Tensor, nn

from sr.color import rgb_to_y
from sr.errors import SRError
from sr.metrics import PSNR, SSIM, psnr, psnr_and_ssim, ssim

PAIRS = [(PSNR, psnr), (SSIM, ssim)]


def golden() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parents[1] / "golden" / "matlab_protocol.npz"))


def nchw(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.transpose(2, 0, 1).copy())[None]


def pictures(n: int, channels: int = 3, height: int = 17, width: int = 14, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of very different quality, predictions partly outside [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    gt = torch.rand(n, channels, height, width, generator=generator)
    noise = torch.randn(n, channels, height, width, generator=generator)
    return gt + noise * torch.logspace(-2, -0.5, n).view(-1, 1, 1, 1), gt


def reference(
    sr: Tensor,
    gt: Tensor,
    crop_border: int,
    test_y_channel: bool = True,
    full_range: bool = False,
    rounded: bool = True,
) -> tuple[float, float]:
    """One pair, (C, H, W), in NumPy and SciPy: the 2-D window of the paper, five moments, no shortcuts."""
    planes = []
    for x in (sr, gt):
        a = np.clip(x.numpy().astype(np.float64), 0, 1) * 255
        a = np.floor(a + 0.5) if rounded else a
        a = a[:, crop_border : a.shape[1] - crop_border, crop_border : a.shape[2] - crop_border]
        if test_y_channel:
            r, g, b = a if len(a) == 3 else (a[0],) * 3
            studio, full = 16 + (65.481 * r + 128.553 * g + 24.966 * b) / 255, 0.299 * r + 0.587 * g + 0.114 * b
            a = (full if full_range else studio)[None]
        planes.append(a)
    psnr_value = 10 * np.log10(255**2 / np.mean((planes[0] - planes[1]) ** 2))

    axis = np.arange(11) - 5
    window = np.exp(-(axis[:, None] ** 2 + axis[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()

    def mean(x: np.ndarray) -> np.ndarray:
        return correlate(x, window)[5:-5, 5:-5]

    values = []
    for a, b in zip(*planes, strict=True):
        mu_a, mu_b = mean(a), mean(b)
        var_a, var_b, cov = mean(a * a) - mu_a**2, mean(b * b) - mu_b**2, mean(a * b) - mu_a * mu_b
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        ratio = (2 * mu_a * mu_b + c1) * (2 * cov + c2) / ((mu_a**2 + mu_b**2 + c1) * (var_a + var_b + c2))
        values.append(ratio.mean())
    return float(psnr_value), float(np.mean(values))


@pytest.mark.parametrize("crop", [0, 3, 4])
@pytest.mark.parametrize("as_float", [False, True])
def test_equals_matlab(crop, as_float):
    values = golden()
    sr, gt = nchw(values["metric_sr"]), nchw(values["photo"])
    if as_float:
        sr, gt = sr / 255, gt / 255
    assert psnr(sr, gt, crop_border=crop).item() == pytest.approx(values[f"metric_psnr_y_crop{crop}"], abs=1e-6)
    assert ssim(sr, gt, crop_border=crop).item() == pytest.approx(values[f"metric_ssim_y_crop{crop}"], abs=1e-7)


@pytest.mark.parametrize("test_y_channel", [True, False])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 23, 16), (1, 17, 31), (3, 15, 15)])
@pytest.mark.parametrize("crop", [0, 2])
def test_equals_an_independent_implementation(channels, height, width, crop, test_y_channel):
    sr, gt = pictures(3, channels, height, width)
    kwargs = {"crop_border": crop, "test_y_channel": test_y_channel}
    expected = [reference(s, g, crop, test_y_channel) for s, g in zip(sr, gt, strict=True)]
    for function, column in zip((psnr, ssim), zip(*expected, strict=True), strict=True):
        result = function(sr, gt, **kwargs)
        assert result.dtype == torch.float64
        np.testing.assert_allclose(result.numpy(), column, rtol=0, atol=1e-10)


def test_50_random_pairs_equal_an_independent_implementation():
    rng = np.random.default_rng(0)
    for i in range(50):
        channels, height, width = (1, 3)[i % 2], *(int(n) for n in rng.integers(20, 140, 2))
        sr, gt = pictures(1, channels, height, width, seed=i)
        how = {
            "crop_border": int(rng.integers(0, 5)),
            "test_y_channel": bool(rng.integers(2)),
            "full_range": bool(rng.integers(2)),
            "rounded": bool(rng.integers(2)),
        }
        expected = reference(sr[0], gt[0], **how)
        both = psnr_and_ssim(sr, gt, **how)
        assert torch.equal(both[0], psnr(sr, gt, **how)) and torch.equal(both[1], ssim(sr, gt, **how))
        assert both[0].item() == pytest.approx(expected[0], abs=1e-6)
        assert both[1].item() == pytest.approx(expected[1], abs=1e-7)


def test_luma_is_that_of_the_colour_module():
    sr, gt = pictures(2)
    y = [rgb_to_y(x.clamp(0, 1).double()) for x in (sr, gt)]
    plain = {"test_y_channel": False, "rounded": False}
    torch.testing.assert_close(psnr(sr, gt, rounded=False), psnr(*y, **plain), rtol=0, atol=1e-9)


def test_flat_pictures_lose_no_digits():
    """Where the variance is zero, a product's rounding error is all that is left of it."""
    gt = torch.full((1, 3, 40, 200), 255, dtype=torch.uint8)
    gt[..., 100:] = 0
    sr = gt.clone()
    sr[..., 20, 150] = 9
    sr[..., 20, 20] = 250
    expected = reference(sr[0] / 255, gt[0] / 255, 0)
    assert ssim(sr, gt).item() == pytest.approx(expected[1], abs=1e-9)


def test_known_values():
    gt = torch.full((1, 3, 12, 12), 100, dtype=torch.uint8)
    off_by_one = psnr(gt + 1, gt, test_y_channel=False)
    torch.testing.assert_close(off_by_one, torch.tensor([48.1308036], dtype=torch.float64), rtol=0, atol=1e-7)
    # one grey step is 219/255 of a step of Y
    torch.testing.assert_close(psnr(gt + 1, gt), off_by_one + 20 * np.log10(255 / 219), rtol=0, atol=1e-9)


def test_predictions_are_clamped_and_rounded_to_8_bits():
    sr, gt = pictures(2)
    rounded = sr.clamp(0, 1).mul(255).add(0.5).floor().to(torch.uint8)
    for function in (psnr, ssim):
        assert torch.equal(function(sr, gt), function(rounded, gt))
    whole = gt.mul(255).floor()
    assert psnr((whole + 0.49) / 255, whole / 255).isinf().all()
    assert psnr((whole + 0.51) / 255, whole / 255).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_predictions_of_any_float_type(dtype):
    sr, gt = pictures(2)
    for function in (psnr, ssim):
        assert torch.equal(function(sr.to(dtype), gt), function(sr.to(dtype).double(), gt))


@pytest.mark.parametrize("function", [psnr, ssim])
def test_a_prediction_with_a_gradient_is_only_looked_at(function):
    sr, gt = pictures(1)
    value = function(sr.requires_grad_(), gt, rounded=False)
    assert not value.requires_grad
    assert torch.equal(value, function(sr.detach(), gt, rounded=False))


def test_the_input_is_left_alone():
    sr, gt = (x.double() for x in pictures(2))
    before = sr.clone(), gt.clone()
    psnr(sr, gt, test_y_channel=False)
    ssim(sr, gt, test_y_channel=False)
    assert torch.equal(sr, before[0])
    assert torch.equal(gt, before[1])


def test_identical_pictures():
    gt = pictures(2)[1]
    assert psnr(gt, gt).isposinf().all()
    torch.testing.assert_close(ssim(gt, gt), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 20), (6, 11), (10, 3)])
def test_pictures_smaller_than_the_ssim_window(height, width):
    sr, gt = pictures(3, 3, height, width)
    values = ssim(sr, gt)
    assert values.isfinite().all()
    assert (values < 1).all()
    torch.testing.assert_close(ssim(gt, gt), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("function", [psnr, ssim])
def test_mistakes_are_explained(function):
    sr, gt = pictures(1)
    with pytest.raises(SRError, match=r"\(1, 3, 17, 13\) and \(1, 3, 17, 14\)"):
        function(sr[..., 1:], gt)
    with pytest.raises(SRError, match=r"\(3, 17, 14\)"):
        function(sr[0], gt[0])
    with pytest.raises(SRError, match=r"\(1, 2, 17, 14\)"):
        function(sr[:, :2], gt[:, :2])
    for dtype in (torch.int64, torch.int16, torch.bool):
        with pytest.raises(SRError, match=str(dtype)):
            function(sr.to(dtype), gt)
        with pytest.raises(SRError, match=f"ground truth.*{dtype}"):
            function(sr, gt.to(dtype))
    for crop in (7, 8, -1):
        with pytest.raises(SRError, match=f"crop_border {crop} .* 17 x 14"):
            function(sr, gt, crop_border=crop)


@pytest.mark.parametrize("function", [psnr, ssim])
def test_wrong_ranges_are_refused(function):
    sr, gt = pictures(2)
    with pytest.raises(SRError, match=r"ground truth must be in \[0, 1\]"):
        function(sr, gt * 255)
    with pytest.raises(SRError, match="ground truth must be"):
        function(sr, gt * 2 - 1)
    with pytest.raises(SRError, match=r"prediction must be.*255"):
        function(sr.clamp(0, 1) * 255, gt)
    with pytest.raises(SRError, match="prediction must be"):
        function(torch.stack([sr[0], gt[1] * 255]), gt)  # one of a batch is enough
    # a network that diverges is measured, not refused
    assert function(sr * 1e6, gt).isfinite().all()
    assert function(sr - 5, gt).isfinite().all()


@pytest.mark.parametrize(("cls", "function"), PAIRS)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_class_is_the_mean_of_the_function_for_any_batch_size(cls, function, batch):
    sr, gt = pictures(5)
    kwargs = {"crop_border": 1, "test_y_channel": False, "rounded": False}
    metric = cls(**kwargs)
    for s, g in zip(sr.split(batch), gt.split(batch), strict=True):
        metric.update(s, g)
    expected = function(sr, gt, **kwargs).mean()
    assert metric.compute().dtype == torch.float64
    torch.testing.assert_close(metric.compute(), expected, rtol=0, atol=1e-12)
    metric.reset()
    torch.testing.assert_close(metric(sr, gt), expected, rtol=0, atol=1e-12)
    assert metric.count == 5


def test_psnr_is_not_pooled():
    sr, gt = pictures(4)
    metric = PSNR()
    metric.update(sr, gt)
    pooled = -10 * torch.log10((10 ** (-psnr(sr, gt) / 10)).mean())
    assert metric.compute() > pooled + 3
    torch.testing.assert_close(metric.compute(), psnr(sr, gt).mean(), rtol=0, atol=1e-12)


def test_infinite_values_are_counted_not_averaged():
    sr, gt = pictures(3)
    metric = PSNR()
    metric.update(gt, gt)
    assert metric.compute().isposinf()
    assert (metric.count, metric.identical) == (0, 3)
    metric.update(sr, gt)
    torch.testing.assert_close(metric.compute(), psnr(sr, gt).mean(), rtol=0, atol=1e-12)
    assert (metric.count, metric.identical) == (3, 3)
    metric.reset()
    assert (metric.count, metric.identical, metric.total) == (0, 0, 0)


@pytest.mark.parametrize(("cls", "function"), PAIRS)
def test_any_mix_of_sizes_in_any_order(cls, function):
    batches = [pictures(n, 3, 20 + n, 30 - 3 * n, seed=n) for n in (1, 2, 3)]
    expected = torch.cat([function(sr, gt) for sr, gt in batches]).mean()
    for order in ((0, 1, 2), (2, 0, 1)):
        metric = cls()
        for i in order:
            metric.update(*batches[i])
        torch.testing.assert_close(metric.compute(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [PSNR, SSIM])
def test_no_picture_gives_nan(cls):
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert cls().compute().isnan()


@pytest.mark.parametrize("cls", [PSNR, SSIM])
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.float(),
        lambda m: m.type(torch.float32),
    ],
)
def test_states_stay_float64_inside_a_converted_module(cls, convert):
    sr, gt = pictures(3)
    module = nn.ModuleDict({"metric": cls()})
    metric = module["metric"]
    metric.update(sr, gt)
    expected = metric.compute()
    convert(module)
    assert torch.equal(metric.compute(), expected)
    metric.set_dtype(torch.float16)
    assert metric.compute().dtype == torch.float64
    metric.reset()
    metric.update(sr, gt)
    assert torch.equal(metric.compute(), expected)


@pytest.mark.parametrize("cls", [PSNR, SSIM])
def test_base_class_options_and_copies(cls):
    sr, gt = pictures(2)
    metric = cls(crop_border=2, compute_on_cpu=True)
    metric.update(sr, gt)
    assert torch.equal(metric.clone().compute(), metric.compute())
    assert sum(p.numel() for p in metric.parameters()) == 0


def measure_in_one_process(rank: int, folder: str) -> None:
    """Rank 0 sees three pictures in two batches and a larger one, rank 1 two, one perfect; then rank 1 sees none."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        sr, gt = pictures(5)
        sr[4] = gt[4]
        parts = [[slice(0, 1), slice(1, 3)], [slice(3, 5)]]
        results = {}
        for cls in (PSNR, SSIM):
            metric = cls()
            for part in parts[rank]:
                metric.update(sr[part], gt[part])
            if rank == 0:
                metric.update(*pictures(1, 3, 30, 41))
            results[cls.__name__] = metric.compute()
            lonely = cls()
            if rank == 0:
                lonely.update(sr[:3], gt[:3])
            results[f"{cls.__name__}_lonely"] = lonely.compute()
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without torch.distributed")
def test_two_processes_give_what_one_gives(tmp_path):
    mp.spawn(measure_in_one_process, args=(str(tmp_path),), nprocs=2)
    sr, gt = pictures(5)
    sr[4] = gt[4]
    larger = pictures(1, 3, 30, 41)
    expected = {
        "PSNR": torch.cat((psnr(sr[:4], gt[:4]), psnr(*larger))).mean(),
        "SSIM": torch.cat((ssim(sr, gt), ssim(*larger))).mean(),
        "PSNR_lonely": psnr(sr[:3], gt[:3]).mean(),
        "SSIM_lonely": ssim(sr[:3], gt[:3]).mean(),
    }
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("y", [True, False])
def test_a_picture_with_nan_has_no_score_and_the_others_have_theirs(rounded, y):
    gt = torch.rand(2, 3, 24, 20, generator=torch.Generator().manual_seed(0))
    sr = (gt + 0.01).clamp(0, 1)
    scores = psnr_and_ssim(sr, gt, rounded=rounded, test_y_channel=y)
    sr[1, 2, 3, 4] = float("nan")
    for whole, now in zip(scores, psnr_and_ssim(sr, gt, rounded=rounded, test_y_channel=y), strict=True):
        assert now[0] == whole[0] and now[1].isnan()
