"""Scores as text, Markdown, CSV and JSON; every number stands beside the protocol it came from."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import sr
from sr.atomic import write_text
from sr.evaluation.models import BICUBIC
from sr.evaluation.scores import Mean, PictureScores, mean
from sr.metrics import Protocol

_SHOWN = 3


@dataclass(frozen=True)
class SetScores:
    """The scores of all pictures of one set.

    Attributes:
        name: the set's.
        scale: output edge / input edge.
        models: names in the order of the table, bicubic first.
        pictures: what :func:`sr.evaluation.evaluate` gave.
    """

    name: str
    scale: int
    models: list[str]
    pictures: list[PictureScores]

    def mean(self, model: str, protocol: Protocol, index: int = 0) -> Mean:
        """The model's scores by a protocol, which is the ``index``-th of those that were evaluated."""
        return mean([picture.scores[model][index] for picture in self.pictures], protocol.pooled)

    def perceptual(self, model: str) -> dict[str, float]:
        """The model's means of the other metrics."""
        seen = [picture.perceptual.get(model, {}) for picture in self.pictures]
        return {metric: math.fsum(values[metric] for values in seen) / len(seen) for metric in seen[0]}

    def notes(self, protocol: Protocol) -> list[str]:
        """What a reader of the numbers must know."""
        notes = []
        grey = [picture.name for picture in self.pictures if picture.grey]
        if grey:
            more = f" and {len(grey) - _SHOWN} more" if len(grey) > _SHOWN else ""
            names = ", ".join(grey[:_SHOWN]) + more
            notes.append(f"{self.name}: {names}: grey GT, scored as RGB with three equal channels")
        for model in self.models:
            count = self.mean(model, protocol).identical
            if count:
                notes.append(f"{self.name}: {model} equals the GT in {count} pictures, which its PSNR leaves out")
        return notes


@dataclass(frozen=True)
class Report:
    """What a run of ``scripts/evaluate.py`` found.

    Attributes:
        sets: one for each scale and set.
        protocol: of the numbers.
        sources: model -> where it came from.
        implementations: perceptual metric -> what computed it.
    """

    sets: list[SetScores]
    protocol: Protocol
    sources: Mapping[str, str]
    implementations: Mapping[str, str]

    def tables(self) -> str:
        """Markdown: for each scale a table of models by sets, PSNR/SSIM (gain over bicubic in dB)."""
        return "\n".join(self._table(scale) for scale in sorted({s.scale for s in self.sets}))

    def markdown(self) -> str:
        """The tables, then the values of each picture."""
        parts = [self.tables()]
        for scores in self.sets:
            rows = [
                [p.name, *(cell(p.scores[m][0].psnr, p.scores[m][0].ssim) for m in scores.models)]
                for p in scores.pictures
            ]
            title = f"{scores.name} x{scores.scale}, PSNR/SSIM by {self.protocol.name}"
            parts.append(f"## {title}\n\n{markdown_table(['picture', *scores.models], rows)}")
        return "\n".join(parts)

    def csv(self) -> str:
        """One line for each picture and model."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        metrics = list(self.implementations)
        writer.writerow(["scale", "set", "picture", "model", "protocol", "crop", "psnr", "ssim", *metrics])
        for s in self.sets:
            how = self.protocol.name, self.protocol.crop(s.scale)
            for picture in s.pictures:
                for model in s.models:
                    score, seen = picture.scores[model][0], picture.perceptual.get(model, {})
                    values = [score.psnr, score.ssim, *(seen[m] for m in metrics)]
                    writer.writerow([s.scale, s.name, picture.name, model, *how, *values])
        return out.getvalue()

    def json(self) -> str:
        """Everything; an infinite PSNR is ``null``."""
        content = {
            "sr": sr.__version__,
            "torch": torch.__version__,
            "protocol": asdict(self.protocol),
            "implementations": dict(self.implementations),
            "models": dict(self.sources),
            "results": [self._set(scores) for scores in self.sets],
        }
        return json.dumps(content, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write ``results.md``, ``results.csv`` and ``results.json`` into a folder, which is created."""
        for name, text in (("md", self.markdown()), ("csv", self.csv()), ("json", self.json())):
            write_text(folder / f"results.{name}", text)

    def _table(self, scale: int) -> str:
        sets = [s for s in self.sets if s.scale == scale]
        rows = []
        for model in sets[0].models:
            row = [model]
            for s in sets:
                own, cubic = s.mean(model, self.protocol), s.mean(BICUBIC, self.protocol)
                gain = "" if model == BICUBIC else f" ({own.psnr - cubic.psnr:+.3f})"
                row.append(cell(own.psnr, own.ssim) + gain)
                row += [f"{value:.4f}" for value in s.perceptual(model).values()]
            rows.append(row)
        header = ["model"]
        for s in sets:
            header += [f"{s.name} [{self.protocol.name}]", *(f"{s.name} {metric}" for metric in self.implementations)]
        lines = [
            f"## x{scale}, PSNR/SSIM (gain over bicubic in dB)",
            "",
            markdown_table(header, rows),
            f"{self.protocol.name}: {self.protocol.describe(scale)}.",
            *(f"{metric}: {text}; 8-bit RGB, same crop." for metric, text in self.implementations.items()),
            *(f"{note}." for s in sets for note in s.notes(self.protocol)),
        ]
        return "\n".join(lines) + "\n"

    def _set(self, s: SetScores) -> dict[str, Any]:
        means = {}
        for model in s.models:
            own, cubic = s.mean(model, self.protocol), s.mean(BICUBIC, self.protocol)
            means[model] = {
                "psnr": _finite(own.psnr),
                "ssim": own.ssim,
                "gain": _finite(own.psnr - cubic.psnr),
                "identical": own.identical,
                **s.perceptual(model),
            }
        pictures = {
            p.name: {
                m: {"psnr": _finite(p.scores[m][0].psnr), "ssim": p.scores[m][0].ssim, **p.perceptual.get(m, {})}
                for m in s.models
            }
            for p in s.pictures
        }
        return {
            "scale": s.scale,
            "set": s.name,
            "protocol": self.protocol.name,
            "crop": self.protocol.crop(s.scale),
            "notes": s.notes(self.protocol),
            "means": means,
            "pictures": pictures,
        }


def matrix(scores: SetScores, protocols: Sequence[Protocol], offset: int = 0) -> str:
    """Markdown: the same pictures by every protocol, mean and pooled, so that a reader finds what a paper used.

    Args:
        scores: evaluated with ``protocols``, after ``offset`` others.
        protocols: the rows.
        offset: index of the first of them.
    """
    rows = []
    for index, protocol in enumerate(protocols, offset):
        row = [protocol.name]
        for model in scores.models:
            own = scores.mean(model, protocol.but(pooled=False), index)
            row += [cell(own.psnr, own.ssim), f"{scores.mean(model, protocol.but(pooled=True), index).psnr:.3f}"]
        rows.append(row)
    header = ["what is compared"]
    for model in scores.models:
        header += [f"{model}: mean PSNR/SSIM", "pooled PSNR"]
    return f"## {scores.name} x{scores.scale}: every way to compare\n\n{markdown_table(header, rows)}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns also line up as plain text."""
    cells = [[text.replace("|", r"\|") for text in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "".join(f"| {line} |\n" for line in lines)


def cell(psnr: float, ssim: float) -> str:
    """PSNR and SSIM as papers write them, with a digit to spare."""
    return f"{psnr:.3f}/{ssim:.4f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
