"""Recipes from YAML, how steps compose, sizes, and where randomness comes from."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser

from sr.degradations import (
    JPEG,
    Bicubic,
    Chain,
    Degradation,
    Draws,
    GaussianNoise,
    Halve,
    Pipeline,
    RandomChoice,
    RandomResize,
    Resize,
    ScaledBlur,
    ScaledShrink,
    Sharpen,
    Shuffle,
    Step,
)
from sr.errors import SRError
from sr.resize import imresize

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "degradations").glob("*.yaml"))
RANDOM = [path for path in RECIPES if path.stem != "bicubic"]


class Settings:
    """Stands for what takes a degradation in a config."""

    def __init__(self, degradation: Degradation | None = None) -> None:
        self.degradation = degradation


def load(path: Path) -> Degradation:
    parser = ArgumentParser()
    parser.add_class_arguments(Settings, "data", sub_configs=True)
    return parser.instantiate_classes(parser.parse_args([f"--data.degradation={path}"])).data.degradation


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(scale: int = 4, lq_size: tuple[int, int] = (8, 8), seed: int = 0) -> Draws:
    return Draws(rng(seed), torch.device("cpu"), scale, lq_size)


class Mark(Step):
    """Appends its name to a list; adds a value."""

    def __init__(self, name: str, log: list[str], value: float = 0.0) -> None:
        self.name, self.log, self.value = name, log, value

    def __call__(self, x: torch.Tensor, draws: Draws) -> torch.Tensor:
        self.log.append(self.name)
        return x + self.value


def test_there_are_recipes():
    assert [path.stem for path in RECIPES] == ["bicubic", "bsrgan", "real_esrgan"]


@pytest.mark.parametrize("scale", [2, 4])
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_make_lq_of_any_size(path, scale):
    recipe = load(path)
    for i, (height, width) in enumerate([(16, 24), (4, 4), (44, 20), (100, 36)]):
        gt = torch.rand(2, 3, height, width, generator=rng(i))
        for seed in range(5):
            lq, target = recipe(gt, scale, rng(seed))
            assert lq.shape == (2, 3, height // scale, width // scale) and lq.dtype == torch.float32
            assert target.shape == gt.shape and target.isfinite().all()
            assert torch.equal((lq * 255).round() / 255, lq) and lq.min() >= 0 and lq.max() <= 1


@pytest.mark.parametrize("path", RANDOM, ids=lambda p: p.stem)
def test_same_seed_same_pictures_whatever_happened_before(path):
    gt = torch.rand(4, 3, 32, 48, generator=rng())
    first = load(path)(gt, 4, rng(3))
    torch.rand(7)  # the global generator has no part in it
    recipe = pickle.loads(pickle.dumps(load(path)))
    recipe(gt, 2, rng(1))
    for a, b in zip(first, recipe(gt, 4, rng(3)), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], recipe(gt, 4, rng(4))[0])


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_leave_their_input_and_the_global_generator_alone(path):
    gt = torch.rand(3, 3, 24, 24, generator=rng())
    kept, state = gt.clone(), torch.get_rng_state()
    load(path)(gt.requires_grad_(), 4, rng())
    assert torch.equal(gt, kept) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("path", RANDOM, ids=lambda p: p.stem)
def test_pictures_of_a_batch_are_degraded_differently(path):
    gt = torch.rand(1, 3, 64, 64, generator=rng()).expand(6, 3, 64, 64)
    lq, _ = load(path)(gt, 4, rng())
    assert all(not torch.equal(lq[0], other) for other in lq[1:])


def test_real_esrgan_trains_towards_sharpened_pictures():
    gt = torch.rand(2, 3, 32, 32, generator=rng())
    _, target = load(RECIPES[-1])(gt, 4, rng())
    assert torch.equal(target, Sharpen(0.5, 50, 10)(gt)) and not torch.equal(target, gt)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_bicubic_is_matlabs_on_8_bit_pictures(scale):
    pixels = torch.randint(0, 256, (2, 3, 24, 36), dtype=torch.uint8, generator=rng())
    gt = pixels.float() / 255
    lq, target = Bicubic()(gt, scale, rng())
    assert torch.equal(lq, imresize(pixels, 1 / scale).float() / 255) and torch.equal(target, gt)


def test_final_resize_is_matlabs():
    gt = torch.rand(2, 3, 24, 36, generator=rng())
    lq, _ = Pipeline([Resize(["matlab"])])(gt, 3, rng())
    expected = (imresize(gt, 1 / 3).clamp(0, 1) * 255).round() / 255
    assert torch.equal(lq, expected)


@pytest.mark.parametrize("mode", ["area", "bilinear", "bicubic"])
def test_random_resize_is_pytorchs(mode):
    x = torch.rand(3, 3, 40, 30, generator=rng())
    result = RandomResize((0, 1, 0), (0.5, 1.5), [mode])(x, draws())
    assert 20 <= result.shape[2] < 40 and abs(result.shape[3] / 30 - result.shape[2] / 40) < 1 / 30
    assert torch.allclose(result, F.interpolate(x, size=result.shape[-2:], mode=mode), atol=1e-6)


def test_random_resize_draws_its_kinds_and_ranges():
    x = torch.rand(1, 3, 100, 100)
    step = RandomResize((0.2, 0.7, 0.1), (0.15, 1.5), ["bilinear"])
    run = draws()
    sizes = np.array([step(x, run).shape[-1] for _ in range(400)])
    assert (sizes > 100).mean() == pytest.approx(0.2, abs=0.07) and (sizes == 100).mean() > 0.05
    assert 15 <= sizes.min() < 20 and 140 < sizes.max() <= 150
    kept = RandomResize((0, 0, 1), (0.3, 1.2), ["area"], relative_to="lq")(x, draws(lq_size=(25, 30)))
    assert kept.shape[-2:] == (25, 30)


def test_random_choice_goes_by_its_probabilities_and_keeps_the_rest():
    x = torch.zeros(2000, 1, 1, 1)
    log: list[str] = []
    result = RandomChoice([Mark("a", log, 1.0), Mark("b", log, 2.0)], [0.5, 0.3])(x, draws()).flatten()
    for value, share in ((0, 0.2), (1, 0.5), (2, 0.3)):
        assert (result == value).float().mean() == pytest.approx(share, abs=0.05)
    assert log == ["a", "b"]
    certain = RandomChoice([Mark("a", log, 1.0)] * 6, [0.45, 0.25, 0.12, 0.03, 0.12, 0.03])
    assert certain(x, draws()).eq(1).all()


def test_random_choice_refuses_different_sizes():
    step = RandomChoice([Chain([]), Resize(["area"])], [0.5, 0.5])
    with pytest.raises(SRError, match="different sizes"):
        step(torch.rand(20, 3, 32, 32), draws())


def test_shuffle_keeps_the_order_it_is_told():
    orders = set()
    run = draws()
    for _ in range(200):
        log: list[str] = []
        Shuffle([Mark(name, log) for name in "abcd"], in_order=[3, 1])(torch.zeros(1, 1, 1, 1), run)
        assert sorted(log) == list("abcd") and log.index("b") < log.index("d")
        orders.add("".join(log))
    assert len(orders) == 12  # half of 4!


def test_halve_leads_to_scale_2_and_only_from_scale_4():
    step = Halve(1.0, ["area"])
    run = draws(4, (8, 6))
    x = torch.rand(2, 3, 32, 24)
    assert torch.allclose(step(x, run), F.avg_pool2d(x, 2), atol=1e-6) and run.scale == 2
    run = draws(2, (16, 12))
    assert step(x, run) is x and run.scale == 2


def test_scaled_shrink_divides_by_up_to_twice_the_scale():
    step = ScaledShrink(0.0, (1, 2), ["area"], (0.1, 0.6), 25)
    run = draws(4, (16, 16))
    sizes = [step(torch.rand(1, 3, 64, 64), run).shape[-1] for _ in range(200)]
    assert 8 <= min(sizes) < 10 and 55 < max(sizes) <= 64


def test_subsampling_keeps_gradients_in_place_and_blurs():
    step = ScaledShrink(1.0, (1, 2), ["area"], (0.1, 0.6), 25)
    ramp = torch.arange(64.0).expand(2, 3, 64, 64) / 64
    result = step(ramp, draws(4, (16, 16)))
    expected = (torch.arange(16) * 4 + 1.5) / 64  # the centre of each 4 pixels
    assert torch.allclose(result[..., 3:-3], expected[3:-3].expand_as(result[..., 3:-3]), atol=1e-5)
    noise = torch.rand(2, 3, 64, 64, generator=rng())
    assert step(noise, draws(4, (16, 16))).std() < noise.std()


def test_scaled_blur_grows_with_the_scale():
    point = torch.zeros(200, 3, 51, 51)
    point[..., 25, 25] = 1
    t = torch.arange(51.0) - 25
    for aniso, limit in ((0.0, lambda s: (2 + 0.2 * s) ** 2), (1.0, lambda s: 4 + s)):
        for scale in (2, 4):
            spread = ScaledBlur(aniso, (2, 0.2), (4, 1), (25, 25))(point, draws(scale))
            variance = (spread[:, 0].sum(1) * t.square()).sum(1)
            assert 0.8 * limit(scale) < variance.max() < 1.01 * limit(scale)
            assert variance.min() < 0.5


def test_steps_that_forget_the_final_size_are_named():
    with pytest.raises(SRError, match=r"add sr\.degradations\.Resize"):
        Pipeline([GaussianNoise((1, 2), 0.4)])(torch.rand(1, 3, 8, 8), 2, rng())


@pytest.mark.parametrize(
    ("gt", "scale", "message"),
    [
        (torch.rand(3, 8, 8), 2, "float pictures"),
        (torch.rand(1, 1, 8, 8), 2, "float pictures"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 2, "float pictures"),
        (torch.rand(1, 3, 8, 9), 2, "8 x 9 cannot become LQ at scale 2"),
    ],
)
def test_wrong_batches_are_refused(gt, scale, message):
    with pytest.raises(SRError, match=message):
        Bicubic()(gt, scale, rng())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomChoice([JPEG((30, 95))], [0.5, 0.5]), "1 steps and 2 probabilities"),
        (lambda: RandomChoice([JPEG((30, 95))], [1.5]), "at most 1"),
        (lambda: Shuffle([JPEG((30, 95))], [1]), "positions from 0 to 0"),
        (lambda: RandomResize((0.2, 0.7, 0.2), (0.5, 2), ["area"]), "add up to 1"),
        (lambda: RandomResize((0.2, 0.7, 0.1), (0.5, 0.9), ["area"]), "contain 1"),
        (lambda: Resize([]), "one or more of"),
        (lambda: ScaledShrink(0.2, (1, 2), ["area"], (0.1, 0.6), 24), "odd"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(SRError, match=message):
        make()
