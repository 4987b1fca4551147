"""Tiles: where they lie, that nobody sees them, and what happens when memory or precision do not suffice."""

from pathlib import Path

import pytest
import torch
from torch import nn
from upscaling import Nearest

import sr
from sr.inference import memory
from sr.inference.memory import available_memory, bytes_per_pixel
from sr.inference.runner import TileRunner, eight_views, find_margin, keep_color
from sr.inference.tiling import (
    Halving,
    Margin,
    fitting_tile,
    is_out_of_memory,
    spans,
    upscale_rows,
    upscale_tiled,
)
from sr.rows import RowWindow

CPU = torch.device("cpu")


class Far(Nearest):
    """Adds what lies ``distance`` pixels to the right, and says nothing about it."""

    receptive_field = None

    def __init__(self, *, distance: int = 20, scale: int = 2) -> None:
        super().__init__(scale=scale)
        self.distance = distance

    def upscale(self, lq):
        moved = nn.functional.pad(lq, (0, self.distance))[..., self.distance :]
        return super().upscale(lq + moved)


class Mean(Nearest):
    """Adds the mean of the whole picture."""

    receptive_field = None

    def upscale(self, lq):
        return super().upscale(lq + lq.mean((2, 3), keepdim=True))


# --- where tiles lie


@pytest.mark.parametrize("size", [1, 7, 64, 65, 129, 500, 5000])
@pytest.mark.parametrize("tile", [1, 8, 64, 100, None])
@pytest.mark.parametrize(
    "margin", [Margin(0), Margin(5), Margin(16, 8), Margin(24, 8, exact=False), Margin(9, 3, False)]
)
@pytest.mark.parametrize("equal", [False, True])
def test_weights_are_positive_and_add_up_to_one(size, tile, margin, equal):
    scale, total = 2, torch.zeros(2 * size)
    found = spans(size, tile, margin, equal)
    for span in found:
        weight = span.weight(scale, torch.zeros(1))
        assert (weight > 0).all()
        total[span.start * scale : span.stop * scale] += weight
        assert 0 <= span.first <= span.start < span.stop <= span.end <= size
        assert span.first % margin.multiple == 0
        beyond = margin.halo - margin.overlap  # the least that lies between what is written and what is not read
        assert span.first == 0 or span.start - span.first >= beyond
        assert span.end == size or span.end - span.stop >= beyond
    torch.testing.assert_close(total, torch.ones(2 * size))
    if equal and len(found) > 1:
        assert len({-(-(span.end - span.first) // margin.multiple) for span in found}) == 1


def test_no_tile_is_larger_than_asked_for():
    assert max(s.stop - s.start for s in spans(1000, 100, Margin(8, 8))) <= 104
    assert len(spans(129, 64, Margin(0))) == 3
    assert {s.stop - s.start for s in spans(129, 64, Margin(0))} == {43}  # and not 64, 64 and 1


def test_the_largest_fitting_tile():
    assert fitting_tile(400 * 400, 10_000, Margin(72, 8)) == (256, 256)
    assert fitting_tile(10, 10_000, Margin(72, 8)) == (64, 64)  # never so small that margins are all there is
    height, width = fitting_tile(400 * 400, 100, Margin(72, 8))
    assert height == 96 and width > 256 and (height + 144) * (width + 144) <= 400 * 400


# --- nobody sees them


@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("tile", [1, 5, 8, 64])
def test_tiles_of_an_identity_network_are_exact(multiple_of, tile):
    x = torch.rand(2, 3, 13, 22)
    assert torch.equal(upscale_tiled(Nearest(multiple_of=multiple_of), x, tile), Nearest()(x))


@pytest.mark.parametrize("size", [(100, 77), (30, 140)])
def test_tiles_of_a_trained_network_cannot_be_told_from_the_whole(size):
    torch.manual_seed(0)
    network = sr.create_model("sparsesr_t", scale=2).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
        x = torch.rand(1, 3, *size)
        whole = network(x)
        torch.testing.assert_close(upscale_tiled(network, x, 24), whole, atol=1e-4, rtol=0)


def test_a_network_without_a_receptive_field_fades_from_tile_to_tile():
    """A ramp of brightness: each tile adds another mean, and the steps between tiles become slopes."""
    ramp = torch.linspace(0, 1, 256).expand(1, 3, 64, 256)
    out = upscale_tiled(Mean(scale=1), ramp, 64)[0, 0, 32]
    slope = ramp[0, 0, 0].diff().max()
    jumps = out.diff()
    means = upscale_tiled(Mean(scale=1), ramp[..., :64], None).mean()
    assert means < 0.5 < out.max()
    assert jumps.abs().max() < 3 * slope + 0.25 / 32  # 64 pixels further the mean has grown by 0.25, over 32 pixels


def test_nonsense_tile_is_refused():
    with pytest.raises(sr.SRError, match="at least 1 pixel"):
        upscale_tiled(Nearest(), torch.rand(1, 3, 4, 4), 0)


@pytest.mark.parametrize("heights", [[1] * 50, [50], [7, 40, 3]])
def test_rows_of_tiles_need_the_picture_in_parts_only(heights):
    x = torch.rand(1, 3, 50, 30)
    margin = Margin(8, exact=False)
    layout = [spans(n, 16, margin) for n in x.shape[-2:]]
    count = []
    parts = upscale_rows(iter(x.split(heights, -2)), *layout, Nearest(), 2, lambda: count.append(1))
    torch.testing.assert_close(torch.cat(list(parts), -2), Nearest()(x))
    assert len(count) == len(layout[0]) * len(layout[1])


@pytest.mark.parametrize("tile", [8, 64])
def test_rows_come_back_to_the_device_of_the_picture(tile):
    """The device ``meta`` stands in for a GPU: nothing can be fetched from it, but a copy from it is asked for."""
    layout = [spans(n, tile, Margin(0)) for n in (20, 30)]
    rows = upscale_rows(iter([torch.rand(1, 3, 20, 30)]), *layout, lambda x: Nearest()(x).to("meta"), 2, lambda: None)
    with pytest.raises(NotImplementedError, match="meta"):
        next(rows)


def test_rows_that_were_handed_on_are_not_written_to_again():
    """Kept by whoever takes them, while later rows of tiles of other heights are made; also across inference mode."""
    x = torch.rand(1, 3, 50, 20)
    layout = [spans(n, 16, Margin(8, exact=False)) for n in x.shape[-2:]]
    rows = upscale_rows(iter([x]), *layout, Nearest(), 2, lambda: None)
    with torch.inference_mode():
        first = next(rows)
        copy = first.clone()
    parts = [first, *rows]
    assert torch.equal(first, copy)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == len(parts) > 3
    torch.testing.assert_close(torch.cat(parts, -2), Nearest()(x))


def test_a_window_forgets_rows():
    taken = []

    def parts():
        for i in range(10):
            taken.append(i)
            yield torch.full((1, 2, 3), float(i))

    window = RowWindow(parts())
    assert window.get(0, 3)[0, :, 0].tolist() == [0, 0, 1]
    assert taken == [0, 1]
    assert window.get(9, 12)[0, :, 0].tolist() == [4, 5, 5]
    assert sum(part.shape[-2] for part in window._kept) == 4
    assert window.get(10, 12)[0, :, 0].tolist() == [5, 5]


@pytest.mark.parametrize("width", [3, 1 << 18])  # in the heap, and apart from it
def test_a_window_that_moves_in_steps_does_not_grow(width):
    """Each time it overlaps what it showed before, as rows of tiles with their margins do."""
    rows = (torch.full((1, 5, width), float(y // 5)) for y in range(0, 200, 5))
    window = RowWindow(rows)
    for top in range(0, 180, 10):
        shown = window.get(top, top + 18)
        assert shown[0, :, 0].tolist() == [y // 5 for y in range(top, top + 18)]
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in window._kept}
        assert sum(storages.values()) <= (18 + 5) * width * 4


# --- margins


@pytest.mark.parametrize(("distance", "halo"), [(5, 16), (20, 24), (60, 64)])
def test_a_margin_that_suffices_is_found(distance, halo):
    margin = find_margin(Far(distance=distance), CPU)
    assert margin == Margin(halo + 8, 8, exact=True)
    x = torch.rand(1, 3, 130, 150)
    layout = [spans(n, 64, margin) for n in x.shape[-2:]]
    tiled = torch.cat(list(upscale_rows(iter([x]), *layout, Far(distance=distance), 2, lambda: None)), -2)
    assert torch.equal(tiled, Far(distance=distance)(x))


def test_a_network_that_sees_everything_gets_overlapping_tiles():
    assert not find_margin(Mean(), CPU).exact
    assert not find_margin(Far(distance=70), CPU).exact


def test_a_declared_receptive_field_is_taken():
    assert find_margin(Nearest(multiple_of=4), CPU) == Margin(0, 4)
    assert find_margin(sr.create_model("sparsesr_s", scale=2), CPU) == Margin(72, 8)


# --- memory


@pytest.mark.parametrize(("message", "kind"), [("CUDA out of memory", torch.OutOfMemoryError), ("", RuntimeError)])
def test_where_memory_does_not_suffice_tiles_are_halved(message, kind):
    tried = []

    def run(x):
        tried.append(x.shape[-2] * x.shape[-1])
        if tried[-1] > 1500:
            raise kind(message or "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")
        return Far(distance=5)(x)

    x = torch.rand(1, 3, 96, 80)
    halving = Halving(run, 2, lambda: Margin(8, 4))
    assert torch.equal(halving(x), Far(distance=5)(x))
    failed = [n for n in tried if n > 1500]
    assert failed == sorted(set(failed), reverse=True)  # no size is tried again once it failed


def test_halves_fade_into_each_other_where_a_margin_cannot_hold_all_that_is_seen():
    """A network that adds the mean of what it is given, as those with means over the picture do."""

    def network(x):
        return x.repeat_interleave(2, -2).repeat_interleave(2, -1) * 0 + x.mean()

    def run(x):
        if x.shape[-2] * x.shape[-1] > 1500:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")
        return network(x)

    x = torch.linspace(0, 1, 96).expand(1, 3, 24, 96)
    out = Halving(run, 2, lambda: Margin(8, 4, exact=False))(x)
    assert out.shape == (1, 3, 48, 192)
    assert out[..., 0].mean() < 0.3 and out[..., -1].mean() > 0.7
    steps = out[0, 0, 0].diff().abs()
    assert steps.max() < 0.05  # cut without a fade, the step would be a third


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "unable to find an engine to execute this",
    ],
)
def test_libraries_say_in_other_words_that_memory_is_short(message):
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_what_files_left_in_memory_counts_as_free(tmp_path, monkeypatch):
    numbers = {
        "memory.max": "1000",
        "memory.current": "900",
        "memory.stat": "anon 200\nactive_file 300\ninactive_file 350\n",
    }
    for name, text in numbers.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(memory, "_system_memory", lambda: 5000)
    assert available_memory(CPU) == 1000 - (900 - 650)


def test_memory_that_suffices_for_nothing_is_an_error_and_others_pass():
    def run(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(sr.SRError, match="out of memory even for a tile"):
        Halving(run, 2, lambda: Margin(8))(torch.rand(1, 3, 64, 64))
    with pytest.raises(RuntimeError, match="broken"):
        Halving(lambda x: (_ for _ in ()).throw(RuntimeError("broken")), 2, lambda: Margin(8))(torch.rand(1, 3, 64, 64))


def test_memory_for_a_pixel_is_that_of_the_tensors_alive_at_once():
    def run(x):  # 6, then 12, then 24 floats, of which two are alive at once
        a = torch.cat((x, x), 1)
        b = torch.cat((a, a), 1)
        del a
        return torch.cat((b, b), 1)

    assert bytes_per_pixel(run) == pytest.approx(1.5 * 4 * (12 + 24), rel=0.01)


def test_some_memory_is_available():
    assert 1 << 20 < available_memory(CPU) < 1 << 50


# --- one tile


class Overflow(Nearest):
    """Overflows where it computes in a narrow type; ``broken``: everywhere."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(scale=1)
        self.broken = broken

    def upscale(self, lq):
        narrow = torch.is_autocast_enabled("cpu")
        return lq / 0 if self.broken or narrow else lq


def test_a_tile_that_overflows_is_computed_again_in_float32():
    x = torch.rand(1, 3, 8, 8)
    assert torch.equal(TileRunner(Overflow(), CPU, torch.bfloat16)(x), x)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(sr.SRError, match=r"NaN.*float32"):
            TileRunner(Overflow(broken=True), CPU, dtype)(x)


def test_eight_views_are_averaged_with_each_turned_back():
    x = torch.rand(1, 3, 7, 10)
    torch.testing.assert_close(eight_views(Nearest(), x, multiple=4), Nearest()(x))
    # What a network adds on one side only is spread over all four.
    shift = Far(distance=1, scale=1)
    expected = (
        x
        + sum(
            nn.functional.pad(x, pad)[..., rows, columns]
            for pad, rows, columns in (
                ((0, 1, 0, 0), slice(None), slice(1, None)),
                ((1, 0, 0, 0), slice(None), slice(-1)),
                ((0, 0, 0, 1), slice(1, None), slice(None)),
                ((0, 0, 1, 0), slice(-1), slice(None)),
            )
        )
        / 4
    )
    torch.testing.assert_close(eight_views(shift, x), expected)


def test_colours_that_drift_are_corrected():
    lq = torch.rand(1, 3, 96, 96)
    sr_ = Nearest()(lq)
    drift = torch.linspace(-0.1, 0.1, 192).view(1, 1, 1, -1) + torch.tensor([0.05, 0, -0.02]).view(1, 3, 1, 1)
    means = nn.functional.avg_pool2d(keep_color(lq, sr_ + drift, 2), 64)
    before = nn.functional.avg_pool2d(sr_ + drift, 64)
    expected = nn.functional.avg_pool2d(lq, 32)
    assert (before - expected).abs().max() > 0.1
    assert (means - expected).abs().max() < 0.006  # at the border the blur is not symmetric
    torch.testing.assert_close(keep_color(lq, sr_, 2), sr_, atol=1e-6, rtol=0)  # nothing to correct
