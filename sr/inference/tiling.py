"""Tiles: where they lie, how they are joined, and rows of tiles of a picture that need not be in memory.

A tile is computed with a margin, the halo, that is cut off again. Where a halo can hold all that a network sees, tiles
change nothing but rounding. Where it cannot, neighbours overlap and fade into each other, so that there is no seam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sr.errors import SRError
from sr.inference.memory import give_back_memory
from sr.network import SRNetwork
from sr.rows import RowWindow, empty_apart

# Halo, in input pixels, for a network that does not say how far it looks.
_DEFAULT_HALO = 32
_TOO_LITTLE = (
    "not enough memory",
    "DefaultCPUAllocator",
    "out of memory",  # CUDA and MPS
    "ALLOC_FAILED",  # cuBLAS and cuDNN
    "unable to find an engine",  # cuDNN, whose engines all need more
)
_SMALLEST = 16  # edge, in input pixels, below which a tile is not halved again when memory runs out

# Of the result that are handed on at a time, at most: what is done to them needs memory as well.
_PIECE_ROWS, _PIECE_BYTES = 64, 1 << 24

Run = Callable[[Tensor], Tensor]


class Margin(NamedTuple):
    """What surrounds a tile, in input pixels.

    Attributes:
        halo: pixels computed beyond the tile's edge; a multiple of ``multiple``.
        multiple: tiles begin at multiples of this.
        exact: the halo holds all that the network sees; else tiles overlap by half of it on either side of an edge.
    """

    halo: int
    multiple: int = 1
    exact: bool = True

    @property
    def overlap(self) -> int:
        return 0 if self.exact else self.halo // 2


class Span(NamedTuple):
    """One tile along one axis, in input pixels: it writes [start, stop) and reads [first, end)."""

    start: int
    stop: int
    first: int
    end: int
    fade_in: int  # pixels shared with the tile before, and with the one behind
    fade_out: int

    def weight(self, scale: int, like: Tensor) -> Tensor:
        """Of each output pixel, ((stop - start) * scale,), above 0; those of all tiles add up to 1."""
        weight = like.new_ones((self.stop - self.start) * scale)
        rising, falling = (
            (torch.arange(n * scale, device=like.device, dtype=like.dtype) + 0.5) / (n * scale or 1)
            for n in (self.fade_in, self.fade_out)
        )
        weight[: len(rising)] = rising
        weight[len(weight) - len(falling) :] = falling.flip(0)
        return weight


def spans(size: int, tile: int | None, margin: Margin, equal: bool = False) -> list[Span]:
    """Tiles along an edge of ``size`` pixels: as few as possible, of about the same length.

    Args:
        size: at least 1.
        tile: the most that one tile covers, without its margin, rounded up to ``margin.multiple``; ``None``: all.
        margin: what surrounds them.
        equal: all read the same number of pixels (but for the last one, which may end up to ``margin.multiple``
            pixels earlier, where the network's own padding begins).

    Raises:
        SRError: ``tile`` is below 1.
    """
    if tile is not None and tile < 1:
        raise SRError(f"a tile is at least 1 pixel wide (0: no tiles), not {tile}")
    if tile is None or size <= tile:
        return [Span(0, size, 0, size, 0, 0)]
    halo, multiple = margin.halo, margin.multiple
    count = -(-size // round_up(tile, multiple))
    step = round_up(-(-size // count), multiple)
    cores = [(a, min(a + step, size)) for a in range(0, size, step)]
    lengths = [b - a for a, b in cores]
    # A tile in the middle fades on both sides.
    fades = [
        min(margin.overlap, lengths[i] // 2, lengths[i + 1] // (1 if i + 2 == len(cores) else 2))
        for i in range(len(cores) - 1)
    ]
    padded = round_up(size, multiple)
    most = min(step + 2 * halo, padded)
    result = []
    for (a, b), before, behind in zip(cores, [0, *fades], [*fades, 0], strict=True):
        first, end = max(0, a - halo), min(size, b + halo)
        if equal:
            first = min(first, padded - most)
            end = min(first + most, size)
        result.append(Span(a - before, b + behind, first, end, 2 * before, 2 * behind))
    return result


def fitting_tile(pixels: float, rows: int, margin: Margin) -> tuple[int, int]:
    """Height and width of the largest tile within limits, square if it can be; each from 64 to 2048.

    Args:
        pixels: the most that a tile has, its margin included.
        rows: the most rows that it has, without its margin. What a flat tile lacks in height it has in width.
        margin: what surrounds it.
    """

    def edge(length: float) -> int:
        return max(round_up(64, margin.multiple), min(2048, int(length)) // margin.multiple * margin.multiple)

    square = edge(math.sqrt(pixels) - 2 * margin.halo)
    height = min(square, edge(rows))
    return height, square if height == square else edge(pixels / (height + 2 * margin.halo) - 2 * margin.halo)


def upscale_rows(
    parts: Iterator[Tensor], rows: list[Span], columns: list[Span], run: Run, scale: int, done: Callable[[], None]
) -> Iterator[Tensor]:
    """Enlarge a picture that comes and goes in rows, one row of tiles at a time.

    Args:
        parts: the picture in parts (N, C, h, W).
        rows: tiles along the height.
        columns: tiles along the width.
        run: (N, C, h, W) -> (N, C, scale*h, scale*W).
        scale: output edge / input edge.
        done: called after each tile.

    Yields:
        (N, C, h, scale*W), on the device of ``parts``, at most 64 rows at a time.
    """
    window = RowWindow(parts)
    if len(rows) == len(columns) == 1:
        strip = window.get(rows[0].first, rows[0].end)
        whole = run(strip).to(strip.device)
        done()
        yield from whole.split(_piece_rows(whole), -2)
        return
    buffer: Tensor | None = None  # one for all rows
    shared: Tensor | None = None  # rows that the next tiles fade into
    for y, below in zip(rows, [*rows[1:], None], strict=True):
        strip = window.get(y.first, y.end)
        if buffer is None:
            most = max(y.stop - y.start for y in rows)
            with torch.inference_mode(False):  # whoever takes the rows may leave that mode in between
                buffer = empty_apart((*strip.shape[:2], most * scale, columns[-1].stop * scale), strip)
        out = buffer[..., : (y.stop - y.start) * scale, :].zero_()
        _add_tiles(out, strip, y, columns, run, scale, done)
        if shared is not None:
            out[..., : shared.shape[-2], :] += shared
        finished = ((below.start if below else y.stop) - y.start) * scale
        shared = out[..., finished:, :].clone() if finished < out.shape[-2] else None
        pieces = out[..., :finished, :].split(_piece_rows(out), -2)
        yield from map(torch.clone, pieces)  # the buffer is written to again
        if below and strip.device.type == "cpu":
            give_back_memory()


def _piece_rows(picture: Tensor) -> int:
    row_bytes = picture[..., :1, :].numel() * picture.element_size()
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES // row_bytes))


def _add_tiles(
    out: Tensor, strip: Tensor, y: Span, columns: list[Span], run: Run, scale: int, done: Callable[[], None]
) -> None:
    """Add a row of tiles, weighted, of ``strip`` (N, C, y.end - y.first, W) to ``out`` (N, C, scale * h, scale*W)."""
    for x in columns:
        sr = run(strip[..., x.first : x.end])
        top, left = (y.start - y.first) * scale, (x.start - x.first) * scale
        here = out[..., x.start * scale : x.stop * scale]
        part = sr[..., top : top + here.shape[-2], left : left + here.shape[-1]].to(out.device)
        if y.fade_in or y.fade_out or x.fade_in or x.fade_out:
            here += part * y.weight(scale, part)[:, None] * x.weight(scale, part)
        else:
            here.copy_(part)
        del sr, part
        done()


def declared_margin(network: SRNetwork) -> Margin:
    """The margin that a network's ``receptive_field`` gives; overlapping tiles where it gives none."""
    field = network.receptive_field
    halo = round_up(_DEFAULT_HALO if field is None else field, network.multiple_of)
    return Margin(halo, network.multiple_of, exact=field is not None)


def upscale_tiled(network: SRNetwork, lq: Tensor, tile: int | None) -> Tensor:
    """Run ``network`` over a batch in tiles.

    The margin is the network's receptive field, rounded up to its ``multiple_of`` so that attention windows lie as
    they do in the whole picture.

    Args:
        network: in evaluation mode.
        lq: (N, C, H, W), float, [0, 1].
        tile: edge of a tile, in input pixels, without its margin; rounded up to ``multiple_of``. ``None``: no tiles.

    Returns:
        (N, C, scale*H, scale*W), not clamped, on ``lq``'s device.
    """
    margin = declared_margin(network)
    rows, columns = (spans(size, tile, margin) for size in lq.shape[-2:])
    if len(rows) == len(columns) == 1:
        return network(lq)
    return torch.cat(list(upscale_rows(iter([lq]), rows, columns, network, network.scale, lambda: None)), -2)


class Halving:
    """Runs a function over a picture, in halves where memory does not suffice for all of it, and so on.

    Args:
        run: (N, C, h, W) -> (N, C, scale*h, scale*W).
        scale: output edge / input edge.
        margin: gives what surrounds the halves; called when memory did not suffice.
    """

    def __init__(self, run: Run, scale: int, margin: Callable[[], Margin]) -> None:
        self.run, self.scale, self.margin = run, scale, margin
        self._too_many: int | None = None  # pixels for which memory did not suffice: not tried again
        self._why = ""

    def __call__(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self._too_many is None or height * width < self._too_many:
            try:
                return self.run(x)
            except RuntimeError as e:
                if not is_out_of_memory(e):
                    raise
                self._why = str(e).strip().partition("\n")[0]
            # Behind the block: the error holds on to every tensor of the failed attempt.
            self._too_many = height * width
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        margin = self.margin()
        halo, multiple, overlap = margin.halo, margin.multiple, margin.overlap
        for axis in sorted((-2, -1), key=lambda axis: -x.shape[axis]):
            size = x.shape[axis]
            middle = round_up(size // 2, multiple)
            if middle + halo < size and size > _SMALLEST:
                # To where the picture lies, which may be the CPU: the other half needs the memory.
                before = self(x.narrow(axis, 0, middle + halo)).to(x.device)
                behind = self(x.narrow(axis, middle - halo, size - middle + halo)).to(x.device)
                before = before.narrow(axis, 0, (middle + overlap) * self.scale)
                start, length = (halo - overlap) * self.scale, (size - middle + overlap) * self.scale
                return _faded(before, behind.narrow(axis, start, length), 2 * overlap * self.scale, axis)
        raise SRError(
            f"out of memory even for a tile of {width}x{height} pixels with its margin ({self._why}); "
            "close other programs, or use a smaller network or the CPU"
        )


def _faded(before: Tensor, behind: Tensor, shared: int, axis: int) -> Tensor:
    """Two parts of a picture side by side, whose last and first ``shared`` pixels along ``axis`` are the same."""
    if not shared:
        return torch.cat((before, behind), axis)
    weight = (torch.arange(shared, device=before.device, dtype=before.dtype) + 0.5) / shared
    before, end = before.split((before.shape[axis] - shared, shared), axis)
    start, behind = behind.split((shared, behind.shape[axis] - shared), axis)
    return torch.cat((before, torch.lerp(end, start, weight.view(-1, *[1] * (-1 - axis))), behind), axis)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, one of its libraries, or the CPU's allocator had too little memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _TOO_LITTLE)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
