"""Upscale pictures: a network, tiles small enough for memory, and every picture mode in and out."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sr.errors import SRError
from sr.image import is_16_bit, to_image, to_tensor
from sr.network import SRNetwork
from sr.resize import imresize

# Halo, in input pixels, for a network that does not say how far it looks.
_DEFAULT_HALO = 32

Picture = TypeVar("Picture", Image.Image, np.ndarray, Tensor)


def upscale_tiled(network: SRNetwork, lq: Tensor, tile: int | None) -> Tensor:
    """Run ``network`` over a batch in tiles; each is computed with a margin that is cut off again.

    The margin is the network's receptive field, rounded up to its ``multiple_of`` so that attention windows lie as
    they do in the whole picture: tiles then change nothing but rounding.

    Args:
        network: in evaluation mode.
        lq: (N, C, H, W), float, [0, 1].
        tile: edge of a tile, in input pixels, without its margin; rounded up to ``multiple_of``. ``None``: no tiles.

    Returns:
        (N, C, scale*H, scale*W), not clamped, on ``lq``'s device.
    """
    height, width = lq.shape[-2:]
    if tile is None or (height <= tile and width <= tile):
        return network(lq)
    if tile < 1:
        raise SRError(f"a tile is at least 1 pixel wide (0: no tiles), not {tile}")
    step = _round_up(tile, network.multiple_of)
    field = network.receptive_field
    halo = _round_up(_DEFAULT_HALO if field is None else field, network.multiple_of)
    s = network.scale
    out: Tensor | None = None
    for top in range(0, height, step):
        for left in range(0, width, step):
            y0, x0 = max(0, top - halo), max(0, left - halo)
            sr = network(lq[..., y0 : top + step + halo, x0 : left + step + halo])
            if out is None:
                out = sr.new_empty(*lq.shape[:2], height * s, width * s)
            core = out[..., top * s : (top + step) * s, left * s : (left + step) * s]
            y, x = (top - y0) * s, (left - x0) * s
            core.copy_(sr[..., y : y + core.shape[-2], x : x + core.shape[-1]])
    assert out is not None  # height and width are at least 1
    return out


class Upscaler:
    """Enlarges pictures with a network.

    Args:
        network: any network of the project, e.g. from :func:`sr.load`.
        tile: edge of a tile in input pixels; ``None`` runs the whole picture at once.
        device: where to compute; default: a GPU if there is one, else the CPU.

    Example:
        >>> upscaler = sr.Upscaler(sr.load("sparsesr_t_x2.quickstart"))
        >>> upscaler(Image.open("photo.png")).save("large.png")
    """

    def __init__(self, network: SRNetwork, tile: int | None = 256, device: str | torch.device | None = None) -> None:
        if not isinstance(network, SRNetwork):
            raise SRError(f"Upscaler takes a network, not {network!r}; load one with sr.load(...)")
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as e:  # AssertionError: torch was built without CUDA
            raise SRError(f"there is no device {device!r} here; try cpu or cuda") from e
        self.network = network.eval().to(self.device).to(memory_format=torch.channels_last)
        self.tile = tile
        self.scale = network.scale

    @torch.inference_mode()
    def __call__(self, picture: Picture) -> Picture:
        """Enlarge one picture ``scale`` times; the result is of the same kind, mode and depth.

        Args:
            picture: a PIL image of any mode; an array (H, W) or (H, W, C) of uint8, uint16 or float in [0, 1]; or a
                tensor (C, H, W) or (N, C, H, W), uint8 or float in [0, 1]. C is 1 (grey), 2 (grey and alpha), 3 (RGB)
                or 4 (RGBA). Alpha is enlarged bicubically.
        """
        if isinstance(picture, Image.Image):
            return self._image(picture)
        if isinstance(picture, np.ndarray):
            return self._array(picture)
        if isinstance(picture, Tensor):
            if picture.dim() not in (3, 4):
                raise SRError(f"a tensor picture has shape (C, H, W) or (N, C, H, W), not {tuple(picture.shape)}")
            batch = picture if picture.dim() == 4 else picture[None]
            out = self._batch(batch).to(picture.device)
            return out if picture.dim() == 4 else out[0]
        raise SRError(f"a picture is a PIL image, an array or a tensor, not {type(picture).__name__}")

    def _image(self, image: Image.Image) -> Image.Image:
        if image.mode in ("I", "F") and not is_16_bit(image):  # no fixed range: keep the picture's own
            values = np.asarray(image, dtype=np.float64)
            if not np.isfinite(values).all():
                raise SRError("the picture holds NaN or infinite values; there is nothing to compute with")
            low, span = values.min(), max(np.ptp(values), 1e-12)
            enlarged = self._array(((values - low) / span).astype(np.float32)) * span + low
            return Image.fromarray(np.round(enlarged).astype(np.int32) if image.mode == "I" else enlarged)
        batch = to_tensor(image)[None]
        return to_image(self._batch(batch), bits=16 if is_16_bit(image) else 8)

    def _array(self, array: np.ndarray) -> np.ndarray:
        if array.ndim not in (2, 3) or array.size == 0:
            raise SRError(f"an array picture has shape (H, W) or (H, W, C), not {array.shape}")
        if array.dtype != np.uint8 and array.dtype != np.uint16 and not np.issubdtype(array.dtype, np.floating):
            raise SRError(f"an array picture is uint8, uint16 or float, not {array.dtype}")
        top = {"uint8": 255.0, "uint16": 65535.0}.get(array.dtype.name, 1.0)
        hwc = array[..., None] if array.ndim == 2 else array
        batch = torch.from_numpy(hwc.astype(np.float32) / np.float32(top)).permute(2, 0, 1)[None]
        out = self._batch(batch)[0].permute(1, 2, 0).cpu().numpy()
        if top > 1:  # round, do not truncate: white stays white
            out = np.floor(out * np.float32(top) + np.float32(0.5))
        out = out.astype(array.dtype)
        return out[..., 0] if array.ndim == 2 else out

    def _batch(self, batch: Tensor) -> Tensor:
        """(N, 1 to 4, H, W), float or uint8 -> enlarged, clamped to [0, 1] or rounded to uint8."""
        channels = batch.shape[1]
        if channels not in (1, 2, 3, 4):
            raise SRError(f"a picture has 1 to 4 channels (grey or RGB, with or without alpha), not {channels}")
        whole = batch.dtype == torch.uint8
        if not whole and not batch.is_floating_point():
            raise SRError(f"a tensor picture is uint8 or float, not {batch.dtype}")
        x = batch.to(self.device, torch.float32)
        if not whole and not (x.isfinite().all() and x.min() > -1 and x.max() < 2):
            raise SRError(f"a float picture lies in [0, 1]; this one has values from {x.min():.3g} to {x.max():.3g}")
        x = x / 255 if whole else x
        colours = channels - 1 if channels in (2, 4) else channels
        rgb = x[:, :colours].expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
        sr = upscale_tiled(self.network, rgb, self.tile)
        if colours == 1:  # grey stays grey
            sr = sr.mean(1, keepdim=True)
        if channels > colours:
            sr = torch.cat((sr, imresize(x[:, colours:], self.scale)), 1)
        sr = sr.clamp(0, 1)
        return (sr * 255 + 0.5).floor().to(torch.uint8) if whole else sr.to(batch.dtype)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
