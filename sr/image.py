"""Picture files: finding, reading and writing them without losing anything.

The types decide what a sample means (8 or 16 bit), never the values found in a picture.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from sr.atomic import atomic
from sr.errors import SRError

#: Suffix (lower case) -> Pillow's name of the format.
FORMATS = {
    ".bmp": "BMP",
    ".jfif": "JPEG",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".pgm": "PPM",
    ".png": "PNG",
    ".pnm": "PPM",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
#: Suffixes (lower case) of the files that are read and written as pictures.
IMAGE_SUFFIXES = frozenset(FORMATS)

# exact: also the colours under full transparency
_KEEP_DETAIL: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "WEBP": {"lossless": True, "exact": True},
}
_JUNK = "__MACOSX"  # macOS's zip companion of hidden copies


def list_images(root: str | Path) -> list[Path]:
    """Every picture file under a folder, sub-folders included, sorted by its path relative to the folder.

    Hidden files and folders (``.git``, ``.DS_Store``) and ``__MACOSX`` are skipped; links to folders are followed.

    Args:
        root: the folder.

    Returns:
        Paths that start with ``root``; at least one.

    Raises:
        SRError: the folder is missing, is not a folder, cannot be read, or holds no picture.
    """
    root = Path(root)
    if not root.exists():
        where = "" if root.is_absolute() else f" in {Path.cwd()}"
        raise SRError(f"the folder {root} does not exist{where}; check the path")
    if not root.is_dir():
        raise SRError(f"{root} is a file, not a folder; give the folder that holds it")

    def fail(exc: OSError) -> None:
        raise SRError(f"the folder {exc.filename} cannot be read ({exc.strerror})") from exc

    found, seen = [], {root.resolve()}
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        here = Path(folder)
        keep = []
        for name in folders:
            real = (here / name).resolve()
            if not name.startswith(".") and name != _JUNK and real not in seen:  # a link to a parent would never end
                seen.add(real)
                keep.append(name)
        folders[:] = keep
        found += [here / f for f in files if not f.startswith(".") and Path(f).suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise SRError(f"no picture in {root} or its sub-folders; looked for {' '.join(sorted(IMAGE_SUFFIXES))}")
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def picture_name(source: Path | bytes) -> str:
    """What messages call a file, or the content of one."""
    return "the picture that was handed over" if isinstance(source, bytes) else str(source)


@contextlib.contextmanager
def reading(source: Path | bytes) -> Iterator[None]:
    """Whatever goes wrong inside the block becomes an :class:`SRError` that names the file (or ``bytes`` of one)."""
    name = picture_name(source)
    try:
        if isinstance(source, Path) and (source.is_fifo() or source.is_socket() or source.is_char_device()):
            raise SRError(f"{source} is no file but a pipe or a device; remove it")  # reading these may wait for ever
        # Pillow only warns up to twice its limit and refuses beyond; a large photograph is no reason for a warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except SRError:
        raise
    except FileNotFoundError as exc:
        raise SRError(f"the picture {name} does not exist; check the path") from exc
    except IsADirectoryError as exc:
        raise SRError(f"{name} is a folder, not a picture") from exc
    except PermissionError as exc:
        raise SRError(f"no permission to read {name}") from exc
    except Image.DecompressionBombError as exc:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise SRError(f"{name} has more than {most:,} pixels, the most that is read; cut it into parts") from exc
    except UnidentifiedImageError as exc:
        if not (source if isinstance(source, bytes) else source.stat().st_size):
            raise SRError(f"{name} is empty (0 bytes); replace or remove it") from exc
        raise SRError(f"{name} is not a picture in a format that can be read; replace or remove it") from exc
    except MemoryError as exc:
        raise SRError(f"not enough memory to read {name}; cut it into parts") from exc
    except Exception as exc:  # what decoders raise on damaged files is not limited to OSError
        why = " ".join(str(exc).split())
        raise SRError(f"{name} is damaged or incomplete ({why}); replace or remove it") from exc


@contextlib.contextmanager
def opened(source: Path | bytes, limit: bool = True) -> Iterator[Image.Image]:
    """The picture with its header read; whatever goes wrong inside the block names the file (or ``bytes`` of one).

    Without ``limit``, JPEG and PPM, whose rows can be read one by one, may have more than Pillow's 179 million pixels.
    """
    with (
        reading(source),
        io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file,
        Image.open(file) if limit else _open_any_size(file) as image,
    ):
        yield image


def _open_any_size(file: BinaryIO) -> Image.Image:
    """``Image.open`` without its limit, which is global, for JPEG and PPM."""
    Image.preinit()
    start = file.read(16)
    file.seek(0)
    for plugin, accept in (Image.OPEN["JPEG"], Image.OPEN["PPM"]):
        if accept is not None and accept(start) is True:
            return plugin(file, "")
    return Image.open(file)


def open_image(path: str | Path) -> Image.Image:
    """Read a picture file completely, turned the way its EXIF orientation says; the file is closed again.

    The mode stays the file's own (also 16 bit, palette, alpha), and so do ``info`` (ICC profile, EXIF without
    the orientation) and ``format``. Of an animation it is the first frame.

    Raises:
        SRError: the file is missing, empty, damaged, cut short, no picture, or too large.
    """
    with opened(Path(path)) as image:
        image.load()
        with contextlib.suppress(Exception):  # damaged EXIF: the pixels are right all the same
            ImageOps.exif_transpose(image, in_place=True)
        return image


def image_size(path: str | Path) -> tuple[int, int]:
    """(height, width) that :func:`open_image` will give, read from the header only.

    Raises:
        SRError: as for :func:`open_image`, as far as a header can tell.
    """
    with opened(Path(path)) as image:
        width, height = image.size
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # its size is turned already, in some versions of Pillow
            width, height = image.tag_v2[256], image.tag_v2[257]
        turn = 1
        with contextlib.suppress(Exception):
            # The base class's: the one of PNG decodes all pixels in search of EXIF that follows them.
            turn = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        return (width, height) if turn in (5, 6, 7, 8) else (height, width)


def rgb_size(path: str | Path) -> tuple[int, int]:
    """(height, width) of what :func:`read_rgb` will give, read from the header only; for data sets.

    Raises:
        SRError: as for :func:`read_rgb`, as far as a header can tell.
    """
    with opened(Path(path)) as image:
        _check_rgb(image, path)
    return image_size(path)


def _check_rgb(image: Image.Image, path: str | Path) -> None:
    """Refuse what has no certain RGB, or is more than one picture."""
    # Not MPO: a telephone's JPEG with a second, smaller picture behind the first.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise SRError(f"{path} is an animation of {getattr(image, 'n_frames', 2)} frames; save the one you want")
    if image.mode == "CMYK":
        raise SRError(f"{path} is CMYK, whose colours depend on the printer; save it as RGB")
    if image.mode in ("I", "F") and not is_16_bit(image):
        raise SRError(f"{path} has 32-bit samples of unknown range; save it with 8 or 16 bits")


def is_16_bit(image: Image.Image) -> bool:
    """Whether the samples of a grey picture have 16 bits, by its type."""
    # Older Pillow opens 16-bit grey PNG and PGM as 32-bit integers.
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def working_mode(image: Image.Image) -> str:
    """The mode that a picture is computed in and comes out with.

    The plainest of L, LA, RGB and RGBA that holds its colours and alpha; 16-bit grey, 32-bit integers (I) and floats
    (F) stay what they are.
    """
    if is_16_bit(image):
        return "I;16"
    if image.mode in ("I", "F"):
        return image.mode
    grey, alpha = image.mode in ("1", "L", "LA", "La"), image.has_transparency_data
    return ("LA" if alpha else "L") if grey else ("RGBA" if alpha else "RGB")


def straight(image: Image.Image) -> Image.Image:
    """The picture in its working mode, one of L, LA, RGB and RGBA."""
    mode = working_mode(image)
    return image if image.mode == mode else image.convert(mode)


def read_rgb(path: str | Path) -> Tensor:
    """Read a picture as 8-bit RGB, for data sets.

    Grey, palette and 1-bit become the RGB that they stand for; 16-bit grey is divided by 257 and rounded;
    alpha is dropped, ICC profiles are ignored, the EXIF orientation is applied.

    Returns:
        uint8 (3, H, W), RGB.

    Raises:
        SRError: as for :func:`open_image`; or CMYK, an animation, or 32-bit samples, whose range is unknown.
    """
    with opened(Path(path)) as image:
        _check_rgb(image, path)
    image = open_image(path)
    if is_16_bit(image):
        values = np.asarray(image).astype(np.int64)
        return torch.from_numpy(((values + 128) // 257).astype(np.uint8)).expand(3, -1, -1).contiguous()
    if image.mode != "RGB":
        try:
            image = straight(image).convert("RGB")
        except ValueError as exc:
            raise SRError(f"{path} is in colour mode {image.mode}, which is not read; save it as RGB") from exc
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_tensor(image: Image.Image | np.ndarray) -> Tensor:
    """Picture or array to a float tensor in [0, 1]; the type decides the divisor (255 or 65535).

    Args:
        image: a PIL picture (palette and CMYK become RGB, or RGBA where the palette is transparent) or an array
            (H, W) or (H, W, C), uint8, uint16, bool, or floating point in [0, 1] (taken as it is).

    Returns:
        float32 (C, H, W); C is 1 for grey, 2 grey and alpha, 3 RGB, 4 RGBA.

    Raises:
        SRError: another type or shape.
    """
    if isinstance(image, Image.Image):
        if is_16_bit(image):
            array = np.asarray(image).astype(np.uint16)
        else:
            array = np.array(image if image.mode == "F" else straight(image))
    else:
        array = np.asarray(image)
    if array.ndim not in (2, 3):
        raise SRError(f"a picture has the shape (H, W) or (H, W, C), not {array.shape}")
    if array.dtype == np.bool_:
        array, top = array.astype(np.float32), 1
    elif array.dtype in (np.uint8, np.uint16):
        array, top = array.astype(np.float32), int(np.iinfo(array.dtype).max)
    elif np.issubdtype(array.dtype, np.floating):
        array, top = array.astype(np.float32), 1
    else:
        raise SRError(f"pictures are uint8, uint16, bool or floating point, not {array.dtype}")
    return torch.from_numpy(np.ascontiguousarray(np.atleast_3d(array).transpose(2, 0, 1))) / top


def to_image(tensor: Tensor, bits: int = 8) -> Image.Image:
    """Tensor to a PIL picture, clamped and rounded to the nearest: ``floor(255 x + 0.5)``.

    Args:
        tensor: (C, H, W) or (1, C, H, W) with C of 1 to 4, floating point in [0, 1], or uint8 (taken as it is).
        bits: 8, or 16 for one channel (mode ``I;16``).

    Raises:
        SRError: another shape or type, 16 bits for more than one channel (Pillow has no such mode), or NaN.
    """
    if tensor.dim() == 4 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 3 or not 1 <= tensor.shape[0] <= 4:
        raise SRError(f"a picture has the shape (C, H, W) with 1 to 4 channels, not {tuple(tensor.shape)}")
    if bits not in (8, 16) or (bits == 16 and tensor.shape[0] != 1):
        raise SRError(f"{bits} bits for {tensor.shape[0]} channels is not possible; use 8, or 16 for one channel")
    values = tensor.detach().cpu()
    if values.is_floating_point():
        if torch.isnan(values).any():
            raise SRError("the picture holds NaN; run the network in float32")
        top = 2**bits - 1
        array = (values.double().clamp(0, 1) * top + 0.5).floor().numpy()
    elif values.dtype == torch.uint8:
        array = values.numpy().astype(np.int64) * (257 if bits == 16 else 1)
    else:
        raise SRError(f"a picture is uint8 or floating point, not {tensor.dtype}")
    array = array.astype(np.uint8 if bits == 8 else np.uint16).transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array))


def check_output(path: str | Path, inputs: Iterable[str | Path] = (), mode: str = "RGB") -> None:
    """Find out before any work whether a picture can be written to ``path``.

    Args:
        path: the file to be written.
        inputs: files that it must not replace.
        mode: Pillow's mode of the picture.

    Raises:
        SRError: unknown suffix, missing folder, a folder of that name, one of ``inputs``, or a mode that the format
            cannot hold.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        known = " ".join(sorted(IMAGE_SUFFIXES))
        raise SRError(f"{path}: pictures are not written with the suffix {path.suffix!r}; use one of {known}")
    if not path.parent.is_dir():
        raise SRError(f"cannot write {path}: the folder {path.parent} does not exist; create it")
    if path.is_dir():
        raise SRError(f"cannot write {path}: a folder has this name; choose another")
    if any(path.resolve() == Path(i).resolve() for i in inputs):
        raise SRError(f"{path} is the input as well, and would be replaced; choose another name")
    kind = FORMATS[path.suffix.lower()]
    try:
        Image.new(mode, (1, 1)).save(io.BytesIO(), format=kind)
    except (OSError, ValueError, KeyError) as exc:
        raise SRError(f"{path}: {kind} cannot hold a picture of mode {mode}; choose another suffix") from exc


