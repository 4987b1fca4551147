"""Pictures that Pillow decodes without loss: 8-bit stills of every mode, and animations."""

from __future__ import annotations

import contextlib
import functools
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageOps

from sr.errors import SRError
from sr.image import is_16_bit, opened, picture_name, straight
from sr.pictures.header import Header


@dataclass
class Frames:
    """Decoded frames (H, W, C), their durations in ms (empty for a still), and how often they play (0: for ever)."""

    frames: list[np.ndarray]
    durations: list[float]
    loop: int


def decode(source: Path | bytes, header: Header, limit: bool = True) -> Frames:
    """All frames of a file, upright, in the channels that ``header.info`` names, which is corrected for animations.

    Raises:
        SRError: damaged, or (``limit``) more than 179 million pixels in all frames.
    """
    with opened(source, limit) as image:
        info = header.info
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        if limit and most and image.width * image.height * info.frames > most:
            raise SRError(
                f"{picture_name(source)} has {info.frames} frames of {image.width}x{image.height}, together more than "
                f"the {most:,} pixels that are read; cut it into parts"
            )
        if not info.animated:
            image.load()
            turn = header.turn
            if image.format == "TIFF":  # turned by now, in some versions of Pillow
                with contextlib.suppress(Exception):  # damaged EXIF
                    ImageOps.exif_transpose(image, in_place=True)
                turn = 1
            return Frames([_upright(_pixels(image, header), turn)], [], 0)
        frames, durations = [], []
        for i in range(info.frames):
            image.seek(i)
            image.load()
            frames.append(_upright(np.asarray(image.convert("RGBA")), header.turn))
            durations.append(0.0 if header.default_image and i == 0 else float(image.info.get("duration", 0)))
        loop = _plays(image)
        info.channels = 4 if any((frame[..., 3] < 255).any() for frame in frames) else 3
        return Frames([frame[..., : info.channels] for frame in frames], durations, loop)


def _upright(pixels: np.ndarray, turn: int) -> np.ndarray:
    """(H, W, C) of an EXIF orientation ``turn``, turned upright."""
    pixels = np.rot90(pixels, {3: 2, 5: 3, 6: 3, 7: 1, 8: 1}.get(turn, 0))
    if turn in (2, 5, 7):
        pixels = pixels[:, ::-1]
    return pixels[::-1] if turn == 4 else pixels


def _plays(image: Image.Image) -> int:
    """How often an animation plays; a GIF file states repetitions, and none if it plays once."""
    loop = image.info.get("loop")
    if image.format == "GIF":
        return 1 if loop is None else int(loop) + 1 if loop else 0
    return int(loop or 0)


def _pixels(image: Image.Image, header: Header) -> np.ndarray:
    """(H, W, C) of the loaded still; what has no plain RGB is converted, and the header says so."""
    if image.mode in ("CMYK", "LAB", "YCbCr", "HSV"):
        image = _to_rgb(image, header)
    elif is_16_bit(image):
        return np.asarray(image).astype(np.uint16)[..., None]
    elif image.mode in ("I", "F"):
        return np.asarray(image)[..., None]
    else:
        clear = image.info.get("transparency")
        if header.grey_bits in (2, 4) and isinstance(clear, int):  # Pillow stretches the samples, but not this value
            image.info["transparency"] = clear * 255 // (2**header.grey_bits - 1)
        image = straight(image)
    return np.atleast_3d(np.asarray(image))


def _to_rgb(image: Image.Image, header: Header) -> Image.Image:
    """RGB of a picture in another colour space, with the profile in the file if it fits."""
    profile, header.metadata.icc = header.metadata.icc, None
    mode = image.mode
    if mode == "LAB":
        header.notes.append("LAB colours were converted to sRGB")
        return _converted(image, ImageCms.createProfile("LAB"))
    if mode == "CMYK" and profile:
        try:
            converted = _converted(image, ImageCms.ImageCmsProfile(io.BytesIO(profile)))
        except (ImageCms.PyCMSError, OSError):
            pass
        else:
            header.notes.append(CMYK_BY_PROFILE)
            return converted
    elif mode == "YCbCr":
        header.metadata.icc = profile
    header.notes.append(CMYK_PLAIN if mode == "CMYK" else f"{mode} colours were converted to RGB")
    return image.convert("RGB")


CMYK_BY_PROFILE = "CMYK colours were converted to sRGB with the file's own profile"
CMYK_PLAIN = "CMYK colours were converted to RGB by the plain formula, as the file has no fitting profile"


def _converted(image: Image.Image, profile: Any) -> Image.Image:
    made = ImageCms.profileToProfile(image, profile, _srgb(), outputMode="RGB")
    assert made is not None  # only in place
    return made


@functools.cache
def _srgb() -> Any:
    return ImageCms.createProfile("sRGB")
