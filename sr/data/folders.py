"""Named sets of (LQ, GT) pictures in folders; patches are cut in :mod:`sr.data.patches`.

A set is built from paths alone, and told the scale once it is known: ``prepare(scale)`` lists the files, pairs them and
checks every size from the headers, so that a wrong pair stops a run before it starts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from sr.data.pairs import by_stem, match_pairs
from sr.errors import SRError
from sr.image import list_images, read_rgb, rgb_size
from sr.resize import imresize

log = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Picture:
    """One picture of a set, as far as it is known without decoding it.

    Attributes:
        name: relative path without suffix, POSIX style; unique in its set.
        gt: the GT file.
        lq: the LQ file, or ``None`` where LQ is made from GT.
        header: (H, W) of the GT file.
        gt_size: (H, W) of the GT after cropping to ``scale`` x LQ.
    """

    name: str
    gt: Path
    lq: Path | None
    header: tuple[int, int]
    gt_size: tuple[int, int]


class PictureSet(ABC):
    """A named list of (LQ, GT) pictures.

    A subclass writes :meth:`find`. Everything but ``name`` needs :meth:`prepare` first.

    Attributes:
        name: how logs and messages call the set, e.g. ``Set5``.
        scale: GT edge / LQ edge; 0 before :meth:`prepare`.
        on_error: what happens to a picture that cannot be read: ``raise`` an error, or ``skip`` it.
        skipped: what was wrong with each picture left out.
    """

    def __init__(self, name: str) -> None:
        if not name or "/" in name or "\\" in name:
            raise SRError(f"the name of a picture set goes into file names, and cannot be {name!r}; give another")
        self.name = name
        self.scale = 0
        self.on_error: OnError = "raise"
        self.skipped: list[str] = []
        self._pictures: list[Picture] = []

    @abstractmethod
    def find(self, scale: int) -> list[Picture]:
        """List the pictures and check them without decoding any; raise :class:`~sr.errors.SRError`.

        What concerns one picture only is done inside ``with self.trying():``.
        """

    def prepare(self, scale: int, on_error: OnError = "raise") -> None:
        """List and check the pictures for a scale; cheap, and nothing at all the second time.

        Args:
            scale: GT edge / LQ edge, at least 1.
            on_error: ``skip`` leaves out pictures that cannot be read, and says so.

        Raises:
            SRError: a folder is missing or empty, a picture has no partner, has the wrong size, or cannot be read; or
                none of them can.
        """
        if not isinstance(scale, int) or scale < 1:
            raise SRError(f"scale must be a whole number of at least 1, not {scale!r}")
        if scale == self.scale and on_error == self.on_error:
            return
        self.on_error, self.skipped = on_error, []
        self._pictures = self.find(scale)
        self._report(self.skipped)
        self.scale = scale
        cut = sum(p.header != p.gt_size for p in self._pictures)
        if cut:
            log.info("%d of %d pictures of %r are cut to a multiple of %d", cut, len(self), self.name, scale)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """An error inside the block leaves out one picture, if the set was prepared so."""
        try:
            yield
        except SRError as e:
            if self.on_error == "raise":
                raise
            self.skipped.append(str(e))

    def try_all(self) -> None:
        """Read every picture once, so that none fails later: it raises now, or is left out, as ``on_error`` has it."""
        errors = {}
        for i in range(len(self)):
            try:
                self.pair(i)
            except SRError as e:
                if self.on_error == "raise":
                    raise
                errors[i] = str(e)
        self.drop(errors)

    def drop(self, errors: Mapping[int, str]) -> None:
        """Leave out pictures that turned out to be unreadable.

        Args:
            errors: index -> what is wrong.

        Raises:
            SRError: no picture is left.
        """
        self._pictures = [p for i, p in enumerate(self._pictures) if i not in errors]
        self.skipped += errors.values()
        self._report(list(errors.values()))

    def _report(self, errors: list[str]) -> None:
        if errors and not self._pictures:
            raise SRError(f"no picture of {self.name!r} can be read, e.g. {errors[0]}")
        if errors:
            log.warning("%d pictures of %r are left out:\n  %s", len(errors), self.name, "\n  ".join(errors))

    @property
    def pictures(self) -> list[Picture]:
        """The pictures, sorted by name."""
        if not self.scale:
            raise RuntimeError(f"the picture set {self.name!r} needs prepare(scale) first")
        return self._pictures

    @property
    def names(self) -> list[str]:
        """Relative paths without suffix, POSIX style, unique."""
        return [p.name for p in self.pictures]

    @property
    def gt_sizes(self) -> list[tuple[int, int]]:
        """(H, W) of each GT as :meth:`pair` gives it."""
        return [p.gt_size for p in self.pictures]

    def __len__(self) -> int:
        return len(self.pictures)

    def read_gt(self, i: int) -> Tensor:
        """Read the ground truth of picture ``i``.

        Returns:
            uint8 (3, H, W), RGB, contiguous; multiples of the scale.

        Raises:
            SRError: a file cannot be read, or is no longer what :meth:`prepare` saw.
        """
        picture = self.pictures[i]
        gt = read_rgb(picture.gt)
        if tuple(gt.shape[-2:]) != picture.header:
            raise SRError(
                f"{picture.gt} is {_hw(gt.shape[-2:])}, but its header said {_hw(picture.header)}; save it anew"
            )
        h, w = picture.gt_size
        return gt[:, :h, :w].contiguous()

    def pair(self, i: int) -> tuple[Tensor, Tensor]:
        """Read picture ``i``, or make its LQ from the whole GT.

        Returns:
            lq: uint8 (3, h, w), RGB; gt: uint8 (3, scale*h, scale*w), RGB, contiguous.

        Raises:
            SRError: a file cannot be read, or is no longer what :meth:`prepare` saw.
        """
        picture, gt = self.pictures[i], self.read_gt(i)
        h, w = picture.gt_size
        if picture.lq is None:
            return imresize(gt, size=(h // self.scale, w // self.scale)), gt
        lq = read_rgb(picture.lq)
        if lq.shape[-2] * self.scale != h or lq.shape[-1] * self.scale != w:
            raise SRError(f"{picture.lq} is {_hw(lq.shape[-2:])}, not 1/{self.scale} of {_hw((h, w))}; save it anew")
        return lq, gt


class GTFolder(PictureSet):
    """High-resolution pictures only; LQ is MATLAB's bicubic reduction of the whole picture, in 8 bit.

    Each GT is cut at the right and bottom to a multiple of the scale first.
    """

    def __init__(self, root: str | Path, name: str | None = None) -> None:
        """Name the folder; nothing is read yet.

        Args:
            root: folder of pictures, sub-folders included.
            name: name in logs; default: the folder's.
        """
        super().__init__(name or Path(root).resolve().name)
        self.root = Path(root)

    def find(self, scale: int) -> list[Picture]:
        """List the folder; a picture smaller than ``scale`` is refused."""
        found = []
        for name, gt in by_stem(self.root, list_images(self.root)).items():
            with self.trying():
                h, w = rgb_size(gt)
                if min(h, w) < scale:
                    raise SRError(f"{gt} is {_hw((h, w))}, too small for scale {scale}; remove it")
                found.append(Picture(name, gt, None, (h, w), (h - h % scale, w - w % scale)))
        return found


class PairedFolder(PictureSet):
    """High-resolution pictures in one folder, their low-resolution partners in another.

    Partners have the same relative path without suffix, or one that differs by the usual marks only: ``0001`` and
    ``0001x4``, ``img_001_SRF_4_HR`` and ``img_001_SRF_4_LR``, ``bird_HR_x4`` and ``bird_LR_x4``. GT must be ``scale``
    times as large as LQ; less than ``scale`` pixels more are cut off at the right and bottom.
    """

    def __init__(self, gt: str | Path, lq: str | Path, name: str | None = None) -> None:
        """Name the folders; nothing is read yet.

        Args:
            gt: folder of high-resolution pictures, sub-folders included.
            lq: folder of low-resolution pictures.
            name: name in logs; default: the GT folder's.
        """
        super().__init__(name or Path(gt).resolve().name)
        self.gt = Path(gt)
        self.lq = Path(lq)

    def find(self, scale: int) -> list[Picture]:
        """Pair the two folders and compare the sizes in the headers."""
        pairs = match_pairs(self.name, (self.gt, list_images(self.gt)), (self.lq, list_images(self.lq)), scale)
        found, wrong, exchanged = [], [], True
        for name, gt, lq in pairs:
            with self.trying():
                size, (lq_h, lq_w) = rgb_size(gt), rgb_size(lq)
                h, w = lq_h * scale, lq_w * scale
                if not (h <= size[0] < h + scale and w <= size[1] < w + scale):
                    wrong.append(f"{gt} is {_hw(size)} and {lq} is {_hw((lq_h, lq_w))}")
                    exchanged = exchanged and size[0] < lq_h and size[1] < lq_w
                found.append(Picture(name, gt, lq, size, (h, w)))
        if wrong:
            more = f" (and {len(wrong) - 1} more pairs)" if len(wrong) > 1 else ""
            if exchanged:
                raise SRError(
                    f"data set {self.name!r}: GT and LQ are exchanged: {wrong[0]}{more};\nGT is the larger one"
                )
            raise SRError(
                f"data set {self.name!r}: GT must be {scale} x LQ, but {wrong[0]}{more};\n"
                "check that scale and the LQ folder belong together"
            )
        return found


class BenchmarkFolder(PictureSet):
    """A data set in the layout of the public benchmarks, whatever the scale.

    With ``HR`` and ``LR_bicubic/X{scale}`` under ``root`` those are the pairs; with ``HR`` alone, or pictures directly
    under ``root``, LQ is made as in :class:`GTFolder`.
    """

    def __init__(self, root: str | Path, name: str | None = None) -> None:
        """Name the folder; nothing is read yet.

        Args:
            root: the data set's folder.
            name: name in logs; default: the folder's.
        """
        super().__init__(name or Path(root).resolve().name)
        self.root = Path(root)

    def find(self, scale: int) -> list[Picture]:
        """List and check as the set for the layout does."""
        plain = self.layout(scale)
        plain.on_error, plain.skipped = self.on_error, self.skipped
        return plain.find(scale)

    def layout(self, scale: int) -> GTFolder | PairedFolder:
        """The plain set that the folder stands for; it is not prepared.

        Raises:
            SRError: the folder has no layout that is known.
        """
        gt, lq = self.root / "HR", self.root / "LR_bicubic"
        if not gt.is_dir():
            if lq.is_dir():
                raise SRError(f"{self.root} holds LR_bicubic but no HR; put the high-resolution pictures in {gt}")
            inside = sorted(str(folder.parent) for folder in self.root.glob("*/HR") if folder.is_dir())
            if inside:
                raise SRError(f"{self.root} holds several data sets; name them one by one: {' '.join(inside)}")
            return GTFolder(self.root, self.name)
        for folder in (lq / f"X{scale}", lq / f"x{scale}"):
            if folder.is_dir():
                return PairedFolder(gt, folder, self.name)
        return GTFolder(gt, self.name)


def find_pictures(root: str | Path, scale: int, name: str | None = None) -> PictureSet:
    """A prepared set of whatever layout is found under ``root``; see :class:`BenchmarkFolder`.

    Args:
        root: the data set's folder.
        scale: GT edge / LQ edge.
        name: name in logs; default: the folder's.

    Raises:
        SRError: as for :meth:`PictureSet.prepare`.
    """
    pictures = BenchmarkFolder(root, name)
    pictures.prepare(scale)
    return pictures


def check_names(sets: Sequence[PictureSet], kind: str) -> None:
    """Refuse two sets of one name, where files or columns are named after them; ``kind`` is a plural."""
    names = [pictures.name for pictures in sets]
    for name in names:
        if names.count(name) > 1:
            raise SRError(f"two {kind} are called {name!r}; give one of them another name")


def _hw(size: Sequence[int]) -> str:
    """``width x height``, the order in which picture sizes are spoken of."""
    return f"{size[1]}x{size[0]}"
