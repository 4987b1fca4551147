"""Curves of training runs, from the logs in their folders."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from sr.errors import SRError

# What goes into panels of its own, in this order, with the axis' label; validation comes first, one panel a data set.
_PANELS = {"train/loss": "loss", "train/grad_norm": "gradient norm", "lr": "learning rate"}
_MOST_POINTS = 200  # training values of a run are averaged into so many, or noise covers the other runs


def read_log(run: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The curves in a run folder's ``metrics.csv``.

    Args:
        run: a run folder, or the file.

    Returns:
        Name of the value -> steps and values, in the order of the steps; what was not a number is left out.

    Raises:
        SRError: there is no log, or nothing in it yet.
    """
    path = Path(run)
    path = path / "metrics.csv" if path.is_dir() else path
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        why = getattr(e, "strerror", "not a CSV file")
        raise SRError(f"no log of a run at {path} ({why}); give run folders, e.g. runs/quickstart/001") from e
    curves: dict[str, tuple[list[int], list[float]]] = {}
    try:
        for row in rows:
            for name, text in row.items():
                if name in ("step", "epoch") or not text or not math.isfinite(float(text)):
                    continue
                steps, values = curves.setdefault("lr" if name.startswith("lr-") else name, ([], []))
                steps.append(int(float(row["step"])))
                values.append(float(text))
    except (KeyError, ValueError, AttributeError) as e:
        raise SRError(f"{path} is no log of a run ({e})") from e
    if not curves:
        raise SRError(f"{path} holds no values yet")
    return curves


def plot_runs(runs: list[str | Path], output: str | Path) -> None:
    """Draw the runs' curves over each other, one panel a quantity.

    Args:
        runs: run folders.
        output: the picture to write; the suffix decides the format.

    Raises:
        SRError: no log, a folder that is not there, or matplotlib is not installed.
    """
    logs = {str(run): read_log(run) for run in runs}
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise SRError("drawing needs matplotlib: pip install -e '.[plots]'") from e
    names = {name for curves in logs.values() for name in curves}
    scores = sorted(name for name in names if name.startswith("val/") and name.endswith("psnr_y"))
    panels = [*scores, *(name for name in _PANELS if name in names)]
    if not panels:
        raise SRError(f"{next(iter(logs))}: neither validation nor training values in the log")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6 * columns, 3.6 * rows), layout="constrained")
    for number, name in enumerate(panels, 1):
        _draw(figure.add_subplot(rows, columns, number), name, logs)
    output = Path(output)
    try:
        figure.savefig(output, dpi=110)
    except (OSError, ValueError) as e:
        raise SRError(f"cannot write {output} ({e})") from e


def _draw(axes: Any, name: str, logs: dict[str, dict[str, tuple[list[int], list[float]]]]) -> None:
    for run, curves in logs.items():
        if name not in curves:
            continue
        steps, values = curves[name]
        group = 1 if name.startswith("val/") else -(-len(steps) // _MOST_POINTS)
        means = [sum(part) / len(part) for part in (values[i : i + group] for i in range(0, len(values), group))]
        axes.plot(steps[group - 1 :: group] + ([steps[-1]] if len(steps) % group else []), means, label=run)
    if name.startswith("val/"):
        axes.set_ylabel(f"{name.split('/')[1]}: PSNR_Y (dB)")
        axes.legend(fontsize="small")
    else:
        axes.set_ylabel(_PANELS[name])
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
