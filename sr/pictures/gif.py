"""Palettes for GIF frames."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

_CLEAR = 255  # the palette entry that stands for transparency


def gif_frames(images: list[Image.Image]) -> tuple[list[Image.Image], dict[str, Any]]:
    """Frames with 255 colours of their own and one for transparency, and Pillow's arguments that go with them.

    Frames of 255 colours or less keep them exactly; else black and white do. Pixels less than half opaque become
    transparent.
    """
    alpha = images[0].mode in ("LA", "RGBA")
    frames = [_quantized(image, alpha) for image in images]
    return frames, {"transparency": _CLEAR, "disposal": 2} if alpha else {}


def _quantized(image: Image.Image, alpha: bool) -> Image.Image:
    colours = image.convert("RGB")
    values = np.asarray(colours).astype(np.int32)
    codes = values[..., 0] << 16 | values[..., 1] << 8 | values[..., 2]
    found = np.unique(codes)
    if len(found) <= _CLEAR:
        entries = np.stack([found >> 16, found >> 8 & 255, found & 255], -1).astype(np.uint8)
    else:
        chosen = colours.quantize(_CLEAR - 2, method=Image.Quantize.MEDIANCUT)
        most = np.asarray((chosen.getpalette() or [])[: 3 * (_CLEAR - 2)], np.uint8).reshape(-1, 3)
        entries = np.concatenate([np.array([[0, 0, 0], [255, 255, 255]], np.uint8), most])
    filled = np.concatenate([entries, np.repeat(entries[:1], 256 - len(entries), 0)])
    if len(found) <= _CLEAR:
        indices = np.searchsorted(found, codes).astype(np.uint8)
    else:
        palette = Image.new("P", (1, 1))
        palette.putpalette(filled.tobytes())
        indices = np.array(colours.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG))
        indices[codes == 0], indices[codes == 0xFFFFFF] = 0, 1  # Pillow compares colours in steps of four levels
    if alpha:
        indices[np.asarray(image.getchannel("A")) < 128] = _CLEAR
    made = Image.fromarray(indices)
    made.putpalette(filled.tobytes())
    return made
