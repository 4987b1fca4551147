"""Upscale pictures: any kind and size in, the same kind out, in tiles that memory has room for.

A tile is as large as a fixed share of memory allows, and a picture that fits is one tile; a CPU computes in float32
unless told otherwise. The README beside this file has the measurements that decided it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from itertools import chain, tee
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from sr.errors import SRError
from sr.image import is_16_bit, to_image, to_tensor
from sr.inference.alpha import bleed_rows
from sr.inference.memory import available_memory, bytes_per_pixel
from sr.inference.runner import COLOR_REACH, TileRunner, compile_network, find_margin
from sr.inference.tiling import Halving, Margin, Span, fitting_tile, round_up, spans, upscale_rows
from sr.inference.values import checked, to_samples, white
from sr.network import SRNetwork
from sr.pictures.samples import Samples
from sr.resize import imresize_rows, imresize_wrapped
from sr.rows import RowWindow

LARGEST_FACTOR = 64
_PART = 256  # rows of the input that are taken at a time
_CPU_BYTES = 1 << 30  # the most that a tile and the finished part of its row of tiles take on a CPU together
_MANY_TILES = 8  # along an edge; with more, those at its ends may just as well be as large as the others
_STRIP_BYTES = 1 << 28  # the most that the latter takes, on any device
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # modes of more than 8 bits
_RECOLOURED = ("CMYK", "LAB", "YCbCr", "HSV")  # modes that become RGB, to which their ICC profile does not belong
_LOCK = threading.Lock()  # of what upscalers measure once; not a member, so that an upscaler can be copied

Picture = TypeVar("Picture", Image.Image, np.ndarray, Tensor)
Progress = Callable[[int, int], None]


class _Pass(NamedTuple):
    """Tiles of one run of the network over a whole picture."""

    rows: list[Span]
    columns: list[Span]


class Upscaler:
    """Enlarges pictures with a network. Several threads may use one upscaler.

    Args:
        network: any network of the project, e.g. from :func:`sr.load`; a copy of it is used.
        tile: edge of a tile in input pixels, without its margin; ``"auto"``: what memory has room for; ``None``: the
            whole picture at once.
        device: where to compute; default: a GPU if there is one, else the CPU.
        dtype: of the computation: float32, bfloat16, or on a GPU float16. ``"auto"``: float32 on a CPU; on a GPU
            float16 for pictures of 8 bits if the network is made for narrow types. Tiles that overflow are computed
            again in float32.
        outscale: output edge / input edge, any number above 0, at most 64; default: the network's scale. The network
            runs as often as it takes to reach it, then the result is resized (bicubic, antialiased, exact phase).
        size: (width, height) of the output, in place of ``outscale``.
        tta: average over the eight flips and quarter turns; takes eight times as long.
        wrap: the picture is a texture whose opposite edges meet; the result is, too.
        keep_color: give the result the low frequencies of the input, for networks whose colours drift.
        compile: compile the network. Tiles then have one shape, so that it is compiled once for a picture.

    Raises:
        SRError: not a network, no such device, or an argument out of range.

    Example:
        >>> upscaler = sr.Upscaler(sr.load("sparsesr_t_x2.quickstart"))
        >>> upscaler(Image.open("photo.png")).save("large.png")
    """

    def __init__(
        self,
        network: SRNetwork,
        tile: int | Literal["auto"] | None = "auto",
        device: str | torch.device | None = None,
        dtype: torch.dtype | Literal["auto"] = "auto",
        outscale: float | None = None,
        size: tuple[int, int] | None = None,
        tta: bool = False,
        wrap: bool = False,
        keep_color: bool = False,
        compile: bool = False,
    ) -> None:
        if not isinstance(network, SRNetwork):
            raise SRError(f"Upscaler takes a network, not {network!r}; load one with sr.load(...)")
        if network.in_channels != 3:
            raise SRError(f"Upscaler takes a network for RGB, not one of {network.in_channels} channels")
        if tile is not None and tile != "auto" and (isinstance(tile, str) or tile < 1):
            raise SRError(f"a tile is at least 1 pixel wide, or 'auto' (None: no tiles), not {tile!r}")
        _check_factor(outscale, size)
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as e:  # AssertionError: torch was built without CUDA
            raise SRError(f"there is no device {device!r} here; try cpu or cuda") from e
        self.tile, self.outscale, self.size, self.wrap, self.scale = tile, outscale, size, wrap, network.scale
        self.dtype = self._dtype(network, dtype)
        own = copy.deepcopy(network).eval().requires_grad_(False).fuse()
        self.network = own.to(self.device).to(memory_format=torch.channels_last)
        self.run = TileRunner(self.network, self.device, self.dtype, tta, keep_color)
        self.compile = compile
        self._known_margin: Margin | None = None
        self._known_cost: float | None = None
        self._fine: Upscaler | None = None  # for pictures of more than 8 bits, for which float16 has too few levels
        if dtype == "auto" and self.dtype != torch.float32:
            self._fine = copy.copy(self)
            self._fine.dtype = torch.float32
            self._fine.run = TileRunner(self.network, self.device, torch.float32, tta, keep_color)
        if compile:
            for one in filter(None, (self, self._fine)):
                one._margin(), one._cost()  # not compiled: with other shapes than tiles have
            compile_network(self.network)

    def _dtype(self, network: SRNetwork, dtype: torch.dtype | Literal["auto"]) -> torch.dtype:
        if dtype == "auto":
            return torch.float16 if self.device.type == "cuda" and network.supports_bf16 else torch.float32
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SRError(f"an upscaler computes in float32, bfloat16 or float16, not {dtype}")
        if dtype == torch.float16 and self.device.type == "cpu":
            raise SRError("float16 needs a GPU; on a CPU use float32 or bfloat16")
        return dtype

    def out_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the result for a picture of this size."""
        if self.size is not None:
            factor = max(self.size[0] / width, self.size[1] / height)
            if factor > LARGEST_FACTOR:
                wanted, given = (f"{w}x{h}" for w, h in (self.size, (width, height)))
                raise SRError(f"{wanted} is more than {LARGEST_FACTOR} times {given}; choose a smaller size")
            return self.size
        factor = self.scale if self.outscale is None else self.outscale
        # Half up; 1.005 * 100 is 100.49999999999999 in floating point.
        return tuple(max(1, math.floor(round(n * factor, 6) + 0.5)) for n in (width, height))  # type: ignore[return-value]

    def __call__(self, picture: Picture, progress: Progress | None = None) -> Picture:
        """Enlarge one picture; the result is of the same kind, mode and depth.

        Args:
            picture: a PIL image of any mode (of an animation one frame), which is turned upright by its EXIF
                orientation, and whose EXIF, ICC profile and resolution the result's ``info`` has; an array (H, W) or
                (H, W, C) of uint8, uint16 or float in [0, 1]; or a tensor (C, H, W) or (N, C, H, W) of the same types.
                C is 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGBA). Alpha is enlarged bicubically; visible colours
                are continued under transparency first.
            progress: called with (tiles done, tiles in all) after each tile, in the calling thread.

        Raises:
            SRError: not such a picture, too little memory for any tile, or a network that gives NaN.
        """
        if isinstance(picture, Image.Image):
            with contextlib.suppress(Exception):  # damaged EXIF: the pixels are right all the same
                if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                    picture = ImageOps.exif_transpose(picture)
            result = self._image(picture, progress)
            kept = ("exif", "dpi") if picture.mode in _RECOLOURED else ("exif", "dpi", "icc_profile")
            result.info |= {key: picture.info[key] for key in kept if key in picture.info}
            return result
        if isinstance(picture, np.ndarray):
            return self._array(picture, progress)
        if isinstance(picture, Tensor):
            if picture.dim() not in (3, 4) or picture.numel() == 0:
                raise SRError(f"a tensor picture has shape (C, H, W) or (N, C, H, W), not {tuple(picture.shape)}")
            own = self._for(white(picture.dtype))
            out = own._batch(picture if picture.dim() == 4 else picture[None], progress)
            return out if picture.dim() == 4 else out[0]
        raise SRError(f"a picture is a PIL image, an array or a tensor, not {type(picture).__name__}")

    def rows(
        self,
        read: Callable[[int], np.ndarray],
        width: int,
        height: int,
        channels: int,
        dtype: Any,
        progress: Progress | None = None,
    ) -> Iterator[np.ndarray]:
        """Enlarge a picture that need not be in memory, nor its result.

        Args:
            read: gives the next rows, at most as many as asked for and at least one: (h, width, channels).
            width: of the picture.
            height: of the picture.
            channels: 1 to 4, as for :meth:`__call__`.
            dtype: of its samples: uint8, uint16 or float.
            progress: as for :meth:`__call__`.

        Yields:
            The rows of the result in order, (h, out width, channels) of ``dtype``, at most 128 at a time; together what
            :meth:`__call__` gives for the whole picture.

        Raises:
            SRError: as for :meth:`__call__`; ``wrap``, for which the first rows need the last ones; too few rows.
        """
        if self.wrap:
            raise SRError("a picture that is read in rows cannot wrap: its first rows need the last ones")
        top = white(np.dtype(dtype))

        def parts() -> Iterator[Tensor]:
            done = 0
            while done < height:
                rows = read(min(_PART, height - done))
                if len(rows) == 0:
                    raise SRError(f"the picture ends after {done} of {height} rows; the file is cut short")
                done += len(rows)
                values = rows.reshape(len(rows), width, channels).astype(np.float32) / np.float32(top)
                yield torch.from_numpy(values).permute(2, 0, 1)[None]

        for part in self._for(top)._stream(parts(), channels, height, width, progress):
            yield to_samples(part, np.dtype(dtype), top)

    def check_tiles(self, picture: Image.Image | np.ndarray | Tensor) -> float:
        """The largest difference, in [0, 1], between the result in tiles and that of the whole picture at once."""
        if isinstance(picture, Tensor):
            lq = (picture if picture.dim() == 4 else picture[None]).float() / white(picture.dtype)
        else:
            lq = to_tensor(picture)[None]
        is_8_bit = picture.mode not in _DEEP if isinstance(picture, Image.Image) else white(picture.dtype) == 255
        tiled = self._for(255 if is_8_bit else 1)
        whole = copy.copy(tiled)
        whole.tile = None
        return (tiled._batch(lq, None) - whole._batch(lq, None)).abs().max().item()

    def _for(self, top: float) -> Upscaler:
        """What computes pictures whose white is ``top``."""
        return self if top == 255 or self._fine is None else self._fine

    def _image(self, image: Image.Image, progress: Progress | None) -> Image.Image:
        if image.mode in ("I", "F") and not is_16_bit(image):  # no fixed range: keep the picture's own
            values = np.asarray(image, dtype=np.float64)
            if not np.isfinite(values).all():
                raise SRError("the picture holds NaN or infinite values; there is nothing to compute with")
            samples = Samples.spanning("int32" if image.mode == "I" else "float32", values.min(), values.max())
            return Image.fromarray(samples.encoded(self._array(samples.decoded(values), progress)))
        bits = 16 if is_16_bit(image) else 8
        return to_image(self._for(2**bits - 1)._batch(to_tensor(image)[None], progress), bits)

    def _array(self, array: np.ndarray, progress: Progress | None) -> np.ndarray:
        if array.ndim not in (2, 3) or array.size == 0:
            raise SRError(f"an array picture has shape (H, W) or (H, W, C), not {array.shape}")
        top = white(array.dtype)
        hwc = array[..., None] if array.ndim == 2 else array
        height, width, channels = hwc.shape
        sources = (hwc[y : y + _PART].astype(np.float32) / np.float32(top) for y in range(0, height, _PART))
        parts = (torch.from_numpy(rows).permute(2, 0, 1)[None] for rows in sources)
        out_width, out_height = self.out_size(width, height)
        out = np.empty((out_height, out_width, channels), array.dtype)
        done = 0
        for part in self._for(top)._stream(parts, channels, height, width, progress):
            out[done : done + part.shape[-2]] = to_samples(part, array.dtype, top)
            done += part.shape[-2]
        return out[..., 0] if array.ndim == 2 else out

    def _batch(self, batch: Tensor, progress: Progress | None) -> Tensor:
        """(N, 1 to 4, H, W), float, uint8 or uint16 -> enlarged, clamped to [0, 1] or rounded, on its device."""
        top = white(batch.dtype)
        count, channels, height, width = batch.shape
        parts = (part.detach().float() / top for part in batch.split(_PART, -2))
        out_width, out_height = self.out_size(width, height)
        out = batch.new_empty(count, channels, out_height, out_width, requires_grad=False)
        done = 0
        for part in self._stream(parts, channels, height, width, progress):
            here = out[..., done : done + part.shape[-2], :]
            here.copy_((part * top + 0.5).floor() if top > 1 else part)
            done += part.shape[-2]
        return out

    def _stream(
        self, parts: Iterator[Tensor], channels: int, height: int, width: int, progress: Progress | None
    ) -> Iterator[Tensor]:
        """Parts (N, C, h, W) of a picture, float -> those of its enlargement, clamped to [0, 1]."""
        if channels not in (1, 2, 3, 4):
            raise SRError(f"a picture has 1 to 4 channels (grey or RGB, with or without alpha), not {channels}")
        parts = map(checked, parts)
        out_width, out_height = self.out_size(width, height)
        size = (out_height, out_width)
        passes = 1
        while self.scale > 1 and self.scale**passes < max(out_height / height, out_width / width) * (1 - 1e-9):
            passes += 1
        if self.wrap:
            whole = torch.cat(list(parts), -2)
            yield self._wrapped(whole, size, passes, progress).clamp(0, 1)
            return
        alpha: Iterator[Tensor] | None = None
        if channels in (2, 4):
            parts, second = tee(bleed_rows(parts, height))
            alpha = imresize_rows((part[:, -1:] for part in second), (height, width), size)
            parts = (part[:, :-1] for part in parts)
        colours = self._enlarged(parts, height, width, passes, progress)
        factor = self.scale**passes
        if size != (height * factor, width * factor):
            colours = imresize_rows(colours, (height * factor, width * factor), size)
        window = None if alpha is None else RowWindow(alpha)
        done = 0
        for part in colours:
            bottom = done + part.shape[-2]
            if window is not None:
                part = torch.cat((part, window.get(done, bottom)), 1)
            done = bottom
            yield part.clamp(0, 1)

    def _enlarged(
        self, parts: Iterator[Tensor], height: int, width: int, passes: int, progress: Progress | None
    ) -> Iterator[Tensor]:
        """Grey or RGB, enlarged by ``scale ** passes``, not clamped."""
        plans = self._plan(height, width, passes)
        total, finished = sum(len(plan.rows) * len(plan.columns) for plan in plans), 0

        def done() -> None:
            nonlocal finished
            finished += 1
            if progress is not None:
                progress(finished, total)

        first = next(parts)
        grey = first.shape[1] == 1
        # A plane is repeated, not copied; the network's own copy is that of a tile.
        rows: Iterator[Tensor] = (part.expand(-1, 3, -1, -1) for part in chain([first], parts))
        for plan in plans:
            run = Halving(self.run, self.scale, self._margin)
            rows = upscale_rows(rows, plan.rows, plan.columns, run, self.scale, done)
        yield from (part.mean(1, keepdim=True) for part in rows) if grey else rows

    def _wrapped(self, x: Tensor, size: tuple[int, int], passes: int, progress: Progress | None) -> Tensor:
        """The same for a whole texture (N, C, H, W): continued on all sides, enlarged, and cut out again."""
        height, width = x.shape[-2:]
        # The outermost halo of each pass is wrong, a pixel of the last one being 1/scale**passes of one at the start.
        pad = 2 * self._margin().halo
        rows, columns = ((torch.arange(-pad, n + pad, device=x.device) % n) for n in (height, width))
        padded = x[..., rows, :][..., columns]
        colours, alpha = padded, None
        if x.shape[1] in (2, 4):
            colours = torch.cat(list(bleed_rows(iter([padded]), height + 2 * pad)), -2)[:, :-1]
            alpha = imresize_wrapped(x[:, -1:], size)
        parts = iter([colours])
        sr = torch.cat(list(self._enlarged(parts, height + 2 * pad, width + 2 * pad, passes, progress)), -2)
        factor = self.scale**passes
        top = pad * factor
        sr = imresize_wrapped(sr[..., top : top + height * factor, top : top + width * factor], size)
        return sr if alpha is None else torch.cat((sr, alpha), 1)

    def _margin(self) -> Margin:
        """What surrounds a tile; measured once."""
        with _LOCK:
            if self._known_margin is None:
                margin = find_margin(self.network, self.device)
                more = round_up(COLOR_REACH, margin.multiple) if self.run.keep_color else 0
                self._known_margin = margin._replace(halo=margin.halo + more)
            return self._known_margin

    def _cost(self) -> float:
        """Bytes for a pixel of a tile; measured once."""
        with _LOCK:
            if self._known_cost is None:
                self._known_cost = bytes_per_pixel(lambda lq: self.run(lq))
            return self._known_cost

    def _plan(self, height: int, width: int, passes: int) -> list[_Pass]:
        plans = []
        for _ in range(passes):
            tile = self._tile(height, width) if self.tile == "auto" else (self.tile, self.tile)
            split = any(edge is not None and n > edge for n, edge in zip((height, width), tile, strict=True))
            margin = self._margin() if split else Margin(0)  # which is not looked at
            # Memory that is asked for again and again in the same portions does not fall into pieces.
            rows, columns = (
                spans(n, edge, margin, equal=self.compile or n > _MANY_TILES * (edge or n))
                for n, edge in zip((height, width), tile, strict=True)
            )
            plans.append(_Pass(rows, columns))
            height, width = height * self.scale, width * self.scale
        return plans

    def _tile(self, height: int, width: int) -> tuple[int | None, int | None]:
        """Height and width of a tile that memory has room for; ``None``: all of it."""
        available = available_memory(self.device) / 2
        most = _CPU_BYTES if self.device.type == "cpu" else math.inf
        strip = 3 * 4 * self.scale**2 * width  # bytes for each row of tiles, in float32
        pixels = min(available, most) / self._cost()
        if height * width <= pixels and strip * height <= _STRIP_BYTES:
            return None, None
        rows = _STRIP_BYTES // strip
        tile_height, _ = fitting_tile(pixels, rows, self._margin())
        return fitting_tile(min(available, most - strip * tile_height) / self._cost(), rows, self._margin())


def _check_factor(outscale: float | None, size: tuple[int, int] | None) -> None:
    if outscale is not None and size is not None:
        raise SRError("give either outscale or size, not both")
    if outscale is not None and not (math.isfinite(outscale) and 0 < outscale <= LARGEST_FACTOR):
        raise SRError(f"the output is larger than 0 and at most {LARGEST_FACTOR} times the input, not {outscale} times")
    if size is not None and (len(size) != 2 or any(n != int(n) or n < 1 for n in size)):
        raise SRError(f"size is (width, height), two whole numbers of at least 1, not {size!r}")
