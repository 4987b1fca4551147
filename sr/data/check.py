"""Faults of picture sets, all of them at once, before they cost a training run.

:meth:`~sr.data.folders.PictureSet.prepare` stops at the first fault. Here the same folders are gone through to the end.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sr.data.duplicates import Fingerprint, fingerprint, near_duplicates
from sr.data.findings import STYLES, Finding, Level, Report
from sr.data.folders import BenchmarkFolder, GTFolder, OnError, PairedFolder, PictureSet
from sr.data.pairs import by_core, match_pairs
from sr.data.reduction import EXACT, MATLAB, NEARLY, UNRELATED, Reduction, identify
from sr.errors import SRError
from sr.image import is_16_bit, list_images, opened, read_rgb, rgb_size

Progress = Callable[[int, int], None]

_SHIFT = 0.05  # LQ pixels; the error of the measurement is below 0.03 for known reductions
_VAGUE_SHIFT = 0.1  # and below 0.1 for unknown ones


def check(
    train: Sequence[PictureSet],
    val: Sequence[PictureSet],
    scale: int,
    gt_size: int,
    *,
    thorough: bool = True,
    on_error: OnError = "raise",
    max_pairs: int = 16,
    progress: Progress | None = None,
) -> Report:
    """Look for faults in picture sets; they need not be prepared, and are not changed.

    From names and headers: folders missing or empty, files that cannot be read, pictures without partner, sizes that do
    not fit the scale or the patch, alpha, 16 bit, palette, grey, JPEG as LQ. With ``thorough`` also: files that are cut
    short or damaged; a picture twice in ``train``, or in ``train`` and ``val``, as :mod:`sr.data.duplicates` finds it;
    LQ that is shifted or not made by MATLAB's bicubic, as :mod:`sr.data.reduction` finds it.

    Args:
        train: sets to train on.
        val: sets to validate on.
        scale: GT edge / LQ edge.
        gt_size: edge of the GT patches in pixels.
        thorough: decode every file, in threads; otherwise read headers only.
        on_error: with ``skip``, files that cannot be read are warnings, since training leaves them out.
        max_pairs: how many pairs of each set are compared, spread evenly over it.
        progress: called with (steps done, steps in all) while pictures are decoded and compared.
    """
    listed = [_Listed(s, role, scale, on_error) for role, sets in (("train", train), ("val", val)) for s in sets]
    for s in listed:
        s.check_headers()
    general = _check_patches(listed[: len(train)], scale, gt_size)
    if thorough:
        general += _check_contents(listed, max_pairs, progress)
    findings = general + [f for s in listed for f in s.findings]
    return Report(
        findings=sorted(findings, key=lambda f: list(STYLES).index(f.level)),
        summary=[s.summary(thorough) for s in listed],
    )


@dataclass(frozen=True)
class _Pair:
    gt: Path
    lq: Path | None
    size: tuple[int, int]  # of GT, cropped to scale x LQ


class _Listed:
    """A picture set gone through: its files, those of them that make sound pairs, and the findings."""

    def __init__(self, pictures: PictureSet, role: str, scale: int, on_error: OnError) -> None:
        self.name, self.role, self.scale = pictures.name, role, scale
        self.unreadable: Level = "error" if on_error == "raise" else "warning"
        self.findings: list[Finding] = []
        self.sizes: dict[Path, tuple[int, int]] = {}  # of the files that can be read as far as their headers tell
        self.pairs: list[_Pair] = []
        self.verdicts: dict[str, int] = {}
        self.files: list[tuple[Path, Path | None]] = []
        try:
            plain = pictures.layout(scale) if isinstance(pictures, BenchmarkFolder) else pictures
            self.files = self._list(plain)
        except SRError as e:
            self.add("error", str(e))
        self.gts = {gt for gt, _ in self.files}

    def add(self, level: Level, message: str, files: Iterable[Path] = ()) -> None:
        self.findings.append(Finding(level, self.name, message, tuple(files)))

    def _list(self, pictures: PictureSet) -> list[tuple[Path, Path | None]]:
        """(GT, LQ) files; those without partner are findings."""
        if isinstance(pictures, GTFolder):
            return [(gt, None) for gt in self._distinct(pictures.root)]
        if not isinstance(pictures, PairedFolder):
            return [(p.gt, p.lq) for p in pictures.find(self.scale)]
        gt, lq = self._distinct(pictures.gt), self._distinct(pictures.lq)
        try:
            found = match_pairs(self.name, (pictures.gt, gt), (pictures.lq, lq), self.scale)
            return [(g, q) for _, g, q in found]
        except SRError as e:
            sides = [
                {f.relative_to(root).with_suffix("").as_posix(): f for f in files}
                for root, files in ((pictures.gt, gt), (pictures.lq, lq))
            ]
            gts, lqs = (
                {core: side[stems[0]] for core, stems in by_core(side, self.scale).items() if len(stems) == 1}
                for side in sides
            )
            pairs: list[tuple[Path, Path | None]] = [(gts[core], lqs[core]) for core in gts if core in lqs]
            paired = {file for pair in pairs for file in pair}
            self.add("error", str(e), [f for f in [*gt, *lq] if f not in paired])
            return pairs

    def _distinct(self, root: Path) -> list[Path]:
        """The pictures of a folder; of files that differ by suffix only, the first."""
        groups = defaultdict(list)
        for file in list_images(root):
            groups[file.with_suffix("")].append(file)
        clash = [f for group in groups.values() if len(group) > 1 for f in group]
        if clash:
            self.add("error", f"{len(clash)} files differ by suffix only, and cannot be told apart", clash)
        return [group[0] for group in groups.values()]

    def check_headers(self) -> None:
        """Readability, colour and sizes, as far as headers tell."""
        traits: dict[str, list[Path]] = defaultdict(list)
        for gt, lq in self.files:
            for file in (gt, lq):
                if file is None:
                    continue
                try:
                    self.sizes[file] = rgb_size(file)
                    for trait in _traits(file):
                        traits[trait].append(file)
                except SRError as e:
                    self.add(self.unreadable, str(e), [file])
        for trait, files in traits.items():
            self.add("note", f"{_are(files)} {trait}", files)
        jpeg = [q for _, q in self.files if q is not None and q.suffix.lower() in (".jpg", ".jpeg", ".jfif")]
        if jpeg:
            self.add("warning", f"{_are(jpeg)} LQ in JPEG, whose artefacts a network would learn to undo", jpeg)
        self._check_sizes()

    def _check_sizes(self) -> None:
        small, cropped, wrong, ratios = [], [], [], set()
        for gt, lq in self.files:
            if gt not in self.sizes or (lq is not None and lq not in self.sizes):
                continue
            h, w = self.sizes[gt]
            if lq is None:
                size = h - h % self.scale, w - w % self.scale
            else:
                size = self.sizes[lq][0] * self.scale, self.sizes[lq][1] * self.scale
                if not all(0 <= have - need < self.scale for have, need in zip((h, w), size, strict=True)):
                    wrong += [gt, lq]
                    ratios |= {round(n / m) for n, m in zip((h, w), self.sizes[lq], strict=True)}
                    continue
            if 0 in size:
                small.append(gt)
                continue
            if size != (h, w):
                cropped.append(gt)
            self.pairs.append(_Pair(gt, lq, size))
        if small:
            self.add("error", f"{_are(small)} smaller than one pixel of LQ", small)
        if wrong:
            first = " and ".join("{1}x{0}".format(*self.sizes[f]) for f in wrong[:2])
            hint = f"; the sizes say scale {max(ratios)}" if len(ratios) == 1 and ratios != {self.scale} else ""
            if ratios == {0}:
                hint = "; GT and LQ are exchanged"
            self.add("error", f"GT of {len(wrong) // 2} pairs is not {self.scale} x LQ, e.g. {first}{hint}", wrong)
        if cropped:
            many = f"{len(cropped)} of {len(self.files)} GT pictures"
            self.add("note", f"{many} are no multiple of scale {self.scale}, and are cropped", cropped)
        if self.files and not self.pairs:
            self.add("error", "no picture of the set can be used")

    def sample(self, n: int) -> list[_Pair]:
        """At most ``n`` pairs of two files, spread evenly."""
        pairs = [p for p in self.pairs if p.lq is not None]
        return [pairs[i * len(pairs) // n] for i in range(n)] if len(pairs) > n else pairs

    def compare(self, compared: Sequence[tuple[_Pair, Reduction]]) -> None:
        """Findings about how the LQ of some pairs was made."""
        pairs, results = [p for p, _ in compared], [r for _, r in compared]
        groups: dict[str, list[int]] = defaultdict(list)
        for i, r in enumerate(results):
            groups[r.kind if r.known or r.kind == UNRELATED else "unknown"].append(i)
        self.verdicts = {kind: len(found) for kind, found in groups.items()}

        def add(level: Level, found: Sequence[int], message: str) -> None:
            files = [file for i in found for file in (pairs[i].gt, pairs[i].lq) if file is not None]
            self.add(level, f"LQ of {len(found)} of {len(pairs)} compared pairs {message}", files)

        limits = [_SHIFT if r.known else _VAGUE_SHIFT for r in results]
        moved = [i for i, r in enumerate(results) if max(map(abs, r.shift)) >= limits[i]]
        for kind, found in groups.items():
            if kind == UNRELATED:
                add("error", found, "does not show what GT shows; other pictures, colours or orientation")
            elif kind == "unknown":
                closest = max((results[i] for i in found), key=lambda r: r.psnr)
                best = f"{closest.kind}, {closest.psnr:.1f} dB"
                add("warning", found, f"is not {MATLAB}, nor made in another way that is known; closest: {best}")
            elif kind in (NEARLY, MATLAB):
                resting = [i for i in found if i not in moved]
                if resting:
                    add("note", resting, f"is {MATLAB} but for its rounding")
            elif kind != EXACT:
                worst = min(results[i].psnr for i in found)
                fit = "bit for bit" if math.isinf(worst) else f"{worst:.1f} dB or better"
                add("warning", found, f"is not {MATLAB}, but {kind} ({fit})")
        if moved:
            down, right = np.median([results[i].shift for i in moved], axis=0)
            add("warning", moved, f"is shifted by {down:+.2f} LQ pixels down and {right:+.2f} right (median)")

    def summary(self, thorough: bool) -> str:
        """What was looked at."""
        megapixels = sum(p.size[0] * p.size[1] for p in self.pairs) / 1e6
        text = f"{self.name} ({self.role}): {len(self.files)} pictures, {megapixels:.1f} megapixels"
        if not thorough:
            return text + ", headers only"
        if not self.verdicts:
            return text
        paired = sum(p.lq is not None for p in self.pairs)
        verdicts = "; ".join(f"{n} x {kind}" for kind, n in self.verdicts.items())
        return f"{text}; LQ of {sum(self.verdicts.values())} of {paired} pairs compared, spread evenly: {verdicts}"


def _traits(file: Path) -> Iterator[str]:
    """What is lost or made up when the picture becomes 8-bit RGB, from the header of a readable file."""
    with opened(file) as image:
        # Pillow opens 16-bit RGB as 8-bit RGB; only the decoder's settings tell.
        deep = image.format in ("PNG", "TIFF") and ";16" in str(getattr(image, "tile", ""))
        if deep or is_16_bit(image):
            yield "16 bit, of which 8 are used"
        if image.has_transparency_data:
            yield "with alpha, which is dropped"
        if image.mode == "P":
            yield "with a palette"
        elif image.mode in ("1", "L", "LA", "La") or is_16_bit(image):
            yield "grey"


def _check_patches(train: Sequence[_Listed], scale: int, gt_size: int) -> list[Finding]:
    names = ", ".join(s.name for s in train)
    if train and (gt_size < scale or gt_size % scale):
        return [Finding("error", names, f"gt_size {gt_size} is not a multiple of scale {scale}")]
    findings, enough = [], False
    for s in train:
        small = [p.gt for p in s.pairs if min(p.size) < gt_size]
        enough = enough or len(small) < len(s.pairs)
        if small:
            what = f"{len(small)} of {len(s.pairs)} GT pictures are smaller than gt_size {gt_size}, and are left out"
            findings.append(Finding("warning", s.name, what, tuple(small)))
    if any(s.pairs for s in train) and not enough:
        findings.append(Finding("error", names, f"no picture is large enough for gt_size {gt_size}"))
    return findings


def _check_contents(listed: Sequence[_Listed], max_pairs: int, progress: Progress | None) -> list[Finding]:
    """Decode every file and compare pairs; returned is what concerns several sets, the rest is left with them."""
    files = [(s, file) for s in listed for file in s.sizes]
    samples = [(s, pair) for s in listed for pair in s.sample(max_pairs)]
    jobs: list[Callable[[], Fingerprint | Reduction | SRError]] = [partial(_decode, *job) for job in files]
    jobs += [partial(_compare, *job) for job in samples]
    results = []
    with ThreadPoolExecutor(min(8, max(2, os.cpu_count() or 2))) as pool:
        for result in pool.map(lambda job: job(), jobs):
            results.append(result)
            if progress:
                progress(len(results), len(jobs))
    decoded = [(s, file, r) for (s, file), r in zip(files, results, strict=False)]
    compared = list(zip(samples, results[len(files) :], strict=True))
    for s, file, r in decoded:
        if isinstance(r, SRError):
            s.add(s.unreadable, str(r), [file])
    for s in listed:
        s.compare([(pair, r) for (owner, pair), r in compared if owner is s and isinstance(r, Reduction)])
    return _twice([(s, file, r) for s, file, r in decoded if isinstance(r, Fingerprint) and file in s.gts])


def _decode(s: _Listed, file: Path) -> Fingerprint | SRError:
    try:
        rgb = read_rgb(file)
        if tuple(rgb.shape[-2:]) != s.sizes[file]:
            raise SRError(f"{file} has another size than its header says; save it anew")
        return fingerprint(rgb)
    except SRError as e:
        return e


def _compare(s: _Listed, pair: _Pair) -> Reduction | SRError:
    assert pair.lq is not None
    try:
        gt = read_rgb(pair.gt)[:, : pair.size[0], : pair.size[1]].contiguous()
        return identify(read_rgb(pair.lq), gt, s.scale)
    except SRError as e:  # found by _decode as well, which reports it
        return e


def _twice(pictures: Sequence[tuple[_Listed, Path, Fingerprint]]) -> list[Finding]:
    """Pictures twice in train, or in train and val; those of train come first."""
    groups: dict[bytes, list[tuple[_Listed, Path, Fingerprint]]] = defaultdict(list)
    for picture in pictures:
        groups[picture[2].digest].append(picture)
    findings = []

    def add(level: Level, found: Sequence[tuple[_Listed, Path, Fingerprint]], message: str) -> None:
        where = " and ".join(dict.fromkeys(s.role for s, _, _ in found))
        names = ", ".join(dict.fromkeys(s.name for s, _, _ in found))
        findings.append(Finding(level, names, f"{message} in {where}", tuple(file for _, file, _ in found)))

    for group in groups.values():
        roles = [s.role for s, _, _ in group]
        if len(set(roles)) > 1:
            add("error", group, "the same picture, pixel for pixel,")
        elif roles.count("train") > 1:
            add("warning", group, f"the same picture, pixel for pixel, {len(group)} times")
    first = [group[0] for group in groups.values()]
    training = sum(s.role == "train" for s, _, _ in first)
    for i, j, correlation in near_duplicates([print_ for _, _, print_ in first], training):
        text = f"nearly the same picture (correlation {correlation:.4f}), perhaps turned or mirrored,"
        add("warning", [first[i], first[j]], text)
    return findings


def _are(files: Sequence[Path]) -> str:
    return "1 file is" if len(files) == 1 else f"{len(files)} files are"
