"""Which LQ file belongs to which GT file."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from sr.errors import SRError

_SHOWN = 3
# HR, GT, LR, LQ and RCAN's LRBI, LRBD, LRDN as a word of their own.
_ROLE = re.compile(r"(?<![A-Za-z])(?:HR|GT|LQ|LR(?:BI|BD|DN)?)(?![A-Za-z])", re.IGNORECASE)
_MARK = re.compile(r"_?x(\d+)$", re.IGNORECASE)


def by_stem(root: Path, files: Sequence[Path]) -> dict[str, Path]:
    """Relative path without suffix (POSIX style) -> file; two files that differ by suffix only are refused."""
    table: dict[str, Path] = {}
    for file in files:
        stem = file.relative_to(root).with_suffix("").as_posix()
        if stem in table:
            raise SRError(
                f"{table[stem]} and {file.name} differ only by suffix, so they cannot be told apart; keep one of them"
            )
        table[stem] = file
    return table


def match_pairs(
    name: str, gt: tuple[Path, Sequence[Path]], lq: tuple[Path, Sequence[Path]], scale: int
) -> list[tuple[str, Path, Path]]:
    """Pair GT with LQ files by relative path without suffix, then by what is left without the usual marks.

    Args:
        name: the data set's, for messages.
        gt: the GT folder and its files.
        lq: the LQ folder and its files.
        scale: the factor whose mark (``x4``, ``_x4``) may end a name.

    Returns:
        (relative path of GT without suffix, GT file, LQ file), in the order of the GT files.

    Raises:
        SRError: a file without partner, or one with several.
    """
    gts, lqs = by_stem(*gt), by_stem(*lq)
    plain_lqs = {unicodedata.normalize("NFC", stem): stem for stem in lqs}
    partner = {s: plain_lqs[n] for s in gts if (n := unicodedata.normalize("NFC", s)) in plain_lqs}
    taken = set(partner.values())
    rest_gt = by_core((s for s in gts if s not in partner), scale)
    rest_lq = by_core((s for s in lqs if s not in taken), scale)
    lonely_gt, lonely_lq = [], []
    for core in rest_gt | rest_lq:
        ours, theirs = rest_gt.get(core, []), rest_lq.get(core, [])
        if not theirs:
            lonely_gt += ours
        elif not ours:
            lonely_lq += theirs
        elif len(ours) > 1 or len(theirs) > 1:
            raise SRError(
                f"data set {name!r}: {_some(gts[s] for s in ours)} could belong to {_some(lqs[s] for s in theirs)};\n"
                "give partners the same name"
            )
        else:
            partner[ours[0]] = theirs[0]
    complaints = []
    if lonely_gt:
        complaints.append(f"{_count(lonely_gt, 'GT')} no LQ partner in {lq[0]}: {_some(gts[s] for s in lonely_gt)}")
    if lonely_lq:
        complaints.append(f"{_count(lonely_lq, 'LQ')} no GT partner in {gt[0]}: {_some(lqs[s] for s in lonely_lq)}")
    if complaints:
        marks = {m[1] for s in lonely_lq if (m := _MARK.search(s)) and int(m[1]) != scale}
        hint = f" (the names say x{marks.pop()}, but scale is {scale})" if len(marks) == 1 else ""
        raise SRError(f"data set {name!r}: {'; '.join(complaints)}{hint};\nadd the missing pictures or remove these")
    return [(stem, gts[stem], lqs[partner[stem]]) for stem in gts]


def by_core(stems: Iterable[str], scale: int) -> dict[str, list[str]]:
    """Stems grouped by what is left of them without the marks of scale and of role."""
    groups = defaultdict(list)
    for stem in stems:
        folder, _, file = unicodedata.normalize("NFC", stem).rpartition("/")
        mark = _MARK.search(file)
        if mark and int(mark[1]) == scale:
            file = file[: mark.start()]
        groups[folder, re.sub(r"[_\-. ]+", "_", _ROLE.sub("", file)).strip("_")].append(stem)
    return {f"{folder}/{file}": stems for (folder, file), stems in groups.items()}


def _count(items: Sequence[str], what: str) -> str:
    return f"1 {what} picture has" if len(items) == 1 else f"{len(items)} {what} pictures have"


def _some(files: Iterable[Path]) -> str:
    """The first few names."""
    names = [f.name for f in files]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
