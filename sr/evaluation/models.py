"""What can be scored: a network, an ONNX file, or a folder of pictures that somebody else made."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from sr.archs.sparsesr import set_sparsity
from sr.checkpoint import load
from sr.data import PictureSet
from sr.data.pairs import by_stem
from sr.errors import SRError
from sr.image import image_size, list_images, read_rgb
from sr.inference import Upscaler
from sr.network import SRNetwork

BICUBIC = "bicubic"
_SHOWN = 3
_TIFF_BITS = 258  # the tag BitsPerSample
# x4 as a word of its own, or at the end of another: baby_x4_IMDN, 0801x4.
_MARK = re.compile(r"(?:[_\-. ]|(?<=[^\W_]))x(\d+)(?=[_\-. ]|$)", re.IGNORECASE)
# What may follow the common part of a picture's names: x4, _HR, or anything after a separator.
_ENDING = re.compile(r"(?:x\d+)?(?:[_\-. ].*)?", re.IGNORECASE)
_ROLE = re.compile(r"[_\-. ](?:HR|GT)$", re.IGNORECASE)

#: (index in the set, LQ (3, h, w), uint8 or float in [0, 1]) -> (3, H, W), the same type or uint8.
Run = Callable[[int, Tensor], Tensor]


class Model(ABC):
    """Something that has an enlarged picture for every LQ of a set.

    Attributes:
        name: what tables and folders call it.
        source: where it came from.
        scale: output edge / input edge.
    """

    def __init__(self, name: str, source: str, scale: int) -> None:
        self.name = name
        self.source = source
        self.scale = scale

    @abstractmethod
    def bind(self, pictures: PictureSet, modcrop: bool = False) -> Run:
        """Check everything that can be checked before computing, for a set prepared for this scale.

        Args:
            pictures: the set.
            modcrop: let a result differ from its GT by less than ``scale`` pixels per edge.

        Raises:
            SRError: pictures are missing or do not fit.
        """


class NetworkModel(Model):
    """A network that :func:`sr.load` reads."""

    def __init__(self, name: str, source: str, upscaler: Upscaler) -> None:
        super().__init__(name, source, upscaler.scale)
        self.upscaler = upscaler

    def bind(self, pictures: PictureSet, modcrop: bool = False) -> Run:
        """Nothing to check."""
        return lambda i, lq: self.upscaler(lq)


class FolderModel(Model):
    """Ready pictures, in the folder or in a sub-folder named after the set; they are found by name.

    A result is called like its GT, or like it with an ending: ``baby``, ``baby_x4``, ``babyx4_IMDN``, and for a GT
    ``img_001_HR`` also ``img_001_IMDN``. Other pictures in the folder are left alone.
    """

    def __init__(self, name: str, path: Path, scale: int) -> None:
        super().__init__(name, str(path), scale)
        self.path = path

    def bind(self, pictures: PictureSet, modcrop: bool = False) -> Run:
        """Find every picture, and compare the sizes in the headers."""
        root = self.path / pictures.name
        files = find_results(pictures, root if root.is_dir() else self.path)
        for file, (height, width) in zip(files, pictures.gt_sizes, strict=True):
            check_8bit(file)
            h, w = image_size(file)
            near = abs(h - height) < self.scale and abs(w - width) < self.scale
            if (h, w) != (height, width) and not (modcrop and near):
                advice = "; --modcrop cuts both to what they share" if near and not modcrop else ""
                raise SRError(f"{file} is {_hw((h, w))}, but its GT is {_hw((height, width))}{advice}")
        return lambda i, lq: read_rgb(files[i])


def open_models(
    sources: Sequence[str],
    scales: Sequence[int] = (),
    *,
    tile: int | None = None,
    sparsity: float | None = None,
    device: str | None = None,
) -> list[Model]:
    """Open what the user named.

    Args:
        sources: names of known weights, files that :func:`sr.load` reads, ``.onnx`` files, folders of pictures.
        scales: the scales that are wanted; none: the models' own.
        tile: edge of a tile in input pixels, for networks.
        sparsity: for SparseSR; see :func:`sr.archs.sparsesr.set_sparsity`.
        device: where networks compute.

    Raises:
        SRError: a model cannot be read, is named twice, or has none of ``scales``.
    """
    models: list[Model] = []
    taken = {BICUBIC}
    for source in sources:
        path = Path(source)
        name = path.name if path.is_dir() else source
        if path.is_file():
            name = path.name.removesuffix(path.suffix)
        if name in taken:
            name = source.strip("/.").replace("/", "_")
        if name in taken:
            raise SRError(f"there is already a model {name!r}; name each once")
        taken.add(name)
        if path.is_dir():
            model: Model = FolderModel(name, path, _folder_scale(path, scales))
        elif path.suffix == ".onnx":  # whole pictures: what it looks at, and so the margin of a tile, is unknown
            model = NetworkModel(name, source, _upscaler(load(source, device or "cpu"), None, device))
        else:
            network = load(source)
            if sparsity is not None:
                set_sparsity(network, sparsity)
            model = NetworkModel(name, source, _upscaler(network, tile, device))
        if scales and model.scale not in scales:
            raise SRError(f"{source} enlarges {model.scale} times, not {' or '.join(map(str, scales))}")
        models.append(model)
    return models


def _upscaler(network: SRNetwork, tile: int | None, device: str | None) -> Upscaler:
    """In float32, also on a GPU: scores are compared with those of papers."""
    return Upscaler(network, tile=tile, device=device, dtype=torch.float32)


def find_results(pictures: PictureSet, root: Path) -> list[Path]:
    """The file under ``root`` that belongs to each picture of a set, in its order; see :class:`FolderModel`.

    Raises:
        SRError: results are missing, or several belong to one picture.
    """
    files = by_stem(root, list_images(root))
    names = set(pictures.names)
    cores = {_core(name, pictures.scale): name for name in names}
    found: dict[str, list[Path]] = defaultdict(list)
    other_scales: set[int] = set()
    for stem, file in files.items():
        if stem in names:
            found[stem].insert(0, file)
            continue
        fitting = [core for core in cores if stem.startswith(core) and _ENDING.fullmatch(stem, len(core))]
        if not fitting:
            continue
        core = max(fitting, key=len)
        marks = {int(mark) for mark in _MARK.findall(stem)} - {int(mark) for mark in _MARK.findall(core)}
        if marks - {pictures.scale}:
            other_scales |= marks
        else:
            found[cores[core]].append(file)
    missing = [name for name in pictures.names if name not in found]
    if missing:
        hint = f" (there are pictures for x{other_scales.pop()})" if len(other_scales) == 1 else ""
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        some = ", ".join(missing[:_SHOWN]) + more
        raise SRError(f"{root} lacks {len(missing)} of {len(names)} pictures of {pictures.name}: {some}{hint}")
    for name, candidates in found.items():
        if len(candidates) > 1 and candidates[0] != files.get(name):
            raise SRError(f"{candidates[0]} and {candidates[1].name} could both belong to {name}; remove one of them")
    return [found[name][0] for name in pictures.names]


def check_8bit(path: Path) -> None:
    """Refuse a picture of 16 bits a channel, by its header: the protocols compare what 8-bit files hold."""
    with Image.open(path) as image:
        deep = image.mode.startswith("I")
        if image.format == "TIFF":
            deep |= max(image.tag_v2.get(_TIFF_BITS, (8,))) > 8
    if path.suffix.lower() == ".png":  # Pillow opens 16-bit colour as if it had 8
        with path.open("rb") as file:
            deep |= file.read(25)[24] > 8
    if deep:
        raise SRError(f"{path} has 16 bits a channel, and scores compare 8-bit pictures; save it with 8 bits")


def _core(name: str, scale: int) -> str:
    """A GT's name without the marks of scale and role at its end: what its results' names start with."""
    name = _ROLE.sub("", name)
    marked = re.sub(rf"_?x{scale}$", "", name, flags=re.IGNORECASE)
    return _ROLE.sub("", marked) or name


def _folder_scale(path: Path, scales: Sequence[int]) -> int:
    marks = _MARK.findall(path.name)
    if marks:
        return int(marks[-1])
    if len(scales) == 1:
        return scales[0]
    raise SRError(f"the name of {path} does not say its scale; give one, e.g. --scale 4")


def _hw(size: Sequence[int]) -> str:
    return f"{size[1]}x{size[0]}"