def save_image(image: Image.Image, path: str | Path, **params: Any) -> None:
    """Write a picture; the file appears complete or not at all.

    It is written under a temporary, hidden name in the same folder, then renamed; an existing file is replaced.
    Defaults keep detail: JPEG quality 95 without chroma subsampling, lossless WebP.

    Args:
        image: the picture.
        path: the file; its suffix decides the format.
        **params: Pillow's options of the format (``quality``, ``exif``, ``icc_profile``, ...); they win over
            the defaults.

    Raises:
        SRError: as for :func:`check_output`; an unwritable folder, or a mode that the format cannot hold.
    """
    check_output(path)
    path = Path(path)
    kind = FORMATS[path.suffix.lower()]
    if kind == "WEBP" and image.mode[0] in "IF":  # Pillow would clip it to 8 bits without a word
        raise SRError(f"cannot write {path}: WEBP does not take {image.mode} samples; use .png")
    defaults = dict(_KEEP_DETAIL.get(kind, {}))
    if "quality" in params:
        defaults.pop("lossless", None)
    with atomic(path) as file:
        try:
            image.save(file, format=kind, **{**defaults, **params})
        except (OSError, ValueError, KeyError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:  # disk full, and the like
                raise
            raise SRError(f"cannot write {path}: {kind} does not take it ({exc}); use .png") from exc
